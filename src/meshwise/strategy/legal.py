"""What a strategy asks of a model, a batch and a device count, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.errors import StrategyError
from meshwise.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the checks need to know of a model.

    Attributes:
        name: as the user wrote it.
        num_layers: layers a pipeline can cut between; 0 where no chain of layers is known.
        tensor_sizes: name → size for everything a tensor axis must divide (heads, sequence, hidden widths).
        no_pipeline, no_tensor: why the model cannot be split so, and what to do; empty where it can.
        has_batch_norm: whether statistics over samples are part of the model.
    """

    name: str
    num_layers: int = 0
    tensor_sizes: tuple[tuple[str, int], ...] = ()
    no_pipeline: str = ""
    no_tensor: str = ""
    has_batch_norm: bool = False


def check(strategy: Strategy, facts: ModelFacts, global_batch_size: int, *, clip_norm: float = 0.0) -> None:
    """Passes in silence, or says which number does not fit and the nearest legal ones.

    Raises:
        StrategyError: layers, heads, widths or the global batch do not divide as the strategy needs, or gradients are
            to be clipped (``clip_norm`` above 0) where no global norm exists.
    """
    if strategy.asynchronous and clip_norm > 0:
        raise StrategyError(
            f"{strategy} with a clip norm of {clip_norm} cannot be: stages update at different times, so there is no "
            "moment at which a norm over all of them exists; use no clip norm, or schedule=1f1b"
        )
    _check_batch(strategy, global_batch_size)
    _check_pipeline(strategy, facts)
    _check_tensor(strategy, facts)
    if strategy.batch_norm == "sync" and not facts.has_batch_norm:
        raise StrategyError(f"batch_norm=sync: {facts.name} has no batch norm; drop the key")


def _check_batch(strategy: Strategy, global_batch_size: int) -> None:
    parts = strategy.data_parallel_size * strategy.num_micro_batches
    if global_batch_size % parts:
        below, above = global_batch_size // parts * parts, (global_batch_size // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise StrategyError(
            f"{strategy}: a global batch of {global_batch_size} does not divide into data "
            f"{strategy.data_parallel_size} × micro_batches {strategy.num_micro_batches} = {parts}; "
            f"use a global batch of {nearest}"
        )


def _check_pipeline(strategy: Strategy, facts: ModelFacts) -> None:
    if strategy.pipeline_parallel_size == 1:
        return
    if facts.no_pipeline:
        raise StrategyError(f"{strategy}: {facts.name} {facts.no_pipeline}")
    if strategy.schedule == "1f1b" and strategy.num_micro_batches < strategy.pipeline_parallel_size:
        raise StrategyError(
            f"{strategy}: {strategy.num_micro_batches} micro-batches never fill {strategy.pipeline_parallel_size} "
            f"stages; use micro_batches={strategy.pipeline_parallel_size} or more, or schedule=gpipe"
        )
    if strategy.num_stages > facts.num_layers:
        raise StrategyError(
            f"{strategy}: {facts.name} has {facts.num_layers} layers, fewer than the {strategy.num_stages} stages "
            f"asked for; use at most {facts.num_layers} stages"
        )


def _check_tensor(strategy: Strategy, facts: ModelFacts) -> None:
    size = strategy.tensor_parallel_size
    if size == 1:
        return
    if strategy.asynchronous:
        raise StrategyError(
            f"{strategy}: {strategy.schedule} keeps weight versions of whole layers, which tensor={size} would split; "
            "use schedule=1f1b with the tensor axis, or tensor=1"
        )
    if facts.no_tensor:
        raise StrategyError(f"{strategy}: {facts.name} {facts.no_tensor}")
    for name, count in facts.tensor_sizes:
        if count % size:
            legal = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
            below = max(divisor for divisor in legal if divisor < size)
            above = min((divisor for divisor in legal if divisor > size), default=None)
            nearest = f"tensor={below}" + (f" or tensor={above}" if above else "")
            raise StrategyError(
                f"{strategy}: {facts.name} has {count} {name}, which tensor={size} does not divide; use {nearest}"
            )
