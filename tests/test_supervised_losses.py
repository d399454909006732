"""Every loss against a double loop, against sentence-transformers, in chunks, and at its edges."""
import pytest
import torch
import torch.nn.functional as F

import supervised_losses as S
from gradcache import grad_cache_step
from losses import LogitScale, info_nce, info_nce_from_scores, matryoshka


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(*shape, seed=0):
    return F.normalize(normal(*shape, seed=seed), dim=-1)


def cos(x, y):
    return (x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt()


def distance(x, y, metric):
    if metric == "cosine":
        return 1 - cos(x, y)
    return (x - y).abs().sum() if metric == "manhattan" else ((x - y) ** 2).sum().sqrt()


def hinge(x):
    return x if x > 0 else 0 * x


def log_sigmoid(x):
    return -torch.log(1 + torch.exp(-x))


def mean(values):
    return sum(values) / len(values)


# Ten rows, in classes of 2, 3, 2 and 3; documents: four queries with 2, 0, 3 and 1 negatives.
A, C, E = unit(10, 6), unit(10, 6, seed=2), unit(10, 6, seed=11)
B = F.normalize(A + 0.5 * unit(10, 6, seed=1), dim=1)               # near A
SCORES = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.3, 0.9, 0.7, 0.2])
BINARY = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1, 0])
CLASSES = torch.tensor([7, 3, 7, 5, 3, 9, 5, 7, 3, 9])
Q, D, COLUMNS = unit(4, 6, seed=3), unit(10, 6, seed=4), torch.tensor([0, 3, 4, 8])
OWN = [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]]
TEACHER = normal(10, seed=5)
GUIDE_Q, GUIDE_D = unit(4, 3, seed=6), unit(10, 3, seed=7)
VOCABULARY, WORDS = normal(11, 6, seed=8), torch.tensor([3, 0, -100, 10, 5, -100, 2, 2, 9, 1])
HEAD = torch.nn.Linear(18, 10, dtype=torch.float64)
EXCLUDE = torch.zeros(4, 10, dtype=torch.bool)
EXCLUDE[0, [0, 5]] = EXCLUDE[2, 9] = True


def loop_cosent(a, b, similarity=cos):
    s = [similarity(x, y) for x, y in zip(a, b)]
    return torch.log(1 + sum(torch.exp(20 * (s[j] - s[i])) for i in range(10) for j in range(10)
                             if SCORES[i] > SCORES[j]))


def complex_angle(x, y):
    x, y = x / (x * x).sum().sqrt(), y / (y * y).sum().sqrt()
    z = (torch.complex(x[:3], x[3:]) * torch.complex(y[:3], -y[3:])).sum()
    return (z.real + z.imag).abs()


def loop_contrastive(a, b, metric="cosine"):
    d = [distance(x, y, metric) for x, y in zip(a, b)]
    return mean([0.5 * (x if label else hinge(0.5 - x)) ** 2 for x, label in zip(d, BINARY)])


def loop_online(a, b):
    d = [distance(x, y, "cosine") for x, y in zip(a, b)]
    near = min(x for x, label in zip(d, BINARY) if not label)
    far = max(x for x, label in zip(d, BINARY) if label)
    return sum(x ** 2 if label else hinge(0.5 - x) ** 2 for x, label in zip(d, BINARY)
               if (x > near if label else x < far)) / 10


def loop_softmax(a, b):
    logits = [HEAD.weight @ torch.cat([x, y, (x - y).abs()]) + HEAD.bias for x, y in zip(a, b)]
    return mean([torch.log(torch.exp(z).sum()) - z[c] for z, c in zip(logits, CLASSES)])


def loop_siglip(q, d, scale=10.0, bias=-10.0):
    logit = lambda i, j: scale * (q[i] * d[j]).sum() + bias
    return mean([sum(-log_sigmoid(logit(i, j) if j == own[0] else -logit(i, j)) for j in range(10)
                     if j == own[0] or not EXCLUDE[i, j]) for i, own in enumerate(OWN)])


def loop_triplet(a, p, n, metric):
    return mean([hinge(distance(x, y, metric) - distance(x, z, metric) + 0.5)
                 for x, y, z in zip(a, p, n)])


def triplets(x, metric="cosine"):
    """{anchor: [(d(a, p), [d(a, n) of all negatives])]}"""
    return {a: [(distance(x[a], x[p], metric),
                 [distance(x[a], x[n], metric) for n in range(10) if CLASSES[n] != CLASSES[a]])
                for p in range(10) if p != a and CLASSES[p] == CLASSES[a]] for a in range(10)}


