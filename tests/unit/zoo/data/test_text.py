"""Text is bytes, cut into windows."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwise.errors import DataError
from meshwise.zoo import get_task
from meshwise.zoo.data import load, text

TASK = get_task("gpt2-tiny", sequence_length=7)


def test_windows_do_not_overlap_and_targets_are_one_on(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(83)))
    samples = text.read_text(str(path), TASK).samples
    assert len(samples) == 83 // 8
    inputs, targets = samples.batch(np.array([2, 0]))
    assert inputs.tolist() == [list(range(16, 23)), list(range(7))]
    assert torch.equal(targets, inputs + 1)
    assert inputs.dtype == targets.dtype == torch.int64


def test_every_byte_value_may_occur(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff" * 40)
    inputs, _ = load(f"text:{path}", task=TASK, seed=0).train.batch(np.array([0]))
    assert inputs.unique().tolist() == [255]


def test_file_is_mapped_not_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    assert isinstance(text.read_text(str(path), TASK).samples.octets, np.memmap)


def test_folder_is_its_txt_files_by_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_text("second..")
    (tmp_path / "a.txt").write_text("first...")
    (tmp_path / "c.md").write_text("not text")
    assert text.read_text(str(tmp_path), TASK).samples.octets.tobytes() == b"first...second.."


def test_stdlib_is_the_interpreters_source_without_tests():
    samples = text.read_stdlib("", TASK).samples
    source = samples.octets.tobytes()
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "abc.py").read_bytes() in source
    assert (root / "json" / "decoder.py").read_bytes() in source
    assert b"class IdleConf" not in source
    assert 5e6 < len(source) < 30e6


def test_stdlib_is_the_same_each_time():
    first, second = (load("stdlib", task=TASK, seed=4, train_samples=20) for _ in range(2))
    assert torch.equal(first.train.batch(np.arange(20))[0], second.train.batch(np.arange(20))[0])


def test_missing_file():
    with pytest.raises(DataError, match="nowhere is no file or folder"):
        load("text:/nowhere", task=TASK, seed=0)


def test_folder_without_text(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        load(f"text:{tmp_path}", task=TASK, seed=0)


@pytest.mark.parametrize("size", [0, 15])
def test_too_little_text(tmp_path, size):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * size)
    with pytest.raises(DataError, match=f"hold {size} bytes, too few for two samples of 8"):
        load(f"text:{path}", task=TASK, seed=0)


def test_folder_larger_than_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    monkeypatch.setattr(text, "MOST_IN_MEMORY", 99)
    with pytest.raises(DataError, match="join them into one file"):
        load(f"text:{tmp_path}", task=TASK, seed=0)


def test_interpreter_without_source(tmp_path, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="holds no Python source; use text:PATH"):
        load("stdlib", task=TASK, seed=0)
