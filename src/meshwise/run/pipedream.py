"""PipeDream [Narayanan 2019] and PipeDream-2BW [Narayanan 2021]: a pipeline that never drains.

Every stage runs ``n-1-s`` warm-up forwards, then one forward and one backward in turn, across steps. F0 = forward of
micro-batch 0, B0 = its backward, U = update; 3 stages, ``pipedream``:

    s0  F0 F1 F2 .. .. B0 U F3 B1 U F4 B2 U …
    s1  .. F0 F1 .. B0 U F2 B1 U F3 B2 U …
    s2  .. .. F0 B0 U F1 B1 U F2 B2 U …

The price is staleness: a micro-batch's gradient is applied to newer weights than it was computed with. Forward and
backward of one micro-batch use the same version of the weights (``strategy.schedule.forward_version``):

    pipedream         the newest this stage has                    n-s versions on stage s   an update per micro-batch
    pipedream-vsync   the newest that all stages will have had     n versions                an update per micro-batch
    pipedream-2bw     batch k: what batch k-2 left                 2 versions                an update per step
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.profiler import record_function

from meshwise.errors import ModelError, RunError, StrategyError
from meshwise.run.checkpointing import run_checkpointed
from meshwise.run.executor import Evaluation, Held, Loss, OptimizerFactory, StepResult, evaluate_outputs
from meshwise.run.groups import Groups
from meshwise.run.pipedream_messages import Messages
from meshwise.run.point_to_point import STATE, Shape, StageLink
from meshwise.run.tied_weights import Tie, TiedWeights
from meshwise.run.weight_versions import WeightVersions
from meshwise.strategy import Strategy
from meshwise.strategy.schedule import forward_version, micro_batches_per_update, warm_up_forwards

Gradients = list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """A micro-batch between its forward and its backward. ``output`` is the loss on the last stage."""

    number: int
    version: int
    leaves: dict[str, Tensor]
    run: _StageRun
    input: Tensor
    output: Tensor


class PipeDream:
    """One stage of an asynchronous pipeline; implements ``Executor``.

    Only weights have versions: buffers (batch-norm statistics) are the stage's own, updated once by every forward.
    There is no gradient clipping: a norm over all stages would be of gradients that never exist at one time.

    Weights that the whole model ties across stages (GPT-2's embedding and head) stay tied, a case the papers do not
    treat: the first stage that uses one updates it, with the gradients of all; the others use its version of the same
    micro-batch (``tied_weights``). They hold two or more versions of that weight besides those of their own weights.

    Attributes:
        stage: this rank's part of the model; its parameters are the newest weights.
        optimizer: over the stage's trainable parameters; its learning rate may change between steps.
        max_weight_versions: most versions of the weights this stage updates that were alive at one time, counted by
            storage.
    """

    def __init__(
        self,
        *,
        stage: nn.Module,
        stage_names: dict[str, str],
        strategy: Strategy,
        groups: Groups,
        loss: Loss,
        optimizer: OptimizerFactory,
        device: torch.device,
        tied: Sequence[Tie] = (),
    ) -> None:
        """Called by all ranks at the same time.

        Args:
            stage: ``forward(x) -> y``, one tensor each; on ``device``, with the same weights on every data replica.
            stage_names: name of a parameter or buffer in ``stage`` → its name in the whole model.
            strategy: with an asynchronous schedule.
            groups: of ``strategy.mesh``.
            loss: used on the last stage.
            optimizer: makes one for this stage's parameters.
            device: where ``stage`` is.
            tied: the trainable weights that stages share, the same on all ranks; every stage has an equal copy.

        Raises:
            StrategyError: the strategy is synchronous.
            ModelError: ``stage_names`` or ``tied`` has a name that the stage has not, or a weight of two stages is in
                ``stage_names`` and not in ``tied``.
        """
        _check(strategy, stage, stage_names)
        self.strategy = strategy
        self.groups = groups
        self.stage = stage
        self._loss = loss
        self._device = device
        self._link = StageLink(groups, tied=bool(tied))
        self._messages = Messages(self._link)
        self._tied = TiedWeights(tied, stage, strategy=strategy, link=self._link)
        borrowed = self._tied.borrowed
        updated = [p for name, p in stage.named_parameters() if p.requires_grad and name not in borrowed]
        self.optimizer = optimizer(updated or [nn.Parameter(torch.empty(0))])
        self._versions = WeightVersions(stage, self.optimizer, borrowed=borrowed)
        self._warm_up = warm_up_forwards(self._link.stage, self._link.num_stages)
        self._per_update = micro_batches_per_update(strategy)
        self._in_flight: deque[_InFlight] = deque()
        self._gradients: Gradients | None = None
        self._gradients_owned = False
        self._gradient_nbytes = 0
        self._num_admitted = 0  # micro-batches since the last flush
        self._first_version = 0  # updates before it
        # An in-place first module may not write into a leaf that wants a gradient; it is given a copy.
        self._copy_input = any(getattr(module, "inplace", False) for module in stage.modules())
        self._state_names = _gather_names(stage, stage_names, tied, groups)

    @property
    def max_weight_versions(self) -> int:
        return self._versions.peak_versions

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Admits this replica's ``num_micro_batches`` micro-batches; earlier ones may finish, these may stay in flight.

        ``inputs`` are read on the first stage and ``targets`` on the last; elsewhere only their shapes matter.

        Raises:
            StrategyError: the batch does not divide into the micro-batches.
        """
        count = self.strategy.num_micro_batches
        if len(inputs) % count:
            below = len(inputs) // count * count
            raise StrategyError(
                f"a batch of {len(inputs)} does not divide into {count} micro-batches; use {below or count} samples"
            )
        losses = []
        chunks = list(zip(inputs.chunk(count), targets.chunk(count)))
        for index, (micro_inputs, micro_targets) in enumerate(chunks):
            self._forward(micro_inputs, micro_targets)
            if not self._link.is_first and index + 1 < count:
                self._messages.expect_activation(self._num_admitted, Shape.of(chunks[index + 1][0]))
            if not self._link.is_last:
                self._messages.expect_gradient(self._num_admitted - self._warm_up)
            else:
                losses.append(self._in_flight[-1].output.detach())
            if len(self._in_flight) > self._warm_up:
                self._backward()
        return StepResult(loss=torch.stack(losses).mean() if losses else None)

    def flush(self) -> None:
        """Finishes the micro-batches in flight; the next step fills the pipeline anew with the newest weights."""
        self._tied.begin_flush()
        while self._in_flight:
            self._backward(draining=True)
        self._messages.settle()
        newest = self._versions.newest
        self._tied.finish_flush(newest - self._first_version, self._versions.leaves(newest))
        self._num_admitted = 0
        self._first_version = self._versions.newest
        self._versions.forget(before=self._first_version)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Evaluation | None:
        """One pass through all stages with the newest weights; any batch size.

        Raises:
            RunError: micro-batches are in flight.
        """
        if self._num_admitted:
            raise RunError(f"{self._num_admitted} micro-batches came in since the last flush; call flush() first")
        with _evaluation_mode(self.stage), torch.no_grad(), self._autocast():
            output = self.stage(inputs.to(self._device) if self._link.is_first else self._link.receive_previous())
            if not self._link.is_last:
                self._link.send_next(output)
                return None
            targets = targets.to(self._device)
            return evaluate_outputs(output, targets, self._loss(output, targets))

    def state(self) -> dict[str, Tensor]:
        """The newest weights of every stage of the first replica, on rank 0. Call ``flush`` first.

        A weight that stages share comes once under each of its names.
        """
        if self.groups.index("data"):
            return {}
        tensors = _named_tensors(self.stage)
        own = {key: tensors[name].detach() for name, key in self._state_names[self._link.stage].items()}
        if not self._link.is_first:
            for tensor in own.values():
                self._link.send_any(tensor, 0, kind=STATE)
            return {}
        whole = {key: tensor.cpu().clone() for key, tensor in own.items()}
        for stage in range(1, self._link.num_stages):
            for key in self._state_names[stage].values():
                whole[key] = self._link.receive_any(stage, kind=STATE).cpu()
        return whole

    def held(self) -> Held:
        """``parameters`` counts every weight version alive at the peak, ``gradients`` those of tied weights on their
        way from stage to stage; ``weight_versions`` is of the weights this stage updates."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return Held(
            parameters=self._versions.peak_nbytes + self._tied.version_nbytes,
            gradients=self._gradient_nbytes + self._tied.gradient_nbytes,
            optimizer_state=sum(value.nbytes for value in state if isinstance(value, Tensor)),
            weight_versions=self.max_weight_versions,
        )

    def release_gradients(self) -> None:
        """Nothing to do: an update drops its gradients, and 2BW's partial sums belong to batches still in flight."""

    def _forward(self, inputs: Tensor, targets: Tensor) -> None:
        number, shape = self._num_admitted, Shape.of(inputs)
        version = self._first_version + forward_version(self.strategy, self._link.stage, number)
        leaves = self._versions.leaves(version) | self._tied.leaves(number)
        if self._link.is_first:
            stage_input = inputs.to(self._device)
        else:
            stage_input = self._messages.take_activation(number, shape).requires_grad_()
        with record_function("meshwise.forward"), self._autocast():
            run = _StageRun(self.stage, leaves, copy_input=self._copy_input)
            output = run_checkpointed(run, stage_input, mode=self.strategy.checkpointing)
            if self._link.is_last:
                output = self._loss(output, targets.to(self._device))
        if not self._link.is_last:
            self._messages.give_activation(number, shape, output)
        self._in_flight.append(
            _InFlight(number=number, version=version, leaves=leaves, run=run, input=stage_input, output=output)
        )
        self._num_admitted += 1

    def _backward(self, *, draining: bool = False) -> None:
        number = self._in_flight[0].number
        # The graph ends with the call, before the update: a graph holds the weights it was made with.
        gradients = self._differentiate(self._in_flight.popleft())
        self._accumulate(gradients)
        if (number + 1) % self._per_update == 0:
            self._update(draining=draining)
        self._tied.forget(before=self._in_flight[0].number if self._in_flight else self._num_admitted)

    def _differentiate(self, batch: _InFlight) -> Gradients:
        """Gradients of the weights that this stage updates; sends the input's to the stage before."""
        gradient = None if self._link.is_last else self._messages.take_gradient(batch.number)
        with_input = [] if self._link.is_first else [batch.input]
        wanted = [*with_input, *batch.leaves.values()]
        found: Gradients = [None] * len(wanted)
        if self.strategy.checkpointing != "none":
            batch.run.spare_buffers()
        if wanted and batch.output.requires_grad:
            with record_function("meshwise.backward"):
                found = list(torch.autograd.grad(batch.output, wanted, gradient, allow_unused=True))
        if with_input:
            input_gradient = found.pop(0)
            if input_gradient is None:
                input_gradient = torch.zeros_like(batch.input)
            self._messages.give_gradient(batch.number, input_gradient)
        own = len(self._versions.names)
        self._tied.give_gradients(batch.number, found[own:])
        del found[own:]
        self._tied.add_gradients(batch.number, self._versions.names, found)
        return found

    def _accumulate(self, gradients: Gradients) -> None:
        """Sums in place only into tensors made here: autograd may hand out one tensor for several weights."""
        if self._gradients is None:
            self._gradients, self._gradients_owned = gradients, False
            return
        for index, (total, gradient) in enumerate(zip(self._gradients, gradients)):
            if gradient is None:
                continue
            if total is None:
                self._gradients[index] = gradient.clone()
            elif self._gradients_owned:
                total.add_(gradient)
            else:
                self._gradients[index] = total + gradient
        self._gradients_owned = True

    def _update(self, *, draining: bool) -> None:
        gradients, self._gradients = self._gradients or [], None
        if self._per_update > 1:
            gradients = [None if total is None else total / self._per_update for total in gradients]
        if self.groups.size("data") > 1:
            gradients = _average(gradients, self._versions.parameters, self.groups)
        self._gradient_nbytes = max(self._gradient_nbytes, sum(g.nbytes for g in gradients if g is not None))
        with record_function("meshwise.update"):
            self._versions.update(gradients, oldest_needed=self._oldest_needed(draining=draining))
        if not draining:
            newest = self._versions.newest
            self._tied.publish(newest - self._first_version, self._versions.leaves(newest))

    def _oldest_needed(self, *, draining: bool) -> int:
        """Versions only grow with the micro-batch, so the next backward's is the oldest."""
        if self._in_flight:
            return self._in_flight[0].version
        if draining:
            return self._versions.newest + 1
        return self._first_version + forward_version(self.strategy, self._link.stage, self._num_admitted)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self.strategy.precision == "bf16")


