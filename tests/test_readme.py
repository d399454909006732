"""What the README prints is what the code does: its snippets run, its files and flags exist."""
import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers

import flags
import train
from gradcache import grad_cache_step
from losses import LogitScale, clip_loss
from model import BiEncoder, tiny_qwen3_vl

HERE = Path(__file__).parent.parent
TEXT = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line.strip().split("   #")[0] for line in re.sub(r" \\\n *", " ", TEXT).splitlines()
            if re.match(r"    (python|torchrun) .*", line)]


def printed_by(function, *args):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args)
    return out.getvalue()


def test_the_first_snippet_prints_what_stands_below_it():
    expected = BLOCKS[BLOCKS.index(("python", PYTHON[0])) + 1]
    assert expected[0] == "" and printed_by(exec, PYTHON[0], {}) == expected[1]


class Tower(torch.nn.Linear):
    """What both trainers are given: a model whose `encode` makes unit vectors."""

    def encode(self, x):
        return torch.nn.functional.normalize(self(x), dim=-1)


def after_plain_steps(batches):
    """The tower after a full-batch step of SGD with rate 0.5 on each."""
    tower, scale = new_tower(), LogitScale(learnable=False)
    for query, document in batches:
        tower.zero_grad()
        clip_loss(tower.encode(query), tower.encode(document), scale).backward()
        tower.weight.data -= 0.5 * tower.weight.grad
    return tower


def new_tower():
    torch.manual_seed(0)
    return Tower(16, 8, bias=False)


def snippet(words, **names):
    """The class that a snippet of the README defines, with these names in its reach."""
    code, = [code for code in PYTHON if words in code]
    names |= {"grad_cache_step": grad_cache_step, "clip_loss": clip_loss}
    exec(code if code.startswith("class") else "class Module(Base):\n" + code, names)
    return names["ContrastiveTrainer" if code.startswith("class") else "Module"]


def test_the_trainer_of_transformers_takes_the_plain_steps(tmp_path):
    batches = [(torch.randn(24, 16), torch.randn(24, 16)) for _ in range(2)]

    class Rows(torch.utils.data.IterableDataset):                  # which nobody shuffles
        def __iter__(self):
            yield from ({"query": q, "document": d} for batch in batches for q, d in zip(*batch))
    options = {"output_dir": tmp_path, "max_steps": 2, "per_device_train_batch_size": 24,
               "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant",
               "max_grad_norm": 0.0, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
               "use_cpu": True, "remove_unused_columns": False}     # as the README says

    def trained(**more):
        arguments = transformers.TrainingArguments(**options | more)
        trainer = snippet("Trainer", Trainer=transformers.Trainer)(new_tower(), arguments,
                                                                   train_dataset=Rows())
        trainer.scale = LogitScale(learnable=False)
        trainer.train()
        return trainer.model.weight
    assert torch.allclose(trained(), after_plain_steps(batches).weight, atol=1e-6)
    start = new_tower().weight                                      # the mean over both batches:
    mean = sum(after_plain_steps([batch]).weight - start for batch in batches) / 2
    assert torch.allclose(trained(max_steps=1, gradient_accumulation_steps=2), start + mean,
                          atol=1e-6)


def test_the_lightning_module_takes_the_plain_steps():
    """Lightning itself is not needed to see it: what the step asks of it is `optimizers()`."""
    batches = [(torch.randn(24, 16), torch.randn(24, 16)) for _ in range(2)]
    module = snippet("optimizers", Base=object)()
    tower, module.scale = new_tower(), LogitScale(learnable=False)
    sgd, module.encoder = torch.optim.SGD(tower.parameters(), lr=0.5), tower.encode
    module.optimizers = lambda: sgd
    for query, document in batches:
        loss = module.training_step({"query": query, "document": document}, 0)
    assert torch.allclose(tower.weight, after_plain_steps(batches).weight, atol=1e-6)
    before = after_plain_steps(batches[:1])
    assert loss.item() == pytest.approx(clip_loss(*map(before.encode, batches[1]),
                                                  module.scale).item(), rel=1e-5)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_every_flag_of_every_command_exists(command):
    words = shlex.split(command)
    flags.parse_args([w for w in words[words.index("train.py") + 1:] if w != "FLAGS"])


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m extras." in c])
def test_every_flag_of_the_programs_beside_exists(command):
    _, _, module, *argv = shlex.split(command)
    importlib.import_module(module).parse_args(argv)


def test_what_was_saved_is_used_as_shown(tmp_path, monkeypatch):
    """With a model that stands for the one that the quick start saves."""
    pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    model = BiEncoder(*tiny_qwen3_vl(hidden=32, layers=1, heads=2, vocab_size=300))
    model.save_pretrained("output/final")
    code, = [code for code in PYTHON if "SentenceTransformer" in code]
    names = {}
    assert printed_by(exec, code, names) == "torch.Size([1, 2])\n"
    ours = model.encode(["Return the current time in seconds."], "query", progress=False)
    assert torch.allclose(torch.as_tensor(names["queries"]), ours, atol=1e-5)


def test_every_extra_that_is_named_exists():
    for name in re.findall(r"python -m extras\.(\w+)", TEXT):
        assert (HERE / "extras" / f"{name}.py").is_file(), name


def test_every_link_and_every_test_file_exists():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    for path in links + re.findall(r"tests/\w+\.py", TEXT):
        assert (HERE / path).exists(), path


def test_the_quick_start_prints_these_lines(tmp_path):
    """Same lines, same words; the numbers are those of the machine and Python that ran it."""
    def shape(text):
        return [re.sub(r"\d[\d.,]*(e[+-]\d+)?", "#", line).split() for line in text.splitlines()]
    argv = ["--batch-size", "8", "--grad-cache-chunk", "2", "--max-steps", "2",
            "--output-dir", str(tmp_path / "output")]
    got = shape(printed_by(train.main, argv))
    shown = shape(next(code for language, code in BLOCKS if "held out" in code))
    for line in got[:-1]:                                # the last one names the output folder
        assert line in shown, line
    assert {line[0] for line in shown} == {line[0] for line in got} | {"..."}


def test_check_grads_prints_this_line():
    shown = next(code for language, code in BLOCKS if "norm ratio" in code)
    assert "equal" in shown and re.search(r"cosine 1\.0000|cosine 0\.9999", shown)
