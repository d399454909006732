"""python -m extras.mine --model output/final --output mined.jsonl                 Read 8 of 8.

Hard negatives: documents that a model takes for answers and that are none. Hardly any document of
a random batch is close to another row's query; these are, so a trained model can still learn from
them:    train.py --train-jsonl mined.jsonl --num-hard-negatives 2

    --train-jsonl pairs.jsonl        any file that train.py reads (default: the offline pairs)
    --columns query=question ...     what its columns are called, if read_pairs cannot know
    --corpus more.jsonl              further documents, lines {"text": ...}, "title" if they have it
    --skip-top 10 --depth 100        candidates are the documents ranked 11th to 100th
    --relative-margin 0.05           ... that score lower than the positive by 5 % of its score
    --cross-encoder DIR              ... in the eyes of a slower judge, which reads both together
    --num-negatives 5 --sampling random

1) Collect the documents of rows and corpus, each once, and encode them and the queries.
2) Rank them for every row, without those that answer it: the positives of all rows with its query
   (and its prompt, if rows have their own), the query itself, and what differs from these only in
   capitals and spaces (in an image: not in a byte of its file).
3) Skip the top ranks, where unlabelled answers gather; score the other candidates again if asked;
   drop those too close to the row's own positive, or out of range.
4) Take the best of the rest or a random sample. Every row is written, with these negatives instead
   of its own (and without teacher_scores, which were theirs), in the names of our own format; one
   that too few are left for gets fewer, and is counted.

Costs one encoding of everything and about N M D operations. In memory: the queries, and of the
corpus a piece of 8,192 documents with its scores for 1,024 queries. Finished pieces are kept in
OUTPUT.work-KEY/ until the end: after a kill the same command goes on, and ends with the same file.
KEY stands for the data, the models' files, and how they are run.

Not here: several GPUs, approximate search, images in --corpus (as negatives of rows they are
candidates like all others), images inside of Parquet files (JSONL has no place for them). Whether
mining helped, extras.evaluate tells.

Letters: N rows, M documents, D embedding size, P candidates per row, B rows in a block.
"""
import argparse
import functools
import hashlib
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from batches import document_id, fingerprint
from data import load_image, offline_pairs, read_pairs
from flags import column
from model import BiEncoder
from supervised_losses import guide_mask

PIECE = 8192                     # samples that are encoded, saved and searched together
JUDGED = 64                      # rows whose candidates a cross-encoder scores before it saves


