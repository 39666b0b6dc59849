"""From a survey's folder to what people and queries read: the index and the page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from meshwise.bench import folder
from meshwise.errors import InputError
from meshwise.record import Record


def index(out: Path) -> None:
    """Brings ``index.sqlite`` up to date with ``records.jsonl``.

    Where it cannot be written the records are still safe, and the next query writes it: no reason to end a survey.
    """
    from meshwise.report.index import write_index

    with contextlib.suppress(InputError):
        write_index(out)


def records(folders: Sequence[Path]) -> list[Record]:
    """Every record of ``folders``, with full paths and with scaling efficiency over all of them.

    Raises:
        InputError: a folder that is no survey's, or has no record yet.
    """
    from meshwise.report.load import load

    return load(folders).records


def rebuild(out: Path) -> Path | None:
    """Writes ``report.html`` anew; None where no run has been kept yet or the report's packages are not installed."""
    if not folder.read(out):
        return None
    try:
        return page([out], out / folder.REPORT)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("altair", "vl_convert"):
            raise
        return None


def page(folders: Sequence[Path], out: Path) -> Path:
    """One page over all ``folders``."""
    from meshwise.report.build import build

    build(list(folders), out)
    return out
