"""The page of `multipack report` in a real browser: on a phone and on a desk, with nothing loaded.

Run by `make test-page`, apart from the other tests, because it needs Chromium, and fails without.
The page stands in a frame as wide as the screen, and a script beside the frame measures it.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from multipack.cli import main

MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const images = [...page.images];
  const found = {
    width: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    loaded: view.performance.getEntriesByType("resource").map((entry) => entry.name.slice(0, 5)),
    drawn: images.map((image) => image.complete && image.naturalWidth > 0),
    shown: images.map((image) => image.getBoundingClientRect().width),
    natural: images.map((image) => image.naturalWidth),
    text: parseFloat(view.getComputedStyle(page.body).fontSize),
    table: page.querySelector(".wide").scrollWidth,
  };
  document.querySelector("pre").textContent = JSON.stringify(found);
};
"""


def browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found is not None, f"no browser to look at the page with: install one of {names}"
    return found


def run(*options: str) -> str:
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    rng = np.random.default_rng(0)
    lengths = np.clip(np.ceil(rng.lognormal(5.0, 1.0, 4000)), 1, 1024).astype(np.int64)
    labels = np.rint(lengths * rng.beta(1.2, 1.8, 4000)).astype(np.int64)
    np.save(folder / "lengths.npy", np.stack([lengths, labels], axis=1))
    written = folder / "report.html"
    data, settings = str(folder / "lengths.npy"), "--sequence-len 1024 --micro-batch-size 4"
    sizes = "--world-size 4 --gradient-accumulation-steps 2"
    assert main(["report", data, *settings.split(), *sizes.split(), "--html", str(written)]) == 0
    return written


def framed(page: Path, width: int, height: int, script: str) -> Path:
    text = html.escape(page.read_text("utf-8"))
    path = page.with_name(f"{width}-{height}-{len(script)}.html")
    path.write_text(
        f'<body style="margin: 0"><iframe style="border: 0; width: {width}px; height: {height}px" '
        f'srcdoc="{text}"></iframe><pre></pre><script>{script}</script>',
        "utf-8",
    )
    return path


def measure(page: Path, width: int) -> dict[str, Any]:
    path = framed(page, width, 800, MEASURE)
    dumped = run("--virtual-time-budget=20000", "--dump-dom", path.as_uri())
    told = re.search(r"<pre>(\{.*\})</pre>", dumped)
    assert told is not None, dumped[-500:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen_and_draws_everything(page: Path, width: int) -> None:
    found = measure(page, width)

    assert found["width"] <= width, "the page is wider than the screen"
    assert found["drawn"] == [True] * 7
    assert all(name == "data:" for name in found["loaded"])
    assert found["text"] == 16
    # 9 points, which most text of a plot has, are at least 8 pixels.
    scales = np.divide(found["shown"], found["natural"])
    assert min(scales) * 9 * 96 / 72 >= 8


def test_plots_stand_beside_each_other_where_there_is_room(page: Path) -> None:
    assert measure(page, 360)["height"] > 1.2 * measure(page, 1280)["height"]


def test_a_screenshot_shows_the_page_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    height = measure(page, 360)["height"]
    shot = tmp_path / "phone.png"
    path = framed(page, 360, height, "")

    run(f"--screenshot={shot}", f"--window-size=500,{height}", path.as_uri())

    pixels = image.imread(shot)[:, :360, :3]
    strips = np.array_split(pixels, 12)
    assert all(np.ptp(strip) > 0.5 for strip in strips), "a part of the page is blank"
