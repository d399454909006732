"""One optimizer step, whatever befalls it.                                          Read 7 of 8.

What the loop of train.py repeats. A step takes a window of batches and

    1) plans their chunks: samples of similar length together (`chunk_plan`)
    2) runs grad_cache_step on each batch, which leaves the gradient of this process' queries in
       .grad (`window_gradient`); if memory runs out, all processes halve the chunk and repeat the
       window with the same dropout (`gradient_that_fits`). Then train.py sums over processes
    3) clips model and temperature together, and moves the weights by what `make_optimizer` made; if
       loss or gradient is not finite, nothing moves (`update`)

`check_grads` is 1) and 2) against one plain backward, on the user's own model and data.

What it costs beside GradCache: the device is waited for when a batch's ids are looked at, before it
has anything to do, and in 3), where all numbers of the step come over together. Several processes
agree twice per batch that none has run out of memory.
"""
import math

import torch

import objectives
from dist import (any_process, equal_chunks, print0, reduce_numbers, sync_gradients, sync_sharded,
                  whole)
from gradcache import RandContext, compare_gradients, grad_cache_step, plan_chunks
from objectives import batch_loss

EVERYTHING = 10**9               # --keep-graphs for the plain step


def chunk_plan(model, batch, args):
    """Chunks of similar length for each tower, and how many of them keep their graph."""
    plan, keep = [], args.keep_graphs
    for samples in objectives.towers(batch):
        costs = [model.cost(features) for features in samples]
        direct = args.mode == "query-side-tune" and args.query_side_backward == "direct"
        if not args.grad_cache_chunk or direct and not plan:     # the plain step: keep all
            plan.append([list(range(len(costs)))])
            keep = EVERYTHING
        elif args.chunk_tokens:
            plan.append(plan_chunks(costs, len(costs), args.chunk_tokens))
        else:
            plan.append(plan_chunks(costs, args.grad_cache_chunk))
    # Sharded weights are gathered at every forward: all processes need equally many.
    return [equal_chunks(tower) for tower in plan] if args.shard else plan, keep


