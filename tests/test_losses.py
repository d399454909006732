"""InfoNCE and its options against double loops, hand-worked values, sentence-transformers."""
import math

import pytest
import torch
import torch.nn.functional as F

from losses import (
    LOSSES,
    LogitScale,
    clip_loss,
    in_batch_accuracy,
    info_nce,
    info_nce_from_scores,
    positive_columns,
)
from supervised_losses import maxsim

ALL = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")
CASES = {
    "plain": {},
    "symmetric": {"directions": ALL[:2], "partition_mode": "per_direction"},
    "clip_joint": {"directions": ALL[:2]},
    "gte": {"directions": ALL},
    "queries_among_themselves": {"directions": (ALL[0], ALL[2])},
    "hard_in_batch": {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    "hard_own": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    "hard_all_gte": {"hardness_mode": "all_negatives", "hardness_strength": 2.0, "directions": ALL},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed_gte": {"label_smoothing": 0.2, "directions": ALL},
    "smoothed_symmetric": {"label_smoothing": 0.3, "directions": ALL[:2],
                           "partition_mode": "per_direction", "hardness_mode": "hard_negatives",
                           "hardness_strength": 3.0},
}


def unit(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def ragged(seed=0):
    """Four queries with 2, 0, 3 and 1 negatives; document 4 is a duplicate of document 0."""
    q, d = unit(4, 6, seed=seed), unit(10, 6, seed=seed + 1)
    exclude = torch.zeros(4, 10, dtype=torch.bool)
    exclude[0, [0, 4]] = True                                   # its positive (stays), a copy
    exclude[1, 0] = exclude[2, 8] = exclude[3, 9] = True
    return q, d, torch.tensor([0, 3, 4, 8]), exclude


def double_loop(q, d, scale, positives, exclude=None, directions=("query_to_doc",),
                partition_mode="joint", hardness_mode=None, hardness_strength=0.0,
                label_smoothing=0.0):
    """InfoNCE as the docstring words it, one pair at a time. positives: a list of lists. (N,)"""
    no_negative = lambda i, j: exclude is not None and bool(exclude[i, j])

    def owner(j):
        while not any(j in columns for columns in positives):
            j -= 1
        return next(i for i, columns in enumerate(positives) if j in columns)

    losses = []
    for i, mine in enumerate(positives):
        p, rows = mine[0], []
        for direction in directions:
            row = []
            if direction == "query_to_doc":
                for j in range(len(d)):
                    s = sum(a * b for a, b in zip(q[i], d[j]))
                    own, positive = owner(j) == i, j in mine
                    boost = {None: False, "in_batch_negatives": not own,
                             "all_negatives": not positive,
                             "hard_negatives": own and not positive}[hardness_mode]
                    if positive or not no_negative(i, j):
                        row.append(s * scale + (hardness_strength * s.detach() if boost else 0))
            if direction == "doc_to_query":
                row = [sum(a * b for a, b in zip(q[k], d[p])) * scale for k in range(len(q))
                       if k == i or not no_negative(k, p)]
            if direction == "query_to_query":
                row = [sum(a * b for a, b in zip(q[i], q[k])) * scale for k in range(len(q))
                       if k != i and not no_negative(i, positives[k][0])]
            if direction == "doc_to_doc":
                row = [sum(a * b for a, b in zip(d[p], d[j])) * scale for j in range(len(d))
                       if owner(j) != i and not no_negative(i, j)]
            rows.append(row)
        if partition_mode == "joint":
            rows = [[x for row in rows for x in row]]
        target = sum(sum(a * b for a, b in zip(q[i], d[j])) * scale for j in mine) / len(mine)
        losses.append(sum(
            torch.log(sum(torch.exp(x) for x in row)) - (1 - label_smoothing) * target
            - label_smoothing * sum(row) / len(row) for row in rows) / len(rows))
    return torch.stack(losses)


def assert_same(value, inputs, expected, expected_inputs, tolerance=1e-12):
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(value.sum(), inputs)
    want = torch.autograd.grad(expected.sum(), expected_inputs)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w.to(g.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_option_equals_a_double_loop_with_ragged_documents(case, masked):
    q, d, positives, exclude = ragged()
    exclude = exclude if masked else None
    scale = torch.tensor(7.0, dtype=torch.float64)
    a, b = leaves(q, d, scale), leaves(q, d, scale)
    loss = info_nce(*a, positives, exclude, reduction="none", **CASES[case])
    expected = double_loop(*b, [[p] for p in positives.tolist()], exclude, **CASES[case])
    assert_same(loss, a, expected, b)


def test_several_positives_are_averaged_and_the_others_stay_candidates():
    q, d, _, exclude = ragged()
    positives = torch.tensor([[0, 2, -1], [3, -1, -1], [5, 4, 6], [8, -1, -1]])
    lists = [[0, 2], [3], [5, 4, 6], [8]]
    for options in ({}, {"label_smoothing": 0.1},
                    {"hardness_mode": "hard_negatives", "hardness_strength": 4.0}):
        a, b = leaves(q, d), leaves(q, d)
        loss = info_nce(*a, 5.0, positives, exclude, reduction="none", **options)
        assert_same(loss, a, double_loop(*b, 5.0, lists, exclude, **options), b)


@pytest.mark.parametrize("case", [c for c in CASES if "smoothed" not in c])
def test_sentence_transformers_computes_the_same_loss(case):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses",
                                 reason="sentence-transformers is not installed")
    util = pytest.importorskip("sentence_transformers.util")
    q, columns = unit(5, 8), [unit(5, 8, seed=k) for k in (1, 2, 3)]
    theirs = losses.MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=20.0, similarity_fct=util.dot_score, **CASES[case])
    a, b = leaves(q, torch.stack(columns, dim=1).flatten(0, 1)), leaves(q, *columns)
    loss, expected = info_nce(*a, 20.0, **CASES[case]), theirs.compute_loss_from_embeddings(b, None)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(loss, a)
    expected_grads = torch.autograd.grad(expected, b)
    torch.testing.assert_close(grads[0], expected_grads[0])
    torch.testing.assert_close(grads[1], torch.stack(expected_grads[1:], dim=1).flatten(0, 1))


@pytest.mark.parametrize("case", CASES)
def test_processes_that_keep_their_own_rows_add_up_to_the_whole(case):
    """Three processes with 1, 2 and 1 queries; gradients of queries and documents are summed."""
    q, d, positives, exclude = ragged()
    a, b = leaves(q, d), leaves(q, d)
    whole = info_nce(*a, 7.0, positives, exclude, **CASES[case])
    parts = [info_nce(b[0][rows], b[1], 7.0, positives, exclude, all_queries=b[0], query_rows=rows,
                      reduction="sum", **CASES[case]) / 4
             for rows in (torch.tensor([0]), torch.tensor([1, 2]), torch.tensor([3]))]
    assert_same(sum(parts), b, whole, a)


def test_without_options_own_queries_own_columns_and_all_documents_are_enough():
    q, d, positives, exclude = ragged()
    parts = [info_nce(q[rows], d, 7.0, positives[rows], exclude[rows], reduction="sum")
             for rows in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(sum(parts) / 4, info_nce(q, d, 7.0, positives, exclude))


@pytest.mark.parametrize("tile", [None, 3])
def test_a_process_without_a_query_adds_nothing(tile):
    q, d = leaves(torch.zeros(0, 6), torch.ones(10, 6))
    loss = info_nce(q, d, 7.0, torch.zeros(0, dtype=torch.long), tile=tile, reduction="sum")
    loss.backward()
    assert loss.item() == 0.0 and d.grad.abs().max() == 0.0


@pytest.mark.parametrize("case", CASES)
def test_exclude_may_be_a_function_that_makes_pieces_of_the_mask(case):
    q, d, positives, exclude = ragged()
    piece = lambda i, j: exclude[i[:, None], j]
    assert info_nce(q, d, 7.0, positives, piece, **CASES[case]) == info_nce(
        q, d, 7.0, positives, exclude, **CASES[case])


# --- Values worked by hand ------------------------------------------------------------------------

@pytest.mark.parametrize("negatives, expected", [(0, math.log(1 + 3 / math.e)),
                                                 (1, math.log(1 + 7 / math.e)), (2, 1.618729)])
def test_positives_are_found_at_their_columns_in_each_process_block(negatives, expected):
    """Two processes of two queries, all documents orthonormal, each query its own positive."""
    d = torch.eye(4 * (1 + negatives))
    for process in (0, 1):
        positives = positive_columns(2, 2 * (1 + negatives), offset=process * 2 * (1 + negatives))
        assert info_nce(d[positives], d, 1.0, positives).item() == pytest.approx(expected, abs=1e-6)
    if negatives == 2:                                   # labels 0..3 would have given another loss
        wrong = info_nce(d[positive_columns(4, 12)], d, 1.0, torch.arange(4)).item()
        assert wrong == pytest.approx(2.368730, abs=1e-6)


def test_a_copy_of_the_positive_is_no_negative():
    a, b, c = torch.eye(3)
    same = lambda d: (d[:, None] == d).all(dim=2)
    d = torch.stack([a, a, c])
    assert info_nce(d, d, 1.0).item() == pytest.approx(0.758478, abs=1e-6)
    assert info_nce(d, d, 1.0, exclude=same(d)).item() == pytest.approx(0.392656, abs=1e-6)
    d = torch.stack([a, b, a, c])                               # the copy lies in another process
    assert info_nce(d, d, 1.0).item() == pytest.approx(0.875039, abs=1e-6)
    assert info_nce(d, d, 1.0, exclude=same(d)).item() == pytest.approx(0.647557, abs=1e-6)


@pytest.mark.parametrize("directions", [ALL[:1], ALL[:2], ALL])
def test_a_row_with_nothing_but_its_positive_has_loss_zero_and_no_gradient(directions):
    exclude = torch.ones(3, 3, dtype=torch.bool)
    q, d = leaves(unit(3, 4), unit(3, 4, seed=1))
    loss = info_nce(q, d, 100.0, exclude=exclude, directions=directions)
    alone = info_nce(q[:1], d[:1], 100.0, directions=directions)    # a pool of one
    # In doc_to_query the pair stands once more: two equal candidates.
    expected = math.log(2) if "doc_to_query" in directions else 0.0
    for value in (loss, alone):
        assert value.item() == pytest.approx(expected, abs=1e-12 if expected else 0.0)
        for grad in torch.autograd.grad(value, (q, d), retain_graph=True):
            assert grad.abs().max() < 1e-10


def test_two_candidates_that_look_alike_cost_ln_2():
    assert info_nce(torch.zeros(1, 3), torch.zeros(2, 3), 1.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("negatives, expected", [(0, 1.386294), (1, 2.079442), (2, 2.484907)])
def test_hard_negatives_count_in_the_loss(negatives, expected):
    q, d = torch.zeros(4, 3), torch.zeros(4 * (1 + negatives), 3)
    assert info_nce(q, d, 20.0).item() == pytest.approx(expected, abs=1e-6)
    assert clip_loss(q, d, 20.0).item() == pytest.approx(expected, abs=1e-6)


def test_different_numbers_of_negatives_are_never_padded():
    """Rows with 1 and 3 negatives: six documents, so ln 6; scored padding would give ln 8."""
    loss = info_nce(torch.zeros(2, 3), torch.zeros(6, 3), 1.0, torch.tensor([0, 2]))
    assert loss.item() == pytest.approx(1.791759, abs=1e-6)


def test_the_scale_starts_where_its_temperature_says_and_stays_bounded():
    scale = LogitScale(0.07)
    assert scale.log_scale.item() == pytest.approx(2.659260, abs=1e-6)
    assert scale.log_scale.exp().item() == pytest.approx(14.285714, abs=1e-5)
    assert scale.log_scale.dtype == torch.float32
    scale.log_scale.data.fill_(10.0)
    scale.clamp_()
    assert scale.log_scale.item() == pytest.approx(4.605170, abs=1e-6)
    assert scale.log_scale.exp().item() <= 100.00001
    q, d = unit(4, 3, dtype=torch.float32), unit(4, 3, seed=1, dtype=torch.float32)
    info_nce(q, d, scale).backward()
    assert scale.log_scale.grad.abs() > 1e-3                    # on the bound the gradient lives
    for wrong in (20, 0, 0.001, -0.07):
        with pytest.raises(ValueError, match="inverse"):
            LogitScale(wrong)
    assert not LogitScale(learnable=False).log_scale.requires_grad
    assert dict(LogitScale(0.1, bias=-10.0).named_parameters()).keys() == {"log_scale", "bias"}


def test_a_bias_cancels_in_the_softmax_with_and_without_tiles():
    q, d = unit(4, 3), unit(4, 3, seed=1)
    for tile in (None, 2):
        torch.testing.assert_close(info_nce(q, d, LogitScale(0.1, bias=-10.0), tile=tile),
                                   info_nce(q, d, LogitScale(0.1)), rtol=1e-6, atol=1e-6)


def test_half_precision_vectors_are_compared_in_float32_even_under_autocast():
    q, d = unit(8, 16, dtype=torch.float32), unit(8, 16, seed=1, dtype=torch.float32)
    half = info_nce(q.bfloat16(), d.bfloat16(), 100.0)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, info_nce(q.bfloat16().float(), d.bfloat16().float(), 100.0))
    plain = info_nce(q, d, 100.0, directions=ALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(info_nce(q, d, 100.0, directions=ALL), plain)
        torch.testing.assert_close(info_nce(q, d, 100.0, directions=ALL, tile=3), plain)


# --- Given scores, late interaction ---------------------------------------------------------------

def test_scores_from_elsewhere_give_the_same_loss():
    q, d, positives, exclude = ragged()
    several = torch.tensor([[0, 2], [3, -1], [4, 6], [8, -1]])
    for p in (positives, several):
        for options in ({}, {"label_smoothing": 0.1}):
            a, b = leaves(q, d), leaves(q, d)
            loss = info_nce_from_scores(a[0] @ a[1].T, 7.0, p, exclude, reduction="none", **options)
            assert_same(loss, a, info_nce(*b, 7.0, p, exclude, reduction="none", **options), b)
    assert info_nce_from_scores(q @ d[:8].T, 7.0) == info_nce(q, d[:8], 7.0)


def tokens(samples, longest, seed):
    """Token vectors of 1..longest tokens per sample, padded with zeros, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (samples,), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    return unit(samples, longest, 5, seed=seed) * mask[:, :, None], mask


@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize("explicit", [True, False])
def test_maxsim_equals_four_loops(block, explicit):
    (q, q_mask), (d, d_mask) = tokens(3, 4, seed=0), tokens(5, 6, seed=1)
    a, b = leaves(q, d), leaves(q, d)
    expected = torch.stack([torch.stack([sum(
        max((a[0][i, t] * a[1][j, u]).sum() for u in range(6) if d_mask[j, u])
        for t in range(4) if q_mask[i, t]) for j in range(5)]) for i in range(3)])
    scores = maxsim(*b, *((q_mask, d_mask) if explicit else ()), block=block)
    assert_same(scores, b, expected, a)


def test_maxsim_agrees_with_sentence_transformers():
    util = pytest.importorskip("sentence_transformers.util",
                               reason="sentence-transformers is not installed")
    if not hasattr(util, "maxsim"):
        pytest.skip("this sentence-transformers has no late interaction")
    (q, q_mask), (d, d_mask) = tokens(3, 4, seed=2), tokens(5, 6, seed=3)
    q, d = q.float(), d.float()
    torch.testing.assert_close(maxsim(q, d, q_mask, d_mask), util.maxsim(q, d, q_mask, d_mask))


def test_a_document_without_tokens_scores_zero_and_moves_nothing():
    (q, q_mask), (d, d_mask) = tokens(2, 3, seed=0), tokens(3, 4, seed=1)
    d[1], d_mask[1] = 0.0, False
    q, d = leaves(q, d)
    scores = maxsim(q, d, q_mask, d_mask)
    assert (scores[:, 1] == 0).all() and scores.isfinite().all()
    scores[:, 1].sum().backward()
    assert q.grad.abs().max() == 0 and d.grad.abs().max() == 0


def test_maxsim_holds_one_block_of_token_pairs_at_a_time():
    q, d = unit(4, 3, 5, dtype=torch.float32), unit(12, 6, 5, dtype=torch.float32)
    q, d = leaves(q, d)
    saved = []
    keep = lambda x: saved.append(x.numel()) or x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        scores = maxsim(q, d, block=2)
    assert max(saved) <= q.numel() + d.numel() < 4 * 3 * 12 * 6
    info_nce_from_scores(scores, 5.0).backward()
    assert d.grad.abs().amax(dim=(1, 2)).min() > 0


# --- Accuracy, errors, names ----------------------------------------------------------------------

@pytest.mark.parametrize("block", [1, 3, 1024])
def test_accuracy_counts_only_positives_that_beat_all_others(block):
    q, d, positives, exclude = ragged(seed=7)
    scores = q @ d.T
    for mask in (None, exclude, lambda i, j: exclude[i][:, j]):
        expected = [all(scores[i, p] > scores[i, j] for j in range(10)
                        if j != p and not (mask is not None and exclude[i, j]))
                    for i, p in enumerate(positives.tolist())]
        assert in_batch_accuracy(q, d, positives, mask, block=block).tolist() == expected
    collapsed = torch.ones(4, 6), torch.ones(10, 6), positives
    assert not in_batch_accuracy(*collapsed, block=block).any()
    others = torch.arange(10) != positives[:, None]
    assert in_batch_accuracy(*collapsed, others, block=block).all()     # nobody left to lose to


@pytest.mark.parametrize("change, message", [
    ({"positives": torch.tensor([0, 3, 4])}, "4 queries"),
    ({"positives": torch.tensor([0, 3, 4, 10])}, "one of 10 columns"),
    ({"positives": torch.tensor([0, 3, 4, -1])}, "one of 10 columns"),
    ({"positives": None}, "10 documents cannot be shared evenly by 4"),
    ({"exclude": torch.zeros(4, 9, dtype=torch.bool)}, r"\(4, 10\)"),
    ({"exclude": torch.zeros(4, 10)}, "bool"),
    ({"directions": ("doc_to_query",)}, "where the positive pair is"),
    ({"directions": ("query_to_doc", "sideways")}, "sideways"),
    ({"directions": ALL, "partition_mode": "per_direction"}, "hold no positive"),
    ({"partition_mode": "both"}, "partition_mode"),
    ({"hardness_mode": "hardest"}, "hardness_mode"),
    ({"label_smoothing": 1.5}, "label_smoothing"),
    ({"reduction": "median"}, "reduction"),
    ({"tile": 0}, "tile"), ({"tile": 2.5}, "tile"),
    ({"all_queries": torch.zeros(8, 6)}, "come together"),
    ({"positives": torch.tensor([[0, 1], [3, 4], [5, -1], [8, -1]]), "directions": ALL}, "several"),
])
def test_what_has_no_meaning_is_refused_with_the_reason(change, message):
    q, d, positives, exclude = ragged()
    arguments = {"positives": positives, "exclude": exclude} | change
    with pytest.raises(ValueError, match=message):
        info_nce(q, d, 7.0, **arguments)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(8, 5\)"):
        info_nce(torch.zeros(4, 6), torch.zeros(8, 5), 1.0)
    with pytest.raises(ValueError, match="one embedding size"):
        maxsim(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))


def test_names_on_the_command_line_are_functions():
    assert all(callable(f) and name == name.lower() for name, f in LOSSES.items())
