"""``meshwise strategies``: what can be asked for."""

from __future__ import annotations

from meshwise.cli import output


def strategies(*, json: bool = False) -> None:
    """List the strategies, what each does and who found it.

    Args:
        json: print one JSON object on stdout and nothing else.
    """
    from meshwise.strategy import PRESETS
    from meshwise.strategy.strategy import KEYS

    if json:
        listed = [{"name": name, "summary": p.summary, "source": p.source} for name, p in PRESETS.items()]
        output.print_json({"strategies": listed, "keys": list(KEYS)})
        return
    rows = [(name, preset.summary, preset.source) for name, preset in PRESETS.items()]
    output.print_rows(("strategy", "what it does", "source"), rows)
    print(
        f"\nKeys, joined by commas: {', '.join(KEYS)}.\n"
        "Sizes of data, tensor and pipeline multiply to the device count: data=2,tensor=2 runs on 4 devices.\n"
        "A preset takes the devices its other sizes leave, as in zero3,tensor=2."
    )
