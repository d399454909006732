"""A save that fails or is killed at any instruction leaves the old checkpoint or the new one."""
import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

import checkpoint
from tests.test_checkpoint import add_model, same, small_state, tree

ROOT = Path(__file__).resolve().parent.parent
BIG = torch.arange(30000.)                              # 120 kB, above the limit set below


@pytest.mark.parametrize("where", ["weights", "optimizer", "write_files", "fsync"])
def test_a_full_disk_leaves_earlier_checkpoints_intact_and_says_so(tmp_path, where, monkeypatch):
    checkpoint.save(tmp_path / "checkpoint-1", small_state(1), add_model)
    state, before = small_state(2), tree(tmp_path)
    if where in state:
        state[where]["big"] = BIG

    def write(staging):
        (staging / "big").write_bytes(bytes(120000 if where == "write_files" else 0))

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if where == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))    # a longer file: "File too large"
    try:
        with pytest.raises(OSError, match="checkpoint-2 was not saved.*checkpoints are intact"):
            checkpoint.save(tmp_path / "checkpoint-2", state, write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tree(tmp_path) == before and os.listdir(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("model")])
def test_an_interrupted_save_leaves_nothing_and_keeps_its_exception(tmp_path, error):
    def stop(staging):
        raise error
    with pytest.raises(error if isinstance(error, type) else type(error)):
        checkpoint.save(tmp_path / "checkpoint-1", small_state(1), stop)
    assert os.listdir(tmp_path) == []


def test_everything_is_flushed_before_it_appears_and_the_manifest_last(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths)))
    path = checkpoint.save(tmp_path / "new" / "checkpoint-1", small_state(1), add_model)
    before, after = events[:events.index("rename")], events[events.index("rename"):]
    others = [p.stat().st_ino for p in path.rglob("*") if p.name != "manifest.json"]
    assert len(others) == 5
    manifest = before.index((path / "manifest.json").stat().st_ino)
    assert all(inode in before[:manifest] for inode in others)
    assert path.stat().st_ino in before[manifest:]      # the folder's names, manifest included
    assert {(tmp_path / "new").stat().st_ino, tmp_path.stat().st_ino} <= set(after)


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir", "os.listdir",
               "os.scandir", "fcntl.flock"}


def in_child(work, *arguments):
    """Fork; the child runs `work` and nothing else, and an alarm ends it in any case."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(20)
        work(*arguments)
        os._exit(0)
    finally:                                            # not reached unless work has failed
        traceback.print_exc()
        os._exit(1)


def save_and_rotate(output, fatal):
    """Become checkpoint-2 and delete checkpoint-1, but die at file operation number `fatal`."""
    count = 0

    def hook(event, _):
        nonlocal count
        count += event in FILE_EVENTS
        if event in FILE_EVENTS and count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpoint.save(output / "checkpoint-2", small_state(2), add_model)
    checkpoint.rotate(output, keep=1)


def kill_at_every_file_operation(folder):
    """Killed at the first, second, ... operation, until one child gets through all of them."""
    outcomes, status = [], None
    checkpoint.save(folder / "old", small_state(1), add_model)
    while status != 0:
        output = folder / str(len(outcomes))
        shutil.copytree(folder / "old", output / "checkpoint-1")
        _, status = os.waitpid(in_child(save_and_rotate, output, len(outcomes) + 1), 0)
        assert status in (0, signal.SIGKILL), status
        found = checkpoint.load(checkpoint.latest(output))
        assert same(found["weights"], small_state(found["step"])["weights"])
        hidden = [name for name in os.listdir(output) if name.startswith(".")]
        outcomes.append([found["step"], *(any(f".{what}-" in name for name in hidden)
                                          for what in ("staging", "deleted"))])
        checkpoint.save(output / "checkpoint-3", small_state(3))
        assert not list(output.glob(".*")), "the next save removes what the killed one left"
    return outcomes


def save_for_ever(folder, first, writer):
    for step in range(first, first + 1000):
        checkpoint.save(folder / f"checkpoint-{step}", small_state(step), add_model)
        os.write(writer, b"%d\n" % step)                # from here on this step is promised
        checkpoint.rotate(folder, keep=2)


def kill_at_random_moments(folder, kills):
    """Wait for up to two saves, then for some part of the next one; kill; look; resume."""
    moments, last, interrupted = random.Random(0), 0, 0
    start = time.monotonic()
    checkpoint.save(folder / "trial" / "checkpoint-0", small_state(1), add_model)
    one_save = time.monotonic() - start
    for kill in range(kills):
        reader, writer = os.pipe()
        pid = in_child(save_for_ever, folder, last + 1, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            promised = [last, *(int(pipe.readline()) for _ in range(kill % 3))]
            time.sleep(moments.uniform(0, 1.5 * one_save))
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
            promised = max([*promised, *map(int, pipe.read().split())])
        interrupted += any(name.startswith(".") for name in os.listdir(folder))
        found = checkpoint.latest(folder)
        if found is None:                               # killed before the first promise
            assert promised == 0
            continue
        state = checkpoint.load(found)
        assert promised <= state["step"] <= promised + 1, (promised, found)
        assert same(state["weights"], small_state(state["step"])["weights"])
        last = state["step"]
    checkpoint.save(folder / f"checkpoint-{last + 1}", small_state(last + 1))
    assert not list(folder.glob(".*")) and len(checkpoint.list_checkpoints(folder)) <= 4
    return [last, interrupted]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Both loops in one other process, which has imported torch but never started its threads."""
    folder = tmp_path_factory.mktemp("killed")
    program = ("import json, sys; from pathlib import Path\n"
               "import tests.test_checkpoint_kill as kills\n"
               "folder = Path(sys.argv[1]); (folder / 'random').mkdir()\n"
               "print(json.dumps([kills.kill_at_every_file_operation(folder / 'each'),\n"
               "                  kills.kill_at_random_moments(folder / 'random', 25)]))")
    run = subprocess.run([sys.executable, "-c", program, str(folder)], cwd=ROOT, timeout=100,
                         capture_output=True, text=True, check=False,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(killed):
    outcomes = killed[0]
    steps = [step for step, _, _ in outcomes]
    assert len(outcomes) > 30 and set(steps) == {1, 2} and steps == sorted(steps)
    # The kills did land in the middle of a save and in the middle of a deletion.
    assert any(staging for _, staging, _ in outcomes) and any(gone for _, _, gone in outcomes)


def test_25_random_kills_of_a_save_loop_lose_at_most_the_save_in_progress(killed):
    last, interrupted = killed[1]
    assert last >= 24 and interrupted >= 1              # the promises waited for; a save was cut


def test_leftovers_of_dead_runs_go_and_those_of_living_runs_and_strangers_stay(tmp_path):
    mine = tmp_path / ".checkpoint-7.staging-0123456789abcdef"
    others = [".checkpoint-7.staging-notes", ".git", ".checkpoint-7", "x.staging-0123456789abcdef"]
    for name in [mine.name, *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".link.staging-0123456789abcdef").symlink_to(".git")
    assert checkpoint.latest(tmp_path) is None
    living = os.open(tmp_path, os.O_RDONLY)             # the lock that a save in progress holds
    fcntl.flock(living, fcntl.LOCK_SH)
    checkpoint.save(tmp_path / "checkpoint-8", small_state(8))
    assert mine.exists()
    os.close(living)
    checkpoint.save(tmp_path / "checkpoint-9", small_state(9))
    assert not mine.exists() and all((tmp_path / name / "file").exists() for name in others)
