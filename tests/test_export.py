"""The exported folder: settings, model card, and that a wrong one is found."""
import json
import logging
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel
from transformers.utils import logging as bars

import checkpoint
import export
from export import as_theirs, host_copy, model_card, quiet, verify
from model import BiEncoder
from tests.test_model import SAMPLES, TEXTS, build, stir, tiny
from tests.test_model_text import text_folder

PATH = "path/to/this/folder"


GIVEN = {"base": None, "data": "3 rows", "arguments": {}, "metrics": {}}


def saved(kind, folder, *, merge_lora=False, card=None, **options):
    """A model that was moved, as by training, and the folder that it was saved in."""
    encoder, samples = build(kind, folder / "base", **options)
    stir(encoder).save_pretrained(folder / "saved", merge_lora, card)
    return encoder, folder / "saved", {"query": samples, "document": samples}


def card(model, **options):
    return model_card(model, **GIVEN | options)


def programs(text, folder):
    """The card's programs, with the path put in."""
    found = re.findall("```python\n(.*?)```", text, re.DOTALL)
    return [code.replace(PATH, str(folder)) for code in found]


def edit(path, change):
    """Change the object in a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# --- Parity ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, rank, merge, dtype", [
    ("qwen3_vl", 0, False, "fp32"), ("qwen3_vl", 4, False, "bf16"), ("qwen3_vl", 4, True, "fp32"),
    ("bert", 0, False, "bf16"), ("bert", 4, False, "bf16"), ("bert", 4, True, "bf16"),
    ("qwen3", 0, False, "fp32"), ("qwen3", 4, False, "fp32")])
def test_a_saved_folder_has_the_models_vectors_in_every_program(tmp_path, kind, rank, merge, dtype):
    model, folder, samples = saved(kind, tmp_path, merge_lora=merge, lora_r=rank, dtype=dtype,
                                   query_prompt="find: ")
    assert verify(model, folder, samples) <= 1e-5


def test_verifying_changes_nothing(tmp_path):
    logger = logging.getLogger("sentence_transformers")
    model, folder, samples = saved("bert", tmp_path, lora_r=4, lora_dropout=0.3, dtype="bf16")
    model.train().backbone.base_model.model.embeddings.eval()
    bars.enable_progress_bar()
    logger.setLevel(logging.NOTSET)

    def state():
        return ([part.training for part in model.modules()], torch.random.get_rng_state().tolist(),
                bars.is_progress_bar_enabled(), logger.level,
                {name: (p.dtype, p.requires_grad, p.sum().item(), p.data_ptr())
                 for name, p in model.named_parameters()},
                {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    before = state()
    verify(model, folder, samples)
    assert state() == before and model.half


def other_weights(folder, name="model.safetensors"):
    weights = load_file(folder / name)
    save_file({key: value + 0.01 for key, value in weights.items()}, folder / name,
              metadata={"format": "pt"})


def without_normalize(folder):
    edit(folder / "modules.json", lambda modules: modules.pop())


def other_base(folder):
    edit(folder / "adapter_config.json",
         lambda config: config.update(base_model_name_or_path=str(folder / "nowhere")))


@pytest.mark.parametrize("damage, rank, program", [
    (other_weights, 0, "BiEncoder"),
    (lambda folder: other_weights(folder, "adapter_model.safetensors"), 4, "BiEncoder"),
    (lambda folder: edit(folder / "1_Pooling/config.json", lambda config: config.update(
        pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)), 0, "BiEncoder"),
    (lambda folder: edit(folder / "config_sentence_transformers.json",
                         lambda config: config["prompts"].update(query="")), 0, "BiEncoder"),
    (lambda folder: (folder / "config.json").unlink(), 0, "BiEncoder"),
    (without_normalize, 0, "SentenceTransformer"), (other_base, 4, "")])
def test_a_folder_that_gives_other_vectors_is_refused(tmp_path, damage, rank, program):
    pytest.importorskip("sentence_transformers")
    model, folder, samples = saved("bert", tmp_path, lora_r=rank, query_prompt="find: ")
    damage(folder)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder))} in {program}.*--merge-lora"):
        verify(model, folder, samples)


def test_the_error_tells_the_size_of_the_difference(tmp_path):
    model, folder, samples = saved("bert", tmp_path)
    before = model.encode(TEXTS)
    stir(model)
    with pytest.raises(ValueError, match="allowed is 1e-05") as caught:
        verify(model, folder, {"document": TEXTS})
    told = float(re.search(r"differs .* by (\S+),", str(caught.value))[1])
    both = [(model.encode([text]) - BiEncoder.from_pretrained(folder).encode([text])).abs().max()
            for text in [*TEXTS, "a text"]]
    assert told == pytest.approx(max(both).item(), rel=0.1) and (model.encode(TEXTS) - before).any()


def test_a_vector_that_is_no_number_is_refused(tmp_path):
    model, folder, samples = saved("bert", tmp_path)
    next(model.parameters()).data.fill_(float("nan"))
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="differs"):
        verify(model, folder, samples)


def test_without_sentence_transformers_our_own_loader_is_what_is_verified(tmp_path, monkeypatch):
    model, folder, samples = saved("bert", tmp_path)
    without_normalize(folder)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)           # import raises
    assert verify(model, folder, samples) <= 1e-5
    other_weights(folder)
    with pytest.raises(ValueError, match="BiEncoder"):
        verify(model, folder, samples)


ODD = {"prompt": {"text": "fox", "prompt": "Another instruction."}, "special": "a <|im_end|> here",
       "cut": {"text": "a long text " * 90, "image": Image.new("RGB", (64, 64), "red")},
       "strip": {"image": Image.new("RGB", (35, 730), "red")},
       "thin": {"image": Image.new("RGB", (3, 900), "red")}}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Qwen3-VL with little room, and where it was saved."""
    folder = tmp_path_factory.mktemp("small")
    model = tiny(max_length=120, max_num_visual_tokens=16)
    model.save_pretrained(folder)
    return model, folder


