"""Rows to batches of samples: files, images, offline pairs, resumable order. Read 6 of 8.

A *sample* is a text (str), an image {"image": path or PIL image}, or {"text": ..., "image": ...}.
A *row* is {"query": sample, "positive": sample, "negatives": [samples]}; other fields ride along.

1. `read_pairs` checks a whole JSONL file before training and returns its rows; `offline_pairs`
   makes rows without a download: the standard library's docstrings and sources, or drawings.
2. `document_id` names a sample by its content, so a loss can tell that a document of the batch
   also answers another query: across processes, and with dropout on.
3. `Batches[step]` is a pure function of (rows, seed, step): resuming is starting at another
   number, and no process needs to hear from another which rows to take. All that is slow
   (decoding images, tokenizing) happens in there, in the workers of a DataLoader.

Letters: N local queries, W processes. A global batch has N*W rows, each one query and its
documents [positive, negative, ...]. Rank and W are plain numbers here.
Costs: all rows in memory, some microseconds of hashing per sample, once. Does not stream, pad,
stack or fetch from a network. The check before training reads image headers, not pixels.
"""
import ast
import bisect
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import sys
import sysconfig
import textwrap
import unicodedata
from collections import Counter
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

MAX_PIXELS = 89_478_485     # a quarter of a gigabyte as RGB; Pillow, too, starts to warn here
# What may be decoded. Not EPS, for example, which Pillow hands to an external interpreter.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


class Batches(torch.utils.data.Dataset):
    """batches[step] -> this process's share of global batch number `step`, for step 0, 1, 2, ...

    Steps have no end: epoch follows epoch, each in its own order. So give the loader a range:
    DataLoader(batches, batch_size=None, sampler=range(start, stop), num_workers=...).

    preprocess          (sample, "query" or "document") -> features of this one sample; it runs in
                        loader workers, so it should be picklable, and opens images by load_image
    batch_size          N, rows per process; a global batch has N*W different rows
    num_hard_negatives  at most this many per row. A row with more gets a sample that depends on
                        (seed, epoch, row), a row with fewer gives all it has: nothing is padded
    no_duplicates       no text twice in a global batch (a row may still repeat its own query)
    drop_last           False keeps an epoch's short last batch (fewer negatives, uneven shares)

    A batch is a dict: "queries" (N features), "documents" (flat list, per query [positive,
    negative, ...]), "positives" (N,) their columns in it, "document_ids" (len(documents),),
    "answers" (per query the ids of all documents known to answer it), "rows" (N row numbers).
    Raises ValueError for settings that cannot train and for a row that cannot be processed.
    """

    def __init__(self, rows, preprocess, batch_size, *, rank=0, world_size=1,
                 num_hard_negatives=0, seed=0, no_duplicates=False, drop_last=True):
        if min(batch_size - 1, num_hard_negatives, rank, world_size - rank - 1) < 0:
            raise ValueError(f"invalid {batch_size=} {num_hard_negatives=} {rank=} {world_size=}")
        self.queries, self.documents, self.answers = index_rows(rows)       # hashed once, here
        self.rows, self.preprocess, self.num_hard_negatives = rows, preprocess, num_hard_negatives
        self.rank, self.world_size, self.size = rank, world_size, batch_size * world_size
        self.no_duplicates, self.drop_last, self.seed = no_duplicates, drop_last, seed
        # A softmax over one candidate is 1 whatever the model does: loss and gradient are zero.
        pools = [set([*own][:1 + num_hard_negatives]) for own in self.documents]
        if any(len(pool) == 1 for pool in (pools if self.size == 1 else [set().union(*pools)])):
            raise ValueError(f"a candidate pool of one, loss 0 for ever: global batch {self.size}, "
                             f"{num_hard_negatives=}; raise --batch-size or add negatives to rows")
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
        positives, document_ids = [], []
        for index in batch["rows"]:
            row, documents = self.rows[index], self._documents(epoch, index)
            try:
                batch["queries"].append(self.preprocess(row["query"], "query"))
                batch["documents"] += [self.preprocess(d, "document") for d in documents.values()]
            except Exception as error:                       # whatever it is: say which row
                raise ValueError(f"row {index} (line {row.get('line', '?')}): {error}") from error
            positives.append(len(document_ids))
            document_ids += documents
            batch["answers"].append(self.answers[self.queries[index]])
        return batch | {"positives": torch.tensor(positives, dtype=torch.long),       # (N,)
                        "document_ids": torch.tensor(document_ids, dtype=torch.long)}

    def _documents(self, epoch, index):
        """{id: sample} of a row in this epoch: its positive, then its negatives."""
        positive, *negatives = self.documents[index].items()
        if len(negatives) > self.num_hard_negatives:
            rng = random.Random(f"{self.seed} {epoch} {index}")   # never the global generator
            negatives = rng.sample(negatives, self.num_hard_negatives)
        return dict([positive, *negatives])

    def _plan(self, epoch):
        """Global batches of an epoch as lists of row numbers. The newest plan is remembered.

        A row goes to the first batch with room after the last one that holds a text of it. That is
        one pass, so it ends even if all rows are alike (a batch for each row, and none is full).
        """
        if self._planned[0] != epoch:
            order, groups, newest, first_open = list(range(len(self.rows))), [], {}, 0
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            for index in order:
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
        limit, counts = self.num_hard_negatives, [len(own) - 1 for own in self.documents]
        return (f"epoch          {len(self)} steps of {self.size} of {len(self.rows)} rows\n"
                f"negatives      up to {limit} per row; {sum(n < limit for n in counts)} rows have "
                f"fewer, {sum(max(0, n - limit) for n in counts)} of {sum(counts)} stay unused")


