"""Images, and the pairs that need no download.

Whatever a file holds, the one loader gives upright RGB, or an error with the file's name. Drawn
shapes show what their captions say; the standard library gives the pairs that one reads in it.
"""
import ast
import inspect
import json
import multiprocessing
import os
import pickle
import struct
import textwrap
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageColor, ImageFile, ImageFont
from torch.utils.data import DataLoader

import data
from batches import Batches, document_id
from data import load_image, offline_pairs, read_pairs, render_page
from tests.test_data import error_of, write


def pixel(image, at=(0, 0)):
    assert image.mode == "RGB"
    return image.getpixel(at)


def save(folder, image, name="a.png", **options):
    image.save(folder / name, **options)
    return folder / name


def refused(image):
    with pytest.raises(ValueError) as caught:
        load_image(image)
    return str(caught.value)


def of(mode, colour, size=(3, 2)):
    return Image.new(mode, size, colour)


def with_palette(mode, colour, alpha=None):
    """A palette image whose used entry is `colour`, transparent if asked."""
    image = Image.new("P", (3, 2), 1)
    image.putpalette([0, 0, 0, *colour])
    if alpha is not None:
        image.info["transparency"] = bytes([255, alpha])
    return image.convert(mode) if mode != "P" else image


def sixteen_bit(value, big_endian=False):
    dtype, mode = (">u2", "I;16B") if big_endian else ("<u2", "I;16")
    return Image.frombytes(mode, (3, 2), np.full((2, 3), value, dtype).tobytes())


WHITE, RED, MOSS = (255, 255, 255), (255, 0, 0), (10, 200, 30)


@pytest.mark.parametrize("image, suffix, expected", [
    (of("1", 1), "png", WHITE), (of("1", 0), "tif", (0, 0, 0)), (of("L", 7), "png", (7, 7, 7)),
    (of("LA", (7, 255)), "png", (7, 7, 7)), (of("LA", (7, 0)), "png", WHITE),
    (with_palette("P", MOSS), "png", MOSS), (with_palette("P", MOSS, alpha=0), "png", WHITE),
    (with_palette("P", MOSS), "gif", MOSS), (of("RGBA", (*RED, 0)), "png", WHITE),
    (of("RGBA", (*RED, 255)), "webp", RED), (of("CMYK", (0, 0, 0, 255)), "jpg", (0, 0, 0)),
    (of("RGBA", (0, 0, 0, 51)), "png", (204, 204, 204)),          # a fifth of black, on white
    (of("CMYK", (0, 255, 255, 0)), "tif", RED), (of("RGB", (1, 2, 3)), "bmp", (1, 2, 3)),
    (sixteen_bit(32768), "png", (128, 128, 128)), (sixteen_bit(65535), "tif", WHITE),
    (sixteen_bit(256, big_endian=True), "tif", (1, 1, 1))])
def test_every_mode_becomes_rgb_with_the_colour_one_sees(tmp_path, image, suffix, expected):
    loaded = load_image(save(tmp_path, image, f"a.{suffix}", lossless=True))      # for webp
    assert loaded.size == (3, 2)
    assert np.abs(np.subtract(pixel(loaded), expected)).max() <= 1
    assert load_image(str(tmp_path / f"a.{suffix}")).tobytes() == loaded.tobytes()


@pytest.mark.parametrize("image, expected", [
    (with_palette("PA", MOSS), MOSS), (of("I", 32768), (128, 128, 128)), (of("I", -5), (0, 0, 0)),
    (of("RGBa", (0, 0, 0, 0)), WHITE), (of("YCbCr", (0, 128, 128)), (0, 0, 0)),
    (of("HSV", (0, 255, 255)), RED)])
def test_modes_that_only_exist_in_memory_work_too(image, expected):
    before = image.tobytes()
    assert np.abs(np.subtract(pixel(load_image(image)), expected)).max() <= 1
    assert image.tobytes() == before                              # the caller's image stays as is


@pytest.mark.filterwarnings("ignore:Palette images")
def test_a_partly_transparent_palette_shows_white_behind():
    image = with_palette("P", (255, 0, 0), alpha=0)
    assert pixel(image.convert("RGB")) == (255, 0, 0)             # what plain conversion would see
    assert pixel(load_image(image)) == (255, 255, 255)


