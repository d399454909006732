"""python -m extras.evaluate --model output/final                                  Read 8 of 8.

How good is a model at finding documents? Without data flags on the held-out rows of the offline
data, where it repeats the last evaluation of train.py. Other data, other questions:

    --eval-jsonl heldout.jsonl                         any file that train.py reads, --columns too
    --corpus corpus.jsonl --queries queries.jsonl --qrels qrels/test.tsv      BEIR's three files
    --compare OTHER_MODEL                              is the difference more than chance?
    --dims 128 64 32                                   what shortened (Matryoshka) vectors lose
    --json FILE  --run FILE                            numbers, and the ranking for trec_eval

1) read queries, documents, and which document answers which query how well (its gain);
2) encode every different document once, so that its copies get the same vector (and every query
   with its own prompt, if the rows have them);
3) score a block of queries against the whole corpus and find the *ranks* of the documents that
   answer: 1 + how many others score as high or higher. A tie never helps;
4) every metric is a function of those ranks and gains; the mean over queries is reported.

Ranks are exact at any depth, as no list is cut before they are known. The corpus' vectors are in
memory (a million of 1,024 numbers: 4 GB, and a copy cut to a dim), its scores only for a block of
queries (0.5 GB with all that is made of them). For a million documents step 3 took one CPU core
0.12 s per query with 128 numbers, 0.7 s with 1,024. One process, one GPU.

Metrics of one query with R answers are those of trec_eval, hence of BEIR's tables (which exclude a
query's own text from its results where it is in the corpus; here the corpus is taken as it is):

    recall@k     answers in the first k / R            precision@k   answers in the first k / k
    mrr@k        1 / rank of the first, if <= k        map@k         sum of answers' precision / R
    ndcg@k       sum of gain / log2(1 + rank) in the first k, over the best possible sum
                 (gains as they are in the file, not 2^gain - 1)

Letters: N queries, M documents, B queries in a block, R answers (of the query with most), D
embedding size.
"""
import argparse
import json
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from batches import query_id, retrieval_pool
from data import as_page, load_image, offline_pairs, read_pairs
from flags import column
from model import BiEncoder

NEVER = 2 ** 62                  # the rank of an answer that is not in the corpus, and of padding


# --- Data: queries, documents, and a dict {column of a document: gain} per query ------------------

def read_rows(rows, documents="text"):
    """Training rows -> (queries, documents, relevant); ids are numbers. Every answer has gain 1."""
    queries, pool, answers = retrieval_pool(rows)
    if documents == "image":                    # load_image draws the page when it is needed
        pool = [as_page(sample) for sample in pool]
    return dict(enumerate(queries)), dict(enumerate(pool)), [dict.fromkeys(a, 1.0) for a in answers]


def read_beir(corpus, queries, qrels):
    """BEIR's files -> ({query id: text}, {document id: text}, relevant), judged queries only.

    corpus, queries  JSONL with "_id", "text" and, in a corpus, perhaps "title"
    qrels            lines "query, document, gain" between tabs (with or without a header), or those
                     of TREC: "query 0 document gain". A gain of 0 or less counts as not judged
    An answer that the corpus lacks counts as never found, as in trec_eval; it gets a column >= M.
    Raises ValueError with file and line of what cannot be read.
    """
    texts, documents, gains = read_texts(queries), read_texts(corpus), {}
    column = {name: i for i, name in enumerate(documents)}
    for number, line in enumerate(read_lines(qrels), 1):
        fields = line.rstrip("\r\n").split("\t" if "\t" in line else None)
        try:
            query, document, gain = fields if len(fields) == 3 else (*fields[:1], *fields[2:])
            gain = float(gain)
        except ValueError:
            if number == 1 or not line.strip():                                      # the header
                continue
            raise ValueError(f"{qrels}, line {number}: {line[:80]!r} is not 'query, document, "
                             "gain' between tabs, nor TREC's 'query 0 document gain'") from None
        if query not in texts or not math.isfinite(gain):
            raise ValueError(f"{qrels}, line {number}: " + (
                f"gain {gain} is not finite" if query in texts else
                f"query {query!r} is not in {queries}"))
        if gain > 0:
            own = gains.setdefault(query, {})
            own[column.setdefault(document, len(column))] = gain
    if not gains:
        raise ValueError(f"{qrels}: no line has a gain above 0, so there is nothing to find")
    print(f"{len(texts) - len(gains)} of {len(texts)} queries have no answer and are left out; "
          f"{len(column) - len(documents)} answers are not in the corpus: never found")
    return {name: texts[name] for name in gains}, documents, [*gains.values()]


