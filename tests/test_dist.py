"""One gradient, on any number of processes.

Each test runs the step of a training loop on W gloo processes and compares the gradient that they
hold afterwards with one plain `loss.backward()` over the same pairs in one process, written without
gradcache, losses or dist. Limits: relative error 1e-10 in float64; in float32 cosine 0.9999 and
norm ratio 1 +- 1e-4 (a cosine alone cannot see a factor W).
"""
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dist
from gradcache import grad_cache_step
from losses import LogitScale, info_nce
from tests.processes import run

SEED = 100                                     # process r draws its dropout from SEED + r
SHARES = {1: (12,), 2: (6, 6), 3: (4, 4, 4), 4: (3, 3, 3, 3)}


@dataclass(frozen=True)
class Case:
    """What a step trains on: everything that the processes and the reference must agree on."""
    shares: tuple = (6, 6)                     # rows of each process
    negatives: tuple = (0,)                    # hard negatives of row 0, 1, ..., repeated
    modality: str = "text"                     # text, mixed, halves (texts first), swapped halves
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64
    chunk: int = 2
    keep: int = 1
    micro: int = 1                             # batches whose gradients accumulate
    mode: str = "standard"                     # or the document tower frozen: direct, gradcache
    symmetric: bool = False                    # document-to-query too (CLIP's loss)
    shared: tuple = ()                         # rows that all have one and the same positive
    recompute: str = ""                        # activation checkpointing: reentrant, non-reentrant


class Tower(nn.Module):
    """Texts and images through branches of their own, then dropout and one head: (C, 5) unit rows.

    A chunk without images leaves the image branch without a gradient, as a real vision tower.
    """

    def __init__(self, dropout, recompute=""):
        super().__init__()
        self.recompute = recompute
        self.words, self.patches = nn.Embedding(9, 6), nn.Linear(3, 6)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(6, 5)

    def forward(self, samples):
        pooled = [self.words(s["text"]).mean(0) if "text" in s
                  else self.patches(s["image"].to(self.head.weight.dtype)).tanh().mean(0)
                  for s in samples]
        pooled = torch.stack(pooled)                                            # (C, 6)
        if self.recompute:
            return checkpoint(self.project, pooled, use_reentrant=self.recompute == "reentrant")
        return self.project(pooled)

    def project(self, pooled):
        return F.normalize(self.head(self.dropout(torch.tanh(pooled))), dim=-1)


def build(case):
    torch.manual_seed(0)
    query = Tower(case.dropout, case.recompute)
    document = query if case.mode == "standard" else Tower(case.dropout).requires_grad_(False)
    return nn.ModuleDict({"query": query, "document": document,
                          "scale": LogitScale()}).to(case.dtype)


