"""The merged timeline: one process per rank, one clock, only what is worth seeing."""

from __future__ import annotations

import json

from meshwise.measure.trace import compact, merge, merge_files, rank_name


def event(name: str, start: float, **changes: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 5, "tid": 70, "ts": start, "dur": 20.0, **changes}


def raw(base: int, *events: dict[str, object]) -> dict[str, object]:
    return {"baseTimeNanoseconds": base, "traceEvents": list(events)}


def test_only_work_is_kept():
    trace = compact(
        raw(
            0,
            event("aten::mm", 1.0),
            event("gloo:all_reduce", 2.0, cat="user_annotation", tid=71),
            event("aten::view", 1.0, dur=0.4),
            event("[memory]", 1.5, ph="i", cat="cpu_instant_event"),
            event("arrow", 1.5, ph="s", cat="fwdbwd"),
            event("PyTorch Profiler (0)", 0.0, cat="user_annotation"),
        )
    )
    assert [(one[0], one[2]) for one in trace["events"]] == [("aten::mm", 0), ("gloo:all_reduce", 1)]


def test_ranks_are_laid_on_one_clock():
    first = compact(raw(2_000_000, event("a", 10.0)))
    second = compact(raw(1_000_000, event("b", 1015.0)))
    merged = merge({0: first, 1: second}, {0: "rank 0", 1: "rank 1"})
    times = {one["name"]: (one["pid"], one["ts"]) for one in merged["traceEvents"] if one["ph"] == "X"}
    assert times == {"a": (0, 0.0), "b": (1, 5.0)}


def test_processes_are_named_and_sorted_by_rank():
    merged = merge({1: compact(raw(0, event("a", 0.0)))}, {1: rank_name(1, {"pipeline": 0, "data": 1})})
    names = [one for one in merged["traceEvents"] if one["ph"] == "M"]
    assert {"process_name": "rank 1 (pipeline 0, data 1)"}.items() <= {
        one["name"]: one["args"].get("name") for one in names
    }.items()
    assert any(one["name"] == "process_sort_index" and one["args"]["sort_index"] == 1 for one in names)
    assert rank_name(0, {}) == "rank 0"


def test_files_become_one_file_of_json(tmp_path):
    paths = {}
    for rank in range(2):
        paths[rank] = tmp_path / f"{rank}.json"
        paths[rank].write_text(json.dumps(compact(raw(0, event("a", float(rank))))))
    merge_files(paths, {}, tmp_path / "trace.json")
    merged = json.loads((tmp_path / "trace.json").read_text())
    assert {one["pid"] for one in merged["traceEvents"]} == {0, 1}
    assert merged["displayTimeUnit"] == "ms"


def test_ranks_without_events_do_not_break_the_clock():
    assert merge({0: {"base": 0, "events": []}}, {})["traceEvents"][0]["name"] == "process_name"
