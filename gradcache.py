"""GradCache: the gradient of a huge batch in the memory of a small one.            Read 3 of 8.

The problem. A contrastive loss puts every sample of a batch into one softmax: each query is
compared with every document. Splitting the batch and accumulating gradients, which is exact for a
loss that is a sum over samples, here changes the negatives and so the loss itself. But keeping
the activations of the whole batch, which a plain backward needs, is what runs out of memory.

The way out (Gao, Zhang, Han and Callan 2021, arXiv 2101.06983). The samples meet only in the
loss, and the loss sees only their representations r_i. The chain rule therefore splits in two:

    dL/dtheta  =  sum_i  dL/dr_i  *  dr_i/dtheta
                         -------     -----------
                         couples     concerns sample i alone, so it can be
                         the batch   computed chunk by chunk and summed

    1) encode every chunk without a graph, remember the random state; keep only r   (N, D)
    2) one backward of the loss down to r: the *cache* dL/dr, same shape as r       (N, D)
    3) encode every chunk again, now with a graph and the same random state (so the same dropout),
       and push the cached gradient through it: backward of  <r, dL/dr>,  one chunk at a time

        queries               documents
        [c1]  [c2]  [c3]      [c1]  [c2]  [c3]       1) the activations of a chunk are freed
          |     |     |         |     |     |           before the next one is encoded
          r     r     r         r     r     r
          +-----+-----+----+----+-----+-----+        2) one loss over all of them;
                           L                            its backward stops at the r's
          +-----+-----+----+----+-----+-----+
          g     g     g         g     g     g           g = dL/dr, the cache
          |     |     |         |     |     |        3) again, one chunk at a time, with a graph:
        [c1]  [c2]  [c3]      [c1]  [c2]  [c3]          backward of <r, g> adds to theta.grad

To check by hand: samples x = (1, 2), encoder r = theta * x at theta = 3, and a loss that couples
them, L = r_1 * r_2 = 2 theta^2, so dL/dtheta = 4 theta = 12. In chunks of one: r = (3, 6); the
cache is dL/dr = (r_2, r_1) = (6, 3); the surrogates 6 * r_1 and 3 * r_2 add 6 * 1 and 3 * 2 to the
gradient: 12. No loss of the single chunks could have told chunk 1 that its factor is 6.

What it costs. Activations of one chunk instead of the batch, plus N*D numbers for r and as many
for its gradient. Counting a forward as 1 and a backward as 2, the full batch costs 3 and the
three steps cost 4. The last chunk of step 1 may as well keep its graph (`keep=1`): it is used
first in step 3 and freed before the next chunk is encoded, so with n chunks the price is 4 - 1/n
at the same peak memory. With `keep` >= n nothing is encoded twice: that *is* the plain step.

What it asks of an encoder. The same input and random state must give the same output: no
BatchNorm in train mode (its statistics couple the chunk; refused by name, but inside a plain
function it goes unseen), no hidden state that changes from call to call.
`metrics["replay_error"]` measures the latter on every step.

What goes with it, because step 2 is an ordinary backward and step 3 an ordinary accumulation: a
learnable temperature (it lives in the loss, so it gets its gradient once, not once per chunk), any
loss over representations, several towers, LoRA, activation checkpointing, mixed precision, gradient
accumulation over batches, and several processes, which only have to exchange representations in the
loss and add up `.grad` at the end (dist.py).

What it is not for. A loss that is a sum over samples (cross-entropy of a classifier or a language
model) is already exact under plain gradient accumulation, and cheaper.

Letters: N samples in a tower's batch, C samples in a chunk, D size of a representation.
"""
import copy
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


