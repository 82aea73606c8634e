"""What people look at: the live display, the lines, the report, TensorBoard."""

from __future__ import annotations

import gc
import inspect
import io
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_harness import GRPO, Cluster
from rich.console import Console, Group
from rich.text import Text

from tandem.common.messages import Generated, Hello, MemoryUse, Refitted, Trained
from tandem.common.wire import HubPeer
from tandem.config import build_config
from tandem.coordinator.loop.recorder import StepMetrics
from tandem.coordinator.loop.spec import run_spec
from tandem.coordinator.observers.finished_steps import STEP_LOG, QuickSteps, StepLog
from tandem.coordinator.observers.progress import ProgressDisplay, TerminalDisplay, ahead_line
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import DispatchPrompts
from tandem.launch.admission import RegisteredProcess
from tandem.observe.exporters.telemetry import MetricWriters, TensorBoardWriter
from tandem.observe.lines import clock, sparkline, step_line
from tandem.observe.report.report import format_report, write_report
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tests.harness.runs.terminal import Terminal

SETTINGS: dict[str, Any] = {
    "grpo": {},
    "policy": {"model_name": "m", "train_global_batch_size": 512},
    "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
}


def records() -> list[StepRecord]:
    seconds = {"total": 2.0, "generation": 0.5, "policy_training": 1.0, "get_logprobs": 0.4, "refit": 0.1}
    made = [
        StepRecord(
            step=s, version=s, metrics={"reward": s / 10, "loss": 0.1, "mean_generation_length": 5.0}, seconds=seconds
        )
        for s in range(1, 9)
    ]
    made[3].metrics["val_accuracy"] = 0.4
    made[7].metrics["val_accuracy"] = 0.8
    made[2].metrics["memory_training_trainer_gb"] = 2.5
    made[5].metrics["memory_training_trainer_gb"] = 1.5
    return made


def test_a_sparkline_goes_from_smallest_to_largest() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([1.0, 1.0, 1.0]) == "▁▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), width=60)) == 60


def test_a_step_in_one_line() -> None:
    line = step_line(records()[3], 8)
    assert line.startswith("step 4/8  reward 0.400  held-out accuracy 0.400  loss 0.100")
    assert line.endswith("2.00 s (policy_training 50% generation 25% get_logprobs 20% refit 5%)")


def test_dpos_lines_have_its_accuracy_and_its_report_the_rewards() -> None:
    rewards = {"rewards_chosen_mean": 0.5, "val_rewards_chosen_mean": 0.25, "val_accuracy": 0.75}
    made = [
        StepRecord(step=s, version=s, metrics={"accuracy": s / 4, "loss": 0.1, **rewards}, seconds={"total": 1.0})
        for s in (1, 2)
    ]
    assert step_line(made[1], 2).startswith("step 2/2  accuracy 0.500  held-out accuracy 0.750  loss 0.100")
    with Journal.create(Path("run"), b"{}", "dpo") as journal:
        for step in made:
            journal.commit_step(step)
    runs = write_report([Path("run")], Path("out"))
    assert Path("out/report.png").read_bytes()[:4] == b"\x89PNG"
    assert "val_rewards_chosen_mean  0.250 → 0.250" in format_report(runs, Path("out"))


def progress_on(console: Console) -> tuple[ProgressDisplay, Scheduler]:
    config = build_config(SETTINGS)
    shape = run_spec(config, first_step=1, last_step=8, num_validation=4, resume_from="", checkpoint_folder="c/{step}")
    return ProgressDisplay(config, shape, [], console), Scheduler(shape, 0.0)


SIZES = [(60, 20), (150, 30), (40, 25), (41, 25), (100, 24)]


