"""Several processes inside a test, and none left after it.

    run(W, function, *args)      call a function on W gloo processes -> its results, by rank
    torchrun(W, script, *args)   a real torchrun job -> (exit status, all it printed, seconds)

`run` keeps one team of processes for the whole test run: importing torch, not the work, is what
costs, so one process imports it and the team is forked from that one. Every call joins the
processes to a new process group, so that a test finds nothing of the previous one.

Every wait is bounded. When one process of `run` raises, or the time is up, the whole team is killed
and the test fails with the traceback, or the stack, of each process.

Nothing outlives the test run, whatever ends it, kill -9 included: each process asks the kernel to
be killed when its parent dies (prctl, Linux only).
"""
import atexit
import ctypes
import faulthandler
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEAM_SIZE = 4
TEAM = {}             # empty, or: "process" (their parent), "connections", "directory", "calls"


def run(world_size, function, *args, timeout=60):
    """Call function(*args) on processes 0 .. world_size - 1 of one gloo group.

    The function and its arguments travel by pickle: it must be importable from its module. Returns
    the results in order of rank. Raises AssertionError, with what every process has to tell, if it
    raises on one of them or is not done after `timeout` seconds.
    """
    if not TEAM:
        start_team()
    TEAM["calls"] += 1
    connections = TEAM["connections"][:world_size]
    store = Path(TEAM["directory"].name, f"store{TEAM['calls']}")       # where the group meets
    try:
        for rank, connection in enumerate(connections):
            connection.send_bytes(pickle.dumps((function, args, rank, world_size, store, timeout)))
        replies = collect(connections, timeout)
    except BaseException:                               # interrupted: nobody will read the answers
        stop_team()
        raise
    if len(replies) == world_size and all(good for good, _ in replies.values()):
        return [replies[rank][1] for rank in range(world_size)]
    printed = stop_team()
    stories = [f"--- rank {rank}: {replies.get(rank, (False, 'no answer, stopped at'))[1]}\n"
               f"{printed[rank]}" for rank in range(world_size)]
    raise AssertionError("\n".join([f"{function.__name__} failed on {world_size} processes",
                                    *stories]))


def collect(connections, timeout):
    """{rank: (True, result) or (False, text)} of those that answer in time."""
    replies, deadline = {}, time.monotonic() + timeout
    while len(replies) < len(connections) and time.monotonic() < deadline:
        waiting = [c for rank, c in enumerate(connections) if rank not in replies]
        for connection in wait(waiting, max(0, deadline - time.monotonic())):
            rank = connections.index(connection)
            try:
                replies[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                replies[rank] = (False, "died")
            if not replies[rank][0]:                    # then the others may wait for it for ever
                deadline = min(deadline, time.monotonic() + 1)
    return replies


def start_team():
    """Start a process that imports torch once and forks the team; a socket leads to each."""
    pairs = [socket.socketpair() for _ in range(TEAM_SIZE)]
    theirs = [their_end.detach() for _, their_end in pairs]
    TEAM.update(directory=tempfile.TemporaryDirectory(), calls=0,
                connections=[Connection(own_end.detach()) for own_end, _ in pairs])
    start = f"import tests.processes as p; p.fork_team{theirs, os.getpid(), TEAM['directory'].name}"
    TEAM["process"] = subprocess.Popen(
        [sys.executable, "-c", start],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, pass_fds=theirs,
        stdin=subprocess.DEVNULL, start_new_session=True)
    for fd in theirs:
        os.close(fd)
    atexit.register(stop_team)
    for connection in TEAM["connections"]:
        connection.poll(60) and connection.recv_bytes()         # it is ready for calls


def stop_team():
    """Kill the team; return what each printed, after a request to print where it stands."""
    if not TEAM:
        return
    for number, pause in ((signal.SIGUSR1, 0.3), (signal.SIGKILL, 0)):
        if TEAM["process"].poll() is None:
            os.killpg(TEAM["process"].pid, number)
            time.sleep(pause)
    TEAM["process"].wait()
    logs = [Path(TEAM["directory"].name, f"log{rank}") for rank in range(TEAM_SIZE)]
    printed = [log.read_text()[-4000:] if log.exists() else "" for log in logs]
    for connection in TEAM["connections"]:
        connection.close()
    TEAM["directory"].cleanup()
    TEAM.clear()
    return printed


def fork_team(sockets, parent, directory):
    """The team's parent: import what takes long, fork, wait until all are gone."""
    die_with_parent(signal.SIGKILL, parent)
    import dist, gradcache, losses  # noqa: F401, I001
    own_pid = os.getpid()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)       # meant for the team, below
    for rank, own in enumerate(sockets):
        if os.fork() == 0:
            die_with_parent(signal.SIGKILL, own_pid)
            for fd in sockets:
                if fd != own:
                    os.close(fd)
            log = os.open(Path(directory, f"log{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.register(signal.SIGUSR1)       # prints the stack; nothing else happens
            serve(Connection(own))
            os._exit(0)
    for fd in sockets:
        os.close(fd)
    for _ in sockets:
        os.wait()


def serve(connection):
    """One of the team: answer calls until the other end of the socket is closed."""
    import torch
    import torch.distributed as td
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        if td.is_initialized():                         # now that all have answered the last call
            td.destroy_process_group()
        try:
            function, args, rank, world_size, store, timeout = pickle.loads(call)
            td.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                  world_size=world_size, timeout=timedelta(seconds=timeout))
            reply = pickle.dumps((True, function(*args)))
        except BaseException:                           # noqa: BLE001 - it is told, not lost
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)


def torchrun(world_size, script, *args, timeout=60, env=None):
    """Run a script as `torchrun --nproc_per_node=world_size` would.

    Returns (exit status, everything printed, seconds). After `timeout` seconds the job is
    terminated and AssertionError raised.
    """
    run_agent = (f"import tests.processes as p; p.die_with_parent({int(signal.SIGTERM)}, "
                 f"{os.getpid()}); from torch.distributed.run import main; main()")
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        agent = subprocess.Popen(
            [sys.executable, "-c", run_agent, "--standalone", f"--nproc_per_node={world_size}",
             "-m", "tests.processes", str(script), *map(str, args)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            agent.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if agent.poll() is None:
                agent.terminate()                       # torchrun then ends its processes
                try:
                    agent.wait(10)
                except subprocess.TimeoutExpired:
                    agent.kill()                        # and they ask to be killed with it
                    agent.wait()
        seconds = time.monotonic() - start
        log.seek(0)
        printed = log.read()
    assert seconds < timeout, f"not finished after {timeout} seconds:\n{printed[-8000:]}"
    return agent.returncode, printed, seconds


def die_with_parent(number=signal.SIGKILL, parent=None):
    """Ask the kernel to send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))         # 1 is PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:   # it died before we could ask
        os._exit(1)


if __name__ == "__main__":                              # what torchrun starts: the script, guarded
    die_with_parent()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(sys.argv[0], run_name="__main__")