def mine(rows, model, work, *, corpus=(), rescore=None, num_negatives=5, skip_top=10, depth=100,
         margin=None, relative_margin=None, min_score=None, max_score=None, sampling="top", seed=0,
         batch_size=32):
    """Rows -> (the same rows with mined negatives, how many candidates were met, how many dropped).

    model    anything with encode(samples, side, batch_size) -> (n, D) vectors
    work     folder for finished pieces; a second call with the same arguments continues there
    rescore  (query, [P documents]) -> P scores, in place of the model's; it is given the positive
             first, so that margins compare like with like
    """
    # 1) A piece of the corpus is encoded, or read again, when the search gets there.
    pool, positives, answers = collect(rows, corpus)
    samples, queries = [*pool.values()], [row["query"] for row in rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def encode(side, some):
        return in_pieces(work, PIECE, side, some,
                         lambda part: model.encode(part, side, batch_size), device)
    q = torch.cat([*encode("query", queries)])                                      # (N, D)
    # 2) Rank, 3) skip the top, and judge again.
    scores, columns, positive_scores = search(
        q, encode("document", samples), positives, answers, depth)                  # (N, P), (N,)
    scores, columns = scores[:, skip_top:], columns[:, skip_top:]
    if rescore:
        judge = functools.partial(judged, rescore, samples, queries, positives, scores, columns)
        new = torch.cat([*in_pieces(work, JUDGED, "judged", range(len(rows)), judge)])
        positive_scores, (scores, order) = new[:, 0], new[:, 1:].sort(1, descending=True)
        columns = columns.gather(1, order)
    keep = usable(scores, positive_scores, margin, relative_margin, min_score, max_score)
    # 4) A generator per row, so that a row's draw depends on no other row.
    mined = []
    for n, row in enumerate(rows):
        left = columns[n][keep[n]].tolist()
        if sampling == "random":
            left = random.Random(f"{seed} {n}").sample(left, min(num_negatives, len(left)))
        mined.append({**row, "negatives": [samples[i] for i in left[:num_negatives]]})
        mined[-1].pop("teacher_scores", None)
    met = scores.isfinite().sum().item()
    return mined, met, met - keep.sum().item()


def in_pieces(work, size, name, items, make, device="cpu"):
    """make(at most `size` of the items) -> tensor, for one piece after the other. Each is kept in a
    file, so that after a kill what is finished is read and not made again."""
    for start in tqdm(range(0, len(items), size), f"{name} pieces", disable=None):
        path = work / f"{name}-{start}"
        if not path.exists():
            tensor, draft = make(items[start:start + size]), path.with_suffix(f".{os.getpid()}")
            if tensor.isnan().any():
                raise ValueError(f"{name} {start}..{start + len(tensor) - 1}: the model returned "
                                 "NaN; is it sound?")
            torch.save(tensor, draft)
            draft.replace(path)                      # half a file never has a whole one's name
        yield torch.load(path, weights_only=True).to(device)


# --- The steps ------------------------------------------------------------------------------------

def likeness(sample):
    """Id of a sample that its near-copies share: text without case and spacing, image by bytes."""
    parts = {"text": sample} if isinstance(sample, str) else sample
    text, image = " ".join((parts.get("text") or "").split()).casefold(), parts.get("image") or ""
    return document_id({"text": text, "image": file_hash(image) if image else ""})


@functools.cache
def file_hash(path):
    """Path of an image -> hash of the file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def collect(rows, corpus=()):
    """-> (pool {id: sample} of M different documents, positives, answers).

    positives (N,): column in the pool of each row's positive. answers (2, A): pairs (row, column)
    of documents that are no negatives of that row, whichever row says so.
    """
    pool, known = {}, {}
    asked = [(likeness(query), isinstance(query, dict) and query.get("prompt"))
             for query in (row["query"] for row in rows)]
    for row, query in zip(rows, asked):
        positive = likeness(row["positive"])
        known.setdefault(query, [query[0]]).append(positive)   # a query does not answer itself
        pool.setdefault(positive, row["positive"])
        for sample in row.get("negatives") or ():
            pool.setdefault(likeness(sample), sample)
    for sample in corpus:
        pool.setdefault(likeness(sample), sample)
    column = {name: i for i, name in enumerate(pool)}
    pairs = [(n, column[name]) for n, query in enumerate(asked)
             for name in dict.fromkeys(known[query]) if name in column]
    return (pool, torch.tensor([column[likeness(row["positive"])] for row in rows]),
            torch.tensor(pairs).T)


@torch.no_grad()
def search(q, pieces, positives, answers, depth, block=1024):
    """The best documents per row that do not answer it, one piece of the corpus after the other.

    q (N, D), pieces: (m, D) matrices, together the corpus -> scores (N, P) falling, columns (N, P),
    positive_scores (N,). P is depth, or M if that is less; a place left empty has score -inf.
    """
    best = torch.zeros(len(q), 0), torch.zeros(len(q), 0, dtype=torch.long)
    positive_scores, start = torch.zeros(len(q)), 0
    for piece in pieces:
        piece, merged, stop = piece.to(q.device), [], start + len(piece)
        for i in torch.arange(len(q)).split(block):                                 # (B,)
            s = q[i] @ piece.T                                                      # (B, m)
            found = ((positives[i] >= start) & (positives[i] < stop)).nonzero()[:, 0]
            positive_scores[i[found]] = s[found, positives[i[found]] - start].cpu()
            rows, columns = answers
            here = (rows >= i[0]) & (rows <= i[-1]) & (columns >= start) & (columns < stop)
            s[rows[here] - i[0], columns[here] - start] = -torch.inf
            s, c = (x.cpu() for x in s.topk(min(depth, len(piece)), dim=1))         # (B, <= depth)
            s, c = torch.cat([best[0][i], s], dim=1), torch.cat([best[1][i], c + start], dim=1)
            s, order = s.sort(dim=1, descending=True, stable=True)                  # old before new
            merged.append((s[:, :depth], c.gather(1, order)[:, :depth]))
        best, start = tuple(torch.cat(parts) for parts in zip(*merged)), stop
    return *best, positive_scores


def usable(scores, positive_scores, margin=None, relative_margin=None, min_score=None,
           max_score=None):
    """scores (N, P), positive_scores (N,) -> (N, P) bool. Limits that are None do not apply.

    Margins: at most positive - margin, and at most positive - relative_margin * |positive|: of 0.8
    with 0.05 0.76, and of -0.50 -0.525, where positive * (1 - margin) would be the wrong way.
    """
    keep = scores.isfinite()
    for size, relative in ((margin, False), (relative_margin, True)):
        if size is not None:
            keep &= ~guide_mask(scores, positive_scores[:, None], size, relative)
    keep &= scores >= (-torch.inf if min_score is None else min_score)
    return keep & (scores <= (torch.inf if max_score is None else max_score))


def judged(rescore, samples, queries, positives, scores, columns, some):
    """-> (len(some), 1 + P): for these rows, new scores of the positive and of the candidates."""
    new = torch.full((len(some), 1 + scores.shape[1]), -torch.inf)
    for own, n in zip(new, some):
        texts = [samples[i] for i in (positives[n], *columns[n][scores[n].isfinite()])]
        own[:len(texts)] = torch.as_tensor(rescore(queries[n], texts))
    return new


def cross_encoder(name_or_path, batch_size, device):
    """A sequence classifier with one output, such as a reranker -> rescore for `mine`. It reads the
    texts; prompts are for the encoder."""
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(name_or_path).to(device).eval()
    if model.config.num_labels != 1:
        raise ValueError(f"{name_or_path} has {model.config.num_labels} outputs: a judge has one, "
                         "the relevance of the document to the query")
    length = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 8192))

    @torch.no_grad()
    def rescore(query, documents):
        query, *documents = (sample if isinstance(sample, str) else sample["text"]
                             for sample in (query, *documents))
        scores = []
        for start in range(0, len(documents), batch_size):
            part = documents[start:start + batch_size]
            batch = tokenizer([query] * len(part), part, padding=True, truncation=True,
                              max_length=length, return_tensors="pt").to(device)
            scores += model(**batch).logits[:, 0].float().tolist()
        return scores
    return rescore


# --- Files ----------------------------------------------------------------------------------------

def read_corpus(path):
    """JSONL with "text" and perhaps "title", as in BEIR -> texts. ValueError names a bad line."""
    texts = []
    with open(path, "rb") as file:                   # bytes: only \n ends a line of JSONL
        for number, line in enumerate(file, 1):
            try:
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    record = json.loads(line.decode("utf-8-sig"))
                    texts.append(f"{record.get('title') or ''} {record['text']}".strip())
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {line[:80]!r} is not an object with "
                                 f"'text' ({type(error).__name__}: {error})") from None
    return [text for text in texts if text]          # train.py refuses rows with an empty text


def portable(sample, folder, allow_any_path):
    """Sample as it stands in a JSONL file in `folder`: its image, if any, by relative path."""
    if isinstance(sample, str) or not sample.get("image"):
        return sample
    if type(sample["image"]) is not str:
        raise ValueError("an image is inside the data, and JSONL has no place for it: save it as a "
                         "file, and give its path")
    path = os.path.relpath(sample["image"], folder)
    if path.startswith("..") and not allow_any_path:
        raise ValueError(f"image {sample['image']} is outside {folder}: choose an --output beside "
                         "the images, or pass --allow-any-path, here and to train.py")
    return {**sample, "image": path}


def write_rows(path, rows, allow_any_path=False):
    """Rows -> JSONL that read_pairs reads; it appears complete or not at all."""
    folder, draft = os.path.realpath(path.parent), path.with_name(f"{path.name}.{os.getpid()}")
    def foreign(value):                              # Parquet has dates and bytes, JSON does not
        return None if isinstance(value, bytes) else str(value)
    # Half a surrogate pair in a foreign field has no UTF-8; its escape, though, is valid JSON.
    with open(draft, "w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            row = {name: value for name, value in row.items() if name != "line"}
            for name in ("query", "positive"):
                row[name] = portable(row[name], folder, allow_any_path)
            row["negatives"] = [portable(s, folder, allow_any_path) for s in row["negatives"]]
            print(json.dumps(row, ensure_ascii=False, default=foreign), file=file)
    draft.replace(path)


def key_of(rows, corpus, models, settings):
    """What finished pieces depend on, as a short name: another KEY, another folder."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns)
             for model in models if model for path in sorted(Path(model).rglob("*.*"))]
    content = [fingerprint(rows), [*map(document_id, corpus)], models, files, settings]
    return hashlib.blake2b(repr(content).encode(), digest_size=4).hexdigest()


