"""The loop: everything wired together, nothing clever.                              Read 7 of 8.

    python train.py --batch-size 8 --grad-cache-chunk 2                    # a laptop, no download
    python train.py --batch-size 64 --grad-cache-chunk 2 --output-dir output-64    # same memory
    torchrun --nproc_per_node=2 train.py --batch-size 8 --grad-cache-chunk 2       # = one with 16
    python train.py --model Qwen/Qwen3-VL-Embedding-2B --train-jsonl pairs.jsonl --dtype bf16 \\
        --batch-size 256 --grad-cache-chunk 4                              # a real model, one GPU
    python train.py --resume auto                                          # go on after anything

One optimizer step:

    1) take the next window of --grad-accum-steps batches
    2) the gradient of this process' own queries, chunk by chunk (step.py, gradcache.py)
    3) sync_gradients: one sum over processes
    4) clip model and temperature together; skip the step if anything is not finite
    5) AdamW with this step's learning rate; clamp the temperature
    6) log one line; evaluate and save when their turn comes

Before the first one the held-out rows are measured: the baseline. After the last one the model is
written, and loaded again here and in sentence-transformers, to see the same vectors.

Without --model a tiny Qwen3-VL with random weights is trained on documented functions of the Python
standard library: first paragraph of the docstring -> source code. Writes OUTPUT/metrics.jsonl,
OUTPUT/checkpoint-STEP/ and OUTPUT/final/. Exit status: 0 done, 75 interrupted and saved (go on with
--resume auto), 1 anything else, with a message.
"""
import copy
import itertools
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

import checkpoint
import objectives
from batches import Batches, VectorCache, describe, fingerprint
from data import as_pages, load_image, offline_pairs, read_pairs
from dist import (broadcast_parameters, check_equal_parameters, cleanup, gather_objects, is_main,
                  like, load_whole_state, peak_memory_mb, print0, rank, reduce_numbers, setup,
                  shard, sync_gradients, whole_on_main, whole_state, world_size)
from export import verify
from flags import (MATHEMATICS, as_line, check_flags, describe_run, describe_weights, lr_factor,
                   open_report, parse_args)
from gradcache import graphs_that_fit
from losses import check_options
from model import BiEncoder, tiny_qwen3_vl
from objectives import evaluate
from step import check_grads, gradient_that_fits, make_optimizer, update

INTERRUPTED = 75                 # exit status: stopped by a signal, saved, worth starting again
PATIENCE = 3                     # so many non-finite steps in a row end the run


# --- What the flags stand for --------------------------------------------------------------------

def load_data(args):
    """(training rows, held-out rows or None) as the flags say."""
    # Each loss asks for its own fields; an error says who asks, in which line.
    if args.train_jsonl:
        # Of --columns a held-out file must have those that say what answers what.
        train, heldout = (path and read_pairs(
            path, columns={ours: theirs for ours, theirs in args.columns.items() if not heldout or
                           ours in ("query", *objectives.needs(args, heldout))},
            needs=objectives.needs(args, heldout),
            why=f"--loss {args.loss} ", progress=is_main(), allow_any_path=args.allow_any_path,
            skip_bad_rows=args.skip_bad_rows
        ) for path, heldout in ((args.train_jsonl, False), (args.eval_jsonl, True)))
    else:
        train, heldout = offline_pairs(args.offline_data, mask_names=args.mask_names,
                                       progress=is_main())
    if args.documents == "image":
        as_pages([*train, *(heldout or [])])
    # From here on rows are what the towers see: SimCSE, say, reads each text twice.
    train = objectives.prepare_rows(args, train)
    heldout = heldout and objectives.prepare_rows(args, heldout, heldout=True)
    return train, heldout


def build_model(args, rows):
    """The bi-encoder with the flags' adapter, pooling and prompts.

    The built-in one learns its tokenizer from the training texts; held-out rows stay unseen.
    """
    options = {name: getattr(args, name) for name in (
        "pooling", "lora_r", "lora_alpha", "lora_dropout", "lora_vision", "max_length", "dtype",
        "max_num_visual_tokens", "query_prompt", "document_prompt", "gradient_checkpointing",
        "attention", "compile", "matryoshka_dims")}
    options |= {"load_image": load_image} | ({"pooling": "tokens"} if args.multi_vector else {})
    if args.model:
        return BiEncoder.from_pretrained(args.model, trust_remote_code=args.trust_remote_code,
                                         **options)
    samples = [row[name] for row in rows for name in ("query", "positive") if name in row]
    texts = [s if isinstance(s, str) else s.get("text", "") for s in samples]
    return BiEncoder(*tiny_qwen3_vl(texts, seed=args.seed), **options)


