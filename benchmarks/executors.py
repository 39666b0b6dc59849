"""Each strategy of meshwise timed beside hand-written loops with torch's parts, and beside other libraries.

    python benchmarks/executors.py                       all strategies, two models, 2 processes; about 10 minutes
    python benchmarks/executors.py --only zero2,tensor   some strategies
    python benchmarks/executors.py --peers PYTHON        an interpreter that has the other libraries too

Contestants of a comparison live in the same processes, have their own copies of the same model, and take turns a few
steps at a time, so that what else the machine does hits all alike. ``docs/benchmarks.md`` says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from executors_lib.comparisons import COMPARISONS
from executors_lib.launch import ComparisonError, Plan, check_interpreter, run_comparison
from executors_lib.outcome import Outcome, outcomes

BUSY = 0.3
"""Load per processor before the start above which timings mean little."""

COLORS = {"ok": "green", "slower": "bold red", "slower?": "yellow", "": "white"}


def main() -> None:
    options = _options()
    chatter = Console(stderr=True)
    plan = Plan(python=options.peers, num_ranks=options.ranks, num_rounds=options.rounds, steps=options.steps)
    trouble = check_interpreter(plan.python)
    if trouble:
        chatter.print(f"[red]{plan.python} cannot run the benchmark: {trouble}; give one that has torch")
        sys.exit(2)
    load = os.getloadavg()[0]
    busy = load > BUSY * (os.cpu_count() or 1)
    _warn(chatter, load, busy)
    lines: list[Outcome] = []
    failed: list[str] = []
    for name in options.only:
        for case in [case for case in COMPARISONS[name].cases if case in options.models]:
            chatter.print(f"[dim]{name} on {case} …", highlight=False)
            try:
                lines += outcomes(COMPARISONS[name], case, run_comparison(name, case, plan))
            except ComparisonError as error:
                failed.append(str(error))
                chatter.print(str(error), style="red", markup=False, soft_wrap=True)
    if options.json:
        record = {"load": load, "load_after": os.getloadavg()[0], "busy": busy, "num_devices": plan.num_ranks}
        print(json.dumps({**record, "outcomes": [line.as_json() for line in lines], "failed": failed}))
    else:
        _show(Console(width=None if sys.stdout.isatty() else 150), lines, plan)
    _warn(chatter, load, busy)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Plan.num_rounds, help="turns of every contestant")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="steps in a turn")
    parser.add_argument("--ranks", type=int, default=Plan.num_ranks, help="processes")
    parser.add_argument("--only", type=_names(COMPARISONS), default=list(COMPARISONS), help="strategies, by comma")
    parser.add_argument("--models", type=_names(["gpt", "cnn"]), default=["gpt", "cnn"], help="gpt, cnn or both")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter with other libraries")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(known)}")
        return chosen

    return names


def _warn(console: Console, load: float, busy: bool) -> None:
    processors = os.cpu_count() or 1
    now = os.getloadavg()[0]
    console.print(f"[dim]load average {load:.1f} at the start, {now:.1f} now, {processors} processors", highlight=False)
    if busy:
        console.print(
            "[yellow]the machine was busy: ratios scatter; look at the processor column, or run it again later"
        )


def _show(console: Console, lines: list[Outcome], plan: Plan) -> None:
    table = Table(
        title=f"meshwise beside others: time ours / theirs, {plan.num_ranks} processes (below 1: ours is faster)"
    )
    for heading in ("strategy", "model", "against"):
        table.add_column(heading)
    for heading in ("ours", "theirs", "median", "min … max", "best", "processor"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict")
    before: tuple[str, str] | None = None
    for line in lines:
        if before is not None and (line.strategy, line.model) != before:
            table.add_section()
        before = (line.strategy, line.model)
        table.add_row(line.strategy, line.model, line.opponent, *_cells(line))
    console.print(table)
    for line in lines:
        if line.strategy.startswith("pipedream") and line.ratio:
            console.print(f"{line.strategy} on {line.model}: {1 / line.ratio:.2f} × the throughput of {line.opponent}")


def _cells(line: Outcome) -> list[str]:
    if line.ratio is None:
        return [""] * 6 + [f"[dim]{line.status}"]
    verdict = f"[{COLORS[line.verdict]}]{line.verdict}" if line.status == "ok" else f"[bold red]{line.status}"
    return [
        f"{line.step_time:.3f} s",
        f"{line.their_step_time:.3f} s",
        f"{line.ratio:.3f}",
        f"{line.ratio_low:.2f} … {line.ratio_high:.2f}",
        f"{line.ratio_best:.3f}",
        f"{line.ratio_processor:.3f}",
        verdict,
    ]


if __name__ == "__main__":
    main()
