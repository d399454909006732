"""Losses for rows with scores, labels or a teacher, and for texts alone.   Read 2 of 8, continued.

The table "your data -> your loss" in losses.py covers this file too. What wraps any loss,
`matryoshka`, is there; what judges any model, `ranking_metrics`, is at the end here. As there, a
loss is a pure function of the representations of the whole batch, so that gradcache.py makes it
exact in chunks without knowing which loss it is:

    1) compare representations: by cosine, inner product or distance;
    2) let the label say which way each comparison has to move;
    3) average over rows, pairs or triplets, as the formula says.

Cost: O(N D), and a matrix of N^2 numbers in cosent, angle, siglip, gist, mega_batch_margin and the
hard triplets; (pairs within a class) * N numbers in semi-hard and all triplets. On several
processes gather all rows everywhere (dist.py) and take loss / W on each: a batch-wide choice such
as "the hardest negative" needs them all. Only siglip splits by its queries, as info_nce does.

What is refused: a label that is NaN, infinite or of no known kind, as a ValueError with its row.
What is defined: where a batch holds nothing to learn from (all scores equal, one class only) the
loss is 0 and so is the gradient. Values agree with sentence-transformers 6.2 except where said.
Not here: where labels and teacher scores come from (data.py), TSDAE's decoder (objectives.py).

Representations come in float32, as gradcache.py hands them over; products stay in it (`products`).

Letters: N rows, M documents, W processes, D embedding size, C classes, V words, G size of a guide's
vector.
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

NOTHING = -1e30     # a logit whose exp is 0, yet finite: 0 * -inf would be NaN


def products(a, b):
    """(..., N, D) x (..., M, D) -> (..., N, M) inner products in float32, even under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        a, b = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (a, b))
        return a @ b.mT


def distances(a, b, metric):
    """(..., N, D) x (..., M, D) -> (..., N, M), metric "cosine", "euclidean" or "manhattan"."""
    if metric == "cosine":
        return 1 - products(F.normalize(a, dim=-1), F.normalize(b, dim=-1))
    if metric not in ("euclidean", "manhattan"):
        raise ValueError(f"distance must be cosine, euclidean or manhattan, got {metric!r}")
    # Not as a^2 - 2ab + b^2, which costs small distances half of their digits. At distance 0,
    # where the root has no derivative, the gradient of cdist is 0.
    return torch.cdist(a, b, p=2.0 if metric == "euclidean" else 1.0,
                       compute_mode="donot_use_mm_for_euclid_dist")


def row_distances(a, b, metric):
    """a, b (N, D) -> (N,), row by row."""
    return distances(a[:, None], b[:, None], metric).flatten()


def per_row(labels, like, allowed=None):
    """labels (N,) on the device of like (N, ...): one finite number per row, or a ValueError.

    Labels come from the data, on the CPU: looking at them does not wait for a GPU.
    """
    if labels.shape != (len(like),):
        raise ValueError(f"{len(like)} rows need as many labels, got shape {tuple(labels.shape)}")
    wrong = ~torch.isfinite(labels)
    if allowed is not None:
        wrong |= ~torch.isin(labels, torch.tensor(allowed, device=labels.device))
    if wrong.any():
        row, expected = int(wrong.nonzero()[0]), f"one of {allowed}" if allowed else "a number"
        raise ValueError(f"row {row}: label {labels[row].item()}, expected {expected}; fix or drop")
    return labels.to(like.device)


# --- Two texts, and a score, a label 0 or 1, a class ----------------------------------------------

def cosent(a, b, scores, scale=20.0):
    """A pair with a higher score should have the higher cosine (CoSENT, Su 2022, kexue.fm 8847).

        loss = log(1 + sum over score_i > score_j of exp(scale * (cos_j - cos_i)))

    a, b (N, D), scores (N,), of which only the order counts. One number for the whole batch: more
    rows have more pairs to put in order, and so a larger loss.
    """
    return ordered_pairs(F.cosine_similarity(a, b), per_row(scores, a), scale)


