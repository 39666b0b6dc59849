"""The architecture, as tests: layers, sizes, where numbers and imports may be."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from frozen import ROOT, SOURCE

FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400
HEAVY = ("torch", "torchvision", "transformers", "numpy", "altair", "sklearn", "pydantic")
POWERS = (1e3, 1e6, 1e9, 1e12, 1e15)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_package_imports_only_what_lies_below_it() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run(
        [program, "--config", "pyproject.toml", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_a_user_can_cause_is_an_assert(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "units.py"], ids=relative)
def test_powers_of_ten_and_of_1024_are_in_units_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(_powers(tree)) == [], "use meshwise.units.parse or show"


def _powers(tree: ast.AST) -> Iterator[str]:
    """Conversions between prefixes: 1e6, x * 1000, x / 1024, 1024**2, 2**20, 1 << 20."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value in POWERS:
            yield f"line {node.lineno}: {node.value:g}"
        if isinstance(node, ast.BinOp):
            yield from _power_of(node)


def _power_of(node: ast.BinOp) -> Iterator[str]:
    left, right = (part.value if isinstance(part, ast.Constant) else None for part in (node.left, node.right))
    scaled = isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv) and {left, right} & {1000, 1024, 1_000_000, 1024**2}
    raised = isinstance(node.op, ast.Pow) and (left in (10, 1000, 1024) or (left == 2 and right in (10, 20, 30, 40)))
    shifted = isinstance(node.op, ast.LShift) and right in (10, 20, 30, 40)
    if scaled or raised or shifted:
        yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("text", ["1e6", "x * 1000", "1024 ** 2", "2**20", "25 * 2**20", "1 << 30", "n // 1024"])
def test_the_search_for_powers_finds_them(text: str) -> None:
    assert list(_powers(ast.parse(text)))


def loaded_after(code: str) -> set[str]:
    """Top-level modules in memory after ``code`` ran in a fresh interpreter."""
    program = f"import sys\n{code}\nsys.stderr.write(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(found.stderr.split())


def test_importing_meshwise_imports_nothing_heavy() -> None:
    assert loaded_after("import meshwise").isdisjoint(HEAVY)


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = "from meshwise.cli.main import run\nrun(['--help'])\nassert 'meshwise.cli.survey' not in sys.modules"
    assert loaded_after(code).isdisjoint(HEAVY)


@pytest.mark.parametrize("line", [["survey", "--help"], ["strategies"], ["run", "x", "--strategy", "zerro"]])
def test_commands_that_train_nothing_never_import_torch(line: list[str]) -> None:
    code = f"from meshwise.cli.main import run\nrun({line!r})\nsys.stderr.write(chr(10))"
    assert loaded_after(code).isdisjoint(("torch", "torchvision", "transformers", "altair"))


def test_the_pure_layers_never_import_torch() -> None:
    code = "import meshwise.strategy, meshwise.strategy.legal, meshwise.record, meshwise.units, meshwise.report.table"
    assert loaded_after(code).isdisjoint(("torch", "torchvision", "transformers"))


def test_help_answers_at_once() -> None:
    """Within 0.25 s on an idle core. Processor time, best of five: the machine that runs tests is seldom idle."""
    program = Path(sys.executable).with_name("meshwise")
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([program, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.25
