"""The loop: what it logs, what it computes, and that neither depends on how the batch is cut."""
import json
import math
from pathlib import Path

import pytest
import torch

import data
import train
from losses import LogitScale
from model import BiEncoder
from objectives import batch_loss
from tests.runs import (  # noqa: F401
    WORDS, difference, equal, fit, log, losses, newest, pairs, small_model_in, steps, tiny,
    use_float64, weights, write_rows)

pytestmark = pytest.mark.usefixtures("tiny")
STEP_KEYS = {"step", "epoch", "loss", "accuracy", "lr", "grad_norm", "logit_scale", "replay_error",
             "pairs_per_second", "peak_memory_mb", "skipped"}
EVAL_KEYS = {"step", "eval_loss", "eval_recall@1", "eval_recall@10", "eval_mrr@10", "eval_ndcg@10"}


def rows_with_repeats():
    """Some documents occur twice, some queries have several answers, some rows no negative."""
    rows = pairs(20)
    rows[3]["positive"] = rows[4]["positive"]                   # one document, two queries
    rows[6]["query"] = rows[7]["query"] = rows[8]["query"]      # one query, three answers
    rows[9]["negatives"] = [rows[10]["positive"]]               # another row's answer
    rows[11]["negatives"] = [rows[8]["positive"]]
    rows[12]["negatives"] = []
    return rows


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """One run on such rows that keeps a checkpoint of every step, and the batches it used."""
    with pytest.MonkeyPatch.context() as patch:
        folder, batches, make = tmp_path_factory.mktemp("run"), [], batch_loss
        with small_model_in(folder, patch):
            patch.setattr("step.batch_loss",
                          lambda batch, *rest: batches.append(batch["rows"]) or make(batch, *rest))
            write_rows("pairs.jsonl", rows_with_repeats())
            status = fit("--eval-jsonl", "pairs.jsonl", "--eval-steps", 2, "--save-steps", 1,
                         "--keep-checkpoints", 9, "--num-hard-negatives", 2, "--batch-size", 6,
                         "--warmup-steps", 1, "--lr", 3e-3)
            yield {"status": status, "batches": batches, "log": log(clock=True),
                   "folder": folder / "out", "rows": rows_with_repeats()}


def test_a_run_logs_every_step_and_evaluation_with_all_keys(a_run):
    kinds = [("eval" if "eval_loss" in row else "step", row["step"]) for row in a_run["log"]]
    assert a_run["status"] == 0
    assert kinds == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4),
                     ("eval", 4), ("step", 5), ("step", 6), ("eval", 6)]
    for row in a_run["log"]:
        assert row.keys() == (STEP_KEYS if "loss" in row else EVAL_KEYS)
        assert all(math.isfinite(value) for value in row.values())
    rows = [row for row in a_run["log"] if "loss" in row]
    assert [row["epoch"] for row in rows] == [step / 3 for step in range(1, 7)]     # 20 // 6 steps
    assert [row["lr"] for row in rows][:2] == [0, 3e-3]
    assert all(row["replay_error"] == 0 and row["skipped"] is False for row in rows)
    assert all(row["pairs_per_second"] > 0 and row["peak_memory_mb"] > 50 for row in rows)
    assert (a_run["folder"] / "final/model.safetensors").exists()


def encode_alone(model, texts, side):
    """{text: vector}, each text in a forward of its own."""
    with torch.no_grad():
        return {text: model([model.preprocess(text, side)])[0].double() for text in texts}


def cross_entropy(scores, own):
    return math.log(sum(map(math.exp, scores.values()))) - scores[own]


