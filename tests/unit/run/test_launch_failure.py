"""From what a failed run leaves behind to one sentence that names the rank, the step and the cause."""

from __future__ import annotations

from typing import Any

from meshwise.run.failure import Evidence, culprit, exit_codes, explain, explain_hang
from meshwise.run.rank_files import Beat
from meshwise.run.stacks import Frame, parse_dump, phase_of, users_frame, waits_for_others

LOG = """
E0930 12:00:00 123 torch/distributed/elastic/api.py:1003] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary
============================================================
Failures:
[1]:
  time      : 2026-09-30_12:00:00
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 76)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-09-30_12:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 77)
"""


def error(rank: int, time: float, **changes: Any) -> dict[str, Any]:
    event = {
        "event": "error",
        "rank": rank,
        "time": time,
        "step": 12,
        "phase": "forward",
        "type": "RuntimeError",
        "message": "boom",
        "cause": "error",
        "where": "model.py:7 in forward",
    }
    return {**event, **changes}


def beats(*steps: int, phase: str = "step") -> dict[int, Beat]:
    return {rank: Beat(step=step, phase=phase, time=0.0) for rank, step in enumerate(steps)}


def test_torchrun_tells_the_exit_codes():
    assert exit_codes(LOG) == {0: 1, 1: -9}
    assert exit_codes("nothing of note") == {}


def test_a_killed_rank_is_to_blame_though_its_peer_complained_first():
    evidence = Evidence(
        events={0: [error(0, 1.0, cause="peer", message="Connection closed by peer")], 1: []},
        beats=beats(12, 12),
        exit_codes=exit_codes(LOG),
    )
    sentence = explain(evidence)
    assert sentence.startswith("rank 1 was killed by signal 9 (SIGKILL) in step 12")
    assert "out of memory" in sentence


def test_the_kernels_own_count_settles_why():
    evidence = Evidence(events={}, beats=beats(3), exit_codes={0: -9}, out_of_memory_kills=1)
    assert "the kernel ran out of memory" in explain(evidence)


def test_the_first_to_raise_on_its_own_is_to_blame():
    events = {
        0: [error(0, 3.0, cause="peer", message="Connection reset by peer")],
        1: [error(1, 2.0, type="ValueError")],
        2: [error(2, 2.5, message="later")],
    }
    evidence = Evidence(events=events, beats=beats(12, 12, 12), exit_codes={0: -15, 1: 1})
    assert explain(evidence) == "rank 1 raised ValueError in step 12 (forward) at model.py:7 in forward: boom"


def test_out_of_memory_comes_with_what_helps():
    evidence = Evidence(events={0: [error(0, 1.0, cause="out of memory", message="no room")]}, beats=beats(12))
    assert explain(evidence).startswith(
        "rank 0 ran out of memory in step 12 (forward) at model.py:7 in forward: no room"
    )
    assert "smaller micro-batches" in explain(evidence)


def test_what_the_user_asked_for_wrongly_is_said_without_a_rank():
    evidence = Evidence(events={0: [error(0, 1.0, cause="input", message="no such data; use digits")]}, beats=beats(0))
    assert explain(evidence) == "no such data; use digits"


def test_a_crash_names_its_signal():
    evidence = Evidence(events={0: [], 1: []}, beats=beats(4, 4), exit_codes={0: -15, 1: -11})
    assert explain(evidence).startswith("rank 1 was ended by signal 11 (SIGSEGV) in step 4")


def test_a_quiet_exit_names_its_code():
    evidence = Evidence(events={0: []}, beats=beats(4), exit_codes={0: 3})
    assert explain(evidence).startswith("rank 0 ended with exit code 3 in step 4")


def test_a_rank_that_vanished_is_named_even_without_an_exit_code():
    evidence = Evidence(events={0: [], 1: []}, beats=beats(4, 5), vanished=(1,))
    assert explain(evidence).startswith("rank 1 vanished in step 5")


def test_before_the_first_step_the_phase_is_named():
    evidence = Evidence(events={0: []}, beats=beats(0, phase="data"), exit_codes={0: 3})
    assert "before the first step (data)" in explain(evidence)


def test_when_torchrun_itself_fails_its_last_line_is_shown():
    evidence = Evidence(events={}, beats={}, log="Traceback\nModuleNotFoundError: No module named 'torch'\n\n")
    assert "before any rank started: ModuleNotFoundError" in explain(evidence)


FORWARD = Frame(file="/site-packages/torch/nn/modules/module.py", line=1, function="_call_impl")
USER = Frame(file="/home/me/model.py", line=30, function="forward")
COLLECTIVE = Frame(file="/site-packages/torch/distributed/distributed_c10d.py", line=3000, function="all_reduce")
ENGINE = Frame(file="/site-packages/torch/autograd/graph.py", line=800, function="_engine_run_backward")


def test_the_rank_in_its_own_code_hangs_and_those_in_collectives_wait():
    evidence = Evidence(
        events={},
        beats=beats(8, 7, 8),
        stacks={0: [FORWARD, COLLECTIVE], 1: [FORWARD, USER], 2: [ENGINE]},
        stalled={0: 20.0, 1: 20.5, 2: 20.2},
    )
    assert culprit(evidence) == 1
    sentence = explain_hang(evidence, watchdog=20.0)
    assert sentence.startswith("rank 1 made no progress for 20 s in step 7 (forward) at model.py:30 in forward")
    assert "watchdog 20 s" in sentence


def test_a_rank_that_does_not_answer_is_suspected_before_one_that_waits():
    evidence = Evidence(events={}, beats=beats(8, 8), stacks={0: [COLLECTIVE]}, stalled={0: 20.0, 1: 20.0})
    assert culprit(evidence) == 1
    assert "does not even answer" in explain_hang(evidence, watchdog=20.0)


def test_if_all_wait_the_least_advanced_is_suspected():
    stacks = {0: [COLLECTIVE], 1: [COLLECTIVE]}
    evidence = Evidence(events={}, beats=beats(9, 8), stacks=stacks, stalled={0: 20.0, 1: 20.0})
    assert culprit(evidence) == 1


def test_a_rank_that_never_started_is_named():
    evidence = Evidence(events={}, beats={0: Beat(step=0, phase="groups", time=0.0)}, stalled={0: 50.0, 1: 60.0})
    assert explain_hang(evidence, watchdog=20.0).startswith("rank 1 did not start within 60 s")


DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "/home/me/model.py", line 30 in forward
  File "/site-packages/torch/nn/modules/module.py", line 1 in _call_impl
  File "/repo/src/meshwise/run/train.py", line 200 in _step
  File "/repo/src/meshwise/run/worker.py", line 60 in main
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_training_thread_is_found_in_a_dump():
    stack = parse_dump(DUMP)
    assert [frame.function for frame in stack] == ["_run_code", "main", "_step", "_call_impl", "forward"]
    assert users_frame(stack) == Frame(file="/home/me/model.py", line=30, function="forward")
    assert phase_of(stack, "step") == "forward"
    assert not waits_for_others(stack)
    assert parse_dump("") == []


def test_a_phase_that_is_no_training_step_stays_what_it_is():
    assert phase_of([FORWARD, USER], "validation") == "validation"
    assert phase_of([ENGINE, FORWARD, USER], "step") == "backward"
    assert phase_of([Frame(file="/site-packages/torch/optim/adam.py", line=1, function="step")], "step") == "update"
