"""Reading survey folders back: records, and what is known about where they were measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwise.errors import InputError
from meshwise.record import SCHEMA_VERSION, Record, with_scaling_efficiency

RECORDS, SURVEY = "records.jsonl", "survey.json"


class Loaded(NamedTuple):
    """``environment`` maps each folder, as given, to the content of its ``survey.json`` (empty where it has none)."""

    records: list[Record]
    environment: dict[str, dict[str, Any]]


def load(folders: Sequence[Path]) -> Loaded:
    """Records and surveys of several folders, in the order given; a folder given twice counts once.

    ``folder`` and ``trace`` of the records become full paths where those exist, else None: beside several folders,
    a relative one would not say to which it belongs. Scaling efficiency is computed anew over all folders.

    Raises:
        InputError: no folder given, a folder that does not exist, has no records, was written by another version of
            meshwise, or is damaged.
    """
    if not folders:
        raise InputError("no survey folder given; give at least one, as meshwise report runs/NAME")
    records: list[Record] = []
    environment: dict[str, dict[str, Any]] = {}
    for folder in {Path(folder).resolve(): Path(folder) for folder in folders}.values():
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {what}; give the folder that meshwise survey --out wrote")
        records += [_located(record, folder) for record in read_records(folder)]
        environment[str(folder)] = _read_survey(folder)
    return Loaded(with_scaling_efficiency(records), environment)


def read_records(folder: Path) -> list[Record]:
    """Every record of one folder. A half-written last line, which a killed survey leaves, is left out.

    Raises:
        InputError: as ``load``.
    """
    path = folder / RECORDS
    if not path.is_file():
        raise InputError(f"{folder} holds no {RECORDS}; give the folder that meshwise survey --out wrote")
    lines = path.read_bytes().split(b"\n")
    records = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        unfinished = index + 1 == len(lines)  # a whole line ends in a line break, so something follows it
        record = _read_line(line, where=f"{path} line {index + 1}", unfinished=unfinished)
        if record is not None:
            records.append(record)
    if not records:
        raise InputError(f"{path} holds no record yet; wait until a first run has ended, or give another folder")
    return records


def _read_line(line: bytes, *, where: str, unfinished: bool) -> Record | None:
    try:
        payload = json.loads(line)
    except ValueError as error:
        if unfinished:
            return None
        raise InputError(f"{where} is damaged ({error}); remove that line to report the others") from error
    if not isinstance(payload, dict):
        raise InputError(f"{where} is damaged (no JSON object); remove that line to report the others")
    version = payload.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{where} has schema_version {version!r}, this meshwise reads {SCHEMA_VERSION}; "
            "use the meshwise that wrote it, or run the survey again"
        )
    try:
        return Record.model_validate(payload)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{where} is damaged ({name}: {first['msg']}); remove that line to report the others"
        ) from error


def _read_survey(folder: Path) -> dict[str, Any]:
    path = folder / SURVEY
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); remove it to report without what it says") from error
    return content if isinstance(content, dict) else {"content": content}


def _located(record: Record, folder: Path) -> Record:
    """The record with full paths. A survey folder that was moved is found by the names of its runs."""
    run = (
        _first_existing([folder / record.folder, folder / "runs" / Path(record.folder).name]) if record.folder else None
    )
    trace = None
    if record.trace:
        places = [place for place in (run, folder) if place is not None]
        trace = _first_existing([place / name for name in (record.trace, Path(record.trace).name) for place in places])
    return record.model_copy(update={"folder": str(run) if run else None, "trace": str(trace) if trace else None})


def _first_existing(paths: Sequence[Path]) -> Path | None:
    return next((path.resolve() for path in paths if path.exists()), None)
