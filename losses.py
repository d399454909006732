"""Losses: what couples the samples of a batch.                                     Read 2 of 8.

A contrastive loss compares every query with every document of the batch. With N = 3 pairs and one
hard negative per query (K = 2 documents each, interleaved: positive, negative, positive, ...):

                 d0+   d0-   d1+   d1-   d2+   d2-        row i: one softmax over all columns,
        q0    [  pos    .     .     .     .     .  ]      in which the positive should win;
        q1    [   .     .    pos    .     .     .  ]      every other column is a negative,
        q2    [   .     .     .     .    pos    .  ]      mined or simply somebody else's.

    1) similarity of unit vectors           s_ij = q_i . d_j        (N, M*K), one process: M = N
    2) a temperature sharpens it            s_ij * scale,  scale = 1 / temperature
    3) cross-entropy, the positive's column is the class: InfoNCE (van den Oord et al. 2018,
       arXiv 1807.03748, eq. 4)             loss_i = -log( exp(s_ip) / sum_j exp(s_ij) )

In torch:  F.cross_entropy(q @ d.T * scale, positives).  The rest of this file is care and options.
While the model knows nothing all s_ij are alike and the loss is ln(M*K), here ln 6 = 1.79: the
first number to look at in a log. Because the sum in 3 runs over the whole batch, the loss of a
batch is not a sum over parts of it. That is the whole difficulty; gradcache.py (read next) resolves
it.

Your data                              Your loss: a name in LOSSES, here or (*) supervised_losses.py
  query, positive(, hard negatives)    info_nce; clip: nothing but sizes; siglip *: no softmax
  the same, and a guide model          gist *: the guide says who is no negative
  the same, and a teacher's scores     margin_mse *, distill_kl *
  a text and a teacher's vector        embedding_distillation *
  two texts and a graded score         cosent *, angle *, cosine_regression *
  two texts and a label 0 or 1         contrastive *, online_contrastive *
  two texts and a class                softmax_classification * (brings a head)
  anchor, positive, negative           triplet *
  a text and a class                   batch_hard_triplet *, batch_semi_hard_triplet *,
                                       batch_all_triplet *, batch_hard_soft_margin_triplet *
  pairs in very large batches          mega_batch_margin *
  texts alone                          simcse: each encoded twice, under two dropout masks;
                                       contrastive_tension *; tsdae * (brings a decoder)
  a vector to be cut to several sizes  matryoshka(most of them, dims)
  a vector for each token              info_nce_from_scores(maxsim *(q, d), ...)

Cost: the matrix of similarities, N * M * K numbers in float32, and a few of the same size for its
gradient; `tile=` never makes that matrix and pays by computing it twice. Everything here is a pure
function of representations: no rank, no process, no flag that hides in an object. Several processes
pass their own queries, all documents, and the columns at which the positives stand (dist.py); the
mean over queries is then taken by the caller from `reduction="sum"`, because only the caller knows
how many queries there are in all. Not here: finding negatives (extras/mine.py), deciding which
documents are duplicates (batches.py has ids), and anything that would need the encoder.

Letters: N queries (rows of this process), M queries of all processes, K documents per query,
D embedding size, P positives per query, T tokens of a text, R rows and C columns of a tile.
"""
import math

import torch
from torch import nn

# The logit of a pair that is no candidate. Its exp is 0 beside any real logit, as that of -inf is,
# but the difference of two of them is 0 and not NaN: a row may be without any candidate.
NO_CANDIDATE = -1e30