def document_id(sample):
    """Sample -> 63-bit number from its content, the same in every process and every run.

    Text counts exactly, but for white space around it. An image counts by its path (two copies of
    a file are two documents), a PIL image by its pixels. Among a million documents, the chance
    that any two different ones share an id is about 5e-8.
    """
    parts = {"text": sample} if isinstance(sample, str) else sample
    text, image = (parts.get("text") or "").strip(), parts.get("image") or ""
    if isinstance(image, Image.Image):
        image = f"{image.mode} {image.size} {hashlib.blake2b(image.tobytes()).hexdigest()}"
    key = f"{len(text)} {text}{image}".encode(errors="surrogatepass")    # where the text ends
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def index_rows(rows):
    """rows -> (queries, documents, answers): who answers what.

    queries[i]: id of row i's query. documents[i]: {id: sample} of its positive, then its negatives.
    answers: {query id: ids of all documents known to answer it, in whatever row, sorted}. Such an
    answer among the negatives of a row is left out there, and a repeated negative counts once.
    """
    queries, documents, answers = [document_id(row["query"]) for row in rows], [], {}
    for query, row in zip(queries, rows):
        samples = row["positive"], *(row.get("negatives") or ())
        documents.append({document_id(sample): sample for sample in samples})
        answers.setdefault(query, set()).add(next(iter(documents[-1])))
    for i, (query, own) in enumerate(zip(queries, documents)):
        wrong = answers[query] & set([*own][1:])
        documents[i] = {name: own[name] for name in own if name not in wrong}
    return queries, documents, {query: sorted(names) for query, names in answers.items()}


def retrieval_pool(rows):
    """For evaluation: (queries, documents, relevant).

    Every row counts once as a query. documents: all positives and negatives, each once.
    relevant[i]: indices in `documents` of all known answers to queries[i], row i's own first.
    """
    queries, documents, answers = index_rows(rows)
    pool = {name: sample for own in documents for name, sample in own.items()}
    column = {name: i for i, name in enumerate(pool)}
    relevant = [[column[name] for name in dict.fromkeys([next(iter(own)), *answers[query]])]
                for query, own in zip(queries, documents)]
    return [row["query"] for row in rows], [*pool.values()], relevant


def fingerprint(rows):
    """Hash of content and order (image files by path): a resumed run notices other data."""
    queries, documents, _ = index_rows(rows)
    return hashlib.blake2b(str([queries, *map(list, documents)]).encode()).hexdigest()[:32]