# --- Saving and going on -------------------------------------------------------------------------

def find_checkpoint(args, out):
    """The checkpoint to go on from, or None. No run writes into another's or its own later ones."""
    path, problem = args.resume, None
    if is_main():                                        # one process looks, all do the same
        used = [path for _, path in checkpoint.list_checkpoints(out)] or [*out.glob("final")]
        if args.resume == "auto":
            path = checkpoint.latest(out, move_damaged=True)
        elif used and Path(path or "").resolve() != used[-1].resolve() and not args.check_grads:
            problem = (f"{out} already holds a run, up to {used[-1].name}: continue it with "
                       "--resume auto, or choose another --output-dir")
    path, problem = gather_objects((path, problem))[0]
    if problem:
        raise ValueError(problem)
    if args.resume == "auto" and not path:
        print0(f"resumed        nothing: no checkpoint in {out}, so from the start")
    return path


def gather_weights(everything, intact):
    """{name: whole tensor} of all that is trained, on process 0, and the same in `intact`."""
    weights = whole_on_main({n: p for n, p in everything.named_parameters() if p.requires_grad})
    if intact is not everything:
        intact.load_state_dict(weights, strict=False)               # what is frozen it has already
    return weights


def save_checkpoint(out, step, everything, intact, optimizer, scaler, card, few,
                    random_state=None):
    """Every process calls this: each hands in its random state and weights, process 0 writes.

    card: what export.model_card is told, the run's arguments and metrics among it. The first
    checkpoint's model is loaded again, to encode `few` samples (None: not now); to find out after
    a week would be too late. Raises ValueError, on all processes, if another program finds other
    vectors in it.
    """
    random_states = gather_objects(random_state or checkpoint.random_state())
    weights, moments = gather_weights(everything, intact), whole_state(optimizer)
    problem, model, args = None, intact["model"], card["arguments"]
    if is_main():
        state = {"weights": weights, "optimizer": moments, "scaler": scaler.state_dict(),
                 "random": random_states, "step": step, "args": args, "metrics": card["metrics"]}
        folder, first = out / f"checkpoint-{step}", not checkpoint.list_checkpoints(out)
        # A full disk must not end the run: earlier checkpoints are intact, the next may succeed.
        try:
            checkpoint.save(folder, state, lambda staging: model.save_pretrained(
                staging / "model", card=card, place=folder / "model"))
            checkpoint.rotate(out, args["keep_checkpoints"])
            if few and first and not args["merge_lora"]:    # else OUTPUT/final alone goes out
                verify(model, folder / "model", few, trust_remote_code=args["trust_remote_code"])
        except (OSError, checkpoint.CheckpointError) as error:
            print(f"step {step} was not saved: {error}", file=sys.stderr)
        except ValueError as error:
            problem = str(error)
    if problem := gather_objects(problem)[0]:               # here all wait for process 0
        raise ValueError(problem)


def restore(path, everything, optimizer, scaler, args):
    """Put the run where `path` left it, bit for bit; returns (step, metrics so far)."""
    state = checkpoint.load(path)
    changed = checkpoint.changed_flags(state["args"], vars(args), MATHEMATICS)
    if changed and not args.allow_changed_flags:
        raise ValueError(f"{path} was trained with other flags: {'; '.join(changed)}. Give the "
                         "saved ones, or --allow-changed-flags if the change is meant")
    for change in changed:
        print0(f"changed flag   {change}")
    parameters = {n: p for n, p in everything.named_parameters() if p.requires_grad}
    if other := sorted(parameters.keys() ^ state["weights"].keys()):
        raise ValueError(f"{path} trains other parameters than this run, first '{other[0]}'")
    for name, p in parameters.items():
        p.data.copy_(like(state["weights"][name], p))
    load_whole_state(optimizer, state["optimizer"])
    if state.get("scaler"):                                         # fp16 has one
        scaler.load_state_dict(state["scaler"])
    if len(state["random"]) == world_size():
        checkpoint.set_random_state(state["random"][rank()])
    print0(f"resumed        {path}, step {state['step']}")
    return state["step"], state["metrics"]


