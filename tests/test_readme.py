"""What the README prints is what the code does: its snippets run, its files and flags exist."""
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

import flags
import train

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


@pytest.mark.parametrize("code", PYTHON[1:])
def test_the_other_snippets_are_python(code):
    compile(code if code.startswith("class") else "class Module:\n" + code, "README.md", "exec")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_every_flag_of_every_command_exists(command):
    words = shlex.split(command)
    flags.parse_args([w for w in words[words.index("train.py") + 1:] if w != "FLAGS"])


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
