"""Read 7 of 8. A checkpoint is complete or absent, and continues the run bit for bit.

A run can die at any instruction: kill -9, a full disk, a power cut. A file that was being
written in place is then half new, half old. So a checkpoint is a directory that appears at once:

    OUTPUT/.checkpoint-120.staging-9f3c.../   while it is written; no reader looks here
    OUTPUT/checkpoint-120/                    from then on; never changed again
        weights.safetensors    state["weights"]: parameter name -> tensor
        state.pt               all other entries: optimizer, random states, step, ...
        state.json             step, args, metrics once more, for people and pictures
        model/...              whatever the caller's `write_files` adds
        manifest.json          size and SHA-256 of every file above, written last

save, in four steps:
1. refuse an occupied target, a NaN or infinity, and any value that load could not read back;
2. write everything into a hidden staging folder beside the target;
3. flush every file to the disk, and only then write the manifest that vouches for them;
4. rename the folder, the one operation a file system does wholly or not at all.
load goes the other way: compare every byte with the manifest, then read with loaders that cannot
run code. latest and rotate trust a checkpoint only after the same comparison.

A loop that can be killed anywhere:

    path = latest("out")                                        # None at the very first start
    if path:
        state = load(path)                                      # weights, optimizer, step, ...
        set_random_state(state["random"][rank])
    ...
    save(f"out/checkpoint-{step}", {"weights": ..., "optimizer": optimizer.state_dict(),
                                    "random": [...], "position": ..., "step": step, ...})
    rotate("out", keep=3)

What it costs: one copy of the weights in host memory; every byte written once and read once for
its hash. verify reads every byte once, load twice; rotate verifies the newest checkpoint.

What it does not do: it knows nothing of processes. The main one alone calls save, latest and
rotate; the others hand it their random_state(), and `state` carries them as a list. SHA-256 finds
damage, not forgery: whoever can write the folder can write a manifest that fits. A hostile folder
is harmless because nothing in it is executed and no link is followed. Generators of your own
(torch.Generator, np.random.default_rng) are yours to store. Where a folder cannot be locked
(Windows, some network disks) the leftovers of a kill stay; Windows cannot flush one either, so
there a kill is survived and a power cut perhaps not.
"""
import contextlib
import errno
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import stat
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

REQUIRED = {"weights.safetensors", "state.pt", "state.json"}
READABLE = ("step", "args", "metrics")                  # what state.json repeats for people
PLAIN = (type(None), bool, int, float, str)             # exact types: np.float64 is a float too,
TENSORS = (torch.Tensor, torch.nn.Parameter)            # but weights-only loading rejects it
HIDDEN = re.compile(r"\..+\.(staging|deleted)-[0-9a-f]{16}")


class CheckpointError(ValueError):
    """A checkpoint, or a state about to become one, is not sound. Names the file and the fault."""


