"""The proof that the chunked gradient is the gradient of the whole batch.           Read 4 of 8.

Every claim is compared with something that knows nothing of chunks: `plain` below is the step one
would write if memory were free, `numerical` does not even differentiate. The contract:

    float64   relative error <= 1e-10, on the loss and on the gradient
    float32   cosine >= 0.9999 *and* norm ratio 1 +- 1e-4

Two numbers, because a cosine cannot see a scale: dividing by the number of chunks, or giving the
temperature one gradient per chunk, leaves it at 1. In float64 nothing but an error can exceed
1e-10, so that is the real test, and float32 shows what a user sees.

    1) the gradient: chunk sizes, plans, towers, temperature
    2) what is added up: accumulation, frozen towers, evaluation
    3) randomness: the same dropout twice, another one in the next step
    4) memory: the activations of one chunk, counted
    5) real models: LoRA, activation checkpointing, padding

Odd samples, tuples, autocast: test_gradcache_edges.py. Errors, planner: test_gradcache_pieces.py.
"""
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradcache import grad_cache_step, plan_chunks

N, IN, D = 7, 6, 5               # samples, size of a sample, size of a representation


class Tower(nn.Module):
    """(C, IN) -> (C, D) unit vectors: the smallest encoder that is not linear."""

    def __init__(self, seed=0, dtype=torch.float64, hidden=16):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(IN, hidden), nn.Linear(hidden, D)
        self.calls = 0
        self.to(dtype)

    def forward(self, samples):
        self.calls += 1
        x = samples if torch.is_tensor(samples) else torch.stack(samples)
        return F.normalize(self.second(self.first(x).tanh()), dim=-1)

    @torch.no_grad()
    def without_gradient(self, samples):
        return self(samples)


def contrastive(log_scale):
    """CLIP's loss in both directions, written out here rather than taken from losses.py."""
    def loss_fn(q, d, *negatives):
        scores = q @ torch.cat([d, *negatives]).T * log_scale.exp()             # (N, N or 2N)
        rows = torch.arange(len(q))
        return F.cross_entropy(scores, rows) + F.cross_entropy(scores[:, :len(q)].T, rows)
    return loss_fn


def plain(encoders, batches, loss_fn):
    """The step to be reproduced: every tower encodes its whole batch, one backward."""
    loss = loss_fn(*[encoder(batch) for encoder, batch in zip(encoders, batches, strict=True)])
    loss.backward()
    return loss.detach()


def take_grad(*owners):
    """All gradients of modules and tensors as one vector; they are cleared for the next run."""
    tensors = dict.fromkeys(t for o in owners
                            for t in (o.parameters() if isinstance(o, nn.Module) else [o]))
    vector = torch.cat([torch.zeros(t.numel()).to(t) if t.grad is None else t.grad.flatten()
                        for t in tensors if t.requires_grad])
    for t in tensors:
        t.grad = None
    return vector


def assert_same(got, wanted):
    """The contract. `got` and `wanted` are gradients (vectors) or losses (numbers)."""
    got, wanted = got.detach().flatten(), wanted.detach().flatten()
    assert got.dtype == wanted.dtype and wanted.norm() > 0
    if got.dtype == torch.float64:
        assert (got - wanted).norm() <= 1e-10 * wanted.norm()
    else:
        assert F.cosine_similarity(got.double(), wanted.double(), dim=0) >= 0.9999
        assert (got.norm() / wanted.norm()).item() == pytest.approx(1, abs=1e-4)


def two_towers(dtype=torch.float64, n=N):
    torch.manual_seed(5)
    batches = [torch.randn(n, IN, dtype=dtype), torch.randn(n, IN, dtype=dtype)]
    log_scale = torch.tensor(2.659, dtype=dtype, requires_grad=True)        # ln(1 / 0.07)
    return Tower(1, dtype), Tower(2, dtype), batches, log_scale


