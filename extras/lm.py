"""python -m extras.lm: language-model objectives, and why none needs GradCache.     Read 8 of 8.

    python -m extras.lm                                                       # seq: pre-training
    python -m extras.lm --objective sft  --model output/lm/seq                # one after another
    python -m extras.lm --objective dpo  --model output/lm/sft --lr 1e-4
    python -m extras.lm --objective grpo --model output/lm/sft --lr 1e-4      # or online_dpo, ppo

A contrastive loss puts the whole batch into one softmax. The losses here are sums: over tokens, or
over pairs of responses. Where a sample does meet others (a group's mean reward) it meets constants,
worked out before. So the gradients of chunks add up, each sample is encoded once, and plain
gradient accumulation (`accumulate`) is exact, if one thing is minded:

    1) count what the loss averages over, tokens or pairs, in the whole batch
    2) chunk by chunk: backward of (sum of the chunk's losses) / (that count)

Averaging the chunks' means instead is a common fault: with lengths that differ, a token in a chunk
of few would weigh more than one in a chunk of many.

The objectives, with log-probabilities log P of response tokens only (a prompt is given, not said):

    seq         next-token cross-entropy of a text; all its tokens are "response"
    sft         the same of a response after its prompt
    dpo         prefer `positive` to a negative, measured against a frozen copy of the starting
                model: -log sigmoid(beta * difference)   (Rafailov et al. 2023, arXiv 2305.18290)
    online_dpo  dpo on the best and the worst of a group of sampled responses
    grpo        each token of a sampled response is reinforced by how much better it was rewarded
                than its group (Shao et al. 2024, arXiv 2402.03300; here, averaged over tokens)
    ppo         by how much better it went on than a critic had expected (Schulman et al. 2017,
                arXiv 1707.06347, with the advantages of arXiv 1506.02438)

The last three sample responses, score them (--reward MODULE:FUNCTION) and take --rollout-interval
optimizer steps on them; the log-probabilities at sampling time are kept, so no old model is needed.
A group has one prompt, so that sampling needs no padding. Without --train-jsonl a docstring is the
prompt and its source the response; the built-in reward is how far Python's parser gets.

What it costs: activations of a chunk; the reference, a second copy of the weights; the critic, a
third with its optimizer. Not here: several processes and resuming (see train.py), packing, images.

Letters: C samples in a chunk, T tokens of the longest, R response tokens in it, G in a group.
"""
import argparse
import ast
import copy
import importlib
import json
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from data import offline_pairs, read_pairs
from export import quiet
from flags import lr_factor
from model import evaluating, tiny_qwen3_vl

ONLINE = ("online_dpo", "grpo", "ppo")


def accumulate(loss_sum, batch, chunk_size, count):
    """Leave in `.grad` the gradient of the batch's mean loss, a chunk at a time; return that mean.

    loss_sum(samples) -> sum of the losses of these samples, 0-dim
    count             what the batch's sum is divided by: its tokens, or its pairs
    Under torch.no_grad() it only evaluates.
    """
    total = 0.0
    for start in range(0, len(batch), chunk_size):
        loss = loss_sum(batch[start:start + chunk_size]) / count
        if loss.requires_grad:
            loss.backward()
        total += loss.detach()
    return total


# --- The objectives: pure functions of log-probabilities ------------------------------------------

