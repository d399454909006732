"""What makes the encoder fast changes no number: images seen once, half precision, compiled blocks,
the choice of attention."""
import copy
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.utils import is_flash_attn_2_available

import model as model_module
from gradcache import grad_cache_step, take
from model import BiEncoder, tiny_qwen3_vl
from tests.test_model import TEXTS, build, stir, tiny

IMAGES = [{"image": Image.new("RGB", (64, 64), "red")},
          {"text": "fox", "image": Image.new("RGB", (96, 40), "blue")},
          {"image": Image.new("RGB", (40, 128), "green")}]
MIXED = [IMAGES[0], "fox", IMAGES[1], "a longer text that tells of the quick brown fox", IMAGES[2]]


def contrast(q, d):
    return nn.functional.cross_entropy(q @ d.T * 14, torch.arange(len(q)))


def prepared(encoder, samples=MIXED):
    return [[encoder.preprocess(sample, side) for sample in order]
            for side, order in (("query", samples), ("document", samples[::-1]))]


def gradient(encoder, step):
    """All that `step` leaves in .grad, in one vector."""
    encoder.zero_grad()
    step()
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])


def visits(encoder, function):
    """How many images pass the vision tower while `function` runs."""
    count = []
    tower = next(part for name, part in encoder.named_modules() if name.endswith("visual"))
    hook = tower.register_forward_pre_hook(
        lambda module, args, kwargs: count.append(len(kwargs["grid_thw"])), with_kwargs=True)
    try:
        function()
    finally:
        hook.remove()
    return sum(count)


# --- images seen once ----------------------------------------------------------------------------

@pytest.mark.parametrize("samples, chunk", [
    (IMAGES, 1), (MIXED, 2), (MIXED, [[[0, 1, 2], [4], [3]], [[4, 0], [1, 2, 3]]])])
def test_images_seen_before_the_cached_step_give_its_gradient_at_one_visit_each(samples, chunk):
    encoder = stir(tiny(lora_r=4)).double().train()
    towers = prepared(encoder, samples)

    def step(*batches):
        return lambda: grad_cache_step([encoder, encoder], batches, contrast, chunk, keep=0)
    plain = gradient(encoder, step(*towers))
    seen = [encoder.see(tower, 2) for tower in towers]
    found = gradient(encoder, step(*seen))
    assert (found - plain).norm() <= 1e-10 * plain.norm() and plain.norm() > 1e-3
    assert visits(encoder, step(*towers)) == 12             # 2 towers of 3 images, in both passes
    assert visits(encoder, step(*seen)) == 0
    assert visits(encoder, lambda: [encoder.see(tower, 2) for tower in towers]) == 6


def test_in_bf16_the_gradient_differs_by_rounding_alone():
    encoder = stir(tiny(lora_r=4, dtype="bf16")).train()
    towers = prepared(encoder)

    def step(*batches):
        return lambda: grad_cache_step([encoder, encoder], batches, contrast, 2)
    plain = gradient(encoder, step(*towers))
    found = gradient(encoder, step(*(encoder.see(tower, 2) for tower in towers)))
    assert nn.functional.cosine_similarity(plain, found, dim=0) > 0.9999
    assert abs(found.norm() / plain.norm() - 1) < 1e-2


def test_the_language_model_gets_exactly_what_it_gets_of_pixels():
    encoder, got = tiny(lora_r=4), []
    language = encoder.backbone.get_base_model().language_model
    language.register_forward_pre_hook(lambda module, args, kwargs: got.append(kwargs),
                                       with_kwargs=True)
    features, _ = prepared(encoder)
    for chunk in (features, encoder.see(features, len(features))):
        encoder(chunk)
    pixels, seen = got
    assert pixels.keys() == seen.keys() and pixels["deepstack_visual_embeds"]
    for name in ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks"):
        assert torch.equal(pixels[name], seen[name]), name
    for ours, theirs in zip(pixels["deepstack_visual_embeds"], seen["deepstack_visual_embeds"],
                            strict=True):
        assert torch.equal(ours, theirs) and ours.abs().max() > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{"lora_r": 4}, {"freeze_vision": True}])
