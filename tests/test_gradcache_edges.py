"""What else can go in, come out or go wrong: the edges of gradcache.py.

    1) samples: dicts, strings, in-place edits, samples that need a gradient themselves
    2) representations: tuples, lengths that differ, parts without a gradient, views
    3) the step: the callback before the last backward, gradient scalers, autocast

Errors, RandContext and plan_chunks: test_gradcache_pieces.py.
"""
import copy
import gc
import weakref
from collections import UserDict
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradcache import grad_cache_step
from tests.test_gradcache import IN, Tower, assert_same, contrastive, plain, take_grad, two_towers

SCALE = torch.tensor(2.0, dtype=torch.float64)


# --- 1) Samples -----------------------------------------------------------------------------------

class Features(UserDict):
    """A mapping that is no dict, as tokenizers return; the encoder may rely on its type."""


@pytest.mark.parametrize("kind", [dict, Features])
@pytest.mark.parametrize("keep", [0, 1])
def test_entries_of_a_dict_batch_that_are_no_tensors_reach_the_encoder_unchanged(kind, keep):
    tower, _, (x, y), _ = two_towers()
    extra = {"prompt": "query: ", "cache": None, "layers": 3, "rate": 0.5, "names": ["a", "b"],
             "zero_dim": torch.tensor(2.0)}
    batches = [kind(x=x, **extra), kind(x=y, **extra)]
    seen = []

    def encoder(batch):
        assert type(batch) is kind
        seen.append({k: v for k, v in batch.items() if k != "x"})
        return tower(batch["x"]) * batch["zero_dim"] * batch["layers"]

    wanted_loss = plain([encoder, encoder], batches, contrastive(SCALE))
    wanted = take_grad(tower)
    seen.clear()
    loss, _ = grad_cache_step([encoder, encoder], batches, contrastive(SCALE), 2, keep=keep)
    assert_same(loss, wanted_loss)
    assert_same(take_grad(tower), wanted)
    assert seen == [extra] * (4 * 4 - keep)


@pytest.mark.parametrize("form", ["list of dicts", "dict of tensors", "tensor", "list of objects"])
def test_an_encoder_that_edits_its_samples_harms_nobody(form):
    """It zeroes a mask position in place and pops a key, as pooling layers have been seen to do."""
    tower, _, (x, y), _ = two_towers()

    class Sample:
        def __init__(self, x):
            self.x = x

    def pack(x):
        return {"list of dicts": lambda: [{"x": row.clone(), "note": ["a"]} for row in x],
                "dict of tensors": lambda: {"x": x.clone(), "note": ["a"]},
                "tensor": x.clone, "list of objects": lambda: [Sample(row.clone()) for row in x],
                }[form]()

    def edits(batch):
        if form == "tensor":
            batch[:, 0] = 0
            return tower(batch)
        if form == "dict of tensors":
            batch["note"].append("b")
            batch["x"][:, 0] = 0
            return tower(batch.pop("x"))
        if form == "list of dicts":
            for sample in batch:
                sample["note"].append("b")
                sample["x"][0] = 0
            return tower([sample.pop("x") for sample in batch])
        for sample in batch:
            sample.x[0] = 0
        return tower([vars(sample).pop("x") for sample in batch])

    keep_first = torch.ones(IN, dtype=torch.float64)
    keep_first[0] = 0
    wanted_loss = plain([tower, tower], [x * keep_first, y * keep_first], contrastive(SCALE))
    wanted = take_grad(tower)
    batches = [pack(x), pack(y)]
    before = copy.deepcopy(batches)
    for _ in range(2):                                              # twice on the same batches
        loss, _ = grad_cache_step([edits, edits], batches, contrastive(SCALE), 3)
        assert_same(loss, wanted_loss)
        assert_same(take_grad(tower), wanted)
    if form == "list of objects":
        batches, before = ([[s.x for s in b] for b in pair] for pair in (batches, before))
    assert repr(batches) == repr(before)