def grad_cache_step(encoders, batches, loss_fn, chunk_size, *, keep=1, grad_scale=1.0,
                    before_last_backward=None):
    """Accumulate into `.grad` exactly what `loss_fn(all representations).backward()` would.

    encoders    one callable per tower: encoder(samples) -> (C, ...) tensor, or a tuple of them. A
                module that serves two towers is simply given twice.
    batches     one batch per tower: a list of samples (anything), or a tensor / dict of tensors
                indexed along dimension 0; other entries of a dict reach the encoder unchanged.
                The encoder gets private copies: what it edits in place harms nobody.
    loss_fn     loss_fn(*representations) -> loss, or (loss, metrics). Sees the whole batch: per
                tower (N, ...), or a tuple where the encoder returns one, in float32 or wider;
                trailing lengths that differ between chunks (multi-vector) are zero-padded.
    chunk_size  samples per chunk, or a plan: for each tower a list of index lists, in any order and
                of any sizes, that hold every index of the tower's batch exactly once.
    keep        how many of the last chunks keep the graph of step 1 instead of being encoded again.
    grad_scale  multiplies the gradients, not the returned loss: 1/k when gradients accumulate over
                k batches, or the factor of a gradient scaler.
    before_last_backward   called without arguments just before the last chunk's turn in step 3: the
                place to switch the gradient synchronisation of an FSDP wrapper back on (of a DDP
                wrapper too, if that chunk is encoded again: DDP looks at its switch in forward).

    Returns (loss, metrics): the detached loss, and loss_fn's metrics plus "replay_error", the
    largest |replayed - cached| over all representations (a 0-dim tensor, so that no GPU waits).
    Gradients are accumulated; a tower whose representation needs no gradient is not encoded again.
    Under torch.no_grad() it only evaluates. Both passes run under the caller's autocast.
    Raises ValueError for an unusable chunk size, plan, batch or representation and for a BatchNorm
    in train mode, RuntimeError if the loss depends on nothing trainable.
    """
    check_arguments(encoders, batches, keep)
    learning = torch.is_grad_enabled()
    trainable = [has_trainable_weights(encoder) for encoder in encoders]    # None: it does not show
    chunks = [Chunk(tower, index) for tower, batch in enumerate(batches)
              for index in plan_of(tower, batch, chunk_size, len(batches))]
    # The graphs kept are those of the last chunks that may learn: they are the youngest in memory
    # when step 2 begins, and it is step 3's first act to use and free them. Which towers certainly
    # learn, and which certainly do not, their parameters tell.
    if learning and keep:
        for chunk in [c for c in chunks if trainable[c.tower] is not False][-keep:]:
            chunk.keep = True

    # 1) Encode everything, keep no graph (but the last). Only the representations survive.
    for chunk in chunks:
        chunk.random = RandContext()
        # A plain function hides its weights, and a frozen module may be given samples that need a
        # gradient: only the output tells. So both run with a graph, which is dropped at once.
        graph = learning and (chunk.keep or not trainable[chunk.tower])
        output = encode(chunk, encoders, batches, graph)
        chunk.needs_grad = learning and (not graph or any(r.requires_grad for r in parts(output)))
        # A copy, because a view such as hidden[:, 0] keeps all of `hidden` in memory.
        chunk.output = output if chunk.keep else map_parts(lambda r: r.detach().clone(), output)
        del output                                                  # or its graph outlives the turn
    reps = [assemble([c for c in chunks if c.tower == t]) for t in range(len(batches))]  # (N, D)
    for chunk in chunks:
        chunk.output = chunk.output if chunk.keep else None         # its rows are in reps now

    # 2) The loss couples all N samples, but it sees only the representations: this backward is
    #    cheap and stops at them. A learnable temperature gets its gradient here, and only here.
    result = loss_fn(*reps)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    metrics = {k: v.detach() if torch.is_tensor(v) else v for k, v in metrics.items()}
    metrics["replay_error"] = torch.zeros((), device=loss.device)
    if not learning:
        return loss.detach(), metrics
    if not loss.requires_grad:
        raise RuntimeError("the loss depends on nothing trainable: no representation needs a "
                           "gradient and loss_fn has no parameter that does")
    backward(loss * grad_scale)                                     # the cache: rep.grad, (N, D)

    # 3) Push the cache through the encoders, one chunk at a time. Kept graphs first, so that their
    #    memory is free before the first chunk is encoded again: same input, same dropout, a graph.
    todo = [c for c in chunks if c.needs_grad
            and any(rep.grad is not None for rep in parts(reps[c.tower]))]
    todo.sort(key=lambda chunk: not chunk.keep)
    for chunk in todo:
        if chunk is todo[-1] and before_last_backward is not None:
            before_last_backward()
        if not chunk.keep:
            with chunk.random:
                chunk.output = encode(chunk, encoders, batches, graph=True)
        surrogate, error = meet_cache(chunk, parts(reps[chunk.tower]))
        metrics["replay_error"] = torch.maximum(metrics["replay_error"], error.to(loss.device))
        if surrogate.requires_grad:                     # not so for a chunk that meets no weight
            backward(surrogate)
        chunk.output = surrogate = None                             # the graph dies here
    return loss.detach(), metrics


