"""The writer of ``live.json``, from the scheduler's tables."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.config import Config
from tandem.config.placement import count_gpus_per_engine, find_first_gpu_of_engines
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.engines.joining import JoiningStage
from tandem.coordinator.scheduler.groups.table import GroupState
from tandem.coordinator.scheduler.steps import StepState
from tandem.observe.lines import NUM_RECENT, seconds_left
from tandem.observe.run_folder import live
from tandem.observe.run_folder.journal import StepRecord

_PAUSE_S = 0.5
"""Least time between two writes of the file."""
_NUM_NOTES = 20
_DRIVER = Path("/dev/nvidiactl")
"""Device file of machines with NVIDIA GPUs."""


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot of earlier attempts, from which the file goes on."""

    began_at: float
    """Beginning of the first attempt, by the monotonic clock."""
    notes: tuple[str, ...] = ()
    """Newest lines of the console."""
    num_dropped: int = 0
    num_failures: int = 0
    records: tuple[StepRecord, ...] = ()
    """Newest steps; some of them may be done again."""


class LiveFile(Observer):
    """The file ``live.json``, written at most twice a second and only when something has changed."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        num_steps: int,
        history: Sequence[StepRecord],
        snapshot: LiveSnapshot | None = None,
    ) -> None:
        """Begin anew, or from the snapshot of earlier attempts; `history` are the finished steps."""
        self._before = snapshot = snapshot or LiveSnapshot(began_at=time.monotonic())
        self._path = folder / live.LIVE_NAME
        self._num_steps = num_steps
        self._records = deque(history, NUM_RECENT)
        self._notes = deque(snapshot.notes, _NUM_NOTES)
        self._num_dropped = snapshot.num_dropped
        self._num_failures = snapshot.num_failures
        self._device_of = functools.cache(functools.partial(device_of, config, _DRIVER.exists()))
        self._committed_at = time.monotonic()
        self._looked = -_PAUSE_S
        self._last: live.RunStatus | None = None
        with contextlib.suppress(OSError):
            self._path.unlink()

    @property
    def snapshot(self) -> LiveSnapshot:
        """Snapshot for the next attempt."""
        return LiveSnapshot(
            began_at=self._before.began_at,
            notes=tuple(self._notes),
            num_dropped=self._num_dropped,
            num_failures=self._num_failures,
            records=tuple(self._records) or self._before.records,
        )

    @property
    def last(self) -> live.RunStatus | None:
        """Content of the file; None before the first write."""
        return self._last

    def noted(self, text: str) -> None:
        """Keep a line of the console."""
        self._notes.append(text)

    def sample_failed(self) -> None:
        """Count a sample on which an environment failed."""
        self._num_failures += 1

    def discarded(self, num_groups: int) -> None:
        """Count groups that are not trained on."""
        self._num_dropped += num_groups

    def committed(self, record: StepRecord) -> None:
        """Note that a step is done."""
        self._committed_at = time.monotonic()
        self._records.append(record)
        for name in ("groups_too_old", "dynamic_sampling_num_dropped_groups"):
            self._num_dropped += int(record.metrics.get(name, 0))

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Bring the file up to date."""
        now = time.monotonic()
        if now - self._looked < _PAUSE_S:
            return
        self._looked = now
        status = self.look(scheduler, registry)
        last = self._last
        if last is not None:
            last = msgspec.structs.replace(last, at=status.at, elapsed_s=status.elapsed_s, eta_s=status.eta_s)
        if status != last:
            self._write(status)

    def look(self, scheduler: Scheduler, registry: ProcessRegistry) -> live.RunStatus:
        """Return the state of the run."""
        now = time.monotonic()
        tables = scheduler.tables
        version = tables.weights.version
        progress = tables.steps.progress
        states: Counter[GroupState] = Counter()
        ages: Counter[int] = Counter()
        for group in tables.groups:
            states[group.state] += 1
            if group.state is GroupState.READY and group.purpose == "train":
                ages[max(0, version - group.oldest_version)] += 1
        trained = progress.number if progress.state >= StepState.TRAINED else progress.number - 1
        engines = [tables.engines[name] for name in tables.engines]
        joining_engines = tables.joining.stages
        return live.RunStatus(
            at=time.time(),
            step=progress.number,
            num_steps=self._num_steps,
            phase=tables.watch.phase.value,
            eta_s=seconds_left([*self._records], self._num_steps, now - self._committed_at, self._before.records),
            elapsed_s=now - self._before.began_at,
            groups=live.LiveGroups(
                waiting=states[GroupState.WAITING],
                in_flight=states[GroupState.IN_FLIGHT],
                ready=states[GroupState.READY],
                taken=states[GroupState.TAKEN],
                dropped=self._num_dropped,
            ),
            buffer=live.LiveBuffer(size=ages.total(), by_age={str(age): ages[age] for age in sorted(ages)}),
            engines=tuple(
                live.LiveEngine(
                    name=engine.name,
                    status=engine.status.value if engine.leave_by is None or engine.is_vacant else live.LEAVING,
                    version=engine.version,
                    outstanding_tokens=tables.groups.num_tokens(engine.name),
                    in_flight=tables.groups.num_in_flight(engine.name),
                    host=_host(registry, engine.name),
                    device=self._device_of(engine.name),
                )
                for engine in engines
            )
            + tuple(
                joining_engine(name, stage, _host(registry, name), self._device_of(name))
                for name, stage in joining_engines.items()
            ),
            trainers=tuple(
                self._trainer(scheduler, registry, name, trained)
                for name in tables.processes.of_kind["trainer"]
                if name in registry.processes
            ),
            versions=live.LiveVersions(
                trained=trained,
                published=version,
                verified=max((engine.version for engine in engines if engine.is_verified), default=-1),
            ),
            failures=self._num_failures,
            notes=tuple(self._notes),
        )

    def _trainer(self, scheduler: Scheduler, registry: ProcessRegistry, name: str, trained: int) -> live.LiveTrainer:
        request = next(scheduler.tables.requests.of(name), None)
        return live.LiveTrainer(
            name=name,
            status="idle" if request is None else request.phase.value,
            version=trained,
            doing=registry.processes[name].phase,
            host=_host(registry, name),
            device=self._device_of(name),
        )

    def _write(self, status: live.RunStatus) -> None:
        """Write the file as a whole; errors of the disk never stop the run."""
        self._last = status
        temporary = self._path.with_name(f".{live.LIVE_NAME}")
        try:
            temporary.write_bytes(msgspec.json.encode(status))
            temporary.rename(self._path)
        except OSError:
            self._last = None


def _host(registry: ProcessRegistry, name: str) -> str:
    process = registry.processes.get(name)
    return "" if process is None else process.hello.host


def device_of(config: Config, has_gpus: bool, name: str) -> str:
    """Return the GPUs of a trainer or an engine, if there are any."""
    first, count = int(name.rpartition("-")[2]), 1
    if not name.startswith("trainer-"):
        count = count_gpus_per_engine(config)
        first = find_first_gpu_of_engines(config) + first * count
    first %= max(1, config.cluster.gpus_per_node)
    gpus = range(first, first + count)
    if not (has_gpus and config.cluster.gpus_per_node and gpus):
        return "CPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"


def joining_engine(name: str, stage: JoiningStage, host: str, device: str) -> live.LiveEngine:
    """Return an engine that is joining the run."""
    return live.LiveEngine(
        name=name, status=stage.value, version=-1, outstanding_tokens=0, in_flight=0, host=host, device=device
    )
