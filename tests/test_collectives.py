"""What travels between processes, and how often: gather, gradient sum, agreement, bytes.

Expected values are worked by hand or computed in one process from all processes' inputs.
"""
import re

import pytest
import torch
import torch.distributed as td
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dist
from gradcache import grad_cache_step
from losses import LogitScale, info_nce
from tests.processes import run
from tests.test_dist import SEED, Case, accumulate, build, own_rows


class Collectives(TorchDispatchMode):
    """Every collective below this `with`, whoever calls it: its name and the bytes handed to it."""

    def __init__(self):
        super().__init__()
        self.names, self.bytes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.names.append(function.__name__.split(".")[0].strip("_"))
            self.bytes.append(max(size(a) for a in args))       # the larger of input and output
        return function(*args, **(kwargs or {}))


def size(argument):
    """Bytes of a tensor, or of the tensors in nested lists."""
    if isinstance(argument, (list, tuple)):
        return sum(map(size, argument))
    return argument.nbytes if torch.is_tensor(argument) else 0


# --- gather_with_grad ----------------------------------------------------------------------------

def part(r, *shape, dtype=torch.float64):
    """Rows of process r: 0, 1, 2, ... plus 100 r."""
    return (torch.arange(torch.Size(shape).numel()).view(shape) + 100 * r).to(dtype)


def gather_rows(rows, dtype):
    return dist.gather_with_grad(part(dist.rank(), rows[dist.rank()], 3, dtype=dtype))


