"""The page in a real browser, over real runs: what it shows is what their journals and records say."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from tandem.observe.run_folder.calls import CallRecord, record_calls
from tandem.observe.run_folder.journal import StepRecord, read_journal
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.sample_writing import write_shard
from tests.harness.runs.running import Command, coordinator, steps_of, write_config
from tests.page.browser_harness import LAPTOP, NEEDS_CHROMIUM, PHONE, until, visit

pytestmark = NEEDS_CHROMIUM

HOSTILE = "<img src=x onerror=\"window.ran='it'\"><script>window.ran='it'</script>"
PANELS = ("curves", "timeline", "scheduler", "refits", "memory", "config", "log", "samples")


class Shown(msgspec.Struct, frozen=True):
    """Runs, and the page over them."""

    url: str
    done: Path
    """A run that finished."""
    going: Path
    """One that goes on, until `stop` is called."""
    hostile: Path
    """A copy of the first, with texts that a browser would run if they were HTML."""
    stop: Callable[[], None]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """Two runs, one of which goes on, a copy of the other, and the page over all three."""
    folder = tmp_path_factory.mktemp("page")
    with contextlib.chdir(folder), contextlib.ExitStack() as ending:
        long = {"grpo": {"max_num_steps": 100_000, "seed": 8, "val_period": 4}, "logger": {"log_dir": "going"}}
        going = ending.enter_context(Command("coordinator", "up", write_config(long, "going.yaml")))
        short = {"grpo": {"max_num_steps": 6}, "logger": {"log_dir": "done"}}
        # Of few problems, so that each comes in several steps.
        short["data"] = {"num_train": 8}
        result = coordinator("up", write_config(short))
        assert result.returncode == 0, result.stderr
        going.wait_for(r"step 2/")
        make_hostile(Path("done"), Path("hostile"))
        view = ending.enter_context(Command("coordinator", "view", "done", "going", "hostile"))
        url = view.wait_for(r"http://\S+")[0]

        def stop() -> None:
            if going.process.poll() is None:
                going.signal(signal.SIGINT)
                going.wait()

        ending.callback(stop)
        yield Shown(url, folder / "done", folder / "going", folder / "hostile", stop)
        view.signal(signal.SIGINT)
        view.wait()


def make_hostile(run: Path, copy: Path) -> None:
    """Copy a run; put HTML wherever a user's or a model's text is."""
    shutil.copytree(run, copy)
    (shard,) = (copy / "samples").glob("step-00000001.rollout-0.parquet")
    table = pq.read_table(shard)
    rows = table.to_pylist()
    for row in rows:
        row |= dict.fromkeys(("question", "prompt", "response", "reference_answer", "failure"), HOSTILE)
        row["components"] = [(HOSTILE, 0.5)]
    with contextlib.closing(Journal.open(copy)) as journal:
        hostile = type(table).from_pylist(rows, schema=table.schema)
        write_shard(shard, journal.run_id, hostile)
        journal.record_event(HOSTILE, HOSTILE)
        call = {"kind": "sample", "key": "me", "num_sequences": 2, "num_tokens": 30, "seconds": 0.5, "ended_at": 1e9}
        outcomes = (("model-1", "done"), (HOSTILE, HOSTILE), ("model-1", "done"))
        record_calls(journal, [CallRecord(**call, model=model, outcome=outcome) for model, outcome in outcomes])


def of_metric(page: Any, metric: str) -> Any:
    """Return what the heading of a chart says its first line is, last."""
    return page.locator(f"[data-metric={metric}] .readout b").first


def number_in(locator: Any, of: str = "value") -> float:
    return float(locator.get_attribute(f"data-{of}"))


def test_a_live_run_moves(shown: Shown, chromium: Any) -> None:
    with visit(chromium, f"{shown.url}#curves?run=1&runs=1") as page:
        page.wait_for_selector(".state[data-state=running]")
        reward = of_metric(page, "reward")
        page.evaluate("window.isTheSamePage = true")
        first = int(number_in(reward, "step"))
        header = page.locator("[data-fact=step]").inner_text()
        until(page, f"Number(document.querySelector('[data-metric=reward] .readout b').dataset.step) > {first + 2}")
        until(page, f"document.querySelector('[data-fact=step]').textContent !== {json.dumps(header)}")
        step = int(number_in(reward, "step"))
        journal = {record.step: record for record in steps_of(shown.going)}
        assert float(reward.get_attribute("title").split(": ")[1]) in {
            r.metrics.get("reward") for r in journal.values()
        }
        assert step in journal
        assert page.evaluate("window.isTheSamePage")


def test_the_scheduler_of_a_live_run_is_shown(shown: Shown, chromium: Any) -> None:
    with visit(chromium, f"{shown.url}#scheduler?run=1") as page:
        page.wait_for_selector("[data-table=engines] tbody tr")
        assert page.locator("[data-table=engines] tbody th").all_inner_texts() == ["rollout-0"]
        assert page.locator("[data-table=trainers] tbody th").all_inner_texts() == ["trainer-0"]
        trained = "Number(document.querySelector('[data-fact=trained]').textContent.replaceAll(',', ''))"
        before = page.evaluate(trained)
        until(page, f"{trained} > {before}")
        shown.stop()
        page.wait_for_selector(".state[data-state=interrupted], .state[data-state=ended]")


@pytest.fixture
def ended(shown: Shown) -> Shown:
    """The same when nothing changes any more."""
    shown.stop()
    return shown


def last(steps: list[StepRecord], metric: str) -> tuple[int, float]:
    return [(record.step, record.metrics[metric]) for record in steps if metric in record.metrics][-1]


def test_curves_say_what_the_journal_says(ended: Shown, chromium: Any) -> None:
    steps = steps_of(ended.done)
    with visit(chromium, f"{ended.url}#curves?runs=0") as page:
        for metric in ("reward", "val_accuracy", "loss", "entropy", "grad_norm", "mean_generation_length"):
            reward = of_metric(page, metric)
            reward.wait_for()
            assert (number_in(reward, "step"), number_in(reward)) == last(steps, metric), metric
        phases = page.locator("[data-metric=seconds] .readout .label").all_inner_texts()
        assert {"generation", "policy training", "refit"} <= set(phases)
        assert page.locator("[data-metric=reward] canvas").count() == 1
        page.fill("[aria-label='Add a metric']", "learning_rate")
        added = of_metric(page, "learning_rate")
        added.wait_for()
        assert number_in(added) == last(steps, "learning_rate")[1]
        page.click("[aria-label='Take away Reward']")
        page.wait_for_selector("[data-metric=reward]", state="detached")
        link = page.evaluate("location.href")
    with visit(chromium, link) as page:  # opens what was left
        of_metric(page, "learning_rate").wait_for()
        assert not page.locator("[data-metric=reward]").count()


def test_a_drag_zooms_and_a_double_click_shows_all(ended: Shown, chromium: Any) -> None:
    with visit(chromium, f"{ended.url}#curves?runs=0") as page:
        of_metric(page, "reward").wait_for()
        box = page.locator("[data-metric=reward] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=4)
        page.mouse.up()
        page.mouse.move(0, 0)  # or the headings say what is at the cursor
        until(page, "location.hash.includes('zoom=2-5')")
        until(page, "document.querySelector('[data-metric=loss] .readout b').dataset.step === '5'")
        page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 40)
        page.mouse.move(0, 0)
        until(page, "!location.hash.includes('zoom')")
        until(page, "document.querySelector('[data-metric=loss] .readout b').dataset.step === '6'")
        page.focus("[data-metric=reward] .plot")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        # All cursors are one.
        until(page, "document.querySelector('[data-metric=loss] .readout .step').textContent === 'step 5'")


def test_curves_are_drawn_over_steps_tokens_or_time(ended: Shown, chromium: Any) -> None:
    records = steps_of(ended.done)
    seconds = sum(record.seconds["total"] for record in records)
    tokens = sum(record.metrics.get("tokens_per_s", 0.0) * record.seconds["total"] for record in records)
    newest = "Number(document.querySelector('[data-metric=reward] .readout b').dataset.step)"
    with visit(chromium, f"{ended.url}#curves?runs=0") as page:
        of_metric(page, "reward").wait_for()
        for along, end, words in (("tokens", tokens, " tokens"), ("time", seconds, "s"), ("steps", 6, "step 6")):
            page.select_option("[aria-label='Draw over']", along)
            until(page, f"Math.abs({newest} - {end}) < 1e-6 * {end}")
            until(
                page, f"document.querySelector('[data-metric=reward] .readout .step').textContent.endsWith('{words}')"
            )
            assert number_in(of_metric(page, "reward")) == records[-1].metrics["reward"]
        page.select_option("[aria-label='Draw over']", "time")
        until(page, f"Math.abs({newest} - {seconds}) < 1e-6 * {seconds}")
        box = page.locator("[data-metric=reward] .u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.02, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40, steps=4)
        page.mouse.up()
        page.mouse.move(0, 0)
        until(page, "/zoom=[01]-[2345]/.test(location.hash)")  # which stays one of steps
        until(page, f"{newest} < {seconds}")
        with page.expect_download() as started:
            page.locator("[data-metric=reward] button", has_text="csv").click()
        assert started.value.path().read_text().startswith("seconds,")
    refused = urllib.request.Request(f"{ended.url}/api/runs/0/series?names=reward&along=miles")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(refused, timeout=60.0)


def test_runs_are_compared(ended: Shown, chromium: Any) -> None:
    with visit(chromium, f"{ended.url}#curves?runs=0.1") as page:
        values = page.locator("[data-metric=reward] .readout b")
        values.nth(1).wait_for()
        expected = [last(steps_of(run), "reward") for run in (ended.done, ended.going)]
        found = [(number_in(values.nth(i), "step"), number_in(values.nth(i))) for i in (0, 1)]
        assert found[0] == expected[0]
        assert found[1] == expected[1]
        page.click("[aria-label='Draw the curves of done']")
        until(page, "document.querySelectorAll('[data-metric=reward] .readout b').length === 1")
        assert number_in(values.first) == expected[1][1]
        page.click(".run[data-run='1'] .name")
        until(page, "document.title.startsWith('going')")


def test_refits_memory_and_the_log_say_what_the_journal_says(ended: Shown, chromium: Any) -> None:
    with read_journal(ended.done) as journal:
        refits, steps, events = journal.refits(), journal.steps(), journal.events()
    with visit(chromium, f"{ended.url}#refits") as page:
        newest = page.locator("[data-table=refits] tbody tr").first
        newest.wait_for()
        assert newest.get_attribute("data-version") == str(refits[-1].version)
        assert newest.locator("td.mono").get_attribute("title") == f"{refits[-1].digest:016x}"
        assert page.locator("[data-table=refits] tbody tr").count() == len(refits)
        newest.locator("button").click()
        (link,) = refits[-1].num_bytes
        assert link.replace(">", " → ") in page.locator("tr.more").inner_text()
        page.click("#tabs a[data-tab=memory]")
        cell = page.locator("td[data-metric=memory_training_trainer_gb]")
        cell.wait_for()
        peak = max(record.metrics.get("memory_training_trainer_gb", 0.0) for record in steps)
        assert cell.inner_text() == (f"{peak:.2f} GB" if peak >= 1 else f"{round(peak * 1000)} MB")
        page.wait_for_selector("text=GPUs are shown while a run goes on")
        page.click("#tabs a[data-tab=log]")
        page.wait_for_selector(".log li")
        assert page.locator(".log .words").all_inner_texts() == [text for _, _, text in events]
        page.fill("[aria-label='Filter by text']", "parameters")
        until(page, f"document.querySelectorAll('.log li').length < {len(events) + 1}")
        assert all("parameters" in text for text in page.locator(".log li").all_inner_texts())


def test_samples_are_filtered_and_read_whole(ended: Shown, chromium: Any) -> None:
    (shard,) = (ended.done / "samples").glob("step-00000003.*.parquet")
    rows = pq.read_table(shard).to_pylist()
    best = max(row["reward"] for row in rows)
    with visit(chromium, f"{ended.url}#samples?step=3") as page:
        page.wait_for_selector(".sample")
        assert page.locator(".sample").count() == len(rows)
        page.select_option("[aria-label=Sort]", "reward-1")
        until(
            page,
            f"document.querySelector('.sample .reward').dataset.reward === '{json.dumps(best)}'".replace(".0'", "'"),
        )
        page.fill("[aria-label=Group]", "2")
        until(page, "document.querySelectorAll('.sample').length === 4")
        page.fill("[aria-label='Least reward']", "100")
        page.wait_for_selector("text=Nothing matches.")
        page.click("text=Clear")
        until(page, f"document.querySelectorAll('.sample').length === {len(rows)}")
        row = next(row for row in rows if row["response"].strip())
        page.fill("[aria-label=Contains]", row["response"].strip())
        until(page, f"document.querySelectorAll('.sample').length < {len(rows)}")
        page.click(f"[data-place='3.{row['group']}.{row['sample']}']")
        page.wait_for_selector(".tokens")
        assert page.locator(".prompt").text_content() == row["prompt"]
        tokens = page.locator(".tokens").text_content()
        assert row["response"] in tokens
        until(page, "document.querySelectorAll('.siblings .sibling').length === 4")
        page.click("button[data-value=version]")
        assert page.locator(".legend-line").inner_text().startswith(f"version {row['newest_version']}")
        page.click("button[data-value=advantage]")
        first = page.locator(".token").first
        colour = first.evaluate("(element) => getComputedStyle(element).backgroundColor")
        assert (colour != "rgba(0, 0, 0, 0)") == (abs(row["advantage"]) > 1e-3)


def test_two_steps_on_one_problem_are_compared_word_by_word(ended: Shown, chromium: Any) -> None:
    tables = [pq.read_table(path).to_pylist() for path in sorted((ended.done / "samples").glob("step-*.parquet"))]
    rows = [row for table in tables for row in table]
    one, two = next(
        (a, b)
        for a in rows
        for b in rows
        if a["problem_id"] == b["problem_id"] and a["step"] < b["step"] and a["response"] != b["response"]
    )
    place = [f"{row['step']}.{row['group']}.{row['sample']}" for row in (one, two)]
    with visit(chromium, f"{ended.url}#samples?at={place[1]}") as page:
        page.wait_for_selector(".tokens")
        page.select_option("[aria-label='Compare with another sample of this problem']", f"train:{place[0]}")
        page.wait_for_selector(".sides")
        texts = page.locator(".sides .text").all_text_contents()
        assert texts == [one["response"], two["response"]]
        assert page.locator(".sides del, .sides ins").count()
        before, after = page.locator(".sides .block").all()
        assert before.bounding_box()["y"] == after.bounding_box()["y"]  # side by side
        page.set_viewport_size(PHONE)
        assert before.bounding_box()["y"] < after.bounding_box()["y"]


def test_every_panel_has_data_and_fits_a_phone(ended: Shown, chromium: Any) -> None:
    has_data = {
        "curves": ".card canvas", "scheduler": ".card canvas", "timeline": ".lanes canvas", "refits": "tbody tr",
        "memory": "td.meter", "config": "tr[data-key]", "log": ".log li", "samples": ".sample",
    }  # fmt: skip
    for options in ({"viewport": LAPTOP}, {"viewport": PHONE, "color_scheme": "dark"}):
        with visit(chromium, ended.url, **options) as page:
            for panel in PANELS:
                page.click(f"#tabs a[data-tab={panel}]")
                page.wait_for_selector(has_data[panel])
                widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                assert widths[0] <= widths[1], (panel, options)


def test_calls_are_shown_of_runs_that_clients_drive_and_of_no_other(shown: Shown, chromium: Any) -> None:
    with visit(chromium, f"{shown.url}#curves?run=0&runs=0") as page:
        page.wait_for_selector("[data-metric=reward] canvas")
        assert not page.is_visible("#tabs a[data-tab=calls]")
    with visit(chromium, f"{shown.url}#curves?run=2&runs=2") as page:
        page.click("#tabs a[data-tab=calls]")
        page.wait_for_selector("[data-table=models] tbody tr")
        rows = page.locator("[data-table=models] tbody tr").all()
        cells = [row.locator("td").all_inner_texts()[:7] for row in rows]
        assert cells == [
            ["model-1", "me", "2", "4", "60", "1.00 s", "0"],
            [HOSTILE, "me", "1", "2", "30", "500 ms", "1"],
        ]
        outcomes = page.locator("[data-table=calls] tbody td:last-child").all_inner_texts()
        assert outcomes == ["done", HOSTILE, "done"]
        assert page.evaluate("window.ran") is None


def test_the_timeline_shows_lanes_and_the_flame_of_a_step(ended: Shown, chromium: Any) -> None:
    with visit(chromium, f"{ended.url}#timeline") as page:
        page.wait_for_selector(".lanes canvas")
        lanes = page.locator(".lane-name:not(.head)").all_inner_texts()
        assert {"rollout-0", "trainer-0"} <= set(lanes)
        keys = set(page.locator(".legend .key").evaluate_all("(keys) => keys.map((key) => key.dataset.what)"))
        assert {"generating", "training", "refitting"} <= keys
        page.click("[aria-label='Flame of step 4']")
        page.wait_for_selector("h2:text-is('Step 4')")
        page.wait_for_selector(".phase")
        box = page.locator(".lanes canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 13)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] - 13, steps=4)
        page.mouse.up()
        page.wait_for_selector("text=All steps")


def test_the_theme_follows_the_system_until_it_is_chosen(ended: Shown, chromium: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with visit(chromium, ended.url, color_scheme="dark") as page:
        dark = page.evaluate(background)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(background)
        assert dark != light
        page.click("#theme")
        assert page.evaluate(background) == dark
        page.reload()
        assert page.evaluate(background) == dark  # it was kept


def test_what_was_written_by_others_is_text(ended: Shown, chromium: Any) -> None:
    with visit(chromium, f"{ended.url}#samples?run=2&step=1") as page:
        page.wait_for_selector(".sample")
        assert page.locator(".sample .response").first.text_content() == HOSTILE
        page.locator(".sample").first.click()
        page.wait_for_selector(".tokens")
        assert page.locator(".prompt").text_content() == HOSTILE
        assert page.locator(".failure").text_content() == HOSTILE
        assert page.locator(".component .dim").text_content() == HOSTILE
        page.click("#tabs a[data-tab=log]")
        page.wait_for_selector(".log li")
        assert page.locator(".log li").last.locator(".words").text_content() == HOSTILE
        assert page.evaluate("window.ran") is None
        assert page.locator("main img, main script").count() == 0


def test_a_server_that_is_gone_is_said_and_found_again(ended: Shown, chromium: Any) -> None:
    with visit(chromium, ended.url, may_say="ERR_FAILED", loses="**/api/stream") as page:
        until(page, "document.querySelector('#connection').textContent === 'disconnected'")
        of_metric(page, "reward").wait_for()
        page.unroute("**/api/stream")
        until(page, "document.querySelector('#connection').dataset.connected === 'true'")
        assert page.locator("#connection").inner_text() == ""
