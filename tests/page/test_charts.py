"""What charts draw, by their pixels: a logarithmic scale, and the band of what several steps in one point were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.browser_harness import NEEDS_CHROMIUM, column, make_run, until, viewing, visit
from tests.page.pixels import OF_PIXELS, drawn, height_of, is_blue

pytestmark = NEEDS_CHROMIUM

NUM_STEPS = 2000
"""More than a chart has points, so that four are one point."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a run: a reward that changes with each step about one half, two curves that are smooth, and noise."""
    folder = tmp_path_factory.mktemp("charts")
    steps = range(1, NUM_STEPS + 1)
    curves = {
        "reward": [0.9 if step % 2 else 0.1 for step in steps],
        "loss": [10 ** (-4 * (step // 4) / (NUM_STEPS // 4)) for step in steps],
        "entropy": [0.5 + (step // 4) / NUM_STEPS for step in steps],
        "token_mult_prob_error": [1 + 1e-8 * (step // 4 % 7) for step in steps],
    }
    make_run(folder / "run", curves)
    with viewing(folder, "run") as url:
        yield url


def test_several_steps_in_one_point_are_a_band_from_the_least_to_the_most(url: str, chromium: Any) -> None:
    with visit(chromium, url, may_say=OF_PIXELS) as page:
        drawn(page)
        pixels = column(page, "reward", 0.5)
        band = [row for row, pixel in enumerate(pixels) if is_blue(pixel)]
        # Beyond 0.1 and 0.9 the chart has 7 % of what is between on either side.
        assert band[0] / len(pixels) == pytest.approx(0.07 / 1.14, abs=0.03)
        assert band[-1] / len(pixels) == pytest.approx(1 - 0.07 / 1.14, abs=0.03)
        assert len(band) > 0.95 * (band[-1] - band[0]), "but for the grid all of it is filled"
        assert height_of(page, "reward", 0.5) == pytest.approx(0.5, abs=0.03), "the mean"
        faint = [pixel for pixel in pixels if is_blue(pixel) and pixel[3] < 100]
        assert len(faint) > 0.8 * len(band)
        smooth = [pixel for pixel in column(page, "entropy", 0.5) if is_blue(pixel)]
        assert len(smooth) < 8, "what is the same in all steps of a point has no band"


def test_the_log_button_makes_an_exponential_curve_a_straight_line(url: str, chromium: Any) -> None:
    def heights(page: Any, metric: str) -> list[float]:
        return [height_of(page, metric, share) for share in (0.2, 0.5, 0.8)]

    with visit(chromium, url, may_say=OF_PIXELS) as page:
        drawn(page)
        left, middle, right = heights(page, "loss")
        assert middle - right < 0.2 * (left - right), "it falls to a hundredth at once"
        others = heights(page, "entropy")
        button = page.locator("[data-metric=loss] button", has_text="log")
        button.click()
        until(page, "document.querySelector('[data-metric=loss] [aria-pressed=true]') !== null")
        drawn(page)
        left, middle, right = heights(page, "loss")
        assert middle == pytest.approx((left + right) / 2, abs=0.03)
        assert left - right > 0.4
        assert heights(page, "entropy") == pytest.approx(others, abs=0.01), "it is for this chart only"
        link = page.evaluate("location.href")
    with visit(chromium, link, may_say=OF_PIXELS) as page:
        drawn(page)
        assert heights(page, "loss") == pytest.approx([left, middle, right], abs=0.01), "a link opens it again"
        page.locator("[data-metric=loss] button", has_text="log").click()
        until(page, "document.querySelector('[data-metric=loss] [aria-pressed=true]') === null")
        drawn(page)
        left, middle, right = heights(page, "loss")
        assert middle - right < 0.2 * (left - right)


def test_differences_that_rounding_makes_are_not_drawn(url: str, chromium: Any) -> None:
    with visit(chromium, url, may_say=OF_PIXELS) as page:
        drawn(page)
        page.locator("[data-metric=token_mult_prob_error]").scroll_into_view_if_needed()
        drawn(page)
        for share in (0.2, 0.5, 0.8):
            assert height_of(page, "token_mult_prob_error", share) == pytest.approx(0.5, abs=0.02)
