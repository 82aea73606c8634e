"""``live.json``: what it says of the scheduler's tables and when it is written."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from cluster_harness import GRPO, Cluster
from rich.console import Console
from run_harness import build_config

from tandem.common.messages import Hello
from tandem.common.wire import HubPeer
from tandem.coordinator.observers import live_file
from tandem.coordinator.observers.live_file import LiveFile
from tandem.coordinator.observers.progress import ProgressDisplay
from tandem.coordinator.observers.watching import NOT_UP
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler.events import DispatchPrompts, EngineDraining, ProcessJoined
from tandem.launch.admission import RegisteredProcess
from tandem.observe.exporters.prometheus import _of_run
from tandem.observe.lines import seconds_left
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.live import LIVE_NAME, read_live

SETTINGS = {
    "grpo": {},
    "policy": {"model_name": "m", "train_global_batch_size": 512},
    "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
}
QUIET = {"validate_every": 0, "validate_at_start": False, "save_every": 0}


def processes(num_engines: int) -> ProcessRegistry:
    registry = ProcessRegistry.__new__(ProcessRegistry)  # who looks on needs no socket, only who is in the run
    registry.processes = {}
    for service, count in (("trainer", 2), ("rollout", num_engines)):
        for index in range(count):
            hello = msgspec.convert(
                {"protocol_version": 1, "service": service, "host": f"node{index}", "pid": 1}, Hello
            )
            registry.processes[f"{service}-{index}"] = RegisteredProcess(
                hello, f"{service}-{index}", HubPeer(b"", ""), 0.0
            )
    return registry


def cluster_of(num_engines: int, num_groups: int = 5) -> Cluster:
    """Return a cluster at step 2, of which one engine is slow."""
    expected = {"trainer": 2, "rollout": num_engines, "refit": 1}
    spec = msgspec.structs.replace(
        GRPO, expected=expected, num_groups=num_groups, max_trajectory_age_steps=1, last_step=8, **QUIET
    )
    cluster = Cluster(spec)
    cluster.join_all()
    while cluster.tables.step < 2:
        slow = [
            o for o in cluster.pending if isinstance(o, DispatchPrompts) and (o.process, o.step) == ("rollout-1", 2)
        ]
        cluster.pending = [command for command in cluster.pending if command not in slow]
        cluster.answer_next()
    return cluster


@pytest.fixture
def live() -> LiveFile:
    return LiveFile(build_config(SETTINGS), Path.cwd(), 8, [])


def test_it_says_what_the_tables_have(live: LiveFile) -> None:
    cluster = cluster_of(2)
    live.show(cluster.plan, processes(2))
    said = read_live(Path.cwd())
    assert said is not None
    assert (said.step, said.num_steps) == (2, 8)
    groups = said.groups
    # As `test_an_asynchronous_run_shows_what_is_generated_ahead_and_with_what` has it on the console.
    assert (groups.ready, groups.in_flight, groups.waiting) == (3, 5, 2)
    assert (said.buffer.size, said.buffer.by_age) == (3, {"1": 3})
    assert [(engine.name, engine.version, engine.host) for engine in said.engines] == [
        ("rollout-0", 1, "node0"),
        ("rollout-1", 0, "node1"),
    ]
    assert sum(engine.in_flight for engine in said.engines) == 5
    assert all(engine.outstanding_tokens > 0 for engine in said.engines)
    assert [(trainer.name, trainer.version) for trainer in said.trainers] == [("trainer-0", 1), ("trainer-1", 1)]
    assert said.versions is not None
    assert (said.versions.trained, said.versions.published, said.versions.verified) == (1, 1, 0)


def test_it_shows_engines_that_come_and_go(live: LiveFile) -> None:
    cluster = cluster_of(2)
    cluster.give(ProcessJoined(now=cluster.now, process="rollout-2", kind="rollout"))
    cluster.give(EngineDraining(now=cluster.now, process="rollout-1"))
    said = live.look(cluster.plan, processes(3))
    shown = [(engine.name, engine.status, engine.host) for engine in said.engines]
    assert shown[1:] == [("rollout-1", "leaving", "node1"), ("rollout-2", "building", "node2")]
    families = {family.name: family for family in _of_run(said, NOT_UP)}
    assert families["tandem_engines"].samples[0].value == 3
    assert families["tandem_engines_up"].samples[0].value == 2


def test_it_is_written_only_when_something_changed_and_at_most_twice_a_second(
    live: LiveFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(live_file.time, "monotonic", lambda: now[0])
    cluster, registry, path = cluster_of(2), processes(2), Path(LIVE_NAME)
    live.show(cluster.plan, registry)
    first = path.stat().st_ino
    live.noted("something")
    now[0] += 0.4
    live.show(cluster.plan, registry)
    assert path.stat().st_ino == first, "less than half a second has passed"
    now[0] += 0.2
    live.show(cluster.plan, registry)
    second = path.stat().st_ino
    assert second != first
    said = read_live(Path.cwd())
    assert said is not None
    assert said.notes == ("something",)
    now[0] += 5
    live.show(cluster.plan, registry)
    assert path.stat().st_ino == second, "nothing has changed"


def test_the_next_begins_without_what_was_said(live: LiveFile) -> None:
    live.show(cluster_of(2).plan, processes(2))
    said = read_live(Path.cwd())
    assert said is not None
    assert said.step == 2
    LiveFile(build_config(SETTINGS), Path.cwd(), 8, [])
    assert read_live(Path.cwd()) is None


def test_what_the_disk_says_stops_nothing(live: LiveFile) -> None:
    Path(LIVE_NAME).mkdir()
    live.show(cluster_of(2).plan, processes(2))
    assert read_live(Path.cwd()) is None


def test_how_long_it_will_take_is_what_the_last_steps_took() -> None:
    def record(step: int, total: float) -> StepRecord:
        return StepRecord(step=step, version=step, metrics={"groups_too_old": 2.0}, seconds={"total": total})

    live = LiveFile(build_config(SETTINGS), Path.cwd(), 8, [record(1, 100.0)])
    cluster = cluster_of(2)
    assert live.look(cluster.plan, processes(2)).eta_s == pytest.approx(700.0, abs=60)
    for step in (2, 3):
        live.committed(record(step, 10.0))
    said = live.look(cluster.plan, processes(2))
    assert said.eta_s == pytest.approx(70.0, abs=60)
    assert said.groups.dropped == 4


def test_the_console_and_the_page_expect_the_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step warms up, and one of the others had a validation."""
    totals = {1: 100.0, 2: 10.0, 3: 10.0, 4: 40.0}
    history = [StepRecord(step=s, version=s, metrics={}, seconds={"total": total}) for s, total in totals.items()]
    now = [50.0]
    monkeypatch.setattr("tandem.coordinator.observers.live_file.time.monotonic", lambda: now[0])
    config, cluster, out = build_config(SETTINGS), cluster_of(2), io.StringIO()
    live = LiveFile(config, Path.cwd(), 8, history)
    progress = ProgressDisplay(config, cluster.tables.spec, history, Console(file=out, width=200), lambda: now[0])
    now[0] += 30.0  # of the 20 s that each of four steps takes
    registry = processes(2)
    assert live.look(cluster.plan, registry).eta_s == 50.0
    progress.show(cluster.plan, registry)
    assert out.getvalue().rstrip().endswith("0:00:30 elapsed, 0:00:50 left")
    now[0] += 1000.0
    assert live.look(cluster.plan, registry).eta_s == 0.0
    assert seconds_left([], 8) is None
    assert seconds_left(history[:1], 8) == 700.0, "there is no other"
