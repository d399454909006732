"""Objectives: from `--loss NAME` and a batch to one number.                          Read 7 of 8.

The losses are pure functions of matrices; a batch is lists of features, ids and labels on one of W
processes. Between the two lies, for every loss, the same small amount of wiring:

    1) `needs`             which fields each row of the data must have
    2) `prepare_rows`      what the towers see: query and documents, the same text twice, one text
    3) `loss_parameters`   what the loss itself learns: temperature, bias, head, copy, decoder
    4) `towers`, `encoders_of`   the lists that grad_cache_step encodes, and who encodes them
    5) `batch_loss`        the function of the representations that it differentiates
    6) `evaluate`          what held-out rows say about the model: ranking, or what fits the rows

On several processes a loss is made exact in one of two ways. Those that are a sum over queries
(OWN_ROWS) take this process' queries among everybody's documents, divided by the queries of all.
All others, where the hardest negative or the order of all scores counts, are computed from
everybody's representations on every process, divided by W. In either case the processes' losses and
gradients add up to those of one process with the whole batch.

Costs: the second way gathers queries, too, and repeats the loss on each process. Does not encode,
and holds no formula: those are in losses.py and supervised_losses.py. Like train.py, of which it is
a part, it imports what it wires; concept files import libraries only (model.py also export.py).

Letters: N queries of this process, M of all, K documents per query, D embedding size, T tokens,
A answers per query, W processes.
"""
import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batches import NUMBERS, retrieval_pool
from dist import gather_with_grad, rank, reduce_numbers, sizes, world_size
from flags import LOSSES
from losses import (LogitScale, in_batch_accuracy, info_nce, info_nce_from_scores, matryoshka,
                    owners)
from supervised_losses import (angle, batch_all_triplet, batch_hard_triplet,
                               batch_semi_hard_triplet, chunked_token_cross_entropy, contrastive,
                               contrastive_tension, cosent, cosine_regression, distill_kl,
                               embedding_distillation, gist, margin_mse, maxsim,
                               mega_batch_margin, online_contrastive, ranking_metrics, siglip,
                               softmax_classification, triplet)

TOWERS = ("queries", "documents", "guide_queries", "guide_documents")    # keys of a batch, in order
NOISE = 0.6                      # TSDAE leaves out so many words (arXiv 2104.06979, section 5.3)


def batch_loss(batch, scale, args, device):
    """The loss of this process' share of a batch, as a function of the towers' representations.

    scale: what `loss_parameters` returned. The function returns (loss, metrics), both shares of
    the whole job's: processes add them up. Every process calls this for every batch, and then the
    function: both exchange sizes, ids and labels, or representations.
    """
    function = late_interaction if args.multi_vector else OBJECTIVES[args.loss]
    if args.matryoshka_dims:
        function = matryoshka(function, args.matryoshka_dims, args.matryoshka_weights)
    own_rows = args.loss in OWN_ROWS
    # Does it look at other processes' queries, too? Most of the first kind do not.
    everybody = not own_rows or args.directions != ["query_to_doc"] or args.hardness_mode
    x = facts(batch, scale, args, device, everybody)

    def loss_fn(q, *rest):                                       # (N, D), (N*K, D), a guide's two
        documents, x.guide = (gather_with_grad(part) for part in (rest[:1], rest[1:]))  # (M*K, D)
        every_q = gather_with_grad(q) if everybody else None                    # (M, D)
        loss = (function(q, *documents, every_q, x) / x.queries if own_rows else
                function(every_q, *documents, x) / world_size())
        if args.loss not in RANKED:
            return loss, {}
        return loss, {"accuracy": hits(q, *documents, x) / x.queries}
    return loss_fn


