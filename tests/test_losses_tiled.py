"""In tiles the loss and its gradient are those of the whole matrix, which is never made."""
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradcache import grad_cache_step
from losses import LogitScale, info_nce

ALL = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")


def unit(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def value_and_gradients(q, d, **options):
    q, d = (x.clone().requires_grad_() for x in (q, d))
    scale = LogitScale(0.1).to(torch.float64)
    weights = torch.linspace(0.5, 2.0, len(options.get("query_rows", q)), dtype=torch.float64)
    if "query_rows" in options:
        loss = info_nce(q[options["query_rows"]], d, scale, all_queries=q, reduction="none",
                        **options)
    else:
        loss = info_nce(q, d, scale, reduction="none", **options)
    (loss * weights).sum().backward()                   # each row with a weight of its own
    return loss.detach(), q.grad, d.grad, scale.log_scale.grad


@pytest.mark.parametrize("seed", range(30))
def test_any_tile_and_any_option_give_the_whole_matrix_result(seed):
    """Options, sizes and tiles drawn at random; the draw is the seed's, so a failure repeats."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 4) for _ in range(draw.randint(1, 7))]    # documents per query
    columns = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    q, d = unit(len(counts), 5, seed=seed), unit(sum(counts), 5, seed=seed + 100)
    exclude = torch.rand(len(q), len(d), generator=torch.Generator().manual_seed(seed)) < 0.3
    options = {
        "positives": columns,
        "exclude": draw.choice([None, exclude, lambda i, j: exclude[i][:, j]]),
        "label_smoothing": draw.choice([0.0, 0.2]),
        "directions": ALL[:1] + tuple(x for x in ALL[1:] if draw.random() < 0.5),
        "hardness_mode": draw.choice([None, "in_batch_negatives", "hard_negatives",
                                      "all_negatives"]),
        "hardness_strength": 5.0,
    }
    if not {"query_to_query", "doc_to_doc"} & set(options["directions"]):
        options["partition_mode"] = draw.choice(["joint", "per_direction"])
    if len(options["directions"]) == 1:
        options["positives"] = torch.stack([columns, torch.where(
            torch.tensor(counts) > 1, columns + 1, -1)], dim=1)         # a second positive for some
    elif len(q) > 1:
        options["query_rows"] = torch.arange(len(q))[draw.randint(0, len(q) - 1):]
    expected = value_and_gradients(q, d, **options)
    got = value_and_gradients(q, d, tile=draw.randint(1, 12), **options)
    for g, e in zip(got, expected):
        assert g.isfinite().all()
        torch.testing.assert_close(g, e, rtol=1e-11, atol=1e-11)


def test_gradients_in_tiles_agree_with_finite_differences():
    q, d = unit(4, 3).requires_grad_(), unit(6, 3, seed=1).requires_grad_()
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    positives, exclude = torch.tensor([0, 2, 3, 5]), torch.zeros(4, 6, dtype=torch.bool)
    exclude[1, 4] = True
    loss = lambda q, d, scale: info_nce(q, d, scale, positives, exclude, tile=2, directions=ALL,
                                        label_smoothing=0.1)
    assert torch.autograd.gradcheck(loss, (q, d, scale))


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation makes."""
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("n, directions", [(4096, ALL[:1]), (2048, ALL)])
def test_no_tensor_is_larger_than_a_tile_or_the_vectors(n, directions):
    """4,096 x 4,096 with a gradient: 16.8 M similarities, never more than 0.07 M at once."""
    size, tile = 8, 256
    q = unit(n, size, dtype=torch.float32).requires_grad_()
    d = unit(n, size, seed=1, dtype=torch.float32).requires_grad_()
    ids = torch.arange(n) % 4000                        # some documents occur twice
    with Largest() as largest:
        loss = info_nce(q, d, LogitScale(), exclude=lambda i, j: ids[i, None] == ids[j], tile=tile,
                        directions=directions)
        loss.backward()
    assert largest.elements <= max(tile * tile, n * size)
    assert q.grad.abs().amax(dim=1).min() > 0
    small = 512
    with Largest() as largest:                          # the count can fail: without tiles it does
        info_nce(q[:small], d[:small], LogitScale()).backward()
    assert largest.elements == small * small > 2 * tile * tile


def test_tiles_of_half_precision_vectors_add_up_in_float32():
    """256 contributions to each gradient: summed in bfloat16 their rounding would add up."""
    q, d = unit(32, 16).bfloat16(), unit(1024, 16, seed=1).bfloat16()
    grads = {}
    for dtype, tile in ((torch.bfloat16, 4), (torch.float64, None)):
        a, b = (x.to(dtype).clone().requires_grad_() for x in (q, d))
        scale = LogitScale()
        info_nce(a, b, scale, torch.arange(32) * 32, tile=tile).backward()
        grads[dtype] = [x.grad.double() for x in (a, b, scale.log_scale)]
    for tiled, exact in zip(grads[torch.bfloat16], grads[torch.float64]):
        # What remains is the one rounding of the result to bfloat16, half a unit of 2^-8 at most.
        assert (tiled - exact).norm() <= 2 ** -8.5 * exact.norm()


def test_large_scales_neither_overflow_nor_lose_the_gradient():
    q, d = unit(16, 4, dtype=torch.float32), unit(16, 4, seed=1, dtype=torch.float32)
    exact = value_and_gradients(q.double() * 50, d.double())
    for tile in (1, 5):
        a, b = (q * 50).requires_grad_(), d.clone().requires_grad_()
        scale = LogitScale(0.1)
        loss = info_nce(a, b, scale, reduction="none", tile=tile)
        (loss * torch.linspace(0.5, 2.0, 16)).sum().backward()
        for got, want in zip((loss, a.grad, b.grad, scale.log_scale.grad), exact):
            torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


def test_a_tiled_loss_goes_through_gradcache():
    towers = [torch.nn.Linear(6, 4, dtype=torch.float64) for _ in range(2)]
    batches = [unit(5, 6), unit(10, 6, seed=1)]
    scale = LogitScale()
    encoders = [lambda x, tower=tower: F.normalize(tower(x), dim=1) for tower in towers]
    grads = []
    for chunk, tile in ((2, 3), (10, None)):
        for module in (*towers, scale):
            module.zero_grad()
        loss_fn = functools.partial(info_nce, scale=scale, tile=tile, directions=ALL)
        loss, _ = grad_cache_step(encoders, batches, loss_fn, chunk)
        grads.append([loss, *(p.grad.clone() for m in (*towers, scale) for p in m.parameters())])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-10)


def test_nothing_is_computed_twice_where_no_gradient_is_wanted():
    q, d = unit(6, 4), unit(6, 4, seed=1)
    with torch.no_grad():
        assert not info_nce(q, d, LogitScale(), tile=2).requires_grad
    frozen, trained = q, d.clone().requires_grad_()
    info_nce(frozen, trained, 10.0, tile=2).backward()
    assert trained.grad.abs().max() > 0 and frozen.grad is None
