"""``meshwise report``: the report again, of one folder or across several."""

from __future__ import annotations

from pathlib import Path

from meshwise.cli import output


def report(*folders: Path, out: Path | None = None, replace: bool = False, json: bool = False) -> None:
    """Rebuild the report of one or more survey folders.

    Args:
        folders: what --out of earlier surveys named.
        out: HTML file to write; default: report.html in the first folder.
        replace: overwrite --out.
        json: print one JSON object on stdout and nothing else.
    """
    from meshwise.bench import folder, show
    from meshwise.errors import InputError, OutputError

    if not folders:
        raise InputError("report needs a survey folder; give one or more, such as meshwise report runs/gpt2-tiny")
    records = show.records(folders)
    target = out or folders[0] / folder.REPORT
    if out is not None and out.exists() and not replace:
        raise OutputError(f"--out {out} exists; use --out {folder.free_name(out)}, or --replace to overwrite it")
    path = show.page(folders, target)
    if json:
        output.print_json({"report": str(path), **output.records_content(records)})
    else:
        output.print_table(records)
        print(f"\nreport: {path}")