def angle(a, b, scores, scale=20.0):
    """`cosent` with an angle in the complex plane instead of the cosine (AnglE, arXiv 2309.12871).

    Unit vectors are read as D/2 complex numbers, the first half their real, the second their
    imaginary parts (an odd D gets a zero); the similarity is |Re z + Im z|, z = sum a conj(b).
    """
    if a.shape[1] % 2:
        a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
    (ar, ai), (br, bi) = (F.normalize(x, dim=1).chunk(2, dim=1) for x in (a, b))
    similarity = (ar * br + ai * bi + ai * br - ar * bi).sum(dim=1).abs()       # (N,)
    return ordered_pairs(similarity, per_row(scores, a), scale)


def ordered_pairs(s, scores, scale):
    """log(1 + sum of exp(scale * (s_j - s_i))) over all i with a higher score than j, s (N,).

    A smooth count of the pairs in the wrong order; a pair with equal scores has no order.
    """
    order = (scale * (s - s[:, None])).masked_fill(~(scores[:, None] > scores), NOTHING)    # (N, N)
    return F.pad(order.flatten(), (1, 0)).logsumexp(dim=0)                      # exp(0) = 1


def cosine_regression(a, b, scores, reduction="mean"):
    """The cosine should be the score: (cos_i - score_i)^2 (SBERT, arXiv 1908.10084).

    a, b (N, D), scores (N,) between -1 and 1.
    """
    return F.mse_loss(F.cosine_similarity(a, b), per_row(scores, a).to(a), reduction=reduction)


def contrastive(a, b, labels, margin=0.5, distance="cosine", reduction="mean"):
    """Pull label 1 together, push label 0 apart up to the margin (Hadsell et al. 2006).

        loss_i = 1/2 (y d^2 + (1 - y) max(0, margin - d)^2)          a, b (N, D), labels (N,)
    """
    y, d = per_row(labels, a, (0, 1)).to(a.dtype), row_distances(a, b, distance)
    loss = 0.5 * (y * d.square() + (1 - y) * F.relu(margin - d).square())
    return loss.sum() if reduction == "sum" else loss.mean()


def online_contrastive(a, b, labels, margin=0.5, distance="cosine", reduction="mean"):
    """`contrastive`, without the 1/2, over the hard pairs of the batch alone.

    Hard is label 0 and nearer than the farthest label 1, and label 1 and farther than the nearest
    label 0; where the other label is absent, nearer or farther than the mean. "sum" adds them up,
    as sentence-transformers does; "mean" divides that by all N pairs.
    """
    y, d = per_row(labels, a, (0, 1)), row_distances(a, b, distance)
    apart, same = d[y == 0], d[y == 1]
    near = apart[apart < (same.max() if len(same) else apart.mean())]
    far = same[same > (apart.min() if len(apart) else same.mean())]
    loss = far.square().sum() + F.relu(margin - near).square().sum()
    return loss if reduction == "sum" else loss / len(d)


def softmax_classification(a, b, labels, head):
    """Cross-entropy of a linear head on [a, b, |a - b|] (SBERT, arXiv 1908.10084).

    a, b (N, D), labels (N,) in 0..C-1. head: torch.nn.Linear(3 * D, C); its parameters belong into
    the optimizer and the checkpoint, and get their gradient in step 2 of gradcache.py, once.
    """
    logits = products(torch.cat([a, b, (a - b).abs()], dim=1), head.weight) + head.bias
    return F.cross_entropy(logits, per_row(labels, a, tuple(range(logits.shape[1]))).long())


def siglip(q, d, scale, positives, exclude=None, reduction="mean"):
    """Is it a pair, yes or no? Asked of all pairs (Zhai et al. 2023, arXiv 2303.15343, alg. 1).

        loss_i = sum_j -log sigmoid(z_ij (scale q_i . d_j + bias)),    z = 1 for a pair, else -1

    q (N, D), d (M, D), positives (N,) columns; exclude (N, M) bool: not asked (a duplicate).
    scale: LogitScale(0.1, bias=-10.0) of losses.py; the bias makes the many negatives cheap at the
    start. reduction "mean" over queries, or "sum", which processes may add up.
    """
    logits = scale(products(q, d)) if callable(scale) else products(q, d) * scale
    pair = positives.to(q.device)[:, None] == torch.arange(len(d), device=q.device)     # (N, M)
    loss = F.softplus(torch.where(pair, -logits, logits))
    if exclude is not None:
        loss = loss.masked_fill(exclude.to(q.device) & ~pair, 0)
    return loss.sum() if reduction == "sum" else loss.sum(dim=1).mean()