def loop_hard(x, metric="cosine", soft=False):
    gaps = [max(p for p, _ in pairs) - min(pairs[0][1]) for pairs in triplets(x, metric).values()]
    return mean([torch.log(1 + torch.exp(g)) if soft else hinge(g + 0.5) for g in gaps])


def loop_semi_hard(x):
    losses = []
    for pairs in triplets(x).values():
        for p, negatives in pairs:
            beyond = [n for n in negatives if n > p]
            losses.append(hinge(p - (min(beyond) if beyond else max(negatives)) + 0.5))
    return mean(losses)


def loop_all(x):
    return mean([p - n + 0.5 for pairs in triplets(x).values() for p, negatives in pairs
                 for n in negatives if p - n + 0.5 > 0])


def loop_margin_mse(q, d):
    gap = lambda i, j: (q[i] * d[j]).sum() - TEACHER[j]
    return mean([(gap(i, own[0]) - gap(i, n)) ** 2 for i, own in enumerate(OWN) for n in own[1:]])


def loop_kl(q, d, temperature=2.0):
    total = 0
    for i, own in enumerate(OWN):
        student = torch.stack([(q[i] * d[j]).sum() / temperature for j in own])
        teacher = torch.exp(TEACHER[own] / temperature)
        teacher, student = teacher / teacher.sum(), student - torch.log(torch.exp(student).sum())
        total = total + sum(t * (torch.log(t) - s) for t, s in zip(teacher, student))
    return total / 4 * temperature ** 2


def loop_gist(q, d, margin=0.1):
    losses = []
    for i, own in enumerate(OWN):
        p = own[0]
        threshold = (GUIDE_Q[i] * GUIDE_D[p]).sum() - margin
        row = [(q[i] * d[j]).sum() * 5 for j in range(10)
               if j == p or (GUIDE_Q[i] * GUIDE_D[j]).sum() <= threshold]
        for k in set(range(4)) - {i}:
            if (GUIDE_Q[i] * GUIDE_Q[k]).sum() <= threshold:
                row.append((q[i] * q[k]).sum() * 5)
            if (GUIDE_D[p] * GUIDE_D[OWN[k][0]]).sum() <= threshold:
                row.append((d[p] * d[OWN[k][0]]).sum() * 5)
        losses.append(torch.log(sum(torch.exp(x) for x in row)) - (q[i] * d[p]).sum() * 5)
    return mean(losses)


def loop_mega(a, b):
    worst = [max(cos(a[i], b[j]) for j in range(10) if j != i) for i in range(10)]
    return mean([hinge(0.8 - cos(a[i], b[i])) + hinge(worst[i] - 0.3) for i in range(10)])


def loop_tension(a, b):
    return mean([-log_sigmoid((x * y).sum() * (1 if z else -1)) for x, y, z in zip(a, b, BINARY)])


def loop_words(hidden):
    return mean([torch.log(torch.exp(VOCABULARY @ h).sum()) - VOCABULARY[w] @ h
                 for h, w in zip(hidden, WORDS) if w >= 0])


