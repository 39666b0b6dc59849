"""From seconds to ratios and a verdict."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from executors_lib.comparisons import Comparison, Opponent

OURS = "meshwise"
LOSS_TOLERANCE = 1e-4
"""Relative, after a few steps: float32 sums in another order, seen through AdamW's first updates."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line: ours against one opponent on one model. Ratios are time of ours over theirs, below 1 is faster.

    Attributes:
        status: ``ok``, ``not installed`` or what failed.
        verdict: ``ok``, ``slower``, ``slower?`` (a quarter of the rounds were within the limit), or empty.
        limit: largest ratio that is ok; None where there is no claim.
        ratio, ratio_low, ratio_high: median, least and largest over the rounds.
        ratio_best: least time of ours over least time of theirs.
        ratio_processor: median over rounds of processor time, all ranks; hardly disturbed by other programs.
        step_time, their_step_time: seconds, medians.
        loss, their_loss: after the same steps; None where a contestant computes none.
    """

    strategy: str
    model: str
    opponent: str
    status: str
    verdict: str = ""
    limit: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratio_best: float | None = None
    ratio_processor: float | None = None
    step_time: float | None = None
    their_step_time: float | None = None
    loss: float | None = None
    their_loss: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def outcomes(comparison: Comparison, case: str, found: dict[str, Any]) -> list[Outcome]:
    return [_outcome(comparison, case, found, opponent) for opponent in comparison.opponents]


def _outcome(comparison: Comparison, case: str, found: dict[str, Any], opponent: Opponent) -> Outcome:
    base = {"strategy": comparison.strategy, "model": case, "opponent": opponent.name, "limit": opponent.limit}
    if opponent.name in found["missing"]:
        return Outcome(**base, status=found["missing"][opponent.name])
    wall, processor = found["wall"], found["processor"]
    pairs = list(zip(wall[OURS], wall[opponent.name]))
    ratios = sorted(own / theirs for own, theirs in pairs)
    loss, their_loss = found["losses"][OURS], found["losses"][opponent.name]
    differs = opponent.same_loss and not abs(loss - their_loss) <= LOSS_TOLERANCE * abs(their_loss)
    return Outcome(
        **base,
        status=f"other work: loss {loss:.5f} against {their_loss:.5f}" if differs else "ok",
        verdict=_verdict(ratios, opponent.limit),
        ratio=statistics.median(ratios),
        ratio_low=ratios[0],
        ratio_high=ratios[-1],
        ratio_best=min(wall[OURS]) / min(wall[opponent.name]),
        ratio_processor=statistics.median(
            own / theirs for own, theirs in zip(processor[OURS], processor[opponent.name])
        ),
        step_time=statistics.median(wall[OURS]),
        their_step_time=statistics.median(wall[opponent.name]),
        loss=loss,
        their_loss=None if math.isnan(their_loss) else their_loss,
    )


def _verdict(ratios: list[float], limit: float | None) -> str:
    if limit is None:
        return ""
    if statistics.median(ratios) <= limit:
        return "ok"
    return "slower?" if ratios[len(ratios) // 4] <= limit else "slower"
