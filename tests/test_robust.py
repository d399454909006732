"""Numbers that are none, memory that runs out, rows and files that are wrong: named, and survived.
"""
import gc
import json
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

import checkpoint
import objectives
import train
from model import BiEncoder
from step import chunk_plan
from tests.runs import (  # noqa: F401
    at_step, difference, equal, finish, fit, log, losses, moments, pairs, printed, start, steps,
    tiny, use_float64, weights, write_rows)

pytestmark = pytest.mark.usefixtures("tiny")
LORA = ("--lora-r", 2, "--lora-dropout", 0.3)


# --- Numbers that are none -----------------------------------------------------------------------

def break_steps(monkeypatch, numbers, fault):
    """Let fault(loss, q, d) replace the loss of these steps, counted from 1."""
    info_nce, count = objectives.info_nce, [0]

    def wrapped(q, d, *rest, **options):
        count[0] += 1
        loss = info_nce(q, d, *rest, **options)
        return fault(loss, q, d) if count[0] in numbers else loss
    monkeypatch.setattr(objectives, "info_nce", wrapped)


def spoil_one_gradient(loss, q, d):
    """The loss stays finite; one number of the cache does not."""
    d.register_hook(lambda g: g.index_put((torch.tensor(0), torch.tensor(0)),
                                          torch.tensor(math.inf)))
    return loss


FAULTS = {"nan": lambda loss, q, d: loss * math.nan, "inf": lambda loss, q, d: loss * math.inf,
          "nan in the value only": lambda loss, q, d: loss + math.nan,
          "inf in the gradient only": spoil_one_gradient}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_without_finite_numbers_changes_nothing_and_is_logged(fault, monkeypatch, capsys):
    break_steps(monkeypatch, {3}, FAULTS[fault])
    assert fit("--save-steps", 1, "--keep-checkpoints", 9, "--warmup-steps", 0) == 0
    rows = steps()
    assert [row["skipped"] for row in rows] == [False, False, True, False, False, False]
    assert [None in (row["loss"], row["grad_norm"]) for row in rows] == [
        row["skipped"] for row in rows]
    assert "step 3: loss" in (out := capsys.readouterr().out) and "skipped" in out
    assert equal(weights(step=2), weights(step=3)) and equal(moments(step=2), moments(step=3))
    assert not equal(weights(step=3), weights(step=4))          # the run goes on
    assert rows[3]["logit_scale"] == rows[2]["logit_scale"] and rows[3]["lr"] < rows[2]["lr"]
    for step in range(1, 7):
        for tensor in [*weights(step=step).values(), *moments(step=step)]:
            assert tensor.isfinite().all()


def test_several_bad_steps_in_a_row_end_the_run_with_advice_and_a_sound_checkpoint(monkeypatch):
    break_steps(monkeypatch, {2, 3, 4}, FAULTS["nan"])
    with pytest.raises(RuntimeError, match="3 steps in a row had no finite .*lower --lr"):
        fit()
    assert [row["skipped"] for row in steps()] == [False, True, True, True]
    assert all(tensor.isfinite().all() for tensor in weights(step=4).values())


def test_bad_steps_that_are_not_in_a_row_do_not_end_it(monkeypatch):
    break_steps(monkeypatch, {1, 2, 4, 5}, FAULTS["nan"])
    assert fit() == 0 and [row["skipped"] for row in steps()] == [True, True, False] * 2


def test_weights_that_are_not_finite_are_never_saved(monkeypatch, capsys):
    """Whatever ruined them: earlier checkpoints stay, and the newest sound one is kept."""
    def ruin():
        scale.log_scale.data.fill_(math.nan)
    scale, make = None, objectives.LogitScale

    def keep(*args, **options):
        nonlocal scale
        scale = make(*args, **options)
        return scale
    monkeypatch.setattr(objectives, "LogitScale", keep)
    at_step(monkeypatch, 3, ruin)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        fit("--save-steps", 1, "--keep-checkpoints", 9)
    assert [step for step, _ in checkpoint.list_checkpoints("out")] == [1, 2]
    assert "log_scale holds a NaN or an infinity" in capsys.readouterr().err


# --- Memory that runs out ------------------------------------------------------------------------

def limit(monkeypatch, samples=None, tokens=None, when=lambda: True, hold=lambda: None):
    """A device that holds so many samples, or padded tokens, of a training step at once."""
    encode = BiEncoder.forward

    def forward(self, features, *rest):
        size = len(features) * max(map(self.cost, features))
        full = len(features) > samples if samples else size > tokens
        if self.training and full and when():
            memory = hold()                             # noqa: F841 - lives as long as this frame
            raise torch.OutOfMemoryError("no room in this test")
        return encode(self, features, *rest)
    monkeypatch.setattr(BiEncoder, "forward", forward)


STEPS = {"step 1": lambda: not torch.is_grad_enabled(), "step 3": torch.is_grad_enabled}


