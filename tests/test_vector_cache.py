"""Document vectors on disk: computed once, found bit for bit, by any process, whatever ended it."""
import multiprocessing
import sqlite3
import time

import pytest
import torch
from torch import nn

from batches import VectorCache
from gradcache import grad_cache_step, has_trainable_weights
from model import BiEncoder
from tests.test_model import SAMPLES, stir, tiny


def forwards(monkeypatch):
    """Sizes of the chunks that a BiEncoder really encodes from now on."""
    sizes, forward = [], BiEncoder.forward
    monkeypatch.setattr(BiEncoder, "forward", lambda self, features, *rest: sizes.append(
        len(features)) or forward(self, features, *rest))
    return sizes


def documents(encoder, samples=SAMPLES):
    return [encoder.preprocess(sample, "document") for sample in samples]


def contrast(q, d):
    return nn.functional.cross_entropy(q @ d.T * 14, torch.arange(len(q)))


# --- with a model ---------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"lora_r": 4}, {"lora_r": 4, "dtype": "bf16"}])
def test_what_was_stored_comes_back_bit_for_bit_after_a_restart(tmp_path, monkeypatch, options):
    encoder = tiny(**options)
    features, cache = documents(encoder), VectorCache(tmp_path / "new/vectors.db")
    frozen = encoder.frozen_start(cache)
    stored = frozen(features)
    assert torch.equal(stored, encoder.frozen_start()(features))            # the same chunk
    sizes = forwards(monkeypatch)
    stir(encoder)                                               # it trains; the start does not
    assert torch.equal(frozen(features[::-1]), stored.flip(0))
    again = tiny(**options).frozen_start(VectorCache(cache.path))           # as in another run
    assert torch.equal(again(features), stored) and not stored.requires_grad
    assert sizes == [] and (cache.found, cache.computed) == (6, 6)


def test_only_what_is_missing_is_encoded(tmp_path, monkeypatch):
    encoder, cache = tiny(lora_r=4), VectorCache(tmp_path / "vectors.db")
    features = documents(encoder)
    frozen, plain = encoder.frozen_start(cache), encoder.frozen_start()(features)
    sizes = forwards(monkeypatch)
    frozen([features[1], features[4]])
    torch.testing.assert_close(frozen(features), plain, atol=1e-6, rtol=0)
    assert sizes == [2, 4]
    short = frozen(features, 16)
    torch.testing.assert_close(short, nn.functional.normalize(plain[:, :16], dim=1), atol=1e-6,
                               rtol=0)
    assert sizes == [2, 4]


def test_another_weight_setting_or_sample_is_another_vector(tmp_path):
    def computed(encoder, samples=("fox",), cache=VectorCache(tmp_path / "vectors.db")):
        before = cache.computed
        encoder.frozen_start(cache)(documents(encoder, samples))
        return cache.computed - before
    assert computed(tiny()) == 1
    assert computed(tiny(lora_r=4)) == computed(stir(tiny(lora_r=4))) == 0      # the same base
    assert computed(tiny(max_length=99, freeze_vision=True)) == 0               # the same vector
    nudged = tiny()
    with torch.no_grad():
        nudged.backbone.language_model.norm.weight[3] += 1e-6
    assert computed(nudged) == 1
    assert computed(tiny(pooling="mean")) == computed(tiny(dtype="bf16")) == 1
    assert computed(tiny(lora_r=4, dtype="bf16")) == 1          # here the base is stored in bf16
    assert computed(tiny(), ["foxes"]) == computed(tiny(document_prompt="See"), ["fox"]) == 1
    image = SAMPLES[4]["image"].copy()
    assert computed(tiny(), [{"image": image}]) == 1
    image.putpixel((0, 0), (254, 0, 0))
    assert computed(tiny(), [{"image": image}, SAMPLES[4]]) == 1        # the other is found


def test_a_cached_tower_gives_the_gradient_and_leaves_the_kept_graph_to_the_queries(
        tmp_path, monkeypatch):
    encoder, cache = stir(tiny(lora_r=4, lora_dropout=0.1)).train(), VectorCache(tmp_path / "v.db")
    towers = [[encoder.preprocess(s, side) for s in SAMPLES] for side in ("query", "document")]

    def gradient(frozen, keep=1):
        encoder.zero_grad()
        torch.manual_seed(3)
        grad_cache_step([encoder, frozen], towers, contrast, 2, keep=keep)
        return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.requires_grad])
    expected = gradient(encoder.frozen_start(), keep=99)
    frozen = encoder.frozen_start(cache)
    sizes = forwards(monkeypatch)
    for documents_encoded in (3, 0):                            # chunks; then found
        torch.testing.assert_close(gradient(frozen), expected, atol=1e-6, rtol=1e-5)
        assert len(sizes) == 3 + documents_encoded + 2          # of 3 query chunks 2 are replayed
        sizes.clear()
    for start in (frozen, encoder.frozen_start(), tiny().frozen_start()):
        assert isinstance(start, nn.Module) and not start.state_dict()
        assert not [*start.parameters(), *start.children()]
        assert has_trainable_weights(start) is False


