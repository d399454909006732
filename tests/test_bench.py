"""extras/bench.py: what it counts is right, no row is missing, a failure is a row."""
import argparse
import json
import os
import random

import pytest
import torch
from torch.nn import functional as F

from extras import bench
from model import BiEncoder, tiny_qwen3_vl

NUMBERS = {"seconds", "fastest", "slowest", "pairs_per_second", "peak_mb", "gflop", "difference",
           "time_of_plain", "memory_of_plain", "gflop_of_limit"}


def some_rows(count=48):
    """Short queries, and documents of very different lengths."""
    rng = random.Random(1)
    text = lambda longest: " ".join(rng.choices("red green blue fox dog sky sea".split(),
                                                k=rng.randint(1, longest)))
    return [{"query": f"{i} {text(3)}", "positive": f"{text(40)} {i}"} for i in range(count)]


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")               # main sets it; undone here
        patch.setattr(bench, "offline_pairs", lambda name: (some_rows(), []))
        patch.setattr(bench, "tiny_qwen3_vl", lambda texts: tiny_qwen3_vl(
            texts, vocab_size=300, hidden=64, layers=2))
        yield patch


@pytest.fixture(scope="module")
def args(patch, tmp_path_factory):
    args = bench.parse_args(["--model", "tiny", "--repeats", "1"])
    args.folder = str(tmp_path_factory.mktemp("bench") / "model")
    BiEncoder(*bench.tiny_qwen3_vl(None), max_length=96).save_pretrained(args.folder)
    return args


