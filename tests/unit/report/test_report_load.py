from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwise.errors import InputError
from meshwise.record import Record
from meshwise.report.index import COLUMNS, query, write_index
from meshwise.report.load import load


def test_what_was_written_comes_back(folder: Path, records: list[Record]) -> None:
    loaded = load([folder])
    assert len(loaded.records) == len(records)
    assert [r.step_time for r in loaded.records] == [r.step_time for r in records]
    assert loaded.environment[str(folder)]["environment"]["python"] == "3.11.9"


def test_several_folders_add_up_and_one_given_twice_counts_once(
    folder: Path, tmp_path: Path, records: list[Record]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "records.jsonl").write_text(records[0].model_dump_json() + "\n", encoding="utf-8")
    loaded = load([folder, other, folder / "."])
    assert len(loaded.records) == len(records) + 1
    assert loaded.environment[str(other)] == {}


def test_traces_are_found_in_the_folder_they_are_in_now(folder: Path) -> None:
    first = load([folder]).records[0]
    assert first.trace == str(folder / "runs" / "gpt2-tiny--single--d1--r0" / "trace.json")
    moved = folder.rename(folder.with_name("moved"))
    again = load([moved]).records[0]
    assert again.trace == str(moved / "runs" / "gpt2-tiny--single--d1--r0" / "trace.json")
    (moved / "runs" / "gpt2-tiny--single--d1--r0" / "trace.json").unlink()
    assert load([moved]).records[0].trace is None


def test_a_half_written_last_line_is_left_out(folder: Path, records: list[Record]) -> None:
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema_version": 1, "model": "caf\xc3')
    assert len(load([folder]).records) == len(records)


def damage(folder: Path, line: str) -> Path:
    path = folder / "records.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n", encoding="utf-8")
    return folder


def test_errors_say_what_is_wrong_where_and_what_to_do(folder: Path, tmp_path: Path, records: list[Record]) -> None:
    with pytest.raises(InputError, match="does not exist; give the folder"):
        load([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="is a file, not a folder; give"):
        load([folder / "records.jsonl"])
    with pytest.raises(InputError, match=r"holds no records\.jsonl; give"):
        load([tmp_path])
    with pytest.raises(InputError, match="no survey folder given; give"):
        load([])


def test_an_empty_file_holds_no_record(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="holds no record yet"):
        load([tmp_path])


@pytest.mark.parametrize("line", ["{not json", '"text"', '{"schema_version": 1, "model": "m"}'])
def test_a_damaged_line_is_named_by_its_number(folder: Path, line: str) -> None:
    with pytest.raises(InputError, match=r"line 2 is damaged \(.*; remove that line"):
        load([damage(folder, line)])


def test_another_schema_is_named(folder: Path, records: list[Record]) -> None:
    newer = json.dumps({**records[0].model_dump(mode="json"), "schema_version": 9})
    with pytest.raises(InputError, match="line 2 has schema_version 9, this meshwise reads 1"):
        load([damage(folder, newer)])


def test_a_damaged_survey_file_is_named(folder: Path) -> None:
    (folder / "survey.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"survey\.json is damaged"):
        load([folder])


def test_an_unknown_number_is_left_out_of_its_table(records: list[Record]) -> None:
    text = records[0].model_copy(update={"validation": {"perplexity": float("nan"), "accuracy": 0.5}}).model_dump_json()
    assert Record.model_validate_json(text).validation == {"accuracy": 0.5}


def test_the_index_has_a_row_per_record_and_flat_columns(folder: Path, records: list[Record]) -> None:
    write_index(folder)
    rows = query(folder, "select * from records")
    assert len(rows) == len(records)
    assert tuple(rows[0]) == COLUMNS
    data = next(r for r in records if (r.preset, r.num_devices) == ("data", 4))
    [row] = query(
        folder,
        "select * from records where preset = ? and num_devices = ? and repeat = 0",
        parameters=("data", 4),
    )
    assert row["step_time"] == data.step_time
    assert row["peak_memory"] == max(data.peak_memory)
    assert row["communication"] == sum(data.communication.values())
    assert row["perplexity"] == data.validation["perplexity"]
    assert Record.model_validate_json(row["record"]) == data


def test_what_is_not_known_is_null_in_the_index(folder: Path) -> None:
    [count] = query(folder, "select count(*) as n from records where status = 'failed' and step_time is null")
    assert count["n"] == 4
    assert not query(folder, "select 1 from records where step_time = 0 or peak_memory = 0")


def test_a_query_sees_records_added_since(folder: Path, records: list[Record]) -> None:
    query(folder, "select 1 from records")
    path = folder / "records.jsonl"
    path.write_text(records[0].model_dump_json() + "\n", encoding="utf-8")
    later = (folder / "index.sqlite").stat().st_mtime_ns + 1_000_000
    import os

    os.utime(path, ns=(later, later))
    assert len(query(folder, "select 1 from records")) == 1


def test_queries_change_nothing_and_errors_name_the_columns(folder: Path) -> None:
    write_index(folder)
    with pytest.raises(InputError, match="readonly"):
        query(folder, "delete from records")
    with pytest.raises(InputError, match=r"no such column: speed\); table records has model, data"):
        query(folder, "select speed from records")
