"""Rows: files, images, and the pairs that every machine already has.               Read 6 of 8.

A *sample* is a text (str), an image {"image": path, PIL image or a file's bytes}, or {"text": ...,
"image": ...}. A "prompt" in it is its own instruction, in place of the model's for its side.
A *row* is {"query": sample, "positive": sample, "negatives": [samples]}; other fields ride along.
What a loss needs beside or instead of a positive has one name each:

    "score": 0.8               how alike query and positive are
    "label": 1                 their class (0 or 1 for different or same); without a positive, the
                               query's class
    "teacher_scores": [...]    a teacher's scores of [positive, *negatives], in this order
    "teacher_vector": [...]    a teacher's vector of the query
    nothing but "query"        for the losses that learn from texts alone

1. `read_pairs` checks a whole file before training and returns its rows. First the file becomes
   records (JSONL, CSV, TSV, Parquet, a folder of `datasets`), whatever their fields are called;
   then these get the names above (FORMATS: FlagEmbedding, tevatron, ...).
2. `offline_pairs` makes rows without a download: Python's own docstrings and sources, or drawings.
3. `load_image` is the one way from a path to pixels; `render_page` draws a text as a page.

Costs: all rows in memory; images inside a file, too, compressed as they are there. No streaming, no
network. The check reads image headers, not pixels. Who answers what, and the order, is batches.py.
"""
import ast
import bisect
import contextlib
import csv
import functools
import hashlib
import io
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

from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

# Our fields, and their names in a file: of several, the first that is there.
FIELDS = {name: name for name in (
    "query", "positive", "negatives", "negative", "score", "label", "teacher_vector",
    "query_prompt", "document_prompt")} | {"teacher_scores": "teacher_scores scores"}
FORMATS = {         # who calls them otherwise; the first of whom a file has query and positive
    # Negatives are a list, or have a column each: negative, or negative_1, negative_2, ...
    "our own": {},
    # Lists of texts; the prompt is the query's. pos_scores and neg_scores are a teacher's.
    "FlagEmbedding": {"positive": "pos", "negatives": "neg", "query_prompt": "prompt"},
    # Lists of {"docid", "title", "text"}.
    "tevatron": {"positive": "positive_passages", "negatives": "negative_passages"},
    # A column for each sample. There, their order counts and not their names; these are common.
    "sentence-transformers": {"query": "anchor question sentence1 premise query sentence text",
                              "positive": "positive answer sentence2 hypothesis"}}

MAX_PIXELS = 89_478_485     # a quarter of a gigabyte as RGB; Pillow, too, starts to warn here
# What may be decoded. Not EPS, for example, which Pillow hands to an external interpreter.
IMAGES = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


