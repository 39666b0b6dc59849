"""What data look like once read: samples by index, in a training and a validation part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwise.errors import DataError
from meshwise.zoo.data.order import Indices, split_order

Octets = NDArray[np.uint8]
Fit = Callable[[Tensor, int], Tensor]

VALIDATION_FRACTION = 0.1
"""Held back for validation where the data have no split of their own."""


class Samples(Protocol):
    """Samples by index, made when asked for."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples, in this order, on CPU.

        Language: int64 [B, S] twice. Images: [B, 3, H, W] in the default dtype, normalised, and int64 [B].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """``name`` as the user wrote it; ``sample_unit`` is what throughput counts."""

    name: str
    train: Samples
    validation: Samples
    sample_unit: Literal["tokens", "samples"]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What a source has read; ``validation`` where the data say what it is, ``num_classes`` or byte values in them."""

    samples: Samples
    validation: Samples | None
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Runs of ``sequence_length + 1`` bytes that do not overlap; the targets are the inputs one byte on."""

    octets: Octets
    sequence_length: int

    def __len__(self) -> int:
        return len(self.octets) // (self.sequence_length + 1)

    def batch(self, indices: NDArray[Any]) -> tuple[Tensor, Tensor]:
        length = self.sequence_length + 1
        starts = np.asarray(indices, dtype=np.int64)[:, None] * length
        ids = torch.from_numpy(self.octets[starts + np.arange(length)].astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class GreyImages:
    """Grey images [N, H, W] kept as bytes; ``fit`` brings [B, 1, H, W] in 0…1 to the size the model takes.

    ``mean`` and ``deviation`` of the training pixels, in 0…1, are taken out.
    """

    pixels: Octets
    labels: Indices
    mean: float
    deviation: float
    fit: Fit
    image_size: int

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: NDArray[Any]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(self.pixels[indices]).to(torch.get_default_dtype()).unsqueeze(1) / 255
        fitted = (self.fit(chosen, self.image_size) - self.mean) / self.deviation
        return fitted.expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(self.labels[indices])


@dataclass(frozen=True, kw_only=True)
class LazyImages:
    """Images opened when asked for: ``read(index)`` gives pixels [3, H, W] and the class."""

    num_samples: int
    read: Callable[[int], tuple[Tensor, int]]

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: NDArray[Any]) -> tuple[Tensor, Tensor]:
        pairs = [self.read(int(index)) for index in indices]
        return torch.stack([pixels for pixels, _ in pairs]), torch.tensor([label for _, label in pairs])


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Some of the samples of another, renumbered."""

    of: Samples
    chosen: Indices

    def __len__(self) -> int:
        return len(self.chosen)

    def batch(self, indices: NDArray[Any]) -> tuple[Tensor, Tensor]:
        return self.of.batch(self.chosen[np.asarray(indices, dtype=np.int64)])


def split(pool: Pool, *, name: str, seed: int, limits: tuple[int | None, int | None]) -> tuple[Samples, Samples]:
    """The training and validation samples; ``limits`` are the most of each, None for all there are.

    Data with a validation part of their own keep it; others give ``VALIDATION_FRACTION`` of theirs, chosen by ``seed``.

    Raises:
        DataError: a limit below 1, or too few samples to split.
    """
    for what, limit in zip(("train_samples", "validation_samples"), limits):
        if limit is not None and limit < 1:
            raise DataError(f"{what}={limit} leaves nothing; use a whole number from 1")
    count = len(pool.samples)
    order = split_order(count, seed=seed)
    if pool.validation is not None:
        train, validation = order, split_order(len(pool.validation), seed=seed)
    else:
        held_back = max(1, round(VALIDATION_FRACTION * count))
        train, validation = order[held_back:], order[:held_back]
    if not len(train) or not len(validation):
        raise DataError(f"data {name!r} hold {count} sample(s), too few to train and validate on; give at least 2")
    return (
        Subset(of=pool.samples, chosen=train[: limits[0]]),
        Subset(of=pool.validation or pool.samples, chosen=validation[: limits[1]]),
    )