# --- Triplets: given, or found in a batch of classes ----------------------------------------------
# The margin 0.5 of the cosine distance is for unit vectors. sentence-transformers' default, 5 and
# Euclidean, is out of their reach: no two of them are farther apart than 2.

def triplet(anchor, positive, negative, margin=0.5, distance="cosine", reduction="mean"):
    """max(0, d(a, p) - d(a, n) + margin), all three (N, D) (FaceNet, arXiv 1503.03832)."""
    gap = row_distances(anchor, positive, distance) - row_distances(anchor, negative, distance)
    return F.relu(gap + margin).sum() if reduction == "sum" else F.relu(gap + margin).mean()


def batch_hard_triplet(x, labels, margin=0.5, distance="cosine"):
    """Every anchor with its farthest positive and its nearest negative (arXiv 1703.07737).

        loss_a = max(0, max_p d(a, p) - min_n d(a, n) + margin)         margin None: the soft one,
        loss_a = log(1 + exp(max_p d(a, p) - min_n d(a, n)))            which is never quite content

    x (N, D), labels (N,) classes. Mean over the anchors that have a positive and a negative;
    sentence-transformers counts the others too, so the two agree where every class occurs twice.
    """
    d, positive, negative = by_class(x, labels, distance)                       # (N, N)
    valid = positive.any(dim=1) & negative.any(dim=1)
    farthest = d.masked_fill(~positive, -math.inf).amax(dim=1)
    nearest = d.masked_fill(~negative, math.inf).amin(dim=1)
    gap = torch.where(valid, farthest - nearest, 0)
    loss = F.softplus(gap) if margin is None else F.relu(gap + margin)          # (N,)
    return torch.where(valid, loss, 0).sum() / valid.sum().clamp(min=1)


def batch_semi_hard_triplet(x, labels, margin=0.5, distance="cosine"):
    """Every pair (a, p) with the nearest negative that is farther than p (arXiv 1503.03832).

    Where there is none, with the farthest negative. Mean over all pairs within a class whose
    anchor has a negative. x (N, D), labels (N,).
    """
    d_ap, d_an, negative = class_pairs(x, labels, distance)
    beyond = d_an.masked_fill(~negative | (d_an <= d_ap), math.inf).amin(dim=1, keepdim=True)
    farthest = d_an.masked_fill(~negative, -math.inf).amax(dim=1, keepdim=True)
    loss = F.relu(d_ap - torch.where(beyond.isfinite(), beyond, farthest) + margin)
    return loss.sum() / max(len(loss), 1)


def batch_all_triplet(x, labels, margin=0.5, distance="cosine"):
    """Every triplet of the batch; mean over those with a loss above 0 (arXiv 1703.07737).

    A mean over all would be drowned by the many easy ones. x (N, D), labels (N,).
    """
    d_ap, d_an, negative = class_pairs(x, labels, distance)
    loss = torch.where(negative, F.relu(d_ap - d_an + margin), 0)               # (pairs, N)
    return loss.sum() / (loss > 0).sum().clamp(min=1)


def by_class(x, labels, distance):
    """(N, N): distances; is j a positive of i (its class, not itself); is j a negative of i."""
    labels = per_row(labels, x)
    same = labels[:, None] == labels
    return distances(x, x, distance), same & ~torch.eye(len(x), device=x.device).bool(), ~same


def class_pairs(x, labels, distance):
    """Of all pairs (a, p): d(a, p) (pairs, 1), d(a, .) (pairs, N), which of these are negatives."""
    d, positive, negative = by_class(x, labels, distance)
    a, p = (positive & negative.any(dim=1, keepdim=True)).nonzero(as_tuple=True)
    return d[a, p][:, None], d[a], negative[a]


# --- A teacher ------------------------------------------------------------------------------------
# Documents lie as in info_nce: each query's positive, then its own negatives, any number of them.

