"""Nobody's files are lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwise.bench import folder
from meshwise.errors import OutputError


def survey_in(path: Path) -> Path:
    made = folder.make(path, replace=False)
    folder.write_survey(made, {"model": "m"})
    (made / folder.RUNS / "m--data--d2--r0").mkdir()
    (made / folder.RECORDS).write_text("{}\n")
    return made


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    made = folder.make(tmp_path / "a" / "b", replace=False)
    assert (made / folder.RUNS).is_dir()


def test_an_earlier_survey_is_not_overwritten_and_a_free_name_is_given(tmp_path: Path) -> None:
    survey_in(tmp_path / "out")
    (tmp_path / "out-2").mkdir()
    with pytest.raises(OutputError, match=r"use --out .*out-3, or --replace") as caught:
        folder.make(tmp_path / "out", replace=False)
    assert caught.value.exit_code == 2
    assert (tmp_path / "out" / folder.RECORDS).exists()


def test_replace_removes_an_earlier_survey_and_nothing_beside_it(tmp_path: Path) -> None:
    out = survey_in(tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    folder.make(out, replace=True)
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "runs"]
    assert list((out / folder.RUNS).iterdir()) == []


@pytest.mark.parametrize("content", [None, "{}", "not json", json.dumps({"meshwise": "other"})])
def test_replace_never_touches_a_folder_that_is_no_survey(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "thesis.tex").write_text("mine")
    if content is not None:
        (tmp_path / folder.SURVEY).write_text(content)
    with pytest.raises(OutputError, match="not a meshwise survey"):
        folder.make(tmp_path, replace=True)
    assert (tmp_path / "runs" / "thesis.tex").read_text() == "mine"


def test_replace_does_not_follow_a_link_out_of_the_folder(tmp_path: Path) -> None:
    out = survey_in(tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_text("mine")
    (out / folder.RUNS / "m--data--d2--r0").rmdir()
    (out / folder.RUNS).rmdir()
    (out / folder.RUNS).symlink_to(tmp_path / "elsewhere")
    folder.make(out, replace=True)
    assert (tmp_path / "elsewhere" / "data").read_text() == "mine"


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="is a file, not a folder"):
        folder.make(tmp_path / "out", replace=True)


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert folder.make(tmp_path, replace=False) == tmp_path.resolve()
