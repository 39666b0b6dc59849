"""Study: the summaries that may be compared with each other, in the order people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwise.record import Record, Summary, summarise
from meshwise.strategy import PRESETS

METRICS = ("perplexity", "accuracy", "validation_loss")
"""Validation metrics by preference: the first that was measured is the one shown."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model on one data set under one scaling rule."""

    model: str
    data: str
    scaling: str
    records: tuple[Record, ...]
    summaries: tuple[Summary, ...]

    @property
    def title(self) -> str:
        return f"{self.model} on {self.data}, {self.scaling} scaling"

    @property
    def metric(self) -> str | None:
        """Name of the validation metric to show; None where none was measured."""
        measured = {key for summary in self.summaries for key in summary.validation}
        measured |= {
            name for r in self.records for point in r.curve for name in METRICS if getattr(point, name) is not None
        }
        return next((name for name in METRICS if name in measured), None)

    @property
    def good(self) -> tuple[Summary, ...]:
        """Summaries with at least one repeat that ended well."""
        return tuple(summary for summary in self.summaries if summary.num_ok)

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Device counts with a run that ended well, smallest first."""
        return tuple(sorted({summary.num_devices for summary in self.good}))


def studies(records: Sequence[Record]) -> list[Study]:
    """Splits records by (model, data, scaling), in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.model, record.data, record.scaling), []).append(record)
    return [
        Study(
            model=model, data=data, scaling=scaling, records=tuple(group), summaries=tuple(_ordered(summarise(group)))
        )
        for (model, data, scaling), group in groups.items()
    ]


def in_order(presets: Iterable[str]) -> list[str]:
    """Strategy names as people list them: presets in the vocabulary's order, each followed by its variants."""
    known = list(PRESETS)

    def place(name: str) -> tuple[int, str]:
        head = name.split(",")[0]
        return (known.index(head) if head in known else len(known), name)

    return sorted(dict.fromkeys(presets), key=place)


def slowness(summary: Summary) -> float:
    """Sorts by speed: seconds an epoch, else seconds a sample; unknown comes last."""
    if summary.epoch_time is not None:
        return summary.epoch_time
    return 1 / summary.throughput if summary.throughput else float("inf")


def _ordered(summaries: Sequence[Summary]) -> list[Summary]:
    place = {name: index for index, name in enumerate(in_order(summary.preset for summary in summaries))}
    return sorted(summaries, key=lambda s: (s.num_devices, not s.num_ok, slowness(s), place[s.preset]))