@pytest.mark.parametrize("form", ["tensor", "list of tensors", "list of dicts", "dict of tensors"])
@pytest.mark.parametrize("frozen", [True, False])
def test_samples_that_need_a_gradient_get_it_even_through_a_frozen_module(form, frozen):
    """A learned prompt is such a sample. The frozen module alone would not betray it."""
    class Unpack(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = Tower(1).requires_grad_(not frozen)

        def forward(self, batch):
            if isinstance(batch, dict):
                batch = batch["x"]
            return self.tower([s["x"] if isinstance(s, dict) else s for s in batch])

    _, _, (x, y), _ = two_towers()
    encoder, x = Unpack(), x.requires_grad_()
    rows = [row.detach().requires_grad_() for row in x]
    batch = {"tensor": x, "list of tensors": rows, "list of dicts": [{"x": row} for row in rows],
             "dict of tensors": {"x": x}}[form]
    plain([encoder, encoder], [batch, y], contrastive(SCALE))
    wanted, leaves = take_grad(x, *rows), [x, *rows]
    for keep in (0, 1):
        take_grad(*leaves)
        grad_cache_step([encoder, encoder], [batch, y], contrastive(SCALE), 2, keep=keep)
        assert_same(take_grad(*leaves), wanted)


# --- 2) Representations ---------------------------------------------------------------------------

class TokenTower(nn.Module):
    """Token ids of different lengths -> (token vectors (C, T, D), mask (C, T), pooled (C, D))."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(30, 8).double(), nn.Linear(8, 5).double()

    def forward(self, samples):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(s) for s in samples], batch_first=True)
        mask = ids > 0
        vectors = self.out(self.table(ids).tanh()) * mask.unsqueeze(-1)             # (C, T, D)
        return vectors, mask, vectors.sum(1) / mask.sum(1, keepdim=True)


def late_interaction(q, d):
    """ColBERT's MaxSim plus an ordinary contrastive loss over the pooled vectors."""
    (q, q_mask, q_pooled), (d, d_mask, d_pooled) = q, d
    scores = torch.einsum("qtd,ksd->qkts", q, d).masked_fill(~d_mask[None, :, None], -1e9)
    scores = (scores.amax(-1) * q_mask[:, None]).sum(-1)                            # (N, N)
    return F.cross_entropy(scores, torch.arange(len(q))) + contrastive(SCALE)(q_pooled, d_pooled)


@pytest.mark.parametrize("plan", [1, 2, 50, [[[3, 0], [1], [2, 4]], [[4], [2, 3, 1, 0]]]])
@pytest.mark.parametrize("keep", [0, 1])
def test_tuples_and_lengths_that_differ_between_chunks(plan, keep):
    tower = TokenTower()
    batches = [[list(range(1, 1 + t)) for t in (3, 1, 5, 2, 2)],
               [list(range(9, 9 + t)) for t in (1, 4, 2, 7, 3)]]
    wanted_loss = plain([tower, tower], batches, late_interaction)  # padded to the longest of all
    wanted = take_grad(tower)
    loss, metrics = grad_cache_step([tower, tower], batches, late_interaction, plan, keep=keep)
    assert_same(loss, wanted_loss)
    assert_same(take_grad(tower), wanted)
    assert metrics["replay_error"] == 0


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 100])
def test_a_chunk_without_a_trainable_part_is_no_obstacle(as_module, keep):
    """Only images pass through trained weights; here whole chunks hold nothing but texts."""
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.text, self.calls = Tower(1), Tower(2).requires_grad_(False), 0

        def forward(self, samples):
            self.calls += 1
            return torch.cat([(self.vision if kind == "image" else self.text)(x.unsqueeze(0))
                              for kind, x in samples])

    _, _, batches, _ = two_towers(n=8)
    for kinds in ("tttttiit", "titittii", "iitttttt"):              # chunks of two: tt, ti, ...
        mixed = Mixed()
        batch = [("image" if k == "i" else "text", x) for k, x in zip(kinds, batches[0])]
        towers = [mixed if as_module else lambda s, mixed=mixed: mixed(s)] * 2
        wanted_loss = plain(towers, [batch, batch], contrastive(SCALE))
        wanted, mixed.calls = take_grad(mixed), 0
        loss, _ = grad_cache_step(towers, [batch, batch], contrastive(SCALE), 2, keep=keep)
        assert_same(loss, wanted_loss)
        assert_same(take_grad(mixed), wanted)
        if not as_module and keep == 0:                             # text chunks are not replayed
            assert mixed.calls == 8 + 2 * sum("i" in kinds[i:i + 2] for i in (0, 2, 4, 6))