def test_a_logged_loss_is_that_of_a_double_loop_over_the_rows_texts(a_run):
    """Each step again: the model saved before it, one text at a time, candidates by their text."""
    rows, answers = a_run["rows"], {}
    for row in rows:
        answers.setdefault(row["query"], set()).add(row["positive"])
    logged = [row for row in a_run["log"] if "loss" in row]
    for step in range(2, 7):
        model = BiEncoder.from_pretrained(a_run["folder"] / f"checkpoint-{step - 1}/model",
                                          max_length=96).eval()
        scale = weights(a_run["folder"], step - 1)["loss.log_scale"].exp().item()
        batch = [rows[i] for i in a_run["batches"][step - 1]]
        q = encode_alone(model, [row["query"] for row in batch], "query")
        documents = [text for row in batch for text in (row["positive"], *row["negatives"])]
        d, loss, hits = encode_alone(model, documents, "document"), 0, 0
        for row in batch:
            own, total = scale * (q[row["query"]] @ d[row["positive"]]).item(), 0
            others = [scale * (q[row["query"]] @ d[text]).item() for text in documents
                      if text not in answers[row["query"]]]             # a text twice counts twice
            total = math.exp(own) + sum(map(math.exp, others))
            loss += math.log(total) - own
            hits += all(own > other for other in others)
        assert logged[step - 1]["loss"] == pytest.approx(loss / 6, abs=2e-5), step
        assert logged[step - 1]["accuracy"] == pytest.approx(hits / 6), step
        assert logged[step - 1]["logit_scale"] == pytest.approx(scale)


def test_an_evaluation_is_that_of_a_double_loop_over_the_whole_pool(a_run):
    rows, answers = a_run["rows"], {}
    for row in rows:
        answers.setdefault(row["query"], set()).add(row["positive"])
    pool = {text for row in rows for text in (row["positive"], *row["negatives"])}
    for step in (2, 6):
        model = BiEncoder.from_pretrained(a_run["folder"] / f"checkpoint-{step}/model",
                                          max_length=96).eval()
        scale = weights(a_run["folder"], step)["loss.log_scale"].exp().item()
        q = encode_alone(model, [row["query"] for row in rows], "query")
        d = encode_alone(model, pool, "document")
        totals = dict.fromkeys(EVAL_KEYS - {"step"}, 0)
        for row in rows:
            right = answers[row["query"]]
            scores = {text: scale * (q[row["query"]] @ d[text]).item() for text in pool}
            ranking = sorted(pool, key=lambda text: -scores[text])
            ranks = sorted(1 + ranking.index(text) for text in right)
            gains = [1 / math.log2(1 + rank) for rank in ranks if rank <= 10]
            ideal = sum(1 / math.log2(2 + i) for i in range(len(right)))
            totals["eval_recall@1"] += sum(rank <= 1 for rank in ranks) / len(right) / len(rows)
            totals["eval_recall@10"] += sum(rank <= 10 for rank in ranks) / len(right) / len(rows)
            totals["eval_mrr@10"] += (1 / ranks[0] if ranks[0] <= 10 else 0) / len(rows)
            totals["eval_ndcg@10"] += sum(gains) / ideal / len(rows)
            for other in right - {row["positive"]}:             # neither positive nor negative
                del scores[other]
            totals["eval_loss"] += cross_entropy(scores, row["positive"]) / len(rows)
        logged = next(row for row in a_run["log"] if row["step"] == step and "eval_loss" in row)
        assert {k: logged[k] for k in totals} == pytest.approx(totals, abs=2e-5)
        assert 0 < totals["eval_recall@10"] < 1                 # or the comparison would be weak


# --- How the batch is cut changes nothing --------------------------------------------------------

