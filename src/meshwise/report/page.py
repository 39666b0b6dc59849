"""The report as one HTML file that opens anywhere and asks the network for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from meshwise.record import Record
from meshwise.report.extra import load
from meshwise.report.figures import Figure, figures
from meshwise.report.headline import headline
from meshwise.report.sheet import Sheet, sheet
from meshwise.report.study import Study, studies
from meshwise.report.style import styles
from meshwise.strategy import PRESETS
from meshwise.units import show

_TEMPLATE = "page.html.j2"


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page shows of one study."""

    study: Study
    sentences: Sequence[str]
    sheet: Sheet
    figures: Sequence[Figure]
    runs: Sequence[Mapping[str, str]]


def page(records: Sequence[Record], environment: Mapping[str, Mapping[str, Any]], *, beside: Path) -> str:
    """HTML of the report.

    Args:
        records: of any number of models; each model, data set and scaling rule gets its own section.
        environment: folder → content of its ``survey.json``.
        beside: folder in which the page will lie; links to traces are relative to it.

    Raises:
        MissingPackage: altair or vl-convert-python is not installed.
    """
    jinja2 = load("jinja2")
    looks = styles(record.preset for record in records)
    sections = [
        Section(
            study=study,
            sentences=headline(study),
            sheet=sheet(study),
            figures=figures(study, looks),
            runs=[_run(record, beside) for record in study.records if record.kind == "measured"],
        )
        for study in studies(records)
    ]
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return engine.get_template(_TEMPLATE).render(
        title=f"meshwise: {', '.join(dict.fromkeys(section.study.model for section in sections))}",
        sections=sections,
        specs={f"{n}-{figure.name}": figure.spec for n, part in enumerate(sections) for figure in part.figures},
        environments={name: _environment(content) for name, content in environment.items()},
        glossary=[(name, PRESETS[name]) for name in looks if name in PRESETS],
        bundle=_bundle(),
    )


@lru_cache(maxsize=1)
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script which sets ``window.vegaEmbed``."""
    script: str = load("vl_convert").javascript_bundle()
    return script.replace("</script", r"<\/script")


def _run(record: Record, beside: Path) -> dict[str, str]:
    """One line of the list of runs."""
    return {
        "preset": record.preset,
        "strategy": record.strategy,
        "devices": str(record.num_devices),
        "repeat": str(record.repeat),
        "seed": str(record.seed),
        "status": record.status,
        "batch": str(record.global_batch_size),
        "steps": str(record.num_steps) if record.num_steps else "–",
        "step": show(record.step_time, "s"),
        "memory": ", ".join(show(peak, "B") for peak in record.peak_memory) or "–",
        "wall": show(record.wall_time, "s"),
        "trace": _link(record.trace, beside) if record.trace else "",
    }


def _link(target: str, beside: Path) -> str:
    """``target`` as seen from the page; as it is where there is no way there (another drive)."""
    try:
        relative = os.path.relpath(target, beside.resolve())
    except ValueError:
        return Path(target).as_uri()
    return quote(Path(relative).as_posix())


def _environment(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``survey.json`` flattened to readable lines: what ran, where, and what to keep in mind."""
    left_out = ("cells", "meshwise", "schema_version", "notes")
    lines = [("note", str(note)) for note in content.get("notes", ()) if note]
    for key, value in content.items():
        if key not in left_out:
            lines += _flat(key, value)
    return lines


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in _flat(f"{name}.{key}", item)]
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, list):
        value = ", ".join(f"{item:.3g}" if isinstance(item, float) else str(item) for item in value)
    if name.endswith(".memory") and isinstance(value, int):
        value = show(value, "B")
    return [(name.removeprefix("environment.").replace("_", " "), str(value))]
