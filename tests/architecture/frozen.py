"""What must not change by accident, as text. ``python tests/architecture/frozen.py`` writes it anew."""

from __future__ import annotations

import ast
import typing
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src" / "meshwise"
FLAGS, NAMES = HERE / "command_line.txt", HERE / "public_names.txt"
PUBLIC_PACKAGES = (".", "strategy")


def command_line() -> str:
    """Every command with its arguments, flags, types and defaults."""
    from meshwise.cli.main import app

    lines = []
    for command in ("survey", "run", "verify", "report", "strategies"):
        lines.append(f"meshwise {command}")
        for argument in app[command].assemble_argument_collection():
            if not argument.parse or argument.children:
                continue
            default = argument.field_info.default
            shown = "" if default is argument.field_info.empty else f" = {default!r}"
            lines.append(f"    {argument.name}: {_kind(argument.hint)}{shown}")
    return "\n".join(lines) + "\n"


def _kind(hint: Any) -> str:
    """A type as people say it: choices joined by |, no None, the same in every Python version."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, parts))
    if typing.get_origin(hint) in (list, tuple):
        return f"{_kind(parts[0])}..."
    kinds = [_kind(part) for part in parts if part is not type(None)]
    return " | ".join(kinds) or hint.__name__


def public_names() -> str:
    """``__all__`` of the packages people import from, read without importing them."""
    lines = []
    for package in PUBLIC_PACKAGES:
        tree = ast.parse((SOURCE / package / "__init__.py").read_text(encoding="utf-8"))
        dotted = "meshwise" if package == "." else f"meshwise.{package}"
        lines.extend(f"{dotted}.{name}" for name in _all(tree))
    return "\n".join(lines) + "\n"


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return sorted(ast.literal_eval(node.value))
    return []


if __name__ == "__main__":
    FLAGS.write_text(command_line(), encoding="utf-8")
    NAMES.write_text(public_names(), encoding="utf-8")
