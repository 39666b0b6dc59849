"""Packages of the ``report`` extra, imported only when a page is made."""

from __future__ import annotations

import importlib
from types import ModuleType

from meshwise.errors import InputError


class MissingPackage(InputError, ModuleNotFoundError):
    """A package of the ``report`` extra is not installed; ``name`` is the package."""


def load(name: str) -> ModuleType:
    """The module ``name``.

    Raises:
        MissingPackage: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        message = f'the report page needs {name}, which is not installed; pip install "meshwise[report]"'
        raise MissingPackage(message, name=name) from error
