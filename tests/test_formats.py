"""Files of other projects, read as they are: what each row must be is written out by hand. CSV and
TSV are written by the csv module, Parquet by pyarrow, folders by `datasets`; JSON is in the shape
that each project documents."""
import csv
import io
import json
import sys

import pytest
from PIL import Image

from batches import Batches, describe, document_id, fingerprint
from data import load_image, read_pairs
from model import BiEncoder, tiny_qwen3_vl


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_csv(path, *rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, "excel-tab" if path.suffix == ".tsv" else "excel").writerows(rows)
    return path


def read(path, **options):
    """Rows without their line numbers, which have tests of their own."""
    rows = read_pairs(path, progress=False, **options)
    return [{name: value for name, value in row.items() if name != "line"} for row in rows]


def error_of(*args, **options):
    with pytest.raises(ValueError) as caught:
        read_pairs(*args, progress=False, **options)
    return str(caught.value)


# --- sentence-transformers: a column for each sample ----------------------------------------------

COLUMNS = [
    (["anchor", "positive"], ["a", "p"], {"query": "a", "positive": "p", "negatives": []}),
    (["anchor", "positive", "negative"], ["a", "p", "n"],
     {"query": "a", "positive": "p", "negatives": ["n"]}),
    (["query", "positive", "negative"], ["a", "p", "n"],
     {"query": "a", "positive": "p", "negatives": ["n"]}),
    (["query", "answer"], ["a", "p"], {"query": "a", "positive": "p", "negatives": []}),
    (["question", "answer", "id"], ["a", "p", "7"],
     {"query": "a", "positive": "p", "negatives": [], "id": "7"}),
    (["anchor", "positive", *(f"negative_{i}" for i in (1, 2, 3, 10))],
     ["a", "p", "", "m", " ", "n"],
     {"query": "a", "positive": "p", "negatives": ["m", "n"]}),
    (["sentence1", "sentence2", "score"], ["a", "p", "0.5"],
     {"query": "a", "positive": "p", "negatives": [], "score": 0.5}),
    (["premise", "hypothesis", "label"], ["a", "p", "2"],
     {"query": "a", "positive": "p", "negatives": [], "label": 2}),
    (["anchor", "positive", "negative_1", "scores"], ["a", "p", "n", "[3, -1.5]"],
     {"query": "a", "positive": "p", "negatives": ["n"], "teacher_scores": [3, -1.5]})]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("names, cells, row", COLUMNS, ids=[",".join(c[0][:3]) for c in COLUMNS])
def test_columns_of_sentence_transformers(tmp_path, names, cells, row, kind):
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":                       # there, numbers are numbers and blank is null
        values = [cell.strip() or None for cell in cells]
        record = dict(zip(names, values)) | {n: row[n] for n in ("score", "label") if n in row}
        record |= {"scores": row["teacher_scores"]} if "teacher_scores" in row else {}
        write_jsonl(path, record)
    else:
        write_csv(path, names, cells)
    needs = ("positive", *(n for n in ("score", "label", "teacher_scores") if n in row))
    assert read(path, needs=needs) == [row]


def test_one_text_and_its_class_and_texts_alone(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ["x", "1"], ["y", "0"])
    assert read(path, needs=("label",)) == [{"query": "x", "negatives": [], "label": 1},
                                            {"query": "y", "negatives": [], "label": 0}]
    path = write_jsonl(tmp_path / "b.jsonl", {"sentence": "x"}, {"sentence": "y"})
    assert [row["query"] for row in read(path, needs=())] == ["x", "y"]
    assert "no query and positive in ['sentence']" in error_of(path)


# --- FlagEmbedding --------------------------------------------------------------------------------

FLAG = {"query": "q", "pos": ["p1", "p2"], "neg": ["n1", "n2"], "pos_scores": [5, 4.5],
        "neg_scores": [1, -2], "prompt": "Find it: ", "type": "normal"}