def chunk_size(model, samples, args):
    """So many samples at once, whichever of its flags bounds a chunk."""
    if args.chunk_tokens:
        return max(1, args.chunk_tokens // max(map(model.cost, samples)))
    return args.grad_cache_chunk or len(samples)


class OutOfMemoryElsewhere(Exception):
    """Another process ran out of memory, so this one gives the step up, too."""


def window_gradient(window, encoders, model, scale, args, device, factor=1.0):
    """Accumulate the gradient of the mean over the batches of a window, on this process' part.

    factor multiplies it, not the loss: a gradient scaler's. Returns this process' shares of loss
    and accuracy, and the replay error: a (3,) tensor, still on the device. If memory runs out in
    step 1 or 3 of GradCache on one process, every process raises: they ask each other after both,
    so that nobody waits in a collective for one that has given up.
    """
    def agree():
        if any_process(False):
            raise OutOfMemoryElsewhere

    totals = torch.zeros(3, device=device)
    for batch in window:
        plan, keep = chunk_plan(model, batch, args)
        loss_fn = batch_loss(batch, scale, args, device)
        last = batch is window[-1]
        sync_sharded(model.backbone, False)
        try:
            # What a frozen vision tower makes of an image is kept for the second encoding.
            room = args.vision_cache_gb * 2**30 / len(encoders)
            towers = [model.see(samples, chunk_size(model, samples, args), room)
                      if room and encoder is model else samples
                      for encoder, samples in zip(encoders, objectives.towers(batch))]
            loss, metrics = grad_cache_step(
                encoders, towers, lambda *reps: agree() or loss_fn(*reps), plan, keep=keep,
                grad_scale=factor / len(window),
                before_last_backward=lambda: sync_sharded(model.backbone, last))
            agree()
            del towers                      # or they would lie beside those of the next batch
        except torch.OutOfMemoryError:      # by no name: a frame that holds an error is held by it,
            if not args.shard:              # and with it what filled the memory
                any_process(True)
            raise
        totals[:2] += torch.stack([loss, metrics.get("accuracy", 0 * loss)]) / len(window)
        totals[2] = torch.maximum(totals[2], metrics["replay_error"])
    return totals


def gradient_that_fits(window, encoders, model, scale, optimizer, args, device, factor=1.0):
    """window_gradient; out of memory halves the chunk and repeats the whole window, same dropout.

    The gradient does not depend on the chunk, so nothing is lost but time.
    """
    random = RandContext()
    while True:
        try:
            return window_gradient(window, encoders, model, scale, args, device, factor)
        except (torch.OutOfMemoryError, OutOfMemoryElsewhere) as error:
            name = "chunk_tokens" if args.chunk_tokens else "grad_cache_chunk"
            size = getattr(args, name) or max(len(t) for b in window for t in objectives.towers(b))
            if size == 1 or args.shard:     # sharded, the others wait for this process' forward
                raise RuntimeError(f"out of memory, {name} {size}: lower that, --max-length or "
                                   "--max-num-visual-tokens, use LoRA, --gradient-checkpointing, "
                                   "--dtype bf16, --query-side-backward gradcache") from error
            vars(args).update({name: size // 2, "keep_graphs": min(args.keep_graphs, 1)})
            print0(f"out of memory: {name} is now {size // 2}, step repeated")
        optimizer.zero_grad()
        random.write(random.state)
        if torch.cuda.is_initialized():     # what did not fit says nothing about what does
            torch.cuda.reset_peak_memory_stats()


def update(everything, optimizer, scale, scaler, lr, max_grad_norm, totals):
    """Clip, step, clamp; nothing moves if loss or gradient is not finite. Returns what is logged.

    totals: what window_gradient returned. The gradients still hold the scaler's factor, which keeps
    those of fp16 from vanishing; it is halved when they overflow. Without fp16 it is always 1.
    """
    scaler.unscale_(optimizer)
    norm = whole(torch.nn.utils.clip_grad_norm_(everything.parameters(), max_grad_norm))
    # Here the GPU waits, once for everything that is logged.
    loss, accuracy, replay_error, norm, logit_scale = torch.stack(
        [*totals, norm, scale.log_scale.detach().exp()]).tolist()
    # Every process holds the same summed gradient and hears of the same loss: all decide alike.
    loss, accuracy = reduce_numbers([loss, accuracy])
    if math.isfinite(loss + norm):
        for group in optimizer.param_groups:
            group["lr"] = lr
        scaler.step(optimizer)
        scale.clamp_()
    scaler.update()
    optimizer.zero_grad()
    return {"loss": loss, "accuracy": accuracy, "lr": lr, "grad_norm": norm,
            "logit_scale": logit_scale, "replay_error": replay_error}       # this process' own


def make_optimizer(model, scale, args):
    """AdamW. Weight decay on matrices only: not on biases and norms, not on the temperature."""
    # Decay would pull the scale, 14.3 at the start, towards exp(0) = 1. What the loss learns has
    # groups of its own, because AdamW cannot treat sharded and whole parameters in one.
    groups = {}
    for part in (model, scale):
        for p in part.parameters():
            groups.setdefault((part is model, p.dim() > 1), []).extend([p] * p.requires_grad)
    return torch.optim.AdamW([{"params": group, "weight_decay": args.weight_decay * decays}
                              for (_, decays), group in groups.items() if group], lr=args.lr)


def check_grads(batch, encoders, model, scale, args, device):
    """Exit status 0 if the chunked gradient of this batch is the plain full-batch one, else 1.

    Plain is one ordinary forward of each tower's whole batch, then loss.backward(). Without
    dropout, since the two orders of encoding draw other masks; a second chunked step has it on, and
    its replay error shows whether it was repeated exactly.
    """
    factor = 2.0**10 if args.dtype == "fp16" else 1.0       # or small gradients vanish in fp16
    parameters = [p for p in [*model.parameters(), *scale.parameters()] if p.requires_grad]

    def plain():
        reps = [encode(samples) for encode, samples in zip(encoders, objectives.towers(batch))]
        (batch_loss(batch, scale, args, device)(*reps)[0] * factor).backward()
        sync_gradients(parameters)

    def chunked():
        totals = window_gradient([batch], encoders, model, scale, args, device, factor)
        sync_gradients(parameters)
        return reduce_numbers([totals[2].item()], "max")[0]
    model.eval(), scale.eval()
    cosine, ratio = compare_gradients(plain, chunked, parameters)
    model.train(), scale.train()
    replay_error = chunked()
    good = cosine >= 0.9999 and abs(ratio - 1) <= 1e-4 and replay_error <= 1e-5
    print0(f"gradient       {sum(p.numel() for p in parameters):,} numbers: cosine {cosine:.8f} "
           f"(>= 0.9999), norm ratio {ratio:.8f} (1 +- 1e-4), replay error {replay_error:.1e} "
           f"(<= 1e-5): {'equal' if good else 'NOT EQUAL'}")
    return 0 if good else 1