CUTS = {"one by one": ["--grad-cache-chunk", 1], "not dividing": ["--grad-cache-chunk", 3],
        "larger than the batch": ["--grad-cache-chunk", 1000], "by tokens": ["--chunk-tokens", 200],
        "every graph twice": ["--keep-graphs", 0], "five graphs kept": ["--keep-graphs", 5],
        "checkpointing": ["--gradient-checkpointing"], "in workers": ["--num-workers", 1]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain full-batch step in double precision, on rows with repeats."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("plain")
        with small_model_in(folder, patch):
            use_float64(patch)
            write_rows("pairs.jsonl", rows_with_repeats())
            fit("--grad-cache-chunk", 0, "--num-hard-negatives", 2, "--warmup-steps", 0)
            yield losses(), weights()


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_is_the_same_however_its_batches_are_cut(cut, plain, monkeypatch):
    use_float64(monkeypatch)
    write_rows("pairs.jsonl", rows_with_repeats())
    encoded, encode = [], BiEncoder.forward                     # per call: samples, padded tokens

    def watch(self, features, *rest):
        encoded.append((len(features), len(features) * max(map(self.cost, features))))
        return encode(self, features, *rest)
    monkeypatch.setattr(BiEncoder, "forward", watch)
    assert fit(*CUTS[cut], "--num-hard-negatives", 2, "--warmup-steps", 0) == 0
    assert losses() == pytest.approx(plain[0], abs=1e-6) and len(losses()) == 6
    assert difference(weights(), plain[1]) < 1e-9
    limit = {"one by one": 1, "not dividing": 3, "larger than the batch": 12, "by tokens": 3}
    assert max(n for n, _ in encoded) == limit.get(cut, 2)      # and it was cut as asked
    assert cut != "by tokens" or max(tokens for n, tokens in encoded if n > 1) <= 200


def test_dropout_is_repeated_exactly_within_the_loop():
    """Kept graphs need no repetition: a run that repeats every chunk must equal one that none."""
    flags = ("--lora-r", 2, "--max-steps", 3, "--warmup-steps", 0)
    for keep, out in ((0, "replayed"), (99, "kept")):
        fit(*flags, "--lora-dropout", 0.4, "--keep-graphs", keep, out=out)
    assert losses("replayed") == pytest.approx(losses("kept"), abs=1e-6)
    assert difference(weights("replayed"), weights("kept")) < 1e-6
    fit(*flags, "--lora-dropout", 0, out="without")             # and dropout was on at all
    assert max(abs(a - b) for a, b in zip(losses("kept"), losses("without"))) > 1e-3


# --- What one optimizer step is made of ----------------------------------------------------------

@pytest.fixture
def gradients(monkeypatch):
    """The gradients that reach `update`, one dict per optimizer step, and what was called."""
    seen, update = [], train.update

    def watch(everything, *rest):
        seen.append({name: p.grad.clone() for name, p in everything.named_parameters()
                     if p.grad is not None})
        return update(everything, *rest)
    monkeypatch.setattr(train, "update", watch)
    return seen


def test_accumulation_is_the_mean_over_the_window_and_a_short_last_one_divides_by_its_length(
        monkeypatch, gradients):
    """With rate 0 the weights stand still, so single batches give the terms of each mean."""
    use_float64(monkeypatch)
    clamped = []
    monkeypatch.setattr(LogitScale, "clamp_", lambda self: clamped.append(1))
    write_rows("pairs.jsonl", pairs(20))
    fit("--lr", 0, "--epochs", 1, out="single")                                 # 5 batches
    single, gradients[:] = list(gradients), []
    fit("--lr", 0, "--epochs", 1, "--grad-accum-steps", 2, out="windows")       # 2 + 2 + 1
    assert (len(single), len(gradients), len(clamped)) == (5, 3, 8)
    for found, parts in zip(gradients, ([0, 1], [2, 3], [4])):
        mean = {n: sum(single[i][n] for i in parts) / len(parts) for n in found}
        assert difference(found, mean) < 1e-12
    a, b = losses("single"), losses("windows")
    assert b == pytest.approx([(a[0] + a[1]) / 2, (a[2] + a[3]) / 2, a[4]], abs=1e-6)
    assert [row["epoch"] for row in steps("windows")] == [0.4, 0.8, 1.0]
    for row, found in zip(steps("windows"), gradients):
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in found.values()))
        assert row["grad_norm"] == pytest.approx(norm)


def test_the_schedule_counts_optimizer_steps_and_not_batches():
    fit("--grad-accum-steps", 3, "--max-steps", 5, "--warmup-steps", 2, "--lr", 1e-3)
    expected = [0, 5e-4, 1e-3, 1e-3 * (1 + math.cos(math.pi / 3)) / 2,
                1e-3 * (1 + math.cos(2 * math.pi / 3)) / 2]
    assert [row["lr"] for row in steps()] == pytest.approx(expected)


