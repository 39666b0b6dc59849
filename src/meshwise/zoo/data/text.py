"""Byte-level text: every file is a run of numbers from 0 to 255, with no vocabulary to make or download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from meshwise.errors import DataError
from meshwise.units import parse, show
from meshwise.zoo.data.samples import Octets, Pool, Windows
from meshwise.zoo.task import Task

NUM_BYTE_VALUES = 256
MOST_IN_MEMORY = parse("1 GiB", "B")
"""Largest folder of text; one big file is not read but mapped, so that ranks share its memory."""

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def read_stdlib(_: str, task: Task) -> Pool:
    """The running interpreter's own library in Python source, about 11 MB.

    Raises:
        DataError: the interpreter comes without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        files += (Path(folder) / name for name in names if name.endswith(".py"))
    if not files:
        raise DataError(f"data 'stdlib': {root} holds no Python source; use text:PATH")
    return windows(joined(sorted(files)), task=task, name="stdlib")


def read_text(argument: str, task: Task) -> Pool:
    """A file, or all ``.txt`` files of a folder and those below it, in the order of their paths.

    Raises:
        DataError: no such file or folder, nothing in it, or more than fits in memory.
    """
    path = Path(argument).expanduser()
    name = f"text:{argument}"
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise DataError(f"data {name!r}: the folder holds no .txt file; name a file, or a folder with .txt files")
        return windows(joined(files), task=task, name=name)
    if not path.is_file():
        raise DataError(f"data {name!r}: {path} is no file or folder; name a text file, or a folder with .txt files")
    try:
        octets = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise DataError(f"data {name!r}: {path} cannot be read ({error.strerror}); name a readable file") from error
    return windows(octets, task=task, name=name)


def joined(files: Iterable[Path]) -> Octets:
    """The bytes of all files, one after the other."""
    files = list(files)
    try:
        size = sum(file.stat().st_size for file in files)
        check_fits_in_memory(size, what=f"{len(files)} text files")
        return np.concatenate([np.fromfile(file, dtype=np.uint8) for file in files])
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); name readable files") from error


def check_fits_in_memory(size: float, *, what: str) -> None:
    if size > MOST_IN_MEMORY:
        raise DataError(
            f"{what} hold {show(size, 'B')}, more than {show(MOST_IN_MEMORY, 'B')} in the memory of every rank; "
            "join them into one file, which is mapped and shared, and use text:FILE"
        )


def windows(octets: Octets, *, task: Task, name: str) -> Pool:
    """``octets`` cut for ``task``.

    Raises:
        DataError: not enough for two samples.
    """
    length = task.sequence_length or 0
    if len(octets) < 2 * (length + 1):
        raise DataError(
            f"data {name!r} hold {len(octets)} bytes, too few for two samples of {length + 1}; "
            f"give more text or a shorter sequence length"
        )
    samples = Windows(octets=octets, sequence_length=length)
    return Pool(samples=samples, validation=None, num_classes=NUM_BYTE_VALUES)
