"""Labels that are none, batches that teach nothing, cut vectors, and metrics that stay honest."""
import math

import pytest
import torch
import torch.nn.functional as F

import supervised_losses as S
from losses import LogitScale, info_nce, matryoshka, similarity

SOFT = S.LOSSES["batch_hard_soft_margin_triplet"]


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


A, B = unit(4, 6), unit(4, 6, seed=1)
HEAD = torch.nn.Linear(18, 3, dtype=torch.float64)
LABELLED = {                                    # losses of four rows and their labels
    "cosent": (S.cosent, [0.1, 0.2, 0.3, 0.4]),
    "angle": (S.angle, [0.1, 0.2, 0.3, 0.4]),
    "cosine_regression": (S.cosine_regression, [0.1, 0.2, 0.3, 0.4]),
    "contrastive": (S.contrastive, [0.0, 1.0, 1.0, 0.0]),
    "online_contrastive": (S.online_contrastive, [0.0, 1.0, 1.0, 0.0]),
    "contrastive_tension": (S.contrastive_tension, [0.0, 1.0, 1.0, 0.0]),
    "softmax_classification": (lambda a, b, y: S.softmax_classification(a, b, y, HEAD),
                               [0.0, 1.0, 2.0, 0.0]),
    "batch_hard": (lambda a, b, y: S.batch_hard_triplet(a, y), [0.0, 0.0, 1.0, 1.0]),
    "batch_soft": (lambda a, b, y: SOFT(a, y), [0.0, 0.0, 1.0, 1.0]),
    "batch_semi_hard": (lambda a, b, y: S.batch_semi_hard_triplet(a, y), [0.0, 0.0, 1.0, 1.0]),
    "batch_all": (lambda a, b, y: S.batch_all_triplet(a, y), [0.0, 0.0, 1.0, 1.0]),
    "margin_mse": (lambda a, b, y: S.margin_mse(a[:2], b, y, torch.tensor([0, 2])), [1.0, 2, 3, 4]),
    "distill_kl": (lambda a, b, y: S.distill_kl(a[:2], b, y, torch.tensor([0, 2])), [1.0, 2, 3, 4]),
}


@pytest.mark.parametrize("name", LABELLED)
def test_a_label_that_is_none_is_refused_with_its_row(name):
    loss, labels = LABELLED[name]
    assert loss(A, B, torch.tensor(labels)).isfinite()
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="row 2: label (nan|inf)"):
            loss(A, B, torch.tensor([*labels[:2], bad, labels[3]]))
    with pytest.raises(ValueError, match="4 rows need as many labels"):
        loss(A, B, torch.tensor(labels[:3]))


@pytest.mark.parametrize("name, label", [
    ("contrastive", 2.0), ("contrastive", 0.5), ("online_contrastive", -1.0),
    ("contrastive_tension", 3.0), ("softmax_classification", 3.0),
    ("softmax_classification", -1.0)])
def test_a_label_of_no_known_kind_is_refused(name, label):
    loss, labels = LABELLED[name]
    with pytest.raises(ValueError, match="row 1: label .*expected one of"):
        loss(A, B, torch.tensor([labels[0], label, *labels[2:]]))


@pytest.mark.parametrize("loss", [S.batch_hard_triplet, SOFT, S.batch_semi_hard_triplet,
                                  S.batch_all_triplet])
@pytest.mark.parametrize("labels", [[5, 5, 5, 5], [1, 2, 3, 4]])
def test_one_class_or_no_pair_within_a_class_teaches_nothing(loss, labels):
    x = A.clone().requires_grad_()
    value = loss(x, torch.tensor(labels))
    value.backward()
    assert value.item() == 0.0 and x.grad.abs().max() == 0.0


def test_anchors_without_a_positive_or_a_negative_do_not_dilute_the_mean():
    """A class of one has no pair: with and without it the hard triplets of the others are alike."""
    x, labels = torch.cat([A, -A[:1] * 9]), torch.tensor([0, 0, 1, 1, 2])
    for distance in ("euclidean", "manhattan"):         # the fifth row is too far to be a negative
        torch.testing.assert_close(S.batch_hard_triplet(x, labels, distance=distance),
                                   S.batch_hard_triplet(A, labels[:4], distance=distance))


@pytest.mark.parametrize("loss", [S.cosent, S.angle])
def test_equal_scores_have_no_order_and_no_loss(loss):
    a = A.clone().requires_grad_()
    value = loss(a, B, torch.ones(4))
    value.backward()
    assert value.item() == 0.0 and a.grad.abs().max() == 0.0


