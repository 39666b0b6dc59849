"""What a study found, in plain sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from meshwise.record import Summary
from meshwise.report.sheet import number, peak_memory
from meshwise.report.study import Study, slowness
from meshwise.units import show

_MAX_NAMES = 3
_NOTEWORTHY = 0.02
"""Differences in the validation metric below this share of it are not worth a sentence."""


def headline(study: Study) -> list[str]:
    """Sentences, the most important first; never empty."""
    good = study.good
    if not good:
        return [f"No run of {study.model} ended well; the reasons are below."]
    count = study.device_counts[-1]
    here = [s for s in good if s.num_devices == count]
    one = next((s for s in good if s.num_devices == 1), None)
    finding = "; ".join(filter(None, (_fastest(here, one, count), _leanest(here))))
    sentences = (finding, _target(good), _validation(study, one), _troubles(study))
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences if sentence]


def _fastest(here: Sequence[Summary], one: Summary | None, count: int) -> str:
    timed = sorted((s for s in here if slowness(s) < float("inf")), key=slowness)
    if not timed:
        return ""
    first = timed[0]
    if count == 1:
        step = f", {show(first.step_time, 's')} a step" if first.step_time else ""
        return f"fastest on 1 device: {first.preset}{step}"
    close = _within_spread(first, timed[1:])
    tie = f" ({_listed(close)} within the spread of the repeats)" if close else ""
    if one is None or slowness(one) == float("inf"):
        return f"fastest on {count} devices: {first.preset}{tie}"
    speed = slowness(one) / slowness(first)
    if speed < 1:
        nearest = f"the nearest, {first.preset}, reaches {number(speed, digits=2)}× its speed{tie}"
        return f"no split on {count} devices is faster than one device; {nearest}"
    return f"fastest on {count} devices: {first.preset}, {number(speed, digits=2)}× one device{tie}"


def _within_spread(first: Summary, others: Sequence[Summary]) -> list[str]:
    """Those whose fastest repeat is faster than the slowest repeat of the fastest strategy."""
    if "epoch_time" not in first.spread or first.num_ok < 2:
        return []
    slowest = first.spread["epoch_time"][1]
    return [s.preset for s in others if s.num_ok > 1 and s.spread.get("epoch_time", [slowest])[0] < slowest]


def _leanest(here: Sequence[Summary]) -> str:
    known = {s.preset: memory for s in here if (memory := peak_memory(s)) is not None}
    if len(known) < 2:
        return ""
    least = min(known.values())
    names = [name for name, memory in known.items() if memory == least]
    against, reference = ("data", known["data"]) if "data" in known else _largest(known)
    share = 1 - least / reference if reference else 0.0
    below = f", {share:.0%} below {against}" if share >= 0.005 and against not in names else ""
    return f"least memory per device: {_listed(names)}, {show(least, 'B')}{below}"


def _largest(known: dict[str, float]) -> tuple[str, float]:
    return max(known.items(), key=lambda item: item[1])


def _target(good: Sequence[Summary]) -> str:
    asked = [s for s in good if s.target_metric]
    reached = [s for s in asked if s.time_to_target is not None]
    if not asked:
        return ""
    if not reached:
        return f"no strategy reached the target {asked[0].target_metric}"
    first = min(reached, key=lambda s: s.time_to_target or 0.0)
    after = show(first.time_to_target, "s")
    return f"first to the target {first.target_metric}: {first.preset} on {_devices(first)}, after {after}"


def _validation(study: Study, one: Summary | None) -> str:
    """Names the strategy that learns least from the same samples, where the repeats tell it from one device."""
    metric = study.metric
    if metric is None or one is None or metric not in one.validation:
        return ""
    ends = [s for s in study.good if metric in s.validation and s.global_batch_size == one.global_batch_size]
    higher_is_worse = metric != "accuracy"
    pick: Callable[..., Summary] = max if higher_is_worse else min
    worst = pick(ends, key=lambda s: s.validation[metric])
    reference = one.validation[metric]
    apart = _apart(worst, one, metric) if higher_is_worse else _apart(one, worst, metric)
    if not apart or abs(worst.validation[metric] - reference) < _NOTEWORTHY * abs(reference):
        return ""
    word = metric.replace("_", " ")
    ended, single = _metric(worst.validation[metric], metric), _metric(reference, metric)
    where = f"{worst.preset} on {_devices(worst)}"
    return f"learns least from the same samples: {where}, {word} {ended} against {single} on one device"


def _apart(higher: Summary, lower: Summary, metric: str) -> bool:
    """Whether the worst repeat of the better is still better than the best repeat of the worse."""
    low = higher.spread.get(metric, [higher.validation[metric]])[0]
    high = lower.spread.get(metric, [lower.validation[metric]])[-1]
    return low > high


def _metric(value: float, metric: str) -> str:
    return f"{value:.1%}" if metric == "accuracy" else number(value, digits=4)


def _troubles(study: Study) -> str:
    counts = Counter(r.status for r in study.records if r.kind == "measured" and r.status != "ok")
    if not counts:
        return ""
    parts = [f"{number_} {status}" for status, number_ in counts.most_common()]
    total = sum(1 for r in study.records if r.kind == "measured")
    return f"of {total} runs, {_listed(parts)}"


def _devices(summary: Summary) -> str:
    return f"{summary.num_devices} device{'s' if summary.num_devices > 1 else ''}"


def _listed(names: Sequence[str]) -> str:
    if len(names) > _MAX_NAMES:
        names = [*names[: _MAX_NAMES - 1], f"{len(names) - _MAX_NAMES + 1} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