@pytest.mark.parametrize("reflows", [True, False])
def test_a_terminal_that_is_resized_keeps_every_line_and_no_ghost(reflows: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=24, force_terminal=True, _environ={})
    terminal = Terminal(100, 24, reflows=reflows)

    def flush() -> None:
        terminal.feed(out.getvalue())
        out.seek(0)
        out.truncate()

    printed = []
    display = TerminalDisplay(console)
    try:
        for count, size in enumerate([*SIZES, *SIZES]):
            for line in range(3):
                printed.append(f"step {count}.{line}")
                console.print(Text(printed[-1]), soft_wrap=True)
            shown = [f"{count}: {'x' * (95 - 20 * line)}" for line in range(4)]
            display.update(Group(*map(Text, [*shown, "", "y" * 100])))
            flush()
            lines = [line for line in terminal.lines if line.startswith("step")]
            # Where a terminal cuts lines off, more is erased than was there; no ghost, and the new lines stay.
            assert lines == printed if reflows else lines[-3:] == printed[-3:]
            assert sum("x" in line or "y" in line for line in terminal.lines) == 5, terminal.lines
            terminal.resize(*size)
            console.width, console.height = size
        print("from elsewhere")
    finally:
        display.close()
    flush()
    assert [line for line in terminal.lines if line][-1] == "from elsewhere"
    assert not [line for line in terminal.lines if "x" in line or "y" in line]


def test_without_a_terminal_there_is_a_line_a_step() -> None:
    out = io.StringIO()
    progress, _ = progress_on(Console(file=out, width=200))
    for step in records():
        progress.committed(step)
    progress.close()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [f"step {s}/8" for s in range(1, 9)]


def test_quick_steps_have_some_lines_on_the_console_and_all_in_a_file() -> None:
    out, time = io.StringIO(), [0.0]
    config = build_config(SETTINGS)
    spec = run_spec(config, first_step=1, last_step=660, num_validation=4, resume_from="", checkpoint_folder="c/{step}")
    progress = ProgressDisplay(
        config, spec, [], Console(file=out, width=200), lambda: time[0], is_due=QuickSteps(660).is_due
    )
    log = StepLog(Path(), spec.last_step)
    for step in range(1, 661):
        time[0] += 0.25
        metrics = {"loss": 1.0, **({"val_loss": 1.0} if step == 110 else {})}
        checkpoint = "checkpoints/step_200" if step == 200 else ""
        record = StepRecord(step=step, version=step, metrics=metrics, seconds={"total": 0.1}, checkpoint=checkpoint)
        for observer in (progress, log):
            observer.committed(record)
    progress.noted("warning: a line of its own")
    log.close()
    *lines, last = out.getvalue().splitlines()
    assert last == "warning: a line of its own"
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert shown[:11] == [*range(1, 11), 22], "one in three seconds, after the first"
    assert {110, 200, 660} <= set(shown), "validated, saved, the last"
    assert {after for before, after in pairwise(shown[10:]) if after - before < 12} <= {110, 200, 660}
    assert max(after - before for before, after in pairwise(shown)) <= 12
    assert [line.split("  ")[0] for line in Path(STEP_LOG).read_text().splitlines()] == [
        f"step {step}/660" for step in range(1, 661)
    ]


def a_registry(**phases: str) -> ProcessRegistry:
    """Who is in a run, and what they say they do."""
    registry = ProcessRegistry.__new__(ProcessRegistry)  # a view needs no socket
    registry.processes = {}
    for name, phase in phases.items():
        process = RegisteredProcess(
            Hello(protocol_version=1, service="trainer", host="node7", pid=4321), name, HubPeer(b"", ""), 97.0
        )
        process.phase = phase
        registry.processes[name.replace("_", "-")] = process
    return registry


