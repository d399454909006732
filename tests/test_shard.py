"""A model split over two processes (FSDP2 on gloo) trains what one process trains.

The reference is the same model whole, one plain backward over the whole batch. Full training and
small adapters on a frozen base; chunks encoded again and kept graphs; texts here, images there.
"""
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dist
from gradcache import grad_cache_step
from losses import LogitScale, info_nce
from tests.processes import run
from tests.test_collectives import Collectives
from tests.test_dist import relative_error

LAYERS = 3


class Block(nn.Module):
    """A residual block with a low-rank adapter beside its first matrix."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 9)
        self.down = nn.Linear(9, width)
        self.lora_a, self.lora_b = nn.Linear(width, 2, bias=False), nn.Linear(2, 9, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h) + self.lora_b(self.lora_a(h))))


class Transformer(nn.Module):
    """What matters here is a list of blocks, and a tower that only images run through."""

    def __init__(self, width=6):
        super().__init__()
        self.embed, self.vision = nn.Linear(4, width), Block(width)
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, 5)

    def forward(self, samples):
        x = self.embed(torch.stack([values for values, _ in samples]))          # (C, width)
        if any(is_image for _, is_image in samples):
            images = torch.tensor([is_image for _, is_image in samples])
            x = torch.where(images[:, None], self.vision(x), x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.head(x), dim=-1)


def build(adapters, dtype=torch.float64):
    torch.manual_seed(0)
    model = Transformer()
    if adapters:
        for name, p in model.named_parameters():
            p.requires_grad_("lora" in name)
    return model.to(dtype), LogitScale().to(dtype)


def samples(seed, n, images, dtype=torch.float64):
    values = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [(v.to(dtype), i in images) for i, v in enumerate(values)]


def batch(step=0, images=(1, 2, 6), dtype=torch.float64):
    return samples(2 * step, 8, images, dtype), samples(2 * step + 1, 8, images, dtype)


def full_batch_loss(model, scale, queries, documents):
    scores = model(queries) @ model(documents).T * scale.log_scale.exp()
    return F.cross_entropy(scores, torch.arange(len(scores)))


def sharded_step(model, scale, queries, documents, keep, micro=1):
    """Accumulate over `micro` parts of the batch; reduce in the very last backward."""
    r, n = dist.rank(), len(queries) // dist.world_size() // micro
    dist.sync_sharded(model, False)
    for m in range(micro):
        def loss_fn(q, d):
            d = dist.gather_with_grad(d)
            positives = torch.arange(n) + n * r
            return info_nce(q, d, scale, positives, reduction="sum") / (n * dist.world_size())

        own = range(n * (micro * r + m), n * (micro * r + m + 1))
        last = m == micro - 1
        grad_cache_step([model, model], [[queries[i] for i in own], [documents[i] for i in own]],
                        loss_fn, 2, keep=keep, grad_scale=1 / micro, before_last_backward=(
                            lambda: dist.sync_sharded(model, True)) if last else None)
    dist.sync_gradients([*model.parameters(), *scale.parameters()])


def gradients(model, scale):
    named = [*model.named_parameters(), *scale.named_parameters()]
    return {n: dist.whole(p.grad) for n, p in named if p.requires_grad and p.grad is not None}


def sharded_gradient(adapters, keep, micro, images, dtype):
    model, scale = build(adapters, dtype)
    dist.shard(model, model.layers)
    assert all(map(dist.is_sharded, model.parameters())) and not dist.is_sharded(scale.log_scale)
    with Collectives() as calls:
        sharded_step(model, scale, *batch(images=images, dtype=dtype), keep, micro)
    return gradients(model, scale), Counter(calls.names)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("keep", [0, 1, 2, 100])
@pytest.mark.parametrize("adapters", [False, True])
def test_sharded_gradient_is_the_full_batch_gradient_and_is_reduced_once(adapters, keep, micro):
    model, scale = build(adapters)
    queries, documents = batch()
    for m in range(micro):                                      # process r holds rows 4r .. 4r + 3
        own = [4 * r + i for r in range(2) for i in range(4 * m // micro, 4 * (m + 1) // micro)]
        rows = [[tower[i] for i in own] for tower in (queries, documents)]
        (full_batch_loss(model, scale, *rows) / micro).backward()
    want = gradients(model, scale)
    for got, calls in run(2, sharded_gradient, adapters, keep, micro, (1, 2, 6), torch.float64):
        assert set(got) == set(want)
        assert all(relative_error(got[n], want[n]) <= 1e-10 for n in want)
        assert calls["reduce_scatter_base"] == LAYERS + 1       # one per block and one for the rest


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("images", [(0, 1, 2, 3), (4, 5, 6, 7)])
def test_a_sharded_model_may_see_only_texts_on_one_process_and_only_images_on_the_other(
        images, dtype, limit):
    assert_sharded_gradient_is_exact(False, images, dtype, limit)


@pytest.mark.parametrize("images", [(1,), (5,), (0, 1), (0, 1, 4, 5)])
def test_blocks_are_reduced_in_one_order_when_only_images_reach_them_through_trainable_weights(
        images):
    """Whether the last chunk (rows 0 and 1 of a process) holds an image must not show."""
    assert_sharded_gradient_is_exact(True, images, torch.float64, 1e-10)


def assert_sharded_gradient_is_exact(adapters, images, dtype, limit):
    model, scale = build(adapters, dtype)
    full_batch_loss(model, scale, *batch(images=images, dtype=dtype)).backward()
    want = gradients(model, scale)
    for got, _ in run(2, sharded_gradient, adapters, 1, 1, images, dtype):
        assert set(got) == set(want)
        assert all(relative_error(got[n], want[n]) <= limit for n in want)


def train(adapters, sharded):
    model, scale = build(adapters)
    if sharded:
        dist.shard(model, model.layers)
    parameters = [p for p in [*model.parameters(), *scale.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    norms = []
    for step in range(2):
        if sharded:
            sharded_step(model, scale, *batch(step), keep=1)
        else:
            full_batch_loss(model, scale, *batch(step)).backward()
        norms.append(dist.whole(nn.utils.clip_grad_norm_(parameters, 0.1)).item())
        optimizer.step()
        optimizer.zero_grad()
        scale.clamp_()
    with torch.no_grad():                                       # an evaluation between steps
        model(batch()[0])
    assert all(map(dist.is_sharded, model.parameters())) == sharded
    return norms, {n: dist.whole(p.detach()) for n, p in
                   [*model.named_parameters(), *scale.named_parameters()]}


@pytest.mark.parametrize("adapters", [False, True])
def test_two_sharded_optimizer_steps_equal_those_of_one_process(adapters):
    norms, alone = train(adapters, sharded=False)
    (first_norms, first), (second_norms, second) = run(2, train, adapters, True)
    assert first_norms == second_norms == pytest.approx(norms, rel=1e-10)
    for name in alone:
        assert torch.equal(first[name], second[name])
        assert (first[name] - alone[name]).norm() <= 1e-8 * alone[name].norm(), name


def low_precision_base():
    model, _ = build(True, torch.float32)
    for p in model.parameters():
        p.data = p.data if p.requires_grad else p.data.bfloat16()
    dist.shard(model, model.layers)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch(dtype=torch.float32)[0]).sum().backward()
    return {p.grad.dtype for p in model.parameters() if p.grad is not None}


def test_float32_adapters_on_a_bfloat16_base_can_be_sharded():
    assert run(2, low_precision_base) == [{torch.float32}] * 2


def save_and_load():
    model, scale = build(False)
    whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    dist.shard(model, model.layers)
    parts = {n: dist.like(whole[n], p) for n, p in model.named_parameters()}
    assert all(torch.equal(parts[n].to_local(), p.to_local()) for n, p in model.named_parameters())
    assert all(torch.equal(dist.whole(parts[n]), whole[n]) for n in whole)
    assert dist.whole(scale.log_scale) is scale.log_scale       # not sharded: itself
    assert dist.like(scale.log_scale, scale.log_scale) is scale.log_scale
    dist.check_equal_parameters(model)                          # nothing to compare, no complaint
    with pytest.raises(RuntimeError, match="before shard"):
        dist.broadcast_parameters(model)


def test_a_sharded_parameter_becomes_whole_and_is_split_again():
    run(2, save_and_load)


def test_on_one_process_nothing_is_sharded():
    model, _ = build(False)
    dist.shard(model, model.layers)
    dist.sync_sharded(model, True)
    assert not any(map(dist.is_sharded, model.parameters()))