def facts(batch, scale, args, device, everybody=True):
    """What a loss may look at beside representations, of all processes' rows, on `device`.

    queries         how many there are in the whole job; tokens, likewise, for TSDAE
    target          score, label, teacher_scores or teacher_vector: as in the batch, gathered
    ids             (M*K,) of all documents
    own_positives   (N,) columns of this process' positives
    own_exclude     function of its queries (R,) and columns (C,) -> (R, C): a document that is
                    known to answer a query is no negative of it
    rows            (N,) which of all queries are this process'; only if `everybody` is asked for:
    positives, exclude   the same of all M queries
    """
    counts = sizes(len(batch["queries"]))
    x = SimpleNamespace(scale=scale, args=args, batch=batch, queries=sum(counts))
    first = sum(counts[:rank()])
    x.rows = torch.arange(first, first + counts[rank()], device=device)
    for field in NUMBERS.keys() & batch.keys():                     # a loss has one of them at most
        x.target = gather_with_grad(batch[field].to(device))
    if args.loss == "tsdae":
        x.tokens = sum(sizes(sum(len(original["input_ids"]) for original in batch["originals"])))
    if not batch["documents"]:
        return x
    first = sum(sizes(len(batch["documents"]))[:rank()])
    x.own_positives = batch["positives"].to(device) + first                     # (N,)
    x.ids = gather_with_grad(batch["document_ids"].to(device))                  # (M*K,)
    # Of a query's answers only those in the batch matter: its own positive, rarely another one.
    present = set(x.ids.tolist())
    answers = [[name for name in names if name in present] for names in batch["answers"]]
    x.own_exclude = known_answers(x.ids, as_table(answers, device))
    if everybody:
        x.positives = gather_with_grad(x.own_positives)                         # (M,)
        width = max(sizes(max(map(len, answers))))
        x.exclude = known_answers(x.ids, gather_with_grad(as_table(answers, device, width)))
    return x


def known_answers(ids, answers):
    """ids (M*K,), answers (M, A) -> function of queries (R,), columns (C,) -> (R, C) bool.

    A function, so that a tiled loss never holds all of it.
    """
    def piece(i, j):
        found = torch.zeros(len(i), len(j), dtype=torch.bool, device=ids.device)
        for answer in answers[i].unbind(dim=1):                                 # (R,)
            found |= answer[:, None] == ids[j]
        return found
    return piece


def as_table(lists, device, width=None):
    """N lists of numbers -> (N, width) int64; a shorter one repeats its first number."""
    width = width or max(map(len, lists), default=1)
    table = [[*row, *row[:1] * (width - len(row))] for row in lists]
    return torch.tensor(table, dtype=torch.long, device=device).view(len(lists), width)


def hits(q, d, x):
    """How many of this process' queries find their positive first, among all documents."""
    if q.dim() == 2:
        return in_batch_accuracy(q, d, x.own_positives, x.own_exclude).sum()
    scores = match(q.detach(), d.detach())          # late interaction: compared with unit vectors
    unit = torch.eye(scores.shape[1], device=scores.device)
    return in_batch_accuracy(scores, unit, x.own_positives, x.own_exclude).sum()


@torch.no_grad()
def match(q, d, block=64):
    """Scores (N, M) of vectors or, by late interaction, of token vectors; for measuring."""
    return q @ d.T if q.dim() == 2 else torch.cat([maxsim(part, d) for part in q.split(block)])


# --- The losses -----------------------------------------------------------------------------------
# First those that are a sum over this process' own queries: functions of (q (N, D), d (M*K, D),
# every_q (M, D) or None, x), whose result the caller divides by M.

def info_nce_rows(q, d, every_q, x):
    """info_nce with all its flags; also SimCSE, where d are the same texts, encoded once more."""
    a, everybody = x.args, every_q is not None
    return info_nce(q, d, x.scale, x.positives if everybody else x.own_positives,
                    x.exclude if everybody else x.own_exclude, tile=a.loss_tile,
                    label_smoothing=a.label_smoothing, directions=tuple(a.directions),
                    partition_mode=a.partition_mode, hardness_mode=a.hardness_mode,
                    hardness_strength=a.hardness_strength, all_queries=every_q,
                    query_rows=x.rows if everybody else None, reduction="sum")


def siglip_rows(q, d, every_q, x):
    """A sum over all pairs, so over queries, too."""
    i, j = (torch.arange(len(r), device=r.device) for r in (q, d))
    return siglip(q, d, x.scale, x.own_positives, x.own_exclude(i, j), reduction="sum")


def late_interaction(q, d, every_q, x):
    """info_nce of token vectors q (N, T, D), d (M*K, T', D)."""
    return info_nce_from_scores(maxsim(q, d), x.scale, x.own_positives, x.own_exclude,
                                label_smoothing=x.args.label_smoothing, reduction="sum")