# --- 1) The gradient ------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keep", [0, 1, 2, 100])
@pytest.mark.parametrize("chunk", [1, 2, 3, N, 50])        # 7 = 2+2+2+1 = 3+3+1: uneven last chunks
def test_any_chunk_size_gives_the_gradient_of_the_whole_batch(chunk, keep, dtype):
    queries, documents, batches, log_scale = two_towers(dtype)
    wanted_loss = plain([queries, documents], batches, contrastive(log_scale))
    wanted = take_grad(queries, documents, log_scale)
    loss, metrics = grad_cache_step([queries, documents], batches, contrastive(log_scale), chunk,
                                    keep=keep)
    assert_same(loss, wanted_loss)
    assert_same(take_grad(queries, documents, log_scale), wanted)
    assert not loss.requires_grad and metrics["replay_error"] <= 1e-6


@pytest.mark.parametrize("plan", [[[6, 0, 3], [5], [1, 4, 2]], [[i] for i in (3, 1, 6, 0, 5, 2, 4)],
                                  [[2, 4, 6, 0, 1, 3, 5]], [[0, 1], [2, 3, 4, 5, 6]]])
def test_any_plan_gives_the_gradient_of_the_whole_batch(plan):
    queries, documents, batches, log_scale = two_towers()
    wanted_loss = plain([queries, documents], batches, contrastive(log_scale))
    wanted = take_grad(queries, documents, log_scale)
    other = plan_chunks([3, 1, 2, 9, 4, 4, 1], 3)                   # each tower has its own plan
    for plans in ([plan, other], [other, plan]):
        loss, _ = grad_cache_step([queries, documents], batches, contrastive(log_scale), plans)
        assert_same(loss, wanted_loss)
        assert_same(take_grad(queries, documents, log_scale), wanted)


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_a_module_that_serves_both_towers_is_given_twice(chunk):
    tower, _, batches, log_scale = two_towers()
    plain([tower, tower], batches, contrastive(log_scale))
    wanted = take_grad(tower, log_scale)
    grad_cache_step([tower, tower], batches, contrastive(log_scale), chunk)
    assert_same(take_grad(tower, log_scale), wanted)


@pytest.mark.parametrize("keep", [0, 2])
def test_three_towers_query_positive_negative(keep):
    queries, documents, batches, log_scale = two_towers()
    encoders, batches = [queries, documents, documents], [*batches, torch.randn(N + 4, IN).double()]
    wanted_loss = plain(encoders, batches, contrastive(log_scale))
    wanted = take_grad(queries, documents, log_scale)
    loss, _ = grad_cache_step(encoders, batches, contrastive(log_scale), 2, keep=keep)
    assert_same(loss, wanted_loss)
    assert_same(take_grad(queries, documents, log_scale), wanted)


def test_gradient_equals_finite_differences_of_the_loss():
    """Without any backward: move each weight, and the temperature, a little; look at the loss."""
    _, _, batches, log_scale = two_towers(n=4)
    tower = Tower(3, hidden=3)

    @torch.no_grad()
    def numerical(weight, step=1e-5):
        slopes = []
        for i in range(weight.numel()):
            losses = []
            for move in (step, -2 * step):
                weight.view(-1)[i] += move
                losses.append(contrastive(log_scale)(tower(batches[0]), tower(batches[1])))
            weight.view(-1)[i] += step
            slopes.append((losses[0] - losses[1]) / (2 * step))
        return torch.stack(slopes)

    weights = [*tower.parameters(), log_scale]
    wanted = torch.cat([numerical(w) for w in weights])
    grad_cache_step([tower, tower], batches, contrastive(log_scale), 3)
    assert (take_grad(*weights) - wanted).norm() <= 1e-8 * wanted.norm()    # step**2 is 1e-10


def test_temperature_gets_its_gradient_once_and_not_once_per_chunk():
    """The loss must be differentiated once. Re-evaluating it for every chunk, with that chunk's
    graph alive, also gives the encoder its exact gradient, but the temperature one per chunk."""
    tower, _, batches, log_scale = two_towers(n=8)
    plain([tower, tower], batches, contrastive(log_scale))
    wanted_tower, wanted_scale = take_grad(tower), take_grad(log_scale)
    for rows in torch.arange(8).split(2):                           # the fault, with 4 chunks
        reps = [tower(batch).detach() for batch in batches]
        for rep, batch in zip(reps, batches):
            rep[rows] = tower(batch[rows])
        contrastive(log_scale)(*reps).backward()
    assert_same(take_grad(tower), wanted_tower)
    assert_same(take_grad(log_scale), 4 * wanted_scale)
    grad_cache_step([tower, tower], batches, contrastive(log_scale), 2)
    assert_same(take_grad(tower), wanted_tower)
    assert_same(take_grad(log_scale), wanted_scale)


