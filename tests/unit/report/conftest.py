"""Synthetic survey folders for the report's tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_survey import survey

from meshwise.record import Record, write_lines


@pytest.fixture(scope="session")
def records() -> list[Record]:
    return survey()


@pytest.fixture
def folder(tmp_path: Path, records: list[Record]) -> Path:
    """A run folder as a survey leaves it, traces and all."""
    return write_folder(tmp_path / "gpt2-tiny", records)


def write_folder(path: Path, records: list[Record]) -> Path:
    path.mkdir(parents=True)
    write_lines(path / "records.jsonl", records)
    for record in records:
        if record.folder:
            (path / record.folder).mkdir(parents=True, exist_ok=True)
            (path / record.folder / "trace.json").write_text("{}", encoding="utf-8")
    content = {"schema_version": 1, "environment": {"python": "3.11.9", "num_cores": 4}, "notes": ["four on two cores"]}
    (path / "survey.json").write_text(json.dumps(content), encoding="utf-8")
    return path