def tsdae_rows(q, every_q, x, rows=8):
    """A decoder writes each whole text from the vector q (N, D) of what noise left of it.

    A sum over texts, so `rows` of them at a time suffice: their activations are computed again in
    the backward. Mean over the tokens of all processes; the caller divides by M, hence the factor.
    """
    def loss(vectors, ids):
        hidden = x.scale.decoder(vectors, ids.clamp(min=0))                     # (rows, T, D)
        return (ids >= 0).sum() * chunked_token_cross_entropy(
            hidden, x.scale.decoder.words.weight, ids, ignore=-1)

    ids = [original["input_ids"] for original in x.batch["originals"]]
    ids = nn.utils.rnn.pad_sequence(ids, True, -1).to(q.device)                 # (N, T)
    total = sum(checkpoint(loss, *part, use_reentrant=False)
                for part in zip(q.split(rows), ids.split(rows)))
    return total / x.tokens * x.queries


# The rest sees everybody's rows: functions of (q (M, D), d (M*K, D), x).

def triplets(q, d, x):
    """Every negative of a query makes a triplet with the query and its positive."""
    owner = owners(x.positives[:, None], len(d))
    negative = torch.arange(len(d), device=d.device) != x.positives[owner]
    owner = owner[negative]
    return triplet(q[owner], d[x.positives[owner]], d[negative])


def tension(a, b, x, others=7):
    """Each text with its own second encoding, and with those of the next `others` texts.

    One positive to seven negatives as in the paper, at one encoding each. Unit vectors times the
    learned scale stand for the paper's vectors of free length.
    """
    turns = range(min(1 + others, len(a)))
    labels = torch.cat([x.ids == x.ids.roll(-turn) for turn in turns])          # a repeated text: 1
    left = torch.cat([x.scale(a)] * len(turns))
    return contrastive_tension(left, torch.cat([b.roll(-turn, 0) for turn in turns]), labels.long())


def mega_batch(q, d, x):
    """Another answer to the same query is not its hardest negative."""
    i = torch.arange(len(q), device=q.device)
    return mega_batch_margin(q, d, x.exclude(i, i))


def given(loss, **options):
    """A loss of representations and the one thing that the rows say: score, label or vector."""
    return lambda *q_d_x: loss(*q_d_x[:-1], q_d_x[-1].target, **options)


# A teacher's scores are compared with scale * q . d, since a cosine cannot leave [-1, 1] and a
# cross-encoder's score does. Which fields of a row each needs, flags.LOSSES says.
OBJECTIVES = {
    "info_nce": info_nce_rows,
    "clip": lambda q, d, every_q, x: info_nce(                          # duplicates are negatives
        q, d, x.scale, x.own_positives, reduction="sum"),
    "siglip": siglip_rows,
    "gist": lambda q, d, x: gist(q, d, *x.guide, x.scale, x.positives),
    "mega_batch_margin": mega_batch,
    "triplet": triplets,
    "margin_mse": lambda q, d, x: margin_mse(x.scale(q), d, x.target, x.positives),
    "distill_kl": lambda q, d, x: distill_kl(x.scale(q), d, x.target, x.positives),
    "embedding_distillation": given(embedding_distillation),
    "cosent": given(cosent),
    "angle": given(angle),
    "cosine_regression": given(cosine_regression),
    "contrastive": given(contrastive),
    "online_contrastive": given(online_contrastive),
    "softmax_classification": lambda q, d, x: softmax_classification(q, d, x.target, x.scale.head),
    "batch_hard_triplet": given(batch_hard_triplet),
    "batch_hard_soft_margin_triplet": given(batch_hard_triplet, margin=None),
    "batch_semi_hard_triplet": given(batch_semi_hard_triplet),
    "batch_all_triplet": given(batch_all_triplet),
    "simcse": info_nce_rows,
    "contrastive_tension": tension,
    "tsdae": tsdae_rows,
}
OWN_ROWS = {"info_nce", "clip", "siglip", "simcse", "tsdae"}
TWICE = {"simcse", "contrastive_tension"}          # the documents are the queries once more
RANKED = TWICE | {"info_nce", "clip", "siglip", "gist", "mega_batch_margin", "triplet",
                  "margin_mse", "distill_kl"}      # a query has its positive to find
SCALED = RANKED - {"triplet", "mega_batch_margin"}                  # these learn a temperature


# --- Before the first step ------------------------------------------------------------------------

def needs(args, heldout=False):
    """Fields that each row must have beside "query", for read_pairs.

    What a teacher says is for training alone, and texts alone are judged as pairs.
    """
    fields = LOSSES[args.loss]
    if heldout:
        fields = [field for field in fields if field not in ("negatives", "teacher_scores")]
    return tuple(fields or ("positive",) * heldout)