def test_without_a_terminal_a_line_says_now_and_then_what_a_long_step_waits_for() -> None:
    out, time = io.StringIO(), [0.0]
    cluster = Cluster(GRPO)
    progress = ProgressDisplay(
        build_config(SETTINGS), cluster.tables.spec, [], Console(file=out, width=40), lambda: time[0]
    )

    def lines_after(seconds: float) -> list[str]:
        out.seek(0)
        out.truncate()
        for _ in range(10):
            time[0] += seconds / 10
            progress.show(cluster.plan, registry)
        return out.getvalue().splitlines()

    registry = a_registry()
    assert lines_after(29) == []
    waiting = "step 0/3: joining, waiting for 2 trainer and 2 rollout and 1 refit to join  0:00:32 elapsed"
    assert lines_after(30) == [waiting]
    cluster.join_all()
    while not any(isinstance(command, DispatchPrompts) and command.purpose == "train" for command in cluster.pending):
        cluster.answer_next()
    registry = a_registry(rollout_0="generating step 1", rollout_1="generating step 1")
    progress.noted("a line of its own")
    assert lines_after(29) == []
    (line,) = lines_after(2)
    assert line.startswith("step 1/3: generating, waiting for rollout-0, rollout-1 (generating step 1)  0:01:")
    progress.committed(records()[0])
    assert lines_after(29) == [], "a step is a line"
    assert len(lines_after(100)) == 4


def test_lines_say_how_long_a_run_has_taken_and_will_take() -> None:
    out, time = io.StringIO(), [0.0]
    config = build_config(SETTINGS)
    shape = run_spec(config, first_step=1, last_step=3000, num_validation=4, resume_from="", checkpoint_folder="c")
    progress = ProgressDisplay(config, shape, records()[:3], Console(file=out, width=40), lambda: time[0])
    time[0] = 3723.0
    record = records()[3]
    metrics = record.metrics | {"kl": 0.125, "entropy": 1.5, "tokens_per_s": 1234.5}
    progress.committed(msgspec.structs.replace(record, metrics=metrics))
    assert out.getvalue().startswith(
        "step 4/3000  reward 0.400  held-out accuracy 0.400  loss 0.100  kl 0.125  entropy 1.500  1,234 tokens/s  "
        "1:02:03 elapsed, 1:39:52 left  2.00 s ("
    )
    assert clock(0.4) == "0:00:00"
    assert clock(100 * 3600) == "100:00:00"


def test_on_a_terminal_the_display_shows_curves_and_health() -> None:
    hello = Hello(protocol_version=1, service="trainer", host="node7", pid=4321)
    registry = ProcessRegistry.__new__(ProcessRegistry)  # a view needs no socket, only who is in the run
    registry.processes = {"trainer-0": RegisteredProcess(hello, "trainer-0", HubPeer(b"", ""), 97.0)}
    out = io.StringIO()
    progress, plan = progress_on(Console(file=out, width=120, force_terminal=True))
    try:
        for step in records():
            progress.committed(step)
        page = Console(width=120, record=True, file=io.StringIO())
        page.print(progress.render(plan, registry, 100.0))
        text = page.export_text()
    finally:
        progress.close()
    assert "reward   0.800" in text
    assert "▁" in text
    assert "█" in text
    assert "trainer-0" in text
    assert "node7" in text
    assert "3 s ago" in text
    assert "\x1b[?25h" in out.getvalue(), "the cursor is given back"
    lines = re.findall(r"^.*?(step \d/8)  reward", out.getvalue(), re.MULTILINE)
    assert lines == [f"step {step}/8" for step in range(1, 9)], "they stay above the display"
    assert "ahead" not in text, "it waits for training"


def test_an_asynchronous_run_shows_what_is_generated_ahead_and_with_what() -> None:
    quiet: dict[str, Any] = {"validate_every": 0, "validate_at_start": False, "save_every": 0}
    cluster = Cluster(msgspec.structs.replace(GRPO, max_trajectory_age_steps=1, **quiet))
    cluster.join_all()
    while cluster.tables.step < 2:
        slow = [
            o for o in cluster.pending if isinstance(o, DispatchPrompts) and (o.process, o.step) == ("rollout-1", 2)
        ]
        cluster.pending = [command for command in cluster.pending if command not in slow]
        cluster.answer_next()
    assert ahead_line(cluster.plan) == (
        "groups: 3 ready, 5 being generated, 2 waiting; newest weights: version 1; "
        "engines: version 1 on 1, version 0 on 1"
    )
    progress = ProgressDisplay(build_config(SETTINGS), cluster.tables.spec, [], Console(file=io.StringIO(), width=150))
    registry = ProcessRegistry.__new__(ProcessRegistry)
    registry.processes = {}
    page = Console(width=150, record=True, file=io.StringIO())
    page.print(progress.render(cluster.plan, registry, 100.0))
    assert f"ahead {ahead_line(cluster.plan)}" in page.export_text()
    record = StepRecord(step=2, version=2, metrics={"reward": 0.5, "avg_trajectory_age": 0.75}, seconds={"total": 1.0})
    assert step_line(record, 8).startswith("step 2/8  reward 0.500  mean age 0.750  1.00 s")