@pytest.fixture(scope="module")
def run(patch, tmp_path_factory):
    """A whole run without peers, as (folder, rows of the JSON file)."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as alone:
        alone.setattr(bench, "find_spec", lambda name: None)
        bench.main(["--batch-sizes", "64", "--chunks", "16", "--repeats", "2",
                    "--max-length", "96", "--output-dir", str(folder)])
    lines = (folder / "stdlib.jsonl").read_text().splitlines()
    return folder, {row["method"]: row for row in map(json.loads, lines)}


def test_flops_of_a_linear_layer_and_of_attention_are_what_they_are_on_paper():
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    assert bench.count_flops(lambda: F.linear(x, w)) == 2 * 5 * 7 * 11
    assert bench.count_flops(lambda: F.linear(x, w).sum().backward()) == 3 * 2 * 5 * 7 * 11
    q, k, v = (torch.randn(2, 3, 13, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    product = 2 * (2 * 3) * 13 * 13 * 8
    for m in (None, mask):
        fused = lambda: F.scaled_dot_product_attention(q, k, v, m)
        assert bench.count_flops(fused) == 2 * product
        # Backward: four products, and the scores once more, which the fused kernel did not keep.
        assert bench.count_flops(lambda: fused().sum().backward()) == (2 + 5) * product


def test_the_limit_is_three_forwards_of_each_sample_alone(args):
    model, alone = bench.load(args, "plain"), 0
    for row in args.rows[:6]:
        for side, text in (("query", row["query"]), ("document", row["positive"])):
            alone += bench.count_flops(lambda: model([model.preprocess(text, side)]))
    assert bench.limit_flops(args, 6)["gflop"] == 3 * alone / 1e9


def test_the_table_has_every_way_with_every_number(run):
    _, rows = run
    assert list(rows) == [*bench.OURS, "one chunk", "limit"]
    for name, row in rows.items():
        assert (row["status"], row["batch"], row["chunk"]) == ("ok", 64, 16)
        known = {key for key in NUMBERS if row.get(key) is not None}
        assert known == {"one chunk": {"peak_mb", "memory_of_plain"},
                         "limit": {"gflop", "gflop_of_limit"}}.get(name, NUMBERS)
        if name in bench.OURS:
            assert 0 < row["fastest"] <= row["seconds"] <= row["slowest"]
            assert row["pairs_per_second"] == pytest.approx(64 / row["seconds"])


def test_all_ways_have_the_same_gradient(run):
    _, rows = run
    assert rows["plain"]["difference"] == 0
    for name in bench.OURS[1:]:                 # not zero: it is not compared with itself
        assert 0 < rows[name]["difference"] < 1e-5, name


def test_what_the_table_says_of_costs_is_what_the_algorithm_saves(run):
    _, rows = run
    gflop, peak = ({name: row.get(key) for name, row in rows.items()}
                   for key in ("gflop", "peak_mb"))
    assert gflop["limit"] < gflop["sorted"] < gflop["keep 1"] < gflop["textbook"]
    assert gflop["limit"] < gflop["plain"]
    for name in ("textbook", "keep 1", "sorted"):                   # the activations of one chunk
        assert 0.9 < peak[name] / peak["one chunk"] < 1.25 < 4 < peak["plain"] / peak["one chunk"]


def test_a_picture_is_drawn(run):
    assert (run[0] / "stdlib.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("data", ["stdlib", "shapes"])
def test_the_peers_have_the_same_gradient(args, data):
    pytest.importorskip("sentence_transformers")
    args = argparse.Namespace(**vars(args))                          # a copy
    if data == "shapes":
        args.rows = [{"query": text, "positive": {"image": f"shapes:{text}"}} for text in (
            "a large red circle at the top-left and a small blue flag at the middle-center",
            "a small pink arrow at the top-left and a large black square at the bottom-right",
            "a small green flag at the top-center and a small red circle at the bottom-left")]
    size, gradients = len(args.rows[:7]), {}
    for name in ("plain", *bench.PEERS):
        model = bench.load(args, name)
        bench.make_step(args, name, model, size, 2)()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()
                                     if p.grad is not None])
    for name in bench.PEERS:
        torch.testing.assert_close(gradients[name], gradients["plain"], rtol=1e-3, atol=1e-5)


def test_a_way_that_runs_out_of_memory_is_a_row_and_the_others_go_on(args, patch):
    args = argparse.Namespace(**vars(args) | {"memory_limit_gb": 0.02})
    with pytest.MonkeyPatch.context() as few:
        few.setattr(bench, "find_spec", lambda name: None)
        few.setattr(bench, "OURS", ["plain", "sorted"])
        rows = bench.measure(args, 48, 2)
    assert rows["plain"]["status"] == "out of memory" and "seconds" not in rows["plain"]
    assert bench.as_line(rows["plain"]).endswith("out of memory")
    assert rows["sorted"]["status"] == "ok" and rows["sorted"]["seconds"] > 0
    assert rows["sorted"]["difference"] is None and rows["sorted"]["time_of_plain"] is None


def test_a_child_that_is_killed_and_a_bug_are_rows_too():
    for function, argument, reason in ((os._exit, 9, "BrokenProcessPool"),
                                       (int, "x", "ValueError")):
        row = {"method": "plain", "status": "ok"}
        bench.fill(row, bench.in_child, function, argument)
        assert row["status"].startswith(reason)
        bench.fill(row, lambda: {"seconds": 1.0})                    # it is not tried further
        assert "seconds" not in row


@pytest.mark.parametrize("flags, length, chunks, repeats", [
    ("", 128, [16], 3), ("--scaling", 32, [256], 1), ("--scaling --chunks 8 9", 32, [8, 9], 1),
    ("--scaling --data shapes --repeats 2", 128, [256], 2)])
def test_scaling_has_defaults_of_its_own(flags, length, chunks, repeats):
    args = bench.parse_args([*flags.split(), "--max-batch", "512"])
    assert (args.max_length, args.chunks, args.repeats) == (length, chunks, repeats)


def test_scaling_measures_growing_batches_and_tells_the_slopes(patch, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as known:                      # measured elsewhere
        known.setattr(bench, "in_child", lambda f, args, name, size, chunk: {"peak_mb": 5 + size})
        bench.main(["--scaling", "--max-batch", "512", "--chunks", "8", "--max-length", "64",
                    "--output-dir", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == [2, 8, 32, 128, 512]
    assert all(row["status"] == "ok" and 0 < row["loss_seconds"] for row in rows)
    assert "memory = 5 MB + 1048576 bytes for each pair" in capsys.readouterr().out


def test_the_fitted_slopes_are_those_of_known_curves():
    rows = [{"batch": n, "seconds": 0.01 * n + 1e-6 * n * n, "loss_seconds": 1e-6 * n * n,
             "peak_mb": 70 + 3 * n / 1024, "dim": 16} for n in (16, 64, 256, 1024)]
    assert bench.fits(rows).split("\n") == [
        "seconds ~ N^1.00 without the loss, N^2.00 of the loss alone",
        "memory = 70 MB + 3072 bytes for each pair, whose two representations have 128"]
