"""A run that is stopped, killed or damaged continues as if nothing had happened, bit for bit.

The uninterrupted run has all that could go out of step: adapters with dropout, sampled hard
negatives, two batches per step, epochs that end within a step and after one.
"""
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoint
import objectives
import train
from model import BiEncoder
from tests.processes import ROOT, die_with_parent
from tests.runs import (  # noqa: F401
    arguments, at_step, difference, equal, finish, fit, log, losses, moments, newest, pairs,
    printed, small_model_in, start, steps, tiny, weights)

pytestmark = pytest.mark.usefixtures("tiny")
FLAGS = ("--lora-r", 2, "--lora-dropout", 0.3, "--num-hard-negatives", 1, "--grad-accum-steps", 2,
         "--max-steps", 6, "--save-steps", 2, "--eval-jsonl", "pairs.jsonl", "--eval-steps", 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of FLAGS: its folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("whole")
        with small_model_in(folder, patch):
            assert fit(*FLAGS) == 0
    return folder / "out"


def same(out, whole):
    """Nothing tells the two runs apart: log, weights, moments, random state, exported model."""
    assert log(out) == log(whole)                       # every step once: losses, rates, epochs
    assert [row["step"] for row in steps(out)] == list(range(1, 7))
    assert equal(weights(out), weights(whole)) and equal(moments(out), moments(whole))
    ends = [checkpoint.load(newest(folder)) for folder in (out, whole)]
    assert ends[0]["random"][0]["torch"].equal(ends[1]["random"][0]["torch"])
    assert ends[0]["step"] == ends[1]["step"] == 6 and ends[0]["metrics"] == ends[1]["metrics"]
    assert equal(*(BiEncoder.from_pretrained(Path(folder, "final")).state_dict()
                   for folder in (out, whole)))
    assert not any(".staging-" in name for name in os.listdir(out))
    return True


def stop(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


# --- Stopped -------------------------------------------------------------------------------------

def test_a_run_stopped_after_every_single_step_is_the_same_run(whole, monkeypatch):
    """By SIGTERM and Ctrl-C in turn, continued by `auto` and by path; so also at epochs' edges."""
    resume = []
    for step in range(1, 6):
        with monkeypatch.context() as patch:
            at_step(patch, 1, lambda step=step: stop((signal.SIGTERM, signal.SIGINT)[step % 2]))
            assert fit(*FLAGS, *resume) == train.INTERRUPTED == 75
        assert newest().name == f"checkpoint-{step}" and steps()[-1]["step"] == step
        resume = ["--resume", ("auto", newest())[step % 2]]
    assert fit(*FLAGS, *resume) == 0 and same("out", whole)


def test_a_terminated_program_saves_and_exits_with_75():
    """`python train.py` itself, with the built-in model, and a SIGTERM from outside."""
    program = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments("--max-steps", 1000)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (Path("out/metrics.jsonl").exists() and losses()):
            time.sleep(0.05)
        program.terminate()
        text = program.communicate(timeout=30)[0]
    finally:
        program.kill()
    step = int(newest().name.rpartition("-")[2])
    assert program.returncode == 75, text
    assert f"stopped by a signal after step {step}: continue with --resume auto" in text
    assert steps()[-1]["step"] == step < 1000


def test_ctrl_c_that_arrives_twice_at_once_still_saves_and_a_late_second_one_ends_it(monkeypatch):
    """In a torchrun job it comes from the terminal and from torchrun."""
    at_step(monkeypatch, 2, lambda: [stop(signal.SIGINT) for _ in range(2)])
    assert fit() == 75 and newest().name == "checkpoint-2"
    caught, clock = checkpoint.catch_signals(), [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    stop(signal.SIGINT)
    clock[0] = 104.0
    stop(signal.SIGINT)
    assert caught
    clock[0] = 106.0
    with pytest.raises(SystemExit) as ended:
        stop(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_ctrl_c_reaches_the_loader_workers_too_and_they_go_on_working():
    """The terminal sends it to the whole process group, here while a worker makes batch 5 of 8."""
    load = train.Batches.__getitem__

    def interrupt(self, number):
        if number == 4:
            os.killpg(0, signal.SIGINT)
        return load(self, number)

    def prepare():
        os.setpgid(0, 0)
        train.Batches.__getitem__ = interrupt
    child = start("--num-workers", 1, "--grad-accum-steps", 8, "--max-steps", 2, prepare=prepare)
    assert finish(child) == 75 and newest().name == "checkpoint-1", printed()


def test_a_signal_during_the_last_step_ends_a_finished_run(monkeypatch):
    at_step(monkeypatch, 6, stop)
    assert fit() == 0 and Path("out/final/model.safetensors").exists()


# --- Killed --------------------------------------------------------------------------------------

def test_killed_at_random_moments_it_is_the_same_run(whole):
    """kill -9, again and again, each time a bit later, until one child reaches the end."""
    rng, kills, status = random.Random(), 0, None
    while status != 0:
        child = start(*FLAGS, "--resume", "auto")
        time.sleep(rng.uniform(0.1, 0.4) + 0.3 * kills)
        os.kill(child, signal.SIGKILL)                  # does nothing to one that has finished
        status = finish(child)
        assert status in (0, -signal.SIGKILL), printed()
        kills += status != 0
    assert kills and same("out", whole), kills


def die_at(event, name, number):
    """kill -9 at the given occurrence of a file operation on a name that contains `name`."""
    count = 0

    def hook(found, arguments):
        nonlocal count
        if found == event and name in str(arguments[0]):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)


def test_killed_during_saves_it_is_the_same_run(whole):
    """At the first file, in the middle, before the manifest, at the renames, while deleting."""
    moments_of_a_save = [("os.mkdir", ".staging-", 1), ("open", "weights.safetensors", 1),
                         ("os.chmod", ".staging-", 3), ("open", "manifest.json", 1),
                         ("os.rename", ".staging-", 1), ("os.rename", "checkpoint-2", 1),
                         ("shutil.rmtree", ".deleted-", 1), ("open", "metrics.tmp", 1),
                         ("open", "final/", 1)]
    for moment in moments_of_a_save:
        child = start(*FLAGS, "--resume", "auto", prepare=lambda moment=moment: die_at(*moment))
        assert finish(child) == -signal.SIGKILL, (moment, printed())
    assert finish(start(*FLAGS, "--resume", "auto")) == 0, printed()
    assert same("out", whole)


# --- Damaged -------------------------------------------------------------------------------------

def run_to(step, monkeypatch, *flags):
    """A run with FLAGS that is stopped after `step`."""
    with monkeypatch.context() as patch:
        at_step(patch, step, stop)
        assert fit(*FLAGS, *flags) == 75


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_continues(
        whole, monkeypatch, capsys):
    run_to(5, monkeypatch)
    file = newest() / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert fit(*FLAGS, "--resume", "auto", "--save-steps", 1, "--keep-checkpoints", 9) == 0
    told = capsys.readouterr()
    assert re.search(r"skipped out/checkpoint-5: .*weights.safetensors is damaged", told.err)
    assert "resumed        out/checkpoint-4, step 4" in told.out
    assert "checkpoint-5" in os.listdir("out") and same("out", whole)       # saved again
    assert any(name.startswith("checkpoint-5.damaged-") for name in os.listdir("out"))


def test_auto_without_a_checkpoint_says_that_it_starts_anew(whole, capsys):
    assert fit(*FLAGS, "--resume", "auto") == 0 and same("out", whole)
    assert "resumed        nothing: no checkpoint in out, so from the start" in (
        capsys.readouterr().out)


def test_one_that_is_named_and_damaged_is_refused(monkeypatch):
    run_to(3, monkeypatch)
    (newest() / "state.pt").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint-3/state.pt is missing"):
        fit(*FLAGS, "--resume", newest())


def test_without_a_sound_checkpoint_auto_starts_anew(whole, monkeypatch):
    run_to(1, monkeypatch)
    (newest() / "manifest.json").unlink()
    assert fit(*FLAGS, "--resume", "auto") == 0 and same("out", whole)


# --- Continued with other flags ------------------------------------------------------------------

def test_flags_that_change_the_result_are_refused_with_both_values(monkeypatch, capsys):
    run_to(2, monkeypatch)
    before = Path("out/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="checkpoint-2 was trained with other flags: batch_size: "
                                         "saved 4, now 2; lr: saved 0.001, now 0.5. Give the "
                                         "saved ones, or --allow-changed-flags"):
        fit(*FLAGS, "--resume", "auto", "--lr", 0.5, "--batch-size", 2)
    with pytest.raises(ValueError, match="max_steps: saved 6, now 200"):
        fit(*FLAGS, "--resume", "auto", "--max-steps", 200)     # would move the whole schedule
    rows = Path("pairs.jsonl").read_text()
    Path("pairs.jsonl").write_text(rows.replace("amber", "AMBER"))
    with pytest.raises(ValueError, match="data: saved '[0-9a-f]{32}', now '[0-9a-f]{32}'"):
        fit(*FLAGS, "--resume", "auto")                         # same name, other content
    Path("pairs.jsonl").write_text(rows)
    assert Path("out/metrics.jsonl").read_bytes() == before
    capsys.readouterr()
    assert fit(*FLAGS, "--resume", "auto", "--lr", 0.5, "--max-steps", 4, "--lr-schedule",
               "constant", "--allow-changed-flags") == 0
    assert "changed flag   lr: saved 0.001, now 0.5" in capsys.readouterr().out
    assert [row["lr"] for row in steps()] == [0, 0.0005, 0.5, 0.5]


@pytest.mark.parametrize("flag, value", [("lora_r", 4), ("seed", 1), ("mode", "query-side-tune"),
                                         ("num_hard_negatives", 0), ("temperature", 0.05)])
def test_each_kind_of_change_is_noticed(flag, value, whole):
    shutil.copytree(whole, "out")
    with pytest.raises(ValueError, match=rf"{flag}: saved \S+, now '?{value}'?\."):
        fit(*FLAGS, "--resume", "auto", f"--{flag.replace('_', '-')}", value)


def test_other_weights_are_refused_even_if_changed_flags_are_allowed(whole):
    shutil.copytree(whole, "out")
    with pytest.raises(ValueError, match="checkpoint-6 trains other parameters than this run"):
        fit(*FLAGS, "--lora-r", 0, "--resume", "auto", "--allow-changed-flags")


def test_memory_and_logging_flags_may_change(whole, monkeypatch):
    """Another chunk draws other dropout, so without it: the same run up to rounding."""
    flags = (*FLAGS, "--lora-dropout", 0)
    fit(*flags, out="straight")
    run_to(4, monkeypatch, "--lora-dropout", 0)
    assert fit(*flags, "--resume", "auto", "--grad-cache-chunk", 3, "--keep-graphs", 0,
               "--gradient-checkpointing", "--save-steps", 0, "--eval-steps", 0,
               "--keep-checkpoints", 1) == 0
    assert losses() == pytest.approx(losses("straight"), abs=1e-5)
    assert difference(weights(), weights("straight")) < 1e-5
    assert os.listdir("out").count("checkpoint-6") == len(checkpoint.list_checkpoints("out")) == 1


def test_an_earlier_checkpoint_or_another_runs_folder_is_refused(monkeypatch):
    run_to(4, monkeypatch)
    with pytest.raises(ValueError, match="out already holds a run, up to checkpoint-4"):
        fit(*FLAGS, "--resume", "out/checkpoint-2")
    fit("--max-steps", 1, out="other")
    with pytest.raises(ValueError, match="other already holds a run, up to checkpoint-1"):
        fit(*FLAGS, "--resume", "out/checkpoint-4", out="other")


def test_going_on_in_another_folder_is_the_same_run(whole, monkeypatch):
    run_to(4, monkeypatch)
    assert fit(*FLAGS, "--resume", "out/checkpoint-4", out="moved") == 0
    assert steps("moved") == steps(whole)[4:] and equal(weights("moved"), weights(whole))


# --- Saving --------------------------------------------------------------------------------------

def test_as_many_checkpoints_stay_as_asked_for():
    fit("--save-steps", 1, "--keep-checkpoints", 3)
    assert [step for step, _ in checkpoint.list_checkpoints("out")] == [4, 5, 6]
    state = checkpoint.load("out/checkpoint-4")
    assert {"weights", "optimizer", "random", "step", "args", "metrics"} <= state.keys()
    assert json.loads(Path("out/checkpoint-4/state.json").read_text())["args"]["lr"] == 1e-3


def fail(*_):
    raise RuntimeError("a fault of the test")


def test_an_exception_within_a_step_saves_the_state_before_it(whole, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 4, fail)                         # after dropout has drawn, before the update
        with pytest.raises(RuntimeError, match="a fault of the test"):
            fit(*FLAGS)
    assert newest().name == "checkpoint-3"
    assert fit(*FLAGS, "--resume", "auto") == 0 and same("out", whole)


def test_an_exception_after_a_step_saves_the_state_after_it(whole, monkeypatch):
    """In the evaluation of step 3: the update is done, and so are the draws of its dropout."""
    evaluate, calls = train.evaluate, []
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *a: calls.append(1) or (
            fail() if len(calls) == 2 else evaluate(*a)))
        with pytest.raises(RuntimeError, match="a fault of the test"):
            fit(*FLAGS)
    assert newest().name == "checkpoint-3"
    assert fit(*FLAGS, "--resume", "auto") == 0
    assert steps() == steps(whole) and equal(weights(), weights(whole))


def test_an_exception_within_the_update_saves_nothing_new(monkeypatch):
    """In step 4: the weights have moved already, the temperature is not yet clamped."""
    calls = []
    monkeypatch.setattr(objectives.LogitScale, "clamp_", lambda scale: calls.append(1) or (
        fail() if len(calls) == 4 else None))
    with pytest.raises(RuntimeError, match="a fault of the test"):
        fit(*FLAGS)
    assert [step for step, _ in checkpoint.list_checkpoints("out")] == [2]


def full_disk(write, steps, folder, state):
    if state["step"] in steps:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(folder, state)


def test_a_full_disk_does_not_end_the_run_and_is_told(whole, monkeypatch, capsys):
    write = checkpoint.write_state
    monkeypatch.setattr(checkpoint, "write_state", lambda *a: full_disk(write, {4}, *a))
    assert fit(*FLAGS, "--keep-checkpoints", 9) == 0 and same("out", whole)
    assert [step for step, _ in checkpoint.list_checkpoints("out")] == [2, 6]
    told = capsys.readouterr().err
    assert "step 4 was not saved: " in told and "No space left on device" in told
    assert "earlier checkpoints are intact" in told


class FullLog:
    """An open metrics.jsonl that has no room for the row of step 2."""
    name = "metrics.jsonl"

    def __init__(self, file):
        self.file = file

    def write(self, text):
        if '"step": 2,' in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file.write(text)

    def flush(self):
        self.file.flush()


def test_a_log_without_room_loses_its_row_and_not_the_run(monkeypatch, capsys):
    open_log = checkpoint.open_log
    monkeypatch.setattr(checkpoint, "open_log", lambda *a: FullLog(open_log(*a)))
    assert fit() == 0 and [row["step"] for row in steps()] == [1, 3, 4, 5, 6]
    assert "step 2 is not in metrics.jsonl: [Errno 28] No space left" in capsys.readouterr().err


def test_a_stopped_run_that_could_not_be_saved_does_not_claim_so(monkeypatch, capsys):
    write = checkpoint.write_state
    monkeypatch.setattr(checkpoint, "write_state", lambda *a: full_disk(write, {3}, *a))
    at_step(monkeypatch, 3, stop)
    assert fit(*FLAGS) == 1 and newest().name == "checkpoint-2"
    assert "step 3 was not saved" in capsys.readouterr().err


# --- Two processes -------------------------------------------------------------------------------

def on_two(*flags, out="out", rank_1=lambda: None):
    """Exit statuses of a run on two processes: two forks, told what torchrun tells its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def join(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if rank:
            rank_1()
    return [finish(child) for child in [
        start(*flags, out=out, prepare=lambda rank=rank: join(rank)) for rank in (0, 1)]]


def test_two_processes_killed_and_stopped_are_the_same_run():
    """kill -9 of one, then Ctrl-C to one: losses, weights, both dropout streams; then W = 1."""
    flags = (*FLAGS, "--batch-size", 2)                         # so a global batch is 4 again
    assert on_two(*flags, out="whole") == [0, 0], printed("whole")
    patch = pytest.MonkeyPatch()                                # used in the children only
    statuses = on_two(*flags, rank_1=lambda: at_step(patch, 4, lambda: stop(signal.SIGKILL)))
    assert statuses == [1, -signal.SIGKILL] and newest().name == "checkpoint-2", printed()
    statuses = on_two(*flags, "--resume", "auto", rank_1=lambda: at_step(
        patch, 3, lambda: [stop(number) for number in (signal.SIGINT, signal.SIGTERM)]))
    assert statuses == [75, 75] and newest().name == "checkpoint-5", printed()
    assert on_two(*flags, "--resume", "auto") == [0, 0] and same("out", "whole"), printed()
    ends = [checkpoint.load(newest(out))["random"] for out in ("out", "whole")]
    assert all(a["torch"].equal(b["torch"]) for a, b in zip(*ends)) and len(ends[0]) == 2
    assert not ends[0][0]["torch"].equal(ends[0][1]["torch"])   # each its own dropout
    with pytest.raises(ValueError, match="processes: saved 2, now 1"):
        fit(*flags, "--resume", "auto")
