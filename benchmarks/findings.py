"""Reproduces the survey's findings in kind [Nichols 2021] and writes docs/survey.md. Slow: about 40 minutes on 2 cores.

    python benchmarks/findings.py [--out runs/findings] [--only curves,weak,memory] [--write docs/survey.md]

Parts whose folder under ``--out`` exists already are not run again, only read.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwise.bench.options import SurveyOptions
from meshwise.bench.survey import run_survey
from meshwise.cli.progress import display
from meshwise.record import Record, read_lines
from meshwise.units import show

SYNCHRONOUS = ("data", "zero1", "zero2", "zero3")
PIPELINES = ("1f1b", "pipedream", "pipedream-vsync", "pipedream-2bw")

PARTS: dict[str, dict[str, Any]] = {
    "curves-gpt2": {
        "model": "gpt2-tiny", "strategies": (*SYNCHRONOUS, *PIPELINES), "devices": (4,), "num_steps": 160,
        "evaluate_every": 40, "validation_samples": 256, "repeats": 2, "trace": False,
    },
    "curves-vgg": {
        "model": "vgg16-tiny", "data": "digits", "strategies": ("data", "zero3", *PIPELINES), "devices": (4,),
        "num_steps": 120, "evaluate_every": 40, "repeats": 2, "trace": False,
    },
    "weak-gpt2": {
        "model": "gpt2-tiny", "strategies": ("data",), "devices": (1, 2, 4), "scaling": "weak",
        "global_batch_size": 8, "train_samples": 6400, "num_steps": 400, "evaluate_every": 20, "repeats": 2,
        "validation_samples": 128, "target": ("perplexity", 14.0), "stop_at_target": True, "trace": False,
    },
    "memory-gpt2-small": {
        "model": "gpt2-small", "strategies": SYNCHRONOUS, "devices": (2, 4), "num_steps": 3, "untimed_steps": 1,
        "global_batch_size": 4, "sequence_length": 64, "validation_samples": 4, "train_samples": 64, "trace": False,
        "watchdog": 600.0,
    },
}  # fmt: skip


def main() -> None:
    arguments = _arguments()
    found: dict[str, list[Record]] = {}
    for name, settings in PARTS.items():
        if arguments.only and not any(name.startswith(part) for part in arguments.only.split(",")):
            continue
        folder = arguments.out / name
        if not (folder / "records.jsonl").exists():
            survey = run_survey(SurveyOptions(out=folder, **settings), observer=display())
            if survey.interrupted:
                raise SystemExit(130)
        found[name] = [r for r in read_lines(folder / "records.jsonl") if r.status != "interrupted"]
    text = "\n\n".join(_page(found))
    if arguments.write:
        arguments.write.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/findings"))
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    return parser.parse_args()


def _page(found: dict[str, list[Record]]) -> list[str]:
    sections = [_HEAD]
    for name, title in (
        ("curves-gpt2", "gpt2-tiny on stdlib"),
        ("curves-vgg", "vgg16-tiny on digits"),
    ):
        if name in found:
            sections.append(f"## Validation curves: {title}, 4 processes\n\n{curve_table(found[name])}")
    if "weak-gpt2" in found:
        sections.append(f"## Fixed local batch: gpt2-tiny, 8 samples a replica\n\n{weak_table(found['weak-gpt2'])}")
    if "memory-gpt2-small" in found:
        sections.append(f"## Memory per device: gpt2-small\n\n{memory_table(found['memory-gpt2-small'])}")
    return sections


def curve_table(records: Sequence[Record]) -> str:
    """Validation metric at a third, two thirds and the end of training: median and range over repeats."""
    metric = "accuracy" if any(r.curve and r.curve[-1].accuracy is not None for r in records) else "perplexity"
    steps = sorted({point.step for r in records for point in r.curve})
    shown = [steps[len(steps) // 3], steps[2 * len(steps) // 3], steps[-1]]
    lines = [
        f"| strategy | {' | '.join(f'{metric} at step {step}' for step in shown)} | step time | state of runs |",
        "|---|" + "---|" * (len(shown) + 2),
    ]
    for strategy, group in _grouped(records, lambda r: r.preset).items():
        cells = [_range([getattr(p, metric) for r in group for p in r.curve if p.step == step]) for step in shown]
        times = [r.step_time for r in group if r.step_time is not None]
        status = ", ".join(sorted({r.status for r in group}))
        lines.append(f"| {strategy} | {' | '.join(cells)} | {show(statistics.median(times), 's')} | {status} |")
    return "\n".join(lines)


def weak_table(records: Sequence[Record]) -> str:
    """Updates and epochs until the target, over data-parallel replicas at a fixed local batch."""
    lines = ["| replicas | global batch | updates to target | epochs to target |", "|---|---|---|---|"]
    for count, group in _grouped(records, lambda r: r.num_devices).items():
        reached = [_first(r) for r in group]
        known = [point for point in reached if point is not None]
        missed = f" ({len(reached) - len(known)} of {len(reached)} missed it)" if len(known) < len(reached) else ""
        updates, epochs = _range([p[0] for p in known], 0), _range([p[1] for p in known], 2)
        lines.append(f"| {count} | {group[0].global_batch_size} | {updates}{missed} | {epochs} |")
    return "\n".join(lines)


def memory_table(records: Sequence[Record]) -> str:
    """Peak of the fullest rank and what it is made of; the saving is against data parallel on as many devices."""
    lines = [
        "| strategy | devices | peak | below data | parameters | gradients held | optimizer state | step time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = {r.num_devices: max(r.peak_memory) for r in records if r.preset == "data" and r.peak_memory}
    for record in sorted(records, key=lambda r: r.num_devices):
        if not record.memory:
            lines.append(f"| {record.preset} | {record.num_devices} | {record.status}: {record.reason} | | | | | |")
            continue
        fullest = max(record.memory, key=lambda memory: memory.peak)
        saving = 1 - fullest.peak / base[record.num_devices]
        parts = (fullest.parameters, fullest.held_gradients, fullest.optimizer_state)
        cells = [show(float(part), "B") for part in parts]
        lines.append(
            f"| {record.preset} | {record.num_devices} | {show(float(fullest.peak), 'B')} | {saving:.0%} | "
            f"{' | '.join(cells)} | {show(record.step_time, 's')} |"
        )
    return "\n".join(lines)


def _first(record: Record) -> tuple[int, float] | None:
    """Step and epoch of the first validation at or below the target."""
    limit = PARTS["weak-gpt2"]["target"][1]
    hits = [(p.step, p.epoch) for p in record.curve if p.perplexity is not None and p.perplexity <= limit]
    return min(hits, default=None)


def _grouped(records: Sequence[Record], key: Any) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _range(values: Sequence[float | None], digits: int = 3) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle = statistics.median(known)
    return f"{middle:.{digits}f} ({min(known):.{digits}f} … {max(known):.{digits}f})"


_HEAD = """# The survey's findings, measured here

Each table is regenerated by `python benchmarks/findings.py --write docs/survey-tables.md`; brackets hold the smallest
and largest of two repeats (other weights and other sample order, the same split of the data)."""


if __name__ == "__main__":
    main()
