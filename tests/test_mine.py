"""extras/mine.py against brute force, the cases worked by hand, and a process that is killed."""
import datetime
import json
import os
import random
import re
import signal
import zlib

import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from data import read_pairs
from extras import mine
from model import BiEncoder
from tests.conftest import TEXTS


class Table:
    """A model whose vectors are given, or drawn from the text's own generator."""

    def __init__(self, vectors=None, dim=8, dies_after=None):
        self.vectors, self.dim, self.left, self.encoded = vectors, dim, dies_after, 0

    def encode(self, samples, side, batch_size):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left = self.left and self.left - 1
        self.encoded += len(samples)
        return torch.stack([torch.tensor(self.vectors[s]) if self.vectors else self.drawn(s)
                            for s in samples])

    def drawn(self, text):
        seed = zlib.crc32(text.encode())
        return torch.randn(self.dim, generator=torch.Generator().manual_seed(seed))


def row(query, positive, *negatives):
    return {"query": query, "positive": positive, "negatives": [*negatives]}


def on_a_line(scores):
    """One query q = (1, 0), its positive and the other documents at these cosines."""
    vectors = {"q": [1.0, 0.0]} | {name: [c, (1 - c * c) ** 0.5] for name, c in scores.items()}
    return Table(vectors)


def negatives_of(rows, model, work, **options):
    work.mkdir(exist_ok=True)
    return [r["negatives"] for r in mine.mine(rows, model, work, **{"skip_top": 0, **options})[0]]


@pytest.fixture
def folder(models):
    return models[0]


# --- What is mined --------------------------------------------------------------------------------

def test_no_answer_and_no_copy_of_one_is_mined(tmp_path):
    """q has the positives p1 and p2 in two rows; the corpus holds p1 again, differing in spaces and
    capitals, and the query itself. Only the others' documents are left, in both rows."""
    rows = [row("q", "p1 text"), row("q ", "p2", "p1 text"), row("other", "p3", "n")]
    corpus = ["P1  Text", "q", "Q", "c1"]
    for wanted, found in ((9, {"p3", "n", "c1"}), (2, None)):
        first, second, third = negatives_of(rows, Table(), tmp_path / str(wanted), corpus=corpus,
                                            num_negatives=wanted)
        assert set(first) == set(second) == found or wanted == 2 == len(first) == len(second)
        assert len(third) == min(wanted, 5)      # p1, p2, n, q, c1: each once, and not p3
    assert negatives_of([row("x", "a", "a ", "X")], Table(), tmp_path / "all") == [[]]


