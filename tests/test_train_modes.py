"""What the flags choose: frozen documents, adapters, bf16, images, offline data, --check-grads."""
import copy
import functools
import re
from pathlib import Path

import pytest
import torch

import data
import gradcache
import train
from model import BiEncoder
from objectives import batch_loss
from tests.runs import (  # noqa: F401
    difference, equal, fit, log, losses, moments, pairs, tiny, use_float64, weights, write_rows)

pytestmark = pytest.mark.usefixtures("tiny")
LORA = ("--lora-r", 2, "--lora-dropout", 0.2)



# --- Query-side tuning ---------------------------------------------------------------------------

@pytest.fixture
def towers(monkeypatch):
    """What `evaluate` is given: [(model, [query encoder, document encoder]), ...]."""
    seen, evaluate = [], train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda model, encoders, *rest:
                        seen.append((model, encoders)) or evaluate(model, encoders, *rest))
    return seen


@pytest.mark.parametrize("lora", [(), ("--lora-r", 2)])
def test_both_ways_back_through_the_queries_give_the_same_run(lora, monkeypatch):
    use_float64(monkeypatch)
    for way in ("direct", "gradcache"):
        fit("--mode", "query-side-tune", "--query-side-backward", way, *lora, "--max-steps", 4,
            "--warmup-steps", 0, out=way)
    assert losses("direct") == pytest.approx(losses("gradcache"), abs=1e-6)
    assert difference(weights("direct"), weights("gradcache")) < 1e-9
    fit(*lora, "--max-steps", 4, "--warmup-steps", 0, out="standard")       # a mode of its own
    assert difference(weights("direct"), weights("standard")) > 1e-4


@pytest.mark.parametrize("lora", [(), LORA])
def test_documents_keep_the_starting_models_vectors_while_queries_move(lora, towers):
    texts = [row["positive"] for row in pairs(6)]
    flags = ("--mode", "query-side-tune", "--eval-jsonl", "pairs.jsonl", "--warmup-steps", 0)
    args = train.parse_args(list(map(str, [*flags, *lora, "--train-jsonl", "pairs.jsonl"])))
    start = train.build_model(args, data.read_pairs("pairs.jsonl"))
    fit(*flags, *lora, "--eval-steps", 0)
    model, (query, document) = towers[-1]

    def vectors(encoder):
        return model.encode(texts, "document", progress=False, encoder=encoder)
    assert torch.equal(vectors(document), start.encode(texts, "document", progress=False))
    assert (vectors(query) - vectors(document)).norm(dim=1).min() > 1e-3
    # Still so after going on from a checkpoint: the frozen tower is the start, not the saved one.
    Path("out/checkpoint-6").rename("checkpoint-6")
    fit(*flags, *lora, "--resume", "checkpoint-6", out="again")
    assert (log("again") == []) and not torch.equal(vectors(query), vectors(document))
    fit(*flags, *lora, "--max-steps", 7, "--resume", "checkpoint-6", "--allow-changed-flags",
        out="more")
    model, (query, document) = towers[-1]
    assert torch.equal(vectors(document), start.encode(texts, "document", progress=False))


def test_only_queries_are_encoded_with_a_graph(monkeypatch):
    encode, seen = BiEncoder.forward, set()

    def watch(self, features, *rest):
        vectors = encode(self, features, *rest)
        prompt_of_documents = len(features) == 3
        seen.add((prompt_of_documents, vectors.requires_grad))
        return vectors
    monkeypatch.setattr(BiEncoder, "forward", watch)
    write_rows("pairs.jsonl", pairs(4, 2))              # 4 queries in chunks of 4, 12 documents: 3
    fit("--mode", "query-side-tune", "--num-hard-negatives", 2, "--grad-cache-chunk", 3,
        "--max-steps", 1)
    assert seen == {(False, True), (True, False)}


# --- Adapters and precision ----------------------------------------------------------------------

def test_adapters_learn_with_dropout_under_activation_checkpointing_as_without():
    flags = (*LORA, "--warmup-steps", 0, "--max-steps", 3, "--keep-graphs", 0)
    fit(*flags, out="plain")
    fit(*flags, "--gradient-checkpointing", out="checkpointed")
    found = weights("checkpointed")
    assert difference(found, weights("plain")) < 1e-6
    assert losses("checkpointed") == pytest.approx(losses("plain"), abs=1e-6)
    adapters = {name: w for name, w in found.items() if "lora_B" in name}
    assert adapters and all(w.abs().sum() > 0 for w in adapters.values())   # zero at the start
    assert set(found) == {n for n in found if "lora_" in n} | {"loss.log_scale"}
    assert not any("visual" in name for name in found)


