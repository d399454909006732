"""extras/evaluate.py against numbers worked by hand, double loops, trec_eval and the train loop."""
import json
import math
import random

import pytest
import torch

import train
from data import read_pairs
from extras import evaluate
from losses import LogitScale
from model import BiEncoder, tiny_qwen3_vl
from supervised_losses import ranking_metrics
from tests.conftest import TEXTS


def metrics(scores, relevant, ks=(1, 2, 3, 5, 10), **options):
    """Metrics of given scores (N, M): one-hot queries pick a row of them."""
    q, d = torch.eye(len(scores)), torch.tensor(scores).float().T
    found = evaluate.metrics_of_ranks(*evaluate.ranks_of_answers(q, d, relevant, **options), ks)
    return {name: values.tolist() for name, values in found.items()}


def in_order(ranking, M=50):
    """Scores of M documents by which those of `ranking` come first, in this order."""
    return [float(M - ranking.index(i)) if i in ranking else -float(i) for i in range(M)]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"query": text.split()[-1] + str(i % 4), "positive": text, "negatives": TEXTS[-2:]}
            for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# --- Metrics --------------------------------------------------------------------------------------

def test_the_cases_worked_by_hand():
    one = metrics([in_order([0, 9, 8])], [{0: 1.0, 1: 1.0}])          # A, X, Y; B is far below
    assert one["ndcg@3"][0] == pytest.approx(0.613147, abs=1e-6)
    two = metrics([in_order([9, 0, 8, 1])], [{0: 1.0, 1: 1.0}])       # found at ranks 2 and 4
    assert two["ndcg@10"][0] == pytest.approx(0.650921, abs=1e-6)
    assert two["map@10"] == [(1 / 2 + 2 / 4) / 2] and two["map@3"] == [1 / 4]
    assert two["mrr@1"] == [0] and two["mrr@2"] == [1 / 2] and two["precision@5"] == [2 / 5]
    five = metrics([in_order([1, 0, 20, 30, 40])], [dict.fromkeys(range(5), 1.0)], range(1, 6))
    assert [five[f"recall@{k}"][0] for k in range(1, 6)] == [0.2, 0.4, 0.4, 0.4, 0.4]
    graded = metrics([in_order([5, 6])], [{5: 2.0, 6: 3.0}])
    assert graded["ndcg@10"][0] == pytest.approx((2 + 3 / math.log2(3)) / (3 + 2 / math.log2(3)))


