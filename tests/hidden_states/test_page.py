from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from patchkit.hidden_states.page import page, write_page
from tests.hidden_states.conftest import patchkit


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, _tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.outside.append(value)


def test_the_page_holds_all_that_it_shows(packing):
    dataset = packing.pack()
    links = Links()
    text = page(dataset)
    links.feed(text)
    assert links.outside == []
    assert len(links.ids) == len(set(links.ids))
    assert not re.search(r"@import|url\((?!#)", text)
    assert "#010101" not in text
    for shown in ("R(3)", "0.5.9", "d" * 64, f"{dataset.record['tokens']:,}"):
        assert shown in text


def test_names_cannot_put_markup_into_the_page(packing):
    dataset = packing.pack(name="<b>ds")
    dataset.record["origin"]["model_path"] = "<script>alert(1)</script>"
    text = page(dataset)
    assert "<script>" not in text
    assert "<b>ds" not in text


def test_a_sample_unlike_the_others_is_named(packing):
    dataset = packing.pack()
    entries = list(dataset.entries())
    entries[4]["statistics"]["norm"][2] *= 50
    dataset.entries = lambda: iter(entries)
    text = page(dataset)
    outliers = text[text.index("Outliers") : text.index("Where it comes from")]
    assert "<td>4</td>" in outliers
    assert "R(6)" in outliers


def test_the_command_writes_the_page_beside_the_data(packing):
    dataset = packing.pack()
    done = patchkit("report", dataset.folder)
    assert done.returncode == 0
    assert done.stderr == ""
    assert (packing.folder / "ds/report.html").read_text().startswith("<!doctype html>")


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_in_both_schemes(packing, scheme):
    import numpy as np
    from matplotlib.image import imread

    path = packing.folder / "report.html"
    write_page(packing.pack(), str(path))
    picture = packing.folder / "page.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,1500", *dark),
            *(f"--user-data-dir={packing.folder}/profile", f"--screenshot={picture}", f"file://{path}"),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    brightness = np.asarray(imread(picture))[..., :3].mean(axis=2)
    paper = np.median(brightness)
    assert paper > 0.9 if scheme == "light" else paper < 0.2
    # There is ink, and the plots' bars stand out from the paper.
    assert (np.abs(brightness - paper) > 0.25).mean() > 0.02