def read_pairs(path, *, columns=None, needs=("positive",), why="", allow_any_path=False,
               skip_bad_rows=False, progress=True):
    """File or folder -> rows, after one pass that checks all of it.

    .csv, .tsv (the first line names the columns), .parquet, a folder that Dataset.save_to_disk
    wrote; all else is JSONL, an object per line. UTF-8. The first record with a query and a
    positive tells in which of FORMATS all are; columns={"query": "question"}, ours first, overrules
    it. Other fields are kept and "line" is added: where the row begins (in a Parquet file or folder
    its number, from 1). Several positives make several rows with the same negatives; none is a
    negative of another, since Batches knows all answers of a query. A negative's
    own column may be blank. query_prompt and document_prompt become the "prompt" of the samples.

    An image may be absent, null or [] where there is a text. Its path is relative to the file's
    folder and must not leave it, not even through a link, unless allow_any_path. `needs` names the
    fields that every row must have beside "query": "positive" or any in CHECKS; the others are not
    looked at, and a row without a positive has none. `why` says in an error who needs them.

    Raises ValueError with file, line, field, value and remedy of the first bad rows and the number
    of all. skip_bad_rows leaves them out and says so. progress=False prints nothing.
    """
    columns, rows, bad, known, seen = columns or {}, [], [], None, {}
    folder = os.path.realpath(path if os.path.isdir(path) else os.path.dirname(path))
    image_file = functools.cache(functools.partial(_image_file, folder, allow_any_path))
    unit, only_texts, records = _records(path)
    for number, record in tqdm(records, f"checking {path}", disable=None if progress else True):
        try:
            if isinstance(record, ValueError):
                raise record
            seen |= dict.fromkeys(record)                        # a set that keeps the order
            known = known or _format_of(record, columns, "positive" in needs)
            rows += [{**_parse_row(own, needs, why, image_file), "line": number}
                     for own in _own_records(record, known[1], only_texts)]
        except (ValueError, RecursionError) as error:
            bad.append(f"{unit} {number}: {error}")
    wrong = [f"--columns {our}={their} fits nothing" for our, their in columns.items()
             if our not in FIELDS or not seen.keys() & {their, f"{their}_1"}]
    if seen and (wrong or not known):
        raise ValueError(f"{path}: {[*wrong, 'no query and positive'][0]} in {[*seen]!r:.400}; "
                         f"say --columns OURS=THEIRS, ours of {', '.join(FIELDS)}")
    report = "\n  ".join([f"{path}: {len(bad)} bad rows, {len(rows)} good ones", *bad[:5]])
    if not rows or (bad and not skip_bad_rows):
        raise ValueError(f"{report}\nCorrect the file, or leave bad rows out: --skip-bad-rows")
    if progress:
        print(f"format         {known[0]} ({', '.join(n for n in seen if n in known[1].values())}) "
              f"from {path}\nsample         query {rows[0]['query']!r:.26}, positive "
              f"{rows[0].get('positive')!r:.26}, {len(rows[0]['negatives'])} negatives"
              + f"\nleft out of {report}" * bool(bad))
    return rows


def _records(path):
    """-> (what is counted, whether all fields are texts, iterator of (its number from 1, record)).
    A record is a dict, or a ValueError that says what is there instead."""
    kind = Path(path).suffix.lower()
    if kind == ".parquet" or os.path.isdir(path):
        return "row", False, enumerate(_table_rows(path), 1)
    try:
        content = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the path") from error
    if kind in (".csv", ".tsv"):
        return "line", True, _csv_rows(path, content, "," if kind == ".csv" else "\t")
    return "line", False, _json_lines(content)


def _json_lines(content):
    # Bytes, because splitlines() and text mode would also break a line at a lone \r, U+2028
    # or U+0085, which are legal inside a JSON string.
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if line.strip():
                yield number, {**json.loads(line.decode())}
        except (ValueError, TypeError, RecursionError) as error:
            problem = str(error).replace("line 1 ", "")            # of this line
            yield number, ValueError(f"not JSON in UTF-8, or not an object: {problem}")


def _csv_rows(path, content, delimiter):
    """Rows of a CSV file: (line where it begins, {column: text, or None if empty})."""
    csv.field_size_limit(2 ** 31 - 1)           # by default a text of more than 128 kB is an error
    # A byte that is not UTF-8 becomes half a surrogate pair, for which its own row is refused.
    text = io.StringIO(content.decode(errors="surrogateescape"), newline="")
    # strict, or an unclosed quote would swallow the rest of the file without a word.
    reader, names, begin = csv.reader(text, delimiter=delimiter, strict=True), None, 1
    try:
        for cells in reader:                                       # [] is an empty line
            if not names:
                names = [name.strip() for name in cells]
            elif len(cells) == len(names):
                yield begin, {name: cell or None for name, cell in zip(names, cells)}
            elif cells:
                yield begin, ValueError(f"{len(cells)} cells, but {len(names)} columns")
            begin = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: the row from line {begin} on is not CSV: {error}") from error


def _table_rows(path):
    """Rows of a Parquet file or a saved dataset, as dicts; an image in them is a file's bytes."""
    try:
        import datasets
        import pyarrow.parquet
        tables = (datasets.load_from_disk(path).with_format("arrow").iter(1000)
                  if os.path.isdir(path) else pyarrow.parquet.ParquetFile(path).iter_batches(1000))
        for table in tables:
            yield from table.to_pylist()
    except Exception as error:                       # Arrow raises a dozen types on broken files
        raise ValueError(f"cannot read {path}: {error}; give a Parquet file, or a directory as "
                         "Dataset.save_to_disk writes one split (pip install datasets)") from error


