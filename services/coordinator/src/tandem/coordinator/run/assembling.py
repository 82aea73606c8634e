"""Assemble a term of a run: the scheduler and its spec, the record of samples, the loop around them."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import msgspec

from tandem.common.assignment import scoring_trainers
from tandem.common.config import Config, config_to_json
from tandem.common.messages import Listener
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.run.batches import Batches
from tandem.coordinator.run.checkpoints import CheckpointFolder
from tandem.coordinator.run.invocation import Invocation
from tandem.coordinator.run.kept_samples import KeptSamples
from tandem.coordinator.run.known_members import KnownMembers, orphan_timeout_s
from tandem.coordinator.run.launch import Admits, LocalProcesses
from tandem.coordinator.run.live_file import Said
from tandem.coordinator.run.loop import Interrupts, Loop
from tandem.coordinator.run.members import Listening, Pulse, Registry
from tandem.coordinator.run.onlookers import Onlookers
from tandem.coordinator.run.opening import Opened
from tandem.coordinator.run.prerequisite import Say
from tandem.coordinator.run.progress import Progress
from tandem.coordinator.run.recorder import Recorder
from tandem.coordinator.run.replies import Replies
from tandem.coordinator.run.reply_checks import Limits
from tandem.coordinator.run.resuming import Start
from tandem.coordinator.run.sample_folder import KeptLimits, SampleFolder
from tandem.coordinator.run.spec import KINDS, expected_processes, launched_processes, run_spec
from tandem.coordinator.run.time_limit import TimeLimit
from tandem.coordinator.scheduler import RunSpec, Scheduler
from tandem.coordinator.scheduler.events import KeptGroup, Place

_ORDERS_OF_A_COORDINATOR = 1 << 32


class Lasting(msgspec.Struct, frozen=True, kw_only=True):
    """What lasts through all terms of a run: its members, and who asks it to end."""

    registry: Registry
    processes: LocalProcesses
    interrupts: Interrupts
    known: KnownMembers
    limit: TimeLimit


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What the terms before leave to the next one."""

    said: Said
    """To those who look on."""
    next_command_id: int = 1
    """Above that of every order."""
    replaced_at: tuple[float, ...] = ()
    """When processes were, by `time.monotonic`; trainers that were started again together count once."""
    departed: tuple[str, ...] = ()
    """Engines that have left, in whose place there is none."""
    has_started: bool = False
    """Whether one has got as far as its first step."""


def lasting(invocation: Invocation, opened: Opened) -> Lasting:
    """Make what lasts through all terms. No process is started yet."""
    config, listening = invocation.ready.config, opened.listening
    admits = Admits(listening.hub.at, listening.admitted)
    pulse = Pulse(
        interval_s=config.cluster.heartbeat_interval_s,
        timeout_s=config.cluster.heartbeat_timeout_s,
        orphan_timeout_s=orphan_timeout_s(config, is_supervised=invocation.supervision is not None),
    )
    logs = opened.journal.folder / "logs"
    known = KnownMembers(
        opened.journal.folder, listening.hub.address, is_kept=pulse.orphan_timeout_s > 0, earlier=opened.earlier
    )
    return Lasting(
        known=known,
        registry=_registry(config, opened, pulse, known),
        processes=LocalProcesses(
            admits, logs, invocation.fork_server, invocation.supervision, are_kept=pulse.orphan_timeout_s > 0
        ),
        interrupts=Interrupts(),
        limit=TimeLimit(
            config.checkpointing.checkpoint_must_save_by if config.checkpointing.enabled else None, time.monotonic()
        ),
    )


