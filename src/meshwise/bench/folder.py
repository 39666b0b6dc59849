"""The survey's folder: made only when all checks have passed, never over someone's files."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwise.bench.cells import safe_name
from meshwise.errors import OutputError
from meshwise.record import SCHEMA_VERSION, Record, read_lines, write_lines

SURVEY, RECORDS, INDEX, REPORT, RUNS = "survey.json", "records.jsonl", "index.sqlite", "report.html", "runs"
_OURS = (SURVEY, RECORDS, INDEX, f"{INDEX}-journal", f"{INDEX}-wal", f"{INDEX}-shm", REPORT)


def default_folder(model: str) -> Path:
    """``runs/MODEL-TIME``, a name that is free."""
    return free_name(Path(RUNS) / f"{safe_name(model)}-{datetime.now():%Y%m%d-%H%M%S}")


def free_name(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``… that does not exist."""
    candidate, number = path, 2
    while candidate.exists() or candidate.is_symlink():
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return candidate


def check_free(out: Path, *, replace: bool) -> None:
    """Passes where a survey may be written to ``out``.

    Raises:
        OutputError: something is there and may not be, or must not be, replaced.
    """
    if not out.exists() and not out.is_symlink():
        return
    free = free_name(out)
    if not out.is_dir():
        raise OutputError(f"--out {out} is a file, not a folder; use --out {free}")
    if not any(out.iterdir()):
        return
    if not _is_survey(out):
        raise OutputError(f"--out {out} holds files that are not a meshwise survey; use --out {free}")
    if not replace:
        raise OutputError(
            f"--out {out} holds an earlier survey; use --out {free}, or --replace to remove the earlier one"
        )


def make(out: Path, *, replace: bool) -> Path:
    """Makes the folder (removing an earlier survey's own files where ``replace`` says so) and returns its full path.

    Raises:
        OutputError: as ``check_free``, or the folder cannot be made.
    """
    check_free(out, replace=replace)
    try:
        if out.is_dir() and _is_survey(out):
            _remove_survey(out)
        (out / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"--out {out} cannot be written ({error.strerror}); choose a folder you may write to"
        ) from error
    return out.resolve()


def write_survey(folder: Path, content: dict[str, Any]) -> None:
    """Writes ``survey.json`` in one go, so that a reader never sees half of it."""
    text = json.dumps({"meshwise": "survey", "schema_version": SCHEMA_VERSION, **content}, indent=2, allow_nan=False)
    part = folder / f"{SURVEY}.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(folder / SURVEY)


def append(folder: Path, record: Record) -> None:
    """Keeps one finished record."""
    write_lines(folder / RECORDS, [record])


def rewrite(folder: Path, records: list[Record]) -> None:
    """Replaces ``records.jsonl`` by the same records with what only their comparison tells."""
    part = folder / f"{RECORDS}.part"
    part.unlink(missing_ok=True)
    write_lines(part, records)
    part.replace(folder / RECORDS)


def read(folder: Path) -> list[Record]:
    path = folder / RECORDS
    return read_lines(path) if path.exists() else []


def _is_survey(folder: Path) -> bool:
    """Whether ``folder`` was written by a survey: it has our ``survey.json``."""
    try:
        content = json.loads((folder / SURVEY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("meshwise") == "survey"


def _remove_survey(folder: Path) -> None:
    """Removes what surveys write and nothing else that may lie beside it."""
    for name in _OURS:
        (folder / name).unlink(missing_ok=True)
    if (folder / RUNS).is_dir() and not (folder / RUNS).is_symlink():
        shutil.rmtree(folder / RUNS)