def read_lines(path):
    """Lines of a UTF-8 file; only \\n ends one, as U+2028 is legal inside a JSON string."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8: {error}") from None


def read_texts(path):
    """JSONL of BEIR -> {id: title and text}, in order."""
    texts = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name, text = str(record["_id"]), f"{record.get('title') or ''} {record['text']}".strip()
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is not an object with '_id' "
                             f"and 'text' ({error})") from None
        if name in texts:
            raise ValueError(f"{path}, line {number}: the _id {name!r} is there twice")
        texts[name] = text
    return texts


# --- From vectors to ranks to metrics -------------------------------------------------------------

def blocks_of_queries(N, M, scores_at_once=2 ** 25):
    """Row numbers 0..N-1 in blocks of as many as may be scored at once, with a progress bar."""
    blocks = torch.arange(N).split(max(1, scores_at_once // M))
    return tqdm(blocks, "ranking", leave=False, disable=None)                        # each (B,)


def exact_scores(q, d, part=2 ** 13):
    """(B, D) x (M, D) -> (B, M) float32 inner products, equal for equal documents.

    A float32 product sums in another order in its last columns: there a copy of a document would
    score 1e-8 more or less, and break a tie. So the sum is float64, rounded once.
    """
    return torch.cat([(q.double() @ x.double().T).float() for x in d.split(part)], dim=1)


def ranks_of_answers(q, d, relevant, scores_at_once=2 ** 25):
    """-> ranks (N, R) int64 and gains (N, R) float64, best rank first; NEVER and 0 are padding.

    Whatever is no answer stands before an answer of the same score, and so does an answer of lower
    gain. q (N, D), d (M, D), relevant: N dicts {column: gain above 0}, none of them empty.
    """
    N, M, R = len(q), len(d), max(map(len, relevant))
    columns, gains = torch.full((N, R), M), torch.zeros(N, R, dtype=torch.float64)
    for i, own in enumerate(relevant):
        lowest_first = sorted(own, key=own.get)                  # a stable sort keeps it for ties
        columns[i, :len(own)] = torch.tensor(lowest_first).clamp(max=M)
        gains[i, :len(own)] = torch.tensor([own[c] for c in lowest_first], dtype=torch.float64)
    ranks = torch.empty_like(columns)
    for i in blocks_of_queries(N, M, scores_at_once):
        s = exact_scores(q[i], d)                                                    # (B, M)
        if not s.isfinite().all():
            raise ValueError(f"queries {i[0]}..{i[-1]}: scores are not finite; is the model sound?")
        # Column M stands for what has no score: padding, and answers that the corpus lacks.
        s = torch.cat([s, torch.full_like(s[:, :1], -torch.inf)], dim=1)             # (B, M + 1)
        mine = columns[i].to(s.device)                                               # (B, R)
        own, order = s.gather(1, mine).sort(dim=1, descending=True, stable=True)
        s.scatter_(1, mine, -torch.inf)                          # leaves the scores of all others
        others = torch.stack([(s >= score[:, None]).sum(dim=1) for score in own.T], dim=1)
        rank = others + torch.arange(1, own.shape[1] + 1, device=s.device)
        ranks[i] = rank.masked_fill(own == -torch.inf, NEVER).cpu()
        gains[i] = gains[i].gather(1, order.cpu())
    return ranks, gains


def metrics_of_ranks(ranks, gains, ks):
    """ranks (N, R) rising, gains (N, R) -> {"recall@1": (N,) float64, ...}; see the top."""
    ranks, answers = ranks.double(), (gains > 0).sum(dim=1)                          # (N,)
    place = torch.arange(1, ranks.shape[1] + 1, dtype=torch.float64)                 # (R,)
    best = gains.sort(dim=1, descending=True).values / torch.log2(1 + place)
    hits = {k: (ranks <= k).double() for k in ks}                                    # (N, R) each
    per_query = {
        "recall": lambda k, hit: hit.sum(dim=1) / answers,
        "precision": lambda k, hit: hit.sum(dim=1) / k,
        "mrr": lambda k, hit: hit[:, 0] / ranks[:, 0],
        "map": lambda k, hit: (hit * place / ranks).sum(dim=1) / answers,
        "ndcg": lambda k, hit: ((hit * gains / torch.log2(1 + ranks)).sum(dim=1)
                                / best[:, :k].sum(dim=1))}
    return {f"{name}@{k}": metric(k, hits[k]) for name, metric in per_query.items() for k in ks}


def bootstrap(difference, resamples=10_000, level=0.95, seed=0):
    """Paired difference of a metric (N, metrics) -> (2, metrics): interval of its mean.

    The queries are a sample of those that could have been asked. Draw N of them again, with
    replacement, many times: the middle 95 % of the means say how far chance moves the difference
    (Efron's percentile interval). Paired, since both models met the same queries: what makes a
    query hard for both cancels.
    """
    generator, N, means = torch.Generator().manual_seed(seed), len(difference), []
    ones = torch.ones(100, N, dtype=torch.float64)
    for _ in range(0, resamples, 100):
        drawn = torch.randint(N, (100, N), generator=generator)
        times = torch.zeros_like(ones).scatter_add_(1, drawn, ones)        # (100, N) drawn so often
        means.append(times @ difference.double() / N)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    return torch.cat(means).quantile(tails, dim=0)


# --- The program ----------------------------------------------------------------------------------

def encode_once(model, samples, side, batch_size):
    """List of n samples -> (n, D); equal samples share one encoding, so their vectors are equal."""
    names = [query_id(sample) for sample in samples]            # under another prompt, another one
    different = dict(zip(names, samples))
    vectors = model.encode([*different.values()], side, batch_size)
    if len(different) == len(samples):
        return vectors
    row = {name: i for i, name in enumerate(different)}
    return vectors[[row[name] for name in names]]


def measure(path, queries, documents, relevant, args, run=None):
    """Model folder -> {dim: {metric: (N,) values}}. run: file for the ranking by whole vectors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = BiEncoder.from_pretrained(path, load_image=load_image, dtype=args.dtype).to(device)
    if model.pooling == "tokens":
        raise ValueError(f"{path} has a vector for each token; only train.py evaluates those")
    q, d = (encode_once(model, [*samples.values()], side, args.batch_size).to(device)
            for samples, side in ((queries, "query"), (documents, "document")))
    dims = args.dims or [d.shape[1]]
    if wrong := [dim for dim in dims if not 1 <= dim <= d.shape[1]]:
        raise ValueError(f"--dims {wrong[0]}: {path} has vectors of {d.shape[1]} numbers")
    if run:
        write_run(run, q, d, [*queries], [*documents], max(args.k))
    found = {}
    for dim in dims:                            # a cut vector is short: it needs unit length again
        cut = (torch.nn.functional.normalize(x[:, :dim], dim=1) for x in (q, d))
        found[dim] = metrics_of_ranks(*ranks_of_answers(*cut, relevant), args.k)
    return found


def write_run(path, q, d, query_ids, document_ids, depth):
    """The first `depth` documents of every query, in the format of trec_eval and its relatives."""
    with open(path, "w", encoding="utf-8") as file:
        for i in blocks_of_queries(len(q), len(d)):
            best = exact_scores(q[i], d).topk(min(depth, len(d)), dim=1)             # (B, depth)
            for n, *ranking in zip(i.tolist(), best.indices.tolist(), best.values.tolist()):
                for rank, (column, score) in enumerate(zip(*ranking), 1):
                    print(query_ids[n], "Q0", document_ids[column], rank, score, "run", file=file)


def compare(a, b):
    """Two results of `measure` -> [{metric: (mean of b - a, low, high)}], dim by dim."""
    answer = []
    for first, second in zip(a.values(), b.values()):
        difference = torch.stack([second[name] - first[name] for name in first], dim=1)
        low, high = bootstrap(difference)
        numbers = zip(difference.mean(dim=0).tolist(), low.tolist(), high.tolist())
        answer.append(dict(zip(first, numbers)))
    return answer


def table(results, differences=()):
    """Rows are metrics; columns are dims, or per dim both models and their difference."""
    letters, columns = "AB" if differences else " ", []
    for n, dims in enumerate(zip(*results)):
        for letter, result, dim in zip(letters, results, dims):
            means = {name: f"{v.mean().item():.4f}" for name, v in result[dim].items()}
            columns.append((f"{letter} {dim}".strip(), means))
        if differences:
            numbers = differences[n].items()
            columns += [("B - A", {name: f"{mean:+.4f}" for name, (mean, _, _) in numbers}),
                        ("95 % interval", {name: f"{low:+.4f} to {high:+.4f}{' *'[low * high > 0]}"
                                           for name, (_, low, high) in numbers})]
    widths = [max(8, *map(len, (head, *cells.values()))) for head, cells in columns]
    lines = ["".join([" " * 14, *(f"  {head:>{w}}" for (head, _), w in zip(columns, widths))])]
    for name in columns[0][1]:
        lines.append("".join([f"{name:<14}", *(f"  {cells[name]:>{w}}"
                                               for (_, cells), w in zip(columns, widths))]))
    return "\n".join(lines)


def parse_args(argv=None):
    """argv -> namespace; combinations that make no sense end here."""
    parser = argparse.ArgumentParser(prog="python -m extras.evaluate", description="Retrieval "
                                     "metrics of one model, or the difference between two.")
    flag = parser.add_argument
    flag("--model", required=True, help="folder or hub name")
    flag("--compare", metavar="MODEL", help="a second model: report its difference from --model")
    flag("--eval-jsonl", help="rows as for train.py")
    flag("--columns", nargs="+", type=column, default=[], metavar="OURS=THEIRS",
         help="such as query=question")
    flag("--corpus", help="BEIR: corpus.jsonl; together with --queries and --qrels")
    flag("--queries", help="BEIR: queries.jsonl")
    flag("--qrels", help="BEIR: qrels/test.tsv, or a qrels file of TREC")
    flag("--offline-data", default="stdlib", choices=("stdlib", "shapes"),
         help="without data flags: held-out rows of (default: %(default)s)")
    flag("--mask-names", action="store_true", help="stdlib: hide the function's name in its source")
    flag("--documents", default="text", choices=("text", "image"),
         help="image: render texts to page images, as in train.py")
    flag("--allow-any-path", action="store_true", help="also images outside the JSONL's folder")
    flag("--k", type=int, nargs="+", default=[1, 10, 100], help="default: 1 10 100")
    flag("--dims", type=int, nargs="+", help="cut the vectors to so many numbers (default: whole)")
    flag("--batch-size", type=int, default=32, help="samples encoded at once (default: 32)")
    flag("--dtype", default="fp32", choices=("fp32", "bf16"), help="default: fp32")
    flag("--json", metavar="FILE", help="write all numbers there, too")
    flag("--run", metavar="FILE", help="write the ranking of --model in trec_eval's format")
    args = parser.parse_args(argv)
    beir = [args.corpus, args.queries, args.qrels]
    if any(beir) and (args.eval_jsonl or not all(beir)):
        parser.error("give either --eval-jsonl, or all of --corpus, --queries and --qrels")
    if min(*args.k, args.batch_size) < 1:
        parser.error(f"--k {args.k} and --batch-size {args.batch_size} must be at least 1")
    return args


def main(argv=None):
    """Run with these arguments (default: the command line's); returns what --json writes."""
    args = parse_args(argv)
    try:
        if args.corpus:
            data, name = read_beir(args.corpus, args.queries, args.qrels), args.qrels
        else:
            name = args.eval_jsonl or f"held-out rows of {args.offline_data}"
            rows = (read_pairs(args.eval_jsonl, columns=dict(args.columns),
                               allow_any_path=args.allow_any_path)
                    if args.eval_jsonl else
                    offline_pairs(args.offline_data, mask_names=args.mask_names)[1])
            data = read_rows(rows, args.documents)
        queries, documents, relevant = data
        answers = sum(map(len, relevant)) / len(relevant)
        print(f"data   {name}: {len(queries)} queries, {len(documents)} documents, "
              f"{answers:.2f} answers per query")
        models, results = [args.model, args.compare][:1 + bool(args.compare)], []
        for letter, path in zip("AB", models):
            print(f"{letter if args.compare else 'model':<6} {path}")
            results.append(measure(path, *data, args, run=None if results else args.run))
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate: {error}")
    differences = compare(*results) if args.compare else ()
    print(table(results, differences))
    if differences:
        print("* the interval excludes 0. Equal models get a star in one of 20 comparisons")
    numbers = {"data": name, "queries": len(queries), "documents": len(documents), "models": [
        {"model": path, "metrics": {dim: {n: v.mean().item() for n, v in found.items()}
                                    for dim, found in result.items()}}
        for path, result in zip(models, results)]}
    if differences:
        numbers["differences"] = {dim: {name: dict(zip(("mean", "low", "high"), values))
                                        for name, values in d.items()}
                                  for dim, d in zip(results[0], differences)}
    if args.json:
        Path(args.json).write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")
    return numbers


if __name__ == "__main__":
    main()
