"""extras/lm.py: each objective against its formula, and chunks against the whole batch."""
import copy
import json
import math

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from extras import lm
from flags import lr_factor

VOCABULARY = 40


@pytest.fixture
def model():
    """A Qwen3 of two layers in float64, so that equal means equal."""
    torch.manual_seed(0)
    return lm.Qwen3ForCausalLM(lm.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8)).double()


def sample(length, start, seed=0):
    ids = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "start": start}


def by_hand(model, one):
    """log P of each response token, a forward for each: nothing padded, nothing shifted."""
    return torch.stack([model(one["ids"][None, :t]).logits[0, -1].log_softmax(0)[one["ids"][t]]
                        for t in range(one["start"], len(one["ids"]))])


def samples_for(objective, model):
    """Eight samples of unequal lengths with all that an objective reads, as `model` sees them."""
    torch.manual_seed(1)
    samples = [sample(length, start, seed) for seed, (length, start) in enumerate(
        [(5, 1), (12, 3), (3, 2), (9, 8), (7, 4), (11, 1), (4, 1), (6, 5)])]
    lm.annotate("ref", model, samples, 7)
    for one in samples:
        R = len(one["ids"]) - one["start"]
        one["ref"] = one["ref"] + 0.3 * torch.randn(R).double()
        one["old"] = one["ref"] + 0.3 * torch.randn(R).double()
        one["advantages"] = torch.randn(R).double()
    if "dpo" in objective:
        return [{"chosen": a, "rejected": b} for a, b in zip(samples[::2], samples[1::2])]
    return samples


def arguments(objective, **options):
    args = lm.parse_args(["--objective", objective])
    vars(args).update(options)
    return args


# --- The sum, divided once ------------------------------------------------------------------------

@pytest.mark.parametrize("objective", ["seq", "sft", "dpo", "online_dpo", "grpo", "ppo"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_gradient_of_chunks_is_that_of_the_whole_batch(model, objective, chunk):
    args = arguments(objective, label_smoothing=0.1)
    samples = samples_for(objective, model)
    loss = lm.loss_sum(model, args)
    whole = loss(samples) / lm.terms(samples, args)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    value = lm.accumulate(loss, samples, chunk, lm.terms(samples, args))
    assert value.item() == pytest.approx(whole.item(), rel=1e-12)
    for p, g in zip(model.parameters(), expected):
        assert (p.grad - g).norm() <= 1e-10 * g.norm().clamp(min=1e-12)


def test_the_mean_of_the_chunks_means_would_be_another_gradient(model):
    """What `accumulate` avoids: a token of a short chunk would weigh more."""
    args, samples = arguments("sft"), samples_for("sft", model)
    loss = lm.loss_sum(model, args)
    lm.accumulate(loss, samples, 2, lm.terms(samples, args))
    right = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    for some in (samples[i:i + 2] for i in range(0, 8, 2)):
        (loss(some) / lm.terms(some, args) / 4).backward()
    wrong = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (wrong - right).norm() > 0.05 * right.norm()


# --- Log-probabilities ----------------------------------------------------------------------------

def test_only_the_response_counts_and_padding_changes_nothing(model):
    samples = samples_for("sft", model)
    found = lm.per_sample(lm.log_probs(model, samples), samples)
    for one, log_p in zip(samples, found):
        torch.testing.assert_close(log_p, by_hand(model, one), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_next_token_loss_is_that_of_the_library_and_of_the_formula(model, smoothing):
    samples = samples_for("seq", model)
    loss = lm.loss_sum(model, arguments("seq", label_smoothing=smoothing))(samples)
    expected = 0
    for one in samples:
        labels = one["ids"].clone()
        labels[:one["start"]] = -100
        output = model(one["ids"][None], labels=labels[None])
        every = -output.logits[0, one["start"] - 1:-1].log_softmax(-1).mean(-1).sum()
        expected += ((1 - smoothing) * output.loss * (len(labels) - one["start"])
                     + smoothing * every)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)     # theirs is float32


# --- The objectives -------------------------------------------------------------------------------

def test_dpo_is_its_formula_and_starts_at_ln_2(model):
    pairs = samples_for("dpo", model)
    loss = lm.loss_sum(model, arguments("dpo", beta=0.3))(pairs)
    expected = 0
    for pair in pairs:
        margin = sum(sign * (by_hand(model, pair[name]).sum() - pair[name]["ref"].sum())
                     for name, sign in (("chosen", 1), ("rejected", -1)))
        expected += math.log(1 + math.exp(-0.3 * margin.item()))
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert [lm.terms(pairs, arguments(name)) for name in ("dpo", "online_dpo")] == [4, 4]
    same = torch.tensor([-3.0, -9.0])
    assert lm.dpo_losses(same, same, same, same).tolist() == pytest.approx([math.log(2)] * 2)


def test_advantages_are_relative_to_the_group_and_equal_rewards_teach_nothing():
    found = lm.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [7.0, 7.0, 7.0, 7.0],
                                              [0.0, 0.0, 0.0, 4.0]]))
    third = 3 ** -0.5
    expected = [[1, -1, -1, 1], [0, 0, 0, 0], [-third, -third, -third, 3 * third]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float), atol=1e-5, rtol=0)
    equal = torch.tensor([[5.0], [76.8222], [0.1], [1 / 3]])        # also where a mean is rounded
    assert not any(lm.group_advantages(equal.expand(4, G)).any() for G in range(1, 17))


