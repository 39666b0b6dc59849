"""What the command line makes of what people type, and of what commands raise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise import __version__
from meshwise.bench.options import SurveyOptions
from meshwise.bench.survey import Survey
from meshwise.cli import main
from meshwise.errors import DataError, RankError
from meshwise.record import Record
from meshwise.run.verify import Verification
from meshwise.strategy import PRESETS, Strategy


def record(**changes: Any) -> Record:
    return Record(
        **{
            "model": "m",
            "data": "d",
            "strategy": "single",
            "preset": "single",
            "num_devices": 1,
            "global_batch_size": 8,
            **changes,
        }
    )


class Runs:
    """Stands in for ``run_survey``: keeps the options and answers with records, or raises."""

    def __init__(self) -> None:
        self.options: SurveyOptions | None = None
        self.records: tuple[Record, ...] = (record(step_time=0.5),)
        self.interrupted = False
        self.error: BaseException | None = None

    def __call__(self, options: SurveyOptions, *, observer: Any) -> Survey:
        self.options = options
        if self.error is not None:
            raise self.error
        return Survey(
            folder=Path("out"), records=self.records, notes=("a note",), interrupted=self.interrupted, report=None
        )

    @property
    def asked(self) -> SurveyOptions:
        if self.options is None:
            raise LookupError("no survey was run")
        return self.options


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr("meshwise.bench.survey.run_survey", fake)
    return fake


def test_flags_reach_the_survey(runs: Runs) -> None:
    line = "survey m --data d --strategies data zero1,micro_batches=2 --devices 1,2 --steps 9 --scaling weak --seed 4"
    assert main.run([*line.split(), "--watchdog", "5 s", "--no-trace", "--optimizer", "sgd", "--out", "x"]) == 0
    asked = runs.asked
    assert (asked.model, asked.data, asked.strategies) == ("m", "d", ("data", "zero1,micro_batches=2"))
    assert (asked.devices, asked.num_steps, asked.scaling, asked.seed) == ((1, 2), 9, "weak", 4)
    assert (asked.watchdog, asked.trace, asked.optimizer.name, asked.out) == (5.0, False, "sgd", Path("x"))


@pytest.mark.parametrize(
    ("line", "devices"),
    [
        ("run m", (1,)),
        ("run m --strategy zero1", (2,)),
        ("run m --strategy data=2,tensor=2", (4,)),
        ("run m --strategy zero1 --devices 3", (3,)),
    ],
)
def test_run_is_a_survey_of_one_strategy(runs: Runs, line: str, devices: tuple[int, ...]) -> None:
    assert main.run(line.split()) == 0
    assert runs.asked.devices == devices
    assert len(runs.asked.strategies) == 1


def test_json_is_one_object_and_nothing_else(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.records = (record(step_time=float("nan"), status="diverged", reason="loss is NaN at step 3"),)
    assert main.run(["survey", "m", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown["records"][0]["status"] == "diverged"
    assert shown["records"][0]["step_time"] is None
    assert shown["notes"] == ["a note"]


def test_a_failed_run_is_exit_code_1(runs: Runs) -> None:
    runs.records = (record(), record(num_devices=2, status="failed", reason="rank 1 was killed"))
    assert main.run(["survey", "m"]) == 1


def test_ctrl_c_shows_what_there_is_and_exits_130(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.interrupted = True
    assert main.run(["survey", "m", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["interrupted"] is True
    assert err == "meshwise: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("text:/no is not there;\n use stdlib"), 2, "meshwise: text:/no is not there; use stdlib\n"),
        (RankError("rank 1 was killed at step 3"), 1, "meshwise: rank 1 was killed at step 3\n"),
        (KeyboardInterrupt(), 130, "meshwise: interrupted\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            "meshwise: torch is not installed; pip install 'meshwise[torch]'\n",
        ),
    ],
)
def test_what_is_raised_on_purpose_is_one_line(
    runs: Runs, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    runs.error = error
    assert main.run(["survey", "m"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", line)


def test_a_bug_keeps_its_traceback_and_says_where_to_report_it(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.error = KeyError("x")
    with pytest.raises(KeyError):
        main.run(["survey", "m"])
    assert "this is a bug; please file the lines below" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("survye m", 'Did you mean "survey"?'),
        ("survey m --stepz 3", "Did you mean --steps?"),
        ("survey m --steps three", "see meshwise survey --help"),
        ("survey m --optimizer adm", "Did you mean"),
        ("survey", "see meshwise survey --help"),
        ("survey m extra", "see meshwise survey --help"),
        ("survey m --strategies", "use for example --strategies data zero1, or all"),
        ("survey m --devices one", "use whole numbers such as 1,2,4"),
        ("run m --strategy zerro3", "did you mean 'zero3'?"),
        ("verify m", "see meshwise verify --help"),
        ("verify m --strategy data=2 --devices 3", "use --devices 2"),
        ("verify m --strategy data --steps 0", "use 1 or more"),
        ("report", "give one or more, such as meshwise report"),
        ("report no/such/folder", "give the folder that meshwise survey --out wrote"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(
    runs: Runs, capsys: pytest.CaptureFixture[str], line: str, answer: str
) -> None:
    assert main.run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("meshwise: ") and err.count("\n") == 1
    assert answer in err
    assert runs.options is None


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_strategies_lists_every_preset_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["strategies"]) == 0
    shown = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert any(name in line and preset.source in line for line in shown.splitlines())
    assert main.run(["strategies", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)["strategies"]] == list(PRESETS)


@pytest.mark.parametrize(("identical", "code"), [(True, 0), (False, 1)])
def test_verify_exits_by_its_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], identical: bool, code: int
) -> None:
    asked: dict[str, Any] = {}

    def prove(**options: Any) -> Verification:
        asked.update(options)
        return Verification(
            identical=identical,
            tolerance=options["tolerance"],
            num_steps=options["num_steps"],
            worst=3e-15 if identical else 0.5,
            worst_name="wte",
            first_name="" if identical else "wte",
            first_difference=0.5,
            losses=[2.0],
            reference_losses=[2.0],
            notes=[],
        )

    monkeypatch.setattr("meshwise.run.verify.verify", prove)
    assert main.run(["verify", "m", "--strategy", "data=2,tensor=2", "--steps", "5", "--clip-norm", "1"]) == code
    assert asked["strategy"] == Strategy(data_parallel_size=2, tensor_parallel_size=2)
    assert (asked["num_steps"], asked["clip_norm"]) == (5, 1.0)
    assert ("identical to 3e-15" if identical else "wte is the first tensor off") in capsys.readouterr().out
    assert main.run(["verify", "m", "--strategy", "zero1", "--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["identical"], shown["strategy"], shown["tolerance"]) == (identical, "zero=1,data=2", 1e-12)


def test_report_refuses_to_overwrite_a_file_it_was_not_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").write_text(record(step_time=0.5).model_dump_json() + "\n")
    (tmp_path / "mine.html").write_text("mine")
    monkeypatch.setattr("meshwise.bench.show.page", lambda folders, out: out)
    line = ["report", str(tmp_path), "--out", str(tmp_path / "mine.html")]
    assert main.run(line) == 2
    assert "mine.html-2" not in capsys.readouterr().err
    assert main.run([*line, "--replace"]) == 0
    assert main.run(["report", str(tmp_path), "--json"]) == 0