def save(directory, state, write_files=None):
    """Publish `state` as `directory`, which appears complete or not at all; returns its path.

    state        nested dicts, lists and tuples of tensors, numbers, strings and None;
                 state["weights"] is a dict name -> tensor
    write_files  called with the staging folder to add files of its own, for example model/
    Raises FileExistsError if the target holds anything already, CheckpointError if the state must
    not be stored, OSError if writing fails. After any error nothing is published or left behind.
    """
    directory = Path(os.path.abspath(directory))
    parent = directory.parent
    # 1) Refuse before the first byte is written.
    refuse_occupied(directory)
    check_storable(state, "state")
    new_folders = [folder for folder in directory.parents if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    with leftovers_removed(parent):
        staging = hidden_name(directory, "staging")
        try:
            # 2) Write. Same parent, hence same file system: only there is a rename indivisible.
            staging.mkdir()                             # not mkdtemp, whose mode 0700 would stay
            write_state(staging, state)
            if write_files is not None:
                write_files(staging)
            # 3) Flush and hash all of it, then the hashes.
            seal(staging)
            # 4) Publish. A rename onto a non-empty directory fails, so a race cannot overwrite.
            os.rename(staging, directory)
        except BaseException as error:                  # Ctrl-C, too, must leave nothing behind
            shutil.rmtree(staging, ignore_errors=True)
            if not isinstance(error, (OSError, SafetensorError)):
                raise
            refuse_occupied(directory)                  # someone published this name meanwhile
            raise OSError(f"checkpoint {directory} was not saved: {error}. Nothing was published, "
                          "earlier checkpoints are intact: make room, or choose another output "
                          "directory, and resume") from error
    for folder in [parent, *(new.parent for new in new_folders)]:
        flush(folder)                                   # the new names themselves
    return directory


def load(directory):
    """Verify `directory` and return the state that save was given, all tensors on the CPU.

    Raises CheckpointError naming the file and the fault. Never runs code from the checkpoint.
    """
    verify(directory)
    path = Path(directory, "weights.safetensors")
    try:
        weights = load_file(path)
        path = Path(directory, "state.pt")
        rest = torch.load(path, map_location="cpu", weights_only=True)
        return {**rest, "weights": weights}
    except Exception as error:  # noqa: BLE001  unknown bytes make a parser fail in any way
        # torch's own message recommends unsafe loading as the remedy: not passed on.
        raise CheckpointError(f"{path} holds other things than tensors and plain values "
                              f"({type(error).__name__}): not written by save. Nothing in it was "
                              "run; use another checkpoint") from None


def verify(directory):
    """Return if every file is there, unchanged, and none besides; else raise CheckpointError."""
    directory = Path(directory)
    if directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; if it is a link, give its target")
    found = list_files(directory)
    if found.pop("manifest.json", None) is None:
        raise CheckpointError(f"{directory / 'manifest.json'} is missing: no finished checkpoint")
    listed = read_manifest(directory / "manifest.json")
    for name in sorted((REQUIRED | set(listed)) - set(found)):
        raise CheckpointError(f"{directory / name} is missing")
    for name in sorted(set(found) - set(listed)):
        raise CheckpointError(f"{directory / name} is not in the manifest: added after the save")
    for name, path in found.items():    # only paths that our own walk has found are opened
        actual = fingerprint(path)
        if actual != listed[name]:
            raise CheckpointError(f"{path} is damaged: {actual}, the manifest says {listed[name]}")


def list_checkpoints(output_dir):
    """[(step, path)] of everything named checkpoint-STEP, oldest first. Nothing is opened.

    Whatever is listed after latest() is damaged; move_damaged=True has it set aside.
    """
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    matches = [re.fullmatch(r"checkpoint-([0-9]+)", name) for name in names]
    return sorted((int(match[1]), Path(output_dir, match[0])) for match in matches if match)


def latest(output_dir, move_damaged=False):
    """Path of the newest checkpoint-STEP that verifies, or None; each one skipped is named.

    Newest by step number: 100 comes after 99, and copying a folder renews its date. A run that is
    about to pass the damaged ones' steps again moves them out of its way.
    """
    for _, path in reversed(list_checkpoints(output_dir)):
        try:
            verify(path)
            return path
        except (CheckpointError, OSError) as fault:
            print(f"skipped {path}: {fault}", file=sys.stderr)
            if move_damaged:
                set_aside(path)
    return None


def rotate(output_dir, keep):
    """Delete all but the newest `keep` checkpoints if the newest verifies; returns the deleted.

    If it does not, nothing is deleted: the old ones may be all that is left. No error here is
    worth a run, so a fault is printed and the next call tries again. Links are not counted.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: rotation keeps at least one checkpoint")
    paths = [path for _, path in list_checkpoints(output_dir)
             if path.is_dir() and not path.is_symlink()]
    deleted = []
    try:
        if len(paths) > keep:
            verify(paths[-1])
        for path in paths[:-keep]:
            # Deleting takes many operations. Hidden first, half a checkpoint is never in sight;
            # what a kill leaves of it, the next save removes.
            doomed = hidden_name(path, "deleted")
            os.rename(path, doomed)
            flush(path.parent)
            shutil.rmtree(doomed)
            deleted.append(path)
    except (CheckpointError, OSError) as fault:
        print(f"older checkpoints stay: {fault}", file=sys.stderr)
    return deleted


def set_aside(directory):
    """Rename a damaged checkpoint to NAME.damaged-..., so that its step can be saved again.

    A run that resumes before a damaged checkpoint-30 reaches step 30 once more, and save never
    overwrites. Nothing is deleted: a person may still rescue something. Returns the new path.
    """
    return Path(directory).rename(f"{directory}.damaged-{secrets.token_hex(4)}")


def random_state():
    """This process's generators (Python, NumPy, torch, every CUDA device) as numbers and tensors.

    NumPy hands out an array object, which weights-only loading refuses; a list of integers is the
    same state.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(words), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state):
    """Put every generator where random_state() found it: the next draws are the same, exactly."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) != torch.cuda.device_count():
        print(f"random states of {len(state['cuda'])} CUDA devices were saved, this process sees "
              f"{torch.cuda.device_count()}: draws on a GPU will differ", file=sys.stderr)
    for device, saved in enumerate(state["cuda"][:torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, device)


def changed_flags(saved_args, args, names):
    """["name: saved X, now Y"] for each of `names` that differs between two dicts of arguments.

    Which flags change the mathematics is the loop's knowledge, so it passes their names.
    """
    return [f"{name}: saved {saved_args.get(name)!r}, now {args.get(name)!r}"
            for name in names if saved_args.get(name) != args.get(name)]


def open_log(path, step):
    """metrics.jsonl, open for appending, with its rows up to `step`: a killed run may have written
    rows of steps that are repeated now, and half a row at the end."""
    rows = path.read_text().splitlines() if step and path.exists() else []
    kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= step]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text("".join(row + "\n" for row in kept))
    os.replace(path.with_suffix(".tmp"), path)
    return open(path, "a")


def write_row(log, row):
    """Append a row of numbers. Here, too, a full disk is told and does not end the run."""
    row = {k: v if np.isfinite(v) else None for k, v in row.items()}        # JSON knows no NaN
    try:
        print(json.dumps(row), file=log, flush=True)
    except OSError as error:
        print(f"step {row['step']} is not in {log.name}: {error}", file=sys.stderr)


def catch_signals():
    """SIGTERM and Ctrl-C only fill the returned list: the loop finishes its step, saves and leaves.
    One over 5 s later ends the process; sooner, torchrun repeats what the terminal sent to all."""
    caught = []

    def note(number, frame):
        if caught and time.monotonic() - caught[0] > 5:
            sys.exit(128 + number)
        caught.append(time.monotonic())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def leave_signals_to_parent(worker):
    """For loader workers: Ctrl-C reaches the whole process group, but the loop still needs them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ---- the parts of save --------------------------------------------------------------------------

