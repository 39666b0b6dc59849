"""The user's own model, from ``path/to/file.py:function``. The convention, all of it:

    def net(num_classes=10):        # returns a module, or (module, loss), or a meshwise Task
        return nn.Sequential(...)

    # Optional: any field of Task but name and build; "optimizer" may be a dict of OptimizerDefaults' fields.
    net.task = {"kind": "image", "image_size": 32, "num_classes": 10}

What ``net.task`` leaves out is read off the module. One with an ``nn.Embedding`` and no ``nn.Conv2d`` is a language
model (ids [B, S] → logits [B, S, V]), with as large a vocabulary as its first embedding; one with ``nn.Conv2d`` and no
``nn.Embedding`` takes images (pixels [B, 3, H, W] → logits [B, C]), with as many classes as its last ``nn.Linear`` has
outputs. The loss is mean cross-entropy unless given. Parameters of the function called ``sequence_length``,
``image_size`` or ``num_classes`` get what the command line asks for. A ``GPT2LMHeadModel`` is wrapped so that every
strategy fits it.

The function is called once, on the meta device where it can be, to see what it returns, and again for every ``build``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.errors import MeshwiseError, ModelError, did_you_mean
from meshwise.zoo.gpt2 import CausalLanguageModel
from meshwise.zoo.losses import cross_entropy
from meshwise.zoo.task import Loss, OptimizerDefaults, Task

_DEFAULTS: dict[str, dict[str, Any]] = {
    "language": {"sequence_length": 64, "default_data": "stdlib", "default_global_batch_size": 32},
    "image": {"image_size": 32, "default_data": "digits", "default_global_batch_size": 64},
}
_DECLARABLE = tuple(field.name for field in fields(Task) if field.name not in ("name", "build"))


def is_own(name: str) -> bool:
    """Whether ``name`` means a file of the user's rather than a reference model."""
    return ".py:" in name or name.endswith(".py")


def load_own(name: str, **sizes: int | None) -> Task:
    """The task behind ``path/to/file.py:function``; ``sizes`` are what the user asked to change, None where nothing.

    Raises:
        ModelError: no such file or function, an exception inside the file (named with its line), or no module returned.
    """
    asked = {key: value for key, value in sizes.items() if value is not None}
    path, function = _find(name)
    accepted = _accepted(function, asked)

    def call() -> Any:
        return _guarded(lambda: function(**accepted), path)

    found = _probe(call)
    if isinstance(found, Task):
        changes: dict[str, Any] = {"name": name, **asked}
        return replace(found, **changes)
    module, loss = _split(found, name)
    if isinstance(loss, nn.Module):
        loss = _loss_with_tensors(loss, call)
    declared = _declared(function, name)
    kind = declared.get("kind") or _kind_of(module, name)
    if kind not in _DEFAULTS:
        raise ModelError(f"kind {kind!r} of {name} is unknown; use 'language' or 'image'")
    facts = {**_DEFAULTS[kind], "loss": loss or cross_entropy, **declared, **asked}
    if "num_classes" not in facts:
        facts["num_classes"] = _num_classes_of(module, kind=kind, name=name)
    return Task(**{**facts, "name": name, "kind": kind, "build": lambda: _as_chain(_split(call(), name)[0])})


def _find(name: str) -> tuple[Path, Callable[..., Any]]:
    file_text, _, function_name = name.rpartition(".py:") if ".py:" in name else (name.removesuffix(".py"), "", "")
    path = Path(file_text + ".py").expanduser()
    if not path.is_file():
        raise ModelError(f"{path} is not a file; give your model as path/to/file.py:function")
    module = _import(path.resolve())
    names = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not function_name:
        known = f"functions there: {', '.join(names)}" if names else "the file defines no function"
        raise ModelError(f"{name} names no function; write {path}:FUNCTION ({known})")
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = did_you_mean(function_name, names) if names else "define it there"
        raise ModelError(f"{path} has no function {function_name!r}; {hint}")
    return path.resolve(), function


