"""Data sets of Hugging Face ``datasets``, by name or local path, where that library is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from meshwise.errors import DataError
from meshwise.zoo.data.images import to_pixels
from meshwise.zoo.data.samples import LazyImages, Pool
from meshwise.zoo.data.text import check_fits_in_memory, windows
from meshwise.zoo.task import Task

_TEXT_COLUMNS = ("text", "content", "sentence", "document")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "target")


def read_hub(argument: str, task: Task) -> Pool:
    """``NAME`` or ``NAME:CONFIGURATION``; splits ``train`` and ``validation`` (else ``val``, else ``test``).

    Text comes from the column called text, content, sentence or document, images from the first image column with the
    classes beside it.

    Raises:
        DataError: ``datasets`` is missing, it cannot load the name, or no column fits the model.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data 'datasets:{argument}' need Hugging Face's library, which is missing; pip install datasets"
        ) from error
    name, _, configuration = argument.partition(":")
    try:
        found: Any = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # network, hub and parsing errors have no common root
        first_line = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"data 'datasets:{argument}' cannot be loaded ({type(error).__name__}: {first_line}); "
            "write datasets:NAME or datasets:NAME:CONFIGURATION, or a local folder"
        ) from error
    train = found["train"] if "train" in found else next(iter(found.values()))
    held_out = next((found[part] for part in ("validation", "val", "test") if part in found), None)
    if held_out is train:
        held_out = None
    read = _text_pool if task.kind == "language" else _image_pool
    pool = read(train, task=task, argument=argument)
    if held_out is None:
        return pool
    validation = read(held_out, task=task, argument=argument)
    return Pool(samples=pool.samples, validation=validation.samples, num_classes=pool.num_classes)


def _text_pool(rows: Any, *, task: Task, argument: str) -> Pool:
    column = next((column for column in _TEXT_COLUMNS if column in rows.column_names), None)
    if column is None:
        raise DataError(_no_column(rows, argument, wanted=f"text column ({', '.join(_TEXT_COLUMNS)})"))
    check_fits_in_memory(rows.data.nbytes, what=f"data 'datasets:{argument}'")
    text = "\n".join(value or "" for value in rows[column])
    return windows(np.frombuffer(text.encode(), dtype=np.uint8), task=task, name=f"datasets:{argument}")


def _image_pool(rows: Any, *, task: Task, argument: str) -> Pool:
    import datasets

    image = next((column for column, kind in rows.features.items() if isinstance(kind, datasets.Image)), None)
    classed = [column for column, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    numbered = [column for column in _LABEL_COLUMNS if column in rows.column_names]
    label = next(iter([*classed, *numbered]), None)
    if image is None or label is None:
        raise DataError(_no_column(rows, argument, wanted="image column with a class column beside it"))
    num_classes = rows.features[label].num_classes if classed else int(max(rows[label])) + 1
    samples = LazyImages(num_samples=len(rows), read=_row_reader(rows, columns=(image, label), task=task))
    return Pool(samples=samples, validation=None, num_classes=num_classes)


def _row_reader(rows: Any, *, columns: tuple[str, str], task: Task) -> Callable[[int], tuple[Tensor, int]]:
    def read(index: int) -> tuple[Tensor, int]:
        row = rows[index]
        return to_pixels(row[columns[0]], task.image_size or 0), int(row[columns[1]])

    return read


def _no_column(rows: Any, argument: str, *, wanted: str) -> str:
    return (
        f"data 'datasets:{argument}' have columns {', '.join(rows.column_names)} and no {wanted}; "
        "choose a data set that has one, or convert it to text:PATH or imagefolder:PATH"
    )