def describe(rows):
    """What was read, in one line."""
    _, documents, answers = index_rows(rows)
    counts = [len(own) - 1 for own in documents]
    images = {name: isinstance(sample, dict) for own in documents for name, sample in own.items()}
    return (f"{len(rows)} rows, {len(answers)} unique queries, {len(images)} unique documents, "
            f"{sum(images.values())} with an image; negatives per row min {min(counts)}, "
            f"mean {sum(counts) / len(rows):.1f}, max {max(counts)}")


def read_pairs(path, *, allow_any_path=False, skip_bad_rows=False, progress=True):
    """JSONL file -> rows, after one pass that checks all of it.

    One object per line, UTF-8: "query", "positive" and optional "negatives" (a list). Other fields
    are kept and "line" is added. An image may be absent, null or [] where there is a text. Its path
    is relative to the file's folder and must not leave it, not even through a link, unless
    allow_any_path. Negatives known to answer the same query are dropped.

    Raises ValueError with file, line, field, value and remedy of the first bad rows and the number
    of all. skip_bad_rows leaves them out and says so. progress=False prints nothing.
    """
    rows, bad, folder = [], [], os.path.realpath(os.path.dirname(path))
    image_file = functools.cache(functools.partial(_image_file, folder, allow_any_path))
    try:
        # Bytes, because splitlines() and text mode would also break a line at a lone \r, U+2028
        # or U+0085, which are legal inside a JSON string.
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the path") from error
    for number, line in enumerate(tqdm(lines, f"checking {path}", disable=not progress), 1):
        try:
            if line.strip():
                rows.append({**_parse_row(line, image_file), "line": number})
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    report = "\n  ".join([f"{path}: {len(bad)} bad rows, {len(rows)} good ones", *bad[:5]])
    if not rows or (bad and not skip_bad_rows):
        raise ValueError(f"{report}\nCorrect the file, or leave bad rows out: --skip-bad-rows")
    new = [{**row, "negatives": [*own.values()][1:]} for row, own in zip(rows, index_rows(rows)[1])]
    removed = sum(len(a["negatives"]) - len(b["negatives"]) for a, b in zip(rows, new))
    if progress and (bad or removed):
        print(f"left out of {report}\n{removed} negatives that are known answers or repeats")
    return new


def _parse_row(line, image_file):
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8: {str(error).replace('line 1 ', '')}") from error
    negatives = (record.get("negatives") or []) if isinstance(record, dict) else None
    if type(negatives) is not list:
        raise ValueError(f"{record!r:.60} is not an object, or its 'negatives' are not a list")
    fields = {"query": record.get("query"), "positive": record.get("positive"),
              **{f"negatives[{i}]": negative for i, negative in enumerate(negatives)}}
    for field, value in fields.items():
        try:
            fields[field] = _parse_sample(value, image_file)
        except ValueError as error:
            raise ValueError(f"field '{field}' is {value!r:.60}: {error}") from error
    query, positive, *negatives = fields.values()
    return {**record, "query": query, "positive": positive, "negatives": negatives}


def _parse_sample(value, image_file):
    sample = value if isinstance(value, dict) else {"text": value}
    text, image = sample.get("text") or "", sample.get("image") or ""
    # JSON lets half a surrogate pair through, on which a tokenizer would fail later.
    if ({type(text), type(image)} != {str} or sample.keys() - {"text", "image"}
            or re.search("[\ud800-\udfff]", text + image)):
        raise ValueError('give {"text": VALID UNICODE} or just the text, {"image": PATH}, or both')
    if not (text.strip() or image):
        raise ValueError("missing, null or blank; give a text or an image")
    parts = {"text": text} if text.strip() else {}
    return {**parts, "image": image_file(image)} if image else text


def _image_file(folder, allow_any_path, image):
    """Image path as written in a file that is not trusted -> absolute path of a readable image."""
    path = os.path.realpath(os.path.join(folder, image))          # follows links
    inside = Path(path).is_relative_to(folder) and not os.path.isabs(image)
    problem = ("is a URL, and nothing is fetched; save it as a file" if "://" in image else
               f"is outside {folder}; move it or pass --allow-any-path"
               if not allow_any_path and (not inside or ".." in Path(image).parts) else
               f"is no file; paths are relative to {folder}" if not os.path.isfile(path) else "")
    if problem:
        raise ValueError(f"{image[:200]!r} {problem}")
    load_image(path, decode=False)
    return path