@pytest.mark.parametrize("ratio, advantage, loss, slope", [
    (1.0, 2.0, -2.0, -2.0),              # at the policy that sampled: the policy gradient
    (1.5, 2.0, -2.4, 0.0),               # already likelier by more than 20 %: no further
    (0.5, 2.0, -1.0, -1.0),              # has become less likely: back
    (0.5, -2.0, 1.6, 0.0), (1.5, -2.0, 3.0, 3.0)])
def test_the_clipped_loss_and_its_gradient(ratio, advantage, loss, slope):
    log_p = torch.tensor([math.log(ratio)], dtype=torch.double, requires_grad=True)
    found = lm.clipped_losses(log_p, torch.zeros(1).double(), torch.tensor([advantage]).double())
    found.sum().backward()
    assert found.item() == pytest.approx(loss) and log_p.grad.item() == pytest.approx(slope)


def test_the_kl_estimate_is_never_negative_and_right_on_average():
    torch.manual_seed(0)
    p, ref = torch.randn(2, 6).double().log_softmax(-1)
    estimates = lm.kl_estimates(p, ref)
    assert (estimates >= 0).all() and lm.kl_estimates(p, p).abs().max() == 0
    kl = (p.exp() * (p - ref)).sum()
    assert (p.exp() * estimates).sum().item() == pytest.approx(kl.item(), rel=1e-10)
    scores = p.clone().requires_grad_()                 # and its gradient, that of the other one
    found, expected = (torch.autograd.grad(loss.sum(), scores)[0] for loss in (
        p.exp() * lm.kl_estimates(scores.log_softmax(0), ref),
        ref.exp() * (ref - scores.log_softmax(0))))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("objective, pull", [("grpo", 0.5), ("ppo", 0.0)])
def test_grpo_and_ppo_are_their_formula_over_the_valid_tokens(model, objective, pull):
    samples = samples_for(objective, model)
    args = arguments(objective, kl_coef=0.5, clip_eps=0.1)
    loss = lm.loss_sum(model, args)(samples)
    assert lm.terms(samples, args) == 4 + 9 + 1 + 1 + 3 + 10 + 3 + 1
    expected = 0
    for one in samples:
        for log_p, old, ref, A in zip(by_hand(model, one), one["old"], one["ref"],
                                      one["advantages"]):
            ratio, back = (log_p - old).exp().item(), (ref - log_p).exp().item()
            clipped, A = min(max(ratio, 0.9), 1.1), A.item()
            expected += -min(ratio * A, clipped * A) + pull * (back - math.log(back) - 1)
    assert loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.9, 1.0), (0.9, 0.0)])