def test_floating_point_pixels_are_refused_with_the_reason(tmp_path):
    assert "white" in refused(save(tmp_path, of("F", 0.5), "a.tif"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_tag_is_applied(tmp_path, orientation):
    """Compared with array operations; a 4 x 2 photo with tag 6 becomes 2 x 4, red at top right."""
    raw = np.zeros((2, 4, 3), np.uint8)
    raw[0, 0], raw[0, 3], raw[1, 0] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {1: raw, 2: raw[:, ::-1], 3: raw[::-1, ::-1], 4: raw[::-1], 5: raw.transpose(1, 0, 2),
               6: np.rot90(raw, -1), 7: np.rot90(raw, 2).transpose(1, 0, 2), 8: np.rot90(raw)}
    loaded = load_image(save(tmp_path, Image.fromarray(raw), "a.png", exif=exif))
    assert np.array_equal(np.asarray(loaded), upright[orientation])
    if orientation == 6:
        assert loaded.size == (2, 4) and pixel(loaded, (1, 0)) == (255, 0, 0)
    assert np.array_equal(np.asarray(load_image(loaded)), upright[orientation])      # only once


def photo(folder, name="photo.jpg"):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    return save(folder, Image.fromarray(noise), name)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp", "webp", "tif"])
def test_a_truncated_file_is_an_error_with_its_name(tmp_path, suffix):
    path = photo(tmp_path, f"photo.{suffix}")
    assert load_image(path).size == (64, 64)
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    assert str(path) in refused(path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_empty_wrong_missing_and_unreadable_files_are_errors_with_their_name(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("this is no photo")
    (tmp_path / "folder.jpg").mkdir()
    for name in ("empty.jpg", "text.jpg", "missing.jpg", "folder.jpg"):
        assert name in refused(tmp_path / name) and name in refused(str(tmp_path / name))


def test_a_file_that_pillow_hands_to_another_program_is_refused(tmp_path):
    path = save(tmp_path, of("RGB", "red"), "a.eps")
    path.rename(tmp_path / "a.png")
    assert "cannot identify" in refused(tmp_path / "a.png")


def bomb(side):
    """A few bytes that claim to be a PNG of side x side pixels."""
    def chunk(kind, body):
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b""))


@pytest.mark.parametrize("side", [9_500, 12_000, 100_000])
def test_decompression_bombs_are_refused_without_touching_global_switches(tmp_path, side):
    (tmp_path / "bomb.png").write_bytes(bomb(side))
    (tmp_path / "pairs.jsonl").write_text('{"query": "q", "positive": {"image": "bomb.png"}}')
    limit, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "bomb.png" in refused(tmp_path / "bomb.png")
        with pytest.raises(ValueError, match="line 1: field 'positive'.*pixels"):
            read_pairs(tmp_path / "pairs.jsonl", progress=False)
    assert Image.MAX_IMAGE_PIXELS == limit == data.MAX_PIXELS and warnings.filters == filters


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (31, 639), (35, 730), (9999, 3), (5000, 4000)])
def test_tiny_long_and_huge_images_load(tmp_path, size):
    assert load_image(save(tmp_path, of("1", 1, size))).size == size


def test_an_image_without_pixels_is_refused():
    assert "pixels" in refused(Image.new("RGB", (0, 5)))


