"""Rows: what is read, what is refused, and that an error names line, field and value."""
import json
import math

import pytest
from PIL import Image

from batches import describe, fingerprint
from data import read_pairs

GOOD = {"query": "q", "positive": "p"}


def write(folder, *lines, name="pairs.jsonl"):
    """A JSONL file of objects, texts or bytes, one line each."""
    lines = [line if isinstance(line, bytes) else
             (line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    path = folder / name
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def error_of(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------- reading rows
def test_a_line_ends_at_newline_only_and_not_at_unicode_separators(tmp_path):
    row = {"query": "a\u2028b\u2029c", "positive": "x\u0085y"}
    line = json.dumps(row, ensure_ascii=False)
    assert len(line.splitlines()) == 4                            # the trap is really set
    rows = read_pairs(write(tmp_path, line), progress=False)
    assert [(r["query"], r["positive"]) for r in rows] == [(row["query"], row["positive"])]


def test_byte_order_mark_crlf_and_blank_lines_are_fine_and_lines_still_count(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"query": "q", "positive": "p", "score": 3}\r\n\r\n   \r\n'
                     b'{"query": "q2",\r"positive": "p2"}')             # a lone \r ends no line
    assert read_pairs(path, progress=False) == [
        {"query": "q", "positive": "p", "negatives": [], "score": 3, "line": 1},
        {"query": "q2", "positive": "p2", "negatives": [], "line": 4}]


BAD = [('{"query": "q", "positive": ', "not JSON"), ("[" * 100_000, "not JSON"),
       (b'{"query": "\xff", "positive": "p"}', "UTF-8"), ("[1, 2]", "not an object"),
       ("7", "not an object"), ({"positive": "p"}, "'query'"), ({"query": "q"}, "'positive'"),
       ({"query": None, "positive": "p"}, "'query'"), ({"query": "q", "positive": ""}, "blank"),
       ({"query": " \t", "positive": "p"}, "'query'"), ({"query": "q", "positive": True}, "True"),
       ({"query": 3, "positive": "p"}, "'query' is 3"), ({"query": "q", "positive": ["p"]}, "p'"),
       ({"query": "q", "positive": {}}, "'positive'"), ({"query": "q", "positive": None}, "None"),
       ({"query": "q", "positive": {"text": 5}}, "'positive'"),
       ({"query": "q", "positive": {"text": "t", "img": "a.png"}}, "img"),
       ({"query": "q", "positive": {"image": ["a.png", "b.png"]}}, "'positive'"),
       ({**GOOD, "negatives": "n"}, "'negatives'"), ({**GOOD, "negatives": 5}, "'negatives'"),
       ({**GOOD, "negatives": ["n", None]}, "negatives[1]"),
       ({**GOOD, "negatives": ["n", "n2", 4]}, "negatives[2]"),
       ('{"query": "q\\ud800", "positive": "p"}', "UNICODE"),
       ({"query": "q", "positive": {"image": "gone.png"}}, "gone.png"),
       ({"query": "q", "positive": {"image": "."}}, "no file"),
       ({"query": "q", "positive": {"image": "zero\0byte.png"}}, "null byte"),
       ({"query": "q", "positive": {"image": "x" * 5000}}, "no file"),
       ({"query": "q", "positive": {"image": "note.png"}}, "cannot identify image"),
       ({"query": "q", "positive": {"image": "https://example.com/a.png"}}, "nothing is fetched"),
       ({"query": "q", "positive": {"image": "file:///etc/passwd"}}, "nothing is fetched")]


@pytest.mark.parametrize("bad, named", BAD, ids=[f"{i}-{case[1]}" for i, case in enumerate(BAD)])
def test_a_bad_line_is_named_with_file_line_field_and_value(tmp_path, bad, named):
    (tmp_path / "note.png").write_text("no picture")
    path = write(tmp_path, *[GOOD] * 6, bad, GOOD)
    message = error_of(read_pairs, path, progress=False)
    assert str(path) in message and "line 7:" in message and named in message
    assert "1 bad" in message and "--skip-bad-rows" in message
    assert len(message) < 1000


def test_the_error_counts_all_bad_lines_and_shows_the_first_few(tmp_path):
    message = error_of(read_pairs, write(tmp_path, GOOD, *["{"] * 30, GOOD), progress=False)
    assert "30 bad" in message and "2 good" in message and message.count("line ") == 5


def test_skipping_bad_rows_says_how_many_and_why(tmp_path, capsys):
    path = write(tmp_path, GOOD, {"query": "", "positive": "p"}, GOOD, "{")
    rows = read_pairs(path, skip_bad_rows=True)
    assert [row["line"] for row in rows] == [1, 3]
    printed = capsys.readouterr().out
    assert "2 bad rows" in printed and "line 2: field 'query'" in printed and "line 4" in printed
    read_pairs(path, skip_bad_rows=True, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"{\n"])
def test_a_file_without_a_good_row_is_an_error_even_when_skipping(tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    assert "empty.jsonl" in error_of(read_pairs, tmp_path / "empty.jsonl", skip_bad_rows=True)


def test_a_file_that_cannot_be_read_is_the_same_kind_of_error(tmp_path):
    assert "No such file" in error_of(read_pairs, tmp_path / "gone.jsonl")
    assert "directory" in error_of(read_pairs, tmp_path)


NEEDS = [("score", [0, -1.5, 3], [None, "1", True, math.nan, math.inf, 10 ** 400, [1]]),
         ("label", [0, 7], [None, -1, 1.0, "a", True, 2 ** 40]),
         ("negatives", [["n"], ["n", "m"]], [None, []]),
         ("teacher_scores", [[1, 2.5]], [None, [1], [1, 2, 3], [1, math.nan], "12", [1, "2"]]),
         ("teacher_vector", [[1], [0.5, -2]], [None, [], [math.nan], 1.0, ["a"]])]


@pytest.mark.parametrize("field, good, bad", NEEDS, ids=[case[0] for case in NEEDS])
def test_a_field_that_is_needed_is_checked_and_one_that_is_not_rides_along(field, good, bad,
                                                                           tmp_path):
    row = {**GOOD, "negatives": ["n"]}
    for value in good:
        path = write(tmp_path, {**row, field: value})
        assert read_pairs(path, needs=(field,), progress=False)[0][field] == value
    for value in bad:
        path = write(tmp_path, row | {"score": 1}, {**row, field: value})
        message = error_of(read_pairs, path, needs=(field,), why="--loss x ", progress=False)
        assert "line 2:" in message and f"'{field}' is " in message and "--loss x needs" in message
        if field != "negatives":
            assert len(read_pairs(path, progress=False)) == 2         # nobody asks


def test_a_positive_is_optional_only_where_nobody_needs_it(tmp_path):
    path = write(tmp_path, {"query": "q"}, {"query": "r", "positive": None}, GOOD)
    rows = read_pairs(path, needs=(), progress=False)
    assert ["positive" in row for row in rows] == [False, False, True]
    assert all(row["negatives"] == [] for row in rows)
    assert "2 bad" in error_of(read_pairs, path, progress=False)
    path = write(tmp_path, {"query": "q", "positive": 3})
    assert "'positive' is 3" in error_of(read_pairs, path, needs=(), progress=False)


def test_any_bytes_give_rows_or_an_error_that_names_the_file(tmp_path):
    hypothesis = pytest.importorskip("hypothesis", reason="the fuzz tests need hypothesis")
    from hypothesis import strategies as st
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(
        ["a.png", "../a.png", "http://x", "\0", "~", "p"])
    values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(
        st.sampled_from(["text", "image", "x"]), v, max_size=3), max_leaves=6)
    row = st.dictionaries(st.sampled_from(["query", "positive", "negatives", "line"]), values)
    line = row.map(lambda r: json.dumps(r).encode()) | st.binary(max_size=40)

    @hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @hypothesis.given(st.lists(line, max_size=4), st.booleans())
    def check(lines, anywhere):
        path = write(tmp_path, *lines)
        try:
            rows = read_pairs(path, skip_bad_rows=True, progress=False, allow_any_path=anywhere)
        except ValueError as error:
            assert str(path) in str(error)
            return
        for row in rows:
            for sample in [row["query"], row["positive"], *row["negatives"]]:
                parts = {"text": sample} if isinstance(sample, str) else sample
                assert parts and parts.keys() <= {"text", "image"}
                assert all(isinstance(part, str) and part.strip() for part in parts.values())
                assert parts.get("image", str(tmp_path / "a.png")) == str(tmp_path / "a.png")
                parts.get("text", "").encode()                     # valid Unicode
        assert len(fingerprint(rows)) == 32 and describe(rows)
    check()


