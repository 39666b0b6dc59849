"""Events survive half-written lines and numbers that are none; heartbeats are whole whenever they are read."""

from __future__ import annotations

import math

from meshwise.run.rank_files import Beat, RankWriter, Tail, events_path, last_event, read_beat


def test_events_are_on_disk_as_soon_as_they_are_written(tmp_path):
    writer = RankWriter(tmp_path, 0)
    writer.event("step", step=1, loss=2.5)
    tail = Tail(tmp_path, 1)
    assert [event["loss"] for event in tail.read()] == [2.5]
    assert tail.read() == []
    writer.event("end")
    assert [event["event"] for event in tail.read()] == ["end"]
    assert last_event(tail.events[0], "step")["step"] == 1
    assert last_event(tail.events[0], "memory") is None


def test_a_line_without_its_end_waits(tmp_path):
    with events_path(tmp_path, 0).open("w") as file:
        file.write('{"event": "sta')
        file.flush()
        tail = Tail(tmp_path, 2)
        assert tail.read() == []
        file.write('rt"}\n')
        file.flush()
        assert tail.read() == [{"event": "start"}]


def test_what_is_not_finite_becomes_null(tmp_path):
    writer = RankWriter(tmp_path, 0)
    writer.event("step", loss=math.nan, sums={"a": math.inf})
    (event,) = Tail(tmp_path, 1).read()
    assert event["loss"] is None and event["sums"] == {"a": None}


def test_a_shorter_heartbeat_replaces_a_longer_one(tmp_path):
    writer = RankWriter(tmp_path, 3)
    assert read_beat(tmp_path, 3) is None
    writer.beat(123456, "communication")
    writer.beat(7, "step")
    beat = read_beat(tmp_path, 3)
    assert isinstance(beat, Beat) and (beat.step, beat.phase) == (7, "step")
    assert (writer.step, writer.phase) == (7, "step")
