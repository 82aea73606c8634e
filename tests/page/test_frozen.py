"""The report in a real Chromium, opened from its file: the page's own panels, without a server."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.coordinator.observers.timeline import open_timeline, write_steps
from tandem.observe.report.report import write_report
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.observe.timeline import TIMELINE_NAME, StepSpans, TimelineSpan
from tests.page.browser_harness import LAPTOP, NEEDS_CHROMIUM, PHONE, until, visit

pytestmark = NEEDS_CHROMIUM

HOSTILE = "</script><script>window.ran='it'</script><img src=x onerror=\"window.ran='it'\">"
REWARDS = {"one": [0.1, 0.25, 1 / 3, 0.5], "two": [0.5, 0.75, 1.0]}
PANELS = ("summary", "curves", "timeline", "scheduler", "refits", "memory", "config", "log")


def make_run(folder: Path, rewards: list[float]) -> Path:
    """Make a run that ended, with a span of each step."""
    config = b'{"policy": {"model_name": "model"}, "grpo": {"max_num_steps": 9}}'
    with Journal.create(folder, config, "grpo") as journal:
        file = open_timeline(folder / TIMELINE_NAME, 1)
        for step, reward in enumerate(rewards, 1):
            metrics = {"reward": reward, "memory_training_trainer_gb": 0.5}
            seconds = {"total": 2.0, "generation": 1.0, "policy_training": 0.75}
            journal.commit_step(StepRecord(step=step, version=step, metrics=metrics, seconds=seconds))
            start, end = 100.0 + 2 * step, 102.0 + 2 * step
            spans = [
                TimelineSpan(process="coordinator", what="training", step=step, start=start + 1, end=end),
                TimelineSpan(process="trainer-0", what="training", step=step, start=start + 1.25, end=end),
            ]
            write_steps(file, [StepSpans(step=step, start=start, end=end, spans=spans)])
        file.close()
        journal.record_event("coordinator", HOSTILE)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of two runs."""
    folder = tmp_path_factory.mktemp("report")
    write_report([make_run(folder / name, rewards) for name, rewards in REWARDS.items()], folder, is_brief=True)
    return (folder / "report.html").as_uri()


def test_every_panel_of_the_report_opens_without_a_server(url: str, chromium: Any) -> None:
    asked: list[str] = []
    for options in ({"viewport": LAPTOP}, {"viewport": PHONE, "color_scheme": "dark"}):
        with visit(chromium, url, **options) as page:
            page.on("request", lambda request: asked.append(request.url))
            assert page.locator("#tabs a").evaluate_all("(tabs) => tabs.map((tab) => tab.dataset.tab)") == [*PANELS]
            for panel in PANELS:
                page.click(f"#tabs a[data-tab={panel}]")
                page.wait_for_selector(f"[data-view={panel}] :is(.panel, .card):not([hidden])")
                widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                assert widths[0] <= widths[1], (panel, options)
            assert page.locator("#connection").inner_text() == ""
    assert not [url for url in asked if not url.startswith("data:")]


def test_runs_are_compared_in_tables_and_in_charts(url: str, chromium: Any) -> None:
    with visit(chromium, url) as page:
        row = page.locator("[data-table=Results] tr", has_text="reward, first → last")
        assert row.locator("td").all_inner_texts() == ["0.1 → 0.5", "0.5 → 1"]
        page.click("#tabs a[data-tab=curves]")
        until(page, "document.querySelectorAll('[data-metric=reward] .value').length === 2")
        values = page.locator("[data-metric=reward] .readout b").evaluate_all("(all) => all.map((b) => b.dataset)")
        assert [(float(each["value"]), int(each["step"])) for each in values] == [(0.5, 4), (1.0, 3)]
        page.select_option("select[aria-label='Draw over']", "time")
        until(page, "document.querySelector('[data-metric=reward] .readout b').dataset.step === '8'")
        page.locator(".run[data-run='0'] .swatch-button").click()
        until(page, "document.querySelectorAll('[data-metric=reward] .value').length === 1")


def test_the_timeline_of_a_report_has_each_of_its_steps(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#timeline") as page:
        page.wait_for_selector(".lanes canvas")
        assert page.locator(".step-button").all_inner_texts() == ["1", "2", "3", "4"]
        page.click("[aria-label='Steps shown'] button[data-value='3']")
        until(page, "document.querySelectorAll('.step-button').length === 3")
        page.click("[aria-label='Flame of step 2']")
        page.wait_for_selector("h2:text-is('Step 2')")
        until(page, "document.querySelectorAll('.flame-process .phase').length === 3")


def test_the_timeline_is_saved_for_perfetto_and_a_chart_as_csv(url: str, chromium: Any, tmp_path: Path) -> None:
    with visit(chromium, f"{url}#timeline?steps=3") as page:
        page.wait_for_selector(".lanes canvas")
        with page.expect_download() as started:
            page.get_by_role("button", name="Save as trace").click()
        assert started.value.suggested_filename == "one-timeline.json"
        started.value.save_as(tmp_path / "saved.json")
        page.click("#tabs a[data-tab=curves]")
        until(page, "document.querySelectorAll('[data-metric=reward] .value').length === 2")
        with page.expect_download() as started:
            page.locator("[data-metric=reward] button", has_text="csv").click()
        started.value.save_as(tmp_path / "saved.csv")
    events = msgspec.json.decode((tmp_path / "saved.json").read_bytes())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [*threads.values()] == ["steps", "coordinator", "trainer-0"]
    spans = [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert len(spans) == 9
    assert spans[0] == ("steps", "step 2", 104_000_000, 2_000_000)
    assert spans[-1] == ("trainer-0", "training", 109_250_000, 750_000)
    with (tmp_path / "saved.csv").open(newline="") as file:
        rows = [*csv.reader(file)][1:]
    assert [float(row[1]) for row in rows] == REWARDS["one"], "to the last digit"


def test_what_was_written_by_others_is_text(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#log") as page:
        page.wait_for_selector(".log li")
        assert page.locator(".log li").last.locator(".words").text_content() == HOSTILE
        assert page.evaluate("window.ran") is None
        assert page.locator("main img, main script").count() == 0