def margin_mse(q, d, teacher, positives):
    """The student's margins should be the teacher's (Hofstaetter et al. 2020, arXiv 2010.02666).

        mean over all own negatives n of ((q . d_p - q . d_n) - (t_p - t_n))^2

    q (N, D), d (M, D), positives (N,) columns; teacher (M,): its score of each document for the
    query it came with; a constant added to all is no change. No negative: ValueError.
    """
    student, owner, place = own_scores(q, d, positives)
    gap = student - per_row(teacher, d)                                         # (M,)
    return (gap[positives.to(d.device)][owner] - gap)[place > 0].square().mean()


def distill_kl(q, d, teacher, positives, temperature=1.0):
    """temperature^2 KL(teacher || student) over each query's own documents (arXiv 1503.02531).

    The distributions are the softmax of t / temperature and of q . d / temperature; mean over
    queries, of which one without negatives adds 0. Arguments as in `margin_mse`.
    """
    student, owner, place = own_scores(q, d, positives)

    def log_softmax(scores):
        table = scores.new_full((len(q), int(place.max()) + 1), NOTHING)        # (N, longest)
        return (table.index_put((owner, place), scores) / temperature).log_softmax(dim=1)

    teacher = log_softmax(per_row(teacher, d).to(student.dtype))
    kl = F.kl_div(log_softmax(student), teacher, log_target=True, reduction="sum")
    return kl / len(q) * temperature ** 2


def own_scores(q, d, positives):
    """Of each document (M,): q . d with its query; which query; its place there, 0 the positive."""
    first, order = positives.to(d.device).sort()
    if len(first) != len(q) or first[0] != 0 or len(d) <= len(q):
        raise ValueError(f"{len(q)} queries need as many positives, the first in column 0, and a "
                         f"negative; got {positives.tolist()[:8]} among {len(d)} documents")
    columns = torch.arange(len(d), device=d.device)
    last = torch.searchsorted(first, columns, right=True) - 1       # the last positive up to here
    return (q[order[last]] * d).sum(dim=1), order[last], columns - first[last]


def embedding_distillation(student, teacher, reduction="mean"):
    """Have the teacher's vectors: mean squared difference of two (N, D) (arXiv 2004.09813)."""
    if student.shape != teacher.shape:
        raise ValueError(f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)} "
                         f"differ in shape: cut or project one of them")
    per_row(teacher.sum(dim=1), student)                            # for its error: a NaN's row
    return F.mse_loss(student, teacher.detach().to(student), reduction=reduction)


def gist(q, d, guide_q, guide_d, scale, positives, *, margin=0.0, relative=False,
         directions=("query_to_doc", "query_to_query", "doc_to_doc")):
    """InfoNCE in which a guide model says who is no negative (GISTEmbed, arXiv 2402.16829).

    Candidates of query i, all in one softmax: every d; the other q; the other positives, compared
    with i's; none of them if the guide finds it too close (`guide_mask`). That removes negatives
    that are none, which no list of duplicates knows of. q (N, D), d (M, D), positives (N,)
    columns; the guide's vectors guide_q (N, G), guide_d (M, G) get no gradient.
    """
    p = positives.to(q.device)[:, None]                                         # (N, 1)

    def scores(q, d):
        own = d[p[:, 0]]                                                        # (N, D)
        sides = {"query_to_doc": (q, d), "query_to_query": (q, q), "doc_to_doc": (own, own)}
        return torch.cat([products(*sides[direction]) for direction in directions], dim=1)

    guide = scores(guide_q.detach(), guide_d.detach())                          # (N, M + N + N)
    drop = guide_mask(guide, guide.gather(1, p), margin, relative).scatter(1, p, False)
    # Nothing is compared with itself, even if the guide sees no difference from the positive.
    drop[:, len(d):] |= torch.eye(len(q), device=q.device).bool().repeat(1, len(directions) - 1)
    logits = scale(scores(q, d)) if callable(scale) else scores(q, d) * scale
    return F.cross_entropy(logits.masked_fill(drop, NOTHING), p[:, 0])


def guide_mask(scores, positive_scores, margin=0.0, relative=False):
    """True where a candidate is too close to the positive to be a negative: an `exclude` mask.

    scores (N, M), positive_scores (N, 1), of a guide or of the model itself. Too close is above the
    positive's score - margin; if relative, - margin * |score|, which lies below a negative score
    too: -0.50 at 0.05 gives -0.525, where score * (1 - margin) would give -0.475.
    """
    return scores > positive_scores - margin * (positive_scores.abs() if relative else 1.0)