def _import(path: Path) -> ModuleType:
    name = f"meshwise_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be imported as Python; give a file ending in .py")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import its neighbours, as when run as a script
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    _guarded(lambda: loader.exec_module(module), path)
    return module


def _guarded(action: Callable[[], Any], path: Path) -> Any:
    """Result of ``action``, code of the user's; what it raises names the user's line."""
    try:
        return action()
    except MeshwiseError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else (lines or [None])[-1]
        place = f"{path}:{line}" if line else str(path)
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ModelError(f"{place} raised {type(error).__name__}: {text}; correct that line and try again") from error


def _accepted(function: Callable[..., Any], asked: dict[str, int]) -> dict[str, int]:
    """What of ``asked`` the function takes; image size and sequence length may be left to the data alone."""
    known = inspect.signature(function).parameters
    if "num_classes" in asked and "num_classes" not in known:
        raise ModelError(
            f"num_classes={asked['num_classes']} was asked for, but {getattr(function, '__name__', 'the function')} "
            f"has no parameter num_classes; add it, or leave num_classes out"
        )
    return {key: value for key, value in asked.items() if key in known}


def _probe(call: Callable[[], Any]) -> Any:
    """What the function returns; no memory for weights where it allows, and no random numbers used up."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return call()
        except ModelError:
            return call()  # some code reads values while it builds, which the meta device cannot give


def _split(found: Any, name: str) -> tuple[nn.Module, Loss | None]:
    module, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        raise ModelError(
            f"{name} returned {_describe(found)}, not a module; return an nn.Module, or a pair (nn.Module, loss)"
        )
    return module, loss


def _describe(found: Any) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(part).__name__ for part in found)})"
    return type(found).__name__


def _loss_with_tensors(loss: nn.Module, call: Callable[[], Any]) -> Loss:
    """A loss that holds tensors (class weights) is made once more off the meta device, and follows its targets."""
    if not [*loss.parameters(), *loss.buffers()]:
        return loss
    with torch.random.fork_rng(devices=[]):
        real: nn.Module = call()[1]

    def placed(outputs: Any, targets: Tensor) -> Tensor:
        return real.to(targets.device)(outputs, targets)

    return placed


def _declared(function: Callable[..., Any], name: str) -> dict[str, Any]:
    declared = dict(getattr(function, "task", {}))
    for key in declared:
        if key not in _DECLARABLE:
            raise ModelError(f"{name}: task has no field {key!r}; {did_you_mean(key, _DECLARABLE)}")
    optimizer = declared.get("optimizer")
    if isinstance(optimizer, dict):
        known = [field.name for field in fields(OptimizerDefaults)]
        for key in optimizer:
            if key not in known:
                raise ModelError(f"{name}: task's optimizer has no field {key!r}; {did_you_mean(key, known)}")
        declared["optimizer"] = OptimizerDefaults(**optimizer)
    return declared


def _kind_of(module: nn.Module, name: str) -> str:
    has_embedding = any(isinstance(part, nn.Embedding) for part in module.modules())
    has_convolution = any(isinstance(part, nn.Conv2d) for part in module.modules())
    if has_embedding == has_convolution:
        raise ModelError(
            f"{name} may take text or images, its layers do not tell which; write next to the function "
            f'{name.rpartition(":")[2]}.task = {{"kind": "image"}} or {{"kind": "language"}}'
        )
    return "language" if has_embedding else "image"


def _num_classes_of(module: nn.Module, *, kind: str, name: str) -> int:
    parts = list(module.modules())
    if kind == "language":
        sizes = [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]
    else:
        sizes = [part.out_features for part in reversed(parts) if isinstance(part, nn.Linear)]
    if not sizes:
        raise ModelError(
            f"{name} does not show its number of classes; write next to the function "
            f'{name.rpartition(":")[2]}.task = {{"num_classes": …}}'
        )
    return sizes[0]


def _as_chain(module: nn.Module) -> nn.Module:
    return CausalLanguageModel.wrap(module) if type(module).__name__ == "GPT2LMHeadModel" else module