def two_weights(gradient, log_scale=0.0):
    """A model of the two numbers (0, 0) with a gradient, a temperature, and plain SGD."""
    model, scale = torch.nn.Linear(2, 1, bias=False), LogitScale()
    model.weight.data.zero_()
    model.weight.grad = torch.tensor([gradient])
    scale.log_scale.data.fill_(log_scale)
    scale.log_scale.grad = torch.tensor(0.0)
    everything = torch.nn.ModuleDict({"model": model, "loss": scale})
    return everything, torch.optim.SGD(everything.parameters(), lr=0)


def update(everything, sgd, max_grad_norm):
    no_scaler = torch.amp.GradScaler("cpu", enabled=False)
    return train.update(everything, sgd, everything["loss"], no_scaler, 1.0, max_grad_norm,
                        torch.zeros(3))


def test_model_and_temperature_are_clipped_together():
    everything, sgd = two_weights([2.0, 1.0])
    everything["loss"].log_scale.data.fill_(1.0)
    everything["loss"].log_scale.grad.fill_(2.0)
    numbers = update(everything, sgd, 1.5)                               # norm 3, halved
    assert numbers["grad_norm"] == pytest.approx(3)
    assert everything["model"].weight.tolist()[0] == pytest.approx([-1.0, -0.5], abs=1e-5)
    assert everything["loss"].log_scale.item() == pytest.approx(0.0, abs=1e-5)
    assert everything["model"].weight.grad is None


@pytest.mark.parametrize("start, gradient, end", [(10.0, 0.0, math.log(100)), (0.1, 1.0, 0.0),
                                                  (2.0, 0.5, 1.5), (4.6, -1.0, math.log(100))])
def test_the_temperature_is_clamped_after_the_step(start, gradient, end):
    everything, sgd = two_weights([0.0, 0.0], start)
    everything["loss"].log_scale.grad.fill_(gradient)
    update(everything, sgd, math.inf)
    assert everything["loss"].log_scale.item() == pytest.approx(end, abs=1e-6)
    assert everything["loss"].log_scale.exp().item() <= 100.00001


def test_decay_is_for_matrices_and_the_temperature_has_a_group_of_its_own():
    args = train.parse_args(["--weight-decay", "0.3"])
    model, scale = train.build_model(args, data.read_pairs("pairs.jsonl")), LogitScale()
    model.backbone.get_input_embeddings().weight.requires_grad_(False)
    groups = train.make_optimizer(model, scale, args).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(decay)          # each once
    assert [id(scale.log_scale)] in [list(map(id, group["params"])) for group in groups]
    assert decay.pop(id(scale.log_scale)) == 0
    for p in model.parameters():
        assert decay.pop(id(p), None) == (None if not p.requires_grad else 0.3 * (p.dim() > 1))
    assert not decay


def test_the_temperature_starts_right_learns_and_is_saved():
    fit("--warmup-steps", 0, "--temperature", 0.07, "--save-steps", 1, "--keep-checkpoints", 9)
    scales = [row["logit_scale"] for row in steps()]                # that of the logged loss
    assert scales[0] == pytest.approx(1 / 0.07) and len(set(scales)) == 6
    for step in range(1, 6):                                        # saved after it
        assert weights(step=step)["loss.log_scale"].exp().item() == scales[step]


def test_the_temperature_stays_in_range_through_a_run():
    """Untrained, a smaller scale is always better: from 1 it would fall below."""
    fit("--temperature", 1, "--lr", 0.5, "--warmup-steps", 0)
    scales = [row["logit_scale"] for row in steps()]
    assert min(scales) == 1.0 and max(scales) <= 100.001, scales


# --- Who is a candidate --------------------------------------------------------------------------

def alike(self, features, *rest):
    """A collapsed model: one vector for everything, so that a loss only counts candidates."""
    zero = 0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
    return torch.full((len(features), 4), 0.5) + zero


A, B, C = ("text " + letter for letter in "abc")


