"""The parts of an attempt: the scheduler and its spec, the rollout log, the loop around them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from tandem.common.messages import Listener
from tandem.config import Config, config_to_json
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.loop.batches import StepBatches
from tandem.coordinator.loop.interrupts import PendingInterrupts
from tandem.coordinator.loop.loop import CoordinatorLoop, RunParts
from tandem.coordinator.loop.opening import CommandInvocation, OpenedResources
from tandem.coordinator.loop.recorder import ResultRecorder
from tandem.coordinator.loop.restored_samples import RestoredSamples
from tandem.coordinator.loop.spec import run_spec
from tandem.coordinator.observers.finished_steps import (
    CurveFile,
    HealthWarnings,
    QuickSteps,
    StepLog,
    TimeLimit,
    validation_stop,
)
from tandem.coordinator.observers.live_file import LiveFile, LiveSnapshot
from tandem.coordinator.observers.observer import Observer, ObserverGroup
from tandem.coordinator.observers.progress import ProgressDisplay
from tandem.coordinator.observers.timeline import TimelineWriter
from tandem.coordinator.observers.watching import DashboardObserver, EngineServers, MetricsObserver, SupervisorObserver
from tandem.coordinator.preparing.resuming import StartingPoint
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies
from tandem.coordinator.processes.reply_checks import SampleLimits
from tandem.coordinator.scheduler import RunSpec, Scheduler
from tandem.coordinator.scheduler.events import Place, RestoredGroup
from tandem.launch.admission import HeartbeatSettings, ListeningSocket
from tandem.launch.known_processes import KnownProcesses, orphan_timeout_s
from tandem.launch.launch import LocalProcesses, OwnCredentials
from tandem.launch.nodes import KINDS, expected_processes, launched_processes
from tandem.launch.preparing.beginning import Say
from tandem.observe.run_folder.checkpoints import CheckpointFolder
from tandem.samples.batch_sharding import scoring_trainers
from tandem.samples.sample_files import RestoreLimits, SampleFolder

_COMMANDS_OF_A_COORDINATOR = 1 << 32


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state that an attempt takes over from those before it."""

    live_snapshot: LiveSnapshot
    """State of the observers."""
    next_command_id: int = 1
    """Next command id, above those of all earlier requests."""
    replaced_at: tuple[float, ...] = ()
    """Times of replacements, by `time.monotonic`; trainers that restart together count once."""
    departed: tuple[str, ...] = ()
    """Engines that have left and are not replaced."""
    has_started: bool = False
    """Whether an attempt has reached its first step."""


def lasting(invocation: CommandInvocation, opened: OpenedResources) -> RunParts:
    """Make the parts that last through all attempts. No process is started yet."""
    config, listening = invocation.ready.config, opened.listening
    admits = OwnCredentials(listening.hub.at, listening.admitted)
    heartbeat = HeartbeatSettings(
        interval_s=config.cluster.heartbeat_interval_s,
        timeout_s=config.cluster.heartbeat_timeout_s,
        orphan_timeout_s=orphan_timeout_s(config, is_supervised=invocation.supervision is not None),
    )
    logs = opened.journal.folder / "logs"
    known_processes = KnownProcesses(
        opened.journal.folder, listening.hub.address, is_kept=heartbeat.orphan_timeout_s > 0, earlier=opened.earlier
    )
    interrupts = PendingInterrupts()
    observers = list(opened.watching)
    if config.checkpointing.enabled and config.checkpointing.checkpoint_must_save_by is not None:
        observers.append(TimeLimit(config.checkpointing.checkpoint_must_save_by, interrupts.ask))
    earlier = opened.journal.steps if invocation.from_step is None else list
    observers += validation_stop(config, earlier, interrupts.reach)
    return RunParts(
        known_processes=known_processes,
        registry=_registry(config, opened, heartbeat, known_processes),
        processes=LocalProcesses(
            admits, logs, invocation.fork_server, invocation.supervision, are_kept=heartbeat.orphan_timeout_s > 0
        ),
        interrupts=interrupts,
        observers=tuple(observers),
    )


def assemble(
    invocation: CommandInvocation,
    opened: OpenedResources,
    lasting: RunParts,
    snapshot: RunSnapshot,
    checkpoints: CheckpointFolder,
    start: StartingPoint,
    limits: RestoreLimits,
    stack: contextlib.ExitStack,
) -> tuple[CoordinatorLoop, LiveFile]:
    """Make the loop of an attempt that begins at `start`, and its live file; `stack` closes their resources.

    `limits` restrict the samples that may be restored from the rollout log.
    """
    config, algorithm = invocation.ready.config, invocation.ready.algorithm
    samples = SampleFolder(config.logger, [f"trainer-{index}" for index in scoring_trainers(config)])
    spec = run_spec(
        config,
        first_step=start.first_step,
        last_step=algorithm.num_steps,
        num_validation=algorithm.num_validation,
        resume_from=start.resume_from,
        checkpoint_folder=checkpoints.temporary_pattern,
        samples_folder=str(samples.path),
        reward_server=invocation.reward_server,
        images_at=opened.images_at,
    )
    spec = msgspec.structs.replace(spec, replaced_at=snapshot.replaced_at, departed=snapshot.departed)
    front_end = invocation.front_end
    spec = spec if front_end is None else front_end.spec(spec)
    algorithm.resume(opened.journal.steps)
    run_id = opened.journal.run_id
    sources = _serve_record(algorithm, lasting.registry, run_id, start.first_step, stack)
    live, observers = _observers(invocation, opened, lasting.observers, spec, snapshot)
    stack.callback(observers.close)
    if opened.evaluations is not None:
        stack.enter_context(opened.evaluations.telling(observers.amended))
    recorder = ResultRecorder(config, opened.journal, checkpoints, samples, observers)
    make = CoordinatorLoop if front_end is None else front_end.loop
    loop = make(
        Scheduler(
            spec,
            time.monotonic(),
            is_informative=partial(has_spread, config.rollout_section) if config.declaration.rolls_out else bool,
            first_command_id=snapshot.next_command_id,
        ),
        lasting,
        algorithm,
        StepBatches(config, algorithm, sources),
        recorder,
        partial(_find_restored, invocation, samples, start.first_step, limits, run_id, recorder.note),
    )
    return loop, live


