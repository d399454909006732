"""Rows to batches: ids, order, negatives, labels; resumable at any step.          Read 6 of 8.

A *row* is what data.py reads: {"query": sample, "positive": sample, "negatives": [samples]}, or
without a positive, and with whatever else a loss asks for ("score", "label", ...). A sample with a
prompt of its own, {"text": ..., "prompt": ...}, is handed on as it is.

1. `document_id` names a sample by its content, so a loss can tell that a document of the batch
   also answers another query: across processes, and with dropout on.
2. `Batches[step]` is a pure function of (rows, seed, step): resuming is starting at another
   number, and no process needs to hear from another which rows to take. All that is slow
   (decoding images, tokenizing) happens in there, in the workers of a DataLoader.
3. `retrieval_pool` turns held-out rows into one pool of documents, each once, for evaluation.
4. `VectorCache` keeps on disk what a frozen encoder gave for a document, for all later epochs and
   runs.

Letters: N local queries, W processes, G size of a teacher's vector, D embedding size, T tokens. A
global batch has N*W rows, each one query and its documents [positive, negative, ...]. Rank and W
are plain numbers here.
Costs: some microseconds of hashing per sample, once. Does not pad, stack, or mine negatives.
"""
import bisect
import contextlib
import hashlib
import random
import sqlite3
import zlib
from collections import defaultdict
from pathlib import Path

import torch
from PIL import Image

# What a row may bring beside its samples, and the type it has in a batch.
NUMBERS = {"score": torch.float32, "label": torch.int64, "teacher_scores": torch.float32,
           "teacher_vector": torch.float32}


