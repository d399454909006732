"""What makes a step cheap changes no result: graphs kept by measure, half precision, reports."""
import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch

import train
from tests.runs import arguments, equal, fit, log, losses, tiny, weights  # noqa: F401

pytestmark = pytest.mark.usefixtures("tiny")


# --- As many graphs as the memory holds ----------------------------------------------------------

GB = 2**30


def simulate_gpu(monkeypatch, resting=20 * GB, graph=10 * GB, total=100 * GB):
    """Memory as a GPU would report it, in numbers of our choice; returns the kept counts."""
    kept, step = [], train.grad_cache_step

    def watch(*args, keep, **options):
        kept.append(keep)
        return step(*args, keep=keep, **options)
    monkeypatch.setattr(train, "grad_cache_step", watch)
    for name, number in (("memory_allocated", lambda: resting), ("reset_peak_memory_stats", int),
                         ("max_memory_allocated", lambda: resting + graph * max(1, kept[-1])),
                         ("mem_get_info", lambda: (total, total))):
        monkeypatch.setattr(torch.cuda, name, number)
    return kept


def fit_as_on_a_gpu(*flags, out):
    """The run of a GPU's command line: only parsing looks for one, the tensors stay here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        args = train.parse_args([*arguments(*flags, out=out), "--dtype", "fp32", "--num-workers",
                                 "0"])
    return train.train(args, torch.device("cpu"))


@pytest.mark.parametrize("flags, keep", [((), 7), (("--memory-limit-gb", 45), 2),
                                         (("--memory-limit-gb", 5), 1)])
def test_auto_keeps_what_nine_tenths_of_the_memory_or_the_given_limit_hold(flags, keep,
                                                                           monkeypatch):
    fit("--grad-cache-chunk", 1, out="one")
    kept = simulate_gpu(monkeypatch)
    fit_as_on_a_gpu("--grad-cache-chunk", 1, "--keep-graphs", "auto", *flags, out="auto")
    assert kept == [1] + [keep] * 5                                 # the first step measures
    assert losses("auto") == pytest.approx(losses("one"), abs=1e-6)


def test_memory_that_runs_out_all_the_same_halves_the_chunk_and_keeps_one(monkeypatch):
    kept, full = simulate_gpu(monkeypatch), [True]
    step = train.grad_cache_step

    def once_out_of_memory(*args, keep, **options):
        result = step(*args, keep=keep, **options)
        if keep == 7 and full:
            raise torch.OutOfMemoryError(full.pop())
        return result
    monkeypatch.setattr(train, "grad_cache_step", once_out_of_memory)
    fit_as_on_a_gpu("--grad-cache-chunk", 2, "--keep-graphs", "auto", out="auto")
    assert kept[:4] == [1, 7, 1, 7]


# --- Reports -------------------------------------------------------------------------------------

def test_tensorboard_holds_the_numbers_of_metrics_jsonl_and_forgets_repeated_steps():
    pytest.importorskip("tensorboard", reason="reads what was reported")
    fit("--report-to", "tensorboard", "--save-steps", 3, "--eval-jsonl", "pairs.jsonl")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

    def read(tag):
        events = accumulator.EventAccumulator("out/tensorboard").Reload().Scalars(tag)
        return {event.step: event.value for event in events}
    rows = log(clock=True)
    for name in ("loss", "logit_scale", "pairs_per_second", "lr"):
        expected = {row["step"]: row[name] for row in rows if name in row}
        assert read(name) == pytest.approx(expected, rel=1e-6)
    assert read("eval/recall@10") == pytest.approx({
        row["step"]: row["eval_recall@10"] for row in rows if "eval_recall@10" in row}, rel=1e-6)
    train.main([*arguments("--report-to", "tensorboard"), "--resume", "out/checkpoint-6",
                "--max-steps", "8", "--allow-changed-flags"])
    assert list(read("loss")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_weights_and_biases_gets_every_row_and_a_resumed_run_its_name(monkeypatch):
    calls = []
    run = types.SimpleNamespace(id="a1b2", log=lambda row, step: calls.append((step, row)))
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    fit("--report-to", "wandb")
    start, *rows = calls
    assert start["id"] is None and start["config"]["batch_size"] == 4
    written = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [{"step": step, **row} for step, row in rows] == written and len(rows) == 6
    calls.clear()
    train.main([*arguments("--report-to", "wandb"), "--resume", "auto", "--max-steps", "7",
                "--allow-changed-flags"])
    assert calls[0]["id"] == "a1b2" and calls[0]["resume"] == "allow" and calls[1][0] == 7


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_reporter_that_is_not_installed_is_named_with_the_remedy(name, monkeypatch):
    monkeypatch.setitem(sys.modules, {"wandb": "wandb"}.get(name, "torch.utils.tensorboard"), None)
    with pytest.raises(ValueError, match=f"--report-to {name}: .*pip install {name}"):
        fit("--report-to", name)
