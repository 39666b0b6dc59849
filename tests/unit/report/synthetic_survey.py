"""Records as a survey of twelve presets and two hybrids on 1, 2 and 4 devices would write them, three repeats each."""

from __future__ import annotations

import math
import random

from meshwise.record import CurvePoint, RankMemory, Record, with_scaling_efficiency
from meshwise.strategy import PRESETS

MIB = 2**20
STEPS, STEPS_PER_EPOCH = 240, 80
HYBRIDS = ("data=2,tensor=2", "zero=3,data=2,tensor=2")


def survey(*, model: str = "gpt2-tiny", repeats: int = 3, trouble: bool = True) -> list[Record]:
    """All runs; with ``trouble`` some failed, diverged, were refused, or know less than others."""
    records = [
        _record(preset, num_devices, repeat, model=model)
        for num_devices in (1, 2, 4)
        for preset in ([*PRESETS, *HYBRIDS] if num_devices == 4 else list(PRESETS))
        if (preset == "single") == (num_devices == 1)
        for repeat in range(repeats)
    ]
    return with_scaling_efficiency([_with_trouble(r) for r in records] if trouble else records)


def _with_trouble(record: Record) -> Record:
    what = (record.preset, record.num_devices)
    if what == ("interleaved", 4):
        return _blank(record, "refused", "interleaved with pipeline=4 needs 8 layers, gpt2-tiny has 4; use 2 devices")
    if what == ("zero2", 4):
        return _blank(
            record, "failed", f"rank 3 was killed (signal 9) at step {17 + record.repeat}; its log says [out] <b>"
        )
    if what == ("gpipe", 4) and record.repeat == 1:
        return _blank(record, "failed", "rank 1 made no progress for 120 s at step 31 in all_reduce")
    if what == ("pipedream", 4):
        curve = [point for point in record.curve if point.step <= 120]
        curve.append(CurvePoint(step=160, epoch=2.0, time=9.0, validation_loss=math.nan, perplexity=math.nan))
        return record.model_copy(
            update={
                "status": "diverged",
                "reason": "the loss is NaN from step 151 on",
                "curve": curve,
                "validation": {},
            }
        )
    if what == ("tensor", 4):
        return record.model_copy(update={"memory": [], "peak_memory": [], "communication": {}})
    return record


def _blank(record: Record, status: str, reason: str) -> Record:
    names = ("model", "data", "strategy", "preset", "num_devices", "repeat", "seed", "scaling", "global_batch_size")
    known = {name: getattr(record, name) for name in names}
    return Record.model_validate({**known, "status": status, "reason": reason})


def _record(preset: str, num_devices: int, repeat: int, *, model: str) -> Record:
    noise = random.Random(f"{preset}{num_devices}{repeat}")
    place = [*PRESETS, *HYBRIDS].index(preset)
    step_time = 0.0412 * (1 + 0.06 * place) / num_devices**0.62 * noise.uniform(0.97, 1.03)
    memory = [_memory(preset, num_devices, rank) for rank in range(num_devices)]
    curve = _curve(preset, num_devices, step_time, noise)
    return Record(
        model=model,
        data="stdlib",
        strategy=preset if "=" in preset or preset == "single" else f"{preset}={num_devices}",
        preset=preset,
        num_devices=num_devices,
        repeat=repeat,
        seed=repeat,
        global_batch_size=32,
        micro_batch_size=8,
        num_steps=STEPS,
        steps_per_epoch=STEPS_PER_EPOCH,
        parameters=842_112,
        step_time=step_time,
        epoch_time=step_time * STEPS_PER_EPOCH,
        throughput=32 * 128 / step_time,
        throughput_unit="tokens",
        peak_memory=[part.peak for part in memory],
        memory=memory,
        communication=_communication(preset, num_devices),
        validation={"validation_loss": curve[-1].validation_loss or 0, "perplexity": curve[-1].perplexity or 0},
        curve=curve,
        target_metric="perplexity",
        time_to_target=next((p.time for p in curve if p.perplexity and p.perplexity < 16), None),
        wall_time=20.0 + place,
        trace="trace.json",
        folder=f"runs/{model}--{preset}--d{num_devices}--r{repeat}",
    )


def _memory(preset: str, num_devices: int, rank: int) -> RankMemory:
    whole = 3.2 * MIB
    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "zero=3,data=2,tensor=2": 3}.get(preset, 0)
    split = num_devices if preset in ("tensor", "gpipe", "1f1b", "interleaved") or preset.startswith("pipe") else 1
    parts = {
        "parameters": whole / split / (num_devices if stage > 2 else 1),
        "gradients": whole / split / (num_devices if stage > 1 else 1),
        "optimizer_state": 2 * whole / split / (num_devices if stage > 0 else 1),
        "activations": 21 * MIB / num_devices * (1.1 if rank == 0 else 1),
        "other": 0.7 * MIB,
    }
    sizes = {name: int(size) for name, size in parts.items()}
    return RankMemory(peak=sum(sizes.values()), phase="backward", **sizes)


def _communication(preset: str, num_devices: int) -> dict[str, float]:
    whole = 3.2 * MIB
    if num_devices == 1:
        return {}
    if preset in ("data", "zero1", "zero2"):
        return {"all_reduce": whole} if preset == "data" else {"reduce_scatter": whole, "all_gather": whole}
    if preset.startswith("zero"):
        return {"all_gather": 2 * whole, "reduce_scatter": whole}
    if preset.startswith(("tensor", "data=")):
        return {"all_gather": 6 * MIB, "reduce_scatter": 6 * MIB, "all_reduce": 0.3 * MIB}
    return {"send": 2.0 * MIB}


def _curve(preset: str, num_devices: int, step_time: float, noise: random.Random) -> list[CurvePoint]:
    stale = 0.25 if preset.startswith("pipedream") else 0.0
    points = []
    for step in range(0, STEPS + 1, 20):
        loss = 2.45 + stale + 3.1 * math.exp(-step / (60 + 40 * stale)) + noise.gauss(0, 0.02)
        points.append(
            CurvePoint(
                step=step,
                epoch=step / STEPS_PER_EPOCH,
                time=step * step_time,
                train_loss=loss,
                validation_loss=loss,
                perplexity=math.exp(loss),
            )
        )
    return points
