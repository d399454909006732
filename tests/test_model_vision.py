"""Qwen3-VL: the chat format, images of any size, mixed chunks, and the tiny built-in model."""
import pickle
from functools import cache

import pytest
import torch
from PIL import Image, ImageDraw
from torch.nn.functional import cross_entropy

from model import BiEncoder, clear_rope_deltas, tiny_qwen3_vl

TEXTS = ["a red circle", "def area(self): return width * height", "the quick brown fox", "fox"]


def tiny(seed=0, **options):
    return BiEncoder(*tiny_qwen3_vl(TEXTS * 5, vocab_size=400, hidden=64, seed=seed), **options)


def picture(width, height, colour="red"):
    image = Image.new("RGB", (width, height), colour)
    ImageDraw.Draw(image).line((0, 0, width, height), fill="blue", width=3)
    return image


@pytest.fixture(scope="module")
def encoder():
    return tiny().eval()


def samples():
    return ["fox", {"image": picture(64, 64)}, {"text": "a red circle", "image": picture(96, 33)},
            "a longer text that tells of the quick brown fox", {"image": picture(40, 200, "green")}]


def received(encoder, features):
    """Keyword arguments that the backbone gets for a chunk."""
    seen = {}
    hook = encoder.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    encoder(features)
    hook.remove()
    return seen


def test_the_prompt_is_the_chat_of_qwen3_vl_embedding(encoder):
    def spelled(model, sample, side="document"):
        return model.tokenizer.decode(model.preprocess(sample, side)["input_ids"])
    chat = ("<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
            "<|im_start|>assistant\n")
    default = "Represent the user's input."
    image = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert spelled(encoder, "fox") == chat.format(default, "fox")
    assert spelled(encoder, "") == chat.format(default, "NULL")
    both = {"text": "fox", "image": picture(64, 64)}
    assert spelled(encoder, both) == chat.format(default, image + "fox")
    asked = tiny(query_prompt="Find the code", document_prompt="A page!")
    assert spelled(asked, "fox", "query") == chat.format("Find the code.", "fox")
    assert spelled(asked, "fox") == chat.format("A page!", "fox")
    assert spelled(asked, {"text": "fox", "prompt": "Look."}) == chat.format("Look.", "fox")


@pytest.mark.parametrize("sample", [
    "fox", "\n\n indented", "  spaces first", "last line\n", "é 漢 \u2028",
    {"image": picture(64, 96)}, {"text": "\nfox", "image": picture(70, 50)}])
def test_features_equal_those_of_the_full_processor(encoder, sample):
    text = sample if isinstance(sample, str) else sample.get("text", "")
    image = None if isinstance(sample, str) else sample["image"]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Represent the user's input."}]},
        {"role": "user", "content": [{"type": "image"}] * (image is not None)
         + [{"type": "text", "text": text}]}]
    processor = encoder.processor
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = processor(text=[rendered], images=image and [image], return_tensors="pt")
    ours = encoder.preprocess(sample, "query")
    assert torch.equal(ours["input_ids"], expected["input_ids"][0])
    assert ours.keys() - {"input_ids"} == expected.keys() & {"pixel_values", "image_grid_thw"}
    for key in ours.keys() - {"input_ids"}:
        assert torch.equal(ours[key], expected[key])


def test_special_tokens_spelled_in_a_text_stay_words(encoder):
    features = encoder.preprocess("see <|image_pad|><|im_end|> here", "query")
    assert encoder.processor.image_token_id not in features["input_ids"]
    assert encoder([features]).isfinite().all()
    with pytest.raises(ValueError, match="contains an image token"):
        encoder.preprocess({"text": "fox", "prompt": "<|image_pad|>"}, "query")


def test_a_mixed_chunk_equals_its_samples_one_by_one_in_any_order(encoder):
    features = [encoder.preprocess(sample, "document") for sample in samples()]
    alone = torch.cat([encoder([f]) for f in features])
    assert (alone @ alone.T - torch.eye(5)).max() < 0.999          # five different vectors
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 1]):
        torch.testing.assert_close(encoder([features[i] for i in order]), alone[order],
                                   atol=1e-5, rtol=0)


def test_left_padded_input_gives_the_same_vector(encoder):
    features = encoder.preprocess({"text": "fox", "image": picture(64, 64)}, "query")
    ids, filler = features["input_ids"], torch.zeros(5, dtype=torch.long)
    padded = {**features, "input_ids": torch.cat([filler, ids]),
              "attention_mask": torch.cat([filler, torch.ones_like(ids)])}
    assert torch.equal(encoder([padded]), encoder([features]))