def test_bf16_runs_and_what_trains_stays_in_float32(monkeypatch):
    dtypes, seen = [], []
    build = train.build_model
    monkeypatch.setattr(train, "build_model", lambda *a: seen.append(build(*a)) or seen[-1])
    linear = torch.nn.functional.linear

    def watch(*inputs):
        output = linear(*inputs)
        dtypes.append(output.dtype)
        return output
    monkeypatch.setattr(torch.nn.functional, "linear", watch)
    for lora in ((), LORA):
        fit("--dtype", "bf16", *lora, "--warmup-steps", 0, "--max-steps", 3, out=f"out{len(lora)}")
        found = weights(f"out{len(lora)}")
        assert {w.dtype for w in found.values()} == {torch.float32}
        assert {m.dtype for m in moments(f"out{len(lora)}")} == {torch.float32}
        assert all(abs(loss) < 10 for loss in losses(f"out{len(lora)}"))
    assert set(dtypes) == {torch.bfloat16}              # the forward really was in half precision
    frozen = {p.dtype for p in seen[-1].parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16} and seen[-1].training


def test_a_model_from_a_folder_trains_all_of_it_in_train_mode(monkeypatch):
    """Pretrained models arrive in eval mode, in which nothing but new adapters drops out."""
    fit("--max-steps", 1, out="start")
    encode, modes = BiEncoder.forward, []
    monkeypatch.setattr(BiEncoder, "forward", lambda self, features, *rest: modes.append(
        {part.training for part in self.modules()}) or encode(self, features, *rest))
    fit("--model", "start/final", *LORA, "--max-steps", 1, "--eval-jsonl", "pairs.jsonl")
    assert [mode for i, mode in enumerate(modes) if modes[i - 1:i] != [mode]] == [
        {False}, {True}, {False}]                       # evaluation, step, evaluation


def test_every_flag_of_the_model_reaches_it(monkeypatch):
    given = {"pooling": "mean", "lora_r": 3, "lora_alpha": 5, "lora_dropout": 0.25,
             "lora_vision": True, "max_length": 77, "dtype": "bf16", "max_num_visual_tokens": 9,
             "query_prompt": "ask", "document_prompt": "answer", "gradient_checkpointing": True,
             "attention": "eager", "compile": True}
    flags = [[f"--{name.replace('_', '-')}"] + [str(value)] * (value is not True)
             for name, value in given.items()]
    args = train.parse_args(["--model", "somewhere", *sum(flags, [])])
    monkeypatch.setattr(BiEncoder, "from_pretrained", lambda name, **options: (name, options))
    assert train.build_model(args, []) == ("somewhere", {
        **given, "matryoshka_dims": None, "load_image": data.load_image,
        "trust_remote_code": False})


# --- Images and offline data ---------------------------------------------------------------------

@pytest.fixture
def features(monkeypatch):
    """The batches of a run as they reach the loss."""
    seen, make = [], batch_loss
    monkeypatch.setattr("step.batch_loss", lambda batch, *rest: seen.append(batch) or
                        make(batch, *rest))
    return seen


def test_documents_become_page_images_and_queries_stay_text(features):
    fit("--documents", "image", "--max-num-visual-tokens", 12, "--num-hard-negatives", 1,
        "--max-steps", 2, "--batch-size", 2, "--eval-jsonl", "pairs.jsonl", "--eval-steps", 0)
    for batch in features:
        assert not any("pixel_values" in query for query in batch["queries"])
        assert len(batch["documents"]) == 4
        for document in batch["documents"]:
            assert document["image_grid_thw"].prod() == len(document["pixel_values"]) <= 12 * 4
    pages = {hash(d["pixel_values"].numpy().tobytes()) for b in features for d in b["documents"]}
    assert len(pages) == 8 and len(log()) == 4          # each page is another one


def test_the_shapes_train_without_any_file(monkeypatch, features):
    few = data.offline_pairs("shapes")
    few = [rows[:number] for rows, number in zip(few, (12, 5))]
    monkeypatch.setattr(train, "offline_pairs", lambda name, **options: copy.deepcopy(few)
                        if name == "shapes" else pytest.fail(name))
    status = train.main("--offline-data shapes --max-steps 2 --output-dir out".split())
    assert status == 0 and [row["step"] for row in log()] == [0, 1, 2, 2]
    assert all(len(d["pixel_values"]) == 36 for batch in features for d in batch["documents"])