def test_every_positive_of_flag_embedding_is_a_row_with_its_own_teacher_scores(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", FLAG, {"query": "r", "pos": ["p3"], "neg": []})
    query = {"text": "q", "prompt": "Find it: "}
    assert read(path) == [
        {"query": query, "positive": "p1", "negatives": ["n1", "n2"], "type": "normal",
         "teacher_scores": [5, 1, -2]},
        {"query": query, "positive": "p2", "negatives": ["n1", "n2"], "type": "normal",
         "teacher_scores": [4.5, 1, -2]},
        {"query": "r", "positive": "p3", "negatives": []}]
    assert [row["line"] for row in read_pairs(path, progress=False)] == [1, 1, 2]


@pytest.mark.parametrize("change, message", [
    ({"pos": []}, "'positive' is None"), ({"pos": ["p", ""]}, "'positive' is ''"),
    ({"neg": "n"}, "'negatives' is 'n'"), ({"neg": ["n", None]}, "'negatives[1]' is None"),
    ({"query": ""}, "'query' is ''"), ({"prompt": 5}, "a text"), ({"prompt": "\ud800"}, "UNICODE"),
    ({"pos_scores": [1]}, "'teacher_scores' is [1, -2]"),
    ({"neg_scores": [1]}, "'teacher_scores' is [5, 1]"),
    ({"neg_scores": None}, "'teacher_scores' is None"),
    ({"pos_scores": ["5", 1]}, "'teacher_scores' is ['5', 1, -2]")])
def test_a_bad_line_of_flag_embedding_is_named(tmp_path, change, message):
    path = write_jsonl(tmp_path / "a.jsonl", FLAG, {**FLAG, **change}, FLAG)
    found = error_of(path, needs=("positive", "teacher_scores"))
    assert f"{path}: 1 bad rows, 4 good ones\n  line 2: " in found and message in found
    assert len(read(path, needs=("positive", "teacher_scores"), skip_bad_rows=True)) == 4


# --- tevatron -------------------------------------------------------------------------------------

def passage(docid, title, text):
    return {"docid": docid, "title": title, "text": text}


TEVATRON = {"query_id": "7", "query": "q", "answers": ["a"],
            "positive_passages": [passage("1", "Bees", "They fly."), passage("2", "", "No title.")],
            "negative_passages": [passage("3", "Wasps", "They, too."), {"docid": "4", "text": "n"}]}


def test_a_passage_of_tevatron_is_its_title_and_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEVATRON)
    own = {"query": "q", "negatives": ["Wasps They, too.", "n"], "query_id": "7", "answers": ["a"]}
    assert read(path) == [{**own, "positive": "Bees They fly."}, {**own, "positive": "No title."}]
    broken = {**TEVATRON, "negative_passages": [passage("5", "Title", 3)]}
    assert "line 2: field 'negatives[0]'" in error_of(write_jsonl(path, TEVATRON, broken))


def test_of_the_same_query_no_answer_is_a_negative(tmp_path):
    """Each of the files' positives is known as an answer of the other's row."""
    for record, wanted in ((FLAG, ["p1", "p2"]), (TEVATRON, ["Bees They fly.", "No title."])):
        path = write_jsonl(tmp_path / "a.jsonl", record, {**record, "query": "another"})
        rows = read_pairs(path, progress=False)
        batch = Batches(rows, lambda sample, side: sample, 4, num_hard_negatives=2)[0]
        assert [sorted(own) for own in batch["answers"]] == [sorted(map(document_id, wanted))] * 4
        assert sorted(batch["documents"]) == sorted(2 * (wanted + 2 * rows[0]["negatives"]))


# --- CSV ------------------------------------------------------------------------------------------

def test_quotes_line_ends_and_commas_inside_of_a_cell(tmp_path):
    texts = ['say "hi", twice', "two\nlines\r\nor three", "\u2028 ends none", "'single'", "a\ttab"]
    for kind in ("csv", "tsv"):
        path = write_csv(tmp_path / f"a.{kind}", ["query", "positive"],
                         *([text, f"p{i}"] for i, text in enumerate(texts)))
        assert [row["query"] for row in read(path)] == texts


