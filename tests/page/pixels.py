"""What a chart of the page shows, by the pixels of its canvas."""

from __future__ import annotations

from typing import Any

from tests.page.browser_harness import column, until

OF_PIXELS = "willReadFrequently"
"""The browser's advice to who reads pixels often, which only these tests do."""


def is_blue(pixel: tuple[int, int, int, int]) -> bool:
    """Tell whether a pixel is of the first colour, faint or not: the grid is grey."""
    red, _, blue, opacity = pixel
    return opacity > 15 and blue - red > 60


def height_of(page: Any, metric: str, share: float) -> float:
    """Return how high a line is at a place, from 0 at the bottom to 1 at the top."""
    pixels = column(page, metric, share)
    strongest = max(pixel[3] for pixel in pixels if is_blue(pixel))
    rows = [row for row, pixel in enumerate(pixels) if is_blue(pixel) and pixel[3] > 0.8 * strongest]
    return 1 - sum(rows) / len(rows) / len(pixels)


def drawn(page: Any) -> None:
    """Wait until the newest of the four is drawn."""
    until(page, "document.querySelectorAll('.card .readout b[data-value]').length === 4")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
