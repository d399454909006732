"""One thread per process. Several tests fork, and a child forked from a process whose OpenMP
threads have run waits for them for ever; and on two cores, several processes with two threads
each crawl."""
import pytest
import torch

from model import BiEncoder, tiny_qwen3_vl

torch.set_num_threads(1)

TEXTS = [f"{a} {b} {c}" for a in ("read", "write", "close") for b in ("the file", "a socket")
         for c in ("slowly", "at once", "and return its name")]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of two tiny models that know the words of TEXTS; the second has other weights."""
    paths = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, path in enumerate(paths):
        BiEncoder(*tiny_qwen3_vl(TEXTS, vocab_size=400, hidden=64, seed=seed)).save_pretrained(path)
    return [str(path) for path in paths]
