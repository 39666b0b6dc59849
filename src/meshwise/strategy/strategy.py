"""A strategy: how one training step is split over devices. The vocabulary that commands, plans, runs and reports share.

Text form: ``key=value`` joined by commas, presets as bare words: ``data=2,tensor=2``, ``zero=3,data=4``,
``gpipe,micro_batches=8``. The same text names a strategy in commands, reports and file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from meshwise.errors import StrategyError, did_you_mean
from meshwise.strategy.mesh import Mesh

SYNCHRONOUS_SCHEDULES = ("gpipe", "1f1b", "interleaved")
ASYNCHRONOUS_SCHEDULES = ("pipedream", "pipedream-vsync", "pipedream-2bw")
SCHEDULES = ("none", *SYNCHRONOUS_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
CHECKPOINTING = ("none", "full", "selective")
PRECISIONS = ("fp32", "bf16", "fp64")
BATCH_NORM = ("local", "sync")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One fully resolved way to split a training step.

    ``global_batch_size = micro_batch_size × num_micro_batches × data_parallel_size``.

    Attributes:
        data_parallel_size: replicas, each on its own part of the global batch.
        tensor_parallel_size: devices that share every layer (Megatron column/row split, sequence-parallel norms).
        pipeline_parallel_size: devices that each hold a range of layers.
        zero_stage: 0 replicate everything, 1 shard optimizer state, 2 + gradients, 3 + parameters, over ``data``.
        schedule: order of work in a pipeline, one of ``SCHEDULES``.
        num_virtual_stages: stages per device (``interleaved``).
        num_micro_batches: parts a replica's batch is cut into; accumulation steps where there is no pipeline.
        checkpointing: activations recomputed in backward: none, full (each layer), selective (all but matrix products).
        precision: fp32, bf16 (autocast), fp64 (for proofs).
        batch_norm: statistics of each replica's own micro-batch (``local``) or of all replicas' (``sync``).
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    zero_stage: int = 0
    schedule: str = "none"
    num_virtual_stages: int = 1
    num_micro_batches: int = 1
    checkpointing: str = "none"
    precision: str = "fp32"
    batch_norm: str = "local"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def mesh(self) -> Mesh:
        return Mesh(
            pipeline=self.pipeline_parallel_size, data=self.data_parallel_size, tensor=self.tensor_parallel_size
        )

    @property
    def num_devices(self) -> int:
        return self.mesh.num_devices

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel_size * self.num_virtual_stages

    @property
    def asynchronous(self) -> bool:
        """Whether weights are stale: some gradient is applied to newer weights than it was computed with."""
        return self.schedule in ASYNCHRONOUS_SCHEDULES

    def local_batch_size(self, global_batch_size: int) -> int:
        """Samples of one replica in one step."""
        return global_batch_size // self.data_parallel_size

    def micro_batch_size(self, global_batch_size: int) -> int:
        """Samples of one forward of one replica."""
        return global_batch_size // (self.data_parallel_size * self.num_micro_batches)

    @property
    def text(self) -> str:
        """Canonical short form: every key that reading would not set to the same by itself, or ``single``."""
        defaults = {field.name: field.default for field in fields(self)}
        read = {"pipeline": self.pipeline_parallel_size, "schedule": self.schedule}
        defaults["num_micro_batches"] = 1 if _default_micro_batches(read) == 1 else None
        parts = [f"{key}={getattr(self, name)}" for key, name in KEYS.items() if getattr(self, name) != defaults[name]]
        return ",".join(parts) or "single"

    def __str__(self) -> str:
        return self.text


KEYS: Mapping[str, str] = MappingProxyType(
    {
        "zero": "zero_stage",
        "data": "data_parallel_size",
        "tensor": "tensor_parallel_size",
        "pipeline": "pipeline_parallel_size",
        "schedule": "schedule",
        "virtual_stages": "num_virtual_stages",
        "micro_batches": "num_micro_batches",
        "checkpointing": "checkpointing",
        "precision": "precision",
        "batch_norm": "batch_norm",
    }
)
"""Text key → attribute, in the order the canonical text lists them."""

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"schedule": SCHEDULES, "checkpointing": CHECKPOINTING, "precision": PRECISIONS, "batch_norm": BATCH_NORM}
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named family: ``axis`` takes all devices that the other sizes leave; ``values`` are fixed."""

    axis: str | None
    values: Mapping[str, Any]
    summary: str
    source: str