class LogitScale(nn.Module):
    """A learnable temperature, kept as the logarithm of its inverse: scale = exp(log_scale).

    Starts at ln(1/temperature), 2.659 for the usual 0.07 (CLIP, Radford et al. 2021). The forward
    does not clamp: beyond a clamp the gradient is zero, and the parameter could never come back.
    Instead `clamp_()` after every optimizer step keeps it in [0, ln 100]. It belongs in a parameter
    group without weight decay (decay would pull the scale towards 1) and into the clipped norm.
    `bias`, a learnable number added to every logit, is SigLIP's (-10, with temperature 0.1); in a
    softmax it would cancel.
    """

    def __init__(self, temperature=0.07, learnable=True, bias=None):
        super().__init__()
        if not 0.01 <= temperature <= 1.0:
            raise ValueError(f"temperature {temperature} lies outside [0.01, 1]; the scale is its "
                             f"inverse: a scale of 20 is a temperature of 0.05")
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learnable)
        self.bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)), learnable)

    def forward(self, similarity):
        logits = similarity * self.log_scale.exp()
        return logits if self.bias is None else logits + self.bias

    @torch.no_grad()
    def clamp_(self):
        self.log_scale.clamp_(0.0, math.log(100))


def positive_columns(num_queries, num_docs, offset=0):
    """Columns of the positives when every query has equally many documents, interleaved.

    num_docs documents for num_queries queries: [pos, neg, ..., pos, neg, ...], K = num_docs /
    num_queries each. `offset` is the column of the first one. Returns (num_queries,) int64.
    Raises ValueError if num_docs is not a multiple of num_queries.
    """
    if num_queries < 1 or num_docs < num_queries or num_docs % num_queries:
        raise ValueError(f"{num_docs} documents cannot be shared evenly by {num_queries} queries: "
                         f"give the positives' columns explicitly")
    return torch.arange(num_queries) * (num_docs // num_queries) + offset


def info_nce(q, d, scale, positives=None, exclude=None, *, tile=None, label_smoothing=0.0,
             directions=("query_to_doc",), partition_mode="joint", hardness_mode=None,
             hardness_strength=0.0, all_queries=None, query_rows=None, reduction="mean"):
    """InfoNCE: each query must find its positive among all documents (arXiv 1807.03748, eq. 4).

    q          (N, D) queries, d (M*K, D) documents, both usually of unit length
    scale      LogitScale, number or tensor that multiplies the similarity (1 / temperature)
    positives  (M,) column of each query's positive; default: evenly interleaved documents. Several
               per query: (M, P), padded with -1; the loss is the mean of their cross-entropies
               (the outer sum of Khosla et al. 2020, arXiv 2004.11362).
    exclude    (M, M*K) bool, True where a document is no negative for that query (a duplicate of
               its positive, another of its answers); or a function that makes a piece of this
               matrix, exclude(queries (R,), columns (C,)) -> (R, C), all on q's device. The
               positive itself is never excluded; a row with nothing but it has loss 0.
    tile       never hold more than tile x tile similarities (TiledSums); goes with every option
    label_smoothing   share of the target, in [0, 1), spread evenly over a row's candidates
    directions        what the candidates of row i are; p is its positive, own its documents:
               "query_to_doc"   q_i with every d       "query_to_query"  q_i with the other q_k
               "doc_to_query"   d_p with every q_k     "doc_to_doc"      d_p with d that are not own
               `exclude` then also keeps apart d_p and q_k if p is excluded for k, q_i and q_k if
               k's positive is excluded for i, d_p and d_j if j is excluded for i.
    partition_mode    "joint": one softmax over all directions (all four: GTE, arXiv 2308.03281), or
               "per_direction": one each, averaged (with doc_to_query: CLIP's symmetric loss)
    hardness_mode     "in_batch_negatives", "hard_negatives" (own: from a positive's column to the
               next positive's) or "all_negatives": their logits in query_to_doc gain
               hardness_strength * stop_gradient(q . d): 9 for the first in Lan et al. 2025, 5 for
               the second in EmbeddingGemma
    all_queries, query_rows   on several processes, for other directions and hardness: all queries
               (M, D) and which of them q is, (N,); `positives` and `exclude` then speak of all M.
               Without them both have a row for each of q, with columns among all documents.
    reduction  "mean" over the N queries, "sum", or "none" for the (N,) rows

    Definitions as in sentence-transformers' MultipleNegativesRankingLoss. Similarity and softmax
    are computed in float32 (or wider): at scale 100 one bfloat16 step near similarity 1 is 0.4
    logits. Raises ValueError for shapes that do not fit and options that contradict each other.
    """
    if (all_queries is None) != (query_rows is None):
        raise ValueError("all_queries and query_rows come together: which of all queries q is")
    queries = q if all_queries is None else all_queries                         # (M, D)
    positives = check_pairs(queries, d, positives)                              # (M, P)
    check_options(directions, partition_mode, label_smoothing, several=positives.shape[1] > 1)
    rows = torch.arange(len(q)) if query_rows is None else query_rows           # (N,) in 0..M-1
    rows = rows.to(q.device)
    own, p = positives[rows], positives[rows, 0]                                # (N, P), (N,)
    # Masks come in pieces, for rows i (R,) and columns j (C,) of a matrix: all that a tile needs.
    excluded = as_function(exclude, (len(queries), len(d)), q.device)           # -> (R, C)
    owner = owners(positives, len(d)) if hardness_mode or "doc_to_doc" in directions else None

    def is_own(i, j):
        return owner[p[i], None] == owner[j]                                    # (R, C)

    boosted = chosen("hardness_mode", {
        None: None, "in_batch_negatives": lambda i, j: ~is_own(i, j),
        "hard_negatives": lambda i, j: is_own(i, j) & ~is_among(own[i], j),
        "all_negatives": lambda i, j: ~is_among(own[i], j)}, hardness_mode)
    # What is multiplied with what, and which pairs are no candidates: those excluded, but never
    # where row i meets its own positive; and of queries and documents among themselves, its own.
    sides = {
        "query_to_doc": (q, d, lambda i, j: excluded(rows[i], j) & ~is_among(own[i], j)),
        "doc_to_query": (d[p], queries, lambda i, j: excluded(j, p[i]).T & (rows[i, None] != j)),
        "query_to_query": (q, queries, lambda i, j:
                           excluded(rows[i], positives[j, 0]) | (rows[i, None] == j)),
        "doc_to_doc": (d[p], d, lambda i, j: excluded(rows[i], j) | is_own(i, j)),
    }
    # 1, 2) Similarities, sharpened, and all that a cross-entropy needs to know of their rows.
    sums = []
    for direction in directions:
        left, right, masked = chosen("a direction", sides, direction)
        if exclude is None and direction in ("query_to_doc", "doc_to_query"):
            masked = None                                       # nothing to mask: spare the matrix
        here = direction == "query_to_doc"                      # where positives and boost belong
        sums.append(row_sums(left, right, scale, tile, own if here else torch.full_like(own, -1),
                             masked, boosted if here else None, hardness_strength, label_smoothing))
    log_z, positive, total, count = torch.stack(sums, dim=1)                    # (directions, N)
    # 3) Cross-entropy, of all directions as one long row, or of each, averaged.
    if chosen("partition_mode", {"joint": True, "per_direction": False}, partition_mode):
        log_z, total, count = log_z.logsumexp(0, True), total.sum(0, True), count.sum(0, True)
    loss = cross_entropy(log_z, positive.sum(0), total, count, own, label_smoothing)
    return reduced(loss.mean(dim=0), reduction)


def info_nce_from_scores(scores, scale, positives=None, exclude=None, *, label_smoothing=0.0,
                         reduction="mean"):
    """InfoNCE of given scores (N, M*K), such as `maxsim` makes; the rest as in `info_nce`.

    Nothing is tiled: whoever has the scores has their memory already."""
    # Only the two sizes count here: vectors of one number stand in for the real ones.
    positives = check_pairs(scores[:, :1], scores.new_empty(scores.shape[1], 1), positives)
    logits = apply_scale(scale, scores.to(torch.promote_types(scores.dtype, torch.float32)))
    if exclude is not None:
        i, j = (torch.arange(n, device=scores.device) for n in scores.shape)
        excluded = as_function(exclude, scores.shape, scores.device)(i, j)
        logits = logits.masked_fill(excluded & ~is_among(positives, j), NO_CANDIDATE)
    sums = logit_sums(logits, positives, label_smoothing)                       # (4, N)
    return reduced(cross_entropy(*sums, positives, label_smoothing), reduction)


def clip_loss(q, d, logit_scale):
    """InfoNCE from queries (N, D) to interleaved documents (N*K, D), labels from the sizes alone.

    For who needs none of the options. Raises ValueError, with both numbers, if the documents
    cannot be shared evenly.
    """
    return info_nce(q, d, logit_scale, positive_columns(len(q), len(d)))


# --- Rows of logits, whole or in tiles ------------------------------------------------------------

def row_sums(left, right, scale, tile, *options):
    """The `logit_sums` (4, N) of left (N, D) with right (C, D); options as in `tile_sums`."""
    left, right = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (left, right))
    # The scale as a tensor, so that a tile can hand it a gradient. A bias would cancel in the
    # softmax; the difference leaves it out.
    factor = apply_scale(scale, left.new_ones(())) - apply_scale(scale, left.new_zeros(()))
    if tile is not None:
        return TiledSums.apply(left, right, factor, tile, options)
    i, j = (torch.arange(len(x), device=x.device) for x in (left, right))
    return tile_sums(left, right, factor, i, j, *options)


