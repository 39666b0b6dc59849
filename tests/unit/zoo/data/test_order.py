"""The order of samples is a function of seed and step."""

import numpy as np
import pytest

from meshwise.errors import DataError
from meshwise.zoo.data import epoch_order, num_steps_per_epoch, step_indices
from meshwise.zoo.data.order import split_order


def test_epoch_visits_every_sample_once():
    assert sorted(epoch_order(100, seed=1, epoch=2)) == list(range(100))


def test_order_is_pinned():
    """A change here would make runs of two versions incomparable."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [1, 3, 7, 6, 0, 4, 2, 5]
    assert epoch_order(8, seed=7, epoch=3).tolist() == [6, 3, 0, 5, 7, 4, 2, 1]


def test_epochs_and_seeds_and_split_differ():
    orders = [
        epoch_order(50, seed=0, epoch=0),
        epoch_order(50, seed=0, epoch=1),
        epoch_order(50, seed=1, epoch=0),
        split_order(50, seed=0),
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_steps_of_an_epoch_are_its_order_cut():
    batches = [step_indices(22, 5, seed=3, step=step) for step in range(4)]
    assert np.array_equal(np.concatenate([batch.indices for batch in batches]), epoch_order(22, seed=3, epoch=0)[:20])
    assert {batch.epoch for batch in batches} == {0}


def test_incomplete_last_batch_is_dropped():
    assert num_steps_per_epoch(22, 5) == 4
    indices, epoch = step_indices(22, 5, seed=3, step=4)
    assert epoch == 1
    assert np.array_equal(indices, epoch_order(22, seed=3, epoch=1)[:5])


def test_any_step_can_be_asked_for_first():
    expected = step_indices(30, 4, seed=9, step=50).indices
    for step in range(50):
        step_indices(30, 4, seed=9, step=step)
    assert np.array_equal(step_indices(30, 4, seed=9, step=50).indices, expected)


def test_order_cannot_be_spoilt():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(10, seed=0, epoch=0)[0] = 3


@pytest.mark.parametrize("batch_size", [0, 11])
def test_batch_the_data_cannot_fill_is_refused(batch_size):
    with pytest.raises(DataError, match="1 to 10"):
        step_indices(10, batch_size, seed=0, step=0)