@pytest.mark.parametrize("where", STEPS)
@pytest.mark.parametrize("chunk, fits, room, told", [(4, 2, 2, [2]), (8, 2, 2, [4, 2]),
                                                     (0, 2, 3, [2]), (3, 1, 1, [1])])
def test_out_of_memory_halves_the_chunk_and_repeats_the_step_with_the_same_dropout(
        where, chunk, fits, room, told, monkeypatch, capsys):
    flags = (*LORA, "--max-steps", 3, "--warmup-steps", 0, "--keep-graphs", 0)
    fit(*flags, "--grad-cache-chunk", fits, out="small")
    capsys.readouterr()
    limit(monkeypatch, samples=room, when=STEPS[where] if chunk else lambda: True)
    assert fit(*flags, "--grad-cache-chunk", chunk, out="large") == 0
    assert re.findall(r"out of memory: grad_cache_chunk is now (\d+), step repeated",
                      capsys.readouterr().out) == list(map(str, told))
    assert losses("large") == losses("small")           # the same chunks at last, and dropout
    assert difference(weights("large"), weights("small")) == 0


def test_it_may_come_late_within_a_window_of_batches(monkeypatch):
    """In the second batch of step 3: what the first one has left in .grad is not counted twice."""
    use_float64(monkeypatch)
    flags = ("--grad-accum-steps", 2, "--warmup-steps", 0, "--max-steps", 4)
    fit(*flags, out="straight")
    calls = []                  # 7 chunks of two in a batch, 14 in a window; then chunks of one
    limit(monkeypatch, samples=1, when=lambda: calls.append(1) or len(calls) == 40)
    assert fit(*flags) == 0 and len(calls) == 40
    assert losses() == pytest.approx(losses("straight"), abs=1e-6)
    assert difference(weights(), weights("straight")) < 1e-9


def test_a_token_budget_is_halved_as_often_as_it_takes(monkeypatch, capsys):
    """However small --grad-cache-chunk is, which does not count beside --chunk-tokens."""
    fit("--chunk-tokens", 125, "--keep-graphs", 1, out="small")
    capsys.readouterr()
    limit(monkeypatch, tokens=125)
    assert fit("--chunk-tokens", 1000, "--keep-graphs", 5, out="large") == 0
    assert re.findall(r"chunk_tokens is now (\d+)", capsys.readouterr().out) == [
        "500", "250", "125"]
    assert losses("large") == losses("small")           # the same chunks and kept graphs: no less


def test_kept_graphs_are_given_up_first(monkeypatch):
    """Many graphs at once are as large as one large chunk."""
    graphs, encode = [], BiEncoder.forward

    def forward(self, features, *rest):
        if torch.is_grad_enabled() and any(graph() is not None for graph in graphs):
            raise torch.OutOfMemoryError("no room for a second graph in this test")
        vectors = encode(self, features, *rest)
        graphs.extend([weakref.ref(vectors)] * vectors.requires_grad)
        return vectors
    monkeypatch.setattr(BiEncoder, "forward", forward)
    assert fit("--keep-graphs", 99, "--grad-cache-chunk", 4, "--max-steps", 2) == 0
    assert len(graphs) == 1 + 2 * 4                     # one too many, then chunks of two


def test_what_filled_the_memory_is_free_before_the_step_is_repeated(monkeypatch):
    held, alive = [], []

    def hold():
        memory = torch.zeros(1000)
        held.append(weakref.ref(memory))
        return memory
    limit(monkeypatch, samples=2, hold=hold)
    plan = chunk_plan
    monkeypatch.setattr("step.chunk_plan", lambda *a: alive.append(
        [memory() is not None for memory in held]) or plan(*a))
    gc.disable()                                        # a collector may come later, or never
    try:
        fit("--grad-cache-chunk", 8, "--max-steps", 1)
    finally:
        gc.enable()
    assert alive == [[], [False], [False, False]]


def test_one_sample_that_does_not_fit_ends_the_run_with_advice_and_what_was_done_is_saved(
        monkeypatch):
    ready = []
    limit(monkeypatch, samples=0.5, when=lambda: bool(ready))
    at_step(monkeypatch, 2, lambda: ready.append(1))
    with pytest.raises(RuntimeError, match="out of memory, grad_cache_chunk 1: lower .*"
                                           "--max-length .*LoRA, --gradient-checkpointing"):
        fit()
    assert [step for step, _ in checkpoint.list_checkpoints("out")] == [2]


# --- Rows that are wrong -------------------------------------------------------------------------

def spoiled(line, text):
    rows = [json.dumps(row) for row in pairs(8)]
    rows[line - 1] = text
    Path("pairs.jsonl").write_text("\n".join(rows))


GOOD = {"query": "q", "positive": "p"}


