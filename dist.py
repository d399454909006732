"""Several processes: the same coupling, the same gradient.                          Read 5 of 8.

Each of W processes (one per GPU, started by torchrun) encodes its own N queries and their
documents. The loss couples all of them: every query is compared with every document of the job.

    1) gather_with_grad   all processes' documents on every process           (N*K, D) -> (M*K, D)
    2) loss of the rows of this process' own queries, as a sum, divided by M, the number of queries
       of the whole job: the M rows are computed once in all, not W times
    3) backward: a document's gradient arises on all processes, in the rows of everybody's queries.
       The backward of the gather sums it and hands each process its own part (reduce-scatter)
    4) GradCache's step 3 runs locally, then sync_gradients adds the parameter gradients up, once

On every process of a training loop (`torchrun --nproc_per_node=2 train.py --batch-size 8` trains
what one process trains with --batch-size 16):

    M, first = sum(sizes(N)), sum(sizes(len(documents))[:rank()])       # first: of the own columns

    def loss_fn(q, d):
        d = gather_with_grad(d)
        return info_nce(q, d, scale, positives + first, reduction="sum") / M

    grad_cache_step(encoders, batches, loss_fn, chunk_size)
    sync_gradients(parameters)                                          # then clip, then step

Which factor of W? None. What each process holds after 3 is the part of dL/dtheta that flows through
its own samples, and L is already a mean over M. The sum in 4 completes the chain rule. Other
pairings of gather and loss are common; each ends with this multiple of dL/dtheta (N equal
everywhere):

        gather             loss of one process        gradients summed    averaged
        with gradient      own rows, sum / M                  1               1/W    this file
        with gradient      own rows, mean                     W                1
        with gradient      own rows, mean * W                W^2               W     often copied
        with gradient      all rows, mean                     W                1
        own part only      all rows, mean                     1               1/W   temperature: * W
        own part only      own rows, mean            another direction: what the other processes'
                                                     queries do to a document is missing

A mean over own rows, averaged, weighs processes instead of queries when N differs. With own parts,
every process finds the temperature's whole gradient, and W of them are added up. AdamW hides a
wrong factor; clipping and SGD do not, and no cosine shows it.

Why no DistributedDataParallel. Its reducer fires an all-reduce from hooks during backward; under
GradCache there is a backward per chunk, so it would communicate once per chunk, and a chunk of text
queries skips the vision tower that a chunk of page images uses: processes then wait for different
parameters, for ever. One flat all-reduce after the last chunk is simpler and cheaper.

What it costs. Ring collectives, bytes sent per process and step (`communication_bytes`), for
D = 2048, K = 1, float32, and P = 35 M trainable numbers (a LoRA of rank 32 on a 2 B model), against
the matrix products of the step at 4e14 FLOP/s: 256 tokens per pair, 6 * 2e9 FLOP per token (two
forwards and the backward through frozen weights, 2 each):

        W    batch M    gather + reduce-scatter    all-reduce     compute    at 50 GB/s
        8      8,192           2 *    0.06 GB        0.25 GB        7.9 s       0.01 s
       64     65,536           2 *    0.53 GB        0.28 GB        7.9 s       0.03 s
     1024  1,048,576           2 *    8.58 GB        0.28 GB        7.9 s       0.35 s

In memory, every process holds the documents of all, M*K*D numbers (8.6 GB in the last row), and in
the backward twice more: their gradient, and its parts on their way out.

The number of collectives per step is fixed by the model's size, never by chunks or modalities, so
processes with uneven work cannot wait for each other in different places (`shard` alone asks for
equally many chunks).

What it does not do: tensor or pipeline parallelism. `shard` (FSDP2) splits a model too big for
one device. This is the only file that names torch.distributed.

Letters: n_r samples of process r, N queries of this one, M queries of all, K documents per query,
D embedding size, W processes, P trainable numbers.
"""
import os
import resource
from datetime import timedelta

import torch
import torch.distributed as td
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

BUCKET_BYTES = 64 * 2**20                       # largest flat tensor that one all-reduce is given


def setup(timeout_minutes=30):
    """Join the job if torchrun started this process; return this process' device.

    Reads RANK, WORLD_SIZE and LOCAL_RANK. Without them there is one process and nothing to join. A
    collective that waits longer than the timeout ends the process, and torchrun then ends the job.
    Raises RuntimeError if this machine has fewer GPUs than processes.
    """
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local >= torch.cuda.device_count():
        raise RuntimeError(f"process {local} of this machine needs a GPU of its own, and there are "
                           f"only {torch.cuda.device_count()}: lower --nproc_per_node")
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        td.init_process_group("nccl" if cuda else "gloo",
                              timeout=timedelta(minutes=timeout_minutes))
    return device