def test_the_byte_order_mark_and_spaces_around_names_are_no_part_of_them(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfquery, positive\r\nq,p\r\n\r\nr,s")
    assert read_pairs(tmp_path / "a.csv", progress=False) == [
        {"query": "q", "positive": "p", "negatives": [], "line": 2},
        {"query": "r", "positive": "s", "negatives": [], "line": 4}]


def test_lines_are_those_of_the_file_where_cells_have_several(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["query", "positive"], ["a\nb\nc", "p"], ["q", ""],
                     ["d", "p\n"], ["", "p"])
    bad = [n for n, line in enumerate(path.read_text().splitlines(), 1)
           if line in ("q,", ",p")]
    assert bad == [5, 8]                                         # the file is what it should be
    message = error_of(path)
    assert "2 bad rows, 2 good ones\n  line 5: field 'positive'" in message
    assert "\n  line 8: field 'query'" in message
    rows = read_pairs(path, progress=False, skip_bad_rows=True)
    assert [row["line"] for row in rows] == [2, 6]


def test_a_text_of_a_megabyte_fits_into_a_cell(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["query", "positive"], ["q", "long " * 200_000])
    assert len(read(path)[0]["positive"]) == 1_000_000


BAD_CSV = [(b"query,positive\nq,p\nq,p,extra\n", "line 3: 3 cells, but 2 columns"),
           (b"query,positive\nq,p\n\nq\n", "line 4: 1 cells, but 2 columns"),
           (b'query,positive\nq,p\nq,"open\nr,s\n', "the row from line 3 on is not CSV"),
           (b'query,positive\n"q"x,p\n', "the row from line 2 on is not CSV"),
           (b"query,positive\nq,p\nq,\xff\n", "line 3: field 'positive'"),
           (b"what is it,that\nq,p\n", "no query and positive in ['what is it', 'that']"),
           (b"query;positive\nq;p\n", "no query and positive in ['query;positive']"),
           (b"", "0 good ones"), (b"query,positive\n", "0 good ones"),
           ("query,positive\nq,p".encode("utf-16"), "no query and positive")]


@pytest.mark.parametrize("content, message", BAD_CSV, ids=[message for _, message in BAD_CSV])
def test_what_is_wrong_with_a_csv_file_is_said_with_its_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    found = error_of(tmp_path / "a.csv")
    assert str(tmp_path / "a.csv") in found and message in found
    found.encode()                                                # can be printed


def test_numbers_in_csv_are_numbers_and_texts_stay_texts(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["query", "positive", "score", "year", "negatives"],
                     ["42", "7", "1e-1", "1999", '["n", "m"]'], ["1", "[2]", "", "", ""])
    assert read(path) == [
        {"query": "42", "positive": "7", "score": 0.1, "year": "1999", "negatives": ["n", "m"]},
        {"query": "1", "positive": "[2]", "score": None, "year": None, "negatives": []}]
    for cell in ("high", "0,8", "nan", "", "[1]", "true", "[" * 9999):
        write_csv(path, ["query", "positive", "score"], ["q", "p", "1"], ["q", "p", cell])
        assert "line 3: field 'score' is " in error_of(path, needs=("score",))
        assert len(read(path)) == 2                               # nobody asks
    write_csv(path, ["query", "positive", "label"], ["q", "p", "0.5"])
    assert "'label' is 0.5: needs a whole number" in error_of(path, needs=("label",))
    write_csv(path, ["query", "positive", "negatives"], ["q", "p", "n"])
    assert "'negatives' is 'n': not a list" in error_of(path)


# --- Parquet, folders of `datasets` ---------------------------------------------------------------

@pytest.fixture(scope="module")
def datasets():
    found = pytest.importorskip("datasets", reason="pip install datasets")
    found.disable_progress_bars()
    return found


PICTURES = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]


@pytest.fixture(params=["folder", "parquet"])
def save(request, datasets, tmp_path):
    """columns -> where they are saved by `datasets` or by pyarrow."""
    def write(columns):
        if request.param == "parquet":
            import pyarrow
            import pyarrow.parquet
            pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
            return tmp_path / "a.parquet"
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
        return tmp_path / "saved"
    return write