@pytest.mark.parametrize("rows, number, expected", [
    (pairs(4), 0, math.log(4)), (pairs(4), 1, math.log(8)), (pairs(4), 2, math.log(12)),
    (pairs(4, 5), 1, math.log(8)),                              # more in the file than asked for
    ([dict(pairs(1, 1)[0], query=A), *pairs(3, 3)[2:]], 3, math.log(6)),    # 1 and 3, no padding
    # A is the answer of two queries: each sees it once, and C as the only negative.
    ([{"query": f"q{i}", "positive": text} for i, text in enumerate((A, A, C))], 0,
     (2 * math.log(2) + math.log(3)) / 3),
    # One query with two answers: neither is a negative of it, both are negatives of the other.
    ([{"query": q, "positive": text} for q, text in (("q", A), ("q", B), ("r", C))], 0,
     (2 * math.log(2) + math.log(3)) / 3),
    # Nothing but right answers left: loss 0, not NaN.
    ([{"query": "q", "positive": A}, {"query": "q", "positive": B}], 0, 0.0)])
def test_with_a_collapsed_model_the_loss_is_the_log_of_the_number_of_candidates(
        rows, number, expected, monkeypatch, capsys):
    monkeypatch.setattr(BiEncoder, "forward", alike)
    write_rows("pairs.jsonl", rows)
    fit("--num-hard-negatives", number, "--batch-size", len(rows), "--max-steps", 1)
    assert losses() == pytest.approx([expected], abs=1e-6)
    assert steps()[0]["accuracy"] == (0 if expected else 1)         # a tie is no hit
    unused = sum(max(0, len(row.get("negatives", ())) - number) for row in rows)
    assert f"{unused} of " in capsys.readouterr().out


# --- The same again ------------------------------------------------------------------------------

def test_a_run_repeats_bit_for_bit_and_the_seed_changes_it():
    flags = ("--lora-r", 2, "--lora-dropout", 0.2, "--eval-jsonl", "pairs.jsonl", "--max-steps", 3)
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(*flags, "--seed", seed, out=out)
    assert log("a") == log("b") and equal(weights("a"), weights("b"))
    assert log("a")[0]["eval_loss"] != log("c")[0]["eval_loss"] and losses("a") != losses("c")
    first = [fit("--lora-r", 2, "--max-steps", 1, "--seed", seed, out=f"first{seed}") or
             weights(f"first{seed}") for seed in (1, 2)]        # still those of the start: rate 0
    assert all(not torch.equal(first[0][n], first[1][n]) for n in first[0] if "lora_A" in n)


def test_a_used_folder_is_refused_with_the_remedy_and_left_as_it_is():
    fit("--max-steps", 1)
    before = Path("out/metrics.jsonl").read_bytes()
    for extra in ([], ["--max-steps", 2], ["--resume", "elsewhere/checkpoint-1"]):
        with pytest.raises(ValueError, match="out already holds a run, up to checkpoint-1: "
                                             "continue it with --resume auto, or choose another"):
            fit(*extra)
    Path("out/checkpoint-1").rename("moved")                    # final/ alone is a run, too
    with pytest.raises(ValueError, match="already holds a run, up to final"):
        fit()
    assert Path("out/metrics.jsonl").read_bytes() == before
    assert fit("--max-steps", 1, out="other") == 0


def test_a_short_run_learns():
    """24 pairs whose documents name what their queries name, in 16 steps: found by heart."""
    rows = [{"query": f"where is the {a} {b}", "positive": f"{b} and {a}"}
            for i, a in enumerate(WORDS[:6]) for b in WORDS[8:12]]
    write_rows("pairs.jsonl", rows)
    fit("--eval-jsonl", "pairs.jsonl", "--eval-steps", 0, "--batch-size", 12, "--max-steps", 16,
        "--grad-cache-chunk", 12, "--lr", 1e-2)
    before, after = (row for row in log() if "eval_loss" in row)
    assert before["eval_recall@1"] < 0.5 and after["eval_recall@1"] > 0.9, (before, after)
    assert json.loads((newest() / "state.json").read_text())["metrics"] == {
        "before": before, "now": after}
