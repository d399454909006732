"""python -m extras.plot --curves RUN [RUN ...]                                    Read 8 of 8.

Pictures of what training did; each is one PNG file (--output).

    --curves RUN [RUN ...]             loss, accuracy, held-out recall and gradient norm over steps
    --recall-vs-batch RUN [RUN ...]    what a larger batch brings at the same chunk, hence memory
    --heatmap MODEL [MODEL]            similarities of a batch, say before and after training
    --histogram MODEL [MODEL]          scores of answers and of other documents

A RUN is an output folder of train.py, a MODEL one of its model folders, such as output/final, or a
hub name. The model before training is what `train.py --max-steps 1 --output-dir start` leaves in
start/final: with a warm-up the first step has learning rate 0. The last two take their rows from
--eval-jsonl (any file that train.py reads) or from the held-out offline data.

How they are drawn: colours that colour-blind readers can tell apart (Okabe and Ito; viridis), names
beside the lines instead of a legend, the same scale wherever two things are compared, no axis cut
off at a flattering place. Thin lines are measured values, thick ones their running mean.

Needs matplotlib, and no screen. Nothing is computed here that the files do not hold, except the
scores of the given rows.
"""
import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from batches import retrieval_pool
from data import load_image, offline_pairs, read_pairs
from flags import MATHEMATICS, column
from model import BiEncoder

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
PANELS = {"loss": "training loss", "accuracy": "accuracy within the batch",
          "eval_recall@10": "held-out recall@10", "grad_norm": "gradient norm before clipping"}


# --- Runs -----------------------------------------------------------------------------------------

def read_run(folder):
    """Output folder -> (rows of metrics.jsonl, training and evaluation, arguments or {})."""
    path = Path(folder, "metrics.jsonl")
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; is the run still writing? Try again") from None
    states = sorted(Path(folder).glob("checkpoint-*/state.json"),
                    key=lambda file: int(file.parent.name.rpartition("-")[2]))
    return rows, json.loads(states[-1].read_text("utf-8"))["args"] if states else {}


def names_of(folders):
    """What tells folders apart: their last name, or as much of the path as that takes."""
    paths = [Path(folder).resolve().parts for folder in folders]
    for size in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-size:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            return names