def by_double_loop(scores, own, k):
    """The definitions at the top of evaluate.py on one list, worst order among equal scores."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], own.get(j, 0)))
    dcg = recall = mean_precision = mrr = 0
    for place, j in enumerate(order[:k], 1):
        if j in own:
            recall += 1
            mean_precision += recall / place
            mrr = mrr or 1 / place
            dcg += own[j] / math.log2(1 + place)
    ideal = sum(gain / math.log2(1 + place)
                for place, gain in enumerate(sorted(own.values(), reverse=True)[:k], 1))
    return {"recall": recall / len(own), "precision": recall / k, "mrr": mrr,
            "map": mean_precision / len(own), "ndcg": dcg / ideal}


@pytest.mark.parametrize("levels", [2, 5, 1000])           # many ties, some, hardly any
def test_every_metric_equals_a_double_loop(levels):
    rng = random.Random(levels)
    scores = [[float(rng.randrange(levels)) for _ in range(30)] for _ in range(40)]
    relevant = [{j: float(rng.randint(1, 3)) for j in rng.sample(range(30), rng.randint(1, 8))}
                for _ in scores]
    found = metrics(scores, relevant, (1, 3, 10, 50), scores_at_once=100)
    for n, (row, own) in enumerate(zip(scores, relevant)):
        for k in (1, 3, 10, 50):                           # 50: more than there are documents
            for name, value in by_double_loop(row, own, k).items():
                assert found[f"{name}@{k}"][n] == pytest.approx(value, abs=1e-12), (n, name, k)


@pytest.mark.parametrize("levels", [3, 1000])
def test_without_grades_values_equal_those_of_the_training_loop(levels):
    scores = torch.randint(levels, (30, 40), generator=torch.Generator().manual_seed(0)).float()
    columns = [[n % 40, (7 * n) % 40, 39] for n in range(30)]
    theirs = ranking_metrics(scores, columns, (1, 10), reduction="none")
    ours = metrics(scores.tolist(), [dict.fromkeys(own, 1.0) for own in columns])
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values.tolist(), abs=1e-6), name


@pytest.mark.parametrize("M", [1, 7, 13, 100, 4097])
def test_a_collapsed_model_finds_nothing(M):
    """All documents alike: each must come last of M, whatever the query and its column."""
    generator = torch.Generator().manual_seed(M)
    q, d = (torch.nn.functional.normalize(torch.randn(n, 64, generator=generator), dim=1)
            for n in (50, 1))
    d = d.expand(M, 64).contiguous()
    ranks, _ = evaluate.ranks_of_answers(q, d, [{n * M // 50: 1.0} for n in range(50)])
    assert ranks.flatten().tolist() == [M] * 50


def test_blocks_of_queries_are_bounded_and_change_nothing(monkeypatch):
    generator, sizes, scores = torch.Generator().manual_seed(0), [], evaluate.exact_scores
    q, d = (torch.randn(n, 8, generator=generator) for n in (23, 50))
    relevant = [{n: 1.0, 2 * n: 2.0} for n in range(23)]
    whole = evaluate.ranks_of_answers(q, d, relevant)
    monkeypatch.setattr(evaluate, "exact_scores", lambda *x: sizes.append(
        (s := scores(*x, part=7)).numel()) or s)
    for limit in (1, 120, 500):
        sizes.clear()
        pieces = evaluate.ranks_of_answers(q, d, relevant, limit)
        assert all(map(torch.equal, pieces, whole)) and max(sizes) <= max(50, limit)
    assert len(sizes) > 1


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="queries 0..0: scores are not finite"):
        metrics([[0.0, math.nan]], [{0: 1.0}])


# --- Files ----------------------------------------------------------------------------------------

def write_beir(folder, documents, queries, qrels, header="query-id\tcorpus-id\tscore\n"):
    for name, texts in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"_id": i, "title": "", "text": text}) + "\n" for i, text in texts.items()))
    (folder / "qrels.tsv").write_text(header + "".join(
        f"{q}\t{d}\t{gain}\n" for q, own in qrels.items() for d, gain in own.items()))
    return [str(folder / name) for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv")]


def random_qrels(rng, queries, documents):
    """Grades -1..3, some answers that are not in the corpus; every query has a positive one."""
    ids = [*documents, "elsewhere1", "elsewhere2"]
    return {q: {d: rng.randint(-1, 3) for d in rng.sample(ids, 6)} | {rng.choice([*documents]): 2}
            for q in queries}


MEASURES = {"recall": "recall", "precision": "P", "map": "map_cut", "ndcg": "ndcg_cut"}


def test_values_equal_trec_eval_on_graded_files(tmp_path):
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pip install pytrec_eval-terrier")
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    documents, queries = ({f"{x}{i}": f"text {x}{i}" for i in range(n)}
                          for x, n in (("d", 60), ("q", 25)))
    qrels = random_qrels(rng, queries, documents)
    read = evaluate.read_beir(*write_beir(tmp_path, documents, queries, qrels))
    assert read[0] == queries and read[1] == documents
    q, d = (torch.nn.functional.normalize(torch.randn(n, 16, generator=generator), dim=1)
            for n in (25, 60))
    ks = (1, 3, 10, 100)
    ours = evaluate.metrics_of_ranks(*evaluate.ranks_of_answers(q, d, read[2]), ks)
    run = {name: dict(zip(documents, row))
           for name, row in zip(queries, evaluate.exact_scores(q, d).tolist())}
    wanted = {f"{theirs}.{k}" for theirs in MEASURES.values() for k in ks}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, wanted | {"recip_rank"}).evaluate(run)
    for n, name in enumerate(queries):
        for metric, measure in MEASURES.items():
            for k in ks:
                assert ours[f"{metric}@{k}"][n].item() == pytest.approx(
                    theirs[name][f"{measure}_{k}"], abs=1e-9), (name, metric, k)
        assert ours["mrr@100"][n].item() == pytest.approx(theirs[name]["recip_rank"], abs=1e-9)


def test_both_formats_of_qrels_are_read_and_queries_without_answers_left_out(tmp_path, capsys):
    files = write_beir(tmp_path, {"d 1": "one", "d2": "two\u2028lines"}, {"a": "x", "b": "y"},
                       {"a": {"d 1": 0.5, "d2": 0}, "b": {"d2": 0}})
    queries, documents, relevant = evaluate.read_beir(*files)
    assert queries == {"a": "x"} and documents["d2"] == "two\u2028lines" and relevant == [{0: 0.5}]
    assert "1 of 2 queries have no answer" in capsys.readouterr().out
    (tmp_path / "qrels.tsv").write_text("b 0 d2 1\r\na 0 elsewhere 2\n\n")
    assert evaluate.read_beir(*files)[2] == [{1: 1.0}, {2: 2.0}]
    assert "1 answers are not in the corpus" in capsys.readouterr().out


@pytest.mark.parametrize("name, content, message", [
    ("qrels.tsv", "a\td\t1\na\td\n", "qrels.tsv, line 2: 'a\\\\td"),
    ("qrels.tsv", "a\td\t1\na\td\tnan\n", "line 2: .*gain nan is not finite"),
    ("qrels.tsv", "z\td\t1\n", "line 1: query 'z' is not in"),
    ("qrels.tsv", "a\td\t0\n", "no line has a gain above 0"),
    ("corpus.jsonl", '{"_id": "d", "text": "x"}\n{"_id": "d", "text": "y"}', "line 2: the _id 'd'"),
    ("corpus.jsonl", '\n{"_id": "d"}', "line 2: .*'_id' and 'text'"),
    ("corpus.jsonl", '["d"]', "line 1: .*'_id' and 'text'"),
    ("queries.jsonl", b'{"_id": "a", "text": "\xff"}', "line 1: not UTF-8")])
def test_unusable_files_are_named_with_the_line(tmp_path, name, content, message):
    files = write_beir(tmp_path, {"d": "one"}, {"a": "x"}, {"a": {"d": 1}})
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        evaluate.read_beir(*files)


# --- The program ----------------------------------------------------------------------------------

def test_on_rows_the_program_says_what_the_training_loop_says(models, jsonl, tmp_path, capsys):
    model = BiEncoder.from_pretrained(models[0])
    theirs = train.evaluate(model, [model, model], read_pairs(jsonl), LogitScale(), "cpu")
    numbers = evaluate.main(["--model", models[0], "--eval-jsonl", str(jsonl),
                             "--json", str(tmp_path / "out.json")])
    ours = numbers["models"][0]["metrics"][model.dim]
    for name in ("recall@1", "recall@10", "mrr@10", "ndcg@10"):
        assert ours[name] == pytest.approx(theirs[f"eval_{name}"], abs=1e-6), name
    assert 0 < ours["mrr@10"] < 1
    assert json.loads((tmp_path / "out.json").read_text())["models"][0]["metrics"]["64"] == ours
    assert f"ndcg@10 {ours['ndcg@10']:.4f}" in " ".join(capsys.readouterr().out.split())


def test_trec_eval_finds_the_same_numbers_in_the_written_run(models, tmp_path):
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pip install pytrec_eval-terrier")
    documents = {f"d{i}": text for i, text in enumerate(TEXTS)}
    queries = {f"q{i}": text.split()[-1] + str(i) for i, text in enumerate(TEXTS[:6])}
    qrels = random_qrels(random.Random(1), queries, documents)
    corpus, query_file, qrels_file = write_beir(tmp_path, documents, queries, qrels)
    numbers = evaluate.main(["--model", models[0], "--corpus", corpus, "--queries", query_file,
                             "--qrels", qrels_file, "--run", str(tmp_path / "run"), "--k", "3"])
    with open(tmp_path / "run") as file:
        run = pytrec_eval.parse_run(file)
    assert all(len(ranking) == 3 for ranking in run.values())
    wanted = {f"{measure}.3" for measure in MEASURES.values()}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, wanted).evaluate(run)
    for metric, measure in MEASURES.items():
        mean = sum(own[f"{measure}_3"] for own in theirs.values()) / len(queries)
        assert numbers["models"][0]["metrics"][64][f"{metric}@3"] == pytest.approx(mean, abs=1e-9)


def test_a_copy_of_the_answer_under_another_id_is_a_tie(models, tmp_path):
    documents = {"copy": TEXTS[0], **{f"d{i}": t * (1 + i % 7) for i, t in enumerate(TEXTS)}}
    files = write_beir(tmp_path, documents, {"q": TEXTS[0]}, {"q": {"d0": 1}})
    names = [x for pair in zip(("--corpus", "--queries", "--qrels"), files) for x in pair]
    numbers = evaluate.main(["--model", models[0], *names, "--k", "1", "2"])
    found = numbers["models"][0]["metrics"][64]
    assert found["recall@1"] == 0 and found["recall@2"] == 1


def test_copies_get_one_vector_though_other_batches_pad_them_otherwise(models):
    model, apart = BiEncoder.from_pretrained(models[0]), 0
    for text in TEXTS:
        samples = [text * 3, text, text, "x"]            # encoded as (text * 3, text), (text, "x")
        apart += not torch.equal(*model.encode(samples, batch_size=2)[1:3])
        assert torch.equal(*evaluate.encode_once(model, samples, "document", 2)[1:3])
    assert apart                                          # the danger is real


def test_columns_are_dims_and_equal_a_model_that_encodes_so_few_numbers(models, jsonl, capsys):
    numbers = evaluate.main(["--model", models[0], "--eval-jsonl", str(jsonl),
                             "--dims", "64", "8"])
    model = BiEncoder.from_pretrained(models[0])
    queries, documents, relevant = evaluate.read_rows(read_pairs(jsonl))
    q, d = (model.encode([*samples.values()], side, truncate_dim=8)
            for samples, side in ((queries, "query"), (documents, "document")))
    theirs = ranking_metrics(q @ d.T, [[*own] for own in relevant])
    assert numbers["models"][0]["metrics"][8]["mrr@10"] == pytest.approx(theirs["mrr@10"], abs=1e-6)
    assert numbers["models"][0]["metrics"][8] != numbers["models"][0]["metrics"][64]
    assert " 64 8 recall@1 " in " ".join(capsys.readouterr().out.split())


def test_two_models_are_compared_and_a_model_does_not_differ_from_itself(models, jsonl, capsys):
    flags = ["--model", models[0], "--eval-jsonl", str(jsonl), "--compare"]
    for name, value in evaluate.main([*flags, models[0]])["differences"][64].items():
        assert [*value.values()] == [0, 0, 0], name
    numbers = evaluate.main([*flags, models[1]])
    a, b = (model["metrics"][64] for model in numbers["models"])
    for name, value in numbers["differences"][64].items():
        assert value["mean"] == pytest.approx(b[name] - a[name])
        assert value["low"] <= value["mean"] <= value["high"]
    assert "B - A" in capsys.readouterr().out


def test_the_interval_is_that_of_normal_theory_for_many_queries():
    generator = torch.Generator().manual_seed(0)
    difference = torch.rand(2000, 2, generator=generator) - torch.tensor([0.5, 0.4])
    low, high = evaluate.bootstrap(difference)
    half = 1.96 * difference.std(dim=0) / 2000 ** 0.5
    torch.testing.assert_close(low.float(), difference.mean(dim=0) - half, atol=1e-3, rtol=0)
    torch.testing.assert_close(high.float(), difference.mean(dim=0) + half, atol=1e-3, rtol=0)


def test_a_query_is_encoded_with_its_own_prompt(models, tmp_path, capsys):
    """Two rows of the same words under two prompts, from a file with names of its own."""
    rows = [{"q": "slowly", "docs": [text], "prompt": f"find number {i}: "}
            for i, text in enumerate(TEXTS[:6])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = ["--columns", "query=q", "positive=docs", "query_prompt=prompt"]
    flags = ["--model", models[0], "--eval-jsonl", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit, match="--columns score=x fits nothing in .'q', 'docs'"):
        evaluate.main([*flags, *columns, "score=x"])
    numbers = evaluate.main([*flags, *columns])["models"][0]["metrics"][64]
    model = BiEncoder.from_pretrained(models[0])
    q = torch.cat([model.encode([{"text": "slowly", "prompt": row["prompt"]}], "query")
                   for row in rows])
    assert len({tuple(vector) for vector in q.tolist()}) == 6
    scores = q @ model.encode(TEXTS[:6]).T
    ranks = [(row >= row[i] - 1e-6).sum().item() for i, row in enumerate(scores)]
    assert numbers["mrr@10"] == pytest.approx(sum(1 / rank for rank in ranks) / 6)
    pages = evaluate.read_rows([{"query": "q", "positive": {"text": "p", "prompt": "x"}}], "image")
    assert pages[1] == {0: {"image": "page:p", "prompt": "x"}}


@pytest.mark.parametrize("flags, message", [
    (["--corpus", "c.jsonl"], "all of --corpus"), (["--k", "0"], "at least 1"),
    (["--eval-jsonl", "missing.jsonl"], "cannot read missing.jsonl"),
    (["--dims", "4000"], "vectors of 64 numbers"), (["--model", "no/such"], "no/such: no such")])
def test_what_cannot_be_evaluated_ends_with_one_line(models, jsonl, capsys, flags, message):
    base = [] if "--corpus" in flags else ["--eval-jsonl", str(jsonl)]
    with pytest.raises(SystemExit) as error:
        evaluate.main(["--model", models[0], *base, *flags])
    assert message in str(error.value) + capsys.readouterr().err


def test_a_model_with_a_vector_for_each_token_is_refused_by_name(tmp_path):
    model = BiEncoder(*tiny_qwen3_vl(hidden=32, layers=1, heads=2, vocab_size=300),
                      pooling="tokens")
    model.save_pretrained(tmp_path / "tokens")
    with pytest.raises(SystemExit, match="tokens has a vector for each token"):
        evaluate.main(["--model", str(tmp_path / "tokens"), "--offline-data", "shapes"])