# --- Pairs in very large batches, texts alone -----------------------------------------------------
# SimCSE, the third loss for texts alone, is info_nce over two encodings of each text.

def mega_batch_margin(a, b, exclude=None, positive_margin=0.8, negative_margin=0.3):
    """Each pair and its hardest negative in the batch (after Wieting and Gimpel, P18-1042).

        loss_i = max(0, positive_margin - cos(a_i, b_i))
               + max(0, max over j of cos(a_i, b_j) - negative_margin)           j != i

    a, b (N, D); exclude (N, N) bool, True where b_j is no negative of a_i. Two hinges, those of
    sentence-transformers; the paper's single one, on the difference of the cosines, is
    `batch_hard_triplet` of all 2 N vectors with the labels 0..N-1 twice.
    """
    cosines = products(F.normalize(a, dim=1), F.normalize(b, dim=1))            # (N, N)
    drop = torch.eye(len(a), device=a.device).bool()
    drop = drop if exclude is None else drop | exclude.to(a.device)
    worst = cosines.masked_fill(drop, NOTHING).amax(dim=1)                      # (N,)
    return (F.relu(positive_margin - cosines.diagonal()) + F.relu(worst - negative_margin)).mean()


def contrastive_tension(a, b, labels, reduction="mean"):
    """Did two encoders see the same text? (Carlsson et al. 2021, openreview Ov_sMNau-PF)

        loss_i = -log sigmoid(a_i . b_i) for label 1, -log sigmoid(-a_i . b_i) for label 0

    a, b (N, D) of two copies of a model, not of unit length, labels (N,). "sum" is
    sentence-transformers' loss. Its variant with in-batch negatives is info_nce(a, b) with
    directions query_to_doc and doc_to_query, per direction.
    """
    y = per_row(labels, a, (0, 1)).to(a.dtype)
    return F.binary_cross_entropy_with_logits((a * b).sum(dim=1), y, reduction=reduction)


def chunked_token_cross_entropy(hidden, output_weight, targets, chunk=1024, ignore=-100):
    """Mean cross-entropy of words, the logits of at most `chunk` of them in memory at a time.

    hidden (..., D) of a decoder, output_weight (V, D), targets (...) with `ignore` for no word; 0
    if there is no word at all. For TSDAE (arXiv 2104.06979) the decoder sees the words so far and
    the vector of a noised text, and has to write the text. The logits are computed again in the
    backward: those of 8,192 words over V = 151,936 would be 5 GB.
    """
    def loss(h, y):
        return F.cross_entropy(products(h, output_weight), y, reduction="sum", ignore_index=ignore)

    words = targets.flatten().to(hidden.device)
    pieces = zip(hidden.flatten(0, -2).split(chunk), words.split(chunk))
    total = sum(checkpoint(loss, *piece, use_reentrant=False) for piece in pieces)
    return total / (words != ignore).sum().clamp(min=1)


# --- Late interaction, ranking --------------------------------------------------------------------

def maxsim(q, d, q_mask=None, d_mask=None, *, block=16):
    """Late interaction: each query token's best document token, summed (ColBERT, arXiv 2004.12832).

        score_ij = sum_t max_u q_it . d_ju                  -> (N, M), for `info_nce_from_scores`

    q (N, Tq, D), d (M, Td, D) token vectors; q_mask (N, Tq), d_mask (M, Td) True at real tokens, by
    default where the vector is not zero (gradcache.py pads with zeros). A document without a real
    token scores 0. Documents come `block` at a time and are computed again in the backward, so that
    the largest tensor is (N, Tq, block, Td): for 64 queries of 32 tokens and pages of 1,024 it is
    134 MB where all pairs of 64 pages would be 537 MB.
    """
    if q.dim() != 3 or d.dim() != 3 or q.shape[2] != d.shape[2]:
        raise ValueError(f"queries {tuple(q.shape)} and documents {tuple(d.shape)} must be token "
                         f"vectors (samples, tokens, D) of one embedding size")
    q_mask = (q != 0).any(dim=2) if q_mask is None else q_mask.bool()
    d_mask = (d != 0).any(dim=2) if d_mask is None else d_mask.bool()

    def scores(d, d_mask):              # of one block; padding must not win the maximum
        pairs = products(q.flatten(0, 1), d.flatten(0, 1)).view(*q.shape[:2], *d.shape[:2])
        best = pairs.masked_fill(~d_mask, NOTHING).amax(dim=3)             # (N, Tq, block)
        return torch.where(q_mask[:, :, None] & d_mask.any(dim=1), best, 0).sum(dim=1)

    return torch.cat([checkpoint(scores, *piece, use_reentrant=False)
                      for piece in zip(d.split(block), d_mask.split(block))], dim=1)


