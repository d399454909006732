"""Rows: files, images, and the pairs that every machine already has.               Read 6 of 8.

A *sample* is a text (str), an image {"image": path or PIL image}, or {"text": ..., "image": ...}.
A *row* is {"query": sample, "positive": sample, "negatives": [samples]}; other fields ride along.
What a loss needs beside or instead of a positive has one name each:

    "score": 0.8               how alike query and positive are
    "label": 1                 their class (0 or 1 for different or same); without a positive, the
                               query's class
    "teacher_scores": [...]    a teacher's scores of [positive, *negatives], in this order
    "teacher_vector": [...]    a teacher's vector of the query
    nothing but "query"        for the losses that learn from texts alone

1. `read_pairs` checks a whole JSONL file before training and returns its rows.
2. `offline_pairs` makes rows without a download: the standard library's docstrings and sources,
   or drawings.
3. `load_image` is the one way from a path to pixels; `render_page` draws a text as a page.

Costs: all rows in memory. Does not stream or fetch from a network. The check before training reads
image headers, not pixels. Who answers what, and in which order rows come, is batches.py.
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

from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

MAX_PIXELS = 89_478_485     # a quarter of a gigabyte as RGB; Pillow, too, starts to warn here
# What may be decoded. Not EPS, for example, which Pillow hands to an external interpreter.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


def read_pairs(path, *, needs=("positive",), why="", allow_any_path=False, skip_bad_rows=False,
               progress=True):
    """JSONL file -> rows, after one pass that checks all of it.

    One object per line, UTF-8: "query", "positive" and optional "negatives" (a list). Other fields
    are kept and "line" is added. An image may be absent, null or [] where there is a text. Its path
    is relative to the file's folder and must not leave it, not even through a link, unless
    allow_any_path. `needs` names the fields that every row must have beside "query": "positive" or
    any in CHECKS; the others are not looked at, and a row without a positive has none. `why` says
    in an error who needs them.

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
                rows.append({**_parse_row(line, needs, why, image_file), "line": number})
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    report = "\n  ".join([f"{path}: {len(bad)} bad rows, {len(rows)} good ones", *bad[:5]])
    if not rows or (bad and not skip_bad_rows):
        raise ValueError(f"{report}\nCorrect the file, or leave bad rows out: --skip-bad-rows")
    if progress and bad:
        print(f"left out of {report}")
    return rows


def _is_number(value):
    return type(value) in (int, float) and -1e30 < value < 1e30        # neither NaN nor infinite


def _are_numbers(values):
    return type(values) is list and values != [] and all(map(_is_number, values))


# Field: what it has to be, in words and as a function of (its value, number of negatives).
CHECKS = {
    "negatives": ("a list with at least one sample", lambda value, n: n > 0),
    "score": ("a finite number", lambda value, n: _is_number(value)),
    "label": ("a whole number from 0", lambda value, n: type(value) is int and 0 <= value < 2**31),
    "teacher_scores": ("a list of finite numbers, one for each of [positive, *negatives]",
                       lambda value, n: _are_numbers(value) and len(value) == 1 + n),
    "teacher_vector": ("a list of finite numbers", lambda value, n: _are_numbers(value)),
}


def _parse_row(line, needs, why, image_file):
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8: {str(error).replace('line 1 ', '')}") from error
    negatives = (record.get("negatives") or []) if isinstance(record, dict) else None
    if type(negatives) is not list:
        raise ValueError(f"{record!r:.60} is not an object, or its 'negatives' are not a list")
    fields = {"query": record.get("query"), "positive": record.pop("positive", None),
              **{f"negatives[{i}]": negative for i, negative in enumerate(negatives)}}
    if fields["positive"] is None and "positive" not in needs:
        del fields["positive"]
    for field, value in fields.items():
        try:
            fields[field] = _parse_sample(value, image_file)
        except ValueError as error:
            raise ValueError(f"field '{field}' is {value!r:.60}: {error}") from error
    for field in [field for field in CHECKS if field in needs]:     # negatives before their scores
        words, good = CHECKS[field]
        if not good(record.get(field), len(negatives)):
            raise ValueError(f"field '{field}' is {record.get(field)!r:.60}: {why}needs {words}")
    row = {name: fields.pop(name) for name in ("query", "positive") if name in fields}
    return {**record, **row, "negatives": [*fields.values()]}


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


def as_pages(rows):
    """Let the documents of rows, where they are texts, be pages: load_image draws each at its turn.

    In place, as most of a corpus' memory is its texts.
    """
    def page(sample):
        return {"image": f"page:{sample}"} if isinstance(sample, str) else sample

    for row in rows:
        row["negatives"] = [page(negative) for negative in row["negatives"]]
        if "positive" in row:
            row["positive"] = page(row["positive"])


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