@pytest.mark.parametrize("text, field", [
    ("{nonsense", "not JSON"), ('["a", "b"]', "not an object"),
    *((json.dumps(row), f"field '{field}'") for row, field in [
        ({"positive": "p"}, "query"), ({**GOOD, "positive": None}, "positive"),
        ({**GOOD, "query": 5}, "query"), ({**GOOD, "positive": "  "}, "positive"),
        ({**GOOD, "negatives": ["n", ""]}, r"negatives\[1\]"),
        ({**GOOD, "positive": {"image": "none.png"}}, "positive"),
        ({**GOOD, "positive": {"image": "../x.png"}}, "positive"),
        ({**GOOD, "positive": {"image": "http://x/x.png"}}, "positive"),
        ({**GOOD, "query": {"txt": "q"}}, "query")])])
def test_a_bad_row_ends_the_start_with_file_line_and_field(text, field, monkeypatch):
    monkeypatch.setattr(train, "build_model", lambda *a: pytest.fail("found too late"))
    spoiled(7, text)
    with pytest.raises(ValueError, match=rf"pairs.jsonl: 1 bad rows, 7 good ones\n  line 7: .*"
                                         rf"{field}") as error:
        fit()
    assert "--skip-bad-rows" in str(error.value) and not Path("out").exists()


def test_bad_rows_may_be_skipped_and_are_counted(capsys):
    spoiled(7, '{"query": "q"}')
    assert fit("--skip-bad-rows", "--max-steps", 1) == 0
    out = capsys.readouterr().out
    assert "1 bad rows, 7 good ones" in out and "line 7: field 'positive'" in out
    assert "training       7 rows" in out


@pytest.mark.parametrize("path", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(path):
    with pytest.raises(ValueError, match=f"cannot read {path}"):
        fit("--train-jsonl", path)


def test_a_pool_of_one_candidate_is_refused_because_its_loss_is_always_0():
    with pytest.raises(ValueError, match="a candidate pool of one.*raise --batch-size"):
        fit("--batch-size", 1)
    assert fit("--batch-size", 1, "--num-hard-negatives", 1, "--max-steps", 1) == 0
    assert losses()[0] > 0


def test_fewer_rows_than_a_batch_needs_are_refused():
    with pytest.raises(ValueError, match="no full batch of 64 in epoch 0: 23 rows"):
        fit("--batch-size", 64)


# --- Images that are wrong -----------------------------------------------------------------------

@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_is_cut_ends_the_run_in_time_and_names_file_and_row(workers):
    """Its header is sound, so only decoding, perhaps in a worker, can tell."""
    rows = pairs(12, negatives=0)
    for i, row in enumerate(rows):
        name = f"page{i}.png"
        Image.effect_noise((64, 64), 50).convert("RGB").save(name)
        row["positive"] = {"image": name}
    Path("page4.png").write_bytes(Path("page4.png").read_bytes()[:3000])
    write_rows("pairs.jsonl", rows)
    status = finish(start("--num-workers", workers, "--batch-size", 3, "--save-steps", 1,
                          "--keep-checkpoints", 9), timeout=40)
    text = printed()
    assert status == 1 and re.search(r"row 4 \(line 5\): cannot read image .*page4.png", text), text
    assert [step for step, _ in checkpoint.list_checkpoints("out")] == [
        row["step"] for row in steps()]
    Image.new("RGB", (64, 64)).save("page4.png")        # repaired, it goes on
    assert fit("--num-workers", workers, "--batch-size", 3, "--resume", "auto") == 0
    assert [row["step"] for row in steps()] == list(range(1, 7))


def test_an_image_without_room_for_its_tokens_is_refused_with_the_numbers():
    for i in range(4):
        Image.new("RGB", (640, 640)).save(f"{i}.png")
    write_rows("pairs.jsonl", [{"query": f"q{i}", "positive": {"image": f"{i}.png"}}
                               for i in range(4)])
    with pytest.raises(ValueError, match=r"row \d \(line \d\): template and image need \d+ tokens, "
                                         "max_length is 96: raise it, or lower max_num_visual"):
        fit()
    assert fit("--max-num-visual-tokens", 16, "--max-steps", 1) == 0


# --- Code that comes with a model ----------------------------------------------------------------

CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("the model's code ran")
from transformers import PretrainedConfig, PreTrainedModel
class Config(PretrainedConfig):
    model_type = "guest"
class Model(PreTrainedModel):
    config_class = Config
"""


def test_code_of_a_model_runs_only_if_asked_for(monkeypatch):
    marker = Path("marker").resolve()
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE",
                        str(Path("cache").resolve()))
    Path("guest").mkdir()
    Path("guest/guest.py").write_text(CODE.format(marker=str(marker)))
    Path("guest/config.json").write_text(json.dumps({
        "model_type": "guest", "auto_map": {"AutoConfig": "guest.Config",
                                            "AutoModel": "guest.Model"}}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        fit("--model", "guest")
    assert not marker.exists()
    with pytest.raises(Exception):                      # noqa: B017 - no weights there; but it ran
        fit("--model", "guest", "--trust-remote-code")
    assert marker.exists()