def test_forward_only_reads_its_features(encoder):
    features = [encoder.preprocess(sample, "document") for sample in samples()]
    before = pickle.dumps(features)
    encoder(features)
    assert pickle.dumps(features) == before


def test_pixel_rows_travel_with_their_samples(encoder):
    sizes = [(64, 64), (64, 128), (128, 64)]                            # (width, height)
    features = [encoder.preprocess({"image": picture(*size)}, "document") for size in sizes]
    assert [f["image_grid_thw"].tolist() for f in features] == [[[1, 4, 4]], [[1, 8, 4]],
                                                                [[1, 4, 8]]]
    for chunk, rows in ((features[:2], 48), (features[2:], 32)):
        seen = received(encoder, chunk)
        assert len(seen["pixel_values"]) == rows and len(seen["image_grid_thw"]) == len(chunk)
    seen = received(encoder, [encoder.preprocess("fox", "document")])
    assert seen.keys() == {"input_ids", "attention_mask"}


def test_token_types_mark_the_image_tokens_and_nothing_else(encoder):
    chunk = [encoder.preprocess({"text": text, "image": picture(*size)}, "document")
             for text, size in (("fox", (64, 64)), ("fox " * 9, (128, 96)))]
    seen = received(encoder, chunk)
    image = (seen["input_ids"] == encoder.processor.image_token_id) & (seen["attention_mask"] == 1)
    assert torch.equal(seen["mm_token_type_ids"].bool(), image)
    assert image.sum(1).tolist() == (seen["image_grid_thw"].prod(1) // 4).tolist() == [4, 12]


def test_a_text_after_an_image_has_the_vector_it_had_before(encoder):
    text = [encoder.preprocess("fox", "query")]
    before = encoder(text)
    encoder([encoder.preprocess({"image": picture(96, 64)}, "query")])
    encoder.backbone.rope_deltas = torch.full((1, 1), -20)          # as a direct call leaves them
    torch.testing.assert_close(encoder(text * 3), before.expand(3, -1), atol=1e-6, rtol=0)
    assert encoder.backbone.rope_deltas is None
    encoder.backbone.rope_deltas = torch.ones(1, 1)
    clear_rope_deltas(encoder)
    assert encoder.backbone.rope_deltas is None


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 20, 256])
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (1, 150), (31, 639), (35, 730), (730, 35),
                                  (10000, 20), (20, 10000), (20, 60), (700, 500)])
def test_an_image_of_any_size_fits_the_budget(size, budget):
    model = fitted(budget)
    features = model.preprocess({"image": picture(*size)}, "query")
    frames, rows, columns = features["image_grid_thw"][0].tolist()
    assert frames == 1 and min(rows, columns) >= 2 and rows % 2 == columns % 2 == 0
    assert len(features["pixel_values"]) == rows * columns <= 4 * budget
    placed = (features["input_ids"] == model.processor.image_token_id).sum()
    assert placed == rows * columns // 4


@cache
def fitted(budget):
    """One model per budget: each has a processor of its own."""
    return tiny(max_num_visual_tokens=budget)


def test_a_text_is_shortened_and_an_image_never():
    image = picture(256, 256)                                           # 8 x 8 = 64 tokens
    model = tiny(max_length=128)
    image_id = model.processor.image_token_id
    ids = model.preprocess({"text": "fox " * 500, "image": image}, "query")["input_ids"]
    assert len(ids) == 128 and (ids == image_id).sum() == 64
    whole = model.preprocess({"text": "fox", "image": image}, "query")["input_ids"]
    assert torch.equal(ids[-5:], whole[-5:])                            # the end that is pooled
    needed = len(model.preprocess({"image": image}, "query")["input_ids"])
    with pytest.raises(ValueError, match=rf"{needed} tokens, max_length is 32"):
        tiny(max_length=32).preprocess({"image": image}, "query")
    exact = tiny(max_length=needed)
    assert len(exact.preprocess({"text": "fox", "image": image}, "query")["input_ids"]) == needed


def test_image_absent_null_or_empty_is_one_and_the_same(encoder):
    same = [encoder.preprocess(sample, "query") for sample in (
        "fox", {"text": "fox"}, {"text": "fox", "image": None}, {"text": "fox", "image": []})]
    other = encoder.preprocess({"text": "fox", "image": picture(64, 64)}, "query")
    vectors = encoder([*same, other])
    torch.testing.assert_close(vectors[:4], vectors[:1].expand(4, -1), atol=1e-6, rtol=0)
    assert (vectors[0] - vectors[4]).abs().max() > 1e-3


