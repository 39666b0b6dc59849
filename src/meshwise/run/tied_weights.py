"""Weights that stages of an asynchronous pipeline share (GPT-2's embedding and head), kept one weight.

A shared weight belongs to the first stage that uses it, its home ``h``. For micro-batch ``b`` a later stage ``t``
computes with the version that the home uses for ``b``, gives the home its gradient of ``b``, and never updates:

    home h    F(b) with version v    …                     B(b): own + received gradient, U ──► version to t
    stage t        F(b) with v, B(b) ──► gradient to h

Version ``v`` is made before the home begins the first micro-batch that uses it, and the gradient of ``b`` leaves ``t``
``t-h`` forwards before the home's backward of ``b``; so neither waits for the other. As with ``Messages``, whatever is
sent in a stage's ``i``-th forward and the backward after it has its receive posted before the receiver's own ``i``-th
forward, so nothing is left waiting for a later step.

A stage may be the home of several weights, and several stages may share one: each is a loan of its own. Numbers of
micro-batches and versions count from the last flush.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwise.errors import ModelError
from meshwise.run.point_to_point import TIED_GRADIENT, TIED_VERSION, Shape, StageLink, Transfer
from meshwise.strategy import Strategy
from meshwise.strategy.schedule import forward_version, micro_batches_per_update, warm_up_forwards

Tie = Mapping[int, str]
"""Stage → the shared weight's name in that stage. The first stage is the weight's home."""


def ties_between(stages: Sequence[nn.Module]) -> list[Tie]:
    """The trainable weights that several of ``stages`` use, before the stages are copied or moved apart."""
    names: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                names.setdefault(id(parameter), {})[index] = name
    return [tie for tie in names.values() if len(tie) > 1]


class TiedWeights:
    """This stage's part in all ties: what it lends as a home, and what it borrows.

    Attributes:
        borrowed: this stage's names of weights whose home is another stage.
    """

    def __init__(self, ties: Sequence[Tie], stage: nn.Module, *, strategy: Strategy, link: StageLink) -> None:
        """``stage`` holds a copy of each weight named for it; the copies of a weight are equal everywhere.

        Raises:
            ModelError: the stage has no such trainable weight.
        """
        parameters = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        loans = [(tie, other) for tie in ties for other in sorted(tie)[1:]]
        self._lent: list[_Lent] = []
        self._borrowed: list[_Borrowed] = []
        for index, (tie, other) in enumerate(loans):
            name = tie.get(link.stage)
            if name is not None and name not in parameters:
                raise ModelError(f"the stage has no trainable {name!r}; name its own parameters in tied")
            way = _Way(home=min(tie), other=other, strategy=strategy, link=link, turn=(index, len(loans)))
            if link.stage == way.home and name is not None:
                self._lent.append(_Lent(name, parameters[name], way))
            elif link.stage == other and name is not None:
                self._borrowed.append(_Borrowed(name, parameters[name], way))
        self.borrowed = tuple(weight.name for weight in self._borrowed)

    @property
    def version_nbytes(self) -> int:
        """Most bytes of borrowed versions at one time, those about to arrive included."""
        return sum(weight.peak_version_nbytes for weight in self._borrowed)

    @property
    def gradient_nbytes(self) -> int:
        """Most bytes of gradients on their way, to or from this stage, at one time."""
        return sum(weight.peak_gradient_nbytes for weight in self._lent) + sum(
            weight.peak_gradient_nbytes for weight in self._borrowed
        )

    def leaves(self, number: int) -> dict[str, Tensor]:
        """Name → leaf tensor of each borrowed weight, for forward and backward of micro-batch ``number``.

        Also posts receives for all that is sent to this stage in forward ``number`` and the backward after it.
        """
        for lent in self._lent:
            lent.expect(number)
        return {weight.name: weight.leaf(number) for weight in self._borrowed}

    def give_gradients(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Starts sending the homes their gradients, one for each of ``borrowed``; None counts as zero."""
        for weight, gradient in zip(self._borrowed, gradients):
            weight.give(number, gradient)

    def add_gradients(self, number: int, names: Sequence[str], gradients: list[Tensor | None]) -> None:
        """Adds to this stage's gradients of a micro-batch those of the stages that borrow, in the stages' order."""
        for weight in self._lent:
            index, received = names.index(weight.name), weight.take(number)
            own = gradients[index]
            gradients[index] = received if own is None else own + received

    def publish(self, version: int, leaves: Mapping[str, Tensor]) -> None:
        """Starts sending a version. It is not copied: a home keeps every version until its last backward with it, for
        which it has received a gradient computed with that version."""
        for weight in self._lent:
            weight.send(version, leaves[weight.name])

    def forget(self, *, before: int) -> None:
        """Drops borrowed versions that only micro-batches before ``before`` use."""
        for weight in self._borrowed:
            weight.forget(before)

    def begin_flush(self) -> None:
        """Waits for the versions under way: the updates to come may reuse their storage."""
        for weight in self._lent:
            weight.settle()

    def finish_flush(self, version: int, leaves: Mapping[str, Tensor]) -> None:
        """Every copy becomes ``version``, the newest, and the numbers begin again."""
        self.publish(version, leaves)
        for borrowed in self._borrowed:
            borrowed.take_all()
            borrowed.expect(version)
        for borrowed in self._borrowed:
            borrowed.restart()
        for lent in self._lent:
            lent.restart()