def cleanup():
    """Leave the job. The last thing a process does if all went well; a failing one just ends."""
    if td.is_initialized():
        td.destroy_process_group()


def rank():
    """The number of this process, 0 .. W - 1."""
    return td.get_rank() if td.is_initialized() else 0


def world_size():
    return td.get_world_size() if td.is_initialized() else 1


def is_main():
    return rank() == 0


def print0(*args, **kwargs):
    """Print on process 0 only."""
    if is_main():
        print(*args, **kwargs, flush=True)


# --- In the loss ---------------------------------------------------------------------------------
# From here on nearly everything is a collective: a call that returns only when all processes have
# made it. Every process makes the same calls in the same order, whatever its data look like.

def gather_with_grad(x):
    """All processes' rows in order of rank, differentiable.

    x: tensor (n_r, ...), or a tuple of tensors. n_r may differ between processes, and so may
    trailing lengths (multi-vector), which are zero-padded to the longest. Returns (sum n_r, ...).
    The backward sums the gradient over processes and returns this process' part. Any dtype is
    gathered; integers and booleans have no gradient. One process: x itself.
    """
    if isinstance(x, (tuple, list)):
        return tuple(gather_with_grad(part) for part in x)
    if world_size() == 1:
        return x
    # Once, a few bytes: the shapes, and who needs a gradient. If one process does, the backward is
    # a collective, which a process with nothing but frozen weights must not miss.
    learns = x.requires_grad and torch.is_grad_enabled()
    own = torch.tensor([*x.shape, learns], dtype=torch.int64, device=x.device)
    every = [torch.empty_like(own) for _ in range(world_size())]
    td.all_gather(every, own)
    *shapes, learn = zip(*torch.stack(every).tolist())               # the GPU waits here
    if any(learn) and not learns:
        x = x.detach().requires_grad_()
    return Gather.apply(x, shapes)


