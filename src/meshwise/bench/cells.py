"""Which trainings a survey consists of: requests × device counts × repeats, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwise.bench.options import SurveyOptions
from meshwise.errors import InputError, StrategyError
from meshwise.strategy import Request, Strategy, parse_list
from meshwise.strategy.legal import ModelFacts, check


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One strategy on one device count; ``refused`` says why it cannot be, and is empty where it can."""

    preset: str
    strategy: Strategy
    num_devices: int
    global_batch_size: int
    refused: str = ""

    def name(self, model: str, repeat: int) -> str:
        """File-name safe: ``model--preset--dN--rK``."""
        return f"{safe_name(model)}--{safe_name(self.preset)}--d{self.num_devices}--r{repeat}"


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Every cell of a survey in the order asked for, and what the user should know about it."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()

    def runs(self, repeats: int) -> Iterator[tuple[Cell, int]]:
        """(cell, repeat), repeats outermost, so that a machine that slows down over hours does so for all alike."""
        for repeat in range(repeats):
            for cell in self.cells:
                if not cell.refused:
                    yield cell, repeat

    @property
    def refused(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.refused)


def expand(options: SurveyOptions, *, facts: ModelFacts, global_batch_size: int) -> Cells:
    """The cells of ``options`` for a model of which ``facts`` are known.

    Equal strategies on one device count run once: on one device every preset is ``single``. What was asked for by
    name must be possible; what only ``all`` brought in may be impossible and is then kept as a refused cell.

    Raises:
        StrategyError: a strategy named by the user cannot be, or nothing can run at all.
        InputError: a strategy names its sizes and their device count is not among ``options.devices``.
    """
    explicit, requests = _named(options.strategies), read_requests(options)
    devices = tuple(dict.fromkeys(options.devices))
    cells: dict[tuple[str, int], Cell] = {}
    notes = []
    for request in requests:
        wanted = request.text in explicit
        for num_devices in devices:
            if note := _no_fit(request, num_devices):
                notes.append(note)
                continue
            cell = _cell(request, num_devices, (options, facts, global_batch_size), wanted=wanted)
            if cell is not None:
                cells.setdefault((cell.strategy.text, num_devices), cell)
    ordered = tuple(sorted(cells.values(), key=lambda cell: devices.index(cell.num_devices)))
    if all(cell.refused for cell in ordered):
        raise StrategyError(ordered[0].refused if ordered else "nothing to run; name a strategy or a device count")
    return Cells(cells=ordered, notes=tuple(notes))


def read_requests(options: SurveyOptions) -> list[Request]:
    """The strategies asked for, as far as they can be checked without looking at the model.

    Raises:
        StrategyError: a text that is no strategy, or sizes that divide none of the device counts.
        InputError: a strategy names its sizes and their device count is not among ``options.devices``.
    """
    requests, explicit = parse_list(list(options.strategies)), _named(options.strategies)
    for request in requests:
        if request.text in explicit:
            _check_reachable(request, options.devices)
    return requests


def safe_name(text: str) -> str:
    """``text`` as part of a file name: letters, digits and ``._=,-`` only, never starting with a dot."""
    return re.sub(r"[^A-Za-z0-9._=,-]+", "-", text.rsplit("/", 1)[-1]).strip(".-") or "model"


def _named(texts: Sequence[str]) -> set[str]:
    """Texts of the requests the user wrote out, ``all`` left out."""
    kept = [
        ",".join(part for part in token.split(",") if part and part != "all")
        for text in texts
        for token in text.replace(";", " ").split()
    ]
    kept = [token for token in kept if token]
    return {request.text for request in parse_list(kept)} if kept else set()


def _check_reachable(request: Request, devices: tuple[int, ...]) -> None:
    """A named strategy must fit at least one of the device counts."""
    needed = request.required_devices
    if needed is not None and needed not in devices:
        given = ",".join(map(str, devices))
        raise InputError(
            f"{request.text} needs {needed} device{'s' if needed > 1 else ''} and --devices {given} does not have that "
            f"count; use --devices {','.join(map(str, sorted({*devices, needed})))}"
        )
    if needed is None and all(_no_fit(request, count) for count in devices):
        request.at(max(devices))  # raises, naming the sizes and the nearest device counts that divide


def _no_fit(request: Request, num_devices: int) -> str:
    """Why a partly sized request has no place on this many devices; empty where it has one."""
    sizes = [(axis, request.keys.get(axis, 1)) for axis in ("data", "tensor", "pipeline") if axis != request.fill_axis]
    fixed = 1
    for _, size in sizes:
        fixed *= size
    if request.fill_axis is None or num_devices % fixed == 0:
        return ""
    return (
        f"{request.text} does not fit on {num_devices} devices ({num_devices} is no multiple of {fixed}); skipped there"
    )


def _cell(
    request: Request, num_devices: int, context: tuple[SurveyOptions, ModelFacts, int], *, wanted: bool
) -> Cell | None:
    options, facts, base = context
    strategy = request.at(num_devices)
    if strategy is None:
        return None
    global_batch_size = base * strategy.data_parallel_size if options.scaling == "weak" else base
    refused = ""
    try:
        check(strategy, facts, global_batch_size, clip_norm=options.clip_norm)
    except StrategyError as error:
        if wanted:
            raise
        refused = str(error)
    return Cell(
        preset=strategy.text if num_devices == 1 else request.text,
        strategy=strategy,
        num_devices=num_devices,
        global_batch_size=global_batch_size,
        refused=refused,
    )