def load_image(image, *, decode=True):
    """Path, PIL image, "shapes:CAPTION", "page:TEXT" -> upright RGB PIL image. The only loader, so
    training, mining and evaluation see the same pixels. decode=False only checks the header.

    Applies the orientation tag, puts transparency on white, scales 16-bit grey to 8 bits; takes an
    animation's first frame. Raises ValueError naming a file that is damaged, cut or too large.
    """
    try:
        kind, _, content = str(image).partition(":")              # nothing on disk is named so
        if draw := {"shapes": draw_shapes, "page": render_page}.get(kind):
            return draw(content)
        opened = isinstance(image, Image.Image)
        with image if opened else Image.open(image, formats=FORMATS) as picture:
            # Only the header is read so far; a decompression bomb goes no further.
            if not 0 < picture.width * picture.height <= MAX_PIXELS:
                raise ValueError(f"{picture.size} pixels are none, or more than {MAX_PIXELS}")
            if not decode:
                return
            picture = ImageOps.exif_transpose(picture)
            if picture.mode == "F":
                raise ValueError("floating-point pixels have no agreed white; save as 16 bit")
            if picture.mode.startswith("I"):          # 65535 -> 255; convert("L") alone would clip
                picture = picture.convert("I").point(lambda value: value / 257 + 0.5).convert("L")
            elif picture.has_transparency_data:       # convert("RGB") alone shows hidden colours
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return picture.convert("RGB")
    except Exception as error:                        # decoders raise a dozen types on broken files
        raise ValueError(f"cannot read image {image}: {error}; replace or remove it") from error


def render_page(text, *, size=(384, 512), font_size=14, margin=12):
    """Text -> RGB page image of `size` (width, height) pixels, for --documents image.

    Lines wrap, at a space where possible; what does not fit on the page is cut, as a long text is.
    Pillow's built-in font knows little more than ASCII, so accents are dropped (é becomes e) and
    other characters become "?": not for scripts that need another font.
    """
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    lines = text.encode("ascii", "replace").decode().expandtabs(4).splitlines()[::-1]
    font, page = ImageFont.load_default(font_size), Image.new("RGB", size, "white")
    width, spacing = size[0] - 2 * margin, font_size * 4 // 3
    for y in range(margin, size[1] - margin - spacing, spacing):
        line = lines.pop() if lines else ""
        prefixes = range(1, min(len(line), width) + 1)            # at least a pixel per character
        fits = bisect.bisect_right(prefixes, width, key=lambda n: font.getlength(line[:n])) or 1
        if fits < len(line):                                      # no space: break in mid-word
            fits = line.rfind(" ", 0, fits + 1) if line[:fits + 1].split(" ", 1)[1:] else fits
            lines.append(line[fits:].lstrip())
        ImageDraw.Draw(page).text((margin, y), line[:fits], fill="black", font=font)
    return page


def offline_pairs(name="stdlib", *, mask_names=False, cache_dir=None, progress=True):
    """(training rows, held-out rows) that every machine can make for itself.

    "stdlib": each documented function or class of the standard library: first paragraph of its
              docstring -> its source without docstrings. About 6,300 pairs in Python 3.11 (other
              versions differ); whole modules with about 500 are held out, since a random split
              puts siblings on both sides. mask_names hides each function's name in its source.
    "shapes": a caption -> a drawing of two objects; 4,000 and 500 different ones.

    The library is parsed once (some seconds) and kept in cache_dir, by default
    $XDG_CACHE_HOME/gradcache or ~/.cache/gradcache. Several processes may do so at once.
    """
    if name == "shapes":
        return _shapes_pairs(4_000, 500)
    if name != "stdlib":
        raise ValueError(f"offline data {name!r} is unknown; choose 'stdlib' or 'shapes'")
    library = sysconfig.get_paths()["stdlib"]
    cache_dir = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gradcache")
    key = document_id(f"1 {sys.version} {library} {mask_names}")
    path = Path(cache_dir, f"stdlib-{key}.json").expanduser()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):    # absent or damaged
        *split, check = json.loads(path.read_text("utf-8"))
        if check == [fingerprint(rows) for rows in split]:
            return tuple(split)
    split = _stdlib_pairs(Path(library), mask_names, progress)
    with contextlib.suppress(OSError):                # cannot be written: parsed again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps([*split, [fingerprint(rows) for rows in split]]), "utf-8")
        draft.replace(path)                           # atomic: a reader sees all of it or nothing
    return split