# --- The program ----------------------------------------------------------------------------------

def parse_args(argv=None):
    """argv -> namespace; values that make no sense end here."""
    parser = argparse.ArgumentParser(prog="python -m extras.mine",
                                     description="Mine hard negatives with a model.")
    flag = parser.add_argument
    flag("--model", required=True, help="folder or hub name")
    flag("--output", required=True, help="JSONL to write")
    flag("--train-jsonl", help="rows to mine for (default: training rows of the offline data)")
    flag("--columns", nargs="+", type=column, default=[], metavar="OURS=THEIRS",
         help="such as query=question")
    flag("--mask-names", action="store_true", help="offline data: hide the functions' names")
    flag("--allow-any-path", action="store_true", help="also images outside the files' folders")
    flag("--corpus", help="JSONL of further documents")
    flag("--num-negatives", type=int, default=5, help="at most so many per row (default: 5)")
    flag("--skip-top", type=int, default=10, help="leave out so many top ranks (default: 10)")
    flag("--depth", type=int, default=100, help="last rank that is considered (default: 100)")
    flag("--margin", type=float, help="score at least so far below the positive's")
    flag("--relative-margin", type=float, help="the same, as a share of the positive's score")
    flag("--min-score", type=float, help="no negative below it")
    flag("--max-score", type=float, help="no negative above it")
    flag("--cross-encoder", metavar="MODEL", help="its scores replace the model's from step 3 on")
    flag("--sampling", default="top", choices=("top", "random"), help="default: top")
    flag("--seed", type=int, default=0, help="of random sampling (default: 0)")
    flag("--batch-size", type=int, default=32, help="samples encoded at once (default: 32)")
    flag("--dtype", default="fp32", choices=("fp32", "bf16"), help="default: fp32")
    flag("--keep-pieces", action="store_true", help="to try other margins without encoding again")
    args = parser.parse_args(argv)
    if min(args.num_negatives, args.batch_size) < 1 or not 0 <= args.skip_top < args.depth:
        parser.error("--num-negatives and --batch-size must be at least 1, and --skip-top between "
                     f"0 and --depth; got {args.num_negatives}, {args.batch_size}, "
                     f"{args.skip_top}, {args.depth}")
    return args


