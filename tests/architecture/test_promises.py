"""What users build on does not change by accident: flags, public names, and every command the documents show."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from frozen import FLAGS, NAMES, ROOT, command_line, public_names

from meshwise.cli.flags import device_counts
from meshwise.cli.main import app
from meshwise.strategy import parse_list

_AGAIN = "if this change is meant, run python tests/architecture/frozen.py and say so in the commit"


def test_the_command_line_is_the_frozen_one() -> None:
    assert command_line() == FLAGS.read_text(encoding="utf-8"), _AGAIN


def test_the_public_names_are_the_frozen_ones() -> None:
    assert public_names() == NAMES.read_text(encoding="utf-8"), _AGAIN


def test_every_public_name_can_be_had() -> None:
    for line in public_names().split():
        module, _, name = line.rpartition(".")
        assert getattr(importlib.import_module(module), name) is not None


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]


def shown_commands(text: str) -> Iterator[str]:
    """``meshwise …`` lines of fenced blocks and of make recipes, continued lines joined."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    recipes = re.findall(r"^\t(.*)$", text, flags=re.MULTILINE)
    for line in [line for block in blocks for line in block.splitlines()] + recipes:
        command = re.match(r"\s*(?:\$ )?(?:\S*/)?(?:python -m )?meshwise (?!:)(.+)", line)
        if command:
            yield command[1]


def all_shown() -> list[str]:
    return [line for path in documents() if path.exists() for line in shown_commands(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("line", all_shown())
def test_every_command_the_documents_show_can_be_read(line: str) -> None:
    tokens = re.split(r"\s[|>]\s", line)[0]
    try:
        command, bound, _ = app.parse_args(
            shlex.split(tokens, comments=True), exit_on_error=False, print_error=False, help_on_error=False
        )
    except CycloptsError as error:
        pytest.fail(str(error))
    if "strategies" in bound.arguments:
        parse_list(list(bound.arguments["strategies"]))
    if command.__name__ == "survey" and "devices" in bound.arguments:
        device_counts(bound.arguments["devices"])


def test_the_search_for_commands_finds_them() -> None:
    text = "```console\n$ meshwise survey m \\\n    --steps 3\n```\n\n\t$(BIN)/meshwise report runs/a\nmeshwise runs\n"
    assert [line.split() for line in shown_commands(text)] == [["survey", "m", "--steps", "3"], ["report", "runs/a"]]
    assert any(line.startswith("survey") for line in all_shown())