def test_gae_is_its_double_sum(gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 7).double()
    following = [*values[1:].tolist(), 0.0]
    delta = [r + gamma * n - v for r, n, v in zip(rewards.tolist(), following, values.tolist())]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, 7)) for t in range(7)]
    assert lm.gae(rewards, values, gamma, lam).tolist() == pytest.approx(expected)


def test_a_critic_starts_at_zero_with_the_models_backbone(model):
    critic, samples = lm.Critic(model), samples_for("ppo", model)
    assert critic(samples).tolist() == [0.0] * lm.terms(samples, arguments("ppo"))
    assert critic.backbone is not model.base_model
    assert lm.Critic(copy.deepcopy(model).to("meta")).head.weight.is_meta
    critic.head.weight.data.fill_(1.0)
    values = lm.per_sample(critic(samples), samples)
    for one, value in zip(samples, values):
        hidden = model.base_model(one["ids"][None]).last_hidden_state[0]
        torch.testing.assert_close(value, hidden[one["start"] - 1:-1].sum(-1))


# --- Samples of the model itself ------------------------------------------------------------------

@pytest.fixture(scope="module")
def rows():
    return [{"query": f"add {a} and {b}", "positive": f"def add():\n    return {a} + {b}",
             "negatives": [f"def add():\n    return {a} - {b}", "pass"]}
            for a in range(8) for b in range(8)]


@pytest.fixture(scope="module")
def tiny(rows):
    torch.manual_seed(0)
    return lm.load(arguments("seq"), rows)


@pytest.mark.parametrize("objective", ["online_dpo", "grpo", "ppo"])
def test_what_is_sampled_knows_its_old_log_probabilities_and_rewards(rows, tiny, objective):
    tokenizer, model = tiny
    args = arguments(objective, max_length=16, group_size=3, chunk=2, kl_coef=0.1)
    critic = lm.Critic(model) if objective == "ppo" else None
    told = []

    def reward(row, text):
        told.append((row, text))
        return len(told) % 4

    torch.manual_seed(3)
    samples, mean = lm.rollout(rows[:4], model, tokenizer, model, critic, reward, args)
    assert [row for row, _ in told] == [row for row in rows[:4] for _ in range(3)]
    assert mean == sum(n % 4 for n in range(1, 13)) / 12
    if objective == "online_dpo":
        assert len(samples) == 4                        # rewards 1 2 3, 0 1 2, 3 0 1, 2 3 0
        texts = [[tokenizer.decode(pair[name]["ids"][pair[name]["start"]:],
                                   skip_special_tokens=True) for name in ("chosen", "rejected")]
                 for pair in samples]
        assert texts == [[told[i][1], told[j][1]] for i, j in ((2, 0), (5, 3), (6, 7), (10, 11))]
        return
    for one in samples:
        torch.testing.assert_close(one["old"], by_hand(model, one).detach(), atol=1e-5, rtol=1e-4)
        asked = tokenizer.decode(one["ids"][:one["start"]])
        assert asked in {f"{row['query']}\n" for row in rows[:4]}
        assert len(one["ids"]) <= 16 and (one["ids"][one["start"]:-1] != tokenizer.eos_token_id
                                          ).all()
    if objective == "grpo":
        found = torch.stack([one["advantages"][0] for one in samples]).view(4, 3)
        rewards = torch.tensor([float(n % 4) for n in range(1, 13)]).view(4, 3)
        torch.testing.assert_close(found, lm.group_advantages(rewards))
    else:                                               # the reference is the model: no pull yet
        for n, one in enumerate(samples, 1):
            assert one["returns"][-1].item() == pytest.approx(n % 4)
            assert one["advantages"][-1].item() == pytest.approx(n % 4)     # nothing was expected