def dpo_losses(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    """Sums of log P over the responses of each pair, by the model and by the reference -> (pairs,).

    What counts is how much more the model prefers the chosen one than the reference does.
    """
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def group_advantages(rewards, eps=1e-6):
    """(groups, G) rewards -> how many standard deviations above its group's mean each one is.

    The deviation is the group's own (divided by G). Equal rewards teach nothing: zeros.
    """
    rewards = rewards - rewards[:, :1]                  # else rounding passes for a difference
    return (rewards - rewards.mean(1, keepdim=True)) / (
        rewards.std(1, correction=0, keepdim=True) + eps)


def clipped_losses(log_p, old, advantages, clip_eps=0.2):
    """(R,) log P now and at sampling time, advantage of each token -> (R,) losses.

    A token is made likelier by its advantage, but no further than 1 +- clip_eps times its old
    probability: beyond, its gradient is zero. (Going back is always rewarded: hence the minimum.)
    """
    ratio = (log_p - old).exp()
    within = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return -torch.minimum(ratio * advantages, within * advantages)


def kl_estimates(log_p, ref):
    """(R,) estimates of KL(model, reference) from the sampled tokens: p_ref/p - log(p_ref/p) - 1.
    Never negative, unlike log(p/p_ref), with the same mean. As a loss its mean gradient is that of
    KL(reference, model); as a reward it would hardly pull, so ppo pays log(p/p_ref) itself."""
    return (ref - log_p).exp() - (ref - log_p) - 1


def gae(rewards, values, gamma=1.0, lam=0.95):
    """(T,) reward after each token and value before it -> (T,) advantages. After the last: nothing.

    A = sum_k (gamma lam)^k delta_{t+k},  delta_t = reward_t + gamma value_{t+1} - value_t.
    """
    advantages, later = torch.zeros_like(rewards), 0.0
    following = torch.cat([values[1:], values.new_zeros(1)])
    delta = rewards + gamma * following - values
    for t in reversed(range(len(rewards))):
        advantages[t] = later = delta[t] + gamma * lam * later
    return advantages


# --- From samples to log-probabilities ------------------------------------------------------------
# A sample is {"ids": (tokens,), "start": where the response begins, ...}; other entries are one
# number per response token, (R,), or facts about the whole.

def columns(samples, device):
    """Right-padded ids (C, T), mask of real tokens and mask of response tokens, all (C, T)."""
    ids = pad_sequence([s["ids"] for s in samples], batch_first=True).to(device)
    place = torch.arange(ids.shape[1], device=device)
    ends, starts = (torch.tensor(x, device=device)[:, None] for x in (
        [len(s["ids"]) for s in samples], [s["start"] for s in samples]))
    real = place < ends
    return ids, real, real & (place >= starts)


def response_logits(model, samples):
    """Scores of what follows, where a response token does: (R, words); and those tokens: (R,).

    Flat, samples one after another, so that nothing later has to mind padding.
    """
    ids, real, response = columns(samples, model.device)
    logits = model(input_ids=ids, attention_mask=real.long()).logits            # (C, T, words)
    return logits[:, :-1][response[:, 1:]], ids[response]     # token t is foretold at t - 1


def log_probs(model, samples):
    """log P of each response token, (R,)."""
    return -F.cross_entropy(*response_logits(model, samples), reduction="none")


def per_sample(flat, samples):
    """(R,) -> a tensor for each sample."""
    return flat.split([len(s["ids"]) - s["start"] for s in samples])


def together(name, samples):
    """The (R,) numbers `name` of these samples."""
    return torch.cat([s[name] for s in samples])


class Critic(nn.Module):
    """What reward is still to come, told from the tokens so far: the model's backbone, copied, and
    a last layer that is zero at first."""

    def __init__(self, model):
        super().__init__()
        self.backbone = copy.deepcopy(model.base_model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1,
                              device=model.device, dtype=model.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, samples):
        """Values before each response token, (R,)."""
        ids, real, response = columns(samples, self.head.weight.device)
        hidden = self.backbone(input_ids=ids, attention_mask=real.long()).last_hidden_state
        return self.head(hidden[:, :-1][response[:, 1:]])[:, 0]


def loss_sum(model, args):
    """--objective -> function of samples: the sum of their losses."""
    def tokens(samples):
        return F.cross_entropy(*response_logits(model, samples), reduction="sum",
                               label_smoothing=args.label_smoothing)

    def pairs(samples):
        both = [s[name] for name in ("chosen", "rejected") for s in samples]
        sums = torch.stack([x.sum() for x in per_sample(log_probs(model, both), both)])
        reference = torch.stack([s["ref"].sum() for s in both])
        return dpo_losses(*sums.chunk(2), *reference.chunk(2), beta=args.beta).sum()

    def reinforced(samples):
        log_p, old, advantages, ref = log_probs(model, samples), *(
            together(name, samples) for name in ("old", "advantages", "ref"))
        losses = clipped_losses(log_p, old, advantages, args.clip_eps)
        pull = args.kl_coef if args.objective == "grpo" else 0.0    # ppo: taken off the rewards
        return (losses + pull * kl_estimates(log_p, ref)).sum()

    return {"seq": tokens, "sft": tokens, "grpo": reinforced, "ppo": reinforced}.get(
        args.objective, pairs)


def terms(samples, args):
    """What the mean is taken over: pairs, or response tokens."""
    pairs = args.objective in ("dpo", "online_dpo")
    return len(samples) if pairs else sum(len(s["ids"]) - s["start"] for s in samples)


# --- Samples, from rows or from the model itself --------------------------------------------------

def as_sample(tokenizer, prompt, response, max_length):
    """Prompt and response -> sample, cut to max_length tokens; at most half are the prompt's last.
    prompt None: a text alone, of which all tokens but the first can be foretold. An end token
    closes what was not cut. A tokenizer with a chat template frames the prompt by it."""
    if prompt is None:
        ids, start = tokenizer(response, add_special_tokens=False)["input_ids"], 1
    else:
        text = f"{prompt}\n" if tokenizer.chat_template is None else tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][-(max_length // 2):]
        start = len(ids)
        ids = ids + (tokenizer(response, add_special_tokens=False)["input_ids"] if response else [])
    return {"ids": torch.tensor((ids + [tokenizer.eos_token_id])[:max_length]), "start": start}


def prepare(rows, tokenizer, reference, args):
    """Rows -> samples of seq, sft and dpo, with what the reference says of them."""
    if args.objective != "dpo":
        return [as_sample(tokenizer, row["query"] if args.objective == "sft" else None,
                          row["positive"], args.max_length) for row in rows]
    pairs = [{name: as_sample(tokenizer, row["query"], text, args.max_length) for name, text in (
        ("chosen", row["positive"]), ("rejected", row["negatives"][0]))} for row in rows]
    annotate("ref", reference, [s for pair in pairs for s in pair.values()], args.chunk)
    return pairs


@torch.no_grad()
def annotate(name, model, samples, chunk):
    """Add to each sample, under this name, what the model says of its tokens: log P, or values."""
    function = model if isinstance(model, Critic) else lambda some: log_probs(model, some)
    for start in range(0, len(samples), chunk):
        some = samples[start:start + chunk]
        for sample, values in zip(some, per_sample(function(some), some)):
            sample[name] = values


@torch.no_grad()
def rollout(rows, model, tokenizer, reference, critic, reward, args):
    """Sample --group-size responses to each row's query, score them -> (samples, mean reward).
    All that the coming steps optimize towards is settled here, once: log P of the sampled tokens by
    the model that sampled them, by the reference, advantages, and the critic's targets."""
    samples, rewards, G = [], [], args.group_size
    for row in rows:
        prompt = as_sample(tokenizer, row["query"], "", args.max_length)["ids"][:-1]
        ids = prompt[None].to(model.device)
        group = model.generate(              # from the model's own distribution, unlike its folder
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, repetition_penalty=1.0, num_return_sequences=G,
            max_new_tokens=args.max_length - len(prompt), pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id)
        for said in group[:, len(prompt):].cpu():
            ends = (said == tokenizer.eos_token_id).nonzero()[:1, 0]
            said = said[:ends.item() + 1] if len(ends) else said        # after it, padding
            samples.append({"ids": torch.cat([prompt, said]), "start": len(prompt)})
            rewards.append(float(reward(row, tokenizer.decode(said, skip_special_tokens=True))))
    mean, rewards = sum(rewards) / len(rewards), torch.tensor(rewards)
    for name, one in (("old", model), ("ref", reference), ("values", critic)):
        if one is not None:
            annotate(name, one, samples, args.chunk)
    if args.objective == "online_dpo":
        groups = zip(torch.arange(len(samples)).split(G), rewards.split(G))
        return [{"chosen": samples[which[r.argmax()]], "rejected": samples[which[r.argmin()]]}
                for which, r in groups if r.max() > r.min()], mean
    advantages = group_advantages(rewards.view(-1, G)).flatten()
    for sample, final, advantage in zip(samples, rewards, advantages):
        sample["advantages"] = torch.full_like(sample["old"], advantage)
        if critic:
            at = args.kl_coef * (sample["ref"] - sample["old"])     # not kl_estimates: see there
            at[-1] += final                                  # the reward comes with the last token
            sample["advantages"] = gae(at, sample["values"], args.gamma, args.gae_lambda)
            sample["returns"] = sample["advantages"] + sample["values"]
    return samples, mean


def parsed_share(row, text):
    """The built-in reward: the share of the text's lines that Python parses before it gives up."""
    try:
        ast.parse(text)
        return float(bool(text.strip()))
    except SyntaxError as error:
        return max(0, (error.lineno or 1) - 1) / max(1, len(text.splitlines()))
    except (ValueError, MemoryError, RecursionError):         # null bytes; nested beyond reason
        return 0.0


# --- The program ----------------------------------------------------------------------------------

@quiet()
def load(args, rows):
    """(tokenizer, model) of --model; without one, a tiny Qwen3 that starts from random weights."""
    if args.model:
        return (AutoTokenizer.from_pretrained(args.model),
                AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32))
    texts = [text for row in rows for text in (row["query"], row["positive"])]
    tokenizer = tiny_qwen3_vl(texts)[1].tokenizer
    return tokenizer, Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m extras.lm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--objective", default="seq", choices=("seq", "sft", "dpo", *ONLINE))
    flag("--model", help="folder or hub name of a causal language model (default: a tiny one)")
    flag("--train-jsonl", help="rows with query, positive and, for dpo, negatives; see data.py")
    flag("--eval-jsonl", help="held-out rows, the first 128 (offline data have their own)")
    flag("--batch-size", type=int, default=16, help="rows; online, prompts")
    flag("--chunk", type=int, default=4, help="samples (or pairs) at once: the memory")
    flag("--max-length", type=int, default=96, help="tokens of prompt and response")
    flag("--max-steps", type=int, default=300, help="optimizer steps")
    flag("--lr", type=float, default=1e-3, help="peak")
    flag("--lr-schedule", default="cosine", choices=("cosine", "sgdr", "wsd", "constant"))
    flag("--warmup-steps", type=int, default=20, help="linear, from 0")
    flag("--max-grad-norm", type=float, default=1.0, help="of the model; of the critic, too")
    flag("--label-smoothing", type=float, default=0.0, help="seq, sft")
    flag("--beta", type=float, default=0.1, help="dpo: how hard the reference holds on")
    flag("--group-size", type=int, default=4, help="online: responses to a prompt")
    flag("--rollout-interval", type=int, default=2, help="online: steps on the same responses")
    flag("--clip-eps", type=float, default=0.2, help="grpo, ppo")
    flag("--kl-coef", type=float, default=0.01, help="grpo, ppo: pull back to the reference")
    flag("--gamma", type=float, default=1.0, help="ppo: what a later reward is worth")
    flag("--gae-lambda", type=float, default=0.95, help="ppo")
    flag("--reward", default="extras.lm:parsed_share", metavar="MODULE:FUNCTION",
         help="online: function of a row and a response's text -> number")
    flag("--seed", type=int, default=0)
    flag("--output-dir", help="default: output/lm/OBJECTIVE")
    args = parser.parse_args(argv)
    for name, least in {"batch_size": 1, "chunk": 1, "max_steps": 1, "group_size": 1,
                        "rollout_interval": 1, "max_length": 4}.items():
        if (value := getattr(args, name)) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if ":" not in args.reward:
        parser.error(f"--reward is MODULE:FUNCTION, got {args.reward}")
    if args.eval_jsonl and not args.train_jsonl:
        parser.error("--eval-jsonl needs --train-jsonl: offline data hold out rows of their own")
    args.output_dir = args.output_dir or f"output/lm/{args.objective}"
    return args


def read_rows(args):
    """(training rows, held-out rows), texts only. Of the offline ones, dpo is to reject the source
    with its lines in reverse order."""
    if not args.train_jsonl:
        return [[{**row, "negatives": ["\n".join(row["positive"].splitlines()[::-1])]}
                 for row in rows] for rows in offline_pairs()]
    needs = ("positive", "negatives") if args.objective == "dpo" else ("positive",)
    split = [[], []]
    for rows, path in zip(split, (args.train_jsonl, args.eval_jsonl)):
        rows += read_pairs(path, needs=needs, why=f"{args.objective} ") if path else []
        for row in rows:
            for text in (row["query"], row["positive"], *row["negatives"]):
                if not isinstance(text, str):
                    raise ValueError(f"{path}, line {row['line']}: {text!r:.80} is no text, and "
                                     "these models read nothing else")
    return split


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    rows, heldout = read_rows(args)
    module, _, name = args.reward.partition(":")
    reward = getattr(importlib.import_module(module), name) if args.objective in ONLINE else None
    tokenizer, model = load(args, rows)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{args.model}: its tokenizer has no eos_token, which ends a response")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    needed = args.objective not in ("seq", "sft")
    reference = copy.deepcopy(model).requires_grad_(False).eval() if needed else None
    critic = Critic(model) if args.objective == "ppo" else None
    learners = [model, critic] if critic else [model]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=args.lr) for one in learners]
    objective = loss_sum(model.train(not needed), args)    # dropout would part it from its copy
    print(f"objective      {args.objective}: {len(rows)} rows, {len(heldout)} held out; batches of "
          f"{args.batch_size}, chunks of {args.chunk}, {model.num_parameters():,} weights")

    def samples_of(some):
        if args.objective not in ONLINE:
            return prepare(some, tokenizer, reference, args), None
        return rollout(some, model, tokenizer, reference, critic, reward, args)

    def evaluate(some):
        """Mean loss of these rows; online, the mean reward of fresh responses to them."""
        samples, mean = samples_of(some)
        with evaluating(model):
            return {"eval_reward": mean} if args.objective in ONLINE else {"eval_loss": float(
                accumulate(objective, samples, args.chunk, terms(samples, args)))}

    heldout, shuffle, order, samples = heldout[:128], random.Random(args.seed), [], []
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with open(Path(args.output_dir, "metrics.jsonl"), "w", encoding="utf-8") as log:
        def write(step, numbers):
            log.write(json.dumps({"step": step, **numbers}) + "\n")
            if step % max(1, args.max_steps // 10) == 0 or step == args.max_steps:
                print(f"step {step:<7}", *(f"{k} {v:<8.4g}" for k, v in numbers.items()))

        if heldout:
            write(0, evaluate(heldout))
        for step in range(1, args.max_steps + 1):
            if args.objective not in ONLINE or (step - 1) % args.rollout_interval == 0:
                if len(order) < args.batch_size:
                    order += shuffle.sample(range(len(rows)), len(rows))
                chosen, order = order[:args.batch_size], order[args.batch_size:]
                samples, mean = samples_of([rows[i] for i in chosen])
            lr = args.lr * lr_factor(step - 1, args.lr_schedule, args.warmup_steps, args.max_steps)
            count = terms(samples, args)
            numbers = {"lr": lr, "loss": float(accumulate(objective, samples, args.chunk, count))}
            numbers |= {} if mean is None else {"reward": mean}
            if critic:
                numbers["critic_loss"] = float(accumulate(
                    lambda some: F.mse_loss(critic(some), together("returns", some),
                                            reduction="sum") / 2, samples, args.chunk, count))
            for learner, optimizer in zip(learners, optimizers):
                norm = nn.utils.clip_grad_norm_(learner.parameters(), args.max_grad_norm)
                optimizer.param_groups[0]["lr"] = lr
                if norm.isfinite():
                    optimizer.step()
                optimizer.zero_grad()
            write(step, numbers)
        if heldout:
            write(args.max_steps, evaluate(heldout))
    with quiet():
        model.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    print(f"saved          {args.output_dir}")


if __name__ == "__main__":
    main()