def tile_sums(left, right, factor, i, j, columns, masked, boosted, strength, smooth):
    """The sums of one tile: rows i (R,) with vectors left (R, D), columns j (C,) with right (C, D).

        logit_ij = scale * s_ij  (+ strength * stop_gradient(s_ij), where boosted)

    Boosted, a similar negative takes a larger share of the softmax and is pushed away harder.
    columns (N, P) positives (-1: none); masked and boosted: functions of (i, j) -> (R, C) bool.
    """
    scores = similarity(left, right)                                            # (R, C)
    logits = scores * factor
    if boosted is not None:
        logits = logits + strength * scores.detach() * boosted(i, j)
    if masked is not None:
        logits = logits.masked_fill(masked(i, j), NO_CANDIDATE)
    return logit_sums(logits, columns[i] - j[0], smooth)


def logit_sums(logits, columns, smooth):
    """All that a cross-entropy needs to know of rows of logits (R, C): (4, R), that is per row

    log sum exp; the sum at the positives' `columns` (R, P), those outside of 0..C-1 left out; and
    for label smoothing the sum of all candidates and their number. Each of the four can be had of
    the parts of a row and put together: that is why tiles, and several directions, are possible.
    """
    here = (0 <= columns) & (columns < logits.shape[1])
    picked = logits.gather(1, columns.clamp(0, logits.shape[1] - 1))            # (R, P)
    log_z, positive = logits.logsumexp(dim=1), torch.where(here, picked, 0).sum(dim=1)
    if not smooth:
        return torch.stack([log_z, positive, torch.zeros_like(log_z), torch.ones_like(log_z)])
    real = logits > NO_CANDIDATE / 2
    return torch.stack([log_z, positive, torch.where(real, logits, 0).sum(1), real.sum(1)])


