"""The comparison table in a terminal: at most 100 columns wide, plain text where it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshwise.record import Record
from meshwise.report.sheet import UNKNOWN, Row, Sheet, sheet
from meshwise.report.study import studies

WIDTH = 100
_NAME_WIDTH = 15
_LEAVE_OUT = ("efficiency", "epoch_time", "communication", "predicted", "throughput", "target")
"""Columns a narrow terminal does without, first to go first; the page has them all."""

_STATUS_STYLE = {
    "ok": "green",
    "failed": "bold red",
    "diverged": "bold magenta",
    "refused": "yellow",
    "stopped": "yellow",
}


def show_table(records: Sequence[Record], *, file: IO[str] | None = None) -> None:
    """Prints one table per study. Colour only on a terminal, and none where ``NO_COLOR`` is set."""
    file = file or sys.stdout
    console = Console(file=file, width=None if file.isatty() else WIDTH, highlight=False)
    for study in studies(records):
        console.print(render(sheet(study), console=console))


def render(content: Sheet, *, console: Console) -> RenderableType:
    """The sheet as a rich table, without the columns for which ``console`` is too narrow, and notes beneath."""
    table = _fitting(content, console)
    parts: list[RenderableType] = [Text(content.title, style="bold"), table, Text("")]
    for note in content.notes:
        count = f" ({note.count})" if note.count else ""
        text = Text()
        text.append(f"{note.preset} on {note.num_devices}", style="bold")
        text.append(f" {note.status}{count}", style=_STATUS_STYLE.get(note.status, "yellow"))
        text.append(f": {note.reason}")
        parts.append(text)
    return Group(*parts)


def _fitting(content: Sheet, console: Console) -> Table:
    """The roomiest table that fits: first closer together, then without columns."""
    attempts = [(0, 1), *((number, 0) for number in range(len(_LEAVE_OUT) + 1))]
    table = Table()
    for num_hidden, gap in attempts:
        table = _table(content, console.width, hidden=_LEAVE_OUT[:num_hidden], gap=gap)
        if Measurement.get(console, console.options.update(max_width=10 * WIDTH), table).maximum <= console.width:
            break
    return table


def _table(content: Sheet, width: int, *, hidden: Sequence[str], gap: int) -> Table:
    columns = [column for column in content.columns if column.key not in hidden]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("strategy\n", no_wrap=True)
    table.add_column("dev\n", justify="right", no_wrap=True)
    for column in columns:
        unit = column.unit.replace("tokens/s", "tok/s").replace("samples/s", "smp/s")
        table.add_column(Text(f"{column.title}\n{unit}"), justify="right", no_wrap=True)
    table.add_column("status\n", no_wrap=True)
    name_width = max(_NAME_WIDTH, _NAME_WIDTH + width - WIDTH)
    for index, row in enumerate(content.rows):
        last = index + 1 == len(content.rows) or content.rows[index + 1].num_devices != row.num_devices
        table.add_row(*_cells(row, [column.key for column in columns], name_width), end_section=last)
    return table


def _cells(row: Row, keys: Sequence[str], name_width: int) -> list[Text]:
    cells = [Text(fold(row.preset, name_width)), Text(str(row.num_devices))]
    for key in keys:
        cell = row.cells[key]
        style = "bold green" if cell.best else "dim" if cell.text == UNKNOWN else ""
        text = Text(cell.text, style=style)
        if cell.spread:
            text.append(f"±{cell.spread}", style="dim")
        cells.append(text)
    return [*cells, Text(row.status, style=_STATUS_STYLE.get(row.status, "yellow"))]


def fold(name: str, width: int) -> str:
    """Breaks ``data=2,tensor=2,…`` after commas into lines of at most ``width`` where it can."""
    lines = [""]
    for part in name.split(","):
        joined = f"{lines[-1]},{part}" if lines[-1] else part
        if lines[-1] and len(joined) > width:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(lines)
