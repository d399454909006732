"""The command line, and what a run says about itself.                              Read 7 of 8.

Read it beside train.py, or as `python train.py --help`. The names and defaults are those of the
first large-batch trainers of page-image embeddings; where a default only makes sense for pretrained
weights (learning rate, LoRA, length), the tiny model from scratch has its own, and `parse_args`
puts the one in force in its place, so that the start-up lines and checkpoints show it.

1) `parse_args`    every flag, its default and range
2) `check_flags`   what has no meaning together is refused before anything is loaded
3) `describe_run`, `describe_weights`, `as_line`, `open_report`   the start-up lines, the log,
   TensorBoard or W&B
4) `lr_factor`     the learning rate of a step, as a function of the flags alone

Not here: what a flag does. Each is passed on, under its own name, to the function that knows.
"""
import argparse
import importlib
import math
import re

import torch

# --loss NAME: the fields that each row of the data must have beside "query". losses.py says which
# suits which data, objectives.py what it does with them.
PAIR, SCORED, LABELLED, ALONE = ("positive",), ("positive", "score"), ("positive", "label"), ()
TAUGHT, CLASSED = ("positive", "negatives", "teacher_scores"), ("label",)
LOSSES = {
    "info_nce": PAIR, "clip": PAIR, "siglip": PAIR, "gist": PAIR, "mega_batch_margin": PAIR,
    "triplet": ("positive", "negatives"), "margin_mse": TAUGHT, "distill_kl": TAUGHT,
    "embedding_distillation": ("teacher_vector",), "cosent": SCORED, "angle": SCORED,
    "cosine_regression": SCORED, "contrastive": LABELLED, "online_contrastive": LABELLED,
    "softmax_classification": LABELLED, "batch_hard_triplet": CLASSED,
    "batch_hard_soft_margin_triplet": CLASSED, "batch_semi_hard_triplet": CLASSED,
    "batch_all_triplet": CLASSED, "simcse": ALONE, "contrastive_tension": ALONE, "tsdae": ALONE}
# These score a row's own negatives; OPTIONS are flags of info_nce and simcse alone.
WITH_NEGATIVES = {"info_nce", "clip", "siglip", "gist", "triplet", "margin_mse", "distill_kl"}
OPTIONS = {"directions": ["query_to_doc"], "partition_mode": "joint", "hardness_mode": None,
           "hardness_strength": 0.0, "label_smoothing": 0.0, "loss_tile": None}   # and defaults
DIRECTIONS = ("query_to_doc", "doc_to_query", "query_to_query", "doc_to_doc")
HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")

# Flags that change what is computed; a resumed run must have the saved ones.
MATHEMATICS = ("model", "train_jsonl", "offline_data", "documents", "mask_names", "data", "mode",
               "batch_size", "grad_accum_steps", "processes", "epochs", "max_steps", "lr",
               "warmup_steps", "lr_schedule", "min_lr_ratio", "weight_decay", "max_grad_norm",
               "temperature", "loss", "directions", "partition_mode", "hardness_mode",
               "hardness_strength", "label_smoothing", "guide_model", "matryoshka_dims",
               "matryoshka_weights", "multi_vector", "num_hard_negatives", "no_duplicates",
               "lora_r", "lora_alpha", "lora_dropout", "lora_vision", "pooling", "max_length",
               "max_num_visual_tokens", "query_prompt", "document_prompt", "dtype", "seed")
# Outside of these a value is a mistake. Where 0 is allowed it often means: not at all.
RANGES = (                       # lowest value, highest value, flags
    (1, math.inf, "batch_size grad_accum_steps max_steps epochs keep_checkpoints chunk_tokens "
                  "max_length max_num_visual_tokens lora_alpha loss_tile"),
    (0, math.inf, "grad_cache_chunk keep_graphs num_workers lora_r num_hard_negatives lr "
                  "vision_cache_gb warmup_steps weight_decay eval_steps save_steps "
                  "hardness_strength"),
    (0, 1, "min_lr_ratio"), (0, 0.99, "lora_dropout"), (0.01, 1, "temperature"),
    (1e-6, math.inf, "max_grad_norm memory_limit_gb"))


def graphs(text):
    """--keep-graphs: "auto" or a number. argparse names flag and value where int() fails."""
    return text if text == "auto" else int(text)


