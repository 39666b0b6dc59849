"""The stopwatch adds up what it is asked to, and nothing else."""

from __future__ import annotations

import time

import pytest
import torch

from meshwise.measure.clock import Stopwatch


def test_time_outside_is_not_counted():
    watch = Stopwatch(torch.device("cpu"))
    with watch:
        time.sleep(0.01)
    first = watch.last
    time.sleep(0.05)
    with watch:
        pass
    assert first >= 0.01
    assert watch.last < first
    assert watch.total == pytest.approx(first + watch.last)


def test_a_block_that_fails_is_not_counted():
    watch = Stopwatch(torch.device("cpu"))
    with pytest.raises(ValueError), watch:
        raise ValueError
    assert watch.total == 0.0