def test_a_report_has_the_curves_and_the_breakdown() -> None:
    with Journal.create(Path("run"), b"{}", "grpo") as journal:
        for step in records():
            journal.commit_step(step)
    runs = write_report([Path("run")], Path("out"))
    assert runs[0].summary.curves["val_accuracy"] == [(4, 0.4), (8, 0.8)]
    written = msgspec.json.decode(Path("out/report.json").read_bytes())
    assert written["median_seconds"]["policy_training"] == 1.0
    assert Path("out/report.png").read_bytes()[:4] == b"\x89PNG"
    text = format_report(runs, Path("out"))
    assert "val_accuracy  0.400 → 0.800" in text
    assert "policy training" in text
    assert "50.0%" in text
    assert "tokens per sample          5.0" in text
    assert "peak memory, GB   generation    training       refit" in text
    assert "  trainer                  -       2.500           -" in text
    assert "engine" not in text


def test_the_breakdown_adds_up() -> None:
    step_metrics = StepMetrics()
    spent = {"logprobs": 0.2, "reference_logprobs": 0.1, "policy_training": 0.6}
    step_metrics.trained("trainer-0", trained(spent, peak=3, held=1))
    seconds = step_metrics.breakdown({"total": 2.0, "training": 1.0, "generation": 1.0})
    assert seconds == pytest.approx({"total": 2.0, "generation": 1.0, "get_logprobs": 0.3, "policy_training": 0.7})


def trained(spent: dict[str, float], *, peak: int, held: int, compute_s: float = 0.5) -> Trained:
    return Trained(
        command_id=1,
        step=1,
        version=1,
        metrics={},
        seconds=spent,
        compute_s=compute_s,
        waited_s=4.0 - compute_s,
        has_update=True,
        memory=MemoryUse(peak=peak, held=held),
    )


def test_of_a_thousand_ranks_the_slowest_is_named_and_told_from_the_others() -> None:
    step_metrics = StepMetrics()
    for rank in range(1000):
        compute_s = 3.0 if rank == 417 else 1.0 + rank / 1000
        step_metrics.trained(f"trainer-{rank}", trained({}, peak=0, held=0, compute_s=compute_s))
    step_metrics.breakdown({"total": 4.0})
    assert {name: value for name, value in step_metrics.metrics.items() if "memory" not in name} == {
        "slowest_trainer": 417,
        "trainer_compute_max_s": 3.0,
        "trainer_compute_median_s": 1.5,
        "trainer_compute_min_s": 1.0,
        "trainer_waited_max_s": 3.0,
        "trainer_waited_min_s": 1.0,
    }


def test_of_two_ranks_the_median_is_the_other_and_of_one_nothing_is_said() -> None:
    both, alone = StepMetrics(), StepMetrics()
    for rank, compute_s in enumerate((1.0, 3.0)):
        both.trained(f"trainer-{rank}", trained({}, peak=0, held=0, compute_s=compute_s))
    alone.trained("trainer-0", trained({}, peak=0, held=0))
    for step_metrics in (both, alone):
        step_metrics.breakdown({"total": 4.0})
    assert both.metrics["slowest_trainer"] == 1
    assert both.metrics["trainer_compute_median_s"] == 1.0
    assert not [name for name in alone.metrics if "trainer_" in name and "memory" not in name]