def test_tables_hold_all_formats_and_numbers_of_rows_count_from_1(save):
    path = save({"anchor": ["a", "b"], "positive": ["p", "q"], "negative_1": ["m", None],
                 "negative_2": [None, None], "scores": [[0.5, 0.25], [1.0]], "id": [7, 8]})
    assert read(path) == [
        {"query": "a", "positive": "p", "negatives": ["m"], "teacher_scores": [0.5, 0.25], "id": 7},
        {"query": "b", "positive": "q", "negatives": [], "teacher_scores": [1.0], "id": 8}]
    assert [row["line"] for row in read_pairs(path, progress=False)] == [1, 2]


def test_lists_and_passages_in_tables(save, tmp_path):
    found = read(save({name: [value, value] for name, value in FLAG.items()}))
    assert found == 2 * read(write_jsonl(tmp_path / "a.jsonl", FLAG))
    found = read(save({name: [value] for name, value in TEVATRON.items()}))    # no title: null
    assert found == read(write_jsonl(tmp_path / "b.jsonl", TEVATRON))


def test_a_bad_row_of_a_table_is_named_by_its_number(save):
    path = save({"query": ["q", "r", None], "positive": ["p", " ", "s"]})
    message = error_of(path)
    assert "2 bad rows, 1 good ones\n  row 2: field 'positive' is ' '" in message
    assert "\n  row 3: field 'query' is None" in message


def test_images_inside_of_a_file_stay_there_until_they_are_looked_at(datasets, tmp_path):
    """As `datasets` keeps an Image column. A path in it is one beside the file, as elsewhere."""
    features = datasets.Features({"query": datasets.Value("string"), "image": datasets.Image()})
    table = datasets.Dataset.from_dict({"query": ["a", "b"], "image": PICTURES}, features=features)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "a.parquet")
    for path in (tmp_path / "saved", tmp_path / "a.parquet"):
        rows = read(path, columns={"positive": "image"})
        for row, picture in zip(rows, PICTURES):
            assert [*row["positive"]] == ["image"] and row["negatives"] == []
            assert load_image(row["positive"]["image"]).tobytes() == picture.tobytes()
        assert len({document_id(row["positive"]) for row in rows}) == 2
        assert "2 with an image" in describe(rows)
        batch = Batches(rows, lambda sample, side: sample, 2)[0]
        assert batch["documents"] == [rows[i]["positive"] for i in batch["rows"]]
    PICTURES[0].save(tmp_path / "saved" / "red.png")
    for name, value, good in (("red.png", None, True), ("../a.parquet", None, False),
                              (None, b"no picture", False)):
        columns = {"query": ["q"], "positive": [{"bytes": value, "path": name}]}
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
        if good:
            assert read(tmp_path / "saved")[0]["positive"] == {
                "image": str(tmp_path / "saved" / "red.png")}
        else:
            assert "row 1: field 'positive'" in error_of(tmp_path / "saved")