@pytest.mark.parametrize("distance", ["cosine", "euclidean", "manhattan"])
def test_equal_texts_and_all_duplicates_have_finite_gradients(distance):
    x = A[:1].repeat(4, 1).requires_grad_()
    labels = torch.tensor([0, 0, 1, 1])
    total = (S.batch_hard_triplet(x, labels, distance=distance)
             + S.batch_all_triplet(x, labels, distance=distance)
             + S.batch_semi_hard_triplet(x, labels, distance=distance)
             + S.triplet(x, x, x, distance=distance)
             + S.contrastive(x, x, labels, distance=distance)
             + S.online_contrastive(x, x, labels, distance=distance))
    total.backward()
    assert total.isfinite() and x.grad.isfinite().all()
    assert S.triplet(x, x, x, margin=0.3, distance=distance).item() == pytest.approx(0.3)


def test_distances_of_close_vectors_keep_their_digits():
    """2 - 2 cos would give 0.0 or noise for two float32 unit vectors 1e-5 apart."""
    a = F.normalize(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    b = a.clone()
    b[0, 0] += 1e-5
    exact = (a.double() - b.double()).norm().item()
    assert S.distances(a, b, "euclidean").item() == pytest.approx(exact, rel=1e-3)
    with pytest.raises(ValueError, match="chebyshev"):
        S.distances(a, b, "chebyshev")


@pytest.mark.parametrize("loss", [S.margin_mse, S.distill_kl])
def test_a_teacher_needs_a_negative_somewhere_and_a_positive_in_front(loss):
    with pytest.raises(ValueError, match="hard negative|negative; got"):
        loss(A, B, torch.ones(4), torch.arange(4))
    with pytest.raises(ValueError, match="first in column 0"):
        loss(A[:2], B, torch.ones(4), torch.tensor([1, 2]))
    uneven = loss(A[:2], B, torch.tensor([1.0, 2, 3, 0]), torch.tensor([0, 3]))  # 2 and 0 negatives
    assert uneven.isfinite() and uneven > 0


def test_a_teacher_scored_like_the_student_is_a_loss_of_zero():
    scores = torch.tensor([(A[0] * B[0]).sum(), (A[0] * B[1]).sum(), (A[1] * B[2]).sum(),
                           (A[1] * B[3]).sum()]) + 3.0               # a constant does not matter
    for loss in (S.margin_mse, S.distill_kl):
        assert loss(A[:2], B, scores, torch.tensor([0, 2])).item() == pytest.approx(0.0, abs=1e-12)


def test_a_teacher_of_another_size_or_with_a_nan_is_refused():
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(4, 5\)"):
        S.embedding_distillation(A, B[:, :5])
    bad = B.clone()
    bad[3, 1] = math.nan
    with pytest.raises(ValueError, match="row 3"):
        S.embedding_distillation(A, bad)


def test_the_last_negative_gone_leaves_only_the_positive_hinge():
    everything = torch.ones(4, 4, dtype=torch.bool)
    a = A.clone().requires_grad_()
    value = S.mega_batch_margin(a, B, everything)
    value.backward()
    expected = F.relu(0.8 - F.cosine_similarity(A, B)).mean()
    torch.testing.assert_close(value.detach(), expected)
    assert a.grad.isfinite().all()
    assert S.mega_batch_margin(A[:1], A[:1]).item() == 0.0


def test_no_word_at_all_is_a_loss_of_zero_and_any_chunk_gives_the_same():
    hidden, weight = unit(2, 5, 6).requires_grad_(), unit(9, 6, seed=1).requires_grad_()
    nothing = S.chunked_token_cross_entropy(hidden, weight, torch.full((2, 5), -100))
    assert nothing.item() == 0.0
    words = torch.tensor([[1, 2, 3, -100, -100], [8, 0, 4, 4, 7]])
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), words.flatten())
    want = torch.autograd.grad(expected, (hidden, weight))
    for chunk in (1, 3, 100):
        value = S.chunked_token_cross_entropy(hidden, weight, words, chunk)
        torch.testing.assert_close(value, expected)
        for g, w in zip(torch.autograd.grad(value, (hidden, weight)), want):
            torch.testing.assert_close(g, w)


def test_words_hold_the_logits_of_one_chunk_only():
    hidden, weight = unit(64, 4).requires_grad_(), unit(500, 4, seed=1)
    saved = []
    keep = lambda x: saved.append(x.numel()) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        S.chunked_token_cross_entropy(hidden, weight, torch.arange(64), chunk=8)
    assert max(saved) <= weight.numel() < 8 * 500


