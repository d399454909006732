"""Every --loss from the command line: chunked = plain, two processes = one, and clear refusals."""
import contextlib
import functools
import io
import json
import math
import random
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import batches
import flags
import losses as core
import objectives
import supervised_losses as s
import train
from model import BiEncoder, tiny_qwen3_vl
from tests.processes import run

WORDS = "bee sun moon river stone leaf road wind fire cat dog owl".split()
LABELLED = [name for name, fields in flags.LOSSES.items() if fields == ("label",)]
DIM, TOLERANCE = 32, 1e-6                # what the log rounds to float32 bounds the latter


def make_rows(n=16, seed=0):
    """Rows with every field, so that each loss finds its own."""
    rng = random.Random(seed)
    text = lambda words, mark: " ".join(rng.choice(WORDS) for _ in range(words)) + f" {mark}"
    return [{"query": text(rng.randrange(3, 9), i), "positive": text(4, f"p{i}"),
             "negatives": [text(5, f"n{i}"), text(3, f"m{i}")], "score": rng.uniform(-1, 1),
             "label": i % 2, "teacher_scores": [rng.uniform(-3, 5) for _ in range(3)],
             "teacher_vector": [rng.gauss(0, 1) for _ in range(DIM)]} for i in range(n)]


def small_model(args, rows):
    """Stands for train.build_model: the same architecture, a fraction of its time, in float64."""
    backbone, processor = tiny_qwen3_vl(WORDS, vocab_size=300, hidden=DIM, layers=1, seed=3)
    return BiEncoder(backbone.double(), processor, max_length=64,
                     pooling="tokens" if args.multi_vector else None)


def parameters_in_float64(*args, make=objectives.loss_parameters):
    """Stands for objectives.loss_parameters."""
    return make(*args).double()


@functools.cache
def folder():
    """A file of rows and a guide model, made once."""
    path = Path(tempfile.mkdtemp())
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, make_rows())))
    small_model(SimpleNamespace(multi_vector=False), None).save_pretrained(path / "guide")
    return path


def flags_of(name, where=None):
    """What a name needs on its command line, beside its data."""
    where = where or folder()
    fields = flags.LOSSES[name]
    return ["--train-jsonl", str(where / "rows.jsonl"), "--loss", name,
            *(["--num-hard-negatives", "2"] if "negatives" in fields else []),
            *(["--guide-model", str(where / "guide")] if name == "gist" else [])]


VARIANTS = {"directions": ["--directions", *flags.DIRECTIONS, "--num-hard-negatives", "1"],
            "per_direction": ["--partition-mode", "per_direction", "--label-smoothing", "0.1",
                              "--directions", "query_to_doc", "doc_to_query"],
            "hard_tiles": ["--loss-tile", "3", "--hardness-mode", "in_batch_negatives",
                           "--hardness-strength", "9", "--num-hard-negatives", "2"],
            "matryoshka": ["--matryoshka-dims", "32", "8", "--matryoshka-weights", "1", "0.5"],
            "multi_vector": ["--multi-vector", "--matryoshka-dims", "16"],
            "query_side": ["--mode", "query-side-tune"]}
CASES = [*objectives.OBJECTIVES, *VARIANTS]


def go(argv, output, steps=2):
    """train.main in a new folder -> (losses and gradient norms by step, weights)."""
    handlers = [signal.getsignal(n) for n in (2, 15)]
    with (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
          mock.patch("train.build_model", small_model),
          mock.patch("objectives.loss_parameters", parameters_in_float64)):
        status = train.main([*argv, "--warmup-steps", "0", "--lr-schedule", "constant", "--lr",
                             "1e-3", "--output-dir", str(output), "--max-steps", str(steps)])
    [signal.signal(n, handler) for n, handler in zip((2, 15), handlers)]
    assert status == 0
    log = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return ([(row["loss"], row["grad_norm"]) for row in log if "loss" in row],
            load_file(output / f"checkpoint-{steps}/weights.safetensors"), log)


def argv_of(case, where=None):
    name = case if case in objectives.OBJECTIVES else "info_nce"
    return flags_of(name, where) + VARIANTS.get(case, [])


@functools.cache
def plain(case):
    """One process, the whole batch of 8 at once."""
    return go([*argv_of(case), "--batch-size", "8", "--grad-cache-chunk", "0"],
              Path(tempfile.mkdtemp()) / "run")