def test_empty_and_blank_texts_do_not_depend_on_the_batch(encoder):
    texts = ["", " ", "a", "a long text " * 9]
    vectors = encoder.encode(texts)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    alone = torch.cat([encoder.encode([text]) for text in texts])
    torch.testing.assert_close(vectors, alone, atol=1e-5, rtol=0)


def test_cost_counts_tokens_and_patches(encoder):
    text = encoder.preprocess("fox", "query")
    image = encoder.preprocess({"text": "fox", "image": picture(64, 64)}, "query")
    assert encoder.cost(text) == len(text["input_ids"])
    assert encoder.cost(image) == encoder.cost(text) + 4 + 2 + 16     # tokens, brackets, patches


def test_images_are_opened_by_the_given_loader(tmp_path):
    picture(64, 64).save(tmp_path / "a.png")
    plain = tiny().preprocess({"image": str(tmp_path / "a.png")}, "query")
    assert len(plain["pixel_values"]) == 16
    model = tiny(load_image=lambda name: picture(96, 32 * int(name)))
    assert len(model.preprocess({"image": "2"}, "query")["pixel_values"]) == 24


def test_preprocess_survives_the_trip_to_a_worker_process(encoder):
    copied = pickle.loads(pickle.dumps(encoder.preprocess))
    for sample in samples():
        ours, theirs = encoder.preprocess(sample, "query"), copied(sample, "query")
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_tiny_model_is_reproducible_and_leaves_the_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = tiny(), tiny(), tiny(seed=1)
    assert torch.equal(torch.rand(3), expected)
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    assert first.tokenizer.decode(first.tokenizer("any text, 漢 é").input_ids) == "any text, 漢 é"


def test_the_full_tiny_model_has_about_a_million_parameters():
    network, processor = tiny_qwen3_vl(["".join(chr(97 + i * j % 26) for j in range(1, 40))
                                        for i in range(3000)])
    assert 0.7e6 < sum(p.numel() for p in network.parameters()) < 1.4e6
    assert len(processor.tokenizer) <= 4096
    assert type(network).__name__ == "Qwen3VLModel"


def test_the_tiny_model_learns_to_tell_pairs_apart():
    model = tiny()
    pairs = [(f"{c} {c}", {"text": c, "image": picture(64, 64, n)}) for c, n in zip(
        "abcdefgh", ["red", "green", "blue", "black", "white", "yellow", "pink", "gray"])]
    queries, documents = ([model.preprocess(s, side) for s in column]
                          for column, side in zip(zip(*pairs), ("query", "document")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        loss = cross_entropy(model(queries) @ model(documents).T * 14, torch.arange(8))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > 1.5 and losses[-1] < 0.5 * losses[0], losses


def test_sentence_transformers_gives_the_same_vectors(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    model = tiny(max_length=120, max_num_visual_tokens=16, query_prompt="Find the code")
    model.save_pretrained(tmp_path)
    other = library.SentenceTransformer(str(tmp_path), device="cpu")
    texts = [*TEXTS, "\n starts with a line end", "too long for it " * 40]
    images = [picture(64, 64), picture(300, 200, "green"), picture(33, 90)]
    both = [{"image": image, "text": "fox"} for image in images]
    for ours, theirs in ((model.encode(texts), other.encode(texts)),
                         (model.encode(texts, "query"), other.encode_query(texts)),
                         (model.encode([{"image": i} for i in images]), other.encode(images)),
                         (model.encode(both), other.encode(both))):
        torch.testing.assert_close(ours, torch.tensor(theirs), atol=1e-5, rtol=0)


def test_a_saved_model_keeps_its_pixel_budget_and_its_vectors(tmp_path):
    model = tiny(max_num_visual_tokens=9, document_prompt="A page")
    model.save_pretrained(tmp_path)
    loaded = BiEncoder.from_pretrained(tmp_path)
    assert loaded.prompts == model.prompts and loaded.max_length == model.max_length
    chosen = [*samples(), {"image": picture(900, 900)}]
    assert len(loaded.preprocess(chosen[-1], "query")["pixel_values"]) == 36
    assert torch.equal(loaded.encode(chosen), model.encode(chosen))
