"""The report in a real browser: every figure drawn, nothing asked of the network, no error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit" / "report"))
from synthetic_survey import survey

from meshwise.record import Record, write_lines
from meshwise.report.build import build

pytest.importorskip("altair", reason="the page needs the report extra")

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine; install it to see the page drawn")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=15000",
]

WATCH = """<script>
const trouble = [];
const note = text => { trouble.push(text); document.documentElement.dataset.trouble = trouble.join(" | "); };
addEventListener("securitypolicyviolation", event => note("asked for " + event.blockedURI));
addEventListener("error", event => note("error " + event.message));
addEventListener("unhandledrejection", event => note("rejected " + event.reason));
new PerformanceObserver(list => list.getEntries().forEach(entry => note("loaded " + entry.name)))
  .observe({type: "resource", buffered: true});
document.documentElement.dataset.watched = "yes";
</script>"""


def drawn(path: Path, tmp_path: Path) -> str:
    """The page's DOM after its scripts ran; ``data-trouble`` tells of anything it asked for and of errors."""
    watched = path.with_name("watched.html")
    watched.write_text(path.read_text(encoding="utf-8").replace("<title>", f"{WATCH}<title>", 1), encoding="utf-8")
    done = subprocess.run(
        [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", watched.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def predicted(record: Record) -> Record:
    known = record.step_time is not None
    return record.model_copy(update={"predicted": {"step_time": 0.03}}) if known else record


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_lines(folder / "records.jsonl", [predicted(record) for record in survey()])
    return build([folder], folder / "report.html")


def test_the_page_draws_every_figure_and_asks_for_nothing(page: Path, tmp_path: Path) -> None:
    dom = drawn(page, tmp_path)
    assert 'data-watched="yes"' in dom
    assert "data-trouble" not in dom, re.findall(r'data-trouble="([^"]*)"', dom)
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.S)
    places = re.findall(r'id="0-([^"]+)"', body)
    assert len(places) == 9
    assert f'data-drawn="{len(places)}"' in dom, "every figure ended in an SVG"
    assert len(re.findall(r'<svg[^>]*class="marks"', body)) == len(places)
    assert "could not be drawn" not in body
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", body)
    assert not {"NaN", "undefined", "null"} & set(shown)
    assert {"data", "zero3", "pipedream-2bw", "zero=3,data=2,tensor=2"} <= set(shown), "every strategy is in a legend"


def test_the_browser_would_tell_of_a_request(page: Path, tmp_path: Path) -> None:
    """What the test above relies on: a page that does ask for something is found out."""
    html = page.read_text(encoding="utf-8")
    page.write_text(html.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png">', 1), encoding="utf-8")
    assert re.search(r'data-trouble="[^"]*asked for http://127\.0\.0\.1:9', drawn(page, tmp_path))