def test_every_sample_of_the_batch_reaches_its_weights():
    """One embedding row per sample: 8 queries and 8 documents must fill 16 rows with gradient."""
    torch.manual_seed(0)
    table, log_scale = nn.Embedding(16, D).double(), torch.ones((), dtype=torch.float64)
    batches = [torch.arange(8), torch.arange(8, 16)]
    plain([table, table], batches, contrastive(log_scale))
    wanted = take_grad(table)
    grad_cache_step([table, table], batches, contrastive(log_scale), 2)
    assert (table.weight.grad.norm(dim=1) > 0).all()
    assert_same(take_grad(table), wanted)


# --- 2) What is added up --------------------------------------------------------------------------

def test_accumulating_over_batches_gives_the_mean_of_their_gradients_and_full_losses():
    tower, _, batches, log_scale = two_towers()
    halves = [[b[:3] for b in batches], [b[3:] for b in batches]]           # 3 and 4 pairs
    gradients, losses = [], []
    for half in halves:
        losses.append(plain([tower, tower], half, contrastive(log_scale)))
        gradients.append(take_grad(tower, log_scale))
    for half, wanted_loss in zip(halves, losses):                           # .grad adds them up
        loss, _ = grad_cache_step([tower, tower], half, contrastive(log_scale), 2, grad_scale=1 / 2)
        assert_same(loss, wanted_loss)                                      # not halved
    assert_same(take_grad(tower, log_scale), (gradients[0] + gradients[1]) / 2)


@pytest.mark.parametrize("kind", ["module", "method of a frozen module",
                                  "no_grad method of a trainable module", "no_grad function"])
@pytest.mark.parametrize("side", [0, 1])
def test_frozen_tower_is_encoded_once_and_gets_no_gradient(kind, side):
    trained, frozen, batches, log_scale = two_towers()
    frozen.requires_grad_("no_grad" in kind)                        # True for the last two
    encoders = [trained, trained]
    encoders[side] = {"module": frozen, "method of a frozen module": frozen.forward,
                      "no_grad method of a trainable module": frozen.without_gradient,
                      "no_grad function": torch.no_grad()(lambda x: frozen(x))}[kind]
    wanted_loss = plain(encoders, batches, contrastive(log_scale))
    wanted = take_grad(trained, log_scale)
    trained.calls = frozen.calls = 0
    loss, _ = grad_cache_step(encoders, batches, contrastive(log_scale), 2, keep=0)     # 4 chunks
    assert_same(loss, wanted_loss)
    assert_same(take_grad(trained, log_scale), wanted)
    assert frozen.calls == 4 and trained.calls == 4 + 4
    assert all(p.grad is None for p in frozen.parameters())


def test_no_grad_only_evaluates_and_leaves_nothing_behind():
    queries, documents, batches, log_scale = two_towers()
    wanted = plain([queries, documents], batches, contrastive(log_scale))
    take_grad(queries, documents, log_scale)
    queries.eval(), documents.train()
    with torch.no_grad():
        loss, metrics = grad_cache_step(
            [queries, documents], batches,
            lambda q, d: (contrastive(log_scale)(q, d), {"n": len(q)}), chunk_size=2)
    assert_same(loss, wanted)
    assert metrics["n"] == N and metrics["replay_error"] == 0
    assert queries.calls == documents.calls == 1 + 4                # plain, then four chunks once
    assert not queries.training and documents.training and not loss.requires_grad
    for module in [*queries.modules(), *documents.modules()]:
        assert all(p.grad is None for p in module.parameters())
        assert not module._forward_hooks and not module._backward_hooks


# --- 3) Randomness --------------------------------------------------------------------------------