class _Way:
    """Between a weight's home and one stage that borrows it."""

    def __init__(self, *, home: int, other: int, strategy: Strategy, link: StageLink, turn: tuple[int, int]) -> None:
        self.home, self.other = home, other
        self.home_delay = warm_up_forwards(home, link.num_stages)
        self.other_delay = warm_up_forwards(other, link.num_stages)
        self._strategy, self._link = strategy, link
        self._index, self._count = turn

    def version_for(self, number: int) -> int:
        return forward_version(self._strategy, self.home, number)

    def versions_sent(self, number: int) -> int:
        """Versions the home has made once it is done with forward ``number`` and the backward after it."""
        return max(0, number - self.home_delay + 1) // micro_batches_per_update(self._strategy)

    def send(self, tensor: Tensor, *, kind: int, number: int) -> Transfer:
        stage = self.other if kind == TIED_VERSION else self.home
        return self._link.send(tensor, stage, kind=kind, number=number * self._count + self._index)

    def receive(self, shape: Shape, *, kind: int, number: int) -> Transfer:
        stage = self.home if kind == TIED_VERSION else self.other
        return self._link.receive(shape, stage, kind=kind, number=number * self._count + self._index)


class _Lent:
    """A weight of this stage, as one later stage uses it."""

    def __init__(self, name: str, parameter: nn.Parameter, way: _Way) -> None:
        self.name = name
        self.peak_gradient_nbytes = 0
        self._way, self._shape = way, Shape.of(parameter)
        self._gradients: dict[int, Transfer] = {}
        self._sent: deque[tuple[int, Transfer]] = deque()
        self._newest_sent = 0

    def expect(self, number: int) -> None:
        self._post(number - self._way.other_delay)

    def take(self, number: int) -> Tensor:
        self._post(number)
        gradient = self._gradients.pop(number).wait()
        while self._sent and self._sent[0][0] <= self._way.version_for(number):  # the gradient proves their arrival
            self._sent.popleft()[1].wait()
        return gradient

    def send(self, version: int, tensor: Tensor) -> None:
        if version > self._newest_sent:
            self._sent.append((version, self._way.send(tensor, kind=TIED_VERSION, number=version)))
            self._newest_sent = version

    def settle(self) -> None:
        while self._sent:
            self._sent.popleft()[1].wait()

    def restart(self) -> None:
        self.settle()
        self._newest_sent = 0

    def _post(self, number: int) -> None:
        if number >= 0 and number not in self._gradients:
            self._gradients[number] = self._way.receive(self._shape, kind=TIED_GRADIENT, number=number)
            waiting = sum(transfer.tensor.nbytes for transfer in self._gradients.values())
            self.peak_gradient_nbytes = max(self.peak_gradient_nbytes, waiting)


class _Borrowed:
    """A weight of an earlier stage, as this stage uses it. The parameter is the newest version taken so far."""

    def __init__(self, name: str, parameter: nn.Parameter, way: _Way) -> None:
        self.name = name
        self.peak_version_nbytes, self.peak_gradient_nbytes = parameter.nbytes, 0
        self._parameter, self._way, self._shape = parameter, way, Shape.of(parameter)
        self._expected: dict[int, Transfer] = {}
        self._gradients: deque[Transfer] = deque()
        self._newest_expected = self._oldest_needed = 0
        self._held = {0: parameter.data.requires_grad_()}

    def expect(self, version: int) -> None:
        """Posts a receive; while it drains, the home sends only the last version and not those before it."""
        if version > self._newest_expected:
            self._expected[version] = self._way.receive(self._shape, kind=TIED_VERSION, number=version)
            self._newest_expected = version
            arriving = sum(transfer.tensor.nbytes for transfer in self._expected.values())
            nbytes = arriving + sum(tensor.nbytes for tensor in self._held.values())
            self.peak_version_nbytes = max(self.peak_version_nbytes, nbytes)

    def leaf(self, number: int) -> Tensor:
        version = self._way.version_for(number)
        while version not in self._held:
            self._take()
        for sent in range(self._newest_expected + 1, self._way.versions_sent(number) + 1):
            self.expect(sent)
        return self._held[version]

    def give(self, number: int, gradient: Tensor | None) -> None:
        if gradient is None:
            gradient = torch.zeros_like(self._parameter)
        self._gradients.append(self._way.send(gradient, kind=TIED_GRADIENT, number=number))
        leaving = sum(transfer.tensor.nbytes for transfer in self._gradients)
        self.peak_gradient_nbytes = max(self.peak_gradient_nbytes, leaving)
        while len(self._gradients) > 1:  # its receive was posted before the home sent the micro-batch on
            self._gradients.popleft().wait()

    def forget(self, before: int) -> None:
        self._oldest_needed = self._way.version_for(before)
        self._drop()

    def take_all(self) -> None:
        while self._expected:
            self._take()

    def restart(self) -> None:
        self.take_all()
        while self._gradients:
            self._gradients.popleft().wait()
        self._newest_expected = self._oldest_needed = 0
        self._held = {0: self._parameter.data.requires_grad_()}

    def _take(self) -> None:
        version = min(self._expected)
        self._parameter.data = self._expected.pop(version).wait()
        self._held[version] = self._parameter.data.requires_grad_()
        self._drop()

    def _drop(self) -> None:
        # The newest of those held is the parameter itself, and stays although the next to arrive may be needed.
        for version in list(self._held)[:-1]:
            if version < self._oldest_needed:
                del self._held[version]
