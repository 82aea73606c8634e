"""What is shown of a run whose trainers were started again: each step once, and time that goes on."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.common.distribution import install_command
from tandem.observe.page.reader import RunReader
from tandem.observe.page.series import RunCurves
from tandem.observe.run_folder.journal import StepRecord, read_journal
from tandem.observe.run_folder.live import RunStatus, read_live
from tandem.observe.timeline import timeline
from tests.harness.ports import free_port
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.held_runs import go_on, hold
from tests.harness.runs.monitoring_harness import rows_in, scraped
from tests.harness.runs.running import Command, coordinator, process_of, steps_of, wait_until, write_config

NUM_STEPS = 12
KILLED_AFTER = (2, 8)
"""Steps: once the run begins again with the model, and once it goes on from a checkpoint."""
HAS_WANDB, HAS_MLFLOW = (importlib.util.find_spec(name) is not None for name in ("wandb", "mlflow"))
COUNTERS = ("tandem_replaced_processes_total", "tandem_refits_total")


class Watched:
    """A run, and what was seen of it while it went on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lives: list[RunStatus] = []
        self.scrapes: list[dict[str, float]] = []
        self.curves: RunCurves | None = None
        """Of a page that is open all the time."""

    def look(self, url: str) -> None:
        """See what there is to see now."""
        live, scrape = read_live(self.folder), scraped(url)
        if live is not None and (not self.lives or live.at > self.lives[-1].at):
            self.lives.append(live)
        if scrape:
            self.scrapes.append(scrape)
        if self.curves is not None:
            self.curves.series(["reward"], 1000, None, None)

    @property
    def steps(self) -> list[StepRecord]:
        """Those that count."""
        return steps_of(self.folder)


def watched_run(folder: Path) -> Watched:
    """Kill a trainer twice, and look at the run all the time."""
    logger = {
        "tensorboard_enabled": True,
        "prometheus": {"port": free_port()},
        "wandb_enabled": HAS_WANDB,
        "mlflow_enabled": HAS_MLFLOW,
    }
    over: dict[str, Any] = {
        "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
        "checkpointing": {"save_period": 6, "metric_name": None, "keep_top_k": None},
        "logger": logger,
    }
    seen = Watched(folder / "run")
    for score in (33, 145):  # what is done again may be scored again
        hold(score, folder)
    with in_folder(folder), Command("coordinator", "up", write_config(over)) as run:
        url = run.wait_for(r"metrics: (http://\S+/metrics)")[1]
        for step in (*KILLED_AFTER, None):

            def is_reached(step: int | None = step) -> bool:
                seen.look(url)
                return (
                    f"step {step}/" in run.output() and Path("hold").exists()
                    if step
                    else run.process.poll() is not None
                )

            wait_until(is_reached, run.output, died=lambda: run.process.poll() is not None)
            if step is not None:
                seen.curves = seen.curves or RunCurves(RunReader(seen.folder))
                process_of(run, "trainer").kill()
                go_on()
                run.wait_for(rf"(?:trainer-0 is lost(?:.|\n)*){{{KILLED_AFTER.index(step) + 1}}}")
        assert run.wait() == 0, run.output()
    with read_journal(seen.folder) as journal:
        assert len({record.step for record in journal.superseded_steps()}) >= 2, "or nothing was done again"
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield watched_run(tmp_path_factory.mktemp("terms"))


def rewards(seen: Watched) -> dict[int, float]:
    found = {step.step: step.metrics["reward"] for step in seen.steps}
    assert list(found) == list(range(1, NUM_STEPS + 1))
    return found


def test_the_page_has_each_step_once(seen: Watched) -> None:
    assert seen.curves is not None
    for curves in (seen.curves, RunCurves(RunReader(seen.folder))):
        found = curves.series(["reward"], 1000, None, None)["reward"]
        assert dict(zip(found.step, found.mean, strict=True)) == rewards(seen)
        assert len(found.step) == NUM_STEPS
    assert [step.step for step in timeline(seen.folder, 100, None).steps if step.step] == list(rewards(seen))


def test_a_report_has_each_step_once(seen: Watched) -> None:
    ended = coordinator("report", seen.folder, "--out", "report")
    assert ended.returncode == 0, ended.stderr
    assert f"{NUM_STEPS} steps in " in ended.stdout
    assert json.loads(Path("report/report.json").read_text())["num_steps"] == NUM_STEPS


def test_tensorboard_has_each_step_once(seen: Watched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in seen.folder.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert found == [(step, pytest.approx(value)) for step, value in rewards(seen).items()]


@pytest.mark.skipif(not HAS_WANDB, reason=f"wandb is not installed: {install_command('wandb')}")
def test_the_last_of_each_step_counts_on_weights_and_biases(seen: Watched) -> None:
    (folder,) = seen.folder.glob("wandb/offline-run-*")
    assert {row["step"]: row["train/reward"] for row in rows_in(folder)} == rewards(seen)


@pytest.mark.skipif(not HAS_MLFLOW, reason=f"mlflow is not installed: {install_command('mlflow')}")
def test_the_last_of_each_step_counts_on_mlflow(seen: Watched) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(seen.folder / "mlflow").absolute().as_uri())
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    found = client.get_metric_history(run.info.run_id, "train/reward")
    assert {metric.step: metric.value for metric in found} == rewards(seen)


def test_the_time_goes_on(seen: Watched) -> None:
    """Also where the run begins again with the model, and no step is done any more."""
    assert len(seen.lives) > 2
    elapsed = [live.elapsed_s for live in seen.lives]
    assert elapsed == sorted(elapsed), "all of them count from the same moment"
    known = [live.eta_s is not None for live in seen.lives]
    assert known == sorted(known), "once it is known how long steps take, that is not forgotten"
    assert known[-1]
    assert any("trainer-0 is lost" in note for note in seen.lives[-1].notes)


def test_counters_only_go_up(seen: Watched) -> None:
    for name in COUNTERS:
        values = [scrape[name] for scrape in seen.scrapes]
        assert values == sorted(values), name
    last = seen.scrapes[-1]
    assert last["tandem_replaced_processes_total"] == len(KILLED_AFTER), "trainers count as one"
    steps = [scrape["tandem_step"] for scrape in seen.scrapes if "tandem_step" in scrape]
    assert any(later < earlier for earlier, later in itertools.pairwise(steps)), "what is done again is no longer there"
