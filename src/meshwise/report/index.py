"""index.sqlite: one row per record, to query with any SQLite tool.

    sqlite3 RUN/index.sqlite "select preset, step_time from records where num_devices = 2 order by step_time"

Flat columns hold what one would sort or filter by; ``record`` holds the whole record as JSON (``json_extract`` reads
it). Quantities are in base units; what is not known is NULL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from meshwise.errors import InputError
from meshwise.record import Record
from meshwise.report.load import RECORDS, read_records

INDEX = "index.sqlite"

_TEXT = ("model", "data", "preset", "strategy", "kind", "scaling", "status", "reason", "precision", "throughput_unit")
_WHOLE = (
    "num_devices",
    "repeat",
    "seed",
    "global_batch_size",
    "micro_batch_size",
    "num_steps",
    "steps_per_epoch",
    "parameters",
)
_REAL = ("step_time", "epoch_time", "throughput", "scaling_efficiency", "time_to_target", "wall_time")
_METRICS = ("validation_loss", "perplexity", "accuracy")
_PLACES = ("trace", "folder")

COLUMNS = (*_TEXT, *_WHOLE, *_REAL, *_METRICS, "peak_memory", "communication", *_PLACES, "record")
"""Names of the columns of table ``records``; ``peak_memory`` is of the fullest rank, ``communication`` all kinds."""


def write_index(folder: Path) -> Path:
    """Writes ``folder/index.sqlite`` anew from ``records.jsonl`` and returns its path.

    Raises:
        InputError: the folder has no readable records.
    """
    records = read_records(folder)
    path = folder / INDEX
    types = {**dict.fromkeys(_WHOLE, "INTEGER"), **dict.fromkeys((*_REAL, *_METRICS, "communication"), "REAL")}
    types["peak_memory"] = "INTEGER"
    definition = ", ".join(f"{name} {types.get(name, 'TEXT')}" for name in COLUMNS)
    try:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TABLE IF EXISTS records")
            connection.execute(f"CREATE TABLE records ({definition})")
            marks = ", ".join("?" * len(COLUMNS))
            connection.executemany(f"INSERT INTO records VALUES ({marks})", [_row(record) for record in records])
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be written ({error}); remove it or make the folder writable") from error
    return path


def query(folder: Path, sql: str, *, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Rows that ``sql`` selects from table ``records`` of a survey folder; nothing can be changed by it.

    The index is written first where it is missing or older than the records.

    Raises:
        InputError: the folder has no readable records, or the query does not fit the table.
    """
    path = folder / INDEX
    source = folder / RECORDS
    if not path.exists() or (source.exists() and path.stat().st_mtime_ns < source.stat().st_mtime_ns):
        write_index(folder)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(sql, tuple(parameters))]
    except sqlite3.Error as error:
        raise InputError(f"{sql!r} cannot be answered ({error}); table records has {', '.join(COLUMNS)}") from error


def _row(record: Record) -> tuple[Any, ...]:
    values: dict[str, Any] = {name: getattr(record, name) for name in (*_TEXT, *_WHOLE, *_REAL, *_PLACES)}
    values |= {name: record.validation.get(name) for name in _METRICS}
    values["peak_memory"] = max(record.peak_memory, default=None)
    values["communication"] = sum(record.communication.values()) if record.communication else None
    values["record"] = record.model_dump_json()
    return tuple(values[name] for name in COLUMNS)