def _preset(axis: str | None, summary: str, source: str, **values: Any) -> Preset:
    return Preset(axis=axis, values=MappingProxyType(values), summary=summary, source=source)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "single": _preset(None, "one device, nothing split", "–"),
        "data": _preset("data", "replicas, gradients all-reduced while backward runs", "Li et al. 2020 (DDP)"),
        "zero1": _preset("data", "data parallel, optimizer state sharded", "Rajbhandari et al. 2020 (ZeRO)", zero=1),
        "zero2": _preset("data", "… and gradients sharded", "Rajbhandari et al. 2020 (ZeRO)", zero=2),
        "zero3": _preset("data", "… and parameters sharded", "Rajbhandari et al. 2020; FSDP2", zero=3),
        "tensor": _preset(
            "tensor", "column/row split layers, sequence-parallel norms", "Shoeybi 2019; Korthikanti 2022"
        ),
        "gpipe": _preset("pipeline", "all forwards, then all backwards", "Huang et al. 2019", schedule="gpipe"),
        "1f1b": _preset("pipeline", "one forward, one backward, flush", "Narayanan et al. 2021", schedule="1f1b"),
        "interleaved": _preset(
            "pipeline",
            "1f1b with two stages a device",
            "Narayanan et al. 2021",
            schedule="interleaved",
            virtual_stages=2,
        ),
        "pipedream": _preset(
            "pipeline",
            "no flush, an update per micro-batch, weights stashed",
            "Narayanan et al. 2019",
            schedule="pipedream",
        ),
        "pipedream-vsync": _preset(
            "pipeline", "… all stages use the same weight version", "Narayanan et al. 2019", schedule="pipedream-vsync"
        ),
        "pipedream-2bw": _preset(
            "pipeline",
            "… gradients accumulated, two weight versions",
            "Narayanan et al. 2021 (2BW)",
            schedule="pipedream-2bw",
        ),
    }
)

ALIASES: Mapping[str, str] = MappingProxyType({"ddp": "data", "fsdp": "zero3", "dp": "data", "tp": "tensor"})


@dataclass(frozen=True, kw_only=True)
class Request:
    """A strategy as asked for: text, explicit keys, and perhaps an axis that takes the devices left over."""

    text: str
    keys: Mapping[str, Any]
    fill_axis: str | None
    preset: str | None

    def at(self, num_devices: int) -> Strategy | None:
        """The strategy on ``num_devices``; None where the request names all its sizes and they need another count.

        Raises:
            StrategyError: the named sizes do not divide the device count, or the result cannot exist.
        """
        keys = dict(self.keys)
        if num_devices == 1 and self.fill_axis is not None and not _sized(keys):
            return Strategy(**{KEYS[key]: keys[key] for key in ("checkpointing", "precision") if key in keys})
        fixed = 1
        for axis in ("data", "tensor", "pipeline"):
            if axis != self.fill_axis:
                fixed *= keys.get(axis, 1)
        if self.fill_axis is None:
            if fixed != num_devices:
                return None
        else:
            if num_devices % fixed:
                raise StrategyError(
                    f"{num_devices} devices do not divide into {_product(keys, fixed)}; use "
                    f"{_nearest_multiples(num_devices, fixed)} devices, or change one of the sizes"
                )
            keys[self.fill_axis] = num_devices // fixed
        keys.setdefault("micro_batches", _default_micro_batches(keys))
        return Strategy(**{KEYS[key]: value for key, value in keys.items()})

    @property
    def required_devices(self) -> int | None:
        """Device count when every size is named, else None."""
        if self.fill_axis is not None:
            return None
        return self.keys.get("data", 1) * self.keys.get("tensor", 1) * self.keys.get("pipeline", 1)


def parse(text: str) -> Request:
    """Reads one strategy.

    Raises:
        StrategyError: an unknown word, key or value, or a key given twice.
    """
    requests = parse_list([text])
    if len(requests) != 1:
        raise StrategyError(f"{text!r} names {len(requests)} strategies where one is wanted; give one of them")
    return requests[0]


def parse_list(texts: list[str]) -> list[Request]:
    """Reads strategies separated by spaces, semicolons or separate items; in ``a,b`` a bare preset begins a new one.

    ``all`` stands for every preset.
    """
    pieces: list[list[str]] = []
    for text in texts:
        for token in text.replace(";", " ").split():
            group: list[str] = []
            for part in filter(None, token.split(",")):
                if part == "all":
                    pieces.extend([name] for name in PRESETS)
                    continue
                if "=" not in part and group:
                    pieces.append(group)
                    group = []
                group.append(part)
            if group:
                pieces.append(group)
    if not pieces:
        raise StrategyError(f"no strategy given; known presets: {', '.join(PRESETS)}")
    requests, seen = [], set()
    for piece in pieces:
        request = _parse_parts(piece)
        if request.text not in seen:
            seen.add(request.text)
            requests.append(request)
    return requests