def test_samples_that_they_read_otherwise_are_left_out(small):
    verify(*small, {"query": [*ODD.values(), ""], "document": [*ODD.values(), ""]})


@pytest.mark.parametrize("name", ODD)
def test_and_they_must_be(small, name, monkeypatch):
    pytest.importorskip("sentence_transformers")
    odd = ODD[name] if isinstance(ODD[name], dict) else {"text": ODD[name]}
    assert as_theirs(small[0], odd, "query") is None
    theirs = {key: odd[key] for key in ("image", "text") if key in odd}
    monkeypatch.setattr(export, "as_theirs", lambda model, sample, side: theirs if sample is odd
                        else {"text": sample})
    with pytest.raises(ValueError, match="SentenceTransformer"):
        verify(*small, {"query": [odd]})


def test_ordinary_samples_are_not_left_out(tmp_path, small):
    model, _ = small
    long = "a text that is much too long " * 30
    for sample in [*SAMPLES, long, " spaces ", "https://a.b/c.png", {"text": "fox", "image": None}]:
        assert as_theirs(model, sample, "query") is not None
    assert as_theirs(model, "https://a.b/c.png", "query") == {"text": "https://a.b/c.png"}
    bert, _ = build("bert", tmp_path)
    assert as_theirs(bert, {"text": "fox"}, "query") == as_theirs(bert, "fox", "query") == "fox"
    assert as_theirs(bert, "", "query") is None


def test_a_copy_in_host_memory_is_float32_and_shares_nothing():
    model = tiny(lora_r=4, dtype="bf16")
    copied = host_copy(model)
    ours, theirs = dict(model.named_parameters()), dict(copied.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        assert theirs[name].dtype == torch.float32 and theirs[name].data_ptr() != p.data_ptr()
        assert torch.equal(theirs[name], p.float()) and isinstance(theirs[name], nn.Parameter)
        assert theirs[name].requires_grad == p.requires_grad
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    first, second = host_copy(tied)
    assert first.weight is second.weight and first.bias is not second.bias


# --- Settings -------------------------------------------------------------------------------------

def test_prompts_travel_and_are_used_by_name_and_by_side(tmp_path):
    model, folder, _ = saved("bert", tmp_path, query_prompt="find: ", document_prompt="page: ")
    assert BiEncoder.from_pretrained(folder).prompts == {"query": "find: ", "document": "page: "}
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    for side in ("query", "document"):
        ours = model.encode(TEXTS, side)
        by_side = getattr(theirs, f"encode_{side}")
        for found in (theirs.encode(TEXTS, prompt_name=side), by_side(TEXTS)):
            torch.testing.assert_close(torch.tensor(found), ours, atol=1e-5, rtol=0)
    assert (model.encode(TEXTS, "query") - model.encode(TEXTS, "document")).abs().max() > 1e-3


def test_matryoshka_sizes_travel_and_shorter_vectors_agree(tmp_path):
    model, folder, samples = saved("bert", tmp_path, matryoshka_dims=[16, 8])
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    assert config["matryoshka_dims"] == [16, 8] and config["similarity_fn_name"] == "cosine"
    again = BiEncoder.from_pretrained(folder)
    assert again.matryoshka_dims == [16, 8]
    assert BiEncoder.from_pretrained(folder, matryoshka_dims=[4]).matryoshka_dims == [4]
    verify(model, folder, samples)
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(folder), device="cpu", truncate_dim=8)
    found = torch.tensor(theirs.encode_query(TEXTS, normalize_embeddings=True))
    ours = model.encode(TEXTS, "query", truncate_dim=8)
    torch.testing.assert_close(found, ours, atol=1e-5, rtol=0)