def make_rows(case):
    """Rows of unpadded samples: a query, its documents (the positive first) and their ids."""
    n, random = sum(case.shares), torch.Generator().manual_seed(1)

    def sample(i):
        length = int(torch.randint(2, 6, (), generator=random))
        image = {"text": False, "mixed": i % 2, "halves": i >= n // 2, "swapped": i < n // 2}
        if image[case.modality]:
            return {"image": torch.randn(length, 3, generator=random, dtype=torch.float64)}
        return {"text": torch.randint(0, 9, (length,), generator=random)}

    rows = []
    for i in range(n):
        k = 1 + case.negatives[i % len(case.negatives)]
        rows.append({"query": sample(i), "documents": [sample(i) for _ in range(k)],
                     "ids": [100 * i + j for j in range(k)]})
    for i in case.shared:
        first = rows[case.shared[0]]
        rows[i]["documents"][0], rows[i]["ids"][0] = first["documents"][0], first["ids"][0]
    return rows


def own_rows(case, process, micro):
    """The rows of one process in one of the accumulated batches."""
    start, n = sum(case.shares[:process]), case.shares[process]
    rows = make_rows(case)[start:start + n]
    return rows[micro * n // case.micro:(micro + 1) * n // case.micro]


def flatten(rows):
    """Rows -> queries, documents, columns of the positives (N,), ids of the documents."""
    documents = [d for row in rows for d in row["documents"]]
    starts = torch.tensor([0] + [len(row["documents"]) for row in rows]).cumsum(0)[:-1]
    ids = torch.tensor([i for row in rows for i in row["ids"]])
    return [row["query"] for row in rows], documents, starts, ids


# --- The step on every process, as a training loop does it ---------------------------------------

def accumulate(model, rows, case):
    """Add this process' part of one batch's gradient; return the sum of its queries' losses."""
    queries, documents, positives, ids = flatten(rows)
    counts = dist.sizes(len(queries))                                           # M is their sum
    positives = positives + sum(dist.sizes(len(documents))[:dist.rank()])
    ids = dist.gather_with_grad(ids)                                            # (M*K,)

    def loss_fn(q, d):
        d, options, targets = dist.gather_with_grad(d), {}, positives
        if case.symmetric:
            targets = dist.gather_with_grad(positives)                          # (M,)
            options = {"directions": ("query_to_doc", "doc_to_query"),
                       "partition_mode": "per_direction",
                       "all_queries": dist.gather_with_grad(q),
                       "query_rows": torch.arange(len(q)) + sum(counts[:dist.rank()])}
        exclude = ids[targets][:, None] == ids[None, :]
        return info_nce(q, d, model["scale"], targets, exclude, reduction="sum",
                        **options) / sum(counts)

    if case.mode == "direct":
        with torch.no_grad():
            d = model["document"](documents)
        loss = loss_fn(model["query"](queries), d)
        (loss / case.micro).backward()
    else:
        loss, _ = grad_cache_step([model["query"], model["document"]], [queries, documents],
                                  loss_fn, case.chunk, keep=case.keep, grad_scale=1 / case.micro)
    return loss.item()


def gradient(case):
    """(loss of the global batch, {parameter: gradient or None}) as process rank() ends up with."""
    model, loss = build(case), 0.0
    torch.manual_seed(SEED + dist.rank())
    for micro in range(case.micro):
        loss += accumulate(model, own_rows(case, dist.rank(), micro), case) / case.micro
    dist.sync_gradients(model.parameters())
    return dist.reduce_numbers([loss])[0], {n: p.grad for n, p in model.named_parameters()}


# --- The reference: one process, one graph over the whole batch ----------------------------------

@lru_cache(None)
def reference(case):
    model, total = build(case), 0.0
    states = [torch.Generator().manual_seed(SEED + r).get_state() for r in range(len(case.shares))]
    for micro in range(case.micro):
        rows = [own_rows(case, r, micro) for r in range(len(case.shares))]
        total = total + full_batch_loss(model, rows, states, case) / case.micro
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters()}


def full_batch_loss(model, rows_of_processes, states, case):
    """Cross-entropy over all pairs. Only dropout makes the order of encoding matter: with it, each
    process' samples are encoded from its own random state, in the order of its chunks."""
    q, d = [], []
    for process, rows in enumerate(rows_of_processes):
        queries, documents, _, _ = flatten(rows)
        torch.set_rng_state(states[process])
        for tower, samples, out in (("query", queries, q), ("document", documents, d)):
            c = case.chunk if case.dropout else len(samples)
            out += [model[tower](samples[i:i + c]) for i in range(0, len(samples), c)]
        states[process] = torch.get_rng_state()
    _, _, positives, ids = flatten([row for rows in rows_of_processes for row in rows])
    scores = torch.cat(q) @ torch.cat(d).T * model["scale"].log_scale.exp()     # (M, M*K)
    duplicates = ids[positives][:, None] == ids[None, :]
    duplicates[torch.arange(len(positives)), positives] = False
    loss = F.cross_entropy(scores.masked_fill(duplicates, -math.inf), positives)
    if case.symmetric:
        back = F.cross_entropy(scores[:, positives].T, torch.arange(len(positives)))
        loss = (loss + back) / 2
    return loss


def assert_one_gradient(case):
    """All processes hold one gradient, bit for bit, and it is the reference's."""
    replies = run(len(case.shares), gradient, case)
    loss, grads = replies[0]
    want_loss, want = reference(replace(case, recompute=""))
    for other_loss, other in replies[1:]:
        assert other_loss == loss
        assert all(same(other[name], grads[name]) for name in grads)
    assert loss == pytest.approx(want_loss, rel=1e-10 if case.dtype == torch.float64 else 1e-5)
    assert {n for n in want if want[n] is None} == {n for n in grads if grads[n] is None}
    used = [name for name in want if want[name] is not None]
    if case.dtype == torch.float64:
        for name in used:
            assert relative_error(grads[name], want[name]) <= 1e-10, name
    for group in (used, ["scale.log_scale"]):
        got, exact = (torch.cat([g[n].flatten() for n in group]) for g in (grads, want))
        assert F.cosine_similarity(got, exact, dim=0) >= 0.9999
        assert got.norm() / exact.norm() == pytest.approx(1, abs=1e-4)


def same(a, b):
    return a is b is None or torch.equal(a, b)


def relative_error(got, want):
    return float((got - want).norm() / want.norm())


# --- The claims ----------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_processes_gives_the_full_batch_gradient(world_size, dtype):
    assert_one_gradient(Case(SHARES[world_size], dtype=dtype))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_everything_at_once_gives_the_full_batch_gradient(world_size):
    assert_one_gradient(Case(SHARES[world_size], negatives=(2, 0, 1), modality="mixed", dropout=0.3,
                             shared=(1, 5, 10)))


@pytest.mark.parametrize("chunk, keep", [(2, 0), (2, 1), (2, 100), (1, 1), (4, 1), (50, 0)])
def test_processes_replay_their_own_dropout_whatever_the_chunks(chunk, keep):
    assert_one_gradient(Case(dropout=0.5, chunk=chunk, keep=keep))
    one_state = reference(Case((12,), dropout=0.5))             # the masks of one process alone
    assert one_state[0] != reference(Case(dropout=0.5))[0]


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_nothing_even_with_an_unused_parameter(recompute):
    assert_one_gradient(Case(dropout=0.3, recompute=recompute))         # no images: unused branch


@pytest.mark.parametrize("negatives", [(0,), (1,), (2,), (0, 3, 1)])
def test_hard_negatives_travel_with_their_positives(negatives):
    assert_one_gradient(Case((4, 4, 4), negatives))


@pytest.mark.parametrize("modality", ["mixed", "halves", "swapped"])
def test_a_process_with_only_texts_and_one_with_only_images_do_not_wait_for_each_other(modality):
    assert_one_gradient(Case(modality=modality, negatives=(1,)))


@pytest.mark.parametrize("shares", [(4, 3), (3, 1, 1), (1, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_uneven_shares_are_a_mean_over_queries_not_over_processes(shares, dtype):
    assert_one_gradient(Case(shares, negatives=(1, 0), dtype=dtype))


@pytest.mark.parametrize("mode", ["direct", "gradcache"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_query_side_training_is_exact_on_both_backward_paths(world_size, mode):
    case = Case(SHARES[world_size], negatives=(1,), mode=mode)
    assert_one_gradient(case)
    _, grads = run(world_size, gradient, case)[0]
    assert all(g is None for name, g in grads.items() if name.startswith("document."))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulated_batches_give_the_mean_of_their_gradients(world_size):
    assert_one_gradient(Case(SHARES[world_size], micro=2, dropout=0.3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_document_to_query_sees_the_queries_of_all_processes(world_size):
    assert_one_gradient(Case(SHARES[world_size], symmetric=True))
    assert_one_gradient(Case((4, 3), negatives=(1, 0), symmetric=True))


def test_a_document_of_another_process_that_equals_the_positive_is_no_negative():
    assert_one_gradient(Case(shared=(0, 7), dropout=0.3))
    assert reference(Case(shared=(0, 7)))[0] != reference(Case())[0]


def known_losses(negatives, documents, ids):
    """The loss of orthonormal queries that equal their positives, at scale 1 (two per process)."""
    k, r = 1 + negatives, dist.rank()
    d = torch.eye(12)[documents[r * 2 * k:(r + 1) * 2 * k]]
    positives = torch.arange(2) * k
    q = d[positives]
    d = dist.gather_with_grad(d)
    exclude = None
    if ids:
        exclude = torch.tensor(documents)[positives + r * 2 * k][:, None] == torch.tensor(documents)
    loss = info_nce(q, d, 1.0, positives + r * 2 * k, exclude, reduction="sum") / 4
    return dist.reduce_numbers([loss])[0]


@pytest.mark.parametrize("negatives, documents, ids, expected", [
    (2, list(range(12)), False, 1.618729),                      # ln(1 + 11/e)
    (1, list(range(8)), False, math.log(1 + 7 / math.e)),
    (0, list(range(4)), False, math.log(1 + 3 / math.e)),
    (0, [0, 1, 0, 2], True, 0.647557),                          # [A, B | A, C]: the other A is none
    (0, [0, 1, 0, 2], False, 0.875039),
])
def test_losses_worked_by_hand(negatives, documents, ids, expected):
    losses = run(2, known_losses, negatives, documents, ids)
    assert losses == pytest.approx([expected] * 2, abs=1e-6)


# --- Training ------------------------------------------------------------------------------------

def train(case, steps=2):
    """AdamW, clipping and the temperature's bounds, as a training loop applies them."""
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = replace(case, modality=("halves", "swapped")[step % 2])
        accumulate(model, own_rows(batch, dist.rank(), 0), batch)
        dist.sync_gradients(model.parameters())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        model["scale"].clamp_()
    dist.check_equal_parameters(model)
    return norms, {n: p.detach() for n, p in model.named_parameters()}


def test_training_steps_leave_all_processes_bitwise_equal_and_equal_to_one_process():
    (norms, alone), = run(1, train, Case((12,), negatives=(1,)))
    assert min(norms) > 0.1                                     # the clipping did something
    assert alone["scale.log_scale"] != build(Case())["scale"].log_scale
    for world_size in (2, 3):
        replies = run(world_size, train, Case(SHARES[world_size], negatives=(1,)))
        for other_norms, other in replies:
            assert other_norms == replies[0][0] == pytest.approx(norms, rel=1e-10)
            assert all(torch.equal(other[n], replies[0][1][n]) for n in alone)
            assert all(relative_error(other[n], alone[n]) < 1e-8 for n in alone)


def clip_after_the_sum():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0] if dist.rank() == 0 else [-3.0, 4.0]) / 2      # of a mean
    dist.sync_gradients([p])
    return nn.utils.clip_grad_norm_([p], 1.0).item(), p.grad


def test_clipping_sees_the_summed_gradient():
    for norm, grad in run(2, clip_after_the_sum):               # clipped before: (0, 0.8)
        assert norm == 4 and torch.allclose(grad, torch.tensor([0.0, 1.0]))


# --- The scale conventions -----------------------------------------------------------------------

def convention(gather, loss):
    """The summed gradient of one pairing in the table of dist's docstring."""
    case, world_size, r = Case(SHARES[dist.world_size()]), dist.world_size(), dist.rank()
    model = build(case)
    queries, documents, _, _ = flatten(own_rows(case, r, 0))
    q, d = model["query"](queries), model["document"](documents)
    everyone = [dist.gather_with_grad(x) for x in (q, d)]
    if gather == "own part only":
        n = len(q)
        everyone = [torch.cat([x[:r * n].detach(), own, x[(r + 1) * n:].detach()])
                    for x, own in zip(everyone, (q, d))]
    rows = torch.arange(len(q)) + r * len(q)
    if loss.startswith("all rows"):
        q, rows = everyone[0], torch.arange(12)
    losses = F.cross_entropy(model["scale"](q @ everyone[1].T), rows, reduction="none")     # (N,)
    value = {"own rows, sum / M": losses.sum() / 12, "own rows, mean": losses.mean(),
             "own rows, mean * W": losses.mean() * world_size, "all rows, mean": losses.mean()}
    value[loss].backward()
    dist.sync_gradients(model.parameters())
    return encoders_and_temperature({n: p.grad for n, p in model.named_parameters()})


def encoders_and_temperature(grads):
    encoders = [g.flatten() for n, g in grads.items() if g is not None and "scale" not in n]
    return torch.cat(encoders), grads["scale.log_scale"]


TABLE = re.findall(r"^ +(with gradient|own part only)"
                   r" +((?:own|all) rows, (?:mean \* W|mean|sum / M))"
                   r" +(1|W\^2|W|another)(?: +(1/W|W|1)(?: +temperature: \* (W))?)?",
                   dist.__doc__, re.MULTILINE)


def test_the_table_has_six_conventions():
    assert len(TABLE) == 6


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("gather, loss, summed, averaged, temperature", TABLE)
def test_each_scale_convention_gives_the_multiple_that_the_docstring_says(
        world_size, gather, loss, summed, averaged, temperature):
    want = encoders_and_temperature(reference(Case(SHARES[world_size]))[1])
    got = run(world_size, convention, gather, loss)[0]
    if summed == "another":
        assert F.cosine_similarity(got[0], want[0], dim=0) < 0.99
        return
    factor = {"1": 1, "W": world_size, "W^2": world_size**2, "1/W": 1 / world_size}
    assert relative_error(got[0], factor[summed] * want[0]) <= 1e-10
    assert relative_error(got[0] / world_size, factor[averaged] * want[0]) <= 1e-10
    assert relative_error(got[1], factor[summed] * factor[temperature or "1"] * want[1]) <= 1e-10


def test_loss_times_w_then_averaged_is_the_gradient_of_the_sum_of_the_processes_means():
    case = Case(SHARES[3])
    model = build(case)
    queries, documents, positives, _ = flatten(make_rows(case))
    scores = model["scale"](model["query"](queries) @ model["document"](documents).T)
    rows_of_processes = F.cross_entropy(scores, positives, reduction="none").split(case.shares)
    sum(rows.mean() for rows in rows_of_processes).backward()
    sum_of_means, _ = encoders_and_temperature({n: p.grad for n, p in model.named_parameters()})
    averaged = run(3, convention, "with gradient", "own rows, mean * W")[0][0] / 3
    ours = encoders_and_temperature(run(3, gradient, case)[0][1])[0]
    assert relative_error(averaged, sum_of_means) <= 1e-10
    assert relative_error(averaged, 3 * ours) <= 1e-10          # W times what this file computes