SOFT = S.LOSSES["batch_hard_soft_margin_triplet"]
# name: (loss of representations, the same by a double loop, the representations)
CASES = {
    "cosent": (lambda a, b: S.cosent(a, b, SCORES), loop_cosent, (A, B)),
    "angle": (lambda a, b: S.angle(a, b, SCORES),
              lambda a, b: loop_cosent(a, b, complex_angle), (A, B)),
    "cosine_regression": (lambda a, b: S.cosine_regression(a, b, SCORES), lambda a, b: mean(
        [(cos(x, y) - s) ** 2 for x, y, s in zip(a, b, SCORES)]), (A, B)),
    "contrastive": (lambda a, b: S.contrastive(a, b, BINARY), loop_contrastive, (A, B)),
    "contrastive_euclidean": (lambda a, b: S.contrastive(a, b, BINARY, distance="euclidean"),
                              lambda a, b: loop_contrastive(a, b, "euclidean"), (A, B)),
    "online_contrastive": (lambda a, b: S.online_contrastive(a, b, BINARY), loop_online, (A, B)),
    "softmax_classification": (lambda a, b: S.softmax_classification(a, b, CLASSES, HEAD),
                               loop_softmax, (A, B)),
    "siglip": (lambda q, d: S.siglip(q, d, LogitScale(0.1, bias=-10.0), COLUMNS, EXCLUDE),
               loop_siglip, (Q, D)),
    **{f"triplet_{m}": (lambda a, p, n, m=m: S.triplet(a, p, n, distance=m),
                        lambda a, p, n, m=m: loop_triplet(a, p, n, m), (A, C, E))
       for m in ("cosine", "euclidean", "manhattan")},
    **{f"batch_hard_triplet_{m}": (lambda x, m=m: S.batch_hard_triplet(x, CLASSES, distance=m),
                           lambda x, m=m: loop_hard(x, m), (A,))
       for m in ("cosine", "euclidean", "manhattan")},
    "batch_hard_soft_margin_triplet": (lambda x: SOFT(x, CLASSES),
                                       lambda x: loop_hard(x, soft=True), (A,)),
    "batch_semi_hard_triplet": (lambda x: S.batch_semi_hard_triplet(x, CLASSES), loop_semi_hard,
                                (A,)),
    "batch_all_triplet": (lambda x: S.batch_all_triplet(x, CLASSES), loop_all, (A,)),
    "margin_mse": (lambda q, d: S.margin_mse(q, d, TEACHER, COLUMNS), loop_margin_mse, (Q, D)),
    "distill_kl": (lambda q, d: S.distill_kl(q, d, TEACHER, COLUMNS, 2.0), loop_kl, (Q, D)),
    "embedding_distillation": (lambda a: S.embedding_distillation(a, B), lambda a: mean(
        [(a[i, k] - B[i, k]) ** 2 for i in range(10) for k in range(6)]), (A,)),
    "gist": (lambda q, d: S.gist(q, d, GUIDE_Q, GUIDE_D, 5.0, COLUMNS, margin=0.1),
             loop_gist, (Q, D)),
    "mega_batch_margin": (S.mega_batch_margin, loop_mega, (A, C)),
    "contrastive_tension": (lambda a, b: S.contrastive_tension(a, b, BINARY), loop_tension, (A, C)),
    "tsdae": (lambda h: S.chunked_token_cross_entropy(h, VOCABULARY, WORDS, chunk=3), loop_words,
              (normal(10, 6, seed=9),)),
    "matryoshka": (lambda q, d: matryoshka(info_nce, [2, 6, 4], [1.0, 0.5, 2.0])(
        q, d, scale=5.0, positives=COLUMNS), lambda q, d: sum(w * mean(
            [torch.log(sum(torch.exp(5 * cos(q[i, :k], d[j, :k])) for j in range(10)))
             - 5 * cos(q[i, :k], d[own[0], :k]) for i, own in enumerate(OWN)])
            for k, w in ((2, 1.0), (6, 0.5), (4, 2.0))), (Q, D)),
}


def leaves(tensors):
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_a_double_loop(name):
    loss, loop, reps = CASES[name]
    a, b = leaves(reps), leaves(reps)
    got, expected = loss(*a), loop(*b)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    assert expected > 1e-3                                          # the hinges are not all closed
    for g, e in zip(torch.autograd.grad(got, a), torch.autograd.grad(expected, b)):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-9)
        assert e.abs().max() > 1e-4


CHUNKED = {name: (loss, reps) for name, (loss, _, reps) in CASES.items()} | {
    "info_nce": (lambda q, d: info_nce(q, d, 5.0, COLUMNS, EXCLUDE), (Q, D)),
    "info_nce_all_options": (lambda q, d: info_nce(
        q, d, 5.0, COLUMNS, EXCLUDE, tile=3, label_smoothing=0.1, hardness_mode="hard_negatives",
        hardness_strength=5.0, directions=("query_to_doc", "query_to_query", "doc_to_query",
                                           "doc_to_doc")), (Q, D)),
    "simcse": (lambda a, b: info_nce(a, b, 20.0), (A, B)),
    "late_interaction": (lambda q, d: info_nce_from_scores(S.maxsim(q, d), 5.0, COLUMNS),
                         (normal(4, 3, 6), normal(10, 5, 6, seed=1))),
    "matryoshka_of_triplets": (lambda x: matryoshka(S.batch_all_triplet, [3, 6])(
        x, labels=CLASSES), (A,)),
}


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("name", CHUNKED)
def test_every_loss_has_the_full_batch_gradient_in_chunks(name, chunk):
    loss_fn, inputs = CHUNKED[name]
    torch.manual_seed(0)
    towers = [torch.nn.Linear(6, 6, dtype=torch.float64) for _ in inputs]
    inputs = [x.clone() for x in inputs]
    expected = loss_fn(*[F.normalize(tower(x), dim=-1) for tower, x in zip(towers, inputs)])
    expected.backward()
    grads = [p.grad.clone() for tower in towers for p in tower.parameters()]
    for tower in towers:
        tower.zero_grad()
    encoders = [lambda x, tower=tower: F.normalize(tower(x), dim=-1) for tower in towers]
    loss, _ = grad_cache_step(encoders, inputs, loss_fn, chunk)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    for tower in towers:
        for p in tower.parameters():
            torch.testing.assert_close(p.grad, grads.pop(0), rtol=1e-10, atol=1e-12)


