"""A process that fails ends the job: its own message, a non-zero status, in bounded time.

And the launcher of these tests keeps its promises: bounded waits, and no process left behind.
"""
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dist
from tests import processes
from tests.processes import ROOT, run, torchrun

JOB = """
import os, signal, sys
import torch
import dist
from gradcache import grad_cache_step
from losses import LogitScale, info_nce

device = dist.setup(timeout_minutes=1)
torch.manual_seed(dist.rank())
tower, scale = torch.nn.Linear(4, 3), LogitScale()
dist.broadcast_parameters(tower)

for step in range(1000):
    def loss_fn(q, d):
        if step == 3 and dist.rank() == 1:                      # between two collectives of a step
            if sys.argv[1] == "raise":
                raise ValueError("pairs.jsonl, line 7: the image cannot be read")
            os.kill(os.getpid(), signal.SIGKILL)
        d = dist.gather_with_grad(d)
        return info_nce(q, d, scale, torch.arange(4) + 4 * dist.rank(), reduction="sum") / 8

    grad_cache_step([tower, tower], [torch.randn(4, 4), torch.randn(4, 4)], loss_fn, 2)
    dist.sync_gradients([*tower.parameters(), *scale.parameters()])
    dist.print0("step", step)
dist.cleanup()
"""


@pytest.mark.parametrize("fault, message", [
    ("raise", "ValueError: pairs.jsonl, line 7: the image cannot be read"),
    ("kill", "Signal 9 (SIGKILL)")])
def test_a_process_that_fails_within_a_step_ends_the_job_with_its_own_message(
        fault, message, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    status, printed, _ = torchrun(2, script, fault, timeout=60)
    assert status != 0 and message in printed, printed
    assert "step 2" in printed and "step 3" not in printed


# --- Joining, and waiting for somebody who never comes -------------------------------------------

def join_like_torchrun(port, absent):
    """Leave the test's group and join as torchrun's environment says; wait for process `absent`."""
    rank, world_size = dist.rank(), dist.world_size()
    dist.cleanup()
    assert (dist.rank(), dist.world_size(), dist.is_main()) == (0, 1, True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = dist.setup(timeout_minutes=1 / 60)
    joined = (device.type, dist.rank(), dist.world_size(), dist.any_process(rank == 1))
    start, error = time.monotonic(), None
    if rank != absent:
        try:
            dist.barrier()
        except RuntimeError as e:
            error = str(e)
    else:
        time.sleep(2)
    dist.cleanup()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return joined, error, time.monotonic() - start


def test_a_collective_gives_up_when_a_process_does_not_take_part():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (joined, error, seconds), (other, _, _) = run(2, join_like_torchrun, port, 1)
    assert joined[1:] == (0, 2, True) and other[1:] == (1, 2, True)
    assert "time" in error.lower() and 0.5 < seconds < 3


def test_without_torchrun_there_is_nothing_to_join(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert dist.setup() == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert dist.world_size() == 1
    dist.cleanup()


def test_more_processes_than_gpus_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="only 2: lower --nproc_per_node"):
        dist.setup()


# --- The launcher --------------------------------------------------------------------------------

def fail_or_wait(fault):
    if dist.rank() == 1:
        if fault == "raise":
            raise ValueError("told by rank 1")
        time.sleep(1000)
    dist.barrier()


@pytest.mark.parametrize("fault, told", [
    ("raise", "ValueError: told by rank 1"), ("sleep", "in fail_or_wait")])
def test_the_launcher_reports_and_ends_a_team_that_cannot_finish(fault, told):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=told):
        run(2, fail_or_wait, fault, timeout=3)
    assert time.monotonic() - start < 20 and not processes.TEAM


LEAVE_PIDS = """
import os, pathlib, time
pathlib.Path({directory!r}, f"{{os.getpid()}}.pids").write_text(f"{{os.getpid()}} {{os.getppid()}}")
time.sleep(1000)
"""

PRETENDED_TEST_RUN = """
import threading
from tests.processes import run, torchrun
script = {script!r}
threading.Thread(target=torchrun, args=(2, script)).start()
run(2, exec, open(script).read())
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"                                    # ended, whoever may still ask why


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, needs prctl")
def test_no_process_outlives_a_test_run_that_is_killed(tmp_path):
    """Two of a team and their parent, torchrun and its two: all gone after kill -9."""
    script = tmp_path / "leave_pids.py"
    script.write_text(LEAVE_PIDS.format(directory=str(tmp_path)))
    test_run = subprocess.Popen(
        [sys.executable, "-c", PRETENDED_TEST_RUN.format(script=str(script))], cwd=ROOT)

    def pids():
        return {int(p) for f in tmp_path.glob("*.pids") for p in f.read_text().split()}

    try:
        assert wait_until(lambda: len(pids()) == 6, 60) and all(map(alive, pids()))
    finally:
        test_run.kill()
        test_run.wait()
    assert wait_until(lambda: not any(map(alive, pids())), 15)
