from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_survey import survey

from meshwise.errors import InputError, OutputError
from meshwise.record import CurvePoint, Record
from meshwise.report import extra
from meshwise.report.build import build
from meshwise.report.page import page

ASKING = {"src", "srcset", "href", "action", "formaction", "data", "poster", "background", "ping", "cite", "manifest"}


@pytest.fixture(scope="module")
def html() -> str:
    pytest.importorskip("altair", reason="the page needs the report extra")
    pytest.importorskip("vl_convert", reason="the page needs the report extra")
    environment = {"runs/a": {"environment": {"python": "3.11.9", "memory": 2**34}, "notes": ["four on two cores"]}}
    return page(survey(repeats=2), environment, beside=Path("runs/a"))


class Reader(HTMLParser):
    """What a browser would ask for, and the text it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value for name, value in attrs if name in ASKING and value]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def test_the_page_asks_the_network_for_nothing(html: str) -> None:
    found = read(html)
    assert not [address for address in found.asked if re.match(r"(?i)\s*(https?:|//|ftp:|wss?:)", address)]
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(found.tags)
    style = "".join(re.findall(r"<style>(.*?)</style>", html, flags=re.S))
    assert "@import" not in style and "url(" not in style
    assert "default-src 'none'" in html


def test_the_page_is_under_two_megabytes(html: str) -> None:
    assert len(html.encode()) < 2_000_000


def test_long_trainings_leave_it_so() -> None:
    pytest.importorskip("altair", reason="the page needs the report extra")
    curve = [CurvePoint(step=n, epoch=n / 700, time=n * 0.0123, perplexity=300 / (n + 1) ** 0.3) for n in range(2000)]
    long = [r.model_copy(update={"curve": curve}) for r in survey(repeats=2, trouble=False)]
    assert len(page(long, {}, beside=Path(".")).encode()) < 2_000_000


def test_vega_is_there_once(html: str) -> None:
    assert html.count("window.vegaEmbed=") == 1


def test_everything_worth_knowing_is_text_on_the_page(html: str) -> None:
    text = " ".join(" ".join(read(html).text).split())
    for words in (
        "Fastest on 4 devices: data",
        "rank 1 made no progress for 120 s at step 31 in all_reduce",
        "interleaved with pipeline=4 needs 8 layers",
        "ui.perfetto.dev",
        "3.11.9",
        "16.0 GiB",
        "four on two cores",
        "Rajbhandari et al. 2020",
        "predicted",
    ):
        assert words in text, words


def test_what_a_user_names_is_shown_and_never_run() -> None:
    pytest.importorskip("altair", reason="the page needs the report extra")
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</title>{{ 7*7 }}"
    records = [
        r.model_copy(
            update={"model": evil, "data": evil, "preset": r.preset if r.preset == "single" else evil, "reason": evil}
        )
        for r in survey(repeats=1)
    ]
    html = page(records, {evil: {"notes": [evil], evil: evil}}, beside=Path("."))
    found = read(html)
    assert found.tags.count("script") == 3, "specs, Vega, and what draws them"
    assert "img" not in found.tags
    assert "<script>alert" not in html
    assert evil.split("</title>")[0] in "".join(found.text)


def test_traces_are_linked_relative_to_the_page(folder: Path) -> None:
    pytest.importorskip("altair", reason="the page needs the report extra")
    path = build([folder], folder / "report.html")
    links = [address for address in read(path.read_text(encoding="utf-8")).asked if address.endswith("trace.json")]
    assert links
    assert all((path.parent / link).exists() for link in links if "%" not in link)
    elsewhere = build([folder], folder.parent / "page.html")
    [first, *_] = [a for a in read(elsewhere.read_text(encoding="utf-8")).asked if a.endswith("trace.json")]
    assert first.startswith("gpt2-tiny/runs/")
    assert not list(folder.parent.glob("*.part"))


def test_a_missing_package_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = inspect.unwrap(importlib.import_module("meshwise.report.page")._bundle)
    for name in ("altair", "vl_convert"):
        with monkeypatch.context() as patch:
            patch.setattr("meshwise.report.page._bundle", uncached)  # as in a fresh process
            patch.setitem(sys.modules, name, None)
            with pytest.raises(
                InputError, match=f'needs {name}, which is not installed; pip install "meshwise'
            ) as caught:
                build([folder], folder / "report.html")
            assert isinstance(caught.value, extra.MissingPackage)
            assert caught.value.name == name


def test_a_page_is_not_written_over_a_folder(folder: Path) -> None:
    pytest.importorskip("altair", reason="the page needs the report extra")
    with pytest.raises(OutputError, match="is a folder; name a file in it"):
        build([folder], folder)


def test_the_report_layer_loads_no_torch_and_no_plotting() -> None:
    names = sorted(path.stem for path in Path(extra.__file__).parent.glob("[a-z]*.py"))
    imports = "; ".join(f"import meshwise.report.{name}" for name in names)
    code = f"import sys; {imports}; print([m for m in ('torch', 'altair', 'vl_convert', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_study_of_one_failed_run_still_makes_a_page() -> None:
    pytest.importorskip("altair", reason="the page needs the report extra")
    lost = Record(
        model="m",
        data="d",
        strategy="data=2",
        preset="data",
        num_devices=2,
        global_batch_size=8,
        status="failed",
        reason="oh",
    )
    html = page([lost], {}, beside=Path("."))
    assert "No run of m ended well" in html
