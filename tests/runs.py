"""Small runs of the real loop inside a test, and children that may be killed.

    tiny                a fixture: the built-in model a tenth as large, on the CPU, in a new folder
    fit(*flags)         train.main in this process on the folder's pairs.jsonl -> exit status
    start, finish       the same in a forked child: it may be sent any signal
    log, weights        what a run left: rows of metrics.jsonl, trained tensors of a checkpoint

The child is forked, not started, because importing torch and transformers takes longer than a run.
"""
import contextlib
import functools
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import model
import objectives
import train
from tests.processes import die_with_parent

WORDS = "amber birch cedar delta ember fjord grove heron iris jade kelp lotus maple north".split()
CLOCK = {"pairs_per_second", "peak_memory_mb"}          # what differs from run to run


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Yields the current folder of a test; it holds pairs.jsonl."""
    with small_model_in(tmp_path, monkeypatch):
        yield tmp_path


@contextlib.contextmanager
def small_model_in(folder, monkeypatch):
    """For fixtures: a small model and no GPU; afterwards the signals' handlers are as before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "tiny_qwen3_vl", functools.partial(
        model.tiny_qwen3_vl, hidden=32, layers=1, heads=2, vocab_size=300))
    # Loading what was saved in other programs takes longer than a run: test_train_speed.py does it.
    monkeypatch.setattr(train, "verify", lambda model, folder, samples, **options: 0.0)
    monkeypatch.chdir(folder)
    write_rows("pairs.jsonl", pairs(23))
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def use_float64(monkeypatch):
    """Every number of the run in double precision, so that equal means equal to 1e-10."""
    make, scale = train.tiny_qwen3_vl, objectives.LogitScale

    def double(*args, **options):
        backbone, processor = make(*args, **options)
        return backbone.double(), processor
    monkeypatch.setattr(train, "tiny_qwen3_vl", double)
    monkeypatch.setattr(objectives, "LogitScale", lambda *a, **k: scale(*a, **k).double())


def pairs(count, negatives=2):
    """Different rows of different lengths, the same on every call."""
    rng = random.Random(0)

    def text(number):
        return " ".join([*rng.choices(WORDS, k=rng.randint(1, 9)), str(number)])
    return [{"query": f"what is {text(i)}", "positive": text(i),
             "negatives": [text(f"{i} no {n}") for n in range(negatives)]} for i in range(count)]


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(*flags, out="out"):
    """A short run; of a flag that is given twice, the last one counts."""
    return ["--train-jsonl", "pairs.jsonl", "--output-dir", out, "--max-steps", "6",
            "--warmup-steps", "2", *map(str, flags)]


def fit(*flags, out="out"):
    return train.main(arguments(*flags, out=out))


def log(out="out", clock=False):
    """Rows of metrics.jsonl, without what the clock and the memory say. JSON knows no NaN."""
    rows = [json.loads(line, parse_constant=pytest.fail)
            for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return rows if clock else [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]


def steps(out="out"):
    """The rows of optimizer steps, without evaluations."""
    return [row for row in log(out) if "loss" in row]


def losses(out="out"):
    return [row["loss"] for row in steps(out)]


def newest(out="out"):
    return checkpoint.list_checkpoints(out)[-1][1]


def weights(out="out", step=None):
    """{name: tensor} of what was trained, at the newest checkpoint or a given one."""
    path = newest(out) if step is None else Path(out, f"checkpoint-{step}")
    return load_file(path / "weights.safetensors")


def moments(out="out", step=None):
    """The optimizer's tensors at a checkpoint, in one list."""
    path = newest(out) if step is None else Path(out, f"checkpoint-{step}")
    state = torch.load(path / "state.pt", weights_only=True)["optimizer"]["state"]
    return [tensor for number in sorted(state) for tensor in state[number].values()]


def equal(a, b):
    """Bit for bit, two dicts or lists of tensors."""
    a, b = (list(x.items()) if isinstance(x, dict) else list(enumerate(x)) for x in (a, b))
    return [k for k, _ in a] == [k for k, _ in b] and all(
        torch.equal(s, t) for (_, s), (_, t) in zip(a, b))


def difference(a, b):
    """Largest absolute difference of two dicts of tensors with the same names."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def at_step(monkeypatch, number, action):
    """Call action() in the middle of optimizer step `number` (counted in this process)."""
    synchronise, count = train.sync_gradients, [0]

    def wrapped(parameters):
        count[0] += 1
        if count[0] == number:
            action()
        return synchronise(parameters)
    monkeypatch.setattr(train, "sync_gradients", wrapped)


# --- In a child ----------------------------------------------------------------------------------

def start(*flags, out="out", prepare=lambda: None):
    """Fork; the child trains, prints into OUT.txt, and is gone after 60 seconds in any case."""
    own_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(signal.SIGKILL, own_pid)
        signal.alarm(60)
        printed = os.open(f"{out}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)      # not pytest's
        prepare()
        status = fit(*flags, out=out)
    except SystemExit as stop:
        status = stop.code
    except BaseException:                               # noqa: BLE001 - told, and a status
        os.write(2, traceback.format_exc().encode())
        status = 1
    os._exit(status)


def finish(pid, timeout=60):
    """Exit status of a child as subprocess gives it: negative for a signal."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child was not finished after {timeout} seconds")


def printed(out="out"):
    return Path(f"{out}.txt").read_text()