def test_a_tower_the_loss_ignores_stays_without_gradient():
    queries, documents, batches, _ = two_towers()
    grad_cache_step([queries, documents], batches, lambda q, d: q.square().sum(), 2, keep=0)
    assert documents.calls == 4 and all(p.grad is None for p in documents.parameters())


def live_bytes():
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")                # gc looks at everything
def test_a_view_does_not_keep_the_hidden_states_of_all_samples_alive():
    """First-token pooling returns hidden[:, 0], which shares the memory of all of `hidden`."""
    linear = nn.Linear(IN, 64).double()

    class FirstToken(nn.Module):
        weight = linear.weight

        def forward(self, x):
            return linear(x.unsqueeze(1).expand(-1, 100, -1))[:, 0]                 # (C, 64)

    x, in_loss = torch.randn(64, IN).double(), []
    before = live_bytes()

    def loss_fn(q):
        in_loss.append(live_bytes() - before)
        return q.square().sum()

    tower = FirstToken()
    for encoder in (tower, lambda s: tower(s)):
        grad_cache_step([encoder], [x], loss_fn, 4, keep=0)
        assert in_loss.pop() < 10 * 64 * 64 * 8                     # hidden: 100 * 64 * 64 * 8


@pytest.mark.parametrize("as_module", [True, False])
def test_the_whole_graph_is_gone_before_the_next_chunk_is_encoded(as_module):
    """Also what a custom operation keeps on its context, which only dies with the graph itself."""
    alive = set()

    class Token:
        pass

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert not alive, "the graph of an earlier chunk still exists"
            ctx.token = Token()
            alive.add(id(ctx.token))
            weakref.finalize(ctx.token, alive.discard, id(ctx.token))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Encoder(Tower):
        def forward(self, samples):
            y = super().forward(samples)
            return Keeps.apply(y) if torch.is_grad_enabled() else y * 2

    tower = Encoder()
    encoder = tower if as_module else lambda s: tower(s)
    _, _, batches, _ = two_towers()
    for keep in (0, 1):
        grad_cache_step([encoder, encoder], batches, contrastive(SCALE), 2, keep=keep)
        assert not alive


# --- 3) The step ----------------------------------------------------------------------------------

@pytest.mark.parametrize("keep", [0, 1, 3, 100])
def test_the_callback_comes_once_before_the_last_chunk_is_encoded_again(keep):
    """Before its forward, not only before its backward: DistributedDataParallel reads the switch
    that the callback turns when its forward returns."""
    tower, _, batches, _ = two_towers()
    events = []

    def encoder(samples):
        events.append("encode")
        y = tower(samples)
        if y.requires_grad:
            y.register_hook(lambda grad: events.append("backward"))
        return y

    grad_cache_step([encoder, encoder], batches, contrastive(SCALE), 2, keep=keep,
                    before_last_backward=lambda: events.append("switch"))
    replayed = keep < 8
    assert events.count("switch") == 1 and events.count("backward") == 8
    assert events[-3 if replayed else -2:] == ["switch"] + ["encode"] * replayed + ["backward"]