def test_a_chunk_may_mix_pixels_seen_images_and_texts(dtype, options):
    encoder = tiny(dtype=dtype, **options).eval()
    features, _ = prepared(encoder)
    expected = encoder(features)
    half_seen = encoder.see(features[:2], 1) + features[2:]
    assert [set(f) - {"input_ids", "image_grid_thw"} for f in half_seen] == [
        {"image_features"}, set(), {"pixel_values"}, set(), {"pixel_values"}]
    kept = half_seen[0]["image_features"]
    assert kept.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert kept.shape == (2, 4, encoder.dim)                # the input and one deep-stack layer
    # Images beside each other or alone are rounded otherwise, in bf16 by 2^-9.
    torch.testing.assert_close(encoder(half_seen), expected, rtol=0,
                               atol=1e-5 if dtype == "fp32" else 2e-2)
    if dtype == "fp32":
        alone = torch.cat([encoder([f]) for f in features])
        torch.testing.assert_close(encoder(half_seen), alone, atol=1e-5, rtol=0)


def test_seeing_keeps_to_its_limit_its_input_and_the_plan():
    encoder = tiny(lora_r=4)
    features, _ = prepared(encoder)
    before = [dict(f) for f in features]
    sizes = [f["image_features"].nbytes for f in encoder.see(features, 1) if "image_features" in f]
    assert sizes == [2 * 4 * n * encoder.dim for n in (4, 8, 4)]    # 1 + 1 layers, float32, tokens
    for limit, number in ((0, 0), (sizes[0], 1), (sum(sizes) - 1, 2), (sum(sizes), 3)):
        for chunk in (1, 3):
            seen = encoder.see(features, chunk, limit)
            assert sum("image_features" in f for f in seen) == number
            assert sum("pixel_values" in f for f in seen) == 3 - number
            torch.testing.assert_close(encoder(seen), encoder(features), atol=1e-5, rtol=0)
            assert [encoder.cost(f) for f in seen] == [encoder.cost(f) for f in features]
    assert all(f.keys() == b.keys() and all(f[k] is b[k] for k in f)
               for f, b in zip(features, before))
    for copied in take(seen, [0, 2]):                       # a chunk's copies hold that chunk alone
        own = copied["image_features"]
        assert own.untyped_storage().nbytes() == own.nbytes


def test_a_vision_tower_that_trains_is_never_seen_ahead():
    for encoder in (tiny(), tiny(lora_r=4, lora_vision=True)):
        features, _ = prepared(encoder)
        seen = encoder.see(features, 2)
        assert all(a is b for a, b in zip(seen, features, strict=True))
        assert visits(encoder, lambda: encoder.see(features, 2)) == 0


# --- half precision ------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, rank", [("qwen3_vl", 4), ("bert", 0)])
def test_fp16_with_a_scale_gives_the_gradient_of_fp32_and_without_loses_most_of_it(
        tmp_path, kind, rank):
    """The loss is as small as a query's share of a batch of 500 000, the scale a common one."""
    share, scale = 2e-6, 2**12

    def prepare(dtype):
        torch.manual_seed(0)
        encoder, samples = build(kind, tmp_path, lora_r=rank, dtype=dtype)
        return stir(encoder), prepared(encoder, samples)

    def small(q, d):
        assert q.dtype == d.dtype == torch.float32
        return share * contrast(q, d)

    def chunked(dtype, scale):
        encoder, towers = prepare(dtype)
        found = gradient(encoder, lambda: grad_cache_step([encoder, encoder], towers, small, 2,
                                                          grad_scale=scale))
        return found.double() / scale

    exact, scaled, flushed = chunked("fp32", 1), chunked("fp16", scale), chunked("fp16", 1)
    encoder, towers = prepare("fp16")
    assert {p.dtype for p in encoder.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in encoder.parameters() if not p.requires_grad} <= {torch.float16}
    whole = gradient(encoder, lambda: (scale * small(*map(encoder, towers))).backward()) / scale

    def cosine(a, b):
        return nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    assert cosine(scaled, exact) > 0.999 and abs(scaled.norm() / exact.norm() - 1) < 1e-2
    assert cosine(scaled, whole) > 0.9999 and abs(scaled.norm() / whole.norm() - 1) < 1e-3
    assert not torch.equal(scaled, exact)                           # half precision it was
    zeros = [(found == 0).double().mean() for found in (exact, scaled, flushed)]
    assert zeros[1] < zeros[0] + 0.06 and zeros[2] > zeros[0] + 0.1 and cosine(flushed, exact) < 0.6