def test_parameters_of_a_loss_get_their_gradient_once():
    head, scale = torch.nn.Linear(18, 10, dtype=torch.float64), LogitScale(0.1, bias=-10.0)
    encoders, grads = [lambda x: x * 1.0] * 2, []
    for chunk in (10, 2):
        head.zero_grad()
        scale.zero_grad()
        reps = [A.clone().requires_grad_(), B.clone().requires_grad_()]
        grad_cache_step(encoders, reps, lambda a, b: S.softmax_classification(a, b, CLASSES, head)
                        + S.siglip(a, b, scale, torch.arange(10)), chunk)
        grads.append([p.grad.clone() for p in (*head.parameters(), *scale.parameters())])
    assert len(grads[0]) == 4 and all(g.abs().max() > 1e-3 for g in grads[0])
    for once, chunked in zip(*grads):
        torch.testing.assert_close(once, chunked)


def test_every_name_on_the_command_line_has_a_double_loop():
    assert not [name for name in S.LOSSES if not any(case.startswith(name) for case in CASES)]
    assert all(callable(loss) for loss in S.LOSSES.values())


# --- sentence-transformers ------------------------------------------------------------------------

class Pick(torch.nn.Module):
    """Stands for an encoder: the features already hold its vectors."""
    def __init__(self, key, size=6):
        super().__init__()
        self.key, self.device, self.get_embedding_dimension = key, "cpu", lambda: size

    def forward(self, features):
        return {"sentence_embedding": features[self.key]}


def interleaved(*columns):
    return torch.stack(columns, dim=1).flatten(0, 1)


def cosine_of_batch(x):
    return 1 - F.normalize(x, dim=1) @ F.normalize(x, dim=1).T


T, THIRD = normal(10, 3, seed=12), torch.arange(10) * 3
# name: (class of sentence-transformers, its options, columns of vectors, labels, the same here)
THEIRS = {
    "cosent": ("CoSENTLoss", {}, (A, B), SCORES, lambda a, b: S.cosent(a, b, SCORES)),
    "angle": ("AnglELoss", {}, (A, B), SCORES, lambda a, b: S.angle(a, b, SCORES)),
    "angle_odd": ("AnglELoss", {}, (A[:, :5], B[:, :5]), SCORES,
                  lambda a, b: S.angle(a, b, SCORES)),
    "cosine_regression": ("CosineSimilarityLoss", {}, (A, B), SCORES.double(),
                          lambda a, b: S.cosine_regression(a, b, SCORES)),
    "contrastive": ("ContrastiveLoss", {}, (A, B), BINARY,
                    lambda a, b: S.contrastive(a, b, BINARY)),
    "online_contrastive": ("OnlineContrastiveLoss", {}, (A, B), BINARY,
                           lambda a, b: S.online_contrastive(a, b, BINARY, reduction="sum")),
    "online_one_label": ("OnlineContrastiveLoss", {}, (A, B), BINARY * 0,
                         lambda a, b: S.online_contrastive(a, b, BINARY * 0, reduction="sum")),
    "triplet": ("TripletLoss", {}, (A, C, E), None,
                lambda a, p, n: S.triplet(a, p, n, 5.0, "euclidean")),
    "batch_hard": ("BatchHardTripletLoss", {}, (A,), CLASSES,
                   lambda x: S.batch_hard_triplet(x, CLASSES, 5.0, "euclidean")),
    "soft_margin": ("BatchHardSoftMarginTripletLoss", {}, (A,), CLASSES,
                    lambda x: SOFT(x, CLASSES, distance="euclidean")),
    "semi_hard": ("BatchSemiHardTripletLoss", {"margin": 0.5}, (A,), CLASSES,
                  lambda x: S.batch_semi_hard_triplet(x, CLASSES, 0.5, "euclidean")),
    "all_triplets": ("BatchAllTripletLoss", {"margin": 0.2, "distance_metric": cosine_of_batch},
                     (A,), CLASSES, lambda x: S.batch_all_triplet(x, CLASSES, 0.2)),
    "margin_mse": ("MarginMSELoss", {}, (A, B, C, E), T, lambda q, *d: S.margin_mse(
        q, interleaved(*d), T.flatten(), THIRD)),
    "distill_kl": ("DistillKLDivLoss", {"temperature": 2.0}, (A, B, C, E), T,
                   lambda q, *d: S.distill_kl(q, interleaved(*d), T.flatten(), THIRD, 2.0)),
    "embedding_distillation": ("MSELoss", {}, (A,), B, lambda a: S.embedding_distillation(a, B)),
    "mega_batch_margin": ("MegaBatchMarginLoss", {"use_mini_batched_version": False}, (A, C), None,
                          S.mega_batch_margin),
    "contrastive_tension": ("ContrastiveTensionLoss", {}, (A, C), BINARY,
                            lambda a, b: S.contrastive_tension(a, b, BINARY, "sum")),
    "matryoshka": ("MatryoshkaLoss", {"matryoshka_dims": [4, 6, 2],
                                      "matryoshka_weights": [1, 2, 3]}, (A, B), None,
                   lambda a, b: matryoshka(info_nce, [2, 4, 6], [3, 1, 2])(a, b, scale=20.0)),
}


