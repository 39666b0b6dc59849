"""Who runs against whom: per strategy of meshwise, hand-written loops and other libraries that do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from executors_lib import hand, peers
from executors_lib.cases import Case, loss, optimizer
from executors_lib.hand import NUM_MICRO_BATCHES, Step

HAND_LIMIT = 1.03
"""Time of ours over the hand-written loop's, at most: within 3 %."""

PEER_LIMIT = 1.0
"""Time of ours over a peer's, at most: no slower."""


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """One contestant beside meshwise.

    Attributes:
        build: makes its step on this rank.
        package: what must be installed; empty for torch.
        limit: largest time of ours over its, above which ours counts as slower; None: for orientation only.
        same_loss: whether it must give our losses.
    """

    name: str
    build: Callable[[Case], Step]
    package: str = ""
    limit: float | None = HAND_LIMIT
    same_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``strategy`` of meshwise against ``opponents``; ``split``: every rank gets its part of the global batch."""

    name: str
    strategy: str
    opponents: tuple[Opponent, ...]
    split: bool = True
    cases: tuple[str, ...] = field(default=("gpt", "cnn"))


def ours(strategy: str, *, global_batch_size: int, example: Any) -> Callable[[Case], Step]:
    def build(case: Case) -> Step:
        from meshwise.run.apply import parallelize

        executor = parallelize(
            case.build(),
            strategy,
            loss=loss,
            optimizer=optimizer,
            global_batch_size=global_batch_size,
            example=example,
        )
        return lambda inputs, targets: executor.step(inputs, targets).loss

    return build


def _peer(name: str, build: Callable[[Case], Step], package: str, *, same_loss: bool = True) -> Opponent:
    return Opponent(name=name, build=build, package=package, limit=PEER_LIMIT, same_loss=same_loss)


def _deepspeed(stage: int) -> Opponent:
    return _peer(f"DeepSpeed ZeRO-{stage}", peers.deepspeed(stage), "deepspeed")


_FLAT_ZERO = Opponent(name="flat buffer by hand", build=hand.flat_zero)
_TORCHGPIPE = _peer("torchgpipe", peers.torchgpipe, "torchgpipe", same_loss=False)
_1F1B = Opponent(name="Schedule1F1B by hand", build=hand.one_forward_one_backward)
_FLUSH = Opponent(
    name="Schedule1F1B by hand, with flush", build=hand.one_forward_one_backward, limit=1.0, same_loss=False
)
_NO_WAITING = Opponent(name="stage alone, no messages", build=hand.stage_alone, limit=None, same_loss=False)
_MICRO = f"micro_batches={NUM_MICRO_BATCHES}"

COMPARISONS = {
    comparison.name: comparison
    for comparison in (
        Comparison(
            name="data",
            strategy="data",
            opponents=(
                Opponent(name="DDP by hand", build=hand.data),
                _peer("Accelerate", peers.accelerate, "accelerate"),
                _deepspeed(0),
            ),
        ),
        Comparison(
            name="zero1",
            strategy="zero1",
            opponents=(
                _FLAT_ZERO,
                Opponent(name="ZeroRedundancyOptimizer", build=hand.zero_redundancy),
                _peer("fairscale OSS", peers.fairscale_1, "fairscale"),
                _deepspeed(1),
            ),
        ),
        Comparison(
            name="zero2",
            strategy="zero2",
            opponents=(
                _FLAT_ZERO,
                _peer("fairscale OSS + ShardedDDP", peers.fairscale_2, "fairscale"),
                _deepspeed(2),
            ),
        ),
        Comparison(
            name="zero3",
            strategy="zero3",
            opponents=(Opponent(name="fully_shard by hand", build=hand.fully_sharded), _deepspeed(3)),
        ),
        Comparison(
            name="tensor",
            strategy="tensor",
            opponents=(Opponent(name="DTensor by hand", build=hand.tensor),),
            split=False,
            cases=("gpt",),  # DTensor convolutions are wrong in torch 2.13 and 2.14
        ),
        Comparison(
            name="gpipe",
            strategy=f"gpipe,{_MICRO}",
            opponents=(Opponent(name="ScheduleGPipe by hand", build=hand.gpipe), _TORCHGPIPE),
            split=False,
        ),
        Comparison(name="1f1b", strategy=f"1f1b,{_MICRO}", opponents=(_1F1B,), split=False),
        Comparison(
            name="interleaved",
            strategy=f"interleaved,{_MICRO}",
            opponents=(Opponent(name="ScheduleInterleaved1F1B by hand", build=hand.interleaved),),
            split=False,
        ),
        Comparison(name="pipedream", strategy=f"pipedream,{_MICRO}", opponents=(_FLUSH, _NO_WAITING), split=False),
        Comparison(
            name="pipedream-2bw", strategy=f"pipedream-2bw,{_MICRO}", opponents=(_FLUSH, _NO_WAITING), split=False
        ),
    )
}
