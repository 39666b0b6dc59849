from __future__ import annotations

import io

import pytest
from rich.console import Console
from synthetic_survey import survey

from meshwise.record import Record
from meshwise.report.sheet import UNKNOWN, Cell, Row, number, sheet
from meshwise.report.study import studies
from meshwise.report.table import WIDTH, fold, render, show_table


def rows(records: list[Record]) -> dict[tuple[str, int], Row]:
    return {(row.preset, row.num_devices): row for row in sheet(studies(records)[0]).rows}


def printed(records: list[Record]) -> str:
    file = io.StringIO()
    show_table(records, file=file)
    return file.getvalue()


def test_the_full_table_fits_a_hundred_columns_with_nothing_left_out_or_cut(records: list[Record]) -> None:
    text = printed(records)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    header = text.splitlines()[1]
    for word in ("step", "epoch", "speed", "eff.", "memory", "comm.", "perplexity", "to target", "predicted", "status"):
        assert word in header


def test_where_it_is_not_a_terminal_there_is_no_escape_code(records: list[Record]) -> None:
    assert "\x1b" not in printed(records)


def test_no_color_leaves_no_colour_on_a_terminal(records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    content = sheet(studies(records)[0])
    for no_color, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=WIDTH, color_system="standard")
        console.print(render(content, console=console))
        assert ("\x1b[1;32m" in file.getvalue()) == coloured


@pytest.mark.parametrize("width", [60, 80, 90])
def test_a_narrow_terminal_loses_columns_but_no_figures(records: list[Record], width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(render(sheet(studies(records)[0]), console=console))
    table = file.getvalue().split("gpipe on 4")[0]
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    assert "12.54±0.08" in table


def test_rows_are_ordered_by_device_count_then_speed_and_what_failed_comes_last(records: list[Record]) -> None:
    found = sheet(studies(records)[0]).rows
    assert [row.num_devices for row in found] == sorted(row.num_devices for row in found)
    fast = [float(row.cells["epoch_time"].text) for row in found if row.num_devices == 2]
    assert fast == sorted(fast)
    assert [row.status for row in found][-3:] == ["diverged", "failed", "refused"]


def test_what_was_not_measured_is_a_dash_never_zero(records: list[Record]) -> None:
    failed = rows(records)["zero2", 4]
    assert {cell.text for cell in failed.cells.values()} == {UNKNOWN}
    diverged = rows(records)["pipedream", 4]
    assert diverged.cells["metric"].text == UNKNOWN
    assert rows(records)["tensor", 4].cells["communication"].text == UNKNOWN
    assert rows(records)["single", 1].cells["communication"].text == "0"


def test_reasons_stand_beneath_the_table_word_for_word(records: list[Record]) -> None:
    text = " ".join(printed(records).split())
    assert "zero2 on 4 failed (3 of 3 repeats): rank 3 was killed (signal 9) at step 17; its log says [out] <b>" in text
    assert "gpipe on 4 failed (1 of 3 repeats)" in text
    assert "pipedream on 4 diverged (3 of 3 repeats): the loss is NaN from step 151 on" in text


def test_the_best_of_each_device_count_is_marked_and_failures_never_are(records: list[Record]) -> None:
    found = rows(records)
    assert found["data", 2].cells["step_time"].best
    assert found["data", 4].cells["step_time"].best
    assert sum(row.cells["step_time"].best for row in found.values()) == 2
    assert not any(
        cell.best for row in found.values() if row.status in ("failed", "diverged") for cell in row.cells.values()
    )
    assert not any(cell.best for cell in found["single", 1].cells.values()), "alone is not best"


def test_spread_is_half_the_range_of_the_repeats_in_the_unit_of_the_column() -> None:
    times = {0: 0.010, 1: 0.012, 2: 0.016}
    same = [r.model_copy(update={"step_time": times[r.repeat]}) for r in survey() if r.preset == "single"]
    assert rows(same)["single", 1].cells["step_time"] == Cell(text="12.0", spread="3.0")


def test_one_run_has_no_spread() -> None:
    assert not any(cell.spread for row in rows(survey(repeats=1)).values() for cell in row.cells.values())


def test_predicted_is_there_from_the_start_and_shows_the_signed_error_once_it_is_filled() -> None:
    records = [r.model_copy(update={"step_time": 0.1}) for r in survey(repeats=1, trouble=False)]
    assert rows(records)["data", 2].cells["predicted"].text == UNKNOWN
    filled = [r.model_copy(update={"predicted": {"step_time": 0.088}}) for r in records]
    assert rows(filled)["data", 2].cells["predicted"].text == "88.0 -12%"
    assert max(map(len, printed(filled).splitlines())) <= WIDTH


def test_accuracy_is_a_percentage_and_more_is_better() -> None:
    records = [
        r.model_copy(update={"validation": {"accuracy": 0.5 + 0.1 * (r.preset == "zero1")}, "curve": []})
        for r in survey(repeats=1, trouble=False)
    ]
    assert rows(records)["zero1", 2].cells["metric"] == Cell(text="60.0", best=True)


def test_target_column_is_there_only_when_asked_for() -> None:
    records = [r.model_copy(update={"target_metric": None, "time_to_target": None}) for r in survey(repeats=1)]
    assert "to target" not in printed(records)


def test_models_get_tables_of_their_own() -> None:
    text = printed([*survey(repeats=1), *survey(repeats=1, model="other.py:net")])
    assert "gpt2-tiny on stdlib" in text and "other.py:net on stdlib" in text


def test_brackets_of_a_user_are_text_not_markup() -> None:
    records = [r.model_copy(update={"model": "[bold]x[/bold] [/]"}) for r in survey(repeats=1)]
    assert "[bold]x[/bold] [/] on stdlib" in printed(records)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00004, "<0.001"), (0.01234, "0.012"), (1.5, "1.50"), (12.34, "12.3"), (12345, "12345")],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_long_names_fold_after_commas_and_lose_nothing() -> None:
    assert fold("zero=3,data=2,tensor=2", 15) == "zero=3,data=2,\ntensor=2"
    assert fold("pipedream-vsync", 15) == "pipedream-vsync"
    assert fold("checkpointing=selective", 10) == "checkpointing=selective"