def start(case):
    """The weights before the first step, by the names of a checkpoint."""
    args = flags.parse_args(argv_of(case))
    torch.manual_seed(args.seed)
    model = small_model(args, None)
    scale = parameters_in_float64(args, model, make_rows())
    everything = torch.nn.ModuleDict({"model": model, "loss": scale})
    return {name: p.detach() for name, p in everything.named_parameters() if p.requires_grad}


def assert_same_run(got, expected, case):
    """Loss and gradient norm of both steps, and where two steps of AdamW went, in float64.

    AdamW divides by the root of the gradient's square: numbers whose gradient is rounding noise
    move by a whole step in a random direction. So the movement is compared as one vector.
    """
    for a, b in zip(got[0], expected[0], strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)
    before = start(case)
    assert got[1].keys() == expected[1].keys() == before.keys()
    difference, moved = (torch.cat([(a[name] - b[name]).flatten() for name in before]).norm()
                         for a, b in ((got[1], expected[1]), (expected[1], before)))
    assert moved > 0 and difference < TOLERANCE * moved, f"{difference} of {moved}"


# --- The same run, however it is split ------------------------------------------------------------

@pytest.mark.parametrize("case", CASES)
def test_two_steps_in_chunks_of_two_equal_two_plain_ones(case, tmp_path):
    got = go([*argv_of(case), "--batch-size", "8", "--grad-cache-chunk", "2"], tmp_path / "run")
    assert_same_run(got, plain(case), case)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(case, tmp_path):
    argv = [*argv_of(case), "--batch-size", "4", "--grad-cache-chunk", "3"]
    got = run(2, go, argv, tmp_path / "run")
    assert_same_run(got[0], plain(case), case)
    assert all(torch.equal(got[0][1][name], p) for name, p in got[1][1].items())


def test_a_tiled_loss_and_a_whole_one_train_alike(tmp_path):
    untiled = [flag for flag in argv_of("hard_tiles") if flag not in ("--loss-tile", "3")]
    got = go([*untiled, "--batch-size", "8"], tmp_path / "run")
    assert_same_run(got, plain("hard_tiles"), "hard_tiles")


# --- The number itself ----------------------------------------------------------------------------