def plan_chunks(costs, chunk_size, max_cost=None, call_cost=None):
    """Group samples of similar cost, so that a chunk is not padded to the longest of the batch.

    costs       cost of each sample (text tokens plus image patches), any numbers >= 0
    chunk_size  most samples in a chunk
    max_cost    most *padded* cost of a chunk, samples x the largest cost among them (a token
                budget); a single sample above it gets a chunk of its own
    call_cost   what an encoder call costs whatever is in it, in the same unit: a chunk ends before
                its padding exceeds that. Default max_cost / 64; without a max_cost padding is no
                reason to end a chunk, and there are as few as chunk_size allows

    Returns index lists that hold every sample once, cheapest chunk first: the last chunk, whose
    graph `keep` saves from being computed twice, is then the most expensive. Equal costs keep
    their order, so the plan is the same on every run. Raises ValueError for an unusable chunk_size.
    """
    check_chunk_size(chunk_size)
    max_cost = float("inf") if max_cost is None else max_cost
    call_cost = max_cost / 64 if call_cost is None else call_cost
    # Packed from the dearest down, so that a chunk's first sample is its longest and tells what all
    # others in it are padded to, and what is left over at the end is a few of the cheapest. Padding
    # on until it costs more than the call it saves came within 3 % of the best cut on real lengths.
    chunks, longest, padding = [], 0, 0
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], -i)):
        padding += longest - costs[i]
        if (not chunks or len(chunks[-1]) == chunk_size or padding > call_cost
                or (len(chunks[-1]) + 1) * longest > max_cost):
            chunks.append([])
            longest, padding = costs[i], 0
        chunks[-1].append(i)
    return [chunk[::-1] for chunk in reversed(chunks)]


def compare_gradients(plain, chunked, parameters):
    """(cosine, norm ratio) of the gradients that two functions leave in `.grad`: a user's own test.

    plain, chunked   functions without arguments that accumulate into the `.grad` of `parameters`
    A cosine alone is no test: it cannot see a factor such as the number of chunks or processes.
    """
    grads = []
    for step in (plain, chunked):
        for p in parameters:
            p.grad = None
        step()
        grads.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None
                                else p.grad.flatten() for p in parameters]).double())
    cosine = torch.nn.functional.cosine_similarity(*grads, dim=0).item()
    return cosine, (grads[1].norm() / grads[0].norm()).item()


def graphs_that_fit(keep, resting, peak, limit, largest=0):
    """What `keep` may be where `limit` bytes fit: (that number, bytes of the largest graph).

    Measured on a step that kept `keep`: bytes in use at most and, resting, after it. All those
    graphs were alive together, so one takes (peak - resting) / keep of them on average, at most.
    `largest` is what the call before returned: the answer must hold for the longest batch so far.
    """
    largest = max(largest, (peak - resting) / keep)
    return max(1, int((limit - resting) // max(1, largest))), largest


class RandContext:
    """The random state of this moment: `with context:` runs its body from there again.

    Taken from torch's CPU generator and from every CUDA device, or only from `device` if one is
    named: what an encoder will draw from cannot be told from its input, which may be a string.
    Nor can whether it will draw: noise outlives eval(), and dropout of 0 draws nothing in train
    mode. So a state is always taken; that and its replay cost microseconds. (States live on the
    host; reading them neither waits for a GPU nor occupies it.) On leaving, the generators are put
    back as they were found, so a replay does not rewind anybody's dropout.
    """

    def __init__(self, device=None):
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.devices = range(torch.cuda.device_count()) if used else []
        if device is not None:
            device = torch.device(device)
            self.devices = [device] if device.type == "cuda" else []
        self.state = self.read()
        self.outside = []                                           # a stack: contexts may nest

    def read(self):
        return torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self.devices]

    def write(self, state):
        torch.set_rng_state(state[0])
        for device, cuda_state in zip(self.devices, state[1]):
            torch.cuda.set_rng_state(cuda_state, device)

    def __enter__(self):
        self.outside.append(self.read())
        self.write(self.state)

    def __exit__(self, *exception):
        self.write(self.outside.pop())


# --- The pieces of the step, in the order of their use -------------------------------------------

@dataclass
class Chunk:
    """What a chunk remembers between step 1 and step 3."""
    tower: int
    index: list                     # its rows in the tower's batch
    keep: bool = False              # its graph stays alive from step 1 on
    random: RandContext = None      # the random state before its first encoding
    needs_grad: bool = True
    output: object = None           # what the encoder returned; a detached copy unless kept


def check_arguments(encoders, batches, keep):
    """ValueError for what would otherwise fail later, or silently train something else."""
    if len(encoders) != len(batches):
        raise ValueError(f"each tower needs an encoder and a batch: got {len(encoders)} encoders "
                         f"and {len(batches)} batches (a module that serves two is given twice)")
    if not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep must be a whole number of chunks >= 0, got {keep!r}")


def has_trainable_weights(encoder):
    """True or False for a module, None where only the output shows it.

    That is a function, and a method of a trainable module, which may run under no_grad. The answer
    decides two things: a tower that certainly learns runs step 1 without any graph, and one that
    certainly does not leaves the privilege of keeping its graph to another.
    Raises ValueError for a BatchNorm in train mode, the one common layer that cannot be chunked.
    """
    module = getattr(encoder, "__self__", encoder)
    if not isinstance(module, nn.Module):
        return None
    for name, layer in module.named_modules():
        is_batchnorm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if is_batchnorm and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"layer '{name}' ({type(layer).__name__}) is in train mode (or keeps no running "
                "statistics): it would normalise by a chunk's statistics, not the batch's, and "
                "update them twice per step, so no chunked gradient can equal the full batch's. "
                "Put it in eval mode or use LayerNorm")
    trainable = any(p.requires_grad for p in module.parameters())
    return trainable if module is encoder or not trainable else None


