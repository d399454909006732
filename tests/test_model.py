"""Adapters, precision, modes, the frozen start, saving: what holds for every family."""
import copy
import json
import shutil

import pytest
import torch
from peft import PeftModel
from PIL import Image
from torch import nn
from transformers import AutoModel

from flags import describe_weights
from gradcache import grad_cache_step
from model import BiEncoder, lora_layers, tiny_qwen3_vl
from tests.test_model_text import KINDS, text_folder

TEXTS = ["a red circle", "def area(self): return width * height", "the quick brown fox", "fox"]
SAMPLES = [*TEXTS, {"image": Image.new("RGB", (64, 96), "red")},
           {"text": "fox", "image": Image.new("RGB", (40, 70), "blue")}]


def tiny(**options):
    return BiEncoder(*tiny_qwen3_vl(TEXTS * 5, vocab_size=400, hidden=64), **options)


def build(kind, folder, **options):
    """The Qwen3-VL by its constructor, the text encoders from a folder."""
    if kind == "qwen3_vl":
        return tiny(**options), SAMPLES
    return BiEncoder.from_pretrained(text_folder(kind, folder), **options), TEXTS


def stir(encoder):
    """Move the trainable weights, adapters' zero matrices included, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in encoder.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return encoder


def trained_layers(encoder):
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, p in encoder.named_parameters()
            if p.requires_grad}


# --- adapters -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, layers", [
    ("qwen3_vl", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    ("qwen3", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    ("bert", "query key value dense"), ("modernbert", "Wqkv Wo Wi")])
def test_lora_adapts_the_language_layers_of_every_architecture(tmp_path, kind, layers):
    encoder, _ = build(kind, tmp_path, lora_r=4)
    assert trained_layers(encoder) == set(layers.split())
    names = [name for name, p in encoder.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in names)
    assert not [name for name in names if "visual" in name or "pooler" in name]


def test_the_vision_tower_is_adapted_only_when_asked():
    with_vision = trained_layers(tiny(lora_r=4, lora_vision=True))
    assert with_vision - trained_layers(tiny(lora_r=4)) == {"qkv", "proj", "linear_fc1",
                                                            "linear_fc2"}


def test_lora_targets_choose_layers_and_one_that_matches_nothing_is_an_error():
    assert trained_layers(tiny(lora_r=4, lora_targets=["q_proj", "mlp.up_proj"])) == {"q_proj",
                                                                                     "up_proj"}
    for missing in ("query", "proj", "qkv"):                # the last two exist in the vision tower
        with pytest.raises(ValueError, match=f"'{missing}': set()"):
            tiny(lora_r=4, lora_targets=["q_proj", missing])
    network = tiny_qwen3_vl(TEXTS, vocab_size=400, hidden=64)[0]
    assert lora_layers(network, ["attn.qkv"], vision=True) == [
        "visual.blocks.0.attn.qkv", "visual.blocks.1.attn.qkv"]


def test_the_summary_counts_what_trains():
    encoder = tiny(lora_r=4)
    trained = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    total = sum(p.numel() for p in encoder.parameters())
    first, *groups = describe_weights(encoder.backbone).splitlines()
    assert f"{trained:,} of {total:,} parameters" in first
    assert sum(int(line.split()[0].replace(",", "")) for line in groups) == trained
    assert groups[0].split()[1] == "language_model.layers.self_attn.q_proj"
    whole = describe_weights(tiny().backbone)
    assert "visual.merger" in whole and "language_model.layers" in whole


def test_freezing_and_poolers(tmp_path):
    frozen = tiny(freeze_vision=True)
    assert {name.split(".")[1] for name, p in frozen.named_parameters() if not p.requires_grad} == {
        "visual"}
    bert, texts = build("bert", tmp_path)
    bert([bert.preprocess(text, "query") for text in texts]).sum().backward()
    without = {name for name, p in bert.named_parameters() if p.grad is None}
    assert without == {name for name, p in bert.named_parameters() if not p.requires_grad}
    assert all("pooler" in name for name in without) and without


@pytest.mark.parametrize("kind", ["qwen3_vl", "bert"])
def test_checkpointing_leaves_the_chunked_gradient_of_an_adapter_unchanged(tmp_path, kind):
    def gradients(checkpointing):
        torch.manual_seed(0)
        encoder, samples = build(kind, tmp_path / str(checkpointing), lora_r=4, lora_dropout=0.1,
                                 gradient_checkpointing=checkpointing)
        stir(encoder).train()
        features = [[encoder.preprocess(sample, side) for sample in samples]
                    for side in ("query", "document")]
        torch.manual_seed(5)
        _, metrics = grad_cache_step([encoder, encoder], features, contrast, 2)
        assert metrics["replay_error"] == 0
        return {name: p.grad for name, p in encoder.named_parameters() if p.requires_grad}

    def contrast(q, d):
        return nn.functional.cross_entropy(q @ d.T * 14, torch.arange(len(q)))
    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5)
        assert gradient.abs().max() > 0, name
    # Checkpointing must really be on: fewer tensors are kept for the backward.
    assert saved_tensors(build(kind, tmp_path / "a", lora_r=4)) > saved_tensors(
        build(kind, tmp_path / "b", lora_r=4, gradient_checkpointing=True))


def saved_tensors(built):
    encoder, samples = built
    count = 0

    def pack(tensor):
        nonlocal count
        count += tensor.numel()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        encoder.train()([encoder.preprocess(sample, "query") for sample in samples])
    return count


def test_chunks_of_mixed_samples_give_the_gradient_of_the_whole_batch():
    encoder = stir(tiny()).train()
    features = [[encoder.preprocess(s, side) for s in order] for side, order in (
        ("query", SAMPLES), ("document", SAMPLES[::-1]))]

    def contrast(q, d):
        return nn.functional.cross_entropy(q @ d.T * 14, torch.arange(len(q)))
    contrast(*(encoder(column) for column in features)).backward()
    whole = torch.cat([p.grad.flatten() for p in encoder.parameters()])
    for chunk in (1, 2, 4):
        encoder.zero_grad()
        grad_cache_step([encoder, encoder], features, contrast, chunk)
        chunked = torch.cat([p.grad.flatten() for p in encoder.parameters()])
        assert (chunked - whole).norm() < 1e-5 * whole.norm()


# --- precision ------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["qwen3_vl", *KINDS])
@pytest.mark.parametrize("rank", [0, 4])
def test_bf16_keeps_trainable_weights_in_float32(tmp_path, kind, rank):
    encoder, samples = build(kind, tmp_path / "bf16", lora_r=rank, dtype="bf16")
    for name, p in encoder.named_parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16), name
    exact, _ = build(kind, tmp_path / "fp32", lora_r=rank)
    vectors = encoder([encoder.preprocess(sample, "query") for sample in samples])
    vectors[:, 0].sum().backward()
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(samples)))
    difference = (vectors - exact.encode(samples, "query")).abs().max()
    assert 0 < difference < 0.1                     # bf16 really computed, and about the same


def test_small_steps_move_the_weights_in_bf16_mode():
    encoder = tiny(dtype="bf16")
    weight = encoder.backbone.language_model.norm.weight
    optimizer = torch.optim.AdamW([weight], lr=2e-5, weight_decay=0)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight.data, torch.full_like(weight, 0.9998), atol=1e-6, rtol=0)


def test_double_weights_stay_double(tmp_path):
    network = AutoModel.from_pretrained(text_folder("bert", tmp_path)).double()
    processor = BiEncoder.from_pretrained(tmp_path).tokenizer
    encoder = BiEncoder(network, processor).eval()
    assert encoder([encoder.preprocess("fox", "query")]).dtype == torch.float64


# --- modes ----------------------------------------------------------------------------------------

def test_encode_keeps_order_and_restores_every_mode():
    encoder = tiny(lora_r=4, lora_dropout=0.5).train()
    encoder.backbone.base_model.model.visual.eval()          # a part that was put to sleep
    modes = [part.training for part in encoder.modules()]
    vectors = encoder.encode(SAMPLES, "query", batch_size=2, progress=False)
    assert [part.training for part in encoder.modules()] == modes
    assert not vectors.requires_grad and vectors.device.type == "cpu"
    encoder.eval()
    alone = torch.cat([encoder([encoder.preprocess(sample, "query")]) for sample in SAMPLES])
    torch.testing.assert_close(vectors, alone, atol=1e-5, rtol=0)
    assert encoder.encode([]).shape == (0, encoder.dim)
    short = encoder.encode(SAMPLES, "query", truncate_dim=16)
    torch.testing.assert_close(short, nn.functional.normalize(vectors[:, :16], dim=1), atol=1e-5,
                               rtol=0)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_frozen_start_never_changes_and_disturbs_nothing(rank):
    encoder = tiny(lora_r=rank, lora_dropout=0.5 if rank else 0.0)
    features = [encoder.preprocess(sample, "document") for sample in SAMPLES]
    start = tiny().encode(SAMPLES)
    frozen = encoder.frozen_start()
    stir(encoder).train()
    before = [part.training for part in encoder.modules()], torch.random.get_rng_state()
    grads = {name: p.requires_grad for name, p in encoder.named_parameters()}
    vectors = frozen(features)
    assert not vectors.requires_grad
    torch.testing.assert_close(vectors, start, atol=1e-5, rtol=0)
    assert [part.training for part in encoder.modules()] == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert {name: p.requires_grad for name, p in encoder.named_parameters()} == grads
    assert (encoder.encode(SAMPLES) - start).abs().max() > 1e-3               # it did train
    torch.testing.assert_close(encoder.encode(SAMPLES, encoder=frozen), start, atol=1e-5, rtol=0)


def test_the_frozen_start_is_a_tower_of_the_cached_step():
    encoder = tiny(lora_r=4, lora_dropout=0.1)
    frozen, model = encoder.frozen_start(), stir(encoder).train()
    queries, documents = ([model.preprocess(s, side) for s in SAMPLES]
                          for side in ("query", "document"))

    def contrast(q, d):
        return nn.functional.cross_entropy(q @ d.T * 14, torch.arange(len(q)))
    gradients = []
    for keep in (0, len(SAMPLES)):                       # replayed, and all graphs kept
        encoder.zero_grad()
        torch.manual_seed(3)
        grad_cache_step([model, frozen], [queries, documents], contrast, 2, keep=keep)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()
                                    if p.requires_grad]))
    assert gradients[0].norm() > 0
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


# --- saving ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", ["qwen3_vl", *KINDS])
def test_a_saved_model_loads_with_bitwise_equal_vectors(tmp_path, kind, rank, dtype):
    encoder, samples = build(kind, tmp_path / "base", lora_r=rank, dtype=dtype)
    stir(encoder).save_pretrained(tmp_path / "saved")
    loaded = BiEncoder.from_pretrained(tmp_path / "saved", dtype=dtype)
    assert torch.equal(loaded.encode(samples), encoder.encode(samples))
    assert describe_weights(loaded.backbone) == describe_weights(encoder.backbone)
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == {
        name for name, p in encoder.named_parameters() if p.requires_grad}


def test_an_adapter_can_be_trained_on_moved_and_saved_again(tmp_path):
    encoder = stir(tiny(lora_r=4))
    encoder.save_pretrained(tmp_path / "first")
    shutil.move(tmp_path / "first", tmp_path / "moved")
    loaded = BiEncoder.from_pretrained(tmp_path / "moved", lora_r=4)
    assert list(loaded.backbone.peft_config) == ["default"]                   # exactly one
    stir(loaded).save_pretrained(tmp_path / "second")
    shutil.rmtree(tmp_path / "moved")                                         # as a rotation would
    again = BiEncoder.from_pretrained(tmp_path / "second")
    assert torch.equal(again.encode(SAMPLES), loaded.encode(SAMPLES))
    assert not torch.equal(again.encode(SAMPLES), encoder.encode(SAMPLES))
    with pytest.raises(ValueError, match="lora_r=8.* rank 4"):
        BiEncoder.from_pretrained(tmp_path / "second", lora_r=8)


@pytest.mark.parametrize("kind", ["qwen3_vl", "bert"])
def test_an_adapter_loads_in_peft_and_merged_in_plain_transformers(tmp_path, kind):
    encoder, samples = build(kind, tmp_path / "base", lora_r=4)
    stir(encoder)
    weights = copy.deepcopy(encoder.state_dict())
    encoder.save_pretrained(tmp_path / "adapter")
    encoder.save_pretrained(tmp_path / "merged", merge_lora=True)
    assert all(torch.equal(weights[name], value) for name, value in encoder.state_dict().items())
    place = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    peft = PeftModel.from_pretrained(AutoModel.from_pretrained(place["base_model_name_or_path"]),
                                     tmp_path / "adapter")
    merged = AutoModel.from_pretrained(tmp_path / "merged")
    assert not [name for name in merged.state_dict() if "lora" in name]
    expected = encoder.encode(samples)
    for network in (peft, merged):
        other = BiEncoder(network, encoder.processor)
        torch.testing.assert_close(other.encode(samples), expected, atol=1e-5, rtol=0)
    library = pytest.importorskip("sentence_transformers")
    for folder in ("adapter", "merged"):
        theirs = library.SentenceTransformer(str(tmp_path / folder), device="cpu").encode(TEXTS)
        torch.testing.assert_close(torch.tensor(theirs), expected[:4], atol=1e-5, rtol=0)
