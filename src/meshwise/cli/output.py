"""What commands print on stdout: a table for people, or one JSON object for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwise.bench.survey import Survey
    from meshwise.record import Record
    from meshwise.run.verify import Verification
    from meshwise.strategy import Strategy


def print_json(content: dict[str, Any]) -> None:
    """One JSON object and nothing else; what is not a finite number is null."""
    sys.stdout.write(json.dumps(_finite(content), allow_nan=False, ensure_ascii=False) + "\n")


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table, in a terminal as wide as that is, in a pipe as wide as it needs."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=200, highlight=False)
    console.print(table)


def print_survey(survey: Survey) -> None:
    print_table(survey.records)
    print(f"\nfolder: {survey.folder}")
    if survey.report is not None:
        print(f"report: {survey.report}")


def print_table(records: Sequence[Record]) -> None:
    from meshwise.report.table import show_table

    show_table(records)


def survey_content(survey: Survey) -> dict[str, Any]:
    return {
        **records_content(survey.records),
        "folder": str(survey.folder),
        "report": str(survey.report) if survey.report is not None else None,
        "interrupted": survey.interrupted,
        "notes": list(survey.notes),
    }


def records_content(records: Sequence[Record]) -> dict[str, Any]:
    from meshwise.record import summarise

    return {"records": [summary.model_dump(mode="json") for summary in summarise(records)]}


def verification_content(proof: Verification, *, strategy: Strategy) -> dict[str, Any]:
    about = {"strategy": strategy.text, "num_devices": strategy.num_devices, "description": proof.describe()}
    return {**about, **proof.model_dump(mode="json")}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