def direct(name, q, d, rows, x):
    """The loss of a batch, from the rows themselves. q (N, D), d: positives first, then negatives
    of each row; for TSDAE and the frozen guide, what x brings."""
    of = lambda field: torch.tensor([row[field] for row in rows])
    N, K = len(q), len(d) // len(q)
    p, scale = torch.arange(N) * K, x.scale
    if name in LABELLED:
        margin = {"margin": None} if "soft_margin" in name else {}
        return getattr(s, name.replace("_soft_margin", ""))(q, of("label"), **margin)
    pair = {"cosent": "score", "angle": "score", "cosine_regression": "score",
            "contrastive": "label", "online_contrastive": "label"}
    if name in pair:
        return getattr(s, name)(q, d, of(pair[name]))
    teacher = of("teacher_scores").flatten()
    return {
        "info_nce": lambda: F.cross_entropy(q @ d.T * scale.log_scale.exp(), p),
        "clip": lambda: core.clip_loss(q, d, scale),
        "simcse": lambda: F.cross_entropy(q @ d.T * scale.log_scale.exp(), p),
        "siglip": lambda: s.siglip(q, d, scale, p),
        "gist": lambda: s.gist(q, d, *x.guide, scale, p),
        "mega_batch_margin": lambda: s.mega_batch_margin(q, d),
        "triplet": lambda: s.triplet(*(x.repeat_interleave(K - 1, 0) for x in (q, d[p])),
                                     d.view(N, K, -1)[:, 1:].flatten(0, 1)),
        "margin_mse": lambda: s.margin_mse(q * scale.log_scale.exp(), d, teacher, p),
        "distill_kl": lambda: s.distill_kl(q * scale.log_scale.exp(), d, teacher, p),
        "embedding_distillation": lambda: F.mse_loss(q, of("teacher_vector")),
        "softmax_classification": lambda: F.cross_entropy(
            scale.head(torch.cat([q, d, (q - d).abs()], 1)), of("label")),
        "contrastive_tension": lambda: -torch.stack([
            F.logsigmoid((1 if t == 0 else -1) * scale.log_scale.exp() * q[i] @ d[(i + t) % N])
            for i in range(N) for t in range(8)]).mean(),
        "tsdae": lambda: torch.cat([F.cross_entropy(
            scale.decoder(q[i:i + 1], ids[None])[0] @ scale.decoder.words.weight.T, ids,
            reduction="none") for i, ids in enumerate(x.originals)]).mean(),
    }[name]()


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_the_loss_of_a_batch_is_the_direct_call(name):
    args, rows = flags.parse_args(argv_of(name)), make_rows()
    model = small_model(args, rows)
    scale = objectives.loss_parameters(args, model, rows)
    guide = model if name == "gist" else None
    batch = batches.Batches(objectives.prepare_rows(args, rows), model.preprocess, 10,
                            num_hard_negatives=args.num_hard_negatives,
                            **objectives.batch_options(args, guide))[0]
    torch.manual_seed(1)
    reps = [F.normalize(torch.randn(len(tower), DIM), dim=1, p=2)
            for tower in objectives.towers(batch)]
    if args.num_hard_negatives:          # negatives come in the order drawn: as in the file here
        assert batch["document_ids"].tolist() == [batches.document_id(text) for i in batch["rows"]
                                                  for text in batches.samples_of(rows[i])]
    loss, metrics = objectives.batch_loss(batch, scale, args, torch.device("cpu"))(*reps)
    x = SimpleNamespace(scale=scale, guide=reps[2:], originals=[
        f["input_ids"] for f in batch.get("originals", ())])
    expected = direct(name, reps[0], reps[1] if len(reps) > 1 else reps[0],
                      [rows[i] for i in batch["rows"]], x)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() > 0
    assert ("accuracy" in metrics) == (name in objectives.RANKED)
    if metrics:
        best = (reps[0] @ reps[1].T).argmax(dim=1) == batch["positives"]
        assert metrics["accuracy"].item() == pytest.approx(best.float().mean().item())


def test_late_interaction_sums_each_query_tokens_best_document_token():
    args = flags.parse_args([*argv_of("info_nce"), "--multi-vector"])
    batch = batches.Batches(make_rows(), lambda sample, side: sample, 5)[0]
    torch.manual_seed(0)
    q, d = (F.normalize(torch.randn(5, tokens, 8), dim=2) for tokens in (3, 4))
    q[1, 2:], d[0, 1:] = 0, 0                                       # shorter ones end in zeros
    scale = core.LogitScale()
    loss, metrics = objectives.batch_loss(batch, scale, args, torch.device("cpu"))(q, d)
    real = lambda x: x[(x != 0).any(dim=1)]
    scores = torch.tensor([[sum(max((t @ u).item() for u in real(b)) for t in real(a)) for b in d]
                           for a in q])
    expected = F.cross_entropy(scores / 0.07, torch.arange(5))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["accuracy"] == (scores.argmax(1) == torch.arange(5)).float().mean()


def test_known_answers_of_other_rows_are_no_negatives():
    rows = make_rows(6)
    for row in rows[1:3]:
        row["query"] = rows[0]["query"]                             # three answers to one query
    batch = batches.Batches(rows, lambda sample, side: sample, 6)[0]
    args, (q, d) = flags.parse_args(argv_of("info_nce")), F.normalize(torch.randn(2, 6, 8), dim=2)
    x = objectives.facts(batch, None, args, torch.device("cpu"))
    everyone = torch.arange(6)
    same = torch.tensor([[rows[i]["query"] == rows[j]["query"] for j in batch["rows"]]
                         for i in batch["rows"]])
    assert torch.equal(x.exclude(everyone, everyone), same) and same.sum() == 3 * 3 + 3
    loss, _ = objectives.batch_loss(batch, core.LogitScale(), args, torch.device("cpu"))(q, d)
    logits = (q @ d.T / 0.07).masked_fill(same & ~torch.eye(6).bool(), -math.inf)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, everyone).item(), rel=1e-5)


# --- What a loss learns ---------------------------------------------------------------------------

@pytest.mark.parametrize("name, learned", [
    ("siglip", ["log_scale", "bias"]), ("softmax_classification", ["head"]),
    ("tsdae", ["decoder"]), ("contrastive_tension", ["log_scale", "copy"])])