def test_copies_of_an_image_are_known_by_their_bytes(tmp_path):
    for name, colour in (("p.png", "red"), ("copy.png", "red"), ("n.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    p, copy, n = ({"image": str(tmp_path / name)} for name in ("p.png", "copy.png", "n.png"))
    pool, positives, answers = mine.collect([row("q", p, n), row("other", copy)])
    assert [*pool.values()] == [p, n]
    assert positives.tolist() == [0, 0] and answers.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("sampling", ["top", "random"])
@pytest.mark.parametrize("piece, block", [(1000, 1000), (7, 1000), (16, 5), (1, 3)])
def test_pieces_and_blocks_find_what_a_loop_over_all_finds(tmp_path, monkeypatch, piece, block,
                                                           sampling):
    rng = random.Random(0)
    rows = [row(f"q{n % 9}", f"d{rng.randrange(40)}", f"d{rng.randrange(40)}") for n in range(23)]
    corpus = [f"d{i}" for i in range(40)]
    monkeypatch.setattr(mine, "PIECE", piece)
    monkeypatch.setattr(mine.search, "__defaults__", (block,))
    options = {"skip_top": 3, "depth": 20, "margin": 0.1, "relative_margin": 0.2, "min_score": -5.0,
               "max_score": 3.0, "num_negatives": 4, "sampling": sampling, "corpus": corpus}
    found = negatives_of(rows, model := Table(), tmp_path / "work", **options)
    vector = {t: model.encode([t], "", 1)[0] for t in corpus + [r["query"] for r in rows]}
    for r, mined in zip(rows, found):
        q = vector[r["query"]]
        answers = {other["positive"] for other in rows if other["query"] == r["query"]}
        score = {d: (q @ vector[d]).item() for d in corpus}
        ranking = sorted((d for d in corpus if d not in answers), key=score.get, reverse=True)
        p = score[r["positive"]]
        left = [d for d in ranking[3:20] if -5 <= score[d] <= 3
                and score[d] <= p - 0.1 and score[d] <= p - 0.2 * abs(p)]
        if sampling == "top":
            assert mined == left[:4]
        else:
            assert set(mined) <= set(left) and len(mined) == len({*mined}) == min(4, len(left))


def test_a_relative_margin_lies_below_a_negative_score_too(tmp_path):
    below = {"p": -0.50, "close": -0.51, "barely": -0.524, "kept": -0.526, "far": -0.80}
    above = {"p": 0.80, "close": 0.79, "barely": 0.761, "kept": 0.759, "far": 0.1}
    for n, scores in enumerate((below, above)):
        (found,) = negatives_of([row("q", "p", *scores)], on_a_line(scores), tmp_path / str(n),
                                relative_margin=0.05)
        assert found == ["kept", "far"]
    scores = {"p": -0.50, "close": -0.59, "kept": -0.61}
    assert negatives_of([row("q", "p", *scores)], on_a_line(scores), tmp_path / "absolute",
                        margin=0.1) == [["kept"]]


def test_ranks_are_counted_without_answers_and_skipped_from_the_top(tmp_path):
    scores = {"p": 0.95, "p2": 0.9, "a": 0.8, "b": 0.7, "c": 0.6, "d": 0.5}
    rows = [row("q", "p", *"abcd"), row("q", "p2")]
    for skip, depth, expected in ((0, 2, ["a", "b"]), (1, 3, ["b", "c"]), (3, 100, ["d"]),
                                  (10, 100, [])):
        found = negatives_of(rows, on_a_line(scores), tmp_path / f"{skip}", skip_top=skip,
                             depth=depth)
        assert found == [expected, expected]


def test_a_random_sample_depends_on_seed_and_row_only(tmp_path):
    rows = [row(f"q{n}", f"d{n}") for n in range(30)]
    options = {"num_negatives": 3, "sampling": "random"}
    first = negatives_of(rows, Table(), tmp_path / "a", **options)
    again = negatives_of([*rows[:29], row("x", "d29")], Table(), tmp_path / "b", **options)
    assert first[:29] == again[:29]
    assert first != negatives_of(rows, Table(), tmp_path / "a", seed=1, **options)
    # Queries that are all alike have the same candidates, and yet draw others.
    alike = Table({f"q{n}": [1.0, 0.0] for n in range(30)}
                  | {f"d{n}": [n / 30, 1.0] for n in range(30)})
    drawn = negatives_of(rows, alike, tmp_path / "c", **options)
    assert len({tuple(sorted(own)) for own in drawn}) > 20


def test_a_second_judge_decides_margins_and_order(tmp_path):
    """It finds the shortest texts best, and sees exactly the candidates after the skipped ranks."""
    scores = {"pp": 0.9, "skipped": 0.8, "aaaa": 0.7, "b": 0.6, "ccc": 0.5, "late": 0.1}
    asked = []
    (found,) = negatives_of(
        [row("q", "pp", *scores)], on_a_line(scores), tmp_path / "work", skip_top=1, depth=4,
        margin=0.5, rescore=lambda q, texts: asked.append((q, texts)) or [-len(t) for t in texts])
    assert asked == [("q", ["pp", "aaaa", "b", "ccc"])]
    assert found == ["ccc", "aaaa"]                       # b scores above the positive


def test_the_cross_encoder_scores_pairs_like_the_model_alone(tmp_path):
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = BertTokenizer(str(vocabulary))
    config = BertConfig(vocab_size=5 + len(words), hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=2, intermediate_size=16, num_labels=1,
                        max_position_embeddings=20)
    for labels in (1, 2):
        config.num_labels = labels
        model = BertForSequenceClassification(config).eval()
        model.save_pretrained(tmp_path / str(labels))
        tokenizer.save_pretrained(tmp_path / str(labels))
        if labels == 1:
            rescore = mine.cross_encoder(str(tmp_path / "1"), 2, "cpu")
            texts = [*TEXTS[:4], "read " * 50]            # the last is cut to the model's 20 places
            alone = [model(**tokenizer("slowly", text, truncation=True, max_length=20,
                                       return_tensors="pt")).logits.item() for text in texts]
            assert rescore("slowly", texts) == pytest.approx(alone, abs=1e-6)
            prompted = [{"text": text, "prompt": "for the encoder"} for text in ("slowly", *texts)]
            assert rescore(prompted[0], prompted[1:]) == pytest.approx(alone, abs=1e-6)
            assert max(alone) > min(alone)
    with pytest.raises(ValueError, match="2 outputs: a judge has one"):
        mine.cross_encoder(str(tmp_path / "2"), 2, "cpu")


# --- A kill, the file -----------------------------------------------------------------------------

@pytest.mark.parametrize("pieces_before", [0, 1, 2, 5])
def test_a_killed_run_goes_on_and_ends_with_the_same_file(tmp_path, monkeypatch, pieces_before):
    monkeypatch.setattr(mine, "PIECE", 7)
    rows, work = [row(f"q{n}", f"d{n}") for n in range(20)], tmp_path / "work"       # 3 + 3 pieces
    work.mkdir()
    if (child := os.fork()) == 0:
        signal.alarm(60)                                  # whatever happens, it does not stay
        mine.mine(rows, Table(dies_after=pieces_before), work)
        os._exit(0)                                       # not reached
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len([*work.iterdir()]) == pieces_before
    model = Table()
    mine.write_rows(tmp_path / "resumed.jsonl", mine.mine(rows, model, work)[0])
    assert model.encoded == 40 - sum((7, 7, 6, 7, 7, 6)[:pieces_before])
    (tmp_path / "fresh").mkdir()
    mine.write_rows(tmp_path / "fresh.jsonl", mine.mine(rows, Table(), tmp_path / "fresh")[0])
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


def test_half_a_piece_is_made_again(tmp_path, monkeypatch):
    def interrupted(tensor, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    def pieces():
        return mine.in_pieces(tmp_path, 2, "document", "abc", lambda part: torch.ones(len(part)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", interrupted)
        next(pieces())
    assert [len(piece) for piece in pieces()] == [2, 1]
    with pytest.raises(ValueError, match=r"query 0\.\.1: the model returned NaN"):
        next(mine.in_pieces(tmp_path, 2, "query", "ab", lambda part: torch.full((2,), torch.nan)))


def test_pieces_are_those_of_these_rows_models_and_settings(folder, tmp_path):
    rows, other = [row("q", "p")], tmp_path / "other"
    other.mkdir()
    (other / "weights.bin").write_text("1")
    base = rows, [], [folder, None], [1]
    changed = {0: [row("q", "p2")], 1: ["c"], 2: [str(other), None], 3: [2]}
    keys = [mine.key_of(*base), *(mine.key_of(*base[:i], new, *base[i + 1:])
                                  for i, new in changed.items())]
    os.utime(other / "weights.bin", (1, 1))               # trained again into the same folder
    keys.append(mine.key_of(*base[:2], changed[2], base[3]))
    assert len({*keys}) == len(keys) and keys[0] == mine.key_of(*base)


def test_the_file_is_read_by_training_and_images_stay_images(folder, tmp_path, capsys):
    (tmp_path / "pages").mkdir()
    lines = []
    for n, text in enumerate(TEXTS[:6]):
        Image.new("RGB", (64, 32 + n), (40 * n, 90, 10)).save(tmp_path / "pages" / f"{n}.png")
        lines.append({"query": text, "positive": {"image": f"pages/{n}.png"}, "negatives": [],
                      "source": "half \ud800 pair"})
    lines.append({"query": {"text": "both", "image": "pages/0.png"}, "positive": "a\u2028text",
                  "negatives": ["replaced, yet a candidate"]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "corpus.jsonl").write_text('{"title": "T", "text": "x"}\n\n{"text": ""}')
    flags = ["--model", folder, "--train-jsonl", str(tmp_path / "rows.jsonl"), "--corpus",
             str(tmp_path / "corpus.jsonl"), "--skip-top", "0", "--num-negatives"]
    mine.main([*flags, "8", "--output", str(tmp_path / "mined.jsonl")])
    before, after = (read_pairs(tmp_path / f"{name}.jsonl") for name in ("rows", "mined"))
    assert [{**a, "negatives": 0} for a in after] == [{**b, "negatives": 0} for b in before]
    assert '"line"' not in (tmp_path / "mined.jsonl").read_text()     # it meant the other file
    everything = [*(r["positive"] for r in before), "replaced, yet a candidate", "T x"]
    for r in after:                                       # 9 documents, one of them the answer
        assert len(r["negatives"]) == 8 and r["positive"] not in r["negatives"]
        assert all(sample in everything for sample in r["negatives"])
    assert not [*tmp_path.glob("*work*")]
    mine.main([*flags, "99", "--output", str(tmp_path / "mined.jsonl"), "--keep-pieces"])
    out = capsys.readouterr().out
    assert "7 rows, 7 with 8 negatives, 0 with fewer, 0 of these with none; 56 neg" in out
    assert "7 rows, 0 with 99 negatives, 7 with fewer, 0 of these with none; 56 neg" in out
    assert len([*tmp_path.glob("mined.jsonl.work-*")]) == 1
    with pytest.raises(SystemExit, match="reads texts, and there is {'image'"):
        mine.main([*flags, "1", "--output", str(tmp_path / "x.jsonl"), "--cross-encoder", "judge"])
    with pytest.raises(SystemExit, match="is outside .*allow-any-path"):
        mine.main([*flags, "1", "--output", str(tmp_path / "deep" / "er" / "mined.jsonl")])
    mine.main([*flags, "1", "--output", str(tmp_path / "deep" / "mined.jsonl"), "--allow-any-path"])
    again = read_pairs(tmp_path / "deep" / "mined.jsonl", allow_any_path=True)
    assert [r["positive"] for r in again] == [r["positive"] for r in before]


def test_prompts_are_mined_with_written_and_read_again(folder, tmp_path):
    """A FlagEmbedding file of two tasks: the same words ask for other answers in each of them."""
    lines = [{"question": "slowly", "pos": TEXTS[:2], "neg": [TEXTS[5]], "prompt": "one: ",
              "pos_scores": [2, 1], "neg_scores": [0]},
             {"question": "slowly", "pos": [TEXTS[2]], "neg": TEXTS[6:8], "prompt": "two: "},
             {"question": "at once", "pos": [TEXTS[3]], "neg": [], "document_prompt": "doc: "}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    before = read_pairs(tmp_path / "rows.jsonl", columns={"query": "question"})
    mined = mine.main(["--model", folder, "--output", str(tmp_path / "mined.jsonl"), "--skip-top",
                       "0", "--num-negatives", "9", "--train-jsonl", str(tmp_path / "rows.jsonl"),
                       "--columns", "query=question"])
    after = read_pairs(tmp_path / "mined.jsonl")
    kept = [{name: row[name] for name in ("query", "positive")} for row in before]
    assert [{name: row[name] for name in ("query", "positive")} for row in after] == kept
    assert [row["negatives"] for row in after] == [row["negatives"] for row in mined]
    assert after[0]["query"] == {"text": "slowly", "prompt": "one: "}
    third = {"text": TEXTS[3], "prompt": "doc: "}
    everything = [*TEXTS[:3], third, *TEXTS[5:8]]
    for row, answers in zip(after, (TEXTS[:2], TEXTS[:2], [TEXTS[2]], [third])):
        assert sorted(map(str, row["negatives"])) == sorted(
            str(sample) for sample in everything if sample not in answers)
        assert "teacher_scores" not in row                # they were those of other negatives
    model = BiEncoder.from_pretrained(folder)
    others = [sample for sample in everything if sample not in TEXTS[:2]]
    scores = (model.encode([before[0]["query"]], "query") @ model.encode(others).T)[0]
    assert after[0]["negatives"][0] == others[scores.argmax()]


def test_images_inside_of_the_data_are_refused_before_anything_is_encoded(folder, tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    datasets.Dataset.from_dict({"query": ["q"], "positive": [image]}).to_parquet(
        tmp_path / "a.parquet")
    flags = ["--model", folder, "--output", str(tmp_path / "x.jsonl"), "--train-jsonl"]
    with pytest.raises(SystemExit, match="JSONL has no place for it"):
        mine.main([*flags, str(tmp_path / "a.parquet")])
    table = {"query": ["q", "r"], "positive": ["p", "s"], "raw": [b"\xff", b""],
             "day": [datetime.date(2024, 5, 17)] * 2}
    datasets.Dataset.from_dict(table).to_parquet(tmp_path / "a.parquet")
    mine.main([*flags, str(tmp_path / "a.parquet"), "--skip-top", "0"])
    rows = read_pairs(tmp_path / "x.jsonl")               # JSON has no dates and no bytes
    assert [(row["raw"], row["day"]) for row in rows] == [(None, "2024-05-17")] * 2


@pytest.mark.parametrize("flags, message", [
    (["--skip-top", "100"], "--skip-top between 0 and --depth"),
    (["--num-negatives", "0"], "at least 1"),
    (["--train-jsonl", "missing.jsonl"], "cannot read missing.jsonl"),
    (["--corpus", "CORPUS"], "line 2: .* with 'text'"), (["--model", "no/such"], "no such folder")])
def test_what_cannot_be_mined_ends_with_one_line(folder, tmp_path, capsys, flags, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("q", "p")))
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n{"txt": "b"}')
    flags = [str(tmp_path / "corpus.jsonl") if f == "CORPUS" else f for f in flags]
    with pytest.raises(SystemExit) as error:
        mine.main(["--model", folder, "--train-jsonl", str(tmp_path / "rows.jsonl"),
                   "--output", str(tmp_path / "out.jsonl"), *flags])
    assert re.search(message, str(error.value) + capsys.readouterr().err)