def test_images_seen_in_fp16_are_those_of_the_step():
    encoder = stir(tiny(lora_r=4, dtype="fp16")).eval()
    features, _ = prepared(encoder)
    seen = encoder.see(features, len(features))
    assert seen[0]["image_features"].dtype == torch.float16
    assert torch.equal(encoder(seen), encoder(features))


# --- attention -----------------------------------------------------------------------------------

def install(monkeypatch, kernel=None):
    """Let transformers believe in a FlashAttention 2 with this kernel."""
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: (
        None, kernel, None, utils._pad_input, utils._unpad_input))
    monkeypatch.setattr(PreTrainedModel, "get_correct_attn_implementation",
                        lambda self, name, is_init_check=False: name or "sdpa")


def chosen(encoder, device, monkeypatch):
    """Attention of the backbone when the weights seem to lie there."""
    where = torch.device(device)
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "parameters", lambda: iter([SimpleNamespace(device=where)]))
        assert encoder.ready() == where
    return encoder.backbone.config._attn_implementation


@pytest.mark.parametrize("rank", [0, 4])
def test_flash_attention_is_taken_where_it_can_run_and_left_where_not(monkeypatch, rank):
    install(monkeypatch)
    for installed in (True, False):
        monkeypatch.setattr(model_module, "is_flash_attn_2_available", lambda: installed)
        for dtype, flash in (("bf16", installed), ("fp16", installed), ("fp32", False)):
            encoder = tiny(dtype=dtype, lora_r=rank)
            for device in ("cpu", "cuda", "cuda:1", "cpu"):             # moved there and back
                expected = "flash_attention_2" if flash and device != "cpu" else "sdpa"
                assert chosen(encoder, device, monkeypatch) == expected
                parts = [part for part in encoder.modules() if isinstance(part, PreTrainedModel)]
                assert {part.config._attn_implementation for part in parts} == {expected}
                assert len(parts) == 3                          # all, vision and language
        named = tiny(dtype="bf16", attention="sdpa")
        assert chosen(named, "cuda", monkeypatch) == "sdpa"


@pytest.mark.parametrize("kind", ["qwen3_vl", "bert", "modernbert"])
def test_flash_attention_gets_no_padding_and_gives_the_vectors_of_sdpa(tmp_path, monkeypatch, kind):
    """Its kernel is played by a loop over the sequences, which a CPU can run."""
    lengths = []

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False,
               softmax_scale=None, dropout_p=0.0, window_size=(-1, -1)):
        sizes = cu_seqlens_q.diff().tolist()                            # q, k, v: (tokens, H, D/H)
        lengths.append((sizes, len(q)))
        groups = q.shape[1] // k.shape[1]
        parts = zip(*(x.repeat_interleave(n, dim=1).transpose(0, 1).split(sizes, dim=1)
                      for x, n in ((q, 1), (k, groups), (v, groups))))
        return torch.cat([nn.functional.scaled_dot_product_attention(
            *part, is_causal=causal, scale=softmax_scale).transpose(0, 1) for part in parts])
    encoder, samples = build(kind, tmp_path)
    features, _ = prepared(encoder, MIXED if kind == "qwen3_vl" else samples)
    expected = encoder.eval()(features)
    install(monkeypatch, kernel)
    encoder.attention = "flash_attention_2"
    torch.testing.assert_close(encoder(features), expected, atol=1e-5, rtol=0)
    tokens = [len(f["input_ids"]) for f in features]
    assert len(set(tokens)) > 1 and lengths.count((tokens, sum(tokens))) == 2       # per layer
    assert {sum(sizes) == count for sizes, count in lengths} == {True}


def test_attention_is_sdpa_unless_named_and_a_wrong_name_is_refused(tmp_path):
    eager, (encoder, samples) = tiny(attention="eager"), build("bert", tmp_path, attention="eager")
    for model in (eager, encoder):
        assert model.backbone.config._attn_implementation == "eager"
    plain, _ = build("bert", tmp_path)
    for ours, theirs, texts in ((eager, tiny(), MIXED), (encoder, plain, samples)):
        torch.testing.assert_close(ours.encode(texts), theirs.encode(texts), atol=1e-5, rtol=0)
        assert theirs.backbone.config._attn_implementation == "sdpa"
        assert ours.backbone.config._attn_implementation == "eager"         # and it stays
    with pytest.raises((ValueError, ImportError), match="flash|Flash|supported"):
        tiny(attention="flash_attention_2" if not is_flash_attn_2_available() else "none")


