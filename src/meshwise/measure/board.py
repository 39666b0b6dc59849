"""TensorBoard logging on request, from the events the ranks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise.errors import InputError


class Board:
    """Writes loss, step time and validation of one run as TensorBoard scalars into ``folder``.

    Raises:
        InputError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard logging needs tensorboardX, which is not installed; run pip install 'meshwise[track]'"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def add(self, event: dict[str, Any]) -> None:
        """Logs a ``step`` or ``validation`` event; any other is passed over."""
        if event["event"] == "step":
            self._scalars("train", event, ("loss", "seconds"))
        elif event["event"] == "validation":
            self._scalars("validation", event, ("loss", "perplexity", "accuracy", "training_time"))

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, group: str, event: dict[str, Any], names: tuple[str, ...]) -> None:
        for name in names:
            if event.get(name) is not None:
                self._writer.add_scalar(f"{group}/{name}", event[name], event["step"])