def column(text):
    """--columns: OURS=THEIRS -> (ours, theirs)."""
    ours, equals, theirs = text.partition("=")
    if not (ours and equals and theirs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form query=NAME")
    return ours, theirs


def parse_args(argv=None):
    """argv (default: the process' own) -> namespace of plain values, all defaults resolved."""
    parser = argparse.ArgumentParser(
        prog="train.py", usage="%(prog)s [flags]", description="Exact large-batch contrastive "
        "training in the memory of one chunk (GradCache).")

    # One line per flag: a switch if the default is False, else of the default's type (or `kind`).
    def flag(name, default, help, kind=None, **options):
        if default is False:
            return group.add_argument(name, action="store_true", help=help)
        options.setdefault("metavar", None if "choices" in options else "X")
        help += "" if default is None else " (default: %(default)s)"
        group.add_argument(name, default=default, type=kind or type(default), help=help, **options)

    # The batch decides how many negatives a query meets, the chunk how much memory that takes, and
    # neither changes the other. Accumulation averages several batches: no new negatives. From
    # --keep-graphs 0, the textbook algorithm, the way leads to the plain step, which keeps all:
    # auto keeps what fits below the limit and so buys back the second encoding.
    group = parser.add_argument_group("batch and memory")
    flag("--batch-size", 4, "queries per process and batch")
    flag("--grad-cache-chunk", 2, "samples encoded at once: the memory; 0: plain full-batch step")
    flag("--chunk-tokens", None, "bound a chunk by padded tokens and patches, not by samples", int)
    flag("--keep-graphs", 1, "so many last chunks are not encoded a second time; auto: as many as "
         "a GPU has room for", graphs)
    flag("--memory-limit-gb", None, "auto: GB of GPU memory to fill (default: nine tenths)", float)
    flag("--vision-cache-gb", 1.0, "GB for what a frozen vision tower made of images, so that it "
         "sees each once per step")
    flag("--grad-accum-steps", 1, "batches per step: averages gradients, adds no negatives")
    flag("--gradient-checkpointing", False, "recompute activations within a chunk, too")
    flag("--shard", False, "FSDP2: split the weights over the processes, too")
    flag("--dtype", "auto", "bf16, fp16 (with a gradient scaler): autocast, trainable weights stay "
         "float32; auto: bf16 on a GPU", choices=("auto", "fp32", "bf16", "fp16"))
    flag("--attention", "auto", "auto: flash_attention_2 on a GPU where it is installed, else sdpa")
    flag("--compile", False, "torch.compile; lengths are rounded up, so that few shapes occur")
    flag("--num-workers", None, "loader processes (default: 4 with a GPU, else 0)", int)
    # Without --model nothing is downloaded. --max-length counts tokens after the prompt is added;
    # images are resized to the visual budget, never cut. With LoRA a checkpoint and OUTPUT/final
    # hold the adapter and the name of its base, which peft and sentence-transformers load; programs
    # that know nothing of adapters load what --merge-lora writes.
    group = parser.add_argument_group("model")
    flag("--model", None, "folder or hub name (default: a tiny Qwen3-VL, random weights)", str)
    flag("--pooling", None, "default: the model's own", str, choices=("mean", "cls", "last"))
    flag("--max-length", None, "tokens per sample (default: model's own; tiny 96 + a page)", int)
    flag("--max-num-visual-tokens", 256, "per image; one is 32 x 32 pixels")
    flag("--query-prompt", None, "instruction (default: the model's own)", str)
    flag("--document-prompt", None, "instruction (default: the model's own)", str)
    flag("--multi-vector", False, "a vector for each token; late interaction (maxsim)")
    flag("--lora-r", None, "LoRA rank, 0 trains all weights (default: 32; tiny model 0)", int)
    flag("--lora-alpha", 32, "adapters are scaled by alpha / r")
    flag("--lora-dropout", 0.0, "before the adapters")
    flag("--lora-vision", False, "adapt the vision tower as well")
    flag("--trust-remote-code", False, "run code that comes with the model")
    flag("--merge-lora", False, "OUTPUT/final is one plain model, the adapters merged in")
    # Rows are checked before training starts. Hard negatives are used only up to the number asked
    # for here: a file may hold more, and each epoch samples anew. JSONL is the flags' name for any
    # of the formats that data.py reads.
    group = parser.add_argument_group("data")
    flag("--train-jsonl", None, 'rows {"query": ..., "positive": ..., "negatives": [...]}, or the '
         "file of another library: JSONL, CSV, TSV, Parquet, a datasets folder", str)
    flag("--eval-jsonl", None, "held-out rows, same formats", str)
    flag("--columns", None, "names in the file, say query=question positive=answer", column,
         nargs="+", metavar="OURS=THEIRS")
    flag("--offline-data", "stdlib", "without --train-jsonl", choices=("stdlib", "shapes"))
    flag("--mask-names", False, "stdlib: hide the function's name in its source")
    flag("--documents", "text", "image: render texts to page images", choices=("text", "image"))
    flag("--num-hard-negatives", 0, "at most so many per query")
    flag("--no-duplicates", False, "no text twice in a batch")
    flag("--skip-bad-rows", False, "report unusable rows and go on")
    flag("--allow-any-path", False, "also images outside the JSONL's folder")
    # Those from --directions to --loss-tile belong to info_nce and simcse; `check_flags` refuses
    # what has no meaning together before anything is loaded. No tile changes a result, so it is not
    # in MATHEMATICS. Query-side tuning leaves an existing document index valid: only queries move.
    group = parser.add_argument_group("loss")
    flag("--loss", "info_nce", "losses.py says which suits which data", choices=LOSSES)
    flag("--temperature", None, "where the learnable one starts (default: 0.07; siglip 0.1)", float)
    flag("--directions", ["query_to_doc"], "what a query and its positive are compared with", str,
         nargs="+", choices=DIRECTIONS)
    flag("--partition-mode", "joint", "one softmax over all directions, or one each",
         choices=("joint", "per_direction"))
    flag("--hardness-mode", None, "these negatives weigh more if similar", str, choices=HARDNESS)
    flag("--hardness-strength", 0.0, "how much more; 9 for the first, 5 for the second mode")
    flag("--label-smoothing", 0.0, "share of the target that is spread over all candidates")
    flag("--loss-tile", None, "hold so many x so many similarities at once; same result", int)
    flag("--guide-model", None, "gist: folder or hub name of who says what is no negative", str)
    flag("--matryoshka-dims", None, "make vectors good that are cut to these sizes, too", int,
         nargs="+")
    flag("--matryoshka-weights", None, "one for each of them (default: 1)", float, nargs="+")
    flag("--mode", "standard", "query-side-tune: the frozen starting model encodes documents",
         choices=("standard", "query-side-tune"))
    flag("--document-cache", None, "query-side-tune: file that keeps the documents' vectors from "
         "run to run", str)
    flag("--query-side-backward", "direct", "direct keeps all query graphs; same gradient",
         choices=("direct", "gradcache"))
    # Steps are optimizer steps: one per --grad-accum-steps batches. Warm-up, schedule, clipping and
    # the temperature's clamp all count them.
    group = parser.add_argument_group("optimization")
    flag("--lr", None, "peak (default: 2e-5; tiny model 1e-3)", float)
    flag("--lr-schedule", "cosine", "after the warm-up",
         choices=("cosine", "sgdr", "wsd", "constant"))
    flag("--min-lr-ratio", 0.0, "floor of the schedule, as a share of the peak")
    flag("--warmup-steps", 50, "linear, from 0")
    flag("--max-steps", 500, "optimizer steps")
    flag("--epochs", None, "passes over the data, instead of --max-steps", int)
    flag("--weight-decay", 0.01, "on matrices only")
    flag("--max-grad-norm", 1.0, "of model and temperature together")
    flag("--seed", 0, "of weights, order and dropout")
    # A run never writes into the folder of another one. A resumed one must have the flags listed in
    # MATHEMATICS; the others (chunk, saving, evaluating) may change at any time. metrics.jsonl is
    # always written: a report to another program is a copy of it.
    group = parser.add_argument_group("run")
    flag("--output-dir", "output", "metrics.jsonl, checkpoint-STEP/, final/")
    flag("--eval-steps", 100, "0: only before and after")
    flag("--save-steps", 100, "0: only at the end")
    flag("--keep-checkpoints", 2, "older ones are deleted")
    flag("--report-to", None, "beside metrics.jsonl, where it is installed", str,
         choices=("tensorboard", "wandb"))
    flag("--resume", None, "a checkpoint, or auto: the newest sound one in the output folder", str)
    flag("--allow-changed-flags", False, "resume although flags differ from the saved run's")
    flag("--check-grads", False, "compare the first batch's gradient with a plain step's, and exit")
    args = parser.parse_args(argv)

    # Found here, a value costs a second; found in the loop, the time until it gets there. Written
    # so that a nan fails, too. --max-grad-norm inf is a way to say: no clipping.
    for low, high, names in RANGES:
        for name in names.split():
            value = getattr(args, name)
            if value not in (None, "auto") and not low <= value <= high:
                name = name.replace("_", "-")
                parser.error(f"--{name} must lie in {low} .. {high}, got {value}")
    if args.eval_jsonl and not args.train_jsonl:
        parser.error("--eval-jsonl needs --train-jsonl: offline data hold out rows of their own")
    if args.chunk_tokens and not args.grad_cache_chunk:
        parser.error("--chunk-tokens bounds the chunks that --grad-cache-chunk 0 turns off")
    if args.document_cache and args.mode != "query-side-tune":
        parser.error("--document-cache needs --mode query-side-tune: otherwise documents train")
    if args.memory_limit_gb and args.keep_graphs != "auto":
        parser.error("--memory-limit-gb needs --keep-graphs auto")
    # What suits pretrained weights does not suit random ones; what suits a GPU does not suit a CPU.
    tiny, cuda = args.model is None, torch.cuda.is_available()
    page = args.max_num_visual_tokens if args.documents == "image" else 0
    if args.temperature is None:
        args.temperature = 0.1 if args.loss == "siglip" else 0.07
    for name, pretrained, scratch in (("lr", 2e-5, 1e-3), ("lora_r", 32, 0),
                                      ("max_length", None, 96 + page)):
        if getattr(args, name) is None:
            setattr(args, name, scratch if tiny else pretrained)
    if args.keep_graphs == "auto" and (not cuda or args.shard):
        parser.error("--keep-graphs auto watches one GPU's memory: on a CPU, or with --shard, "
                     "whose processes must take equally many turns, give a number")
    args.columns = dict(args.columns or ())
    args.dtype = ("bf16" if cuda else "fp32") if args.dtype == "auto" else args.dtype
    args.num_workers = (4 if cuda else 0) if args.num_workers is None else args.num_workers
    if args.shard:                      # parts of a sharded model do not run by themselves
        args.vision_cache_gb = 0.0
    if args.shard and (args.dtype == "fp16" or args.document_cache or args.compile):
        parser.error("--shard has no gradient scaler, use --dtype bf16; no --document-cache, since "
                     "all processes must run equally many forwards; and no --compile")
    if args.shard and args.mode == "query-side-tune" and not args.lora_r:
        parser.error("--shard --mode query-side-tune needs --lora-r: without an adapter to drop, "
                     "the frozen starting model is a second one, whole on every process")
    return args


def check_flags(args):
    """ValueError, with the remedy, for flags that have no meaning together."""
    loss, fields = args.loss, LOSSES[args.loss]
    changed = [f"--{name.replace('_', '-')}" for name, default in OPTIONS.items()
               if getattr(args, name) != default]
    late = [name for name in changed if name != "--label-smoothing"]
    for wrong, problem in (
            (changed and loss not in ("info_nce", "simcse"),
             f"has no {', '.join(changed)}: leave them out, or use info_nce"),
            (args.multi_vector and (loss != "info_nce" or late),
             f"cannot be used with --multi-vector {' '.join(late)}: use info_nce, whose only other "
             "flag is then --label-smoothing"),
            (bool(args.hardness_mode) != bool(args.hardness_strength),
             "needs --hardness-mode and --hardness-strength (9, or 5 for hard negatives) together"),
            (args.num_hard_negatives and loss not in WITH_NEGATIVES,
             f"takes no negatives of a row: leave out --num-hard-negatives or use one of "
             f"{', '.join(sorted(WITH_NEGATIVES))}"),
            ("negatives" in fields and not args.num_hard_negatives,
             "learns from negatives: give --num-hard-negatives 1 or more"),
            ((loss == "gist") != bool(args.guide_model),
             "and --guide-model belong together: gist needs a folder or hub name, no other has it"),
            (args.mode != "standard" and "positive" not in fields,
             "cannot be used with --mode query-side-tune: it has no documents to stay as they are"),
            (args.shard and loss == "contrastive_tension",
             "cannot be used with --shard: its second model is not split"),
            (args.matryoshka_dims and loss in ("softmax_classification", "embedding_distillation",
                                               "tsdae"),
             "cannot be cut: its head, teacher or decoder has one size; drop --matryoshka-dims"),
            (len(args.matryoshka_weights or ()) not in (0, len(args.matryoshka_dims or ())),
             "needs one of --matryoshka-weights for each of --matryoshka-dims")):
        if wrong:
            raise ValueError(f"--loss {loss} {problem}")


def describe_run(args):
    """The arithmetic that the flags amount to, in words, one fact per line.

    args.processes is set by then. Losses that are no softmax over documents are named only.
    """
    alone = args.loss.startswith("batch_") or args.loss in ("embedding_distillation", "tsdae")
    queries, each = args.batch_size * args.processes, 0 if alone else 1 + args.num_hard_negatives
    pool = (f"each against {queries * each} documents: 1 positive, {queries * each - 1} negatives"
            if args.loss in ("info_nce", "clip", "siglip", "gist", "simcse") else args.loss)
    size = args.grad_cache_chunk or queries * (1 + each)
    chunks = sum(-(-args.batch_size * n // size) for n in (1, each))      # queries, documents
    chunk = (f"chunks of {args.chunk_tokens} tokens" if args.chunk_tokens else
             f"{chunks} chunks of {size}" if args.grad_cache_chunk else "all at once")
    return "\n".join([
        f"model          {args.model or 'tiny Qwen3-VL, random weights'}, {args.dtype}",
        f"batch          {args.processes} process(es) x {args.batch_size} queries = {queries}, "
        f"{pool}",
        f"memory         {args.batch_size * (1 + each)} samples per process, {chunk}",
        f"optimizer      {args.max_steps} steps x {args.grad_accum_steps} batch(es), peak lr "
        f"{args.lr:g}, {args.lr_schedule} after {args.warmup_steps} warm-up steps"])


def describe_weights(backbone):
    """Names (grouped over layers) and counts of what trains in a module, as text."""
    groups, total = {}, sum(p.numel() for p in backbone.parameters())
    adapted = any(".lora_" in name for name, _ in backbone.named_parameters())
    for name, p in backbone.named_parameters():
        name = re.sub(r"\.\d+\b|base_model\.model\.|\.lora_.*", "", name).split(".")
        name = ".".join(name if adapted else name[:2])
        groups[name] = groups.get(name, 0) + p.numel() * p.requires_grad
    return "\n".join([f"trainable      {sum(groups.values()):,} of {total:,} parameters"] + [
        f"               {count:>12,}  {name}" for name, count in groups.items() if count])


def as_line(row):
    """A row of metrics.jsonl for people."""
    names = ("step", "loss", "accuracy", "lr", "grad_norm", "logit_scale", "pairs_per_second",
             "peak_memory_mb", "eval_loss", "eval_recall@1", "eval_recall@10", "eval_mrr@10",
             "eval_pearson", "eval_spearman", "eval_accuracy", "eval_class_recall@1")
    return "  ".join(f"{name} {row[name]:<7.4g}" for name in names if name in row)


def open_report(args, folder, done):
    """Where rows of numbers go beside metrics.jsonl: a function of a row, {"step": n, name: value}.

    done: step at which a resumed run goes on; TensorBoard drops what was written after it. Raises
    ValueError where the library that --report-to names is not installed.
    """
    if not args.report_to:
        return lambda row: None
    try:
        if args.report_to == "tensorboard":
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
                folder / "tensorboard", purge_step=done + bool(done))
        else:
            name = folder / "wandb-id.txt"              # a resumed run goes on with its curves
            run = importlib.import_module("wandb").init(
                project="gradcache", dir=folder, config=vars(args), resume="allow",
                id=name.read_text() if done and name.exists() else None)
            name.write_text(run.id)
    except ImportError as error:
        raise ValueError(f"--report-to {args.report_to}: {error}; pip install {args.report_to}, or "
                         "leave the flag out, metrics.jsonl is written anyway") from error

    def report(row):
        numbers = {name: value for name, value in row.items() if name != "step"}
        if args.report_to == "wandb":
            return run.log(numbers, step=row["step"])
        for name, value in numbers.items():
            writer.add_scalar(name.replace("eval_", "eval/"), value, row["step"])
        writer.flush()
    return report


def lr_factor(step, schedule, warmup, total, floor=0.0):
    """Learning rate of a step (counted from 0) as a share of its peak: pure, so nothing to save.

    Linear warm-up from 0; then, with p going from 0 at its end to 1 at `total`:
    cosine    (1 + cos(pi p)) / 2                                  (SGDR paper, arXiv 1608.03983)
    sgdr      the same in three cycles, each twice as long as the one before, which fill the run
    wsd       1, and over the last fifth (1 - q)^2 with q from 0 to 1 (warm-up, stable, decay)
    constant  1
    `floor` is what a decay ends at instead of 0. After `total` the last value stays.
    """
    if step < warmup:
        return step / warmup
    p = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "sgdr":
        start, length = next((s, n) for s, n in ((0, 1), (1, 2), (3, 4)) if 7 * p < s + n or s == 3)
        p = (7 * p - start) / length
    shape = {"constant": 1.0, "wsd": (1 - max(0.0, 5 * p - 4)) ** 2}
    return floor + (1 - floor) * shape.get(schedule, (1 + math.cos(math.pi * p)) / 2)