@torch.no_grad()
def ranking_metrics(scores, relevant, ks=(1, 10), *, block=64, reduction="mean"):
    """Recall@k, MRR@k, nDCG@k of a retrieval: {"recall@1": ..., "mrr@10": ..., ...}.

    scores     (N, M), or a function scores(queries (B,)) -> (B, M), asked `block` queries at a time
    relevant   (N,) columns, or per query a list of them (twice counts once; empty: ValueError)
    ks         any; above M is the same as M
    reduction  "mean" or "sum" over queries: floats (processes add up sums); "none": (N,) tensors

    A relevant document's rank is 1 + the others with a score >= its own, so ties never help; the
    relevant ones among themselves are ranked by score. recall: found in the first k / all relevant.
    mrr: 1 / rank of the first, if <= k. ndcg: gain 1, discount log2(1 + rank), and the ideal is
    min(k, relevant) hits at the top.
    """
    rows = relevant[:, None] if torch.is_tensor(relevant) else relevant
    rows = [sorted({int(column) for column in row}) for row in rows]
    found = {f"{name}@{k}": [torch.zeros(0)] for k in ks for name in ("recall", "mrr", "ndcg")}
    for i in torch.arange(len(rows)).split(block) if rows else ():
        s, mine = scores(i) if callable(scores) else scores[i], [rows[n] for n in i]    # (B, M)
        if not all(r and 0 <= r[0] and r[-1] < s.shape[1] for r in mine) or not s.isfinite().all():
            raise ValueError(f"queries {i[0]}..{i[-1]}: scores must be finite and relevant columns "
                             f"lie in 0..{s.shape[1] - 1}; leave out a query that has none")
        count = torch.tensor([len(r) for r in mine], device=s.device)           # (B,)
        order = torch.arange(int(count.max()), device=s.device)                 # (R,)
        real = order < count[:, None]
        columns = torch.tensor([r + r[:1] * (len(order) - len(r)) for r in mine], device=s.device)
        own = s.gather(1, columns).masked_fill(~real, -math.inf).sort(1, descending=True).values
        # Scores >= x in a sorted row: from x's place to the end. Of all; of the relevant ones.
        every, same = (x.shape[1] - torch.searchsorted(x.sort(1).values, own) for x in (s, own))
        rank = every - same + order + 1                                         # (B, R)
        for k in ks:
            hit = real & (rank <= k)
            ideal = (1 / torch.log2(order + 2.0)).cumsum(dim=0)[count.clamp(max=k) - 1]
            found[f"recall@{k}"].append(hit.sum(dim=1) / count)
            found[f"mrr@{k}"].append(hit[:, 0] / rank[:, 0])
            found[f"ndcg@{k}"].append((hit / torch.log2(rank + 1.0)).sum(dim=1) / ideal)
    m = {name: torch.cat([v.cpu() for v in values]).double() for name, values in found.items()}
    return m if reduction == "none" else {n: getattr(v, reduction)().item() for n, v in m.items()}


LOSSES = {loss.__name__: loss for loss in (
    cosent, angle, cosine_regression, contrastive, online_contrastive, softmax_classification,
    siglip, triplet, batch_hard_triplet, batch_semi_hard_triplet, batch_all_triplet, margin_mse,
    distill_kl, embedding_distillation, gist, mega_batch_margin, contrastive_tension)} | {
    "batch_hard_soft_margin_triplet": functools.partial(batch_hard_triplet, margin=None),
    "tsdae": chunked_token_cross_entropy}
