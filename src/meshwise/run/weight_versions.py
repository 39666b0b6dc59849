"""The weights of one pipeline stage as they were after each update, copied only where an old version is still needed.

A version is a dict of leaf tensors that alias the parameters' storage but have their own version counter
(``p.data.requires_grad_()``; ``p.detach()`` would share the counter, and the in-place update would make backward of
an older micro-batch fail). Before an update, if the newest version is still needed, the parameters move to a copy
and the leaves keep the old storage; otherwise the update happens in place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function


class WeightVersions:
    """Versions of ``module``'s trainable parameters; ``optimizer`` only ever sees the newest.

    Attributes:
        names, parameters: the trainable ones, in the order of every version's leaves.
        newest: number of updates so far, which is the number of the newest version.
        peak_versions: most versions alive at one time; counted by their storages, not by what should be alive.
        peak_nbytes: most bytes of distinct parameter storages at one time, frozen parameters included.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, borrowed: Collection[str] = ()) -> None:
        """``borrowed``: trainable parameters that are another stage's, which has their versions."""
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._parameters = {name: p for name, p in trainable.items() if name not in borrowed}
        self.names = list(self._parameters)
        self.parameters = list(self._parameters.values())
        self._frozen_nbytes = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
        self._optimizer = optimizer
        self.newest = 0
        self.peak_versions = 1  # also where there is no parameter
        self.peak_nbytes = 0
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._storages: list[dict[StorageWeakRef, int]] = []
        self._publish()
        self._count_storages()

    def leaves(self, version: int) -> dict[str, Tensor]:
        """Name → leaf tensor of ``version``, which must not be older than what the last ``update`` was told to keep."""
        return self._leaves[version]

    def update(self, gradients: Sequence[Tensor | None], *, oldest_needed: int) -> None:
        """One optimizer step on the newest version; versions before ``oldest_needed`` are forgotten.

        Every graph made with a forgotten version must be gone by now, or its weights stay alive with it.

        Args:
            gradients: one per leaf, in order; None where the stage did not use the parameter.
            oldest_needed: the oldest version that any micro-batch, in flight or to come, is going to use.
        """
        retired = self.forget(before=oldest_needed)
        if self.newest in self._leaves:
            with record_function("meshwise.stash"):
                self._move_to_copy(into=retired)
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.newest += 1
        self._publish()

    def forget(self, *, before: int) -> dict[str, Tensor]:
        """Drops the versions older than ``before``; their memory is free once nobody holds them.

        Returns the newest of them, or an empty dict.
        """
        retired: dict[str, Tensor] = {}
        for version in sorted(version for version in self._leaves if version < before):
            retired = self._leaves.pop(version)
        return retired

    def _move_to_copy(self, *, into: dict[str, Tensor]) -> None:
        """Gives the parameters other storage, that of a retired version if there is one: fresh pages cost more."""
        for name, parameter in self._parameters.items():
            storage = into[name].detach() if into else torch.empty_like(parameter.data)
            parameter.data = storage.copy_(parameter.data)
        self._count_storages()

    def _publish(self) -> None:
        self._leaves[self.newest] = {name: p.data.requires_grad_() for name, p in self._parameters.items()}

    def _count_storages(self) -> None:
        """Takes the newest version's storages into the count, and those that are gone out of it."""
        storages = {StorageWeakRef(p.untyped_storage()): p.untyped_storage().nbytes() for p in self.parameters}
        living = [{ref: size for ref, size in version.items() if not ref.expired()} for version in self._storages]
        others = [version for version in living if version and not version.keys() & storages.keys()]
        self._storages = [*others, storages]
        nbytes = sum(size for version in self._storages for size in version.values())
        self.peak_versions = max(self.peak_versions, len(self._storages))
        self.peak_nbytes = max(self.peak_nbytes, nbytes + self._frozen_nbytes)