def test_offline_data_is_chosen_and_masked_as_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(train, "offline_pairs", lambda name, mask_names, progress: asked.append(
        (name, mask_names)) or (pairs(8), pairs(3)))
    train.main("--max-steps 1 --output-dir a".split())
    train.main("--max-steps 1 --output-dir b --mask-names".split())
    assert asked == [("stdlib", False), ("stdlib", True)]


def test_held_out_rows_never_train_and_teach_the_tokenizer_nothing(monkeypatch, features):
    taught, make = [], train.tiny_qwen3_vl
    monkeypatch.setattr(train, "tiny_qwen3_vl", lambda texts, **options: taught.extend(texts) or
                        make(texts, **options))
    write_rows("heldout.jsonl", [{"query": "zzz query", "positive": "zzz document"}, *pairs(1)])
    fit("--eval-jsonl", "heldout.jsonl", "--max-steps", 1)
    assert len(taught) == 46 and not any("zzz" in text for text in taught)


def test_no_duplicates_keeps_texts_apart_and_counts_its_steps(features):
    rows = pairs(12)
    for row in rows[:3]:
        row["positive"] = "the same"
    write_rows("pairs.jsonl", rows)
    fit("--no-duplicates", "--epochs", 2)
    for batch in features:
        assert len(set(batch["document_ids"].tolist())) == 4
    assert len(losses()) == len(features) == sum(
        train.Batches(rows, None, 4, no_duplicates=True).steps_in(epoch) for epoch in (0, 1))


# --- Is it the same gradient? --------------------------------------------------------------------

@pytest.mark.parametrize("flags", [
    (), LORA, ("--mode", "query-side-tune"), ("--chunk-tokens", 200), ("--keep-graphs", 0),
    ("--mode", "query-side-tune", "--query-side-backward", "gradcache", *LORA)])
def test_check_grads_confirms_the_contract_and_leaves_nothing(flags, capsys):
    assert fit("--check-grads", "--num-hard-negatives", 1, *flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines()
                if line.startswith("gradient "))
    assert "cosine 1.0000" in line and line.endswith("equal") and "replay error 0.0e+00" in line
    assert not Path("out").exists()


def scaled(step, factor, *args, grad_scale, **options):
    return step(*args, grad_scale=factor * grad_scale, **options)


def forgets_a_chunk(backward, count, loss):
    """Every third backward is lost."""
    count.append(1)
    if len(count) % 3:
        backward(loss)


@pytest.mark.parametrize("factor, cosine", [(1.001, "1.0000"), (-1.0, "-1.0000")])
def test_check_grads_fails_for_a_factor_and_for_a_direction(factor, cosine, monkeypatch, capsys):
    """The cosine cannot see the first, the norm ratio not the second."""
    monkeypatch.setattr("step.grad_cache_step", functools.partial(
        scaled, gradcache.grad_cache_step, factor))
    assert fit("--check-grads") == 1
    line = next(line for line in capsys.readouterr().out.splitlines()
                if line.startswith("gradient "))
    ratio = float(re.search(r"norm ratio (\S+)", line)[1])
    assert line.endswith("NOT EQUAL") and f"cosine {cosine}" in line
    assert ratio == pytest.approx(abs(factor), abs=1e-5)


def test_check_grads_fails_for_a_lost_chunk(monkeypatch, capsys):
    monkeypatch.setattr(gradcache, "backward", functools.partial(
        forgets_a_chunk, gradcache.backward, []))
    assert fit("--check-grads") == 1 and "NOT EQUAL" in capsys.readouterr().out


def test_check_grads_fails_for_an_encoder_that_does_not_repeat_itself(monkeypatch, capsys):
    encode, calls = BiEncoder.forward, []

    def drifting(self, features, *rest):
        calls.append(1)
        return encode(self, features, *rest) * (1 + 1e-4 * len(calls) * self.training)
    monkeypatch.setattr(BiEncoder, "forward", drifting)
    assert fit("--check-grads") == 1
    line = next(line for line in capsys.readouterr().out.splitlines()
                if line.startswith("gradient "))
    assert "cosine 1.0000" in line and "replay error 0.0e+00" not in line


def test_check_grads_may_look_at_a_used_folder():
    fit("--max-steps", 1)
    before = weights()
    assert fit("--check-grads") == 0 and fit("--check-grads", "--resume", "auto") == 0
    assert equal(before, weights())