def _format_of(record, columns, positive_needed):
    """-> (format, {our field: its name in the file}); ValueError if there is none."""
    named = [(style, {our: next(filter(record.__contains__, known.split()), known.split()[0])
                      for our, known in (FIELDS | theirs).items()} | columns)
             for style, theirs in FORMATS.items()]
    for with_positive in (True, positive_needed):
        fitting = [one for one in named if one[1]["query"] in record
                   and (one[1]["positive"] in record or not with_positive)]
        if fitting:         # the first; with --columns, which make several fit, who knows most
            return max(fitting, key=lambda n: bool(columns) * len(record.keys() & n[1].values()))
    raise ValueError("no query and positive")


def _own_records(record, names, only_texts):
    """A record with its file's names -> records with ours, one for each positive."""
    single = [name for name in record if name.startswith(names["negative"]) and re.fullmatch(
        r"(_\d+)?", name.removeprefix(names["negative"])) and name != names["negatives"]]
    own = {our: record[name] for our, name in names.items() if name in record and our != "negative"}
    rest = {n: value for n, value in record.items() if n not in names.values() and n not in single}
    for our in own.keys() & CHECKS.keys() if only_texts else ():     # a number, or a list as JSON
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            own[our] = json.loads(own[our])
    negatives, positives = own.get("negatives") or [], own.get("positive")
    if type(negatives) is not list:
        raise ValueError(f"field 'negatives' is {negatives!r:.60}: not a list; is it 'negative'?")
    negatives = negatives + [record[name] for name in single if str(record[name] or "").strip()]
    several = type(positives) is list and names["positive"] != "positive"     # ours is one sample
    scores = [rest.pop(name, None) for name in ("pos_scores", "neg_scores")]
    for i, positive in enumerate(positives or [None] if several else [positives]):
        if [*map(type, scores)] == [list, list]:
            own["teacher_scores"] = [*scores[0][i:i + 1], *scores[1]]
        yield {**rest, **own, "positive": positive, "negatives": negatives}


def _are_numbers(values):                            # neither NaN nor infinite
    return type(values) is list and values != [] and all(
        type(value) in (int, float) and -1e30 < value < 1e30 for value in values)


# Field: what it has to be, in words and as a function of (its value, number of negatives).
CHECKS = {
    "negatives": ("a list with at least one sample", lambda value, n: n > 0),
    "score": ("a finite number", lambda value, n: _are_numbers([value])),
    "label": ("a whole number from 0", lambda value, n: type(value) is int and 0 <= value < 2**31),
    "teacher_scores": ("a list of finite numbers, one for each of [positive, *negatives]",
                       lambda value, n: _are_numbers(value) and len(value) == 1 + n),
    "teacher_vector": ("a list of finite numbers", lambda value, n: _are_numbers(value))}


def _parse_row(record, needs, why, image_file):
    """A record with our names -> row; ValueError for the first field that is wrong."""
    prompts = [record.pop(f"{side}_prompt", None) or "" for side in ("query", "document")]
    samples = {name: record.pop(name, None) for name in ("query", "positive")}
    fields = {n: v for n, v in samples.items() if n in ("query", *needs) or v is not None}
    fields |= {f"negatives[{i}]": value for i, value in enumerate(record["negatives"])}
    for field, value in fields.items():
        try:
            fields[field] = _parse_sample(value, prompts[field != "query"], image_file)
        except ValueError as error:
            raise ValueError(f"field '{field}' is {value!r:.60}: {error}") from error
    for field, (words, good) in CHECKS.items():                     # negatives before their scores
        if field in needs and not good(record.get(field), len(record["negatives"])):
            raise ValueError(f"field '{field}' is {record.get(field)!r:.60}: {why}needs {words}")
    row = {name: fields.pop(name) for name in ("query", "positive") if name in fields}
    return {**record, **row, "negatives": [*fields.values()]}


