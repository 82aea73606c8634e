"""A chart of a long run is saved with every value of its lines, in a real Chromium."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import Command
from tests.page.browser_harness import NEEDS_CHROMIUM, make_run, until, visit

pytestmark = NEEDS_CHROMIUM
NUM_STEPS = 5_000
"""More than the points of a chart."""


def test_a_chart_of_a_long_run_is_saved_whole_and_zoomed_its_steps_in_view(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = tmp_path_factory.mktemp("long")
    rewards = [1 / step for step in range(1, NUM_STEPS + 1)]
    make_run(folder / "run", {"reward": rewards, "loss": rewards})
    with contextlib.chdir(folder), Command("coordinator", "view", Path("run")) as view:
        url = view.wait_for(r"http://\S+")[0]
        for where, steps in (("", range(1, NUM_STEPS + 1)), ("#curves?zoom=2000-3500", range(2000, 3501))):
            with visit(chromium, f"{url}{where}") as page:
                until(page, "document.querySelectorAll('[data-metric=reward] .value').length === 1")
                with page.expect_download() as started:
                    page.locator("[data-metric=reward] button", has_text="csv").click()
                assert started.value.suggested_filename == "run-reward.csv"
                started.value.save_as(tmp_path / "saved.csv")
            with (tmp_path / "saved.csv").open(newline="") as file:
                head, *rows = csv.reader(file)
            assert head == ["step", "Reward"]
            assert [int(row[0]) for row in rows] == [*steps]
            assert [float(row[1]) for row in rows] == [1 / step for step in steps]