def test_a_gradient_scaler_scales_the_gradient_and_not_the_loss():
    tower, _, batches, _ = two_towers(torch.float32)
    loss_fn = contrastive(SCALE.float())
    wanted_loss, wanted = plain([tower, tower], batches, loss_fn), take_grad(tower)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.0)
    loss, _ = grad_cache_step([tower, tower], batches, loss_fn, 2,
                              grad_scale=scaler.scale(torch.ones(())))
    assert_same(loss, wanted_loss)
    assert_same(torch.cat([p.grad.flatten() for p in tower.parameters()]), wanted * 2.0**16)
    scaler.unscale_(optimizer)
    assert_same(take_grad(tower), wanted)


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("keep", [0, 1])
def test_both_passes_run_under_the_callers_autocast(as_module, keep):
    tower, _, batches, _ = two_towers(torch.float32, n=32)
    seen = []

    class Watched(Tower):
        def forward(self, samples):
            y = self.second(self.first(samples).tanh())
            seen.append((torch.is_autocast_enabled("cpu"), y.dtype))
            return y

    tower = Watched(1, torch.float32)
    encoder = tower if as_module else lambda s: tower(s)

    def loss_fn(q, d):
        seen.append((q.dtype, d.dtype))
        with torch.autocast("cpu", enabled=False):
            return contrastive(SCALE.float())(F.normalize(q.float()), F.normalize(d.float()))

    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics = grad_cache_step([encoder, encoder], batches, loss_fn, 8, keep=keep)
    got = take_grad(tower)
    assert set(seen) == {(True, torch.bfloat16), (torch.float32, torch.float32)}
    assert len(seen) == 4 * 4 - keep + 1 and metrics["replay_error"] == 0
    with torch.autocast("cpu", torch.bfloat16):                     # the usual recipe: autocast for
        wanted_loss = loss_fn(encoder(batches[0]), encoder(batches[1]))
    wanted_loss.backward()                                          # the forward, backward outside
    wanted = take_grad(tower)
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-5)
    # bfloat16 keeps 8 bits; a weight's gradient is rounded once per chunk rather than once.
    assert (got - wanted).norm() <= 0.01 * wanted.norm()


def test_a_float32_loss_is_not_differentiated_in_bfloat16():
    """loss_fn leaves autocast; a backward inside of it would still round every product."""
    torch.manual_seed(0)
    x, y, gradients = torch.randn(8, 16), torch.randn(8, 16), []

    def loss_fn(q, d):
        q.register_hook(gradients.append)
        with torch.autocast("cpu", enabled=False):
            return contrastive(SCALE.float())(q, d)

    identity = nn.Identity()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        grad_cache_step([identity, identity], [x, y], loss_fn, 3)
    got, _ = gradients[0], take_grad(x)
    plain([identity, identity], [x, y], contrastive(SCALE.float()))
    assert (got - x.grad).norm() <= 1e-5 * x.grad.norm()            # in bfloat16 it is 2e-3


def test_half_precision_representations_reach_the_loss_in_float32():
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    seen = []

    def loss_fn(r):
        r.register_hook(lambda grad: seen.append(grad.dtype))
        seen.append(r.dtype)
        return r.sum() * 1e-3

    loss, _ = grad_cache_step([lambda x: x * weight], [torch.full((4, 2), 3.0).half()], loss_fn, 2)
    assert seen == [torch.float32, torch.float32] and loss.dtype == torch.float32
    assert weight.grad.dtype == torch.float16
    assert weight.grad.item() == pytest.approx(8 * 3 * 1e-3, rel=2e-3)


def test_weights_updated_within_one_autocast_region_are_seen_by_the_next_step():
    """Autocast keeps half-precision copies of the weights until its outermost block ends."""
    tower, _, batches, _ = two_towers(torch.float32)
    loss_fn, losses = contrastive(SCALE.float()), []
    for inside in (True, False):
        model = copy.deepcopy(tower)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss, _ = grad_cache_step([model, model], batches, loss_fn, 2)
                optimizer.step(), optimizer.zero_grad()
        losses.append(loss)
    assert losses[0] == losses[1]
