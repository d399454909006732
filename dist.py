"""Several processes: the same coupling, the same gradient.                          Read 5 of 8.

Each of W processes (one per GPU, started by torchrun) encodes its own N queries and their
documents. The loss couples all of them: every query is compared with every document of the job.

    1) gather_with_grad   all processes' documents on every process           (N*K, D) -> (M*K, D)
    2) loss of the rows of this process' own queries, as a sum, divided by M, the number of queries
       of the whole job: the M rows are computed once in all, not W times
    3) backward: a document's gradient arises on all processes, in the rows of everybody's queries.
       The backward of the gather sums it and hands each process its own part (reduce-scatter)
    4) GradCache's step 3 runs locally, then sync_gradients adds the parameter gradients up, once

Which factor of W? None. What each process holds after 3 is the part of dL/dtheta that flows through
its own samples, and L is already a mean over M. The sum in 4 completes the chain rule. (Dividing a
mean over local queries by nothing, then averaging instead of summing, gives the same gradient. The
often copied `loss * W`, then averaging, gives W times as much: the gradient of the *sum* of the
processes' means. AdamW hides that factor, clipping and SGD do not. Replacing the own slice of a
graphless gather needs a factor W with the loss of all rows, and points in the wrong direction with
the loss of the own rows: the other processes' rows are then missing from a document's gradient.)

Why no DistributedDataParallel. Its reducer fires an all-reduce from hooks during backward; under
GradCache there is a backward per chunk, so it would communicate once per chunk, and a chunk of text
queries skips the vision tower that a chunk of page images uses: processes then wait for different
parameters, for ever. One flat all-reduce after the last chunk is simpler and cheaper.

What it costs. Ring collectives, bytes sent per process and step (`communication_bytes`), for
D = 2048, K = 1, float32, and P = 35 M trainable numbers (a LoRA of rank 32 on a 2 B model), against
the matrix products of the step, 8 * 2e9 FLOP per token, 256 tokens per pair, at 4e14 FLOP/s:

        W    batch M    gather + reduce-scatter    all-reduce     compute    at 50 GB/s
        8      8,192           2 *    0.06 GB        0.25 GB       10.5 s       0.01 s
       64     65,536           2 *    0.53 GB        0.28 GB       10.5 s       0.03 s
     1024  1,048,576           2 *    8.58 GB        0.28 GB       10.5 s       0.35 s

The number of collectives per step is fixed by the model's size, never by chunks or modalities, so
processes with uneven work cannot wait for each other in different places.

What it does not do: tensor or pipeline parallelism. `shard` (FSDP2) splits a model too big for
one device. This is the only file that names torch.distributed.

Letters: n_r samples of process r, N queries of this one, M queries of all, K documents per query,
D embedding size, W processes, P trainable numbers.
"""
import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

BUCKET_BYTES = 64 * 2**20                       # largest flat tensor that one all-reduce is given


def setup(timeout_minutes=30):
    """Join the job if torchrun started this process; return this process' device.

    Reads RANK, WORLD_SIZE and LOCAL_RANK. Without them there is one process and nothing to join. A
    collective that waits longer than the timeout raises, so that a dead peer cannot hang the job.
    """
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        td.init_process_group("nccl" if cuda else "gloo",
                              timeout=timedelta(minutes=timeout_minutes))
    return device


def cleanup():
    if td.is_initialized():
        td.destroy_process_group()


def rank():
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

def gather_with_grad(x):
    """All processes' rows in order of rank, differentiable.

    x: tensor (n_r, ...), or a tuple of tensors. n_r may differ between processes, and so may
    trailing lengths (multi-vector), which are zero-padded to the longest. Returns (sum n_r, ...).
    The backward sums the gradient over processes and returns this process' part. Any dtype is
    gathered; integers and booleans have no gradient. One process: x itself.
    """
    if isinstance(x, (tuple, list)):
        return tuple(gather_with_grad(part) for part in x)
    return x if world_size() == 1 else Gather.apply(x)