def find_first_command_id(opened: OpenedResources) -> int:
    """Return an id above that of every request of earlier coordinators: none is used twice in a run."""
    return 1 + (opened.journal.num_begun - 1) * _COMMANDS_OF_A_COORDINATOR


def _registry(
    config: Config, opened: OpenedResources, heartbeat: HeartbeatSettings, known_processes: KnownProcesses
) -> ProcessRegistry:
    replies = Replies(SampleLimits.of(config), find_first_command_id(opened) - 1)
    expected, run_id = expected_processes(config), opened.journal.run_id
    max_rollouts = config.cluster.max_rollouts
    return ProcessRegistry(
        opened.listening, expected, config_to_json(config), run_id, heartbeat, replies, max_rollouts, known_processes
    )


def _observers(
    invocation: CommandInvocation,
    opened: OpenedResources,
    lasting: Sequence[Observer],
    spec: RunSpec,
    snapshot: RunSnapshot,
) -> tuple[LiveFile, ObserverGroup]:
    """Make the observers of an attempt, and its live file among them; the next attempt takes over the file's state."""
    config, folder, history = invocation.ready.config, opened.journal.folder, opened.journal.steps()
    live = LiveFile(config, folder, spec.last_step, history, snapshot.live_snapshot)
    display: Observer
    is_quick = not config.declaration.rolls_out
    if invocation.front_end is not None:
        display = invocation.front_end.display()
    else:
        is_due = QuickSteps(spec.last_step).is_due if is_quick else None
        began_at, again = snapshot.live_snapshot.began_at, snapshot.live_snapshot.records
        display = ProgressDisplay(config, spec, history, began_at=began_at, again=again, is_due=is_due)
    observers: list[Observer] = [
        *([StepLog(folder, spec.last_step)] if is_quick else []),
        *([DashboardObserver(opened.writers)] if len(opened.writers) else []),
        display,
        live,
        CurveFile(folder, history),
        TimelineWriter(folder, spec.first_step, *([] if opened.traces is None else [opened.traces.send])),
        *([EngineServers(folder)] if config.generates and config.policy.generation.takes_external_requests else []),
        # What it advises are keys of data and rewards, which a front end's clients bring.
        *([HealthWarnings(config, history)] if invocation.front_end is None else []),
        *lasting,
    ]
    if opened.exporter is not None:
        observers.append(MetricsObserver(opened.exporter, live, history[-1] if history else None))
    if opened.traces is not None:
        observers.append(opened.traces)
    if invocation.supervision is not None:
        observers.append(SupervisorObserver(invocation.supervision))
    return live, ObserverGroup(observers)


def _find_restored(
    invocation: CommandInvocation, samples: SampleFolder, first_step: int, limits: RestoreLimits, run_id: str, say: Say
) -> dict[Place, RestoredGroup]:
    """Put the rollout log of the coming steps aside; return the groups that need not be generated again."""
    config = invocation.ready.config
    try:
        samples.put_aside_after(first_step - 1, limits)
    except OSError as error:
        say(f"what had been generated is generated again: cannot use {samples.path}: {error.strerror}")
        return {}
    if config.logger.samples == "off" or not config.generates:
        return {}
    return RestoredSamples(config, samples, run_id, say).find(invocation.ready.algorithm, first_step)


def _serve_record(
    algorithm: RunningAlgorithm, registry: ProcessRegistry, run_id: str, first_step: int, stack: contextlib.ExitStack
) -> dict[str, Listener]:
    """Serve restored samples to trainers if the algorithm trains on them; return the listeners, by source."""
    from tandem.coordinator.algorithms.recorded import RecordedAlgorithm

    if not isinstance(algorithm, RecordedAlgorithm):
        return {}
    stack.callback(algorithm.close)
    return algorithm.serve(registry.address, run_id, first_step, registry.trainers)


def describe_processes(config: Config, listening: ListeningSocket) -> str:
    """Describe what is launched here, and the commands that start the rest elsewhere."""
    expected, launched = expected_processes(config), launched_processes(config)
    lines = [f"coordinator listens on {listening.hub.address}"]
    for kind in KINDS:
        num_launched, total = launched.get(kind, 0), expected.get(kind, 0)
        if num_launched:
            lines.append(f"  {num_launched} {kind} process{'es' if num_launched > 1 else ''} launched here")
        if total > num_launched:
            lines.append(f"  {total - num_launched} to be started by hand: {listening.describe_joining(kind)}")
    max_rollouts = config.cluster.max_rollouts
    if config.generates and (max_rollouts is None or max_rollouts > config.cluster.rollouts):
        lines.append(f"  more rollouts may join at any time: {listening.describe_joining('rollout')}")
    return "\n".join(lines)