class _StageRun:
    """The stage with given weights."""

    def __init__(self, stage: nn.Module, leaves: dict[str, Tensor], *, copy_input: bool) -> None:
        self._stage = stage
        self._tensors = leaves
        self._copy_input = copy_input

    def __call__(self, stage_input: Tensor) -> Tensor:
        if self._copy_input:
            stage_input = stage_input.clone()
        output: Tensor = functional_call(self._stage, self._tensors, (stage_input,))
        return output

    def spare_buffers(self) -> None:
        """From now on calls (checkpointing's second) change copies of the stage's buffers and not the buffers."""
        buffers = {name: buffer.clone() for name, buffer in self._stage.named_buffers()}
        self._tensors = self._tensors | buffers


def _check(strategy: Strategy, stage: nn.Module, stage_names: dict[str, str]) -> None:
    if not strategy.asynchronous:
        raise StrategyError(f"{strategy} is no asynchronous pipeline; use pipedream, pipedream-vsync or pipedream-2bw")
    missing = sorted(set(stage_names) - set(_named_tensors(stage)))
    if missing:
        raise ModelError(f"the stage has no {missing[0]!r}; name its own parameters and buffers in stage_names")


def _named_tensors(stage: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(stage.named_buffers(remove_duplicate=False)),
        **dict(stage.named_parameters(remove_duplicate=False)),
    }