def test_half_precision_products_stay_float32_under_autocast():
    a, b, x = A.float(), B.float(), A.float()
    labels = torch.tensor([0, 1, 1, 0])
    losses = [lambda: S.siglip(a, b, LogitScale(0.1, bias=-10.0), torch.arange(4)),
              lambda: S.gist(a, b, b, a, 20.0, torch.arange(4)), lambda: S.mega_batch_margin(a, b),
              lambda: S.batch_all_triplet(x, labels), lambda: S.cosent(a, b, torch.arange(4.0)),
              lambda: S.softmax_classification(a, b, labels, HEAD.float()),
              lambda: S.chunked_token_cross_entropy(a, b, torch.arange(4))]
    for loss in losses:
        plain = loss()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(loss(), plain)
    HEAD.double()


# --- A guide, SigLIP over processes, Matryoshka ---------------------------------------------------

@pytest.mark.parametrize("positive, threshold", [(-0.50, -0.525), (0.80, 0.76)])
def test_a_relative_margin_lies_below_the_positive_for_negative_scores_too(positive, threshold):
    near, far = threshold + 0.01, threshold - 0.01
    scores = torch.tensor([[near, far]])
    mask = S.guide_mask(scores, torch.tensor([[positive]]), 0.05, relative=True)
    assert mask.tolist() == [[True, False]]
    scores = torch.tensor([[-0.49, -0.80, -0.52]])
    assert S.guide_mask(scores, torch.tensor([[-0.5]]), 0.05, relative=True).tolist() == [
        [True, False, True]]
    assert S.guide_mask(scores, torch.tensor([[-0.5]]), 0.05).tolist() == [[True, False, True]]
    assert S.guide_mask(scores, torch.tensor([[-0.5]])).tolist() == [[True, False, False]]


def test_a_guide_mask_is_an_exclude_mask_of_info_nce():
    positives = torch.arange(4)
    guide = similarity(A, B)
    mask = S.guide_mask(guide, guide.gather(1, positives[:, None]), 0.1)
    torch.testing.assert_close(info_nce(A, B, 5.0, positives, mask), S.gist(
        A, B, A, B, 5.0, positives, margin=0.1, directions=("query_to_doc",)))


def test_siglip_splits_by_queries():
    scale = LogitScale(0.1, bias=-10.0)
    parts = [S.siglip(A[rows], B, scale, torch.arange(4)[rows], reduction="sum")
             for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(parts) / 4, S.siglip(A, B, scale, torch.arange(4)))


def test_matryoshka_dims_in_any_order_give_one_loss_and_leave_the_vectors_alone():
    q, d = unit(4, 16), unit(8, 16, seed=1)
    before, results = q.clone(), []
    for dims in ([4, 16, 8], [16, 8, 4], [8, 4, 16]):
        a, b = q.clone().requires_grad_(), d.clone().requires_grad_()
        loss = matryoshka(info_nce, dims)(a, b, scale=10.0)
        results.append([loss.detach(), *torch.autograd.grad(loss, (a, b))])
    for other in results[1:]:
        for x, y in zip(results[0], other):
            torch.testing.assert_close(x, y)
    assert torch.equal(q, before)


def test_a_cut_vector_has_unit_length_again():
    seen = []
    matryoshka(lambda x: seen.append(x) or x.sum(), [2])(torch.tensor([[3., 4., 0., 12.]]) / 13)
    torch.testing.assert_close(seen[0], torch.tensor([[0.6, 0.8]]))


def test_matryoshka_cuts_all_representations_and_nothing_else():
    q, d = unit(4, 8), unit(8, 8, seed=1)
    rows = torch.tensor([1, 2])
    options = {"scale": 5.0, "reduction": "none", "directions": ("query_to_doc", "query_to_query")}
    whole = matryoshka(info_nce, [4, 8])(q, d, **options)
    assert torch.equal(whole, matryoshka(info_nce, [4, 8])(q, d, all_queries=None, **options))
    part = matryoshka(info_nce, [4, 8])(q[rows], d, positives=torch.arange(4) * 2, all_queries=q,
                                          query_rows=rows, **options)
    torch.testing.assert_close(part, whole[rows])


