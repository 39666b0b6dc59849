"""``meshwise verify``: the same training, proven."""

from __future__ import annotations

from typing import Literal

from meshwise.cli import output


def verify(
    model: str,
    /,
    *,
    strategy: str,
    devices: int | None = None,
    steps: int = 10,
    global_batch_size: int | None = None,
    clip_norm: float = 0.0,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    tolerance: float = 1e-12,
    json: bool = False,
) -> int:
    """Prove that a strategy trains the same model as one device does, to the last digits.

    Trains a few steps in 64-bit arithmetic on CPU processes both ways and compares losses and parameters.

    Args:
        model: gpt2-tiny, vgg16-tiny, … or path/file.py:function.
        strategy: a preset or a key=value list, such as zero3 or data=2,tensor=2.
        devices: device count; default: what the strategy's sizes come to, else 2.
        steps: optimizer steps.
        global_batch_size: samples of one step; default: the smallest that divides as the strategy needs.
        clip_norm: largest global gradient norm; 0 does not clip.
        optimizer: which optimizer takes the steps. adam divides by the gradient's size, so it magnifies rounding
            where a gradient is zero in exact arithmetic (an attention's key biases): expect 1e-12, not 1e-15.
        tolerance: largest relative difference that counts as identical.
        json: print one JSON object on stdout and nothing else.
    """
    from meshwise.errors import InputError, StrategyError
    from meshwise.strategy import parse

    if steps < 1:
        raise InputError(f"--steps {steps} proves nothing; use 1 or more")
    request = parse(strategy)
    count = devices if devices is not None else request.required_devices or 2
    resolved = request.at(count) if count >= 1 else None
    if resolved is None:
        raise StrategyError(
            f"{request.text} needs {request.required_devices} devices, not {count}; "
            f"use --devices {request.required_devices}"
        )
    from meshwise.run.verify import verify as prove

    proof = prove(
        model=model,
        strategy=resolved,
        num_steps=steps,
        global_batch_size=global_batch_size,
        clip_norm=clip_norm,
        optimizer=optimizer,
        tolerance=tolerance,
    )
    if json:
        output.print_json(output.verification_content(proof, strategy=resolved))
    else:
        print(f"{resolved} on {count} devices: {proof.describe()}")
    return 0 if proof.identical else 1