def prepare_rows(args, rows, heldout=False):
    """Check what a loss asks of all rows; return rows as the towers see them, or ValueError."""
    binary = "label", 0, "for 0, different, and 1, the same: try softmax_classification"
    limits = {"contrastive": binary, "online_contrastive": binary, "cosine_regression": (
        "score", -1, "for a cosine, which lies in [-1, 1]: divide all scores by the largest")}
    for number, row in enumerate(rows):
        where = f"row {number} (line {row.get('line', '?')})"
        if missing := [field for field in needs(args, heldout) if row.get(field) in (None, [])]:
            raise ValueError(f"{where} has no '{missing[0]}', which --loss {args.loss} needs: give "
                             "--train-jsonl a file that has it, or choose another loss")
        field, least, remedy = limits.get(args.loss, ("query", None, None))
        if remedy and not least <= row[field] <= 1:
            raise ValueError(f"{where}: '{field}' is {row[field]}; --loss {args.loss} is {remedy}")
    if heldout:
        return rows
    if args.loss in TWICE:
        return [{**row, "positive": row["query"], "negatives": []} for row in rows]
    if "positive" not in needs(args):
        return [{name: value for name, value in row.items() if name != "positive"} for row in rows]
    return rows


def batch_options(args, guide):
    """Keyword arguments of Batches that follow from the loss."""
    fields = LOSSES[args.loss]
    return {"numbers": tuple(sorted(NUMBERS.keys() & set(fields))),
            "pair_labels": fields == ("label",), "noise": NOISE * (args.loss == "tsdae"),
            "document_side": "query" if args.loss in TWICE else "document",
            "guide": guide and guide.preprocess}


def loss_parameters(args, model, rows):
    """What the loss learns: a LogitScale, on which a head, a copy or a decoder hangs if needed.

    They reach optimizer, clipping, synchronisation and checkpoint with it. Raises ValueError for
    sizes that do not fit the model.
    """
    if args.matryoshka_dims and not 1 <= min(args.matryoshka_dims) <= max(
            args.matryoshka_dims) <= model.dim:
        raise ValueError(f"--matryoshka-dims {args.matryoshka_dims}: the model's vectors have "
                         f"{model.dim} numbers, cut to 1..{model.dim} of them")
    scale = LogitScale(args.temperature, learnable=args.loss in SCALED,
                       bias=-10.0 if args.loss == "siglip" else None)
    if args.loss == "softmax_classification":
        scale.head = nn.Linear(3 * model.dim, 1 + max(row["label"] for row in rows))
    if args.loss == "contrastive_tension":            # the tokenizer is no part of what is learned
        shared = (model.processor, model.tokenizer, model.images)
        scale.copy = copy.deepcopy(model, {id(part): part for part in shared})
    if args.loss == "tsdae":
        words = model.backbone.get_input_embeddings().num_embeddings
        scale.decoder = Decoder(words, model.dim, model.max_length)
    for row in rows if args.loss == "embedding_distillation" else ():
        if (size := len(row["teacher_vector"])) != model.dim:
            raise ValueError(f"line {row.get('line', '?')}: 'teacher_vector' has {size} numbers, "
                             f"the model's have {model.dim}: cut or project the teacher's")
    return scale


class Decoder(nn.Module):
    """TSDAE's decoder: one Transformer layer, which sees a vector and the words so far.

    The paper's has as many layers as the encoder and shares its weights; this one is thrown away
    after training just the same. Its output matrix is its own word embedding.
    """

    def __init__(self, vocabulary, dim, longest):
        super().__init__()
        heads = next(n for n in (8, 4, 2, 1) if dim % n == 0)
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(longest, dim)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layer = nn.TransformerDecoderLayer(dim, heads, 4 * dim, dropout=0.0, norm_first=True,
                                                batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors, ids):
        """vectors (n, D), ids (n, T) -> hidden (n, T, D), the t-th made of ids before t alone."""
        before = F.pad(self.words(ids)[:, :-1], (0, 0, 1, 0))                   # (n, T, D)
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        # Longer texts end in padding, which no earlier place looks at.
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device)
        return self.norm(self.layer(before + places, vectors[:, None], tgt_mask=causal))


def towers(batch):
    """The lists of samples that are encoded, in the order of `encoders_of`."""
    return [batch[name] for name in TOWERS if batch.get(name)]


def encoders_of(args, encoders, scale, guide):
    """One encoder per tower. encoders: of queries and documents."""
    query, document = encoders
    if args.loss == "contrastive_tension":
        document = scale.copy
    two = args.loss in TWICE or "positive" in LOSSES[args.loss]
    return [query] + [document] * two + [guide, guide] * (guide is not None)