def test_vectors_are_float32_although_the_base_is_stored_in_bf16(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    base = text_folder("bert", tmp_path / "base")
    AutoModel.from_pretrained(base).to(torch.bfloat16).save_pretrained(base)
    model = stir(BiEncoder.from_pretrained(base, lora_r=4))
    model.save_pretrained(tmp_path / "saved")
    theirs = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert {p.dtype for p in theirs.parameters()} == {torch.float32}
    torch.testing.assert_close(torch.tensor(theirs.encode(TEXTS)), model.encode(TEXTS), atol=1e-5,
                               rtol=0)


def test_frozen_weights_are_saved_in_float32_like_the_others(tmp_path):
    tiny(dtype="bf16", freeze_vision=True).save_pretrained(tmp_path)
    assert {p.dtype for p in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen3_vl", "bert"])
def test_a_vector_per_token_travels_to_the_multi_vector_encoder(tmp_path, kind):
    model, folder, samples = saved(kind, tmp_path, pooling="tokens", query_prompt="find: ")
    assert verify(model, folder, samples) <= 1e-5
    assert BiEncoder.from_pretrained(folder).pooling == "tokens"
    library = pytest.importorskip("sentence_transformers")
    if not hasattr(library, "MultiVectorEncoder"):
        pytest.skip("this version has none")
    theirs = library.MultiVectorEncoder(str(folder), device="cpu")
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    assert config["similarity_fn_name"] == theirs.similarity_fn_name == "maxsim"
    for ours, found in zip(model.encode(TEXTS, "query"), theirs.encode_query(TEXTS)):
        torch.testing.assert_close(torch.as_tensor(found), ours[:len(found)], atol=1e-5, rtol=0)
        assert not ours[len(found):].any()                                    # padding
    for name, content in (("1_Pooling", {"skiplist_words": ["."]}),
                          ("1_Pooling", {"keep_only_token_ids": [3]})):
        (folder / name / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="unsupported"):
            BiEncoder.from_pretrained(folder)


def test_a_checkpoint_of_an_adapter_loads_after_its_folder_was_renamed(tmp_path):
    """checkpoint.save writes beside the target, then renames; the tiny model's base is inside."""
    model, target = stir(tiny(lora_r=4)), tmp_path / "checkpoint-1"
    checkpoint.save(target, {"weights": {"a": torch.ones(1)}}, lambda folder: model.save_pretrained(
        folder / "model", place=target / "model"))
    assert verify(model, target / "model", {"query": SAMPLES, "document": SAMPLES}) <= 1e-5
    config = json.loads((target / "model/adapter_config.json").read_text())
    place = config["base_model_name_or_path"]
    assert place == str(target / "model/base")
    network = PeftModel.from_pretrained(AutoModel.from_pretrained(place), target / "model")
    torch.testing.assert_close(BiEncoder(network, model.processor).encode(SAMPLES),
                               model.encode(SAMPLES), atol=1e-5, rtol=0)


def test_saving_and_loading_print_no_bars_into_a_file(tmp_path, capfd, caplog):
    bars.enable_progress_bar()
    model, folder, samples = saved("bert", tmp_path, lora_r=4)
    capfd.readouterr()
    model.save_pretrained(tmp_path / "again", merge_lora=True)
    BiEncoder.from_pretrained(tmp_path / "again")
    verify(model, tmp_path / "again", samples)
    assert "it/s" not in capfd.readouterr().err and "prompt name" not in caplog.text
    assert bars.is_progress_bar_enabled()
    AutoModel.from_pretrained(tmp_path / "again")                             # they would
    assert "it/s" in capfd.readouterr().err


def test_a_terminal_keeps_the_bar_of_a_load(monkeypatch):
    bars.enable_progress_bar()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    with quiet(always=False):
        assert bars.is_progress_bar_enabled()
    with quiet():
        assert not bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    with quiet():
        pass
    assert not bars.is_progress_bar_enabled()
    bars.enable_progress_bar()


# --- The card -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, options, merge", [
    ("bert", {"query_prompt": "find: "}, False), ("bert", {"lora_r": 4}, False),
    ("qwen3", {"lora_r": 4}, True), ("qwen3", {"pooling": "tokens"}, False),
    ("qwen3_vl", {"query_prompt": "Find it"}, False), ("qwen3_vl", {"lora_r": 4}, False)])