class Gather(torch.autograd.Function):
    """Pad to the largest shape, all-gather, trim. Backward: pad, reduce-scatter the sum, trim."""

    @staticmethod
    def forward(ctx, x):
        shape = torch.tensor(x.shape, device=x.device)
        shapes = [torch.empty_like(shape) for _ in range(world_size())]
        td.all_gather(shapes, shape)                                 # sizes, once: a few bytes
        shapes = torch.stack(shapes).tolist()                        # (W, dims); the GPU waits here
        ctx.shape, ctx.dtype, ctx.rows = x.shape, x.dtype, [s[0] for s in shapes]
        ctx.padded = [max(sizes) for sizes in zip(*shapes)]
        own = pad(x, ctx.padded)
        gathered = [torch.empty_like(own) for _ in range(world_size())]
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
        return own[tuple(map(slice, ctx.shape))].to(ctx.dtype)


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
    counts as zero; one that has none on any stays None. Flat buckets of at most `bucket_bytes` (a
    larger tensor is a bucket of its own) keep the number of collectives at 1 + P / bucket.
    Parameters sharded by `shard` are skipped: FSDP has already summed them.
    """
    parameters = [p for p in parameters if p.requires_grad and not is_sharded(p)]
    if world_size() == 1 or not parameters:
        return
    # Every process must issue the same collectives, so they first agree on who takes part.
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32,
                        device=parameters[0].device)
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
    """Consecutive tensors of one dtype and device, at most bucket_bytes together."""
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
    """Bytes that each process sends per step with ring collectives: gather of the documents, its
    backward, and the gradient sum. N local queries, K documents each, P trainable numbers."""
    documents = (W - 1) * N * K * D * itemsize
    return {"gather": documents, "reduce_scatter": documents,
            "all_reduce": 2 * (W - 1) * P * itemsize // W}


# --- A model too big for one device --------------------------------------------------------------

def shard(root, layers):
    """FSDP2: split the weights of `layers` (transformer blocks) and of `root`, which contains them,
    over the processes; each is gathered just before its use. In place.

    Gradients are summed (not averaged), and only where `sync_sharded(root, True)` was called before
    the backward: GradCache does so before its last one. Every forward and backward is a collective
    now, so all processes must run equally many chunks.
    """
    for layer in layers:
        fully_shard(layer)
    fully_shard(root)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def sync_sharded(root, on):
    root.set_requires_gradient_sync(on)


def is_sharded(tensor):
    return isinstance(tensor, DTensor)


def whole(tensor):
    """The full tensor behind a sharded one (a collective); any other tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like(full, tensor):
    """The part of a full tensor that this process holds of a sharded one; or the tensor itself."""
    if not is_sharded(tensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements)


# --- Staying equal -------------------------------------------------------------------------------

def broadcast_parameters(module):
    """Every process takes over process 0's parameters and buffers (call it once, at the start)."""
    if world_size() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            td.broadcast(tensor.data, src=0)


def check_equal_parameters(module):
    """Raise RuntimeError on every process, naming the parameter, if any differs by one bit.

    Compares an exact integer sum of the raw bits of each parameter: one small collective.
    """
    named = [(name, p) for name, p in module.named_parameters() if not is_sharded(p)]
    if world_size() == 1 or not named:
        return
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    own = torch.stack([p.detach().contiguous().view(view[p.element_size()]).sum(dtype=torch.int64)
                       for _, p in named])                           # (parameters,)
    low, high = own.clone(), own.clone()
    td.all_reduce(low, td.ReduceOp.MIN)
    td.all_reduce(high, td.ReduceOp.MAX)
    wrong = [name for (name, _), differs in zip(named, (low != high).tolist()) if differs]
    if wrong:
        raise RuntimeError(f"{len(wrong)} parameters differ between processes, first '{wrong[0]}': "
                           f"some gradient was not synchronised, or some process started otherwise")


# --- Small agreements ----------------------------------------------------------------------------

def collective_device():
    """Where collectives of this job want their tensors."""
    nccl = td.is_initialized() and td.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def reduce_numbers(values, op="sum"):
    """A list of numbers -> the list of their sums (or op "max") over all processes, as floats."""
    if world_size() == 1:
        return [float(v) for v in values]
    numbers = torch.tensor([float(v) for v in values], dtype=torch.float64,
                           device=collective_device())
    td.all_reduce(numbers, td.ReduceOp.MAX if op == "max" else td.ReduceOp.SUM)
    return numbers.tolist()


def any_process(flag):
    """True on every process if it is true on one: the way to decide anything together."""
    return reduce_numbers([bool(flag)], "max")[0] > 0


def gather_objects(value):
    """Every process' (small, picklable) value, as a list in order of rank, on every process."""
    values = [None] * world_size()
    if world_size() == 1:
        return [value]
    td.all_gather_object(values, value)
    return values


def barrier():
    if world_size() > 1:
        td.barrier()