# --- Held-out rows --------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, encoders, rows, scale, device, args=None):
    """InfoNCE and ranking in the pool of all held-out documents, or what `evaluate_rows` measures.

    Each process encodes a part and scores a part of the queries; all get the same numbers.
    """
    def encode_together(side, encoder, samples):
        # Parts of one size, the last one moved back into range: sharded weights need equally many
        # forwards everywhere. What is encoded twice is put into the same place.
        size = -(-len(samples) // world_size())
        start = min(rank() * size, len(samples) - size)
        place = torch.arange(start, start + size, device=device)
        part = model.encode(samples[start:start + size], side, progress=False, encoder=encoder)
        part, place = gather_with_grad((part.to(device), place))
        table = torch.zeros(len(samples), *part.shape[1:], device=device)
        return table.index_copy(0, place, part)

    if args and (row := evaluate_rows(args, lambda side, samples: encode_together(
            side, encoders[side == "document"], samples), rows, scale)):
        return row
    queries, documents, relevant = retrieval_pool(rows)
    q, d = map(encode_together, ("query", "document"), encoders, (queries, documents))
    own = slice(*(len(queries) * (rank() + i) // world_size() for i in (0, 1)))
    q, relevant = q[own], relevant[own]                                                # (N, D)
    positives = torch.tensor([columns[0] for columns in relevant], dtype=torch.long, device=device)
    # What answers a query, too, is no negative of it, as in training.
    exclude = known_answers(torch.arange(len(d), device=device), as_table(relevant, device))
    totals = dict.fromkeys(("loss", "recall@1", "recall@10", "mrr@10", "ndcg@10"), 0.0)
    for i in torch.arange(len(q), device=device).split(256) if len(q) else ():
        scores = match(q[i], d)                                             # (256, M)
        found = ranking_metrics(scores, relevant[i[0]:i[-1] + 1], reduction="sum")
        found["loss"] = info_nce_from_scores(scores, scale, positives[i], reduction="sum",
                                             exclude=lambda r, c, i=i: exclude(i[r], c))
        totals = {name: total + float(found[name]) for name, total in totals.items()}
    numbers = reduce_numbers(totals.values())
    return {f"eval_{name}": n / len(queries) for name, n in zip(totals, numbers)}


@torch.no_grad()
def evaluate_rows(args, encode, rows, scale):
    """Metrics of rows that are no retrieval; None if they are.

    encode(side, samples) -> vectors. Two texts with a score (or a label 0, 1): do cosines follow
    it? With a class: how often is the head right? One text and a class: how often has the nearest
    other text the same one? A teacher's vector: the loss.
    """
    fields = needs(args, heldout=True)
    if not (told := NUMBERS.keys() & set(fields)):
        return None
    field = told.pop()
    q = encode("query", [row["query"] for row in rows])                         # (n, D)
    truth = torch.tensor([row[field] for row in rows], device=q.device)
    if field == "teacher_vector":
        return {"eval_loss": embedding_distillation(q, truth).item()}
    if "positive" not in fields:
        nearest = (q @ q.T).fill_diagonal_(-torch.inf).argmax(dim=1)
        return {"eval_class_recall@1": (truth[nearest] == truth).double().mean().item()}
    d = encode("document", [row["positive"] for row in rows])
    if args.loss == "softmax_classification":
        logits = scale.head(torch.cat([q, d, (q - d).abs()], dim=1).to(scale.head.weight.dtype))
        return {"eval_loss": F.cross_entropy(logits, truth).item(),
                "eval_accuracy": (logits.argmax(dim=1) == truth).double().mean().item()}
    cosines = F.cosine_similarity(q, d)
    return {"eval_pearson": correlation(cosines, truth),
            "eval_spearman": correlation(ranks(cosines), ranks(truth))}


def correlation(a, b):
    """Pearson's, of two (n,); 0 where one of them is constant."""
    a, b = (x.double() - x.double().mean() for x in (a, b))
    return (a @ b / (a.norm() * b.norm()).clamp(min=1e-300)).item()


def ranks(x):
    """(n,) -> (n,) places 1..n in ascending order; equal values share the mean of their places."""
    _, where, counts = x.unique(return_inverse=True, return_counts=True)        # ascending
    return (counts.cumsum(0) - (counts - 1) / 2)[where]