# --- compiled blocks -----------------------------------------------------------------------------

def counted():
    """(backend that compiles nothing, the list of graphs it was given)"""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()                           # other tests' graphs are not for this model
    return backend, graphs


def test_many_shapes_are_few_graphs_with_the_gradients_of_the_model(tmp_path):
    backend, graphs = counted()
    plain = stir(build("bert", tmp_path)[0]).eval()             # in train mode it drops out
    compiled = stir(build("bert", tmp_path, compile=backend)[0]).eval()
    shapes, numbers = set(), []
    for lengths in ([1, 2, 3], [9, 4, 5, 5], [7, 14], [12, 2, 7], [1, 1, 2, 3], [6, 11, 13, 9, 2]):
        towers = prepared(plain, ["fox " * length for length in lengths])
        shapes |= {(n, len(f["input_ids"])) for n in (len(lengths), 2) for f in towers[0]}
        with torch.no_grad():
            torch.testing.assert_close(compiled(towers[0]), plain(towers[0]), atol=1e-5, rtol=0)
        plan = [[[*range(2)], [*range(2, len(lengths))]] if len(lengths) > 3 else
                [[*range(len(lengths))]]] * 2               # no chunk of one: it has its own graphs
        found, expected = (gradient(encoder, lambda encoder=encoder: grad_cache_step(
            [encoder, encoder], towers, contrast, plan)) for encoder in (compiled, plain))
        assert (found - expected).norm() <= 1e-5 * expected.norm() and expected.norm() > 1e-3
        numbers.append(len(graphs))
    assert len(shapes) > 20 and 0 < numbers[-1] <= 4, (shapes, numbers)
    # Dropout is another with another padding, but the same in both passes.
    compiled.train()
    assert (compiled(towers[0]) - compiled(towers[0])).abs().max() > 1e-3
    _, metrics = grad_cache_step([compiled, compiled], towers, contrast, plan, keep=0)
    assert metrics["replay_error"] == 0


def test_nobody_sees_that_a_model_is_compiled(tmp_path):
    backend, graphs = counted()
    encoder, plain = (BiEncoder(*tiny_qwen3_vl(TEXTS, vocab_size=400, hidden=64, layers=1),
                                lora_r=4, compile=how).eval() for how in (backend, False))
    assert encoder.state_dict().keys() == plain.state_dict().keys()
    assert [*dict(encoder.named_modules())] == [*dict(plain.named_modules())]
    plain.load_state_dict(stir(encoder).state_dict())
    towers = prepared(plain)
    found, expected = (gradient(model, lambda model=model: grad_cache_step(
        [model, model], towers, contrast, [[[0, 1], [2, 3, 4]]] * 2)) for model in (encoder, plain))
    assert (found - expected).norm() <= 1e-5 * expected.norm() and graphs
    vectors = plain.encode(MIXED)
    encoder.save_pretrained(tmp_path)
    for other in (encoder, copy.deepcopy(encoder), BiEncoder.from_pretrained(tmp_path)):
        torch.testing.assert_close(other.encode(MIXED), vectors, atol=1e-5, rtol=0)


def test_lengths_come_from_a_short_ladder_that_wastes_a_quarter_at_most(monkeypatch):
    def widths(encoder, asked):
        """T of the batch for a chunk of one sample of each length."""
        got = []
        monkeypatch.setattr(type(encoder.backbone), "forward", lambda self, input_ids, **_: (
            got.append(input_ids.shape[1])
            or SimpleNamespace(last_hidden_state=torch.ones(*input_ids.shape, 1))))
        for length in asked:
            encoder([{"input_ids": torch.zeros(length, dtype=torch.long)}])
        return got
    asked = [*range(1, 1025), 8191, 8192, 9000]
    assert widths(tiny(), asked) == asked
    got = widths(tiny(compile="eager"), asked)
    assert all(n <= width < n + max(16, n / 4 + 1) for n, width in zip(asked, got, strict=True))
    assert len(set(got[:1024])) == 20 and got[-3:] == [8192, 8192, 9000]
    assert widths(tiny(compile="eager", max_length=77), [60, 70, 77]) == [64, 77, 77]