@pytest.mark.parametrize("rows", [(2, 2), (3, 1), (1, 4, 2), (2, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_gather_is_the_concatenation_in_order_of_rank(rows, dtype):
    expected = torch.cat([part(r, n, 3, dtype=dtype) for r, n in enumerate(rows)])
    for gathered in run(len(rows), gather_rows, rows, dtype):
        assert gathered.dtype == dtype and torch.equal(gathered, expected)


def weighted_gather(rows, weight, how):
    """Gradient of this process' x when process r's loss is (r + 1) * sum(gathered * weight)."""
    r = dist.rank()
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float64
    x = part(r, rows[r], 3, dtype=dtype).requires_grad_()
    gathered = dist.gather_with_grad(x)                                         # (sum n_r, 3)
    if how == "transposed":
        loss = (gathered.t() * weight.t().contiguous()).sum()
    elif how == "einsum":
        loss = torch.einsum("nd,nd->", gathered, weight)
    elif how == "sum":                                          # its gradient is an expanded number
        loss = gathered.sum()
    else:
        loss = (gathered.double() * weight).sum()
    (loss * (r + 1)).backward()
    return x.grad


@pytest.mark.parametrize("rows", [(2, 2), (3, 1), (2, 0), (1, 3, 2)])
@pytest.mark.parametrize("how", ["plain", "transposed", "einsum", "sum", "bfloat16"])
def test_gather_returns_the_gradient_summed_over_processes(rows, how):
    world_size, m = len(rows), sum(rows)
    weight = part(0, m, 3)
    scale = sum(r + 1 for r in range(world_size))
    expected = (torch.ones(m, 3).double() if how == "sum" else weight) * scale  # small integers
    for r, grad in enumerate(run(world_size, weighted_gather, rows, weight, how)):
        start = sum(rows[:r])
        assert grad.shape == (rows[r], 3) and grad.isfinite().all()
        assert torch.equal(grad.double(), expected[start:start + rows[r]])


def gather_of_half_precision(large):
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    dist.gather_with_grad(x).sum().mul(256 if dist.rank() == large else 1).backward()
    return x.grad.item()


def test_half_precision_gradients_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16: added up in the wrong order, 256, 1, 1 and 1 would stay 256."""
    exact = torch.tensor(259.0).bfloat16().item()
    for large in range(4):
        assert run(4, gather_of_half_precision, large) == [exact] * 4


def gather_of_sum():
    x = torch.ones(1, requires_grad=True)
    dist.gather_with_grad(x).sum().backward()
    return x.grad.item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradient_of_the_sum_of_a_gather_is_the_number_of_processes(world_size):
    assert run(world_size, gather_of_sum) == [world_size] * world_size


def library_gather(weight):
    from torch.distributed.nn import all_gather
    x = part(dist.rank(), 2, 3).requires_grad_()
    (torch.cat(all_gather(x)).t() * weight.t().contiguous()).sum().backward()
    return x.grad


def test_the_library_gather_scrambles_a_transposed_gradient_on_gloo_which_is_why_ours_exists():
    weight = part(0, 4, 3)
    grads = run(2, library_gather, weight)
    if torch.equal(torch.cat(grads), 2 * weight):
        pytest.skip("torch.distributed.nn.all_gather is right on this version of torch")
    assert torch.equal(torch.cat(grads).flatten().sort().values, 2 * weight.flatten())  # scrambled


def gather_multi_vector():
    r = dist.rank()
    x = part(r, 2, 1 + 2 * r, 3).requires_grad_()               # 1 or 3 vectors per sample
    mask = torch.ones(2, 1 + 2 * r, dtype=torch.bool)
    vectors, mask = dist.gather_with_grad((x, mask))
    (vectors * vectors).sum().backward()
    return vectors.detach(), mask, x.grad


def test_a_tuple_with_trailing_lengths_that_differ_is_padded_with_zeros():
    vectors, mask = torch.zeros(4, 3, 3).double(), torch.zeros(4, 3, dtype=torch.bool)
    vectors[:2, :1], mask[:2, :1] = part(0, 2, 1, 3), True
    vectors[2:], mask[2:] = part(1, 2, 3, 3), True
    for r, (got, got_mask, grad) in enumerate(run(2, gather_multi_vector)):
        assert torch.equal(got, vectors) and torch.equal(got_mask, mask)
        assert torch.equal(grad, 2 * 2 * part(r, 2, 1 + 2 * r, 3))


def gather_where_one_is_frozen():
    x = part(dist.rank(), 2, 3)
    own = x.clone().requires_grad_(dist.rank() == 1)
    (dist.gather_with_grad(own) * (dist.rank() + 1)).sum().backward()
    with torch.no_grad():
        assert not dist.gather_with_grad(own).requires_grad
    return own.grad


def test_a_process_whose_rows_need_no_gradient_still_takes_part_in_the_backward():
    frozen, learning = run(2, gather_where_one_is_frozen, timeout=10)
    assert frozen is None and torch.equal(learning, torch.full((2, 3), 3.0).double())


def test_one_process_gathers_by_returning_its_rows():
    x = torch.ones(2, 3, requires_grad=True)
    assert dist.gather_with_grad(x) is x and dist.sizes(5) == [5]


# --- sync_gradients ------------------------------------------------------------------------------

def sync_what_only_one_process_used():
    vis, txt, unused, frozen = (nn.Parameter(torch.zeros(n)) for n in (3, 2, 4, 5))
    frozen.requires_grad_(False)
    loss = (2 * txt).sum()
    if dist.rank() == 1:
        loss = loss + (4 * vis).sum()
    (loss / 2).backward()                                       # a mean over two processes
    assert (vis.grad is None) == (dist.rank() == 0)
    dist.sync_gradients([vis, txt, unused, frozen])
    return vis.grad, txt.grad, unused.grad, frozen.grad


def test_no_gradient_here_counts_as_zero_and_no_gradient_anywhere_stays_none():
    for vis, txt, unused, frozen in run(2, sync_what_only_one_process_used, timeout=10):
        assert vis.tolist() == [2, 2, 2] and txt.tolist() == [2, 2]
        assert unused is None and frozen is None


def sync_in_buckets(bucket_bytes):
    sizes = (3, 5, 40, 1, 2, 7)                                 # the third exceeds 64 bytes
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    parameters.insert(2, nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)))
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, i + 10 * dist.rank())
    parameters[3].grad = parameters[3].grad.view(8, 5).t().reshape(-1)      # any layout in memory
    with Collectives() as calls:
        dist.sync_gradients(iter([*parameters, parameters[0]]), bucket_bytes)
    return [p.grad for p in parameters], calls.names, calls.bytes


@pytest.mark.parametrize("bucket_bytes, buckets", [
    (dist.BUCKET_BYTES, [58 * 4, 32]), (64, [32, 160, 40, 32]), (1, [12, 20, 160, 4, 8, 28, 32])])
def test_gradients_are_summed_in_buckets_of_bounded_size_and_in_order(bucket_bytes, buckets):
    for grads, names, sent in run(2, sync_in_buckets, bucket_bytes):
        assert all(torch.equal(g, torch.full_like(g, 2 * i + 10)) for i, g in enumerate(grads))
        assert names == ["allreduce"] * (1 + len(buckets)) and sent[1:] == buckets
        assert sent[0] == 7 * 4                                 # who has a gradient: an int each


# --- How many, and how large ---------------------------------------------------------------------

def collectives_of_a_step(case):
    """Names of the collectives of one step, in order."""
    model = build(case)
    torch.manual_seed(SEED + dist.rank())
    with Collectives() as calls:
        accumulate(model, own_rows(case, dist.rank(), 0), case)
        dist.sync_gradients(model.parameters())
    return calls.names


def test_collectives_per_step_depend_neither_on_chunks_nor_kept_graphs_nor_modality():
    cases = [Case(chunk=c, keep=k) for c in (1, 2, 6) for k in (0, 1, 100)]
    cases += [Case(modality=m, negatives=(2, 0)) for m in ("mixed", "halves", "swapped")]
    cases += [Case((8, 4), chunk=1), Case(dropout=0.3)]
    for case in cases:
        assert run(2, collectives_of_a_step, case) == [[
            "allgather", "allgather",                           # sizes of the queries, then
            "allgather", "allgather",                           # of the documents: shape, content
            "allgather", "allgather",                           # ids
            "allgather", "allgather", "reduce_scatter",         # documents, and back
            "allreduce", "allreduce"]] * 2, case                # who has a gradient, the gradients


def uneven_chunks(chunks):
    """One step in which this process encodes chunks[rank] chunks per tower."""
    case = Case((6, 6))
    model = build(case)
    plan = [list(range(i, min(i + 6 // chunks[dist.rank()], 6)))
            for i in range(0, 6, 6 // chunks[dist.rank()])]
    rows = own_rows(case, dist.rank(), 0)

    def loss_fn(q, d):
        d = dist.gather_with_grad(d)
        positives = torch.arange(6) + 6 * dist.rank()
        return info_nce(q, d, model["scale"], positives, reduction="sum") / 12

    grad_cache_step([model["query"]] * 2, [[row["query"] for row in rows],
                                           [row["documents"][0] for row in rows]],
                    loss_fn, [plan, plan])
    dist.sync_gradients(model.parameters())
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return len(plan), torch.cat(grads)


def test_uneven_numbers_of_chunks_neither_hang_nor_change_the_gradient():
    (even, want), _ = run(2, uneven_chunks, (2, 2), timeout=10)
    (four, left), (two, right) = run(2, uneven_chunks, (6, 2), timeout=10)
    assert (even, four, two) == (2, 6, 2) and torch.equal(left, right)
    assert (left - want).norm() <= 1e-10 * want.norm()


def bytes_of_a_step(N, K, D, P):
    documents = torch.zeros(N * K, D, requires_grad=True)
    weight = nn.Parameter(torch.zeros(P))
    with Collectives() as calls:
        (dist.gather_with_grad(documents).sum() + weight.sum()).backward()
        dist.sync_gradients([weight])
    return calls.names, calls.bytes


def test_cost_formulas_equal_the_tensors_that_were_handed_to_the_collectives():
    """Of what a ring gathers or scatters in all, (W-1)/W leave a process; of a sum, twice that."""
    N, K, D, P, W = 6, 2, 8, 50, 2
    names, handed = run(W, bytes_of_a_step, N, K, D, P)[0]
    assert names == ["allgather", "allgather", "reduce_scatter", "allreduce", "allreduce"]
    cost = dist.communication_bytes(N, K, D, P, W)
    assert cost == {"gather": handed[1] * (W - 1) // W, "reduce_scatter": handed[2] * (W - 1) // W,
                    "all_reduce": 2 * handed[4] * (W - 1) // W}
    assert handed[0] + handed[3] < 100                          # what the formulas leave out


def test_the_cost_table_of_the_docstring_follows_from_the_formulas():
    table = re.findall(r"^ +(\d+) +([\d,]+) +2 \* +([\d.]+) GB +([\d.]+) GB"
                       r" +([\d.]+) s +([\d.]+) s", dist.__doc__, re.MULTILINE)
    assert [int(row[0]) for row in table] == [8, 64, 1024]
    for world_size, batch, gather, reduce, compute, wire in table:
        W, M = int(world_size), int(batch.replace(",", ""))
        cost = dist.communication_bytes(N=M // W, K=1, D=2048, P=35_000_000, W=W)
        assert cost["gather"] == cost["reduce_scatter"] and rounds_to(cost["gather"] / 1e9, gather)
        assert rounds_to(cost["all_reduce"] / 1e9, reduce)
        assert rounds_to(M / W * 256 * 6 * 2e9 / 4e14, compute)
        assert rounds_to(sum(cost.values()) / 50e9, wire)
    assert "8.6 GB" in dist.__doc__ and rounds_to(M * 2048 * 4 / 1e9, "8.6")


def rounds_to(value, text):
    """0.245 may be printed as 0.24 or 0.25."""
    return abs(value - float(text)) <= 0.5001 * 10**-len(text.split(".")[1])


# --- Staying equal, agreeing ---------------------------------------------------------------------

def perturbed(name, how):
    model = build(Case(dtype=torch.float32))
    dist.check_equal_parameters(model)                          # equal: says nothing
    if dist.rank() == 1:
        values = dict(model.named_parameters())[name].data.view(-1)
        if how == "one ulp":
            values[-1] = torch.nextafter(values[-1], torch.tensor(torch.inf))
        elif how == "sign of zero":
            values[0] = -0.0
        else:
            values[:2] = values[:2].flip(0)                     # leaves a plain sum as it was
    if how == "sign of zero" and dist.rank() == 0:
        dict(model.named_parameters())[name].data.view(-1)[0] = 0.0
    with pytest.raises(RuntimeError) as error:
        dist.check_equal_parameters(model)
    return str(error.value)


@pytest.mark.parametrize("name, how", [
    ("query.words.weight", "one ulp"), ("scale.log_scale", "one ulp"),
    ("query.head.bias", "sign of zero"), ("query.head.weight", "two swapped")])
def test_a_parameter_that_differs_in_its_bits_is_named_on_every_process(name, how):
    for message in run(3, perturbed, name, how):
        assert message.startswith(f"1 parameters differ between processes, first '{name}'")


def test_the_checksum_does_not_depend_on_the_size_of_its_blocks():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert len({dist.checksum(x, block).item() for block in (1, 7, 50, 2**20)}) == 1
    by_hand = sum(b * (2 * i + 1) for i, b in enumerate(x.view(torch.int32).tolist()))
    assert dist.checksum(x).item() == (by_hand + 2**63) % 2**64 - 2**63


def broadcast():
    torch.manual_seed(dist.rank())
    model = nn.Sequential(nn.Linear(3, 4), LogitScale(0.07 if dist.rank() == 0 else 0.5))
    model.register_buffer("steps", torch.tensor(dist.rank()))
    model.register_buffer("table", torch.rand(2, 3).t())        # not contiguous
    dist.broadcast_parameters(model)
    dist.check_equal_parameters(model)
    return model.state_dict()


def test_broadcast_gives_every_process_the_weights_temperature_and_buffers_of_process_0():
    torch.manual_seed(0)
    linear, table = nn.Linear(3, 4), torch.rand(2, 3).t()
    for state in run(3, broadcast):
        assert torch.equal(state["0.weight"], linear.weight)
        assert state["1.log_scale"] == LogitScale(0.07).log_scale
        assert state["steps"] == 0 and torch.equal(state["table"], table)


def small_agreements():
    r = dist.rank()
    dist.barrier()
    dist.print0("only once")
    return (dist.sizes(r + 2), dist.reduce_numbers([r, 0.5]), dist.reduce_numbers([r, -r], "max"),
            dist.any_process(r == 2), dist.any_process(False), dist.gather_objects({"rank": r}),
            dist.is_main(), dist.world_size(), td.get_backend())


def test_small_agreements_are_the_same_everywhere(capfd):
    for r, reply in enumerate(run(3, small_agreements)):
        assert reply == ([2, 3, 4], [3, 1.5], [2, 0], True, False,
                         [{"rank": 0}, {"rank": 1}, {"rank": 2}], r == 0, 3, "gloo")
    assert dist.reduce_numbers([1, 2]) == [1, 2] and dist.any_process(True)
    assert dist.gather_objects("x") == ["x"] and dist.is_main()


def equal_chunks(plans):
    try:
        return dist.equal_chunks(plans[dist.rank()])
    except RuntimeError as error:
        return str(error)


def test_largest_chunks_are_halved_until_all_processes_have_as_many():
    plans = [[[0], [1, 2, 3, 4]], [[0], [1], [2], [3]], [[2], [1], [0, 3]]]
    got = run(3, equal_chunks, plans)
    assert got == [[[0], [1], [2], [3, 4]], plans[1], [[2], [1], [0], [3]]]
    assert "fewer than the 2 chunks" in run(2, equal_chunks, [[[0]], [[0], [1]]])[0]
