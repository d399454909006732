"""The promises about the code itself: layout, sizes, imports, explanations. Each one can fail."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
ROOT = sorted(HERE.glob("*.py"))
EXTRAS = sorted((HERE / "extras").glob("*.py"))
TESTS = sorted((HERE / "tests").glob("*.py"))
ON_THE_CARD = {"losses", "supervised_losses", "gradcache", "dist", "model", "export", "data",
               "batches", "checkpoint", "flags", "objectives", "step", "train"}
CONCEPTS = {"gradcache.py", "losses.py", "supervised_losses.py", "dist.py"}


def names(paths):
    return [path.name for path in paths]


def imported(path):
    """Top-level names of the modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def explaining(path):
    """How many of a file's lines are comments or docstrings."""
    text = path.read_text()
    count = sum(line.strip().startswith("#") for line in text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            count += len(docstring.splitlines()) if docstring else 0
    return count


def test_the_root_is_what_the_card_draws():
    assert {path.stem for path in ROOT} <= ON_THE_CARD
    assert (HERE / "tests/__init__.py").read_text() == ""


@pytest.mark.parametrize("path", ROOT + EXTRAS + TESTS, ids=names(ROOT + EXTRAS + TESTS))
def test_files_are_short_and_lines_fit(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 450, f"{path.name} has {len(lines)} lines"
    wide = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"{path.name}: lines over 100 characters: {wide}"


def test_a_quarter_of_the_root_explains():
    texts = {path: path.read_text().splitlines() for path in ROOT}
    share = sum(explaining(path) for path in ROOT) / sum(map(len, texts.values()))
    assert share >= 0.25, f"{share:.0%} of the root explains"


@pytest.mark.parametrize("path", ROOT, ids=names(ROOT))
def test_two_fifths_of_the_concepts_explain_and_no_file_is_bare(path):
    share = explaining(path) / len(path.read_text().splitlines())
    assert share >= (0.40 if path.name in CONCEPTS else 0.18), f"{path.name}: {share:.1%} explains"


@pytest.mark.parametrize("path", ROOT, ids=names(ROOT))
def test_import_depth_is_one(path):
    """A concept stands alone; only wiring imports: train.py all of them, and objectives.py, the
    part of it between rows, batches and their loss, and step.py, a step of it, what they take. One
    exception: model.py reads and writes a folder, and export.py knows what is in it.
    """
    allowed = {"train.py": ON_THE_CARD - {"train"}, "model.py": {"export"},
               "step.py": {"objectives", "dist", "gradcache"},
               "objectives.py": {"losses", "supervised_losses", "dist", "batches",
                                 "flags"}}.get(path.name, set())
    assert imported(path) & (ON_THE_CARD | {"extras", "tests"}) <= allowed


@pytest.mark.parametrize("path", EXTRAS, ids=names(EXTRAS))
def test_extras_import_the_root_and_not_each_other(path):
    assert not imported(path) & ({e.stem for e in EXTRAS} | {"extras", "tests"})


def test_only_dist_names_torch_distributed():
    for path in set(ROOT + EXTRAS) - {HERE / "dist.py"}:
        assert "torch.distributed" not in path.read_text(), path.name


def test_gradcache_imports_torch_and_the_standard_library_only():
    assert imported(HERE / "gradcache.py") <= {"torch"} | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", ROOT + EXTRAS, ids=names(ROOT + EXTRAS))
def test_nothing_runs_at_import(path):
    """Top level: docstring, imports, definitions, constants, and the main guard."""
    for node in ast.parse(path.read_text()).body:
        guard = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        assert guard or isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef,
                                          ast.Assign, ast.AnnAssign, ast.Expr)), ast.unparse(node)
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), ast.unparse(node)


@pytest.mark.parametrize("path", ROOT, ids=names(ROOT))
def test_every_root_module_says_where_it_stands_in_the_reading_order(path):
    first = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    assert re.search(r"Read \d of 8", first), f"{path.name} opens with {first!r}"


@pytest.mark.parametrize("path", ROOT, ids=names(ROOT))
def test_public_functions_of_the_root_are_documented(path):
    bare = [node.name for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            and not ast.get_docstring(node) and len(ast.unparse(node).splitlines()) > 6]
    assert not bare, f"{path.name}: {bare}"


def test_requirements_have_a_reason_and_a_lower_bound():
    for line in (HERE / "requirements.txt").read_text().splitlines():
        assert re.fullmatch(r"[\w-]+>=[\d.]+ +# \S.*", line), line


def test_deleting_extras_changes_nothing_in_the_root():
    code = "import sys; sys.modules['extras'] = None; import train; train.parse_args([])"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
