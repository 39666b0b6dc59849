"""The protocol, with a launcher that measures nothing: what runs, in what order, what is kept when things go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwise.bench import folder, show
from meshwise.bench.cells import Cell
from meshwise.bench.options import SurveyOptions
from meshwise.bench.recipe import Recipe
from meshwise.bench.survey import Survey, run_survey
from meshwise.errors import DataError, InputError, RankError
from meshwise.record import Record
from meshwise.run.job import Job, OptimizerSettings
from meshwise.strategy.legal import ModelFacts

FACTS = ModelFacts(name="m", num_layers=8, tensor_sizes=(("heads", 4),))


class Diary:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ended = 0

    def begin(self, *, num_runs: int, folder: Path, notes: tuple[str, ...]) -> None:
        self.lines.append(f"begin {num_runs}")

    def start(self, cell: Cell, *, repeat: int, position: int) -> None:
        self.lines.append(f"start {position} {cell.preset} {cell.num_devices} {repeat}")

    def progress(self, progress: Any) -> None:
        self.lines.append(f"progress {progress}")

    def finish(self, record: Record) -> None:
        self.lines.append(f"finish {record.status}")

    def end(self) -> None:
        self.ended += 1


def measured(job: Job, **changes: Any) -> Record:
    return Record(
        **{
            "model": job.model,
            "data": job.data,
            "strategy": job.strategy.text,
            "preset": job.preset,
            "num_devices": job.strategy.num_devices,
            "repeat": job.repeat,
            "seed": job.seed,
            "global_batch_size": job.global_batch_size,
            "step_time": 0.5,
            "throughput": 100.0,
            **changes,
        }
    )


def fake_launch(job: Job, *, on_progress: Callable[[Any], None]) -> Record:
    on_progress("half way")
    return measured(job)


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(show, "index", lambda out: None)
    monkeypatch.setattr(show, "rebuild", lambda out: out / folder.REPORT)
    yield


def look_up(options: SurveyOptions) -> Recipe:
    return Recipe(data="d", global_batch_size=16, optimizer=OptimizerSettings(), facts=FACTS, num_train_samples=100)


def surveyed(tmp_path: Path, *, launch: Any = fake_launch, diary: Diary | None = None, **options: Any) -> Survey:
    asked = SurveyOptions(**{"model": "m", "strategies": ("data", "zero1"), "out": tmp_path / "out", **options})
    return run_survey(asked, observer=diary or Diary(), launch=launch, look_up=look_up)


def test_every_cell_runs_and_is_kept(tmp_path: Path) -> None:
    diary = Diary()
    survey = surveyed(tmp_path, diary=diary, repeats=2)
    assert [line for line in diary.lines if line.startswith(("begin", "start"))] == [
        "begin 6",
        "start 0 single 1 0",
        "start 1 data 2 0",
        "start 2 zero1 2 0",
        "start 3 single 1 1",
        "start 4 data 2 1",
        "start 5 zero1 2 1",
    ]
    assert diary.lines.count("progress half way") == 6
    assert diary.ended == 1
    assert [r.preset for r in folder.read(survey.folder)] == ["single", "data", "zero1"] * 2
    assert not survey.failed and not survey.interrupted


def test_repeats_differ_by_seed_and_strategies_do_not(tmp_path: Path) -> None:
    survey = surveyed(tmp_path, repeats=2, seed=7)
    assert [(r.repeat, r.seed) for r in survey.records] == [(0, 7)] * 3 + [(1, 8)] * 3


def test_scaling_efficiency_is_kept_once_the_baseline_is_known(tmp_path: Path) -> None:
    survey = surveyed(tmp_path)
    assert [r.scaling_efficiency for r in folder.read(survey.folder)] == [1.0, 0.5, 0.5]


def test_a_record_is_on_disk_before_the_next_run_starts(tmp_path: Path) -> None:
    seen = []

    def launch(job: Job, *, on_progress: Any) -> Record:
        seen.append(len(folder.read(tmp_path / "out")))
        return measured(job)

    surveyed(tmp_path, launch=launch)
    assert seen == [0, 1, 2]


def test_a_failed_strategy_does_not_stop_the_survey(tmp_path: Path) -> None:
    def launch(job: Job, *, on_progress: Any) -> Record:
        if job.preset == "data":
            raise RankError("rank 1 was killed at step 3")
        return measured(job)

    survey = surveyed(tmp_path, launch=launch)
    assert [(r.preset, r.status) for r in survey.records] == [("single", "ok"), ("data", "failed"), ("zero1", "ok")]
    assert survey.records[1].reason == "rank 1 was killed at step 3"
    assert survey.failed


def test_a_bug_in_one_run_does_not_stop_the_survey_and_leaves_its_traceback(tmp_path: Path) -> None:
    def launch(job: Job, *, on_progress: Any) -> Record:
        if job.preset == "data":
            raise KeyError("loss")
        return measured(job)

    survey = surveyed(tmp_path, launch=launch)
    assert [r.status for r in survey.records] == ["ok", "failed", "ok"]
    assert "unexpected KeyError: 'loss'" in survey.records[1].reason
    text = (survey.folder / folder.RUNS / "m--data--d2--r0" / "traceback.txt").read_text()
    assert "raise KeyError" in text


def test_ctrl_c_keeps_what_is_measured_and_ends_the_display(tmp_path: Path) -> None:
    diary = Diary()

    def launch(job: Job, *, on_progress: Any) -> Record:
        if job.preset == "data":
            raise KeyboardInterrupt
        return measured(job)

    survey = surveyed(tmp_path, launch=launch, diary=diary)
    assert survey.interrupted
    assert [(r.preset, r.status) for r in survey.records] == [("single", "ok"), ("data", "interrupted")]
    assert diary.ended == 1
    assert json.loads((survey.folder / folder.SURVEY).read_text())["status"] == "interrupted"


def test_ctrl_c_keeps_what_the_launcher_saved_of_the_run(tmp_path: Path) -> None:
    def launch(job: Job, *, on_progress: Any) -> Record:
        job.folder.mkdir(parents=True)
        saved = measured(job, status="interrupted", num_steps=17)
        (job.folder / "record.json").write_text(saved.model_dump_json())
        raise KeyboardInterrupt

    survey = surveyed(tmp_path, launch=launch)
    assert [(r.status, r.num_steps) for r in survey.records] == [("interrupted", 17)]


def test_nothing_is_written_when_something_asked_for_cannot_be(tmp_path: Path) -> None:
    for wrong in ({"strategies": ("tensor=8",), "devices": (8,)}, {"strategies": ("data=2",), "devices": (1,)}):
        with pytest.raises(InputError):
            surveyed(tmp_path, **wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_global_batch_larger_than_the_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    asked = SurveyOptions(model="m", strategies=("data",), devices=(8,), scaling="weak", out=tmp_path / "out")
    with pytest.raises(DataError, match="100 training samples do not fill one global batch of 128"):
        run_survey(asked, observer=Diary(), launch=fake_launch, look_up=look_up)
    assert list(tmp_path.iterdir()) == []


def test_strategies_brought_in_by_all_that_cannot_be_are_records_too(tmp_path: Path) -> None:
    bare = ModelFacts(name="m", no_pipeline="is not a chain of layers; use data")

    def facts_of_a_graph(options: SurveyOptions) -> Recipe:
        return Recipe(data="d", global_batch_size=16, optimizer=OptimizerSettings(), facts=bare, num_train_samples=100)

    asked = SurveyOptions(model="m", out=tmp_path / "out")
    survey = run_survey(asked, observer=Diary(), launch=fake_launch, look_up=facts_of_a_graph)
    refused = [r for r in survey.records if r.status == "refused"]
    assert {r.preset for r in refused} >= {"gpipe", "1f1b", "pipedream"}
    assert all("is not a chain of layers" in r.reason for r in refused)
    assert not survey.failed


def test_the_folder_says_what_was_asked_for_and_where_it_ran(tmp_path: Path) -> None:
    survey = surveyed(tmp_path, seed=3)
    content = json.loads((survey.folder / folder.SURVEY).read_text())
    assert content["options"]["seed"] == 3
    assert [cell["preset"] for cell in content["cells"]] == ["single", "data", "zero1"]
    assert content["environment"]["num_cores"] >= 1
    assert content["environment"]["versions"]["meshwise"]
    assert content["status"] == "finished"
