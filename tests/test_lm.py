"""extras/lm.py: each objective against its formula, and chunks against the whole batch."""
import json
import math

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

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
    lm.annotate("ref", model, samples, 3)
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


def test_nothing_is_learned_without_gradients(model):
    with torch.no_grad():
        lm.accumulate(lm.loss_sum(model, arguments("seq")), samples_for("seq", model), 2, 1)
    assert all(p.grad is None for p in model.parameters())


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
    same = torch.tensor([-3.0, -9.0])
    assert lm.dpo_losses(same, same, same, same).tolist() == pytest.approx([math.log(2)] * 2)


def test_advantages_are_relative_to_the_group_and_equal_rewards_teach_nothing():
    found = lm.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [7.0, 7.0, 7.0, 7.0],
                                              [0.0, 0.0, 0.0, 4.0]]))
    third = 3 ** -0.5
    expected = [[1, -1, -1, 1], [0, 0, 0, 0], [-third, -third, -third, 3 * third]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float), atol=1e-5, rtol=0)
    assert lm.group_advantages(torch.tensor([[5.0]])).tolist() == [[0.0]]


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


def test_grpo_is_its_formula_over_the_valid_tokens(model):
    samples = samples_for("grpo", model)
    loss = lm.loss_sum(model, arguments("grpo", kl_coef=0.5))(samples)
    expected = 0
    for one in samples:
        for log_p, old, ref, A in zip(by_hand(model, one), one["old"], one["ref"],
                                      one["advantages"]):
            ratio, back = (log_p - old).exp().item(), (ref - log_p).exp().item()
            clipped, A = min(max(ratio, 0.8), 1.2), A.item()
            expected += -min(ratio * A, clipped * A) + 0.5 * (back - math.log(back) - 1)
    assert loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.9, 1.0), (0.9, 0.0)])
def test_gae_is_its_double_sum(gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 7).double()
    following = [*values[1:].tolist(), 0.0]
    delta = [r + gamma * n - v for r, n, v in zip(rewards.tolist(), following, values.tolist())]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, 7)) for t in range(7)]
    assert lm.gae(rewards, values, gamma, lam).tolist() == pytest.approx(expected)
    if lam == 1:                                        # all that follows, less what was expected
        to_come = [sum(gamma ** (k - t) * rewards[k] for k in range(t, 7)) for t in range(7)]
        assert lm.gae(rewards, values, gamma, 1.0).tolist() == pytest.approx(
            [(a - v).item() for a, v in zip(to_come, values)])


def test_a_critic_starts_at_zero_with_the_models_backbone(model):
    critic, samples = lm.Critic(model), samples_for("ppo", model)
    assert critic(samples).tolist() == [0.0] * lm.terms(samples, arguments("ppo"))
    critic.head.weight.data.fill_(1.0)
    values = lm.per_sample(critic(samples), samples)
    for one, value in zip(samples, values):
        hidden = model.base_model(one["ids"][None]).last_hidden_state[0]
        torch.testing.assert_close(value, hidden[one["start"] - 1:-1].sum(-1))


# --- Samples of the model itself ------------------------------------------------------------------

@pytest.fixture(scope="module")
def rows():
    return [{"query": f"add {a} and {b}", "positive": f"def add():\n    return {a} + {b}",
             "negatives": [f"def add():\n    return {a} - {b}"]}
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
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dpo")
    assert reloaded.num_parameters() > 0


def share_of_e(row, text):
    """A reward that a model can learn."""
    return text.count("e") / max(1, len(text))


@pytest.mark.parametrize("objective", ["online_dpo", "grpo", "ppo"])
def test_it_learns_what_is_rewarded(tmp_path, files, objective):
    told = run(tmp_path / objective, *files, "--objective", objective, "--max-steps", 16,
               "--reward", "tests.test_lm:share_of_e", "--max-length", 16, "--chunk", 64,
               "--group-size", 8, "--lr", 3e-3, "--warmup-steps", 2, "--kl-coef", 0.0)
    assert told[-1]["eval_reward"] > 1.5 * told[0]["eval_reward"]


def test_an_image_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    path.write_text('{"query": "a", "positive": "b"}\n'
                    '{"query": "a", "positive": {"image": "a.png"}}\n')
    with pytest.raises(ValueError, match="line 2: .*a.png.* is no text"):
        lm.read_rows(arguments("seq", train_jsonl=str(path)))


@pytest.mark.parametrize("flag", ["--chunk", "--group-size", "--rollout-interval"])
def test_zero_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        lm.parse_args([flag, "0"])
    assert f"{flag} must be at least 1, got 0" in capsys.readouterr().err