def main(argv=None):
    """Run with these arguments (default: the command line's); returns the mined rows."""
    args = parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        rows = (read_pairs(args.train_jsonl, columns=dict(args.columns),
                           allow_any_path=args.allow_any_path)
                if args.train_jsonl else offline_pairs(mask_names=args.mask_names)[0])
        corpus = read_corpus(args.corpus) if args.corpus else []
        output = Path(args.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        for row in rows:                             # before hours of encoding, not after
            for sample in (row["query"], row["positive"], *row["negatives"]):
                portable(sample, os.path.realpath(output.parent), args.allow_any_path)
                if args.cross_encoder and isinstance(sample, dict) and "image" in sample:
                    raise ValueError(f"--cross-encoder reads texts, and there is {sample}")
        key = key_of(rows, corpus, [args.model, args.cross_encoder], [
            args.dtype, args.batch_size, args.skip_top, args.depth])
        work = output.with_name(f"{output.name}.work-{key}")
        print(f"{len(rows)} rows, {len(corpus)} further documents; "
              f"{'continuing in' if work.exists() else 'pieces go to'} {work}")
        work.mkdir(exist_ok=True)
        model = BiEncoder.from_pretrained(args.model, load_image=load_image, dtype=args.dtype)
        if model.pooling == "tokens":
            raise ValueError(f"{args.model} has a vector for each token: mine with another model")
        rescore = args.cross_encoder and cross_encoder(args.cross_encoder, args.batch_size, device)
        options = {name: getattr(args, name) for name in (
            "num_negatives", "skip_top", "depth", "margin", "relative_margin", "min_score",
            "max_score", "sampling", "seed", "batch_size")}
        mined, met, dropped = mine(rows, model.to(device), work, corpus=corpus, rescore=rescore,
                                   **options)
        write_rows(output, mined, args.allow_any_path)
    except (ValueError, OSError) as error:
        sys.exit(f"mine: {error}")
    if not args.keep_pieces:
        shutil.rmtree(work)
    print(report(mined, met, dropped, args.num_negatives), f"saved {output}", sep="\n")
    return mined


def report(mined, met, dropped, wanted):
    """What became of the rows, in rows; what became of the candidates, in candidates."""
    counts = [len(row["negatives"]) for row in mined]
    return (f"{len(mined)} rows, {sum(n == wanted for n in counts)} with {wanted} negatives, "
            f"{sum(n < wanted for n in counts)} with fewer, {counts.count(0)} of these with none; "
            f"{sum(counts)} negatives in all\n"
            f"{met} candidates, {dropped} of them too close to the positive or out of range")


if __name__ == "__main__":
    main()