def _parse_parts(parts: list[str]) -> Request:
    keys: dict[str, Any] = {}
    fill_axis, preset_name = None, None
    head = parts[0]
    if "=" not in head:
        preset_name = ALIASES.get(head, head)
        if preset_name not in PRESETS:
            raise StrategyError(f"{head!r} is no strategy; {did_you_mean(head, [*PRESETS, *KEYS])}")
        preset = PRESETS[preset_name]
        keys.update(preset.values)
        fill_axis = preset.axis
        parts = parts[1:]
    explicit: set[str] = set()
    for part in parts:
        key, _, value = part.partition("=")
        if key not in KEYS:
            raise StrategyError(f"{key!r} in {part!r} is no strategy key; {did_you_mean(key, KEYS)}")
        if key in explicit:
            raise StrategyError(f"{key!r} is given twice in {','.join(parts)!r}; separate strategies by spaces")
        explicit.add(key)
        keys[key] = _value(key, value)
        if key == fill_axis:
            fill_axis = None
    if keys.get("pipeline", 1) > 1 or fill_axis == "pipeline":
        keys.setdefault("schedule", "1f1b")
        if keys["schedule"] == "interleaved":
            keys.setdefault("virtual_stages", 2)
    named = [f"{key}={keys[key]}" for key in KEYS if key in explicit]
    text = ",".join([preset_name, *named] if preset_name else named)
    return Request(text=text, keys=MappingProxyType(keys), fill_axis=fill_axis, preset=preset_name)


def _value(key: str, value: str) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise StrategyError(f"{key}={value} is unknown; {did_you_mean(value, _CHOICES[key])}")
        return value
    if not value.isdecimal():
        raise StrategyError(f"{key}={value} is not a whole number; write for example {key}=2")
    return int(value)


def _check(strategy: Strategy) -> None:
    for key, name in KEYS.items():
        value = getattr(strategy, name)
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                raise StrategyError(f"{key}={value} is unknown; {did_you_mean(str(value), _CHOICES[key])}")
        elif key != "zero" and (not isinstance(value, int) or value < 1):
            raise StrategyError(f"{key}={value} is no size; sizes are whole numbers from 1")
    if strategy.zero_stage not in (0, 1, 2, 3):
        raise StrategyError(f"zero={strategy.zero_stage} does not exist; ZeRO stages are 0, 1, 2 and 3")
    pipelined = strategy.pipeline_parallel_size > 1
    if pipelined and strategy.schedule == "none":
        raise StrategyError(
            f"pipeline={strategy.pipeline_parallel_size} has no schedule; add one of {', '.join(SCHEDULES[1:])}"
        )
    if not pipelined and strategy.schedule != "none":
        raise StrategyError(f"schedule={strategy.schedule} needs a pipeline; add pipeline=2 or drop the schedule")
    if (strategy.num_virtual_stages > 1) != (strategy.schedule == "interleaved"):
        raise StrategyError(
            f"schedule={strategy.schedule} with virtual_stages={strategy.num_virtual_stages} cannot be: several stages "
            "a device are what schedule=interleaved means; use schedule=interleaved,virtual_stages=2"
        )
    if strategy.asynchronous and strategy.zero_stage:
        raise StrategyError(
            f"{strategy.schedule} keeps whole weight versions on every stage, which zero={strategy.zero_stage} would "
            "shard; use schedule=1f1b with ZeRO, or zero=0"
        )
    if strategy.schedule == "pipedream-2bw" and strategy.num_micro_batches < strategy.pipeline_parallel_size:
        raise StrategyError(
            f"pipedream-2bw with micro_batches={strategy.num_micro_batches} needs at least as many micro-batches as "
            f"stages; use micro_batches={strategy.pipeline_parallel_size}"
        )
    if strategy.schedule == "interleaved" and strategy.num_micro_batches % strategy.pipeline_parallel_size:
        size = strategy.pipeline_parallel_size
        raise StrategyError(
            f"interleaved runs micro-batches in rounds of pipeline={size} and {strategy.num_micro_batches} does not "
            f"divide into them; use micro_batches={_nearest_multiples(strategy.num_micro_batches, size)}"
        )


def _default_micro_batches(keys: Mapping[str, Any]) -> int:
    """Two per stage for schedules that flush (bubble 1/3 or less); one where the pipeline never drains."""
    if keys.get("schedule", "none") in ("none", "pipedream", "pipedream-vsync"):
        return 1
    return 2 * keys["pipeline"]


def _sized(keys: Mapping[str, Any]) -> bool:
    return any(keys.get(axis, 1) > 1 for axis in ("data", "tensor", "pipeline"))


def _product(keys: Mapping[str, Any], fixed: int) -> str:
    sizes = [f"{axis} {keys[axis]}" for axis in ("data", "tensor", "pipeline") if keys.get(axis, 1) > 1]
    return f"{' × '.join(sizes)} = {fixed}" if len(sizes) > 1 else " × ".join(sizes)


def _nearest_multiples(value: int, factor: int) -> str:
    below, above = value // factor * factor, (value // factor + 1) * factor
    return f"{below} or {above}" if below else f"{above}"