def test_it_samples_from_the_model_itself_whatever_its_folder_recommends(rows, tiny):
    tokenizer, model = tiny[0], copy.deepcopy(tiny[1]).eval()
    model.model.norm.weight.data *= 4                   # far from uniform
    model.generation_config.update(temperature=0.5, top_k=50, top_p=0.9, repetition_penalty=1.5)
    args = arguments("grpo", max_length=24, group_size=300)
    torch.manual_seed(0)
    samples, _ = lm.rollout(rows[:1], model, tokenizer, model, None, lambda *_: 0, args)
    with torch.no_grad():
        log_p = lm.response_logits(model, samples)[0].log_softmax(-1)
    gap = torch.cat([one["old"] for one in samples]).mean() - (log_p.exp() * log_p).sum(-1).mean()
    assert abs(gap) < 0.1               # on average log P of what is sampled is minus the entropy


def test_ppo_earns_at_the_end_what_was_rewarded_and_pays_at_each_token_for_leaving(rows, tiny):
    tokenizer, model = tiny
    reference, critic = copy.deepcopy(model), lm.Critic(model)
    reference.model.norm.weight.data *= 2
    nn.init.normal_(critic.head.weight, std=0.1)
    args = arguments("ppo", max_length=16, kl_coef=0.3, gamma=0.9, gae_lambda=0.7)
    samples, _ = lm.rollout(rows[:2], model, tokenizer, reference, critic, lambda *_: 5.0, args)
    for one in samples:
        earned = -0.3 * (by_hand(model, one) - by_hand(reference, one)).detach()
        earned[-1] += 5.0
        value = critic([one]).detach()
        gain = lm.gae(earned, value, 0.9, 0.7)
        torch.testing.assert_close((one["advantages"], one["returns"]), (gain, gain + value),
                                   atol=1e-4, rtol=1e-4)
    args = arguments("online_dpo", max_length=16)
    assert lm.rollout(rows[:2], model, tokenizer, model, None, lambda *_: 5.0, args) == ([], 5.0)


def test_a_sample_is_what_the_objective_reads(rows, tiny):
    tokenizer, row = tiny[0], rows[1]
    for name, text in (("seq", row["positive"]), ("sft", row["query"] + "\n" + row["positive"])):
        one = lm.prepare([row], tokenizer, None, arguments(name))[0]
        assert tokenizer.decode(one["ids"], skip_special_tokens=True) == text
    framed = copy.deepcopy(tokenizer)
    framed.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                            "{% if add_generation_prompt %}<reply>{% endif %}")
    for query, start in (("add", "<user>add<reply>"), ("add " * 50, "add <reply>")):
        one = lm.as_sample(framed, query, "pass", 32)
        assert framed.decode(one["ids"][:one["start"]]).endswith(start)


def test_texts_are_cut_and_closed(tiny):
    tokenizer = tiny[0]
    short = lm.as_sample(tokenizer, "add", "def f(): pass", 64)
    assert tokenizer.decode(short["ids"]) == "add\ndef f(): pass" + tokenizer.eos_token
    assert tokenizer.decode(short["ids"][:short["start"]]) == "add\n"
    cut = lm.as_sample(tokenizer, "add " * 50, "def f(): pass " * 50, 20)
    assert len(cut["ids"]) == 20 and cut["start"] == 10
    assert cut["ids"][-1] != tokenizer.eos_token_id     # it did not end here
    assert lm.as_sample(tokenizer, None, "def f(): pass", 64)["start"] == 1