def test_what_the_loss_learns_is_trained_saved_and_restored_bit_for_bit(name, learned, tmp_path):
    argv = [*argv_of(name), "--batch-size", "8"]
    half = go([*argv, "--save-steps", "1", "--keep-checkpoints", "9"], tmp_path / "run", steps=3)
    resumed = go([*argv, "--resume", str(tmp_path / "run/checkpoint-1")], tmp_path / "other", 3)
    assert resumed[0] == half[0][1:]
    assert all(torch.equal(resumed[1][key], value) for key, value in half[1].items())
    before, own = start(name), {key.split(".")[1] for key in half[1] if key.startswith("loss.")}
    assert own == set(learned)
    for part in learned:
        keys = [key for key in before if key.startswith(f"loss.{part}")]
        assert any(not torch.equal(half[1][key], before[key]) for key in keys)


def test_a_loss_without_a_temperature_leaves_it_alone(tmp_path):
    _, weights, log = plain("cosent")
    assert not any(key.startswith("loss.") for key in weights)
    assert all(row["logit_scale"] == pytest.approx(1 / 0.07) for row in log)
    assert not any("accuracy" in row for row in log)


# --- Refusals -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [n for n, fields in flags.LOSSES.items() if fields])
def test_a_missing_field_is_named_with_loss_line_and_remedy(name, tmp_path):
    for field in flags.LOSSES[name]:
        rows = make_rows(4)
        del rows[2][field]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        argv = [*flags_of(name), "--train-jsonl", str(tmp_path / "rows.jsonl")]
        with pytest.raises(ValueError) as caught:
            train.main([*argv, "--output-dir", str(tmp_path / "run")])
        message = str(caught.value)
        assert "line 3" in message and f"'{field}'" in message
        assert field == "positive" or f"--loss {name}" in message


@pytest.mark.parametrize("name, field, value", [
    ("cosent", "score", math.nan), ("angle", "score", "0.5"), ("cosine_regression", "score", 4.5),
    ("contrastive", "label", 2), ("batch_all_triplet", "label", 1.5), ("triplet", "negatives", []),
    ("softmax_classification", "label", True), ("margin_mse", "teacher_scores", [1.0, 2.0]),
    ("distill_kl", "teacher_scores", [1.0, math.inf, 2.0]),
    ("embedding_distillation", "teacher_vector", [1.0] * 5),
    ("embedding_distillation", "teacher_vector", [math.nan] * DIM)])
def test_a_useless_value_is_named_with_loss_and_line(name, field, value, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build_model", small_model)
    rows = make_rows(8)
    rows[4][field] = value
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="line 5") as caught:
        train.main([*flags_of(name), "--train-jsonl", str(tmp_path / "rows.jsonl"),
                    "--output-dir", str(tmp_path / "run")])
    assert field in str(caught.value) or str(value) in str(caught.value)


@pytest.mark.parametrize("name, extra, words", [
    ("cosent", ["--loss-tile", "4"], "--loss-tile"), ("clip", ["--label-smoothing", "0.1"], "clip"),
    ("siglip", ["--directions", "query_to_doc", "doc_to_query"], "--directions"),
    ("info_nce", ["--hardness-strength", "9"], "--hardness-mode"),
    ("info_nce", ["--partition-mode", "per_direction", "--directions", *flags.DIRECTIONS], "joint"),
    ("cosent", ["--num-hard-negatives", "1"], "--num-hard-negatives"),
    ("info_nce", ["--guide-model", "somewhere"], "gist"), ("clip", ["--multi-vector"], "info_nce"),
    ("tsdae", ["--mode", "query-side-tune"], "query-side-tune"),
    ("softmax_classification", ["--matryoshka-dims", "8"], "head"),
    ("info_nce", ["--matryoshka-dims", "8", "33"], "32 numbers"),
    ("info_nce", ["--matryoshka-dims", "0"], "32 numbers"),
    ("info_nce", ["--matryoshka-dims", "8", "--matryoshka-weights", "1", "2"], "for each"),
    ("batch_hard_triplet", ["--batch-size", "3"], "even"),
    ("batch_hard_triplet", ["--no-duplicates"], "--no-duplicates")])