@pytest.mark.parametrize("name", THEIRS)
def test_sentence_transformers_computes_the_same(name):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses",
                                 reason="sentence-transformers is not installed")
    theirs, options, columns, labels, ours = THEIRS[name]
    model = Pick("own")
    if name == "matryoshka":
        options = {"loss": losses.MultipleNegativesRankingLoss(model), **options}
    theirs = getattr(losses, theirs)(model, **options)
    a, b = leaves(columns), leaves(columns)
    loss, expected = ours(*a), theirs([{"own": x} for x in b], labels)
    torch.testing.assert_close(loss, expected, check_dtype=False, rtol=1e-6, atol=1e-7)
    for g, e in zip(torch.autograd.grad(loss, a), torch.autograd.grad(expected, b)):
        torch.testing.assert_close(g, e, check_dtype=False, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("negatives", [False, True])
def test_gist_is_that_of_sentence_transformers(margin, relative, negatives):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses",
                                 reason="sentence-transformers is not installed")
    theirs = losses.GISTEmbedLoss.__new__(losses.GISTEmbedLoss)     # its guide needs a tokenizer
    torch.nn.Module.__init__(theirs)
    for key, value in {"model": Pick("own"), "guide": Pick("guide"), "must_retokenize": False,
                       "margin_strategy": "relative" if relative else "absolute", "margin": margin,
                       "contrast_anchors": True, "contrast_positives": True, "temperature": 0.2,
                       "gather_across_devices": False,
                       "cross_entropy_loss": torch.nn.CrossEntropyLoss(),
                       "similarity_fct": torch.nn.CosineSimilarity(dim=-1)}.items():
        setattr(theirs, key, value)
    vectors, guides = [A, B, E][:2 + negatives], [unit(10, 4, seed=s) for s in (20, 21, 22)]
    a, b = leaves(vectors), leaves(vectors)
    q, *d = (F.normalize(x, dim=1) for x in a)                      # theirs takes the cosine
    loss = S.gist(q, interleaved(*d), guides[0], interleaved(*guides[1:2 + negatives]), 5.0,
                  torch.arange(10) * (1 + negatives), margin=margin, relative=relative)
    expected = theirs([{"own": x, "guide": g} for x, g in zip(b, guides)], None)
    torch.testing.assert_close(loss, expected)
    assert not torch.isclose(loss, info_nce(a[0], a[1], 5.0))
    for g, e in zip(torch.autograd.grad(loss, a), torch.autograd.grad(expected, b)):
        torch.testing.assert_close(g, e)


def test_softmax_classification_is_that_of_sentence_transformers():
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses",
                                 reason="sentence-transformers is not installed")
    theirs = losses.SoftmaxLoss(Pick("own"), sentence_embedding_dimension=6, num_labels=10)
    theirs.classifier = HEAD
    expected = theirs([{"own": A}, {"own": B}], CLASSES)
    torch.testing.assert_close(S.softmax_classification(A, B, CLASSES, HEAD), expected)