def check_chunk_size(chunk_size):
    """Zero would loop for ever, -1 slice from the end, 2.5 fail deep inside, True pass as 1."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a whole number of samples >= 1, got {chunk_size!r}")


def plan_of(tower, batch, chunk_size, towers):
    """The index lists of one tower: cut every `chunk_size` samples, or the caller's, checked.

    The checks matter: an index that is missing from a plan would train on fewer samples, one that
    occurs twice would count twice, and neither would show in the loss.
    """
    if isinstance(batch, Mapping):
        sizes = {k: len(v) for k, v in batch.items() if torch.is_tensor(v) and v.dim() > 0}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"tower {tower}: a dict batch needs tensors of one length along "
                             f"dimension 0, got {sizes or 'no tensor'}")
        n = next(iter(sizes.values()))
    else:
        n = len(batch)
    if n == 0:
        raise ValueError(f"tower {tower}: the batch is empty")
    if not isinstance(chunk_size, (list, tuple)):
        check_chunk_size(chunk_size)
        return [list(range(i, min(i + chunk_size, n))) for i in range(0, n, chunk_size)]
    if len(chunk_size) != towers:
        raise ValueError(f"a plan needs one list of chunks per tower: {towers} towers, "
                         f"{len(chunk_size)} lists")
    try:
        plan = [[operator.index(i) for i in index] for index in chunk_size[tower]]
    except TypeError:
        raise ValueError(f"tower {tower}: a plan is a list of lists of sample numbers, "
                         f"got {chunk_size[tower]!r:.80}") from None
    times = Counter(i for index in plan for i in index)             # how often each index occurs
    if sorted(times) != list(range(n)) or times.total() != n or not all(plan):
        missing = [i for i in range(n) if i not in times][:5]
        wrong = sorted(i for i in times if times[i] > 1 or not 0 <= i < n)[:5]
        raise ValueError(f"tower {tower}: a plan holds every index of 0..{n - 1} exactly once and "
                         f"no empty chunk; missing {missing}, repeated or out of range {wrong}, "
                         f"empty chunks {sum(not index for index in plan)}")
    return plan


def encode(chunk, encoders, batches, graph):
    """Encode the samples of one chunk, with or without a graph; both passes go through here.

    That they do is what makes them equal: same copies of the samples, same autocast, same checks.
    """
    # Autocast keeps its half-precision copy of each weight until the caller's outermost block ends.
    # After an optimizer step inside of that block it is stale; older versions of torch also reuse
    # one made without a graph where a gradient is wanted.
    torch.clear_autocast_cache()
    with torch.set_grad_enabled(graph):
        output = encoders[chunk.tower](take(batches[chunk.tower], chunk.index))
    for r in parts(output):
        if not torch.is_tensor(r) or r.dim() == 0 or len(r) != len(chunk.index):
            got = tuple(r.shape) if torch.is_tensor(r) else type(r).__name__
            raise ValueError(f"tower {chunk.tower}: an encoder must return a tensor (or a tuple of "
                             f"them) with one row per sample: {len(chunk.index)} samples went in, "
                             f"{got} came out")
    return output


def take(batch, index):
    """The samples `index` of a batch, as copies that the encoder may edit.

    Poolings that cut a mask in place and models that pop a key from their input exist. Without the
    copies the second pass would see other samples than the first, and the gradient be wrong.
    """
    if torch.is_tensor(batch):
        return batch[index]                                         # indexing by a list copies
    if isinstance(batch, Mapping):
        samples = copy.copy(batch)                                  # keeps the type
        for key, value in batch.items():
            per_sample = torch.is_tensor(value) and value.dim() > 0
            samples[key] = value[index] if per_sample else private(value)
        return samples
    return [private(batch[i]) for i in index]


def private(value):
    """A copy of one sample: containers and tensors are rebuilt, anything else is deep-copied.

    Not one deepcopy for all: of a tensor that is a view it would copy everything behind the view.
    """
    if torch.is_tensor(value):                          # pinned: a copy to a GPU need not wait
        return value.clone().pin_memory() if value.is_pinned() else value.clone()
    if type(value) in (list, tuple):
        return type(value)(private(v) for v in value)
    if type(value) is dict:
        return {k: private(v) for k, v in value.items()}
    return copy.deepcopy(value)


def parts(output):
    """An encoder's output as a sequence, whether it returned one tensor or several."""
    return output if isinstance(output, (tuple, list)) else (output,)


