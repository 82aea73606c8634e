"""Take the pictures of the page that the documentation shows, of runs that were made: docs/screenshots/*.png.

coordinator up examples/arithmetic.yaml && python scripts/screenshots.py results/arithmetic [ANOTHER RUN]
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

OUT = Path(__file__).resolve().parents[1] / "docs" / "screenshots"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}
PICTURES: dict[str, tuple[str, dict[str, int], str, float]] = {
    "curves": ("#curves?smooth=0.7", LAPTOP, "light", 1.5),
    "timeline": ("#timeline?steps=3", {"width": 1280, "height": 600}, "dark", 1.5),
    "samples": ("#samples?sort=advantage-0&colour=gap", LAPTOP, "light", 1.5),
    "phone": ("#curves?smooth=0.7", PHONE, "dark", 2.0),
}
"""What is opened, how large, in which theme, and how many pixels a pixel of the page has."""


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, the one to show first")
    runs = parser.parse_args().runs
    OUT.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with page_of(runs) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for name, (place, size, theme, scale) in PICTURES.items():
            page: Any = browser.new_page(viewport=size, color_scheme=theme, device_scale_factor=scale)
            page.goto(url + place)
            if name == "samples":
                page.locator(".sample").first.click()
                page.wait_for_selector(".siblings .sibling")
            page.wait_for_selector("canvas, .tokens")
            page.wait_for_timeout(1500)  # for all that is drawn to be there
            page.screenshot(path=OUT / f"{name}.png")
            page.close()
        browser.close()


@contextlib.contextmanager
def page_of(runs: list[Path]) -> Iterator[str]:
    """Serve the page of these runs; yield its address."""
    command = [str(Path(sys.executable).with_name("coordinator")), "view", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None
            yield view.stdout.readline().removeprefix("page: ").strip()
        finally:
            view.terminate()


if __name__ == "__main__":
    main()