def cross_entropy(log_z, positive, total, count, positives, label_smoothing):
    """Of the target (1 - e) / P at each of P positives plus e / count at every candidate."""
    loss = log_z - (1 - label_smoothing) * positive / (positives >= 0).sum(dim=1)
    return loss - label_smoothing * total / count


class TiledSums(torch.autograd.Function):
    """`tile_sums` of a matrix that never exists: memory tile^2 + (N + C) * D instead of N * C.

        right:     j = 0         j = 1         j = 2
        left  i=0 [tile  ]  ->  [tile  ]  ->  [tile  ]       log_z of the rows of i so far:
              i=1 [tile  ]  ->  [tile  ]  ->  [tile  ]       log(e^log_z + e^(log_z of the tile))

    Forward: tile by tile, log-sum-exp online. Nothing of a tile stays; kept for the backward are
    the inputs and log_z (N,). 32,768 x 32,768 float32 similarities are 4.3 GB; in tiles of 1,024
    the loss with all its gradients added 97 MB at most to a process (D = 64, on a CPU).
    Backward: GradCache one level further down. Every tile is computed again, now with a graph, and
    the gradient known from outside is pushed through it; of log_z's gradient a tile gets the share
    exp(log_z of the tile - log_z) that it has of the softmax. So no derivative is written out here,
    and whatever `tile_sums` can do works in tiles. All sums are in float32 or wider, so the result
    differs from the whole matrix by rounding only. Price: the products are computed twice.
    """

    @staticmethod
    def forward(ctx, left, right, factor, tile, options):
        ctx.tile, ctx.options = tile, options
        sums = left.new_zeros(4, len(left))
        sums[0] = NO_CANDIDATE
        for i, j in tiles(left, right, tile):
            part = tile_sums(left[i], right[j], factor, i, j, *options)         # (4, R)
            sums[0, i] = torch.logaddexp(sums[0, i], part[0])
            sums[1:, i] += part[1:]
        ctx.save_for_backward(left, right, factor, sums[0].clone())
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):                                                    # (4, N)
        left, right, factor, log_z = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (left, right, factor)]
        for i, j in tiles(left, right, ctx.tile):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (left[i], right[j], factor)]
                part = tile_sums(*inputs, i, j, *ctx.options)                   # (4, R)
            known = grad[:, i]                                                  # a copy
            # d log_z / d (log_z of the tile); of the other three sums a tile is a plain summand.
            known[0] *= torch.exp(part[0].detach() - log_z[i])
            for whole, at, g in zip(grads, (i, j, ...), torch.autograd.grad(part, inputs, known)):
                whole[at] += g
        return (*grads, None, None)