def map_parts(function, output):
    """The same shape of output, with the function applied to each tensor."""
    return tuple(map(function, output)) if isinstance(output, (tuple, list)) else function(output)


def assemble(chunks):
    """A tower's representations in batch order: leaves (N, ...) that the loss differentiates.

    Leaves, so that the backward of the loss stops here and leaves the cache in `.grad`. In float32
    or wider even if the encoder is not: the cache is a sum over the whole batch, which half
    precision would round. Each chunk's rows go where its plan says; shorter ones end in zeros.
    """
    leaves = []
    members = [parts(chunk.output) for chunk in chunks]
    for outputs in zip(*members, strict=True):                      # one turn per tuple member
        dtype = outputs[0].dtype
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, torch.float32)
        # A shorter chunk's rows end in zeros: the loss can tell them from real tokens, and their
        # gradient is never read.
        longest = [max(sizes) for sizes in zip(*[r.shape[1:] for r in outputs])]
        leaf = outputs[0].new_zeros(sum(map(len, outputs)), *longest, dtype=dtype)
        with torch.no_grad():
            for chunk, r in zip(chunks, outputs):
                leaf[(chunk.index, *map(slice, r.shape[1:]))] = r.to(dtype)
        leaf.requires_grad_(dtype.is_floating_point and any(c.needs_grad for c in chunks))
        leaves.append(leaf)
    return tuple(leaves) if isinstance(chunks[0].output, (tuple, list)) else leaves[0]


def meet_cache(chunk, leaves):
    """(surrogate, error) of an encoded chunk: <r, dL/dr>, and the largest |r - its row in step 1|.

    The surrogate's value means nothing; its gradient with respect to theta is the chain rule of the
    module's docstring. It is summed in float32 or wider, like the cache. A member of a tuple that
    the loss did not use, or that needs no gradient, contributes nothing.
    """
    surrogate = error = leaves[0].new_zeros((), dtype=torch.float32)
    for r, leaf in zip(parts(chunk.output), leaves):
        # The loss may leave a member of the tuple unused, and a mask needs no gradient.
        if r.requires_grad and leaf.grad is not None:
            rows = (chunk.index, *map(slice, r.shape[1:]))          # this chunk's, padding cut
            error = torch.maximum(error, (r.detach() - leaf.detach()[rows]).abs().max().float())
            surrogate = surrogate + (r.to(leaf.dtype) * leaf.grad[rows]).sum()
    return surrogate, error


def backward(loss):
    """Backward outside autocast, of the loss in step 2 and of the surrogates in step 3.

    Autocast is meant for the forward. In the backward the half-precision layers do their work in
    half precision anyway, while the float32 products of a loss would be cast down.
    """
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()