def test_a_pair_is_the_positive_and_the_first_negative_and_what_the_reference_says(rows, tiny):
    tokenizer, model = tiny
    pair = lm.prepare([rows[1]], tokenizer, model, arguments("dpo"))[0]
    for name, text in (("chosen", rows[1]["positive"]), ("rejected", rows[1]["negatives"][0])):
        said = pair[name]["ids"][pair[name]["start"]:]
        assert tokenizer.decode(said, skip_special_tokens=True) == text
        torch.testing.assert_close(pair[name]["ref"], by_hand(model, pair[name]).detach(),
                                   atol=1e-5, rtol=1e-4)


def test_a_row_without_a_negative_is_named_where_one_is_needed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a", "positive": "b", "negatives": ["c"]}\n'
                    '{"query": "a", "positive": "b"}\n')
    with pytest.raises(ValueError, match="line 2: field 'negatives' is .*: dpo needs a list"):
        lm.read_rows(arguments("dpo", train_jsonl=str(path)))
    assert len(lm.read_rows(arguments("sft", train_jsonl=str(path)))[0]) == 2


@pytest.mark.parametrize("text, share", [
    ("def f():\n    return 1", 1.0), ("", 0.0), ("x = 1\ny = = 2", 0.5), ("= 1", 0.0), ("\0", 0.0)])
def test_the_built_in_reward_is_how_far_the_parser_gets(text, share):
    assert lm.parsed_share({}, text) == share


# --- The program ----------------------------------------------------------------------------------