def _parse_sample(value, prompt, image_file):
    """What stands for a sample in a record -> sample; `prompt` is the row's."""
    if isinstance(value, str) and value.isascii() and value.strip() and not prompt:
        return value                                                # nearly all are of this kind
    sample = {"prompt": prompt, **(value if isinstance(value, dict) else {"text": value})}
    if sample.keys() <= {"prompt", "bytes", "path"}:                # how `datasets` keeps an image
        sample = {"prompt": prompt, "image": sample.get("bytes") or sample.get("path")}
    text, title, image, prompt = [sample.get(k) or "" for k in ("text", "title", "image", "prompt")]
    texts = [text, title, prompt, *[image] * (type(image) is not bytes)]
    # JSON lets half a surrogate pair through, on which a tokenizer would fail later.
    if ({*map(type, texts)} != {str} or re.search("[\ud800-\udfff]", "".join(texts))
            or sample.keys() - {"text", "title", "docid", "image", "prompt"}):
        raise ValueError('give {"text": VALID UNICODE} or just that, {"image": PATH} or both; a '
                         '"prompt", if any, is a text')
    text = f"{title} {text}".strip() if title else text             # as tevatron joins them
    if not (text.strip() or image):
        raise ValueError("missing, null or blank; give a text or an image")
    parts = {"text": text, "image": image and image_file(image), "prompt": prompt}
    parts = {name: part for name, part in parts.items() if part.strip()}
    return text if [*parts] == ["text"] else parts


def _image_file(folder, allow_any_path, image):
    """Image path as written in a file that is not trusted -> absolute path of a readable image.
    An image that is inside the file, as bytes, stays there."""
    if isinstance(image, bytes):
        return load_image(image, decode=False) or image
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
    """Path, PIL image, a file's bytes, "shapes:CAPTION", "page:TEXT" -> upright RGB PIL image. All
    programs here load by it, so they see the same pixels. decode=False only checks the header.

    Applies the orientation tag, puts transparency on white, scales 16-bit grey to 8 bits; takes an
    animation's first frame. Raises ValueError naming a file that is damaged, cut or too large.
    """
    try:
        source = io.BytesIO(image) if isinstance(image, bytes) else image
        kind, _, content = str(source).partition(":")             # nothing on disk is named so
        if draw := {"shapes": draw_shapes, "page": render_page}.get(kind):
            return draw(content)
        opened = isinstance(image, Image.Image)
        with image if opened else Image.open(source, formats=IMAGES) as picture:
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
        raise ValueError(f"cannot read image {source}: {error}; replace or remove it") from error


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


def as_pages(rows):
    """Let the documents of rows be pages, in place, as most of a corpus' memory is its texts."""
    for row in rows:
        row["negatives"] = [*map(as_page, row["negatives"])]
        if "positive" in row:
            row["positive"] = as_page(row["positive"])


def as_page(sample):
    """A sample that is a text, but as a page, which load_image draws at its turn."""
    parts = {"text": sample} if isinstance(sample, str) else dict(sample)
    return sample if "image" in parts else {"image": f"page:{parts.pop('text')}", **parts}


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
    key = _hash(f"2 {sys.version} {library} {mask_names}")
    path = Path(cache_dir, f"stdlib-{key}.json").expanduser()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):    # absent or damaged
        check, content = path.read_text("utf-8").split("\n")
        if check == _hash(content):
            return tuple(json.loads(content))
    split = _stdlib_pairs(Path(library), mask_names, progress)
    with contextlib.suppress(OSError):                # cannot be written: parsed again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        content = json.dumps(split)                   # on one line
        draft.write_text(f"{_hash(content)}\n{content}", "utf-8")
        draft.replace(path)                           # atomic: a reader sees all of it or nothing
    return split


def _hash(text):
    """The same for the same text in every process and every run, unlike Python's own."""
    return hashlib.blake2b(f"{len(text)} {text}".encode(), digest_size=8).hexdigest()


def _stdlib_pairs(library, mask_names, progress):
    rows, seen, skip = [], set(), {"test", "tests", "idlelib", "lib2to3", "turtledemo"}
    for file in tqdm(sorted(library.rglob("*.py")), "reading", disable=None if progress else True):
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
    for module in sorted(sizes, key=_hash):
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