def decode(sample, side):
    return load_image(sample["image"]).size if isinstance(sample, dict) else sample


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_breaks_in_a_worker_is_named_with_its_row(tmp_path, workers):
    """A header that opens passes the check before training; the error still says which row."""
    broken = photo(tmp_path, "broken.jpg")
    photo(tmp_path, "good.jpg")
    broken.write_bytes(broken.read_bytes()[:2000])
    lines = [{"query": f"q{i}", "positive": {"image": "broken.jpg" if i == 2 else "good.jpg"}}
             for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    rows = read_pairs(tmp_path / "pairs.jsonl", progress=False)
    batches = Batches(rows, decode, 4)
    loader = DataLoader(batches, batch_size=None, sampler=range(1), num_workers=workers)
    with pytest.raises(ValueError, match=r"row 2 \(line 5\).*broken\.jpg.*truncated"):
        list(loader)


def test_damaged_bytes_give_an_image_or_an_error_with_the_name(tmp_path):
    hypothesis = pytest.importorskip("hypothesis", reason="the fuzz tests need hypothesis")
    from hypothesis import strategies as st
    files = [photo(tmp_path, name).read_bytes() for name in ("a.jpg", "a.png", "a.gif", "a.tif")]
    edits = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8)

    @hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.sampled_from(files) | st.binary(max_size=60), edits, st.integers(0, 3))
    def check(content, edits, cut):
        content = bytearray(content)
        for at, value in edits:
            content[at:at + 1] = bytes([value])
        path = tmp_path / "fuzzed.bin"
        path.write_bytes(content[:len(content) // 2] if cut == 0 else content)
        try:
            assert load_image(path).mode == "RGB"
        except ValueError as error:
            assert "fuzzed.bin" in str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                           # Pillow on corrupt tags
        check()


# ----------------------------------------------------------------------------------- images in rows
def test_image_absent_null_and_empty_are_the_same_sample(tmp_path):
    image = save(tmp_path, of("RGB", "red"))
    documents = [{"text": "t", "image": "a.png"}, {"text": "t"}, {"text": "t", "image": None},
                 {"text": "t", "image": []}, "t", {"text": " ", "image": "a.png"}]
    path = write(tmp_path, *[{"query": f"q{i}", "positive": d} for i, d in enumerate(documents)])
    read = [row["positive"] for row in read_pairs(path, progress=False)]
    assert read == [{"text": "t", "image": str(image)}, "t", "t", "t", "t", {"image": str(image)}]
    assert len({document_id(sample) for sample in read}) == 3


def test_paths_are_relative_to_the_file_and_do_not_leave_its_folder(tmp_path, monkeypatch):
    home, other = tmp_path / "home", tmp_path / "home-2"          # a prefix, but not a parent
    (home / "sub").mkdir(parents=True), other.mkdir()
    inner, outer = photo(home, "sub/a.png"), photo(other, "secret.png")
    (home / "link.png").symlink_to(outer)
    (home / "folder").symlink_to(other)
    (home / "own.png").symlink_to(inner)
    monkeypatch.chdir(home)
    for name in ("sub/a.png", "own.png"):
        path = write(home, {"query": "q", "positive": {"image": name}})
        assert read_pairs(path, progress=False)[0]["positive"] == {"image": str(inner)}
    assert read_pairs("pairs.jsonl", progress=False)[0]["positive"] == {"image": str(inner)}
    for name in (str(outer), str(inner), "../home-2/secret.png", "link.png", "folder/secret.png"):
        path = write(home, {"query": "q", "positive": {"image": name}})
        assert "--allow-any-path" in error_of(read_pairs, path, progress=False), name
        row, = read_pairs(path, allow_any_path=True, progress=False)
        assert row["positive"]["image"] in (str(inner), str(outer))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes in the file system are a Unix thing")
def test_a_pipe_in_place_of_an_image_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    path = write(tmp_path, {"query": "q", "positive": {"image": "pipe.png"}})
    assert "no file" in error_of(read_pairs, path, progress=False)


# -------------------------------------------------------------------------- pages and drawn shapes
def ink(page):
    """Bounding box of what is not white: (left, top, right, bottom), or None."""
    return Image.eval(page, lambda value: 255 - value).getbbox()


def test_a_page_holds_its_text_inside_the_margins_and_cuts_the_rest():
    for text in ("word " * 2000, "W" * 5000, "\n".join(["i" * 90] * 200), "a\n" * 300):
        page = render_page(text, size=(200, 120), margin=10)
        left, top, right, bottom = ink(page)
        assert page.size == (200, 120) and page.mode == "RGB"
        assert left >= 9 and top >= 10 and right <= 191 and bottom <= 110
        assert bottom > 85                                        # and the page is really used
    assert ink(render_page("")) is None and ink(render_page(" \n \n")) is None


def test_a_wrapped_page_equals_one_wrapped_by_hand():
    font = ImageFont.load_default(14)
    text, lines = "the quick brown fox jumps over a lazy dog and then some more of them", [""]
    for word in text.split():                                     # the obvious greedy algorithm
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if font.getlength(longer) <= 176 else [*lines, word]
    assert len(lines) > 2
    wrapped = render_page(text, size=(200, 200))
    assert wrapped.tobytes() == render_page("\n".join(lines), size=(200, 200)).tobytes()


def test_pages_show_their_text_and_letters_that_the_font_lacks_are_replaced():
    page = lambda text: render_page(text, size=(120, 60)).tobytes()
    assert page("café") == page("cafe") and page("漢字") == page("??") != page("")
    assert page("one") != page("two") and page("a\tb") != page("ab")


def test_any_text_can_be_rendered():
    hypothesis = pytest.importorskip("hypothesis", reason="the fuzz tests need hypothesis")

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(hypothesis.strategies.text(max_size=60))
    def check(text):
        assert render_page(text, size=(80, 60)).size == (80, 60)
    check()


def test_shapes_have_unique_captions_and_a_disjoint_held_out_split():
    train, heldout = offline_pairs("shapes")
    assert (len(train), len(heldout)) == (4000, 500) and (train, heldout) == offline_pairs("shapes")
    assert len({row["query"] for row in train + heldout}) == 4500
    assert len({document_id(row["positive"]) for row in train + heldout}) == 4500
    assert len(pickle.dumps(train)) < 1_500_000                   # what workers receive: no pixels


def test_a_drawing_shows_what_its_caption_says_and_no_two_are_alike():
    _, rows = offline_pairs("shapes")
    drawn = [load_image(row["positive"]["image"]) for row in rows]
    assert {image.size for image in drawn} == {(96, 96)}
    assert len({image.tobytes() for image in drawn}) == 500
    heights = {"top": 16, "middle": 48, "bottom": 80, "left": 16, "center": 48, "right": 80}
    for row, image in zip(rows, drawn):
        areas = {}
        for words in (part.split() for part in row["query"].split(" and ")):
            y, x = (heights[word] for word in words[-1].split("-"))
            assert pixel(image, (x, y)) == ImageColor.getrgb(words[2])
            cell = np.asarray(image)[y - 16:y + 16, x - 16:x + 16]
            areas[x, y] = (cell != 255).any(axis=2).sum()
            assert (areas[x, y] > 260) == (words[1] == "large")
        assert (np.asarray(image) != 255).any(axis=2).sum() == sum(areas.values())   # nothing else


def test_an_unknown_data_set_is_named():
    with pytest.raises(ValueError, match="'emoji' is unknown"):
        offline_pairs("emoji")


# ------------------------------------------------------------------------ the library as data
SOURCE = '''
class Box:
    """A box. It
    holds   things.

    More about it."""

    def get(self, key):
        """Return a thing."""
        text = self.names

        return self.get(key)

def box(key):
    """A function."""
    # any
    return key

def other(key):
    """Another query, but its body is a twin."""
    # any
    return key

def bare(key): return key
def empty(key):
    """Nothing but this."""
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small stand-in for the standard library."""
    for name in ("json/tool.py", "json/test/abc.py", "site-packages/abc.py", "idlelib/abc.py"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(SOURCE)
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    return tmp_path / "cache"


def everything(**options):
    train, heldout = offline_pairs(progress=False, **options)
    return {row["name"]: (row["query"], row["positive"]) for row in train + heldout}


def test_pairs_are_first_paragraphs_and_sources_without_docstrings(library):
    found, masked = (everything(cache_dir=library, mask_names=mask) for mask in (False, True))
    get = "def get(self, key):\n    text = self.names\n    return self.get(key)"
    box = "def box(key):\n    # any\n    return key"
    assert found == {
        "json.tool.Box": ("A box. It holds things.", "class Box:\n" + textwrap.indent(get, "    ")),
        "json.tool.get": ("Return a thing.", get), "json.tool.box": ("A function.", box)}
    assert masked["json.tool.get"][1] == get.replace("get", "MASKED")
    assert masked["json.tool.box"][1] == box.replace("box", "MASKED")
    assert [(name, query) for name, (query, _) in masked.items()] == [
        (name, query) for name, (query, _) in found.items()]


def test_the_cache_is_read_and_a_broken_one_is_made_again(library, monkeypatch):
    first = everything(cache_dir=library)
    file, = library.iterdir()
    good = file.read_bytes()
    changed = good.replace(b"A function", b"B function")
    for bad in (b"", b"{}", b"null", b"7", b"[[], []]", b"[1, 2, 3]", b"\xff", good[:-9], changed):
        file.write_bytes(bad)
        assert everything(cache_dir=library) == first and file.read_bytes() == good
    with monkeypatch.context() as patch:
        patch.setattr(data, "_stdlib_pairs", None)                # parsing again would fail
        assert everything(cache_dir=library) == first
    assert everything(cache_dir=file / "no folder") and [*library.iterdir()] == [file]


def test_the_real_library_gives_thousands_of_pairs_split_by_module(tmp_path):
    train, heldout = offline_pairs(cache_dir=tmp_path, progress=False)
    assert 5000 < len(train) + len(heldout) < 8000 and 450 <= len(heldout) <= 550
    modules = [{row["name"].split(".")[0] for row in rows} for rows in (train, heldout)]
    assert len(modules[1]) >= 20 and not modules[0] & (modules[1] | {"test", "torch"})
    for side in ("query", "positive"):
        assert len({row[side] for row in train + heldout}) == len(train + heldout)
    row, = (row for row in train + heldout if row["name"] == "textwrap.indent")
    code = ast.parse(inspect.getsource(textwrap.indent))
    assert row["query"] == "Adds 'prefix' to the beginning of selected lines in 'text'."
    del code.body[0].body[0]
    assert ast.dump(ast.parse(row["positive"])) == ast.dump(code)
    leaks = [row["name"] for row in train + heldout
             if len(row["query"]) > 40 and row["query"] in row["positive"]]
    assert len(leaks) <= 3, leaks


def test_processes_may_fill_the_cache_at_the_same_time(library):
    """Four processes, one folder: each gets the same pairs, and one complete file is left."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = [pool.apply_async(everything, kwds={"cache_dir": library}) for _ in range(8)]
        found = [result.get(60) for result in results]
    assert found == [everything(cache_dir=library)] * 8 and len([*library.iterdir()]) == 1