@pytest.fixture
def files(tmp_path, rows):
    for name, some in (("train", rows), ("heldout", rows[::2])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return ["--train-jsonl", tmp_path / "train.jsonl", "--eval-jsonl", tmp_path / "heldout.jsonl",
            "--batch-size", 8]


def run(folder, *flags):
    lm.main([*map(str, flags), "--output-dir", str(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_from_texts_then_responses_then_preferences(tmp_path, files):
    flags = [*files, "--max-steps", 30, "--warmup-steps", 5, "--max-length", 24]
    told = run(tmp_path / "seq", *flags, "--lr", 3e-3)
    assert told[0]["eval_loss"] > 5 and told[-1]["eval_loss"] < 0.6 * told[0]["eval_loss"]
    assert told[7]["lr"] == 3e-3 * lr_factor(6, "cosine", 5, 30)
    sft = run(tmp_path / "sft", *flags, "--objective", "sft", "--model", tmp_path / "seq")
    assert sft[-1]["eval_loss"] < 0.8 * sft[0]["eval_loss"]
    dpo = run(tmp_path / "dpo", *flags, "--objective", "dpo", "--model", tmp_path / "sft")
    assert dpo[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert dpo[-1]["eval_loss"] < 0.6


def test_its_steps_are_the_textbooks(tmp_path, files, rows, tiny):
    tokenizer, model = tiny[0], copy.deepcopy(tiny[1])
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "start")
    told = run(tmp_path / "sft", *files, "--model", tmp_path / "start", "--objective", "sft",
               "--batch-size", 64, "--max-steps", 4, "--warmup-steps", 2, "--max-grad-norm", 0.1,
               "--max-length", 24, "--lr", 0.01, "--seed", 1)
    samples = lm.prepare(rows, tokenizer, None, arguments("sft", max_length=24))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for factor in (0, 0.5, 1, 0.5):
        loss = -lm.log_probs(model, samples).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = 0.01 * factor
        optimizer.step()
    assert [one["loss"] for one in told[1:-1]] == pytest.approx(losses, rel=1e-4)
    ends = [-lm.log_probs(one, samples[::2]).mean().item() for one in (tiny[1], model)]
    assert [told[n]["eval_loss"] for n in (0, -1)] == pytest.approx(ends, rel=1e-4)


def test_a_critic_learns_what_comes_and_rows_take_turns(tmp_path, files, monkeypatch):
    seen, flags = [], [*files[:2], "--objective", "ppo", "--max-length", 16, "--gae-lambda", 1,
                       "--kl-coef", 0, "--batch-size", 16, "--group-size", 1, "--warmup-steps", 1]
    monkeypatch.setattr(lm, "parsed_share", lambda row, text: seen.append(row["line"]) or 1.0)
    told = run(tmp_path / "a", *flags, "--max-steps", 16)
    assert told[0]["critic_loss"] == 0.5 and told[-1]["critic_loss"] < 0.1
    assert told[0]["loss"] == pytest.approx(-1) and abs(told[-2]["loss"]) < 0.3
    assert sorted(seen[:64]) == sorted(seen[64:]) == [*range(1, 65)] and seen[:64] != seen[64:]
    held = run(tmp_path / "b", *flags, "--max-steps", 8, "--max-grad-norm", 1e-12)
    assert held == run(tmp_path / "c", *flags, "--max-steps", 8, "--max-grad-norm", 1e-12)
    assert held[-1]["critic_loss"] == pytest.approx(0.5, abs=0.02)
    monkeypatch.setattr(lm, "parsed_share", lambda row, text: math.nan)
    run(tmp_path / "d", *flags, "--max-steps", 2)       # nothing is learned from no number
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "d")
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("objective, start", [("dpo", math.log(2)), ("grpo", 0.0)])
def test_dropout_is_off_beside_a_reference(tmp_path, files, tiny, objective, start, monkeypatch):
    monkeypatch.setattr(lm, "parsed_share", lambda row, text: 1.0)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tiny[0]), n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5)
    for part in (GPT2LMHeadModel(config), tiny[0]):
        part.save_pretrained(tmp_path / "start")
    told = run(tmp_path / "o", *files, "--model", tmp_path / "start", "--objective", objective,
               "--max-steps", 1, "--max-length", 16)
    assert told[0].get("eval_loss", start) == pytest.approx(start, abs=1e-6)
    assert told[1]["loss"] == pytest.approx(start, abs=1e-6)


def test_rows_come_from_their_own_file(files, monkeypatch):
    assert [len(rows) for rows in lm.read_rows(lm.parse_args([*map(str, files)]))] == [64, 32]
    monkeypatch.setattr(lm, "offline_pairs", lambda: ([{"positive": "a\nb"}], []))
    assert lm.read_rows(arguments("dpo")) == [[{"positive": "a\nb", "negatives": ["b\na"]}], []]


def share_of_e(row, text):
    """A reward that a model can learn."""
    return text.count("e") / max(1, len(text))


@pytest.mark.parametrize("objective", ["online_dpo", "grpo", "ppo"])
def test_it_learns_what_is_rewarded(tmp_path, files, objective):
    told = run(tmp_path / objective, *files, "--objective", objective, "--max-steps", 16,
               "--reward", "tests.test_lm:share_of_e", "--max-length", 16, "--chunk", 64,
               "--group-size", 8, "--lr", 3e-3, "--warmup-steps", 2, "--kl-coef", 0.0)
    assert told[-1]["eval_reward"] > 1.5 * told[0]["eval_reward"]
    rewards = [one["reward"] for one in told[1:-1]]     # two steps on the same responses
    assert rewards[::2] == rewards[1::2] and len({*rewards}) > 4


def test_an_image_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    path.write_text('{"query": "a", "positive": "b"}\n'
                    '{"query": "a", "positive": {"image": "a.png"}}\n')
    with pytest.raises(ValueError, match="line 2: .*a.png.* is no text"):
        lm.read_rows(arguments("seq", train_jsonl=str(path)))


@pytest.mark.parametrize("flags, told", [
    ("--chunk 0", "chunk must be at least 1, got 0"), ("--eval-jsonl x", "needs --train-jsonl"),
    ("--max-length 3", "at least 4, got 3"), ("--reward x", "is MODULE:FUNCTION, got x")])
def test_what_makes_no_sense_is_refused(flags, told, capsys):
    pytest.raises(SystemExit, lm.parse_args, flags.split())
    assert told in capsys.readouterr().err
