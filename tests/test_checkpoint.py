"""What is saved comes back bit for bit; what is damaged, foreign or hostile never does."""
import hashlib
import json
import os
import pickle
import random
import shutil
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint import CheckpointError


def small_state(step):
    return {"weights": {"layer.weight": torch.full((2, 3), step / 3)},
            "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}},
            "step": step, "epoch": 0, "args": {"lr": 0.1}, "metrics": {"loss": 1 / step}}


def add_model(staging):
    (staging / "model").mkdir()
    (staging / "model" / "config.json").write_text('{"hidden_size": 8}')


def same(left, right):
    """Equal in type, order of keys, dtype, shape and every bit (so -0.0 is not 0.0)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)]
        return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(*bits)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def tree(directory):
    """{relative path: bytes} of all files: what must not change."""
    return {str(path.relative_to(directory)): path.read_bytes()
            for path in Path(directory).rglob("*") if path.is_file()}


def reseal(directory):
    """Make a manifest that fits the files, as a forger would; written without checkpoint.py."""
    files = {path.relative_to(directory).as_posix():
             {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
             for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json"}
    (directory / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


@pytest.fixture
def saved(tmp_path):
    return checkpoint.save(tmp_path / "checkpoint-1", small_state(1), add_model)


# ---- what goes in comes out ---------------------------------------------------------------------

def test_every_bit_comes_back(tmp_path):
    shared = torch.randn(4, 3)
    state = {"weights": {"half": torch.randn(3, 2).bfloat16(), "scalar": torch.tensor(-0.0),
                         "denormal": torch.tensor([1e-45]), "empty": torch.zeros(0, 4),
                         "wide": torch.randn(2, dtype=torch.float64), "tied.a": shared,
                         "tied.b": shared, "transposed": shared.T,
                         "expanded": shared[:, :1].expand(4, 5),
                         "parameter": torch.nn.Parameter(shared[1])},
             "nested": {0: None, 7: {"betas": (0.9, 0.999), "x": [True, 2**70, -0.0, "né\u2028"]},
                        "tensors": (torch.tensor(3), [torch.tensor([True]), torch.arange(3)])},
             "args": {"max_grad_norm": float("inf")}, "step": 12}
    loaded = checkpoint.load(checkpoint.save(tmp_path / "c", state))
    assert set(loaded["weights"]) == set(state["weights"])
    for name, tensor in state["weights"].items():
        assert same(loaded["weights"][name], tensor.detach()), name
    assert all(same(loaded[key], state[key]) for key in ("nested", "args", "step"))
    readable = json.loads((tmp_path / "c" / "state.json").read_text(), parse_constant=pytest.fail)
    assert readable == {"step": 12, "args": {"max_grad_norm": "Infinity"}}


@pytest.mark.parametrize("restore_optimizer", [True, False])
def test_adamw_with_two_groups_goes_on_as_if_never_stopped(tmp_path, restore_optimizer):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Dropout(0.3),
                                    torch.nn.Linear(7, 2))
        scale = torch.nn.Parameter(torch.tensor(2.6))
        return model, scale, torch.optim.AdamW([{"params": model.parameters(), "weight_decay": 0.1},
                                                {"params": [scale], "lr": 3e-3}], amsgrad=True)

    def steps(model, scale, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            (model(torch.randn(6, 5)) * scale).square().mean().backward()
            optimizer.step()
        return {**model.state_dict(), "log_scale": scale.detach().clone()}

    run = build()
    checkpoint.save(tmp_path / "c", {"weights": steps(*run, 3), "optimizer": run[2].state_dict(),
                                     "random": [checkpoint.random_state()]})
    expected = steps(*run, 4)
    loaded = checkpoint.load(tmp_path / "c")
    model, scale, optimizer = resumed = build()
    scale.data.copy_(loaded["weights"].pop("log_scale"))
    model.load_state_dict(loaded["weights"])
    if restore_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
    checkpoint.set_random_state(loaded["random"][0])
    # The second case shows that this comparison can fail.
    assert same(steps(*resumed, 4), dict(expected)) == restore_optimizer


def test_random_states_repeat_the_next_draws_and_saving_draws_nothing(tmp_path):
    def draws():
        return [(random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
                 torch.rand(3).tolist(), torch.randn(17).tolist()) for _ in range(3)]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.randn()               # both now keep a second value in reserve
    before = checkpoint.random_state()
    checkpoint.save(tmp_path / "c", {**small_state(1), "random": [before]})
    assert same(checkpoint.random_state(), before)
    expected = draws()
    state = torch.load(tmp_path / "c" / "state.pt")     # the library's default, weights only
    assert draws() != expected
    checkpoint.set_random_state(state["random"][0])
    assert draws() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_cuda_device_repeats_its_next_draws(tmp_path):
    def draws():
        return [torch.randn(5, device=f"cuda:{device}").tolist()
                for device in range(torch.cuda.device_count())]
    draws()
    checkpoint.save(tmp_path / "c", {**small_state(1), "random": [checkpoint.random_state()]})
    expected = draws()
    checkpoint.set_random_state(checkpoint.load(tmp_path / "c")["random"][0])
    assert draws() == expected


def test_another_number_of_cuda_devices_is_said(capsys):
    count = torch.cuda.device_count()
    surplus = [torch.get_rng_state()] * (count + 1)
    checkpoint.set_random_state({**checkpoint.random_state(), "cuda": surplus})
    line = f"{count + 1} CUDA devices were saved, this process sees {count}"
    assert line in capsys.readouterr().err


def test_changed_flags_are_listed_with_both_values():
    old, new = {"batch": 8, "lr": 0.1, "name": "a"}, {"batch": 16, "lr": 0.1, "name": "b"}
    assert checkpoint.changed_flags(old, new, ["batch", "lr"]) == ["batch: saved 8, now 16"]


# ---- refused before anything is written ---------------------------------------------------------

@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("keys", [("weights", "layer.weight"),
                                  ("optimizer", "state", 0, "exp_avg")])
def test_a_non_finite_tensor_is_refused_by_name(tmp_path, keys, bad):
    state = small_state(1)
    holder = state
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = torch.tensor([1.0, bad])
    with pytest.raises(CheckpointError, match="/".join(map(str, ("state", *keys)))):
        checkpoint.save(tmp_path / "out" / "checkpoint-1", state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [np.float64(1.0), np.zeros(2), Path("x"), {1, 2}, 1j, print])
def test_what_could_not_be_loaded_is_refused_at_save(tmp_path, value):
    with pytest.raises(CheckpointError, match="state/args/list/1 is a .*convert it"):
        checkpoint.save(tmp_path / "c", {**small_state(1), "args": {"list": [0, value]}})
    with pytest.raises(CheckpointError, match="state/args has the key"):
        checkpoint.save(tmp_path / "c", {**small_state(1), "args": {(1, 2): 0}})
    assert os.listdir(tmp_path) == []


def test_an_occupied_target_is_refused_and_an_empty_folder_is_not(tmp_path, saved):
    before = tree(saved)
    with pytest.raises(FileExistsError, match="checkpoint-1 exists.*resume from it"):
        checkpoint.save(saved, small_state(1), pytest.fail)     # same step again: said at once
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "to_empty").symlink_to("empty")
    for name in ("file", "link", "to_empty"):
        with pytest.raises(FileExistsError, match=name):
            checkpoint.save(tmp_path / name, small_state(1))
    checkpoint.save(tmp_path / "empty", small_state(2))
    assert checkpoint.load(tmp_path / "empty")["step"] == 2
    assert tree(saved) == before and not list(tmp_path.glob(".*"))


def test_a_target_that_appears_during_the_save_is_not_overwritten(tmp_path):
    target = tmp_path / "checkpoint-1"
    with pytest.raises(FileExistsError, match="never overwritten"):
        checkpoint.save(target, small_state(1),
                        lambda staging: checkpoint.save(target, small_state(2)))
    assert checkpoint.load(target)["step"] == 2 and os.listdir(tmp_path) == ["checkpoint-1"]


# ---- damage and malice --------------------------------------------------------------------------

def truncate(path):
    os.truncate(path / "weights.safetensors", (path / "weights.safetensors").stat().st_size // 2)


def link_file(path):
    """The same bytes, so that only the link itself can be what is refused."""
    os.rename(path / "state.pt", path.parent / "state.pt")
    (path / "state.pt").symlink_to("../state.pt")


def link_folder(path):
    os.rename(path / "model", path.parent / "model")
    (path / "model").symlink_to("../model")


def list_outside(name):
    def damage(path):
        (path.parent / "outside").write_text("x")
        manifest = json.loads((path / "manifest.json").read_text())
        entry = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        manifest["files"][name.format(path.parent)] = entry
        (path / "manifest.json").write_text(json.dumps(manifest))
    return damage


def forget_hash(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["state.pt"]["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite(text):
    return lambda path: (path / "manifest.json").write_text(text)


DAMAGE = {
    "truncated": (truncate, "weights.safetensors is damaged: .*the manifest says"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "no file": (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    "no model file": (lambda path: (path / "model/config.json").unlink(), "config.json is missing"),
    "extra file": (lambda path: (path / "model/x").touch(), "model/x is not in the manifest"),
    "pipe": (lambda path: os.mkfifo(path / "pipe"), "pipe is a symbolic link or a special file"),
    "linked file": (link_file, "state.pt is a symbolic link"),
    "linked folder": (link_folder, "model is a symbolic link"),
    "parent path": (list_outside("../outside"), "'../outside', outside its own folder"),
    "hidden parent": (list_outside("model/../../outside"), "outside its own folder"),
    "absolute path": (list_outside("{}/outside"), "outside its own folder"),
    "empty manifest": (rewrite(""), "not a manifest"),
    "other json": (rewrite("[1]"), "not a manifest"),
    "other format": (rewrite('{"format": 2, "files": {}}'), "not a manifest"),
    "files as a list": (rewrite('{"format": 1, "files": ["state.pt"]}'), "not a manifest"),
    "entry without hash": (forget_hash, "state.pt is damaged"),
    "not listed": (lambda path: ((path / "state.pt").unlink(), reseal(path)), "pt is missing"),
    "deep manifest": (rewrite("[" * 100000), "not a manifest"),
    "a file": (lambda path: (shutil.rmtree(path), path.touch()), "is not a directory"),
    "a link": (lambda path: (os.rename(path, path.parent / "moved"), path.symlink_to("moved")),
               "if it is a link, give its target"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(tmp_path, capsys, kind):
    damage, message = DAMAGE[kind]
    for step in (9, 10):                                # 10 is newer, although "10" < "9"
        checkpoint.save(tmp_path / f"checkpoint-{step}", small_state(step), add_model)
    newest = tmp_path / "checkpoint-10"
    assert checkpoint.latest(tmp_path) == newest
    damage(newest)
    for use in (checkpoint.verify, checkpoint.load):
        with pytest.raises(CheckpointError, match=message):
            use(newest)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-9"
    assert f"skipped {newest}" in capsys.readouterr().err
    checkpoint.set_aside(newest)                        # now step 10 can be reached and saved again
    checkpoint.save(newest, small_state(10))
    assert checkpoint.latest(tmp_path) == newest


def test_one_flipped_bit_anywhere_is_found(saved):
    flips = random.Random(0)
    for path in [path for path in saved.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        every = range(8 * len(good))
        for bit in flips.sample(every, 800 if path.name == "manifest.json" else 40):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            with pytest.raises(CheckpointError):
                checkpoint.verify(saved)
        path.write_bytes(good)
    checkpoint.verify(saved)


def test_a_pickle_inside_a_resealed_checkpoint_is_refused_and_never_runs(tmp_path, saved):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)
    pickle.loads(pickle.dumps(Payload()))               # it would work on a careless reader
    (tmp_path / "executed").unlink()
    torch.save({"step": 1, "args": Payload()}, saved / "state.pt")
    reseal(saved)
    checkpoint.verify(saved)                            # SHA-256 cannot know who wrote a file
    with pytest.raises(CheckpointError, match="state.pt holds other things") as caught:
        checkpoint.load(saved)
    assert not (tmp_path / "executed").exists()
    assert "weights_only" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", ["weights.safetensors", "state.pt"])
def test_resealed_rubbish_is_an_error_with_the_file_name(saved, name):
    for content in (b"", b"rubbish", b"\xff" * 64, (1 << 62).to_bytes(8, "little") + b"{}"):
        (saved / name).write_bytes(content)
        reseal(saved)
        with pytest.raises(CheckpointError, match=name):
            checkpoint.load(saved)
    torch.save([1], saved / "state.pt")                 # readable, but no dictionary
    reseal(saved)
    with pytest.raises(CheckpointError):
        checkpoint.load(saved)


def test_a_link_made_by_write_files_is_refused_at_save(tmp_path):
    with pytest.raises(CheckpointError, match="model is a symbolic link"):
        checkpoint.save(tmp_path / "c", small_state(1),
                        lambda staging: (staging / "model").symlink_to("/"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mask, file_mode, folder_mode", [
    (0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_modes_follow_the_umask(tmp_path, mask, file_mode, folder_mode):
    old = os.umask(mask)
    try:
        path = checkpoint.save(tmp_path / "out" / "c", small_state(1), add_model)
    finally:
        os.umask(old)
    for entry in [path, *path.rglob("*")]:
        assert entry.stat().st_mode & 0o777 == (folder_mode if entry.is_dir() else file_mode), entry


# ---- rotation -----------------------------------------------------------------------------------

def test_rotation_keeps_the_newest_by_number(tmp_path):
    for step in (8, 9, 10, 11):
        checkpoint.save(tmp_path / f"checkpoint-{step}", small_state(step))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (tmp_path / "checkpoint-1").symlink_to("elsewhere")
    (tmp_path / "checkpoint-2-notes").mkdir()
    assert checkpoint.rotate(tmp_path, 2) == [tmp_path / "checkpoint-8", tmp_path / "checkpoint-9"]
    assert checkpoint.rotate(tmp_path, 2) == []
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-10", "checkpoint-11",
                                            "checkpoint-2-notes", "elsewhere"]
    assert (tmp_path / "checkpoint-1" / "precious").exists()
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.rotate(tmp_path, 0)


def test_rotation_deletes_nothing_while_the_newest_is_damaged(tmp_path, capsys):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / f"checkpoint-{step}", small_state(step))
    truncate(tmp_path / "checkpoint-3")
    assert checkpoint.rotate(tmp_path, 1) == [] and len(os.listdir(tmp_path)) == 3
    assert "older checkpoints stay" in capsys.readouterr().err
    checkpoint.set_aside(tmp_path / "checkpoint-3")
    assert checkpoint.rotate(tmp_path, 1) == [tmp_path / "checkpoint-1"]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-2"