def test_matryoshka_refuses_what_it_cannot_cut_and_works_again_afterwards():
    for dims, weights in (([], None), ([0, 4], None), ([4], [1.0, 2.0])):
        with pytest.raises(ValueError, match="matryoshka needs"):
            matryoshka(info_nce, dims, weights)
    loss = matryoshka(info_nce, [4, 32])
    with pytest.raises(ValueError, match="32 is above the embedding size 6"):
        loss(A, B, scale=5.0)
    assert loss(unit(3, 32), unit(3, 32), scale=5.0).isfinite()


# --- Ranking metrics ------------------------------------------------------------------------------

def scores_of(ranking, pool):
    """One query's scores (1, pool) under which `ranking` comes first, in this order."""
    scores = torch.zeros(1, pool)
    scores[0, ranking] = torch.arange(len(ranking), 0, -1.0)
    return scores


def test_metrics_have_the_values_worked_by_hand():
    a, b, x, y = 0, 1, 2, 3
    twice = S.ranking_metrics(scores_of([a, x], 4), [[a, a]], ks=(2,))
    assert twice["recall@2"] == 1.0 and twice["ndcg@2"] == 1.0        # not 2 and 1.63
    one_of_two = S.ranking_metrics(scores_of([a, x, y], 4), [[a, b]], ks=(3,))
    assert one_of_two["ndcg@3"] == pytest.approx(0.613147, abs=1e-6)
    second_and_fourth = S.ranking_metrics(scores_of([x, a, y, b], 4), [{a, b}])
    assert second_and_fourth["ndcg@10"] == pytest.approx(0.650921, abs=1e-6)
    metrics = S.ranking_metrics(scores_of([1, 0, 20, 30, 40], 50), [range(5)], ks=(1, 2, 3, 4, 5))
    assert [metrics[f"recall@{k}"] for k in range(1, 6)] == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.4])
    assert S.ranking_metrics(scores_of([x, a], 4), [[a]])["mrr@10"] == 0.5


def test_a_model_that_scores_all_alike_finds_nothing():
    metrics = S.ranking_metrics(torch.zeros(3, 20), torch.arange(3))
    assert set(metrics.values()) == {0.0}
    two = S.ranking_metrics(torch.zeros(1, 20), [[4, 7]], ks=(20,))
    assert two["mrr@20"] == pytest.approx(1 / 19)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_metrics_equal_a_sort_by_hand_with_ties_and_several_relevant_documents(block):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (30, 25), generator=generator).float()      # many ties
    relevant = [torch.randperm(25, generator=generator)[:1 + i % 5].tolist() for i in range(30)]
    rows = S.ranking_metrics(lambda i: scores[i], relevant, ks=(1, 3, 10, 99), block=block,
                             reduction="none")
    for i, mine in enumerate(relevant):
        # Best first; among equal scores the documents that are not relevant come first.
        ranking = sorted(range(25), key=lambda j: (-scores[i, j].item(), j in mine))
        ranks = [r for r, j in enumerate(ranking, 1) if j in mine]
        for k in (1, 3, 10, 99):
            hits = [r for r in ranks if r <= k]
            ideal = sum(1 / math.log2(1 + r) for r in range(1, min(k, len(mine)) + 1))
            assert rows[f"recall@{k}"][i].item() == pytest.approx(len(hits) / len(mine))
            assert rows[f"mrr@{k}"][i].item() == pytest.approx(1 / hits[0] if hits else 0.0)
            assert rows[f"ndcg@{k}"][i].item() == pytest.approx(
                sum(1 / math.log2(1 + r) for r in hits) / ideal, rel=1e-5)
    means = S.ranking_metrics(scores, relevant, ks=(1, 3, 10, 99))
    assert means == pytest.approx({name: v.mean().item() for name, v in rows.items()}, rel=1e-5)
    parts = [S.ranking_metrics(scores[i], relevant[i], ks=(1, 3, 10, 99), reduction="sum")
             for i in (slice(0, 0), slice(0, 11), slice(11, 30))]           # one process has none
    assert means == pytest.approx({name: sum(p[name] for p in parts) / 30 for name in means})


@pytest.mark.parametrize("relevant, scores", [
    ([[0], []], torch.zeros(2, 3)), ([[0], [3]], torch.zeros(2, 3)),
    ([[0], [1]], torch.tensor([[0.0, 1.0, 2.0], [0.0, math.nan, 1.0]]))])
def test_metrics_refuse_missing_answers_and_scores_that_are_none(relevant, scores):
    with pytest.raises(ValueError, match="leave out a query"):
        S.ranking_metrics(scores, relevant)