def test_flags_without_a_meaning_together_are_refused(name, extra, words, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build_model", small_model)
    with pytest.raises(ValueError, match=words):
        train.main([*flags_of(name), *extra, "--output-dir", str(tmp_path / "run")])


@pytest.mark.parametrize("missing", ["--num-hard-negatives", "--guide-model"])
def test_a_loss_that_needs_a_flag_asks_for_it(missing, tmp_path):
    name = "gist" if missing == "--guide-model" else "triplet"
    argv = flags_of(name)
    del argv[argv.index(missing):][:2], argv[argv.index(missing):argv.index(missing) + 2]
    with pytest.raises(ValueError, match=missing):
        train.main([*argv, "--output-dir", str(tmp_path / "run")])


def test_the_built_in_pairs_have_no_scores_and_the_error_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="'score', which --loss cosent needs: give --train-jsonl"):
        train.main(["--loss", "cosent", "--offline-data", "shapes", "--output-dir",
                    str(tmp_path / "run")])


def test_the_command_line_knows_every_loss_and_the_losses_know_the_command_line():
    assert tuple(flags.LOSSES) == tuple(objectives.OBJECTIVES)
    assert set(flags.LOSSES) == core.LOSSES.keys() | s.LOSSES.keys()
    argv = flags.parse_args([])
    assert all(getattr(argv, name) == default for name, default in flags.OPTIONS.items())


# --- Held-out rows --------------------------------------------------------------------------------

@pytest.mark.parametrize("name, metric", [
    ("info_nce", "eval_ndcg@10"), ("simcse", "eval_recall@1"), ("cosent", "eval_spearman"),
    ("contrastive", "eval_pearson"), ("softmax_classification", "eval_accuracy"),
    ("batch_all_triplet", "eval_class_recall@1"), ("embedding_distillation", "eval_loss")])
def test_held_out_rows_are_judged_by_what_they_say(name, metric, tmp_path):
    argv = [*argv_of(name), "--eval-jsonl", str(folder() / "rows.jsonl"), "--batch-size", "4"]
    alone = go(argv, tmp_path / "one", steps=1)[2]
    assert metric in alone[0] and metric in alone[-1] and math.isfinite(alone[0][metric])
    both = run(2, go, argv, tmp_path / "two", 1)[0][2]
    assert both[0][metric] == pytest.approx(alone[0][metric], rel=1e-5)


def test_correlations_equal_scipys_with_ties():
    stats = pytest.importorskip("scipy.stats", reason="compared with scipy")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(50, generator=generator)
    b = (a + torch.randn(50, generator=generator)).round()          # many ties
    assert objectives.correlation(a, b) == pytest.approx(stats.pearsonr(a, b)[0], abs=1e-6)
    ranks = objectives.correlation(objectives.ranks(a), objectives.ranks(b))
    assert ranks == pytest.approx(stats.spearmanr(a, b)[0], abs=1e-9)
    assert objectives.correlation(a, torch.ones(50)) == 0


def test_class_recall_looks_at_the_nearest_other_text():
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [-1, 0]])
    rows = [{"query": str(i), "label": label} for i, label in enumerate((0, 0, 1, 0, 1))]
    args = flags.parse_args(["--loss", "batch_all_triplet"])
    got = objectives.evaluate_rows(args, lambda side, samples: vectors, rows, None)
    assert got == {"eval_class_recall@1": pytest.approx(3 / 5)}


# --- A vector for each token ----------------------------------------------------------------------

def test_token_vectors_do_not_depend_on_the_batch_and_survive_saving(tmp_path):
    model = small_model(SimpleNamespace(multi_vector=True), None)
    texts = ["bee", "sun moon river stone leaf", "a"]
    together = model.encode(texts, batch_size=3, progress=False)
    assert together.dim() == 3 and together.shape[2] == DIM
    for text, vectors in zip(texts, together):
        alone, = model.encode([text], progress=False)
        assert torch.allclose(vectors[:len(alone)], alone, atol=1e-5)
        assert not vectors[len(alone):].any()
        assert torch.allclose(alone.norm(dim=1), torch.ones(len(alone)))
    model.save_pretrained(tmp_path)
    again = BiEncoder.from_pretrained(tmp_path)
    assert torch.allclose(again.encode(texts, batch_size=3, progress=False), together, atol=1e-6)