class Gather(torch.autograd.Function):
    """Pad to the largest shape, all-gather, trim. Backward: pad, reduce-scatter the sum, trim.

    shapes: for each dimension of x, its size on every process.
    """

    @staticmethod
    def forward(ctx, x, shapes):
        ctx.shape, ctx.dtype, ctx.rows = x.shape, x.dtype, shapes[0]
        ctx.padded = [max(sizes) for sizes in shapes]
        own = pad(x, ctx.padded)
        gathered = [torch.empty_like(own) for _ in ctx.rows]
        td.all_gather(gathered, own)
        return torch.cat([part[:n] for part, n in zip(gathered, ctx.rows)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # Sum in float32 or wider. `pad` also makes the parts contiguous: the gradient of a
        # transpose is not, and gloo reads such memory in the wrong order without complaint.
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        parts = [pad(part, ctx.padded) for part in grad.split(ctx.rows)]
        own = torch.empty_like(parts[0])
        td.reduce_scatter(own, parts)                                # sum over processes, own rows
        return own[tuple(map(slice, ctx.shape))].to(ctx.dtype), None


def pad(x, shape):
    """x in the corner of a new, contiguous, zero-filled tensor of that shape."""
    out = x.new_zeros(shape)
    out[tuple(map(slice, x.shape))] = x.detach()
    return out


def sizes(n):
    """The number n of every process, in order of rank: a list of W ints."""
    return gather_with_grad(torch.tensor([n], device=collective_device())).tolist()


# --- After the last chunk ------------------------------------------------------------------------

def sync_gradients(parameters, bucket_bytes=BUCKET_BYTES):
    """Sum the gradients over all processes: afterwards every process holds the same ones.

    parameters: the same ones in the same order everywhere. One that has no gradient on this process
    counts as zero; one that has none on any stays None; one that is listed twice (towers that share
    weights) is summed once. The tensors travel in flat buckets of at most `bucket_bytes` (a larger
    one alone), so there are about 1 + P / bucket collectives, and one bucket of extra memory.
    They are added in their own dtype: keep trainable weights in float32. Parameters sharded by
    `shard` are skipped: FSDP has already summed them.
    """
    parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad and not is_sharded(p)]
    if world_size() == 1 or not parameters:
        return
    # Every process must issue the same collectives, so they first agree on who takes part: here
    # perhaps only texts ran, elsewhere the vision tower did.
    used = torch.tensor([p.grad is not None for p in parameters], device=collective_device()).int()
    td.all_reduce(used, td.ReduceOp.MAX)
    parameters = [p for p, u in zip(parameters, used.tolist()) if u]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in buckets([p.grad for p in parameters], bucket_bytes):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        td.all_reduce(flat)                                          # sum
        for g, summed in zip(bucket, flat.split([g.numel() for g in bucket])):
            g.copy_(summed.view_as(g))


def buckets(tensors, bucket_bytes):
    """Consecutive tensors of one dtype and device, at most bucket_bytes together.

    Hundreds of small matrices (a LoRA has them) summed one by one would cost mostly latency; all of
    them in one flat copy, for a model trained in full, as much memory again as the gradients.
    """
    groups = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    for group in groups.values():
        bucket, size = [], 0
        for t in group:
            if bucket and size + t.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(t)
            size += t.nbytes
        yield bucket


def communication_bytes(N, K, D, P, W, itemsize=4):
    """Bytes that each process sends per step: gather of the documents, its backward, gradient sum.

    N local queries, K documents each, P trainable numbers. In a ring, a gather takes W - 1 rounds
    in which each process passes on one process' part; a reduce-scatter is the same with partial
    sums in the other direction. An all-reduce is one after the other, on parts of P / W numbers.
    """
    documents = (W - 1) * N * K * D * itemsize
    return {"gather": documents, "reduce_scatter": documents,
            "all_reduce": 2 * (W - 1) * P * itemsize // W}


# --- A model too big for one device --------------------------------------------------------------

def shard(root, layers):
    """FSDP2: split the weights of `layers` (transformer blocks) and of `root`, which contains them,
    over the processes; each is gathered just before its use. In place; nothing on one process.

    Gradients are summed (not averaged), and only where `sync_sharded(root, True)` was called before
    the backward: step.py does so before GradCache's last. Until then each process holds the whole
    gradients of the trainable weights. Every forward and backward is a collective now:
    - all processes run equally many chunks, see `equal_chunks`;
    - `layers` are blocks that every chunk runs through. What only images use (a vision tower)
      stays with the root, whose weights are gathered in any case.
    Each process contributes its part of its *own* values: call `broadcast_parameters` before. A
    weight that no process used has a gradient of zeros, not None, so AdamW's momentum moves it on.
    """
    if world_size() == 1:
        return
    for module in (*layers, root):
        fully_shard(module, reshard_after_forward=True)     # outside a forward, all stays sharded
        module.set_gradient_divide_factor(1.0)              # a sum, where FSDP would average
        module.set_force_sum_reduction_for_comms(True)      # gloo has no "scale, then sum"
    for layer in layers:
        layer.register_forward_pre_hook(with_gradient, prepend=True)
    root.set_reduce_scatter_unused_params(True)             # no images here: send zeros for them


def with_gradient(layer, args):
    """Let a block's input ask for a gradient even where everything before it is frozen.

    FSDP reduces a block when its input's gradient arrives, or else after all the others. With a
    frozen embedding beside a trainable vision tower, the first block's turn would thus depend on
    whether the chunk holds an image, and processes would add up gradients of different blocks.
    """
    if torch.is_grad_enabled():
        return tuple(x.detach().requires_grad_() if torch.is_tensor(x) and x.is_floating_point()
                     and not x.requires_grad else x for x in args)


def sync_sharded(root, on):
    """Whether the following backwards sum the gradients of a sharded model over processes."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(on)


def equal_chunks(plan):
    """A tower's plan (index lists), its largest chunks halved until all processes have as many.

    Raises RuntimeError on a process that has fewer samples than another has chunks.
    """
    plan, most = [list(chunk) for chunk in plan], max(sizes(len(plan)))
    if sum(map(len, plan)) < most:
        raise RuntimeError(f"process {rank()} has {sum(map(len, plan))} samples, fewer than the "
                           f"{most} chunks of another process: raise --grad-cache-chunk")
    while len(plan) < most:
        i = max(range(len(plan)), key=lambda i: len(plan[i]))
        half = len(plan[i]) // 2
        plan[i:i + 1] = [plan[i][:half], plan[i][half:]]
    return plan


def is_sharded(tensor):
    """Does this process hold only its part of this tensor?"""
    return isinstance(tensor, DTensor)


def whole(tensor):
    """The full tensor behind a sharded one (a collective); any other tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_on_main(tensors):
    """{name: tensor} -> {name: full tensor in host memory} on process 0, {} on the others, all of
    which take part. One at a time: together they may fit no GPU, nor W times into the host."""
    full = ((name, whole(tensor.detach())) for name, tensor in tensors.items())
    return {name: tensor.cpu() for name, tensor in full if is_main()}


def like(full, tensor):
    """The part of `full` that this process holds of a sharded tensor (for loading), else `full`."""
    return (distribute_tensor(full, tensor.device_mesh, tensor.placements)
            if is_sharded(tensor) else full)


def whole_state(optimizer):
    """The optimizer's state_dict as one process would hold it, on process 0. All take part."""
    state = optimizer.state_dict()
    return {**state, "state": {i: whole_on_main(s) for i, s in state["state"].items()}}


def load_whole_state(optimizer, state):
    """Load what whole_state returned; of sharded moments each process takes its part."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {i: {k: like(v, parameters[i]) if v.shape == parameters[i].shape else v
                   for k, v in s.items()} for i, s in state["state"].items()}
    optimizer.load_state_dict({**state, "state": moments})


# --- Staying equal -------------------------------------------------------------------------------
# Equal weights plus equal gradients stay equal weights: the optimizer runs on each process alone.

def broadcast_parameters(module):
    """Every process takes over process 0's parameters and buffers. Call it once, at the start.

    The module may still be in host memory: its tensors visit the GPU one by one. Raises
    RuntimeError for a sharded model, where it would be too late.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(map(is_sharded, tensors)):
        raise RuntimeError("call broadcast_parameters before shard: each process has already kept "
                           "its part of its own, possibly different, values")
    if world_size() > 1:
        for tensor in tensors:
            td.broadcast(visitor := tensor.data.to(collective_device()), src=0)
            tensor.data.copy_(visitor)


def check_equal_parameters(module):
    """Raise RuntimeError on every process, naming the parameter, if any differs by one bit.

    Compares a 64-bit checksum of each parameter: two small collectives. Sharded ones are skipped.
    Worth calling at every evaluation: processes that have drifted apart show no other symptom than
    a model that is worse than it should be.
    """
    named = [(name, p) for name, p in module.named_parameters() if not is_sharded(p)]
    if world_size() == 1 or not named:
        return
    own = torch.stack([checksum(p.detach()) for _, p in named])      # (parameters,)
    every = gather_with_grad(own[None])                              # (W, parameters)
    wrong = [name for (name, _), d in zip(named, (every != own).any(0).tolist()) if d]
    if wrong:
        raise RuntimeError(f"{len(wrong)} parameters differ between processes, first '{wrong[0]}': "
                           f"some gradient was not synchronised, or some process started otherwise")


def checksum(tensor, block=2**20):
    """The raw bits as integers, times 1, 3, 5, ..., summed modulo 2^64; in blocks, to save memory.

    An odd factor can be divided away modulo 2^64, so one changed element always shows; the factors
    differ, so two swapped ones do too. A plain sum would miss the second.
    """
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.reshape(-1).view(integer)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, part in zip(range(0, len(bits), block), bits.split(block)):
        odd = 2 * torch.arange(start, start + len(part), device=tensor.device) + 1
        total += (part * odd).sum()
    return total


# --- Small agreements ----------------------------------------------------------------------------

def collective_device():
    """Where collectives of this job want their tensors."""
    nccl = td.is_initialized() and td.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def reduce_numbers(values, op="sum"):
    """A list of numbers -> the list of their sums (or op "max") over all processes, as floats."""
    if world_size() == 1:
        return [float(v) for v in values]
    numbers = torch.tensor([*map(float, values)], dtype=torch.float64, device=collective_device())
    td.all_reduce(numbers, td.ReduceOp.MAX if op == "max" else td.ReduceOp.SUM)
    return numbers.tolist()


def any_process(flag):
    """True on every process if it is true on one.

    The way to decide anything that changes what comes next (stop, skip a step, save): a process
    that decides alone leaves the others waiting in a collective that it never makes.
    """
    return reduce_numbers([bool(flag)], "max")[0] > 0


def gather_objects(value):
    """Every process' (small, picklable) value, as a list in order of rank, on every process."""
    values = [value] * world_size()
    if world_size() > 1:
        td.all_gather_object(values, value)
    return values


def barrier():
    """Wait until every process is here, say until process 0 has written a file."""
    if world_size() > 1:
        td.barrier()


def peak_memory_mb():
    """MB this process took so far: of the GPU by torch, without one of the whole process."""
    return (torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available()
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