class Masks(nn.Module):
    """Dropout whose masks can be read afterwards (`drawn`), or prescribed (`given`)."""

    def __init__(self, p):
        super().__init__()
        self.p, self.drawn, self.given = p, [], []

    def forward(self, x):
        if self.given:
            return x * self.given.pop(0)
        self.drawn.append((torch.rand_like(x) >= self.p).to(x) / (1 - self.p))
        return x * self.drawn[-1]


class StringTower(nn.Module):
    """Strings in, vectors out: the samples do not tell on which device dropout will draw."""

    def __init__(self, seed=0, p=0.3):
        super().__init__()
        torch.manual_seed(seed)
        self.letters, self.dropout, self.out = nn.Embedding(128, 16), Masks(p), nn.Linear(16, D)
        self.double()

    def forward(self, texts):
        x = torch.stack([self.letters(torch.tensor([ord(c) for c in t])).mean(0) for t in texts])
        return F.normalize(self.out(self.dropout(x).tanh()), dim=-1)


TEXTS = [["one", "two", "three", "four", "five", "six", "seven", "eight"],
         ["uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto"]]


@pytest.mark.parametrize("keep", [0, 1, 100])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_dropout_is_replayed_and_the_gradient_is_that_of_one_graph_with_these_masks(chunk, keep):
    tower, log_scale = StringTower(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss, metrics = grad_cache_step([tower, tower], TEXTS, contrastive(log_scale), chunk, keep=keep)
    got = take_grad(tower, log_scale)
    chunks = len(range(0, 8, chunk))
    masks = tower.dropout.drawn
    tower.dropout.given = [torch.cat(masks[:chunks]), torch.cat(masks[chunks:2 * chunks])]
    assert_same(loss, plain([tower, tower], TEXTS, contrastive(log_scale)))
    assert_same(got, take_grad(tower, log_scale))
    assert metrics["replay_error"] == 0
    assert len(masks) == max(2 * chunks, 4 * chunks - keep)         # encoded twice, but the kept


def test_the_next_step_draws_other_masks_and_nobodys_generator_is_rewound():
    tower, log_scale = StringTower(), torch.tensor(2.0, dtype=torch.float64)
    torch.manual_seed(0)
    first, _ = grad_cache_step([tower, tower], TEXTS, contrastive(log_scale), 3, keep=0)
    state = torch.get_rng_state()
    second, _ = grad_cache_step([tower, tower], TEXTS, contrastive(log_scale), 3, keep=0)
    assert first != second
    torch.manual_seed(0)                                            # what six encodings consume
    for texts in TEXTS:
        for start in (0, 3, 6):
            tower(texts[start:start + 3])
    assert torch.equal(torch.get_rng_state(), state)


def test_replay_error_reveals_an_encoder_that_cannot_be_replayed():
    tower, _, batches, _ = two_towers()

    def drifts(samples):                                            # a state that changes per call
        return tower(samples) * (1 + 0.001 * tower.calls)

    for keep, wanted in ((0, 0.004), (100, 0.0)):                   # replayed 4 calls later, or not
        tower.calls = 0
        _, metrics = grad_cache_step([drifts], batches[:1], lambda q: q.sum(), 2, keep=keep)
        largest = tower(batches[0]).abs().max().item()
        assert metrics["replay_error"].item() == pytest.approx(wanted * largest, rel=1e-3)


# --- 4) Memory ------------------------------------------------------------------------------------

class Held(list):                   # unlike a plain list it can be watched by a weak reference
    pass


class Counted(nn.Module):
    """A tower that counts the samples whose activations wait for a backward."""

    def __init__(self):
        super().__init__()
        self.tower, self.alive, self.most = Tower(), 0, 0

    def forward(self, samples):
        def pack(saved):                                            # tanh saves its output (C, 16)
            held = Held([saved.detach()])
            self.change(len(saved))
            weakref.finalize(held, self.change, -len(saved))        # when the graph lets go of it
            return held

        x = self.tower.first(samples)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held[0]):
            x = x.tanh()
        return self.tower.second(x)

    def change(self, samples):
        self.alive += samples
        self.most = max(self.most, self.alive)


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: lambda x: module(x)],
                         ids=["module", "plain function"])
