"""The page's export as CSV: every value of a long run, whatever the chart shows of it."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from page_harness import client, make_run
from starlette.testclient import TestClient

from tandem.observe.page.series import CurveColumn, csv_parts
from tandem.observe.run_folder.curves import CURVES_NAME, CurvesFile
from tandem.observe.run_folder.journal import StepRecord

NUM_STEPS = 3_456


def long_run(folder: str, num_steps: int = NUM_STEPS) -> None:
    """Record a run of many steps, with a validation at every hundredth."""
    with make_run(folder, num_steps=0) as journal, contextlib.closing(CurvesFile(Path(folder), [])) as curves:
        for step in range(1, num_steps + 1):
            metrics = {"reward": math.sin(step), "loss": math.nan if step == 7 else 1 / step, "tokens_per_s": 10.0}
            if step % 100 == 0:
                metrics["val_accuracy"] = step / 1e5
            record = StepRecord(step=step, version=step, metrics=metrics, seconds={"total": 0.5})
            curves.append(journal.commit_step(record))


@pytest.fixture
def page() -> TestClient:
    long_run("long")
    make_run("short").close()
    return client("long", "short")


def saved(page: TestClient, columns: Sequence[tuple[int, str, str]], **query: Any) -> list[list[str]]:
    words = [pair for run, name, label in columns for pair in (("run", run), ("name", name), ("label", label))]
    answer = page.get(f"/api/csv?{urlencode([*words, *query.items()])}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == "attachment"
    return [*csv.reader(io.StringIO(answer.text))]


@pytest.mark.parametrize("has_curves", [True, False], ids=["curves file", "journal"])
def test_every_value_of_a_long_run_is_in_the_file(page: TestClient, has_curves: bool) -> None:
    if not has_curves:
        Path("long", CURVES_NAME).unlink()
    columns = [(0, "reward", "Reward"), (0, "val_accuracy", "Accuracy"), (1, "reward", "short, too"), (1, "none", "")]
    head, *rows = saved(page, columns)
    assert head == ["step", "Reward", "Accuracy", "short, too"]
    assert len(rows) == NUM_STEPS
    assert [int(row[0]) for row in rows] == [*range(1, NUM_STEPS + 1)]
    assert [float(row[1]) for row in rows] == [math.sin(step) for step in range(1, NUM_STEPS + 1)], "to the last digit"
    accuracies = {int(row[0]): float(row[2]) for row in rows if row[2]}
    assert accuracies == {step: step / 1e5 for step in range(100, NUM_STEPS, 100)}
    assert [row[3] for row in rows[:4]] == ["0.1", "0.2", "0.3", ""]


def test_it_is_of_the_steps_and_the_axis_that_the_chart_shows(page: TestClient) -> None:
    head, *rows = saved(page, [(0, "loss", "=Loss")], **{"from": 5, "to": 8})
    assert head == ["step", "'=Loss"], "no spreadsheet computes it"
    assert rows == [["5", "0.2"], ["6", repr(1 / 6)], ["7", ""], ["8", "0.125"]]
    assert saved(page, [(0, "loss", "Loss")], along="time", **{"from": 2, "to": 3}) == [
        ["seconds", "Loss"],
        ["1", "0.5"],
        ["1.5", repr(1 / 3)],
    ]
    assert saved(page, [(0, "loss", "Loss")], along="tokens", to=1) == [["tokens", "Loss"], ["5", "1"]]
    assert saved(page, []) == [["step"]]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("run=0&name=reward", "as many of each"),
        ("run=2&name=reward&label=x", "there is no run 2"),
        ("run=-1&name=reward&label=x", "there is no run -1"),
        ("run=0&name=reward&label=x&along=miles", "along"),
        ("run=0&name=reward&label=x&from=x", "from=x"),
    ],
)
def test_a_malformed_request_is_one_line(query: str, said: str) -> None:
    make_run().close()
    answer = client("run").get(f"/api/csv?{query}")
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_it_is_written_in_parts() -> None:
    places = np.arange(20_000.0)
    parts = [*csv_parts("steps", [CurveColumn("x", places, places / 3), CurveColumn("none", np.zeros(0), np.zeros(0))])]
    assert len(parts) == 1 + 4
    rows = [*csv.reader(io.StringIO("".join(parts)))]
    assert len(rows) == 1 + 20_000
    assert rows[-1] == ["19999", repr(19999 / 3), ""]