def test_the_cards_programs_run_and_give_the_models_vectors(tmp_path, kind, options, merge):
    pytest.importorskip("sentence_transformers")
    model, _ = build(kind, tmp_path / "base", **options)
    text = card(stir(model), merged=merge)
    model.save_pretrained(tmp_path / "saved", merge, card=GIVEN)
    assert (tmp_path / "saved/README.md").read_text() == text and PATH in text
    theirs, ours, bare = programs(text, tmp_path / "saved")
    for code in (theirs, ours):
        values = {}
        exec(code, values)
        for side, name, given in (
                ("query", "queries", ["how do bees find home"]),
                ("document", "documents", ["Honey bees navigate by the sun.", "Rates rise."])):
            found = nn.utils.rnn.pad_sequence([torch.as_tensor(v) for v in values[name]], True)
            torch.testing.assert_close(found, model.encode(given, side), atol=1e-5, rtol=0)
    values = {}
    exec(bare, values)
    assert isinstance(values["network"], PeftModel) == bool(options.get("lora_r") and not merge)
    again = BiEncoder(values["network"], model.processor, pooling=model.pooling)
    again.prompts = model.prompts
    torch.testing.assert_close(again.encode(TEXTS), model.encode(TEXTS), atol=1e-5, rtol=0)


def test_the_card_says_what_the_model_is_and_what_it_was_told(tmp_path):
    model = tiny(lora_r=4, matryoshka_dims=[32, 16], query_prompt='a "quoted" `tick`\n```\n$x | é')
    arguments = {"lr": 1e-3, "model": "org/name", "note": "```\n# not a heading\n", "out": tmp_path}
    text = card(model, base="org/name", data="5 rows of bees", arguments=arguments, metrics={
        "before": {"step": 0, "eval_recall@10": 0.05, "loss": 7.0},
        "now": {"step": 500, "eval_recall@10": 0.34}})
    parsed = ModelCard(text)                                                  # the hub's own reader
    assert parsed.data.base_model == "org/name"
    assert parsed.data.library_name == "sentence-transformers"
    blocks = re.findall("```json\n(.*?)\n```\n", text, re.DOTALL)
    prompts, said = map(json.loads, blocks)
    assert prompts == model.prompts and said == arguments | {"out": str(tmp_path)}
    for line in ("- output: 64 numbers of length 1, or the first 32 or 16, divided by",
                 "- pooling: last; similarity: cosine", f"at most {model.max_length} tokens",
                 "Data: 5 rows of bees", "| held out | step 0 | step 500 |",
                 "| eval_recall@10 | 0.05 | 0.34 |", "a LoRA adapter", '{"image": PATH}'):
        assert line in text, line
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Embedding model", "## Use", "## Training"]


def test_the_card_claims_nothing_that_it_was_not_told(tmp_path):
    model, _ = build("bert", tmp_path / "base")
    text = card(model, base=str(tmp_path / "base"))
    assert "base_model" not in text and str(tmp_path) not in text and "- base: `base`" in text
    for claim in ("held out", "eval_", "image", "LoRA", "peft", "or the first", "recall"):
        assert claim not in text, claim
    assert "random weights" in card(model) and "weights: complete" in card(model)
    only = card(model, metrics={"before": None, "now": {"step": 9, "eval_accuracy": 0.5}})
    assert "| held out | step 9 |\n| --- | --- |\n| eval_accuracy | 0.5 |" in only


def test_an_adapters_folder_has_our_card_and_not_another(tmp_path):
    model, folder, _ = saved("bert", tmp_path, lora_r=4, card=GIVEN)
    assert (folder / "README.md").read_text() == card(model)
    shutil.rmtree(folder)
    model.save_pretrained(folder, merge_lora=True)
    assert not (folder / "README.md").exists()
