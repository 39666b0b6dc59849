from __future__ import annotations

import sys

import pytest

from meshwise.errors import InputError
from meshwise.measure.board import Board


def test_without_tensorboardx_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match="pip install"):
        Board(tmp_path)


def test_steps_and_validations_become_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    board = Board(tmp_path)
    board.add({"event": "step", "step": 1, "loss": 2.5, "seconds": 0.1})
    board.add({"event": "validation", "step": 1, "loss": 2.0, "perplexity": 7.4, "training_time": 0.1})
    board.add({"event": "end"})
    board.close()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    content = file.read_bytes()
    assert all(tag in content for tag in (b"train/loss", b"train/seconds", b"validation/perplexity"))