def test_memory_is_of_the_largest_process_of_its_kind() -> None:
    step_metrics = StepMetrics()
    for rank, (peak, held) in enumerate(((9, 2), (8, 3))):
        step_metrics.trained(f"trainer-{rank}", trained({}, peak=peak * 10**9, held=held * 10**9))
    for peak, held in ((5, 4), (7, 1)):
        memory = MemoryUse(peak=peak * 10**9, held=held * 10**9)
        step_metrics.generated(
            Generated(command_id=2, step=1, purpose="train", num_samples=1, num_tokens=1, seconds={}, memory=memory)
        )
        for process in ("trainer-0", "rollout-1"):
            refitted = Refitted(command_id=3, version=1, num_bytes={}, seconds=0.0, memory=memory)
            step_metrics.refitted(process, refitted)
    step_metrics.breakdown({"total": 2.0, "training": 1.0, "generation": 1.0})
    assert {name: value for name, value in step_metrics.metrics.items() if name.endswith("_gb")} == {
        "memory_training_trainer_gb": 9.0,
        "memory_training_engine_gb": 4.0,
        "memory_generation_trainer_gb": 3.0,
        "memory_generation_engine_gb": 7.0,
        "memory_refit_trainer_gb": 7.0,
        "memory_refit_engine_gb": 7.0,
    }
    alone = StepMetrics()
    alone.trained("trainer-0", trained({}, peak=9, held=2))
    alone.breakdown({"total": 1.0, "training": 1.0})
    assert "memory_generation_trainer_gb" not in alone.metrics


def test_tensorboard_files_hold_the_metrics() -> None:
    writers = MetricWriters()
    writers.add(TensorBoardWriter(Path("run/tensorboard"), 1))
    metrics = {"reward": 0.5, "val_accuracy": 0.25, "val_easy/loss": 0.75, "reward/format": 1.0}
    writers.write(3, metrics, {"total": 2.0, "refit": 0.5, "strange": 0.25})
    writers.close()
    assert curves_in("run/tensorboard") == {
        "train/reward": [(3, 0.5)],
        "validation/accuracy": [(3, 0.25)],
        "validation-easy/loss": [(3, 0.75)],
        "train/reward/format": [(3, 1.0)],
        "timing/train/total_step_time": [(3, 2.0)],
        "timing/train/prepare_for_generation/transfer_and_update_weights": [(3, 0.5)],
        "timing/train/strange": [(3, 0.25)],
    }


def test_tensorboard_shows_one_curve_of_a_run_that_was_resumed() -> None:
    for first_step, reward in ((1, 0.25), (3, 0.75)):
        writer = TensorBoardWriter(Path("run"), first_step)
        for step in range(first_step, first_step + 4):
            writer.write(step, {"train/reward": reward})
        writer.close()
    expected = [(1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75), (5, 0.75), (6, 0.75)]
    assert curves_in("run") == {"train/reward": expected}


def curves_in(folder: str) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_display_of_a_long_run_takes_no_memory_for_each_step(is_terminal: bool) -> None:
    out = io.StringIO()
    progress, _ = progress_on(Console(file=out, width=150, force_terminal=is_terminal, _environ={}))
    names = [f"metric_{number}" for number in range(40)]

    def commit(first: int, last: int) -> int:
        """Commit steps; return the bytes that are held after them."""
        for step in range(first, last):
            metrics = {"".join(name): step + 0.5 for name in (*names, "reward", "loss", "entropy")}  # as if decoded
            progress.committed(StepRecord(step=step, version=step, metrics=metrics, seconds={"total": 1.0}))
            out.seek(0)
            out.truncate()
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([of_display])
        return sum(trace.size for trace in snapshot.statistics("filename"))

    tracemalloc.start(6)  # frames: other threads of this process allocate, too
    of_display = tracemalloc.Filter(True, inspect.getfile(type(progress)), all_frames=True)
    try:
        before = commit(1, 200)
        assert before > 0
        per_step = (commit(200, 1200) - before) / 1000
    finally:
        tracemalloc.stop()
        progress.close()
    assert per_step < 200, "a record has some 6,000 bytes"
