"""The configuration panel, the names of lines and CSV files, in a real Chromium."""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal_file import JOURNAL_NAME
from tests.page.browser_harness import NEEDS_CHROMIUM, make_run, until, viewing, visit

pytestmark = NEEDS_CHROMIUM

REWARDS = {"one": [0.1, 0.25, 1 / 3], "two": [0.5, 0.75, 1.0]}
LEARNING_RATES = {"one": 1e-4, "two": 3e-4}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of two runs that differ in one setting."""
    folder = tmp_path_factory.mktemp("two")
    for name, rewards in REWARDS.items():
        make_run(folder / name, {"reward": rewards, "loss": rewards, "val_loss": rewards})
        with contextlib.closing(sqlite3.connect(folder / name / JOURNAL_NAME)) as journal:
            ((settings,),) = journal.execute("SELECT json FROM configs").fetchall()
            changed = json.loads(settings) | {"policy": {"optimizer": {"kwargs": {"lr": LEARNING_RATES[name]}}}}
            journal.execute("UPDATE configs SET json = ?", (json.dumps(changed).encode(),))
            journal.commit()
    with viewing(folder, "one", "two") as url:
        yield url


def test_settings_that_differ_between_runs_are_told(url: str, chromium: Any, tmp_path: Path) -> None:
    with visit(chromium, url) as page:
        page.get_by_role("link", name="Configuration").or_(page.get_by_role("button", name="Configuration")).click()
        until(page, "document.querySelector('[data-table=config] tr[data-key]') !== null")
        everything = page.locator("tr[data-key]").count()
        row = page.locator("tr[data-key='policy.optimizer.kwargs.lr']")
        assert row.locator("td").all_inner_texts() == ["policy.optimizer.kwargs.lr", "0.0001", "0.0003"]
        page.get_by_role("button", name="Differing").click()
        until(page, "!document.querySelector('tr[data-differs=false]')")
        assert 1 <= page.locator("tr[data-key]").count() < everything
        assert row.count() == 1
        link = page.evaluate("location.href")
    with visit(chromium, link) as page:
        until(page, "document.querySelector('[data-table=config] tr[data-key]') !== null")
        assert page.locator("tr[data-differs=false]").count() == 0, "a link opens it again"


def test_every_line_of_several_has_its_name_and_a_chart_is_saved_as_csv(
    url: str, chromium: Any, tmp_path: Path
) -> None:
    with visit(chromium, url) as page:
        until(page, "document.querySelectorAll('[data-metric=reward] .value').length === 2")
        labels = page.locator("[data-metric=reward] .readout .label").all_inner_texts()
        assert labels == ["one", "two"], "the heading names the metric"
        assert page.locator("[data-metric=loss] .readout .label").count() == 4
        with page.expect_download() as started:
            page.locator("[data-metric=reward] button", has_text="csv").click()
        assert started.value.suggested_filename == "one+two-reward.csv"
        started.value.save_as(tmp_path / "saved.csv")
    with (tmp_path / "saved.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "one: Reward", "two: Reward"]
    assert [float(row[1]) for row in rows] == REWARDS["one"], "to the last digit"
    assert [float(row[2]) for row in rows] == REWARDS["two"]
