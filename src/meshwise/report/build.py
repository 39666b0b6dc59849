"""From survey folders to ``report.html``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwise.errors import OutputError
from meshwise.report.load import load
from meshwise.report.page import page


def build(folders: Sequence[Path], out: Path) -> Path:
    """Writes one page over all ``folders`` to the file ``out`` (replacing it) and returns its path.

    Raises:
        InputError: as ``load``; the report's packages are not installed.
        OutputError: ``out`` cannot be written.
    """
    records, environment = load(folders)
    text = page(records, environment, beside=out.parent)
    if out.is_dir():
        raise OutputError(f"{out} is a folder; name a file in it, such as {out / 'report.html'}")
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(out)  # a reader never sees half a page
    except OSError as error:
        raise OutputError(f"{out} cannot be written ({error.strerror}); choose a file you may write to") from error
    return out