def curves(folders):
    """Four panels over steps, a colour per run."""
    figure, runs = Figure((11, 7), layout="constrained"), [read_run(f)[0] for f in folders]
    longest = max((row["step"] for rows in runs for row in rows), default=0)
    window = max(1, longest // 25)
    for axes, (metric, title) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        ends = []
        for name, rows, colour in zip(names_of(folders), runs, itertools.cycle(COLOURS)):
            points = [(row["step"], row[metric]) for row in rows
                      if row.get(metric) is not None]       # a skipped step has null, no number
            if not points:
                continue
            steps, values = zip(*points)
            if metric.startswith("eval"):              # few and exact: shown as they are
                axes.plot(steps, values, "o-", color=colour, markersize=4, linewidth=1.8)
            else:
                values, raw = running_mean(values, window), values
                axes.plot(steps, raw, color=colour, linewidth=0.6, alpha=0.35)
                axes.plot(steps, values, color=colour, linewidth=1.8)
            ends.append((values[-1], name, colour))
        if window > 1 and not metric.startswith("eval"):
            title += f", mean of the last {window} steps"
        plain(axes, title, "step")
        if metric == "grad_norm":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        if ends:
            label_ends(axes, ends)
        else:
            axes.text(0.5, 0.5, "not in these runs", ha="center", transform=axes.transAxes)
    return figure


def running_mean(values, window):
    """Mean of each value and the ones before it, `window` in all (fewer at the start)."""
    sums = [0.0, *itertools.accumulate(values)]
    return [(sums[n] - sums[max(0, n - window)]) / min(n, window) for n in range(1, len(sums))]


def recall_vs_batch(folders):
    """Final held-out recall@10 over the global batch size, for runs with the same chunk."""
    points, all_args = [], []
    for folder in folders:
        rows, args = read_run(folder)
        measured = [row for row in rows if "eval_recall@10" in row]
        if not args or len(measured) < 2:
            raise ValueError(f"{folder} is no finished run: it needs a checkpoint-*/state.json and "
                             "evaluations (held-out rows) before and after training")
        memory = max(row.get("peak_memory_mb", 0) for row in rows)
        points.append((args["batch_size"] * args["processes"], measured[-1]["eval_recall@10"],
                       memory, measured[0]["eval_recall@10"], measured[-1]["step"]))
        all_args.append(args)
    chunks = {args["chunk_tokens"] or args["grad_cache_chunk"] for args in all_args}
    if len(chunks) > 1:
        raise ValueError(f"the chunk must be the same in all runs, found {sorted(chunks)}: else "
                         "the picture compares memory, too")
    for name in MATHEMATICS:                           # a fair comparison changes one thing
        values = {repr(args.get(name)) for args in all_args}
        if name not in ("batch_size", "processes", "seed", "max_steps") and len(values) > 1:
            print(f"note: the runs also differ in {name}: {', '.join(sorted(values))}")
    points.sort()
    batches = sorted({batch for batch, *_ in points})
    means = [sum(own) / len(own) for own in ([r for b, r, *_ in points if b == batch]
                                             for batch in batches)]
    figure = Figure((7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(batches, means, color=COLOURS[0], linewidth=2)
    axes.plot([p[0] for p in points], [p[1] for p in points], "o", color=COLOURS[0], markersize=7)
    for batch, mean in zip(batches, means):
        axes.annotate(f"{mean:.2f}", (batch, mean), (0, 9), textcoords="offset points", ha="center",
                      color=COLOURS[0], fontsize=11, fontweight="bold")
    start = sum(p[3] for p in points) / len(points)
    axes.axhline(start, color=GREY, linewidth=1.2, linestyle="--")
    axes.annotate(f"before training {start:.2f}", (1, start), (-4, 5), ha="right", color=GREY,
                  xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=10)
    steps = sorted({p[4] for p in points})
    chunk = f"{chunks.pop()} {'tokens' if all_args[0]['chunk_tokens'] else 'samples'}"
    plain(axes, f"Held-out recall@10 after {' or '.join(map(str, steps))} steps, always in chunks "
                f"of {chunk}", "global batch size in queries; below it, peak memory of a process")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch}\n{max(p[2] for p in points if p[0] == batch):,.0f} MB"
                              for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08)
    axes.set_ylim(0, 1.15 * max(*means, *(p[1] for p in points)))
    return figure


# --- Models ---------------------------------------------------------------------------------------

def similarities(model, rows):
    """-> (N, M) scores of the rows' queries with all their documents, (N, M) bool: answers."""
    queries, documents, relevant = retrieval_pool(rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = BiEncoder.from_pretrained(model, load_image=load_image).to(device)
    if encoder.pooling == "tokens":
        raise ValueError(f"{model} has a vector for each token, and no cosine to draw")
    scores = encoder.encode(queries, "query") @ encoder.encode(documents, "document").T
    answers = torch.zeros_like(scores, dtype=torch.bool)
    for i, columns in enumerate(relevant):
        answers[i, columns] = True
    return scores, answers


def heat_maps(models, rows):
    """A matrix per model, on one scale. Documents are the rows' positives, in the queries' order,
    so that answers lie on the diagonal."""
    rows = [{**row, "negatives": []} for row in rows]
    all_scores = [similarities(model, rows) for model in models]
    low = min(scores.min().item() for scores, _ in all_scores)
    high = max(scores.max().item() for scores, _ in all_scores)
    figure = Figure((4.6 * len(models) + 1, 5), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, name, (scores, answers) in zip(panels, names_of(models), all_scores):
        image = axes.imshow(scores.numpy(), cmap="viridis", vmin=low, vmax=high)
        others = scores.masked_fill(answers, -torch.inf).amax(dim=1)
        best = scores.masked_fill(~answers, -torch.inf).amax(dim=1)
        axes.set_title(f"{name}\nthe answer scores highest in {(best > others).sum()} of "
                       f"{len(scores)} rows", fontsize=11)
        axes.set_xlabel("document", fontsize=10)
        axes.set_ylabel("query", fontsize=10)
        axes.tick_params(length=0, labelsize=9)
    figure.colorbar(image, ax=panels, shrink=0.8, label="cosine similarity")
    return figure


def histograms(models, rows):
    """Distribution of scores of answers and of all other documents, a panel per model."""
    all_scores = [similarities(model, rows) for model in models]
    flat = torch.cat([scores.flatten() for scores, _ in all_scores])
    bins = torch.linspace(flat.min().item(), flat.max().item(), 41)
    figure = Figure((8, 3.2 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, name, (scores, answers) in zip(panels, names_of(models), all_scores):
        parts = scores[~answers], scores[answers]
        for part, colour in zip(parts, (COLOURS[1], COLOURS[0])):
            axes.hist(part.numpy(), bins.numpy(), density=True, histtype="stepfilled", alpha=0.25,
                      color=colour)
            axes.hist(part.numpy(), bins.numpy(), density=True, histtype="step", linewidth=1.8,
                      color=colour)
        # A name stands where its curve is farthest above the other one, on the side away from it.
        heights = [torch.histogram(part, bins, density=True).hist for part in parts]
        at = [int((heights[i] - heights[1 - i]).argmax()) for i in (0, 1)]
        for i, label in enumerate(("other documents", "answers")):
            side, align = (-6, "right") if at[i] < at[1 - i] else (6, "left")
            axes.annotate(label, (bins[at[i]:at[i] + 2].mean().item(), heights[i][at[i]].item()),
                          (side, 5), textcoords="offset points", ha=align, fontsize=11,
                          color=(COLOURS[1], COLOURS[0])[i])
        plain(axes, f"{name}: an answer scores higher than another document in "
                    f"{100 * share_above(*parts[::-1]):.1f} % of pairs", "")
        axes.set_yticks([])
        axes.set_ylabel("density", fontsize=10)
        axes.margins(y=0.15)
    panels[-1].set_xlabel("cosine similarity with the query", fontsize=10)
    return figure


def share_above(a, b):
    """How often a value of `a` is above one of `b`, over all pairs; equal values count half."""
    b = b.sort().values
    below = torch.searchsorted(b, a) + torch.searchsorted(b, a, right=True)
    return below.double().mean().item() / (2 * len(b))


# --- Drawing --------------------------------------------------------------------------------------

def plain(axes, title, x_label):
    """Left and bottom axis, a faint grid, and nothing else that is not data."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label, fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_ends(axes, ends):
    """Write each name right of where its line ends: (y, name, colour), pushed apart if need be."""
    to_axes, place = axes.transData + axes.transAxes.inverted(), -1.0
    x = axes.get_xlim()[1]
    heights = [(to_axes.transform((x, y))[1], name, colour) for y, name, colour in ends]
    for height, name, colour in sorted(heights):
        place = max(height, place + 0.06)
        axes.text(1.01, place, name, color=colour, transform=axes.transAxes, va="center",
                  fontsize=9)


# --- The program ----------------------------------------------------------------------------------

def parse_args(argv=None):
    """argv -> namespace with exactly one kind of picture."""
    parser = argparse.ArgumentParser(prog="python -m extras.plot",
                                     description="Pictures of runs and of models, as PNG files.")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--curves", nargs="+", metavar="RUN", help="training curves of runs")
    kind.add_argument("--recall-vs-batch", nargs="+", metavar="RUN",
                      help="final recall over the batch size of runs with one chunk size")
    kind.add_argument("--heatmap", nargs="+", metavar="MODEL", help="similarities within a batch")
    kind.add_argument("--histogram", nargs="+", metavar="MODEL", help="answers and other documents")
    parser.add_argument("--eval-jsonl", help="rows (default: held-out rows of the offline data)")
    parser.add_argument("--columns", nargs="+", type=column, default=[], metavar="OURS=THEIRS",
                        help="what its columns are called, such as query=question")
    parser.add_argument("--rows", type=int, help="so many of them, spread over the file "
                        "(default: 24 for a heat map, 500 for a histogram)")
    parser.add_argument("--allow-any-path", action="store_true",
                        help="also images outside the JSONL's folder")
    parser.add_argument("--output", default="plot.png", help="default: plot.png")
    args = parser.parse_args(argv)
    if args.rows is not None and args.rows < 2:
        parser.error(f"--rows must be at least 2, got {args.rows}")
    return args


def main(argv=None):
    """Draw what the arguments (default: the command line's) ask for, and save it."""
    args = parse_args(argv)
    try:
        if args.curves or args.recall_vs_batch:
            figure = curves(args.curves) if args.curves else recall_vs_batch(args.recall_vs_batch)
        else:
            rows = (read_pairs(args.eval_jsonl, columns=dict(args.columns),
                               allow_any_path=args.allow_any_path)
                    if args.eval_jsonl else offline_pairs()[1])
            wanted = min(len(rows), args.rows or (24 if args.heatmap else 500))
            rows = [rows[i * len(rows) // wanted] for i in range(wanted)]
            figure = heat_maps(args.heatmap, rows) if args.heatmap else histograms(args.histogram,
                                                                                   rows)
        figure.savefig(args.output, dpi=150, format="png")
    except (ValueError, OSError) as error:
        sys.exit(f"plot: {error}")
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