def main(argv=None):
    """Run with these arguments (default: the command line's); returns the exit status."""
    status = train(parse_args(argv), setup())
    cleanup()                       # not after an error: the others may be waiting for this process
    return status


def train(args, device):
    """The run; returns its exit status. Every process runs all of this, process 0 also writes."""
    out, args.shard = Path(args.output_dir), args.shard and world_size() > 1
    check_flags(args)
    check_options(args.directions, args.partition_mode, args.label_smoothing, several=False)
    resume_from = find_checkpoint(args, out)
    torch.manual_seed(args.seed)                         # all processes: the same new weights
    rows, heldout = load_data(args)
    # What the model card will say, and a few samples for trying what was saved.
    card = {"base": args.model, "data": describe(rows), "arguments": vars(args)}
    few = {"query": [row["query"] for row in rows[:3]],
           "document": [row["positive"] for row in rows[:3] if "positive" in row]}
    print0(f"training       {card['data']}", "held out       " + (
        describe(heldout) if heldout else "nothing: give --eval-jsonl"), sep="\n")
    model = build_model(args, rows)
    scale = objectives.loss_parameters(args, model, rows)       # temperature, and perhaps a head
    everything = intact = torch.nn.ModuleDict({"model": model, "loss": scale})      # what is saved
    broadcast_parameters(everything)
    if args.shard and not args.check_grads:
        # Parts can be neither copied nor written: process 0 keeps a whole model in host memory.
        intact = copy.deepcopy(everything) if is_main() else everything
        shard(model.backbone, model.language_layers())              # block by block to the GPU
    everything.to(device)
    # In query-side tuning documents meet the starting model, frozen (under LoRA: the adapter off).
    cache = VectorCache(args.document_cache) if args.document_cache else None
    encoders = [model, model if args.mode == "standard" else model.frozen_start(cache)]
    # A guide is encoded like the other towers, in chunks, but never again: it learns nothing.
    guide = args.guide_model and BiEncoder.from_pretrained(
        args.guide_model, dtype=args.dtype, load_image=load_image,
        trust_remote_code=args.trust_remote_code).requires_grad_(False).eval().to(device)
    learners = objectives.encoders_of(args, encoders, scale, guide)
    batches = Batches(rows, model.preprocess, args.batch_size, rank=rank(), world_size=world_size(),
                      num_hard_negatives=args.num_hard_negatives, seed=args.seed,
                      no_duplicates=args.no_duplicates, **objectives.batch_options(args, guide))
    end = (sum(map(batches.steps_in, range(args.epochs))) if args.epochs
           else args.max_steps * args.grad_accum_steps)                   # batches in the whole run
    args.max_steps = -(-end // args.grad_accum_steps)                     # the last may be short
    # What these depend on is known only now, but they belong to what a resumed run must match.
    args.processes, args.data = world_size(), fingerprint(rows)
    print0(describe_run(args), describe_weights(model.backbone), batches.summary(), sep="\n")
    limit, largest = 0, 0
    if args.keep_graphs == "auto":                          # one, until a step has been measured
        limit = (args.memory_limit_gb or 0) * 2**30 or 0.9 * torch.cuda.mem_get_info()[1]
        args.keep_graphs = 1
    if args.check_grads:
        return check_grads(batches[0], learners, model, scale, args, device)

    optimizer = make_optimizer(model, scale, args)
    torch.manual_seed(args.seed + 1 + rank())            # each process its own dropout
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    done, metrics = (restore(resume_from, everything, optimizer, scaler, args) if resume_from
                     else (0, {}))
    card["metrics"] = metrics
    log = checkpoint.open_log(out / "metrics.jsonl", done) if is_main() else open(os.devnull, "w")
    report = open_report(args, out, done) if is_main() else lambda row: None

    def measure(step):
        check_equal_parameters(everything)
        row = {"step": step, **evaluate(model, encoders, heldout, scale, device, args)}
        checkpoint.write_row(log, row)
        report(row)
        print0(as_line(row))
        return row

    if heldout and not done:
        metrics["before"] = measure(0)      # the baseline, not chance: shared words alone find some
    loader = iter(DataLoader(batches, batch_size=None, num_workers=args.num_workers,
                             sampler=range(done * args.grad_accum_steps, end),
                             pin_memory=device.type == "cuda",
                             worker_init_fn=checkpoint.leave_signals_to_parent,
                             generator=torch.Generator()))      # not the one that dropout uses
    random_state, stop, bad, sound = checkpoint.random_state(), checkpoint.catch_signals(), 0, True
    everything.train()
    try:
        for step in tqdm(range(done + 1, args.max_steps + 1), initial=done, total=args.max_steps,
                         disable=not is_main() or not sys.stderr.isatty()):
            begin = time.perf_counter()
            # 1) The next window. Its gradients are averaged, and so are its losses in the log; the
            #    last one of a run may be shorter and divides by its real length.
            window = list(itertools.islice(loader, args.grad_accum_steps))
            # 2) Gradients of this process' own queries. With --keep-graphs auto what they took
            #    tells how many graphs the next step may keep.
            if limit:
                torch.cuda.reset_peak_memory_stats()
            totals = gradient_that_fits(window, learners, model, scale, optimizer, args, device,
                                        scaler.scale(torch.ones((), device=device)))
            if limit:
                # AdamW's two moments appear in the first update; they must find room, too.
                soon = 0 if optimizer.state else 2 * sum(
                    p.nbytes for group in optimizer.param_groups for p in group["params"])
                args.keep_graphs, largest = graphs_that_fit(
                    args.keep_graphs, torch.cuda.memory_allocated() + soon,
                    torch.cuda.max_memory_allocated() + soon, limit, largest)
            # 3) Summed over processes, once, however many chunks there were.
            sync_gradients(everything.parameters())
            # 4) Clip, 5) step and clamp, or leave everything as it is. While weights and moments
            #    move, an exception must not save them.
            lr = args.lr * lr_factor(step - 1, args.lr_schedule, args.warmup_steps,
                                     args.max_steps, args.min_lr_ratio)
            sound = False
            numbers = update(everything, optimizer, scale, scaler, lr, args.max_grad_norm, totals)
            sound, done, random_state = True, step, checkpoint.random_state()
            # 6) One line of the whole job's numbers.
            pairs, = reduce_numbers([sum(len(batch["queries"]) for batch in window)])
            numbers["replay_error"], memory, stopping = reduce_numbers(
                [numbers["replay_error"], peak_memory_mb(), bool(stop)], "max")
            finite = math.isfinite(numbers["loss"] + numbers["grad_norm"])
            # A gradient scaler finds its factor by overflowing; that is no bad step.
            bad = 0 if finite else bad + (scaler.get_scale() <= 1)
            last = step == args.max_steps
            row = {"step": step, "epoch": min(step * args.grad_accum_steps, end) / len(batches),
                   **numbers, "pairs_per_second": pairs / (time.perf_counter() - begin),
                   "peak_memory_mb": memory, "skipped": not finite}
            if args.loss not in objectives.RANKED:
                del row["accuracy"]                                     # there is no hit to count
            checkpoint.write_row(log, row)
            report(row)
            if not finite:
                print0(f"step {step}: loss {row['loss']}, gradient norm {row['grad_norm']}; "
                       "skipped, nothing changed")
            elif last or step % max(1, args.max_steps // 20) == 0:
                print0(as_line(row))
            if bad == PATIENCE:
                raise RuntimeError(f"{bad} steps in a row had no finite gradient: lower --lr or "
                                   "--max-grad-norm, try --dtype fp32, look at the last rows")
            if heldout and (last or args.eval_steps and step % args.eval_steps == 0):
                metrics["now"] = measure(step)
            if last or stopping or args.save_steps and step % args.save_steps == 0:
                # Who stops us by a signal does not wait long: no time to try what was saved.
                save_checkpoint(out, step, everything, intact, optimizer, scaler, card,
                                None if stopping else few)
            if stopping and not last:
                print0(f"stopped by a signal after step {step}: continue with --resume auto")
                return INTERRUPTED if (out / f"checkpoint-{step}").exists() else 1
    except Exception:
        # The weights are those after step `done`, unless the update itself was cut short.
        if sound and done and world_size() == 1 and not (out / f"checkpoint-{done}").exists():
            save_checkpoint(out, done, everything, intact, optimizer, scaler, card, None,
                            random_state)
        raise
    if cache:
        print0(f"documents      {cache.found} vectors found in {cache.path}, {cache.computed} new")
    gather_weights(everything, intact)
    if is_main():
        intact["model"].save_pretrained(out / "final", args.merge_lora, card)
        difference = verify(intact["model"], out / "final", few,
                            trust_remote_code=args.trust_remote_code)
        print0(f"saved          {out / 'final'}; loaded again, its vectors differ by at most "
               f"{difference:.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