def _stdlib_pairs(library, mask_names, progress):
    rows, seen, skip = [], set(), {"test", "tests", "idlelib", "lib2to3", "turtledemo"}
    for file in tqdm(sorted(library.rglob("*.py")), "reading the library", disable=not progress):
        module = file.relative_to(library).with_suffix("").parts
        if module[0] not in sys.stdlib_module_names or skip.intersection(module):
            continue                                  # site-packages is no part of it
        lines = file.read_text("utf-8").split("\n")
        nodes = [n for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(
            n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(n)]
        # A class loses its methods' docstrings too: it would quote their queries word for word.
        for node in nodes:
            for number in range(node.body[0].lineno, node.body[0].end_lineno + 1):
                lines[number - 1] = ""
        for node in nodes:
            query = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
            source = textwrap.dedent("\n".join(
                line for line in lines[node.lineno - 1:node.end_lineno] if line.strip()))
            # Twins that differ in their name are one document, so that masked or not, the pairs
            # are the same. One statement is the docstring alone: no source to find.
            masked = re.sub(rf"\b{node.name}\b", "MASKED", source)
            if query and source and len(node.body) > 1 and not seen & {query, masked}:
                seen |= {query, masked}
                rows.append({"query": query, "positive": masked if mask_names else source,
                             "negatives": [], "name": ".".join([*module, node.name])})
    if not rows:
        raise ValueError(f"no Python sources under {library}; train on a file: --train-jsonl")
    # Hold out whole top-level modules, in the order of their hashes, until a 13th of the rows is.
    # A module with more than a fifth of that always trains, or it would be most of the test.
    sizes, heldout = Counter(row["name"].split(".")[0] for row in rows), Counter()
    for module in sorted(sizes, key=document_id):
        if sizes[module] <= len(rows) / 65 and heldout.total() < len(rows) / 13:
            heldout[module] = sizes[module]
    return ([row for row in rows if row["name"].split(".")[0] not in heldout],
            [row for row in rows if row["name"].split(".")[0] in heldout])


COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "pink")
SHAPES = {"circle": (60, 0), "square": (4, 0), "diamond": (4, 45), "arrow": (3, 0), "flag": (3, 90)}
PLACES = [f"{y}-{x}" for y in ("top", "middle", "bottom") for x in ("left", "center", "right")]


def _shapes_pairs(train, heldout):
    """An image travels as "shapes:CAPTION" and is drawn when load_image meets it: no files and no
    memory. All captions differ, hence all images do."""
    rng, rows = random.Random(0), {}                  # by caption, so each is there once
    while len(rows) < train + heldout:
        text = " and ".join(
            f"a {rng.choice(['large', 'small'])} {rng.choice(COLOURS)} {rng.choice([*SHAPES])} "
            f"at the {PLACES[place]}" for place in sorted(rng.sample(range(9), 2)))
        rows[text] = {"query": text, "positive": {"image": f"shapes:{text}"}, "negatives": []}
    return [*rows.values()][:train], [*rows.values()][train:]


def draw_shapes(caption):
    """Caption -> 96 x 96 image of its objects, polygons each in its own cell of a 3 x 3 grid."""
    picture = Image.new("RGB", (96, 96), "white")
    for part in caption.split(" and "):
        _, size, colour, shape, _, _, place = part.split()
        row, column = divmod(PLACES.index(place), 3)
        circle = 32 * column + 16, 32 * row + 16, 15 if size == "large" else 8      # around it
        ImageDraw.Draw(picture).regular_polygon(circle, *SHAPES[shape], fill=colour)
    return picture
