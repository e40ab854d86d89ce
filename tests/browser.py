"""A real browser without a window, for pages that must work where there is no network."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


def browse(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page; every host is unknown to the browser."""
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--window-size=1200,900", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


@dataclass(frozen=True)
class Opened:
    """A page as the browser has it after its script ran.

    Attributes:
        dom: the document.
        console: what the script, or the browser of the page, complained of.
        milliseconds: from the start of loading to the last chart.
    """

    dom: str
    console: list[str]
    milliseconds: int

    def series(self, chart: str) -> dict[str, int]:
        """Return the number of points of each line that is drawn in a chart."""
        figure = re.search(rf'<figure[^>]* id="chart-{chart}".*?</figure>', self.dom, re.S)
        assert figure, f"no chart {chart}"
        found = re.findall(r'data-series="([^"]*)" data-points="(\d+)"', figure[0])
        return {html.unescape(name): int(points) for name, points in found}

    @property
    def charts(self) -> list[str]:
        """Return the names of the charts."""
        return re.findall(r'<figure[^>]* id="chart-([^"]+)"', self.dom)

    @property
    def data(self) -> dict[str, Any]:
        """Return what the page draws."""
        text = re.search(r'id="page-data">(.*?)</script>', self.dom, re.S)
        assert text
        return json.loads(text[1])

    def row(self, name: str) -> list[str]:
        """Return the cells of the first row of that name."""
        row = re.search(rf'<th scope="row">{name}</th>(.*?)</tr>', self.dom, re.S)
        assert row, f"no row {name}"
        return [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row[1], re.S)]


def open_page(page: Path, profile: Path) -> Opened:
    done = browse(page, profile, "--dump-dom")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    drawn = re.search(r'<html[^>]* data-drawn="(\d+)"', done.stdout)
    assert drawn, f"the script did not reach its end: {console}"
    return Opened(done.stdout, console, int(drawn[1]))