def refuse_occupied(directory):
    """FileExistsError unless the name is free or an empty directory, which a rename replaces.

    This gives the message; the rename itself gives the guarantee.
    """
    empty = directory.is_dir() and not directory.is_symlink() and not os.listdir(directory)
    if os.path.lexists(directory) and not empty:
        raise FileExistsError(errno.EEXIST, f"{directory} exists and is never overwritten: resume "
                              "from it, move it away, or choose another output directory")


def check_storable(value, name):
    """CheckpointError naming the first entry that is not finite or that load could not return.

    Better now, while the run still has the value, than on the day of the resume. Only tensors must
    be finite: the run computes with them, while an argument `--max-grad-norm inf` is a record.
    """
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise CheckpointError(f"{name} has the key {key!r}; use a string or an integer")
            check_storable(item, f"{name}/{key}")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_storable(item, f"{name}/{index}")
    elif type(value) in TENSORS:
        if not value.isfinite().all():                  # the GPU waits here, once per tensor
            raise CheckpointError(f"{name} holds a NaN or an infinity, which would ruin the run "
                                  "that resumes: not saved, use an earlier checkpoint")
    elif type(value) not in PLAIN:
        raise CheckpointError(f"{name} is a {type(value).__module__}.{type(value).__name__}, which "
                              "weights-only loading refuses; convert it to a tensor, a number, a "
                              "string, or a dict, list or tuple of those")