def tiles(left, right, tile):
    """Rows and columns of each tile of a (len(left), len(right)) matrix, the last ones smaller."""
    if not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile must be a whole number of rows and columns >= 1, got {tile!r}")
    i, j = (torch.arange(len(x), device=x.device).split(tile) for x in (left, right))
    return [(rows, columns) for rows in i for columns in j]


def owners(positives, num_docs):
    """(num_docs,) which query each document came with: that of the last positive up to it.

    Positives 0, 3, 5 among 7 documents give 0 0 0 1 1 2 2: any number of negatives per query.
    """
    first, order = positives.flatten().sort()                                   # padding (-1) first
    last = torch.searchsorted(first, torch.arange(num_docs, device=first.device), right=True) - 1
    return order[last.clamp(min=0)] // positives.shape[1]


# --- Around any loss, accuracy --------------------------------------------------------------------

def matryoshka(loss_fn, dims, weights=None):
    """Make the first numbers of a vector a good vector too (arXiv 2205.13147).

        loss = sum_k weights_k * loss_fn(first dims_k numbers, of unit length again)

    Returns fn(*representations, **rest). Positional floating-point matrices (..., D), and the
    keyword all_queries, are representations: cut, never in place. The rest reaches loss_fn as it
    is. dims in any order, weights 1 by default. Raises ValueError for a dim outside 1..D.
    Without the last step a cut vector would be short, and its similarities with it.
    """
    # Equal weights are the paper's choice; larger ones for small sizes favour those.
    weights = weights or [1.0] * len(dims)
    if not dims or min(dims) < 1 or len(weights) != len(dims):
        raise ValueError(f"matryoshka needs dims >= 1 with one weight each, got {dims}, {weights}")

    def cut(x, dim):
        vectors = torch.is_tensor(x) and x.is_floating_point() and x.dim() > 1
        if vectors and dim > x.shape[-1]:
            raise ValueError(f"matryoshka dim {dim} is above the embedding size {x.shape[-1]}")
        return nn.functional.normalize(x[..., :dim], dim=-1) if vectors else x

    def loss(*reps, **rest):
        # The same loss of shorter vectors, as often as there are sizes; labels and masks stay.
        return sum(weight * loss_fn(*[cut(x, dim) for x in reps], **{
            k: cut(x, dim) if k == "all_queries" else x for k, x in rest.items()})
                   for dim, weight in zip(dims, weights))
    return loss


