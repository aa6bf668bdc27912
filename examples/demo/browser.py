"""Open a page as a reader would: in headless Chromium where there is one."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from typing import TYPE_CHECKING

from examples.demo.account import require

if TYPE_CHECKING:
    from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEAST_PICTURE = 20_000  # bytes; an empty page of this size is about 5 kB
SECONDS = 120
# Elements that have no end tag.
VOID = {"area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Elements(HTMLParser):
    """Checks that every element is closed in order, and counts the plots."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.plots = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.plots += tag == "svg"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that closes itself leaves nothing open."""

    def handle_endtag(self, tag: str) -> None:
        require(bool(self.open) and self.open.pop() == tag, f"the page closes <{tag}> out of order")


def look_at(page: Path, work: Path) -> str:
    """Check the page and draw it; says what was seen. Raises StepFailedError."""
    elements = Elements()
    elements.feed(page.read_text(encoding="utf-8"))
    require(not elements.open, f"the page leaves {elements.open} open")
    require(elements.plots > 0, "the page has no plots")
    seen = f"the page is whole HTML with {elements.plots} plots"
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        return f"{seen}; there is no Chromium here, so it was not drawn"
    picture = work / "report.png"
    done = subprocess.run(
        [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,1500"),
            *(f"--user-data-dir={work / 'browser'}", f"--screenshot={picture}", page.as_uri()),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    require(done.returncode == 0 and picture.exists(), f"Chromium cannot draw it: {done.stderr[-300:]}")
    require(picture.stat().st_size > LEAST_PICTURE, "Chromium's picture of it is empty")
    return f"{seen}; Chromium drew it: a picture of {picture.stat().st_size:,} bytes"
