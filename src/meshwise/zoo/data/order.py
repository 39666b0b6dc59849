"""Which samples a step sees: a function of seed and step alone, so that every strategy sees the same."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.errors import DataError

Indices = NDArray[np.int64]

# Separate streams of one seed, so that the split says nothing about the order.
_SPLIT_STREAM, _ORDER_STREAM = 0, 1


class StepIndices(NamedTuple):
    """``indices``: the samples of the whole global batch, in order; ``epoch``: which pass over the data this is."""

    indices: Indices
    epoch: int


def split_order(num_samples: int, *, seed: int) -> Indices:
    """The permutation the train/validation split is cut from."""
    return _permutation(num_samples, seed, _SPLIT_STREAM)


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> Indices:
    """The permutation of all samples in which ``epoch`` visits them; read-only."""
    return _permutation(num_samples, seed, _ORDER_STREAM, epoch)


def num_steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Whole global batches in the data; the incomplete last one is dropped.

    Raises:
        DataError: not even one batch.
    """
    if global_batch_size < 1 or num_samples < global_batch_size:
        raise DataError(
            f"{num_samples} training samples do not fill one global batch of {global_batch_size}; "
            f"use a global batch of 1 to {num_samples}, or more samples"
        )
    return num_samples // global_batch_size


def step_indices(num_samples: int, global_batch_size: int, *, seed: int, step: int) -> StepIndices:
    """The samples of global step ``step``, counted from 0 over all epochs.

    Raises:
        DataError: not even one batch in the data.
    """
    epoch, position = divmod(step, num_steps_per_epoch(num_samples, global_batch_size))
    order = epoch_order(num_samples, seed=seed, epoch=epoch)
    start = position * global_batch_size
    return StepIndices(indices=order[start : start + global_batch_size], epoch=epoch)


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, *stream: int) -> Indices:
    order = np.random.default_rng([seed, *stream]).permutation(num_samples)
    order.flags.writeable = False  # the cache hands out the same array again
    return order