@torch.no_grad()
def in_batch_accuracy(q, d, positives, exclude=None, *, block=1024):
    """(N,) bool: does the query's positive beat every other candidate?

    A tie does not count, or a model that maps everything to one vector would look perfect.
    positives (N,) and exclude as in `info_nce`; `block` queries are compared at a time.
    """
    excluded, beats = as_function(exclude, (len(q), len(d)), q.device), []
    j = torch.arange(len(d), device=q.device)
    for i in torch.arange(len(q), device=q.device).split(block):
        scores, p = similarity(q[i], d), positives.to(q.device)[i, None]        # (block, M*K)
        others = scores.masked_fill(excluded(i, j) | (p == j), -math.inf)
        beats.append(scores.gather(1, p)[:, 0] > others.amax(dim=1))
    return torch.cat(beats)


# --- Small pieces ---------------------------------------------------------------------------------

def similarity(q, d):
    """(N, D) x (M, D) -> (N, M) inner products in float32 or wider, whatever autocast says.

    Rounding a similarity moves a logit by scale times as much.
    """
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(q.dtype, d.dtype), torch.float32)
        return q.to(dtype) @ d.to(dtype).T


def apply_scale(scale, scores):
    """scale: a LogitScale (or another function), a tensor or a number."""
    return scale(scores) if callable(scale) else scores * scale


def is_among(columns, j):
    """columns (R, P), j (C,) -> (R, C): is column j one of those of the row?"""
    return (columns[:, :, None] == j).any(dim=1)


def reduced(x, reduction):
    """x (N,), a loss per query, as one number: the mean, the sum, or as it is."""
    return chosen("reduction", {"mean": x.mean, "sum": x.sum, "none": x.clone}, reduction)()


def as_function(exclude, shape, device):
    """`exclude` as a function of queries (R,) and columns (C,) -> bool (R, C), (1, 1) for None."""
    if exclude is None:
        return lambda i, j: torch.zeros(1, 1, dtype=torch.bool, device=device)
    if callable(exclude):
        return exclude
    if exclude.shape != shape or exclude.dtype != torch.bool:
        raise ValueError(f"exclude must be bool of shape {tuple(shape)} (queries, documents), got "
                         f"{exclude.dtype} {tuple(exclude.shape)}")
    exclude = exclude.to(device)
    return lambda i, j: exclude[i][:, j]


def check_pairs(q, d, positives):
    """Check the shapes of a pair of matrices; return the positives (N, P) on their device."""
    if q.dim() != 2 or d.dim() != 2 or q.shape[1] != d.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)} and documents {tuple(d.shape)} must be two "
                         f"matrices of one embedding size")
    if positives is None:
        positives = positive_columns(len(q), len(d))
    positives = positives[:, None] if positives.dim() == 1 else positives
    fits = positives.dim() == 2 and len(positives) == len(q)
    if fits and positives.device.type == "cpu":                 # looking at a GPU means waiting
        fits = (positives[:, 0] >= 0).all() and ((-1 <= positives) & (positives < len(d))).all()
    if not fits:
        raise ValueError(f"positives must name one of {len(d)} columns for each of {len(q)} "
                         f"queries, got {positives.tolist()[:8]}")
    return positives.to(q.device)


def chosen(name, options, key):
    """options[key], or an error that lists the options."""
    if key not in options:
        raise ValueError(f"{name} must be one of {list(options)}, got {key!r}")
    return options[key]


def check_options(directions, partition_mode, label_smoothing, several):
    """Refuse the options of `info_nce` that have no meaning together, and say why."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is a share in [0, 1), got {label_smoothing}")
    alone = {"query_to_query", "doc_to_doc"} & set(directions)
    if "query_to_doc" not in directions:
        raise ValueError(f"directions {directions} lack query_to_doc, where the positive pair is")
    if partition_mode == "per_direction" and alone:
        raise ValueError(f"{sorted(alone)} hold no positive: a softmax of their own would be "
                         f"lowered without bringing any pair closer. Use partition_mode='joint'")
    if several and len(directions) > 1:
        raise ValueError(f"several positives per query fit query_to_doc alone, not {directions}: "
                         f"the other directions start from a single positive")


LOSSES = {"info_nce": info_nce, "clip": clip_loss, "simcse": info_nce}
