"""Data by name: what can follow ``--data``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from meshwise.errors import DataError, did_you_mean
from meshwise.zoo.data.hub import read_hub
from meshwise.zoo.data.images import read_digits, read_fashion_mnist, read_image_folder
from meshwise.zoo.data.samples import Data, Pool, split
from meshwise.zoo.data.text import read_stdlib, read_text
from meshwise.zoo.task import Task


@dataclass(frozen=True, kw_only=True)
class Source:
    """One way to get data.

    Attributes:
        kind: what the samples are; ``either`` goes by the model.
        argument: what follows the colon, as PATH; empty for none, in square brackets where it may be left out.
        read: ``read(argument, task)``.
    """

    kind: Literal["language", "image", "either"]
    argument: str
    read: Callable[[str, Task], Pool]

    def spelling(self, name: str) -> str:
        return (
            f"{name}[:{self.argument[1:-1]}]"
            if self.argument.startswith("[")
            else ":".join(filter(None, (name, self.argument)))
        )


SOURCES: dict[str, Source] = {
    "stdlib": Source(kind="language", argument="", read=read_stdlib),
    "text": Source(kind="language", argument="PATH", read=read_text),
    "digits": Source(kind="image", argument="", read=read_digits),
    "fashion-mnist": Source(kind="image", argument="[FOLDER]", read=read_fashion_mnist),
    "imagefolder": Source(kind="image", argument="PATH", read=read_image_folder),
    "datasets": Source(kind="either", argument="NAME", read=read_hub),
}
"""Every kind of data. A new one is a function from argument and task to ``Pool`` and a line here."""


def load(
    text: str,
    *,
    task: Task,
    seed: int,
    train_samples: int | None = None,
    validation_samples: int | None = None,
) -> Data:
    """The data called ``text``, as ``stdlib`` or ``text:PATH``, cut for ``task`` and split by ``seed`` alone.

    At most ``train_samples`` and ``validation_samples`` are kept, chosen by ``seed``; None keeps all.

    Raises:
        DataError: unknown name, data of another kind than the model takes, more classes than it tells apart, or files
            that are missing, empty, too small or broken.
    """
    source = _source(text, task)
    pool = source.read(text.partition(":")[2], task)
    if pool.num_classes > task.num_classes:
        what = "byte values" if task.kind == "language" else "classes"
        raise DataError(
            f"data {text!r} have {pool.num_classes} {what} and {task.name} tells {task.num_classes} apart; "
            f"use num_classes={pool.num_classes} or more"
        )
    train, validation = split(pool, name=text, seed=seed, limits=(train_samples, validation_samples))
    return Data(name=text, train=train, validation=validation, sample_unit=task.sample_unit)


def _source(text: str, task: Task) -> Source:
    name, colon, argument = text.partition(":")
    source = SOURCES.get(name)
    if source is None:
        raise DataError(f"{text!r} is not known data; {did_you_mean(name, SOURCES)}")
    if source.argument and not source.argument.startswith("[") and not argument:
        raise DataError(f"data {text!r} does not say which; write {source.spelling(name)}")
    if not source.argument and colon:
        raise DataError(f"data {name!r} takes nothing after the colon; write {name}")
    if source.kind not in ("either", task.kind):
        fitting = [
            other.spelling(other_name) for other_name, other in SOURCES.items() if other.kind in ("either", task.kind)
        ]
        data_kind, model_kind = ("text", "images") if source.kind == "language" else ("images", "text")
        remedy = f"{', '.join(fitting[:-1])} or {fitting[-1]}"
        raise DataError(f"data {text!r} are {data_kind} and {task.name} takes {model_kind}; use {remedy}")
    return source