@pytest.mark.parametrize("keep, most", [(0, 4), (1, 4), (3, 12), (100, 128)])
def test_never_more_than_one_chunk_of_activations_is_alive(wrap, keep, most):
    """Batch 64, chunk 4, two towers. keep=k holds k chunks, and keep=everything all 128 samples."""
    counted, in_loss = Counted(), []
    _, _, batches, log_scale = two_towers(n=64)

    def loss_fn(q, d):
        in_loss.append(counted.alive)
        return contrastive(log_scale)(q, d)

    grad_cache_step([wrap(counted), wrap(counted)], batches, loss_fn, 4, keep=keep)
    assert counted.most == most and counted.alive == 0
    assert in_loss == [min(4 * keep, 128)]                          # in step 2: what is kept, only
    counted.most = 0
    plain([counted, counted], batches, loss_fn)
    assert counted.most == 128                                      # the counter does count


# --- 5) Real models: LoRA, activation checkpointing, padding --------------------------------------

def tiny_transformer(kind, lora, checkpointing):
    """A Hugging Face encoder with random weights and dropout everywhere, in float64, training."""
    import transformers
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "attn_implementation": "sdpa"}    # eager: a float32 softmax
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**shape), add_pooling_layer=False)
    else:
        model = transformers.Qwen3Model(transformers.Qwen3Config(
            num_key_value_heads=1, head_dim=8, attention_dropout=0.1, use_cache=False, **shape))
    if lora:
        targets = ["query", "value"] if kind == "bert" else ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=targets))
        for name, weight in model.named_parameters():
            if "lora_B" in name:                                    # starts at zero, and then the
                nn.init.normal_(weight, std=0.1)                    # gradient of lora_A is zero too
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "re-entrant"})
        model.enable_input_require_grads()                          # re-entrant looks at the input
        assert model.is_activation_checkpointing
    return model.double().train()


class MeanPooled(nn.Module):
    """Lists of token ids -> (C, 16). Pads only what it is given, as an encoder should."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, samples):
        ids, mask = (nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in
                     ([torch.tensor(s) for s in samples], [torch.ones(len(s)) for s in samples]))
        hidden = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return F.normalize((hidden * mask.unsqueeze(-1)).sum(1), dim=-1)


@pytest.mark.parametrize("checkpointing", [None, "re-entrant", "not re-entrant"])
@pytest.mark.parametrize("kind, lora", [("bert", False), ("bert", True), ("qwen3", True)])
def test_transformers_with_lora_checkpointing_and_dropout(kind, lora, checkpointing):
    encoder = MeanPooled(tiny_transformer(kind, lora, checkpointing))
    log_scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    batches = [[torch.randint(1, 50, (t,)).tolist() for t in lengths]
               for lengths in ([3, 9, 5, 2, 7], [12, 4, 4, 8, 1])]
    plan = [[[1, 4], [0, 2, 3]], [[4], [3, 0], [2, 1]]]

    def ordinary_graph(samples, indices):
        """The chunks of the plan, one after the other, all graphs alive, back in batch order."""
        rows = torch.cat([encoder([samples[i] for i in index]) for index in indices])
        return rows[torch.tensor([i for index in indices for i in index]).argsort()]

    torch.manual_seed(2)
    wanted_loss = plain([lambda b, p=p: ordinary_graph(b, p) for p in plan], batches,
                        contrastive(log_scale))
    wanted = take_grad(encoder, log_scale)
    torch.manual_seed(2)
    loss, metrics = grad_cache_step([encoder, encoder], batches, contrastive(log_scale), plan)
    assert_same(loss, wanted_loss)
    assert_same(take_grad(encoder, log_scale), wanted)
    assert metrics["replay_error"] == 0

    encoder.eval()                              # no dropout: one call on the whole, padded batch
    wanted_loss = plain([encoder, encoder], batches, contrastive(log_scale))
    wanted = take_grad(encoder, log_scale)
    loss, _ = grad_cache_step([encoder, encoder], batches, contrastive(log_scale), plan)
    assert_same(loss, wanted_loss)
    assert_same(take_grad(encoder, log_scale), wanted)
