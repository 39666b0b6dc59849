"""The comparison protocol: check everything, run every cell on its own, keep what is measured, compare.

options ─► recipe (model, data, batch) ─► cells (checked) ─► job ─► launch ─► Record ─► records.jsonl
                                                                               └► summaries, table, report
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwise.bench import environment, folder, show
from meshwise.bench.cells import Cell, Cells, expand, read_requests
from meshwise.bench.options import SurveyOptions, described
from meshwise.errors import MeshwiseError
from meshwise.record import Record, Status, Summary, summarise, with_scaling_efficiency

if TYPE_CHECKING:
    from meshwise.bench.recipe import Recipe
    from meshwise.run.job import Job

Launch = Callable[..., Record]
"""``launch(job, on_progress=…)``: runs the job to its end, in whatever way it ends, and returns its record."""


class Observer(Protocol):
    """Who is told what happens, as it happens. ``meshwise.cli.progress`` draws it; a test writes it down."""

    def begin(self, *, num_runs: int, folder: Path, notes: tuple[str, ...]) -> None: ...

    def start(self, cell: Cell, *, repeat: int, position: int) -> None: ...

    def progress(self, progress: Any) -> None:
        """``progress``: step, num_steps, loss, metric, seconds of the run at work."""
        ...

    def finish(self, record: Record) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a survey found. ``interrupted``: Ctrl-C ended it, and the rest of the cells never ran."""

    folder: Path
    records: tuple[Record, ...]
    notes: tuple[str, ...]
    interrupted: bool
    report: Path | None

    @property
    def summaries(self) -> list[Summary]:
        return summarise(self.records)

    @property
    def failed(self) -> bool:
        """Whether a run that could be started did not get to its end."""
        return any(record.status == "failed" for record in self.records)


def run_survey(
    options: SurveyOptions,
    *,
    observer: Observer,
    launch: Launch | None = None,
    look_up: Callable[[SurveyOptions], Recipe] | None = None,
) -> Survey:
    """Runs ``options`` to the end (or to Ctrl-C) and keeps every record in the survey's folder.

    Args:
        options: what to compare.
        observer: is told of every start, step and end.
        launch: how to run one job; None for ``meshwise.run.launch.launch``.
        look_up: how to find the model's facts and defaults; None for ``meshwise.bench.recipe.look_up``.

    Raises:
        InputError: something asked for cannot be; nothing has been written or started then.
    """
    out = options.out or folder.default_folder(options.model)
    folder.check_free(out, replace=options.replace)
    read_requests(options)  # refuses in a moment what needs no look at the model, which takes seconds
    recipe = (look_up or _default_look_up())(options)
    cells = expand(options, facts=recipe.facts, global_batch_size=recipe.global_batch_size)
    recipe.check_batches(cells)
    about = environment.describe()
    notes = (*recipe.notes, *cells.notes, *environment.notes(about, options.devices, options.threads))
    out = folder.make(out, replace=options.replace)
    content = _content(options, recipe=recipe, cells=cells, about=about, notes=notes)
    folder.write_survey(out, {**content, "status": "running"})
    for cell in cells.refused:
        folder.append(out, _blank(options, recipe, cell, 0, status="refused", reason=cell.refused))
    observer.begin(num_runs=len(list(cells.runs(options.repeats))), folder=out, notes=notes)
    try:
        interrupted = _run_all(options, recipe=recipe, cells=cells, out=out, tools=(observer, launch))
    finally:
        observer.end()
    status = "interrupted" if interrupted else "finished"
    folder.write_survey(out, {**content, "status": status, "ended": _now()})
    folder.rewrite(out, with_scaling_efficiency(folder.read(out)))
    show.index(out)
    return Survey(
        folder=out,
        records=tuple(show.records([out])),
        notes=notes,
        interrupted=interrupted,
        report=show.rebuild(out),
    )


def _run_all(
    options: SurveyOptions, *, recipe: Recipe, cells: Cells, out: Path, tools: tuple[Observer, Launch | None]
) -> bool:
    """Runs every cell; True when Ctrl-C ended it."""
    observer, launch = tools
    launch = launch or _default_launch()
    for position, (cell, repeat) in enumerate(cells.runs(options.repeats)):
        job = recipe.job(options, cell, repeat=repeat, folder=out / folder.RUNS / cell.name(options.model, repeat))
        observer.start(cell, repeat=repeat, position=position)
        try:
            record = launch(job, on_progress=observer.progress)
        except KeyboardInterrupt:
            record = _interrupted(options, recipe, cell, job)
        except MeshwiseError as error:
            record = _blank(options, recipe, cell, repeat, status="failed", reason=str(error))
        except Exception as error:  # one broken run must not cost the hours of the others
            record = _blank(options, recipe, cell, repeat, status="failed", reason=_unexpected(error, job))
        folder.append(out, record)
        show.index(out)
        observer.finish(record)
        if record.status == "interrupted":
            return True
    return False


def _interrupted(options: SurveyOptions, recipe: Recipe, cell: Cell, job: Job) -> Record:
    """What the launcher could still save of the run, else an empty record."""
    path = job.folder / "record.json"
    if path.exists():
        return Record.model_validate_json(path.read_text(encoding="utf-8")).model_copy(update={"status": "interrupted"})
    return _blank(options, recipe, cell, job.repeat, status="interrupted", reason="interrupted by the user")


def _unexpected(error: Exception, job: Job) -> str:
    """Keeps the traceback beside the run's other files and says where."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / "traceback.txt"
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return f"unexpected {type(error).__name__}: {error} (a bug in meshwise; traceback in {path})"


def _blank(options: SurveyOptions, recipe: Recipe, cell: Cell, repeat: int, *, status: Status, reason: str) -> Record:
    """The record of a run that measured nothing."""
    return Record(
        model=options.model,
        data=recipe.data,
        strategy=cell.strategy.text,
        preset=cell.preset,
        num_devices=cell.num_devices,
        repeat=repeat,
        seed=options.seed + repeat,
        scaling=options.scaling,
        status=status,
        reason=reason,
        precision=cell.strategy.precision,
        global_batch_size=cell.global_batch_size,
        micro_batch_size=cell.strategy.micro_batch_size(cell.global_batch_size) or None,
    )


def _content(
    options: SurveyOptions, *, recipe: Recipe, cells: Cells, about: dict[str, Any], notes: tuple[str, ...]
) -> dict[str, Any]:
    """``survey.json``: what was asked for, what that came to, and where it runs."""
    return {
        "model": options.model,
        "data": recipe.data,
        "started": _now(),
        "options": described(options),
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "cells": [
            {
                "preset": cell.preset,
                "strategy": cell.strategy.text,
                "num_devices": cell.num_devices,
                "global_batch_size": cell.global_batch_size,
                "refused": cell.refused,
            }
            for cell in cells.cells
        ],
        "environment": about,
        "notes": list(notes),
    }


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _default_launch() -> Launch:
    from meshwise.run.launch import launch

    return launch


def _default_look_up() -> Callable[[SurveyOptions], Recipe]:
    from meshwise.bench.recipe import look_up

    return look_up