@contextlib.contextmanager
def leftovers_removed(parent):
    """Delete what dead runs left hidden in `parent`; inside the block ours is safe from others.

    A process number does not tell dead from alive: it is reused, above all in containers. A lock
    does, since the kernel drops it with its process, however that ends. Every save holds a shared
    lock on the folder, so whoever gets the exclusive one knows that nobody else is saving here.
    """
    try:
        import fcntl
    except ImportError:                                 # Windows
        yield
        return
    handle = os.open(parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):              # another save runs, or no locks here
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in parent.iterdir():
                if HIDDEN.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)     # leaves links alone
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def hidden_name(path, purpose):
    """A free sibling name that no reader considers. Its digits come from the system: saving must
    not draw from the generators whose state it saves."""
    return path.with_name(f".{path.name}.{purpose}-{secrets.token_hex(8)}")


def write_state(staging, state):
    """weights.safetensors for any tool to open, state.pt for load, state.json for people."""
    # Copies, because safetensors refuses what tied weights are: two names for one memory.
    weights = {name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
               for name, tensor in state["weights"].items()}
    save_file(weights, staging / "weights.safetensors")
    rest = {key: value for key, value in state.items() if key != "weights"}
    try:
        torch.save(rest, staging / "state.pt")
    except RuntimeError as error:                       # how torch reports a full disk
        raise OSError(f"state.pt: {error} (is the disk full?)") from error
    readable = {key: rest[key] for key in READABLE if key in rest}
    # JSON knows no NaN and no infinity; as strings they leave the file readable for every tool.
    readable = json.loads(json.dumps(readable, default=str), parse_constant=str)
    (staging / "state.json").write_text(json.dumps(readable, indent=2), encoding="utf-8")


def seal(staging):
    """Flush all that was written; then write and flush the manifest that vouches for it."""
    # safetensors makes its files private (0600). state.json shows what the umask really allows.
    mode = stat.S_IMODE((staging / "state.json").stat().st_mode)
    listed = {}
    for name, path in sorted(list_files(staging).items()):
        path.chmod(mode)
        flush(path)
        listed[name] = fingerprint(path)
    for folder, _, _ in os.walk(staging, topdown=False):
        flush(folder)
    manifest = staging / "manifest.json"
    manifest.write_text(json.dumps({"format": 1, "files": listed}, indent=2), encoding="utf-8")
    flush(manifest)
    flush(staging)


def flush(path):
    """Wait until a file's bytes, or a folder's names, are on the disk and not only in memory."""
    if os.name == "nt":                                 # no folder can be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- the parts of verify ------------------------------------------------------------------------

def list_files(directory):
    """{relative name: path} of every file below. A link is an error, as is a pipe or a device."""
    files = {}
    for folder, subfolders, names in os.walk(directory):        # never enters a linked folder
        for path in (Path(folder, name) for name in subfolders + names):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                files[path.relative_to(directory).as_posix()] = path
            elif not stat.S_ISDIR(mode):
                raise CheckpointError(f"{path} is a symbolic link or a special file; a checkpoint "
                                      "holds plain files only")
    return files


def read_manifest(path):
    """{relative name: fingerprint}; no name may lead out of the checkpoint's own folder.

    The text may be anything, so every error that parsing it can raise is expected here.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, listed = manifest["format"], manifest["files"]
    except (ValueError, LookupError, TypeError, RecursionError):
        version, listed = None, None
    if version != 1 or not isinstance(listed, dict):
        raise CheckpointError(f"{path} is not a manifest of format 1: damaged")
    for name in listed:
        if Path(name).is_absolute() or ".." in re.split(r"[/\\]", name):
            raise CheckpointError(f"{path} lists {name!r}, outside its own folder: refused")
    return listed


def fingerprint(path):
    """{"size": bytes, "sha256": hex digits} of a file, reading 1 MiB at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}
