"""Assemble a run: the scheduler and its spec, processes, the record of samples, the loop around them."""

from __future__ import annotations

import contextlib
import time
from functools import partial

from tandem.common.assignment import scoring_trainers
from tandem.common.config import Config, config_to_json
from tandem.common.messages import Listener
from tandem.common.telemetry import TensorBoardWriter
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.run.batches import Batches
from tandem.coordinator.run.checkpoints import CheckpointFolder
from tandem.coordinator.run.invocation import Invocation
from tandem.coordinator.run.kept_samples import KeptSamples
from tandem.coordinator.run.launch import Admits, LocalProcesses
from tandem.coordinator.run.loop import Loop
from tandem.coordinator.run.members import Listening, Pulse, Registry
from tandem.coordinator.run.onlookers import Onlookers
from tandem.coordinator.run.opening import Opened
from tandem.coordinator.run.progress import Progress
from tandem.coordinator.run.recorder import Recorder
from tandem.coordinator.run.replies import Replies
from tandem.coordinator.run.reply_checks import Limits
from tandem.coordinator.run.resuming import Start
from tandem.coordinator.run.sample_folder import KeptLimits, SampleFolder
from tandem.coordinator.run.spec import KINDS, expected_processes, launched_processes, run_spec
from tandem.coordinator.scheduler import RunSpec, Scheduler
from tandem.coordinator.scheduler.kept import KeptGroup, Place


def assemble(
    invocation: Invocation,
    opened: Opened,
    checkpoints: CheckpointFolder,
    start: Start,
    limits: KeptLimits,
    stack: contextlib.ExitStack,
) -> Loop:
    """Make the loop of a run that begins at `start`; `stack` closes what it needs. No process is started yet.

    `limits` are those of samples that may be taken from the record.
    """
    config, algorithm = invocation.ready.config, invocation.ready.algorithm
    samples = SampleFolder(config.logger, [f"trainer-{index}" for index in scoring_trainers(config)])
    kept = _put_aside(invocation, samples, start.first_step, limits, opened.journal.run_id)
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
    listening, registry = opened.listening, _registry(config, opened)
    sources = _serve_record(algorithm, registry, opened.journal.run_id, start.first_step, stack)
    recorder = _recorder(config, opened, checkpoints, samples, spec, stack)
    invocation.say(_who_runs_where(config, listening))
    return Loop(
        Scheduler(spec, time.monotonic(), is_informative=partial(has_spread, config.grpo), kept=kept),
        registry,
        LocalProcesses(
            Admits(listening.hub.at, listening.admitted), opened.journal.folder / "logs", invocation.fork_server
        ),
        algorithm,
        Batches(config, algorithm, sources),
        recorder,
    )


def _registry(config: Config, opened: Opened) -> Registry:
    pulse = Pulse(interval_s=config.cluster.heartbeat_interval_s, timeout_s=config.cluster.heartbeat_timeout_s)
    replies = Replies(Limits.of(config))
    run_id = opened.journal.run_id
    return Registry(opened.listening, expected_processes(config), config_to_json(config), run_id, pulse, replies)


def _recorder(
    config: Config,
    opened: Opened,
    checkpoints: CheckpointFolder,
    samples: SampleFolder,
    spec: RunSpec,
    stack: contextlib.ExitStack,
) -> Recorder:
    """Make what writes down how the run goes, also for those who look on."""
    journal, writers = opened.journal, opened.writers
    history = journal.steps()
    progress = Progress(config, spec, history)
    if config.logger.tensorboard_enabled:
        writers.add(TensorBoardWriter(journal.folder / config.logger.tensorboard.log_dir, spec.first_step))
    stack.callback(progress.close)
    steps = range(spec.first_step, spec.last_step + 1)
    onlookers = Onlookers(config, journal.folder, steps, history, opened.watchers)
    return Recorder(config, journal, checkpoints, samples, writers, progress, onlookers)


def _put_aside(
    invocation: Invocation, samples: SampleFolder, first_step: int, limits: KeptLimits, run_id: str
) -> dict[Place, KeptGroup]:
    """Take what is recorded of the steps that are to come out of the record; return what need not be generated."""
    config, say = invocation.ready.config, invocation.say
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


def _who_runs_where(config: Config, listening: Listening) -> str:
    """Say what is launched here, and what to type elsewhere for the rest."""
    expected, launched = expected_processes(config), launched_processes(config)
    lines = [f"coordinator listens on {listening.hub.address}"]
    for kind in KINDS:
        here, total = launched.get(kind, 0), expected.get(kind, 0)
        if here:
            lines.append(f"  {here} {kind} process{'es' if here > 1 else ''} launched here")
        if total > here:
            lines.append(f"  {total - here} to be started by hand: {listening.how_to_join(kind)}")
    return "\n".join(lines)
