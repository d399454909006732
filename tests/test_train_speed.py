"""What makes a step cheap changes no result: graphs kept by measure, frozen parts computed once,
half precision with its scaler. And what a run leaves: models that are tried, reports."""
import functools
import importlib
import json
import re
import shutil
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import export
import train
from batches import VectorCache
from gradcache import grad_cache_step
from model import BiEncoder
from tests.processes import run
from tests.runs import (  # noqa: F401
    arguments, equal, fit, log, losses, newest, steps, tiny, use_float64, weights)

pytestmark = pytest.mark.usefixtures("tiny")


# --- As many graphs as the memory holds ----------------------------------------------------------

GB = 2**30


def simulate_gpu(monkeypatch, resting=19 * GB, graph=10 * GB, total=100 * GB):
    """Memory as a GPU would report it, in numbers of our choice; returns the kept counts."""
    kept, step = [], grad_cache_step

    def watch(*args, keep, **options):
        kept.append(keep)
        return step(*args, keep=keep, **options)
    monkeypatch.setattr("step.grad_cache_step", watch)
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
    use_float64(monkeypatch)                # kept graphs come first, so gradients add up otherwise
    fit("--grad-cache-chunk", 1, out="one")
    kept = simulate_gpu(monkeypatch)
    fit_as_on_a_gpu("--grad-cache-chunk", 1, "--keep-graphs", "auto", *flags, out="auto")
    assert kept == [1] + [keep] * 5                                 # the first step measures
    assert losses("auto") == pytest.approx(losses("one"), rel=1e-10)


def test_the_check_of_the_gradient_keeps_one_graph(monkeypatch, capsys):
    simulate_gpu(monkeypatch)
    assert fit_as_on_a_gpu("--keep-graphs", "auto", "--check-grads", out="auto") == 0
    assert "equal" in capsys.readouterr().out


def test_memory_that_runs_out_all_the_same_halves_the_chunk_and_keeps_one(monkeypatch):
    kept, full = simulate_gpu(monkeypatch), [True]
    step = sys.modules["step"].grad_cache_step

    def once_out_of_memory(*args, keep, **options):
        result = step(*args, keep=keep, **options)
        if keep == 7 and full:
            raise torch.OutOfMemoryError(full.pop())
        return result
    monkeypatch.setattr("step.grad_cache_step", once_out_of_memory)
    fit_as_on_a_gpu("--grad-cache-chunk", 2, "--keep-graphs", "auto", out="auto")
    assert kept[:4] == [1, 7, 1, 7]


# --- What is frozen is computed once --------------------------------------------------------------

@pytest.fixture
def seen(monkeypatch):
    """How many images the vision tower was given, call by call."""
    numbers, tower = [], Qwen3VLVisionModel.forward

    def watch(self, pixels, grid_thw, **options):
        numbers.append(len(grid_thw))
        return tower(self, pixels, grid_thw, **options)
    monkeypatch.setattr(Qwen3VLVisionModel, "forward", watch)
    return numbers


PAGES = ("--documents", "image", "--max-num-visual-tokens", 4, "--lora-r", 2, "--lora-dropout", 0.2,
         "--grad-cache-chunk", 2, "--max-steps", 2, "--warmup-steps", 0)


def test_a_frozen_vision_tower_sees_a_page_once_a_step(seen):
    fit(*PAGES, "--vision-cache-gb", 0, "--keep-graphs", 0, out="twice")
    twice, seen[:] = sum(seen), []
    fit(*PAGES, out="once")
    assert (twice, sum(seen)) == (2 * 2 * 4, 2 * 4)                 # 2 steps of 4 pages
    assert losses("once") == pytest.approx(losses("twice"), abs=1e-5)
    seen.clear()
    fit(*PAGES, "--lora-vision", "--keep-graphs", 0, out="trained")
    assert sum(seen) == twice                                       # it learns: seen in both passes


def test_a_step_that_has_no_room_for_what_was_seen_keeps_the_rest_as_pixels(seen):
    one = 2 * 4 * 32 * 4 / 2**30                # a page: input and one layer, 4 tokens of 32 floats
    fit(*PAGES, "--keep-graphs", 0, "--vision-cache-gb", 2 * 2.5 * one, out="some")
    fit(*PAGES, "--keep-graphs", 0, "--vision-cache-gb", 0, out="none")
    assert losses("some") == pytest.approx(losses("none"), abs=1e-5)


FROZEN = ("--mode", "query-side-tune", "--num-hard-negatives", 2, "--max-steps", 5,
          "--warmup-steps", 0)


@pytest.mark.parametrize("way", ["direct", "gradcache"])
@pytest.mark.parametrize("lora", [(), ("--lora-r", 2)])
def test_document_vectors_survive_the_run_that_made_them(way, lora, monkeypatch):
    stored, write = [], VectorCache._write
    monkeypatch.setattr(VectorCache, "_write", lambda self, encoder, vectors: stored.extend(
        vectors) or write(self, encoder, vectors))
    flags = (*FROZEN, *lora, "--query-side-backward", way)
    fit(*flags, out="without")
    assert not stored
    fit(*flags, "--document-cache", "vectors.db", out="first")
    assert len(stored) == len(set(stored)) == 3 * 20                # one epoch: each document once
    fit(*flags, "--document-cache", "vectors.db", out="second")
    assert len(stored) == 3 * 20                                    # nothing new
    for out in ("first", "second"):
        assert losses(out) == pytest.approx(losses("without"), abs=1e-5)
    fit(*flags, "--document-cache", "vectors.db", "--seed", 1, out="other")     # another model
    assert len(stored) > 3 * 20