def assemble(
    invocation: Invocation,
    opened: Opened,
    members: Lasting,
    past: Past,
    checkpoints: CheckpointFolder,
    start: Start,
    limits: KeptLimits,
    stack: contextlib.ExitStack,
) -> Loop:
    """Make the loop of a term that begins at `start`; `stack` closes what it needs.

    `limits` are those of samples that may be taken from the record.
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
    )
    spec = msgspec.structs.replace(spec, replaced_at=past.replaced_at, departed=past.departed)
    run_id = opened.journal.run_id
    sources = _serve_record(algorithm, members.registry, run_id, start.first_step, stack)
    recorder = _recorder(config, opened, checkpoints, samples, spec, past, stack)
    return Loop(
        Scheduler(
            spec,
            time.monotonic(),
            is_informative=partial(has_spread, config.rollout_section) if config.declaration.rolls_out else bool,
            first_command_id=past.next_command_id,
        ),
        members.registry,
        members.processes,
        algorithm,
        Batches(config, algorithm, sources),
        recorder,
        members.interrupts,
        members.limit,
        partial(_find_kept, invocation, samples, start.first_step, limits, run_id, recorder.note),
        _no_sign if invocation.supervision is None else invocation.supervision.show_life,
    )


def first_command_id(opened: Opened) -> int:
    """Return an id above that of every order of earlier coordinators: none is given twice in a run."""
    return 1 + (opened.journal.num_begun - 1) * _ORDERS_OF_A_COORDINATOR


def _registry(config: Config, opened: Opened, pulse: Pulse, known: KnownMembers) -> Registry:
    replies = Replies(Limits.of(config), first_command_id(opened) - 1)
    expected, run_id = expected_processes(config), opened.journal.run_id
    most = config.cluster.max_rollouts
    return Registry(opened.listening, expected, config_to_json(config), run_id, pulse, replies, most, known)


def _no_sign() -> None:
    """Show no life to anybody: nobody waits for it."""


def _recorder(
    config: Config,
    opened: Opened,
    checkpoints: CheckpointFolder,
    samples: SampleFolder,
    spec: RunSpec,
    past: Past,
    stack: contextlib.ExitStack,
) -> Recorder:
    """Make what writes down how the run goes, also for those who look on."""
    journal, writers = opened.journal, opened.writers
    history = journal.steps()
    progress = Progress(config, spec, history, began_at=past.said.began_at, again=past.said.records)
    stack.callback(progress.close)
    steps = range(spec.first_step, spec.last_step + 1)
    onlookers = Onlookers(config, journal.folder, steps, history, opened.watchers, past.said)
    return Recorder(config, journal, checkpoints, samples, writers, progress, onlookers)


def _find_kept(
    invocation: Invocation, samples: SampleFolder, first_step: int, limits: KeptLimits, run_id: str, say: Say
) -> dict[Place, KeptGroup]:
    """Take what is recorded of the steps that are to come out of the record; return what need not be generated."""
    config = invocation.ready.config
    try:
        samples.put_aside_after(first_step - 1, limits)
    except OSError as error:
        say(f"what had been generated is generated again: cannot use {samples.path}: {error.strerror}")
        return {}
    if config.logger.samples == "off" or not config.generates:
        return {}
    return KeptSamples(config, samples, run_id, say).find(invocation.ready.algorithm, first_step)


def _serve_record(
    algorithm: RunningAlgorithm, registry: Registry, run_id: str, first_step: int, stack: contextlib.ExitStack
) -> dict[str, Listener]:
    """Have trainers fetch recorded samples where the algorithm is to train on these; return where, by source."""
    from tandem.coordinator.algorithms.recorded import RecordedAlgorithm

    if not isinstance(algorithm, RecordedAlgorithm):
        return {}
    stack.callback(algorithm.close)
    return algorithm.serve(registry.address, run_id, first_step, registry.trainers)


def who_runs_where(config: Config, listening: Listening) -> str:
    """Say what is launched here, and what to type elsewhere for the rest."""
    expected, launched = expected_processes(config), launched_processes(config)
    lines = [f"coordinator listens on {listening.hub.address}"]
    for kind in KINDS:
        here, total = launched.get(kind, 0), expected.get(kind, 0)
        if here:
            lines.append(f"  {here} {kind} process{'es' if here > 1 else ''} launched here")
        if total > here:
            lines.append(f"  {total - here} to be started by hand: {listening.how_to_join(kind)}")
    most = config.cluster.max_rollouts
    if config.generates and (most is None or most > config.cluster.rollouts):
        lines.append(f"  more rollouts may join at any time: {listening.how_to_join('rollout')}")
    return "\n".join(lines)