def test_vectors_of_tokens_keep_their_lengths(tmp_path):
    encoder, cache = tiny(pooling="tokens"), VectorCache(tmp_path / "vectors.db")
    features = documents(encoder)
    frozen, plain = encoder.frozen_start(cache), encoder.frozen_start()
    frozen(features)
    for chunk in (features, features[1:2], features[:2]):       # padded to this chunk's longest
        found = frozen(chunk)
        assert found.shape == (len(chunk), max(len(f["input_ids"]) for f in chunk), encoder.dim)
        torch.testing.assert_close(found, plain(chunk), atol=1e-6, rtol=0)
    assert cache.computed == len(features)
    with sqlite3.connect(cache.path) as file:                   # and no padding was stored
        sizes = {length for length, in file.execute("SELECT length(vector) FROM vectors")}
    assert sizes == {4 * encoder.dim * len(f["input_ids"]) for f in features}


# --- the file -------------------------------------------------------------------------------------

def sample(number):
    return {"input_ids": torch.tensor([number])}


def vectors(samples):
    """What the encoder of these tests gives: 1000 numbers that tell which sample they are of."""
    return torch.stack([torch.arange(1000.0) + s["input_ids"] for s in samples])


def fill(path, numbers):
    cache = VectorCache(path)
    for number in numbers:
        cache.through(vectors, "model", [sample(number), sample(number + 1)])


def rows(path):
    """How many rows a sound file has; each must hold its own vector."""
    with sqlite3.connect(path) as file:
        count, = file.execute("SELECT count(*) FROM vectors").fetchone()
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    samples = [sample(number) for number in range(count)]
    cache = VectorCache(path)
    assert torch.equal(cache.through(vectors, "model", samples), vectors(samples))
    return cache.found


def start(*arguments):
    process = multiprocessing.get_context("fork").Process(target=fill, args=arguments, daemon=True)
    process.start()
    return process


def test_several_processes_fill_one_file(tmp_path):
    team = [start(tmp_path / "v.db", range(first, 60 + first, 2)) for first in (0, 0, 20, 40)]
    for process in team:
        process.join(60)
        assert process.exitcode == 0
    assert rows(tmp_path / "v.db") == 100


def test_the_vector_that_came_first_stays(tmp_path):
    def overtaken(samples):
        fill(tmp_path / "v.db", [0])
        return vectors(samples) + 0.5
    cache = VectorCache(tmp_path / "v.db")
    assert torch.equal(cache.through(overtaken, "model", [sample(0)]), vectors([sample(0)]) + 0.5)
    assert rows(tmp_path / "v.db") == 2


def test_kill_9_leaves_whole_vectors(tmp_path):
    path, before = tmp_path / "v.db", 0
    fill(path, [0])
    for _ in range(8):
        process = start(path, range(0, 10**6, 2))
        enough, deadline = path.stat().st_size + 50_000, time.monotonic() + 30
        while path.stat().st_size < enough and time.monotonic() < deadline:     # it writes
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -9
        found = rows(path)
        assert found > before and found % 2 == 0                # each transaction held two
        before = found


def test_a_damaged_file_is_named_with_the_remedy(tmp_path):
    path, numbers = tmp_path / "v.db", range(0, 40, 2)
    fill(path, numbers)
    sound = path.read_bytes()
    at = sound.find(vectors([sample(7)])[0, 100:300].numpy().tobytes())
    flipped = sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1:]
    for content in (b"no database at all" * 99, sound[:len(sound) // 2], flipped):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"v\.db is damaged.*delete it"):
            fill(path, numbers)
    path.unlink()
    fill(path, numbers)
    assert rows(path) == 40


def test_what_cannot_be_stored_or_opened_is_an_error(tmp_path):
    cache = VectorCache(tmp_path / "v.db")
    with pytest.raises(ValueError, match="float64"):
        cache.through(lambda samples: vectors(samples).double(), "model", [sample(0)])
    with pytest.raises(OSError, match="unable to open"):
        VectorCache(tmp_path)                                   # a folder
    with sqlite3.connect(cache.path) as file:
        assert file.execute("SELECT count(*) FROM vectors").fetchone() == (0,)


def test_names_are_the_same_in_every_run_and_tell_all_else_apart():
    ones = torch.ones(2, 2, dtype=torch.bfloat16)
    parts = ("a", torch.arange(3), ones)
    assert VectorCache.name(*parts) == "3bdb8b6fdb793510bb674e3acf017c32"
    assert VectorCache.name("a", torch.arange(6)[:3], ones.T) == VectorCache.name(*parts)
    others = [("a", torch.arange(4), ones), ("a", torch.arange(3), ones.view(4)), ("a", ones),
              ("b", torch.arange(3), ones), ("a", torch.zeros(3)), ("a", torch.zeros(3).int()), ()]
    assert len({VectorCache.name(*parts) for parts in [parts, *others]}) == 8
