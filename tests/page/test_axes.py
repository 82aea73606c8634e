"""Axes of charts: runs of one stage on each, outliers cut off and marked, zeros at the bottom, units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.browser_harness import NEEDS_CHROMIUM, column, make_run, until, viewing, visit
from tests.page.pixels import OF_PIXELS, drawn, height_of, is_blue

pytestmark = NEEDS_CHROMIUM

NUM_STEPS, STEP_OF_OUTLIER = 40, 20
PLACE = STEP_OF_OUTLIER / NUM_STEPS
"""How far to the right the outlier is."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a GRPO run in one step of which numbers exploded, and of the long SFT run before it."""
    folder = tmp_path_factory.mktemp("axes")
    steps = range(1, NUM_STEPS + 1)
    curves = {
        "loss": [0.1 if step % 2 else 0.2 for step in steps],
        "grad_norm": [1.0 + step / 100 for step in steps],
        "kl": [0.0 for _ in steps],
        "entropy": [2.0 - step / NUM_STEPS for step in steps],
    }
    curves["loss"][STEP_OF_OUTLIER - 1], curves["grad_norm"][STEP_OF_OUTLIER - 1] = -8304.0, 450_000.0
    make_run(folder / "grpo", curves)
    # As a model begins to learn: a few losses are much higher than all others, and none is an outlier.
    losses = [3 * 0.8**step + 0.5 - step / 2000 for step in range(660)]
    make_run(folder / "sft", {"loss": losses, "val_accuracy": losses}, "sft")
    with viewing(folder, "sft", "grpo") as url:
        yield url


def lines_of(page: Any, metric: str) -> list[str]:
    """Return the runs whose lines a chart has, once it is drawn."""
    page.wait_for_selector(f"[data-metric={metric}] canvas")
    return page.locator(f"[data-metric={metric}] .readout .step").all_inner_texts()


def has_blue(page: Any, metric: str, share: float) -> bool:
    return any(is_blue(pixel) for pixel in column(page, metric, share))


def test_runs_of_another_stage_are_not_on_the_axis_until_they_are_asked_for(url: str, chromium: Any) -> None:
    with visit(chromium, url, may_say=OF_PIXELS) as page:
        assert lines_of(page, "loss") == ["step 660"]
        assert page.locator("[data-metric=grad_norm]").count() == 0, "that is of the other"
        page.click(".run[data-run='1'] .name")
        page.wait_for_selector("[data-metric=grad_norm] canvas")
        drawn(page)
        assert lines_of(page, "loss") == [f"step {NUM_STEPS}"]
        assert page.evaluate("document.querySelector('[data-metric=entropy] .u-over').clientWidth") > 200
        assert column(page, "entropy", 0.97) != column(page, "entropy", 0.99), "the run fills the axis"
        page.click("[aria-label='Draw the curves of sft']")
        until(page, "document.querySelectorAll('[data-metric=loss] .readout b').length > 1")
        assert "runs=0.1" in page.evaluate("location.hash")
        page.click("[aria-label='Draw the curves of sft']")
        until(page, "!location.hash.includes('runs')")


def test_an_outlier_is_cut_off_and_marked_and_shown_when_asked_for(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#curves?run=1", may_say=OF_PIXELS) as page:
        drawn(page)
        cut = page.locator("[data-metric=loss] .cut")
        assert cut.inner_text() == "1 cut off"
        assert "−8,304" in cut.get_attribute("title")
        assert "450,000" in page.locator("[data-metric=grad_norm] .cut").get_attribute("title")
        assert not page.locator("[data-metric=entropy] .cut").is_visible()
        low, high = height_of(page, "grad_norm", 0.1), height_of(page, "grad_norm", 0.9)
        assert (low, high) == (pytest.approx(0.15, abs=0.07), pytest.approx(0.85, abs=0.07)), "it has its height"
        # A triangle at the end of the axis, which is wider than the line.
        for metric, side in (("loss", slice(-8, -3)), ("grad_norm", slice(0, 5))):
            for beside in (-0.008, 0.008):
                pixels = column(page, metric, PLACE + beside)[side]
                assert any(is_blue(pixel) for pixel in pixels), (metric, beside)
        smooth = page.locator("[aria-label=Smoothing]")
        smooth.evaluate("(e) => { e.value = 0.9; e.dispatchEvent(new Event('input')); }")
        drawn(page)
        assert height_of(page, "grad_norm", 0.9) > 0.5, "the outlier is not smoothed into its neighbours"
        page.locator("[data-metric=loss] .cut").click()
        until(page, "location.hash.includes('whole=loss')")
        drawn(page)
        assert height_of(page, "loss", 0.9) > 0.9, "beside -8,304 all others are one line"
        assert cut.inner_text() == "whole"
        cut.click()
        until(page, "!location.hash.includes('whole')")


def test_the_high_losses_at_the_beginning_of_training_are_not_cut_off(url: str, chromium: Any) -> None:
    with visit(chromium, url, may_say=OF_PIXELS) as page:
        page.wait_for_selector("[data-metric=loss] canvas")
        assert not page.locator(".cut:visible").count()


def test_zeros_are_at_the_bottom(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#curves?run=1", may_say=OF_PIXELS) as page:
        drawn(page)
        assert height_of(page, "kl", 0.5) == pytest.approx(0.0, abs=0.02)


def test_charts_have_units(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#curves?run=1") as page:
        page.wait_for_selector("[data-metric=entropy] canvas")
        assert page.locator("[data-metric=entropy] .unit").inner_text() == "nat/token"
        assert page.locator("[data-metric=loss] .unit").count() == 0, "a policy's loss has none"
        page.click(".run[data-run='0'] .name")
        page.wait_for_selector("[data-metric=val_accuracy] canvas")
        assert page.locator("[data-metric=loss] .unit").inner_text() == "nat/token"
        assert page.locator("[data-metric=val_accuracy] .readout b").inner_text().endswith("%")