def _gather_names(
    stage: nn.Module, stage_names: dict[str, str], tied: Sequence[Tie], groups: Groups
) -> list[dict[str, str]]:
    """For every stage: name in the stage → key in ``state()``. A name that several stages have is the first's."""
    trainable = {name for name, parameter in stage.named_parameters() if parameter.requires_grad}
    gathered = [(stage_names, trainable)] * groups.size("pipeline")
    dist.all_gather_object(gathered, (stage_names, trainable), group=groups.group("pipeline"))
    owner: dict[str, int] = {}
    keys: list[dict[str, str]] = []
    for index, (names, stage_trainable) in enumerate(gathered):
        keys.append({name: original for name, original in names.items() if owner.setdefault(original, index) == index})
        for name in sorted(names.keys() & stage_trainable - keys[index].keys()):
            if not any(tie.get(index) == name for tie in tied):
                raise ModelError(
                    f"{names[name]} is on stages {owner[names[name]]} and {index} and would be trained as two weights; "
                    "name it in tied"
                )
    return keys


def _average(gradients: Gradients, parameters: list[nn.Parameter], groups: Groups) -> Gradients:
    """Mean over the data replicas, one all-reduce per dtype; a weight unused here counts as a zero gradient."""
    whole = [torch.zeros_like(p) if gradient is None else gradient for gradient, p in zip(gradients, parameters)]
    averaged: Gradients = [None] * len(whole)
    for dtype in dict.fromkeys(gradient.dtype for gradient in whole):
        indices = [index for index, gradient in enumerate(whole) if gradient.dtype == dtype]
        flat = torch.cat([whole[index].reshape(-1) for index in indices])
        dist.all_reduce(flat, group=groups.group("data"))
        flat /= groups.size("data")
        for index, part in zip(indices, flat.split([whole[index].numel() for index in indices])):
            averaged[index] = part.view_as(whole[index])
    return averaged


@contextlib.contextmanager
def _evaluation_mode(stage: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; each module returns to the mode it had."""
    modes = [(module, module.training) for module in stage.modules()]
    stage.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