class Batches(torch.utils.data.Dataset):
    """batches[step] -> this process's share of global batch number `step`, for step 0, 1, 2, ...

    Steps have no end: epoch follows epoch, each in its own order. So give the loader a range:
    DataLoader(batches, batch_size=None, sampler=range(start, stop), num_workers=...). A step here
    is a batch; of train.py's optimizer steps each takes --grad-accum-steps of them.

    preprocess          (sample, "query" or "document") -> features of this one sample; it runs in
                        loader workers, so it should be picklable, and opens images by load_image
    batch_size          N, rows per process; a global batch has N*W different rows
    num_hard_negatives  at most this many per row. A row with more gets a sample that depends on
                        (seed, epoch, row), a row with fewer gives all it has: nothing is padded
    no_duplicates       no text twice in a global batch (a row may still repeat its own query)
    drop_last           False keeps an epoch's short last batch (fewer negatives, uneven shares)
    numbers             fields in NUMBERS that every row has, handed on as tensors
    pair_labels         rows of one label stay together in twos, so that each has a positive in its
                        batch; rows left over come at the end of the epoch
    noise               share of words that a query loses, other ones in each epoch (TSDAE); the
                        features of the whole text are "originals"
    document_side       whose prompt the documents get; "query" where they are queries once more
    guide               preprocess of a second model, for "guide_queries" and "guide_documents"

    A batch is a dict: "queries" (N features), "documents" (flat list, per query [positive,
    negative, ...]; none if rows have no positive), "positives" (N,) their columns in it,
    "document_ids" (len(documents),), "answers" (per query the ids of all documents known to answer
    it), "rows" (N row numbers), and each of `numbers`: (N,), "teacher_vector" (N, G),
    "teacher_scores" (len(documents),).
    Raises ValueError for settings that cannot train and for a row that cannot be processed.
    """

    def __init__(self, rows, preprocess, batch_size, *, rank=0, world_size=1,
                 num_hard_negatives=0, seed=0, no_duplicates=False, drop_last=True, numbers=(),
                 pair_labels=False, noise=0.0, document_side="document", guide=None):
        if min(batch_size - 1, num_hard_negatives, rank, world_size - rank - 1) < 0:
            raise ValueError(f"invalid {batch_size=} {num_hard_negatives=} {rank=} {world_size=}")
        self.queries, self.documents, self.answers = index_rows(rows)       # hashed once, here
        self.rows, self.preprocess, self.num_hard_negatives = rows, preprocess, num_hard_negatives
        self.rank, self.world_size, self.size = rank, world_size, batch_size * world_size
        self.no_duplicates, self.drop_last, self.seed = no_duplicates, drop_last, seed
        self.numbers, self.pair_labels, self.noise = numbers, pair_labels, noise
        self.document_side, self.guide, self.teacher = document_side, guide, None
        if "teacher_scores" in numbers:
            self.teacher = [scores_by_id(row) for row in rows]
        # A softmax over one candidate is 1 whatever the model does: loss and gradient are zero.
        pools = [set([*own][:1 + num_hard_negatives]) for own in self.documents]
        if any(len(pool) == 1 for pool in (pools if self.size == 1 else [set().union(*pools)])):
            raise ValueError(f"a candidate pool of one, loss 0 for ever: {len(rows)} row(s), "
                             f"global batch {self.size}, {num_hard_negatives=}; raise "
                             "--batch-size, add other rows, or negatives to these")
        if pair_labels:
            check_labels([row["label"] for row in rows], self.size, no_duplicates)
        self._starts, self._planned = [0], (None, None)      # _starts[e]: first step of epoch e
        self.epoch_of(0)                                     # raises if there is no batch

    def __len__(self):
        """Steps of the first epoch. With no_duplicates another may have one more or less."""
        return self._starts[1]

    def steps_in(self, epoch):
        """Exactly as many steps as the epoch has batches to give."""
        return len(self._plan(epoch))

    def epoch_of(self, step):
        """Which epoch a step belongs to."""
        while step >= self._starts[-1]:
            self._starts.append(self._starts[-1] + self.steps_in(len(self._starts) - 1))
        return bisect.bisect(self._starts, step) - 1

    def __getitem__(self, step):
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        epoch = self.epoch_of(step)
        group = self._plan(epoch)[step - self._starts[epoch]]     # the same on every process
        begin, end = (len(group) * r // self.world_size for r in (self.rank, self.rank + 1))
        batch = {"queries": [], "documents": [], "answers": [], "rows": group[begin:end]}
        ids, positives, teacher = [], [], []
        for index in batch["rows"]:
            row, documents = self.rows[index], self._documents(epoch, index)
            try:
                self._add_features(batch, epoch, index, row["query"], documents)
            except Exception as error:                       # whatever it is: say which row
                raise ValueError(f"row {index} (line {row.get('line', '?')}): {error}") from error
            positives.append(len(ids))
            ids += documents
            teacher += [self.teacher[index][name] for name in documents] if self.teacher else []
            batch["answers"].append(self.answers[self.queries[index]])
        for field in self.numbers:
            values = [self.rows[index][field] for index in batch["rows"]]
            batch[field] = torch.tensor(teacher if field == "teacher_scores" else values,
                                        dtype=NUMBERS[field])
        return batch | {"positives": torch.tensor(positives, dtype=torch.long),       # (N,)
                        "document_ids": torch.tensor(ids, dtype=torch.long)}

    def _add_features(self, batch, epoch, index, query, documents):
        """Preprocess a row's samples, for each model that will see them."""
        for name, preprocess in (("", self.preprocess), ("guide_", self.guide)):
            if preprocess:
                text = query if name else self._noised(epoch, index, query)
                batch.setdefault(f"{name}queries", []).append(preprocess(text, "query"))
                batch.setdefault(f"{name}documents", []).extend(
                    preprocess(sample, self.document_side) for sample in documents.values())
        if self.noise:
            batch.setdefault("originals", []).append(self.preprocess(query, "query"))

    def _noised(self, epoch, index, query):
        """A text without some of its words, at least one of them left; an image stays as it is."""
        parts = {"text": query} if isinstance(query, str) else query
        words = (parts.get("text") or "").split() if self.noise and not parts.get("image") else []
        if not words:
            return query
        rng = random.Random(f"noise {self.seed} {epoch} {index}")
        kept = " ".join([word for word in words if rng.random() >= self.noise]
                        or [rng.choice(words)])
        return kept if isinstance(query, str) else {**query, "text": kept}

    def _documents(self, epoch, index):
        """{id: sample} of a row in this epoch: its positive, then its negatives."""
        documents = [*self.documents[index].items()]
        positive, negatives = documents[:1], documents[1:]
        if len(negatives) > self.num_hard_negatives:
            rng = random.Random(f"{self.seed} {epoch} {index}")   # never the global generator
            negatives = rng.sample(negatives, self.num_hard_negatives)
        return dict([*positive, *negatives])

    def _order(self, epoch):
        """All row numbers in the order of this epoch."""
        rng, order = random.Random(f"{self.seed} {epoch}"), list(range(len(self.rows)))
        rng.shuffle(order)
        if not self.pair_labels:
            return order
        classes = defaultdict(list)
        for index in order:
            classes[self.rows[index]["label"]].append(index)
        # Spread evenly over the epoch, or with few classes a batch might hold only one. A global
        # batch is even, so no two are cut apart.
        twos = {}
        for own in classes.values():
            for i in range(0, len(own) - 1, 2):
                twos[(i + 2 * rng.random()) / len(own), own[i]] = own[i:i + 2]
        single = [own[-1:] for own in classes.values() if len(own) % 2]
        return [index for rows in [*(twos[at] for at in sorted(twos)), *single] for index in rows]

    def _plan(self, epoch):
        """Global batches of an epoch as lists of row numbers. The newest plan is remembered.

        A row goes to the first batch with room after the last one that holds a text of it. That is
        one pass, so it ends even if all rows are alike (a batch for each row, and none is full).
        """
        if self._planned[0] != epoch:
            groups, newest, first_open = [], {}, 0
            for index in self._order(epoch):
                texts = ()                                   # without the option every row fits
                if self.no_duplicates:
                    texts = self.queries[index], *self._documents(epoch, index)
                at = max([first_open, *(newest.get(text, -1) + 1 for text in texts)])
                while at < len(groups) and len(groups[at]) == self.size:
                    at += 1
                groups += [[]] * (at == len(groups))
                groups[at].append(index)
                newest.update(dict.fromkeys(texts, at))      # the last batch that holds this text
                first_open += len(groups[first_open]) == self.size
            if self.drop_last:
                groups = [group for group in groups if len(group) == self.size]
            if not groups:
                raise ValueError(f"no full batch of {self.size} in epoch {epoch}: {len(self.rows)} "
                                 f"rows, no_duplicates={self.no_duplicates}; lower --batch-size")
            self._planned = epoch, groups
        return self._planned[1]

    def summary(self):
        """The arithmetic of an epoch, to be printed once at the start."""
        limit, counts = self.num_hard_negatives, [max(0, len(own) - 1) for own in self.documents]
        return (f"epoch          {len(self)} batches of {self.size} of {len(self.rows)} rows\n"
                f"negatives      up to {limit} per row; {sum(n < limit for n in counts)} rows have "
                f"fewer, {sum(max(0, n - limit) for n in counts)} of {sum(counts)} stay unused")


def document_id(sample):
    """Sample -> 63-bit number from its content, the same in every process and every run.

    Text counts exactly, but for white space around it. An image counts by its path (two copies of
    a file are two documents), one in memory by its pixels or bytes. A prompt does not count: under
    another one a text is still the same document, and no negative of a query that it answers. Among
    a million documents, the chance that any two different ones share an id is about 5e-8.
    """
    parts = {"text": sample} if isinstance(sample, str) else sample
    text, image = (parts.get("text") or "").strip(), parts.get("image") or ""
    if isinstance(image, Image.Image):
        image = f"{image.mode} {image.size} {hashlib.blake2b(image.tobytes()).hexdigest()}"
    if isinstance(image, bytes):
        image = hashlib.blake2b(image).hexdigest()
    key = f"{len(text)} {text}{image}".encode(errors="surrogatepass")    # where the text ends
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def query_id(sample):
    """The same, but the prompt counts: under another instruction, the same words ask for something
    else. Also the id of what a model makes of a sample."""
    prompt = "" if isinstance(sample, str) else sample.get("prompt") or ""
    return document_id(f"{prompt} {document_id(sample)}") if prompt else document_id(sample)


def index_rows(rows):
    """rows -> (queries, documents, answers): who answers what.

    queries[i]: id of row i's query. documents[i]: {id: sample} of its positive, then its negatives.
    answers: {query id: ids of all documents known to answer it, in whatever row, sorted}. Such an
    answer among the negatives of a row is left out there, and a repeated negative counts once. A
    row without a positive has no documents, and its query no answers.
    """
    queries, documents, answers = [query_id(row["query"]) for row in rows], [], {}
    for query, row in zip(queries, rows):
        documents.append({})
        for sample in samples_of(row):                    # of two that differ in prompts, the first
            documents[-1].setdefault(document_id(sample), sample)
        answers.setdefault(query, set()).update([*documents[-1]][:1])
    for i, (query, own) in enumerate(zip(queries, documents)):
        wrong = answers[query] & set([*own][1:])
        documents[i] = {name: own[name] for name in own if name not in wrong}
    return queries, documents, {query: sorted(names) for query, names in answers.items()}


def samples_of(row):
    """A row's documents: [positive, *negatives], or none if it has no positive."""
    return [row["positive"], *(row.get("negatives") or ())] if "positive" in row else []


def scores_by_id(row):
    """{document id: the teacher's score} of a row. Of a document listed twice the first counts."""
    ids = [document_id(sample) for sample in samples_of(row)]
    return dict(zip(reversed(ids), reversed(row["teacher_scores"])))


def check_labels(labels, size, no_duplicates):
    """ValueError unless batches of `size` rows, kept together in twos, can hold what triplets need.
    """
    if size % 2 or no_duplicates:
        raise ValueError(f"rows of one label come in twos: the global batch must be even, got "
                         f"{size}, and --no-duplicates would part them")
    if len(set(labels)) < 2 or len(set(labels)) == len(labels):
        raise ValueError(f"{len(labels)} rows with {len(set(labels))} different labels: at least "
                         f"two classes, and two rows in one of them, or there is no triplet")


def retrieval_pool(rows):
    """For evaluation: (queries, documents, relevant).

    Every row counts once as a query. documents: all positives and negatives, each once.
    relevant[i]: indices in `documents` of all known answers to queries[i], row i's own first.
    """
    queries, documents, answers = index_rows(rows)
    pool = {}
    for own in documents:
        for name, sample in own.items():
            pool.setdefault(name, sample)
    column = {name: i for i, name in enumerate(pool)}
    relevant = [[column[name] for name in dict.fromkeys([next(iter(own)), *answers[query]])]
                for query, own in zip(queries, documents)]
    return [row["query"] for row in rows], [*pool.values()], relevant


def fingerprint(rows):
    """Hash of content and order (image files by path): a resumed run notices other data."""
    queries, documents, _ = index_rows(rows)
    documents = [[*map(query_id, own.values())] for own in documents]       # with their prompts
    numbers = [[row[field] for field in NUMBERS if field in row] for row in rows]
    content = str([queries, *documents, *filter(None, numbers)])
    return hashlib.blake2b(content.encode()).hexdigest()[:32]


def describe(rows):
    """What was read, in one line."""
    _, documents, answers = index_rows(rows)
    counts = [max(0, len(own) - 1) for own in documents]
    dropped = sum(len(samples_of(row)) - len(own) for row, own in zip(rows, documents))
    images = {name: isinstance(sample, dict) and "image" in sample
              for own in documents for name, sample in own.items()}
    return (f"{len(rows)} rows, {len(answers)} unique queries, {len(images)} unique documents, "
            f"{sum(images.values())} with an image; negatives per row min {min(counts)}, "
            f"mean {sum(counts) / len(rows):.1f}, max {max(counts)}"
            + f"; {dropped} negatives are known answers or repeats, left out" * (dropped > 0))


class VectorCache:
    """Vectors of frozen encoders on disk, each computed once: by whatever process, in whatever run.

    A SQLite file with a row per (encoder, sample), both named by a hash of their content: other
    weights or other pixels are another row, so nothing is ever out of date, and nothing is deleted
    either. 4 D bytes a vector, 4 T D with pooling "tokens". The hash reads what it names, about 1
    GB/s: a page image costs milliseconds, an encoder its size once per run.

    Any number of processes may share the file. Each look and each write is a connection of its own,
    so that nothing is open when a loader forks, and a transaction, so that kill -9 leaves it whole
    or undone. SQLite's rollback journal, not its write-ahead log: that one needs memory shared
    between the processes, which a network file system does not have, and writes are few here.

    What is found is bit for bit what was stored. It is not bit for bit what encoding it again would
    give, since the padding of another chunk changes the last bits: a run that finds vectors differs
    by rounding from the one that stored them. Raises ValueError for a damaged file, OSError for one
    that cannot be opened or written.
    """

    def __init__(self, path):
        self.path, self.found, self.computed = Path(path), 0, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as file:
            file.execute("CREATE TABLE IF NOT EXISTS vectors (encoder TEXT, sample TEXT, shape "
                         "TEXT, crc INTEGER, vector BLOB, PRIMARY KEY (encoder, sample))")

    def around(self, encode, model, *settings):
        """The same encoder, asked only for what is not here: encode(list of n samples) -> (n, D) or
        (n, T, D) unit vectors, with zeros after a sample's last token.

        model      the Hugging Face backbone: configuration and weights name the encoder, but for an
                   adapter's, which a frozen start has switched off
        settings   words for all else that makes a vector of a sample: pooling, precision
        """
        encoder = self.name(model.config.to_json_string(), *settings, *(
            weight for name, weight in model.state_dict().items() if ".lora_" not in name))

        def look_up(samples, truncate_dim=None):
            vectors = self.through(encode, encoder, samples).to(next(model.parameters()).device)
            cut = torch.nn.functional.normalize(vectors[..., :truncate_dim], dim=-1)
            return vectors if truncate_dim is None else cut         # bit for bit as it was stored
        return look_up

    def through(self, encode, encoder, samples):
        """The vectors of samples, on the CPU, of an encoder that has this name here."""
        names = [self.name(*(part for key in sorted(sample) for part in (key, sample[key])))
                 for sample in samples]
        vectors = self._read(encoder, names)
        missing = [i for i, vector in enumerate(vectors) if vector is None]
        if missing:
            new = encode([samples[i] for i in missing]).detach().cpu()
            for i, vector in zip(missing, new):          # of (T, D) the padding is not stored
                vectors[i] = vector[vector.any(dim=1)] if vector.dim() == 2 else vector
            self._write(encoder, {names[i]: vectors[i] for i in missing})
        self.found += len(samples) - len(missing)
        self.computed += len(missing)
        return torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True)

    @staticmethod
    def name(*parts):
        """Hash of texts and of tensors' shape, type and bytes, one at a time, wherever they are."""
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            if torch.is_tensor(part):
                digest.update(f"{tuple(part.shape)} {part.dtype} ".encode())
                digest.update(part.detach().cpu().flatten().view(torch.uint8).numpy())
            else:
                digest.update(f"{len(part)} {part} ".encode())
        return digest.hexdigest()

    def _read(self, encoder, names):
        """The vector of each name, None for those that have none yet."""
        with self._open() as file:
            rows = [file.execute("SELECT shape, crc, vector FROM vectors WHERE encoder = ? AND "
                                 "sample = ?", (encoder, name)).fetchone() for name in names]
            if any(row and zlib.crc32(row[2]) != row[1] for row in rows):
                raise sqlite3.DatabaseError("a vector is not what was stored")
        return [row and torch.frombuffer(bytearray(row[2]), dtype=torch.float32).view(
            [int(size) for size in row[0].split()]) for row in rows]

    def _write(self, encoder, vectors):
        """Store {name: vector}; where another process was faster, its vector stays."""
        if wrong := {vector.dtype for vector in vectors.values()} - {torch.float32}:
            raise ValueError(f"a vector cache holds float32, not {wrong}: do without it")
        blobs = {name: vector.numpy().tobytes() for name, vector in vectors.items()}
        with self._open() as file:
            file.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?, ?, ?, ?)", [
                (encoder, name, " ".join(map(str, vectors[name].shape)), zlib.crc32(blob), blob)
                for name, blob in blobs.items()])

    @contextlib.contextmanager
    def _open(self):
        """A connection for one transaction; a minute of patience with others that hold the file."""
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as file, file:
                yield file
        except sqlite3.OperationalError as error:
            raise OSError(f"vector cache {self.path}: {error}; is the folder writable, the disk "
                          f"full, or another program at work on the file?") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"vector cache {self.path} is damaged ({error}): delete it, and it is "
                             f"filled anew") from error