def test_what_is_no_table_is_an_error_with_its_name(datasets, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    split = datasets.Dataset.from_dict({"query": ["q"], "positive": ["p"]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "splits")
    for path in (tmp_path / "a.parquet", tmp_path / "splits", tmp_path / "gone.parquet"):
        message = error_of(path)
        assert f"cannot read {path}" in message and "one split" in message
    assert read(tmp_path / "splits" / "train") == [{"query": "q", "positive": "p", "negatives": []}]


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in (tmp_path, tmp_path / "a.parquet"):
        assert f"cannot read {path}" in error_of(path) and "pip install datasets" in error_of(path)


# --- Which format it is ---------------------------------------------------------------------------

def test_columns_can_be_named(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["id", "title", "body", "hard_1", "hard_2", "how"],
                     ["1", "t", "b", "h", "", "0.5"])
    columns = {"query": "title", "positive": "body", "negative": "hard", "score": "how"}
    row = {"query": "t", "positive": "b", "negatives": ["h"], "score": 0.5, "id": "1"}
    assert read(path, columns=columns, needs=("positive", "score")) == [row]
    path = write_jsonl(tmp_path / "a.jsonl", {**FLAG, "query": "not this", "question": "q"})
    for columns in ({"query": "question"}, {"query": "question", "positive": "pos"}):   # known
        for row in read(path, columns=columns):
            assert (row["query"]["text"], row["negatives"]) == ("q", ["n1", "n2"])
    path = write_jsonl(tmp_path / "b.jsonl", {"q": "q", "docs": ["a", "b"], "negative": ["n"]})
    columns = {"query": "q", "positive": "docs", "negatives": "negative"}
    assert read(path, columns=columns) == [{"query": "q", "positive": p, "negatives": ["n"]}
                                           for p in "ab"]


@pytest.mark.parametrize("columns, message", [
    ({"query": "title"}, "query=title fits nothing in ['query', 'positive', 'id']"),
    ({"answer": "positive"}, "ours of query, positive, negatives"),
    ({"query": ""}, "query= fits nothing"), ({"negative": "hard"}, "negative=hard fits nothing")])
def test_a_column_that_is_not_there_is_an_error_that_lists_the_others(tmp_path, columns, message):
    path = write_csv(tmp_path / "a.csv", ["query", "positive", "id"], ["q", "p", "1"])
    told = error_of(path, columns=columns)
    assert str(path) in told and message in told


def test_the_first_record_that_fits_decides_for_all(tmp_path):
    other = {"anchor": "a", "positive": "p"}
    path = write_jsonl(tmp_path / "a.jsonl", {"id": 1}, other, FLAG, other)
    message = error_of(path)
    assert "2 bad rows, 2 good ones\n  line 1: no query and positive\n  line 3: field" in message
    assert [row["query"] for row in read(path, skip_bad_rows=True)] == ["a", "a"]
    both = {"query": "q", "positive": "p", "pos": ["x"], "anchor": "y", "answer": "z"}
    assert read(write_jsonl(path, both))[0] == {**both, "negatives": []}       # our own comes first


def test_the_start_says_which_format_it_found_and_shows_a_row(tmp_path, capsys):
    long = {**FLAG, "query": "many words " * 50, "pos": [{"text": "more\nwords " * 50}]}
    path = write_jsonl(tmp_path / "a.jsonl", long)
    read_pairs(path)
    form, sample, *rest = capsys.readouterr().out.splitlines()
    assert form == f"format         FlagEmbedding (query, pos, neg, prompt) from {path}"
    assert sample.startswith("sample         query ") and sample.endswith(", 2 negatives")
    assert "many words" in sample and "more" in sample and len(sample) <= 100 and not rest
    read_pairs(write_csv(tmp_path / "b.csv", ["anchor", "positive"], ["a", "p"]))
    assert capsys.readouterr().out == (
        f"format         sentence-transformers (anchor, positive) from {tmp_path / 'b.csv'}\n"
        "sample         query 'a', positive 'p', 0 negatives\n")


# --- Prompts --------------------------------------------------------------------------------------

def test_prompts_of_a_row_are_those_of_its_samples(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = write_jsonl(
        tmp_path / "a.jsonl",
        {"query": "q", "positive": {"image": "a.png"}, "negatives": ["n", {"text": "m"}],
         "query_prompt": "Q: ", "document_prompt": "D: "},
        {"query": {"text": "q", "prompt": "own"}, "positive": "p", "query_prompt": "Q: "},
        {"query": "q", "positive": "p", "query_prompt": " ", "document_prompt": None})
    assert read(path) == [
        {"query": {"text": "q", "prompt": "Q: "},
         "positive": {"image": str(tmp_path / "a.png"), "prompt": "D: "},
         "negatives": [{"text": "n", "prompt": "D: "}, {"text": "m", "prompt": "D: "}]},
        {"query": {"text": "q", "prompt": "own"}, "positive": "p", "negatives": []},
        {"query": "q", "positive": "p", "negatives": []}]
    path = write_csv(tmp_path / "a.csv", ["anchor", "positive", "query_prompt"], ["q", "p", "Q: "])
    assert read(path)[0]["query"] == {"text": "q", "prompt": "Q: "}


@pytest.mark.parametrize("kind", ["flag", "tevatron", "columns"])
def test_batches_and_the_model_take_the_rows(tmp_path, kind):
    """From file to vectors; a prompt of a row's own is what the model reads in place of its own."""
    records = {"flag": [{**FLAG, "query": f"q{i}"} for i in range(3)],
               "tevatron": [{**TEVATRON, "query": f"q{i}"} for i in range(3)],
               "columns": [{"question": f"q{i}", "answer": f"a{i}", "negative": "n"}
                           for i in range(3)]}[kind]
    rows = read_pairs(write_jsonl(tmp_path / "a.jsonl", *records), progress=False)
    model = BiEncoder(*tiny_qwen3_vl(vocab_size=300, hidden=32, layers=1, heads=2))
    batch = Batches(rows, model.preprocess, 3, num_hard_negatives=2)[0]
    for index, features in zip(batch["rows"], batch["queries"]):
        text = model.tokenizer.decode(features["input_ids"])
        assert ("Find it:" in text) == (kind == "flag")
        assert ("Represent the user's input." in text) == (kind != "flag")
        assert records[index // (len(rows) // 3)].get("query", f"q{index}") in text
    assert model(batch["documents"]).shape == (len(batch["documents"]), 32)
    assert len(fingerprint(rows)) == 32 and describe(rows).startswith(f"{len(rows)} rows")


# --- Anything at all ------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_any_file_gives_rows_or_an_error_that_names_it(tmp_path, kind):
    hypothesis = pytest.importorskip("hypothesis", reason="the fuzz tests need hypothesis")
    from hypothesis import strategies as st
    names = st.sampled_from([
        "query", "positive", "negatives", "negative", "negative_1", "pos", "neg", "pos_scores",
        "neg_scores", "prompt", "positive_passages", "negative_passages", "anchor", "score",
        "scores", "label", "query_prompt", "document_prompt", "", "line"])
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(
        ["q", "[1]", '["n"]', "[" * 2000])
    values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(
        st.sampled_from(["text", "image", "title", "docid", "prompt", "bytes", "path"]), v,
        max_size=3), max_leaves=6)
    deep = '{"query": ' + "[" * 900 + "]" * 900 + ', "positive": "p"}'    # deeper than repr can go
    if kind == "jsonl":
        line = st.dictionaries(names, values, max_size=6).map(json.dumps).map(str.encode)
        content = st.lists(line | st.binary(max_size=40) | st.just(deep.encode()), max_size=4).map(
            b"\n".join)
    else:
        def table(rows):
            text = io.StringIO()
            csv.writer(text).writerows(rows)
            return text.getvalue().encode(errors="surrogatepass")
        cells = st.lists(st.text(max_size=9) | leaves, max_size=5)
        whole = st.tuples(st.lists(names, max_size=5), st.lists(cells, max_size=4)).map(
            lambda t: table([t[0], *t[1]]))
        content = whole | st.tuples(whole, st.binary(max_size=40)).map(b"".join)
    path = tmp_path / f"a.{kind}"

    @hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @hypothesis.given(content, st.dictionaries(names, names, max_size=2), st.booleans(),
                      st.sampled_from([(), ("positive",), ("score", "teacher_scores")]))
    def check(content, columns, skip, needs):
        path.write_bytes(content)
        try:
            rows = read(path, columns=columns, needs=needs, skip_bad_rows=skip)
        except ValueError as error:
            assert str(path) in str(error)
            str(error).encode()
            return
        for row in rows:
            for sample in [row["query"], row.get("positive", "p"), *row["negatives"]]:
                parts = {"text": sample} if isinstance(sample, str) else sample
                assert parts.keys() <= {"text", "prompt"} and parts["text"].strip()
                "".join(parts.values()).encode()                  # valid Unicode
        assert len(fingerprint(rows)) == 32 and describe(rows)
    check()