def test_in_query_side_gradcache_mode_the_kept_graph_is_a_querys(monkeypatch):
    calls, encode = [], BiEncoder.forward

    def watch(self, features, *rest):
        vectors = encode(self, features, *rest)
        calls.append(vectors.requires_grad)
        return vectors
    monkeypatch.setattr(BiEncoder, "forward", watch)
    fit("--mode", "query-side-tune", "--query-side-backward", "gradcache", "--max-steps", 1)
    # Queries in two chunks, the second with its graph; documents in two; the first again.
    assert calls == [False, True, False, False, True]


# --- fp16 ----------------------------------------------------------------------------------------

def scale_from(monkeypatch, start, backoff=0.5):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(
        device, init_scale=start, backoff_factor=backoff, enabled=enabled))


def test_fp16_trains_like_fp32_and_an_interrupted_run_goes_on_with_the_same_factor(monkeypatch):
    scale_from(monkeypatch, 2.0**10)
    flags = ("--dtype", "fp16", "--warmup-steps", 0)
    fit(*flags)
    fit("--warmup-steps", 0, out="float32")
    assert losses() == pytest.approx(losses("float32"), rel=0.02)
    assert [row["skipped"] for row in steps()] == [False] * 6
    fit(*flags, "--save-steps", 3, out="again")
    state = torch.load(Path("again/checkpoint-3/state.pt"), weights_only=True)["scaler"]
    assert state["scale"] == 2.0**10 and state["_growth_tracker"] == 3
    shutil.rmtree("again/checkpoint-6")
    fit(*flags, "--resume", "auto", out="again")
    assert equal(weights(), weights("again")) and losses() == losses("again")


def test_a_scaler_that_finds_its_factor_by_overflowing_does_not_end_the_run(monkeypatch, capsys):
    scale_from(monkeypatch, 2.0**40, 2.0**-6)
    fit("--dtype", "fp16", "--warmup-steps", 0, "--max-steps", 9)
    bad = [row["skipped"] for row in steps()]
    assert sum(bad) >= 3 and bad == sorted(bad, reverse=True) and not bad[-1]
    assert "skipped, nothing changed" in capsys.readouterr().out


# --- What is saved is tried ----------------------------------------------------------------------

@pytest.fixture
def tried(monkeypatch):
    """Folders that the real `verify` looked at; elsewhere in the tests of runs it is left out."""
    folders = []

    def watch(model, folder, samples, **options):
        folders.append(str(folder))
        return export.verify(model, folder, samples, **options)
    monkeypatch.setattr(train, "verify", watch)
    return folders


@pytest.mark.parametrize("flags", [(), ("--lora-r", 2), ("--loss", "simcse"),
                                   ("--matryoshka-dims", 16, 32)])
def test_the_first_checkpoint_and_the_last_model_are_tried_and_have_a_card(flags, tried, capsys):
    fit(*flags, "--save-steps", 2, "--keep-checkpoints", 9, "--eval-jsonl", "pairs.jsonl")
    assert tried == ["out/checkpoint-2/model", "out/final"]
    assert "vectors differ by at most" in capsys.readouterr().out
    for folder in ("out/checkpoint-4/model", "out/final"):
        card = Path(folder, "README.md").read_text()
        assert "23 rows" in card and '"warmup_steps": 2' in card
        assert ("LoRA" in card) == ("--lora-r" in flags)
        assert ("first 16 or 32" in card) == (16 in flags)
    last = [row["eval_mrr@10"] for row in log() if "eval_mrr@10" in row][-1]
    assert re.search(rf"eval_mrr@10 .*{re.escape(f'{last:.4g}')} \|", card)


def test_merged_only_the_last_model_is_plain_and_only_it_is_tried(tried):
    fit("--lora-r", 2, "--merge-lora", "--save-steps", 3, "--warmup-steps", 0)
    assert tried == ["out/final"]
    assert not Path("out/final/adapter_config.json").exists()
    assert Path("out/checkpoint-3/model/adapter_config.json").exists()


def refused(model, folder, samples, **options):
    raise ValueError(f"{folder}: a number of a vector differs")


def test_a_folder_that_other_programs_read_otherwise_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(train, "verify", refused)
    with pytest.raises(ValueError, match="out/checkpoint-2/model: a number of a vector differs"):
        fit("--save-steps", 2)
    assert [row["step"] for row in steps()] == [1, 2] and newest().name == "checkpoint-2"


def run_that_is_refused(argv):
    """On each of several processes; process 0 alone tries the folder."""
    small = functools.partial(train.tiny_qwen3_vl, hidden=32, layers=1, heads=2, vocab_size=300)
    with (mock.patch.object(train, "tiny_qwen3_vl", small),
          mock.patch.object(train, "verify", refused)):
        try:
            return train.train(train.parse_args(argv), torch.device("cpu"))
        except ValueError as error:
            return str(error)


def test_all_processes_end_when_one_finds_other_vectors(tmp_path):
    argv = arguments("--train-jsonl", tmp_path / "pairs.jsonl", "--save-steps", 2, "--batch-size",
                     2, out=str(tmp_path / "out"))
    first, second = run(2, run_that_is_refused, argv)
    assert first == second and "checkpoint-2/model: a number of a vector differs" in first


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
