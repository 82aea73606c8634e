"""The invocation of a run, what it holds to its end, and the parts of each of its attempts.

An invocation is the configuration to run, the mode, and the resources of its caller. Socket, run folder, journal and
observers are held to the end. An attempt has the scheduler and its spec, the rollout log, and the loop around them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import msgspec

from tandem.common import kept_inputs
from tandem.common.errors import ConfigError, RunFolderError
from tandem.common.keys import RunKeys, derive_key, find_key_file, read_run_keys, write_run_keys
from tandem.common.messages import BuildEngine, BuildTrainer, Listener, RewardServer
from tandem.config import Config, config_to_json, dump_yaml, make_plain
from tandem.config.models.families import is_text_only
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.loop.loop import CoordinatorLoop, PendingInterrupts, RunParts, StepBatches
from tandem.coordinator.loop.recorder import ResultRecorder
from tandem.coordinator.loop.restored_samples import RestoredSamples
from tandem.coordinator.loop.spec import run_spec
from tandem.coordinator.observers import finished_steps, live_file, observer, progress, timeline, watching
from tandem.coordinator.preparing.prerequisite import CheckedConfig
from tandem.coordinator.preparing.resuming import StartingPoint, refuse_changes
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.coordinator.scheduler import RunSpec, Scheduler, events
from tandem.launch import admission, helper_process
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.known_processes import KnownProcesses, ProcessesSnapshot, find_earlier, orphan_timeout_s
from tandem.launch.launch import LocalProcesses, OwnCredentials
from tandem.launch.nodes import KINDS, expected_processes, launched_processes
from tandem.launch.preparing.beginning import Mode, Say, set_aside
from tandem.launch.preparing.hub_data import list_data_files, list_prompt_files
from tandem.launch.preparing.needed_models import make_model
from tandem.launch.supervision import SupervisorConnection
from tandem.observe.exporters.telemetry import MetricWriters, MlflowRun, MlflowWriter, WandbRun, WandbWriter
from tandem.observe.run_folder import journal_file
from tandem.observe.run_folder.checkpoints import CheckpointFolder
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.batch_sharding import scoring_trainers
from tandem.samples.media import serve_media
from tandem.samples.sample_files import RestoreLimits, SampleFolder

if TYPE_CHECKING:
    from tandem.coordinator.observers.checkpoint_evaluations import CheckpointEvaluations
    from tandem.observe.exporters.prometheus import MetricsExporter  # needs an extra

_ANY_PORT = ":*"
_LONGEST_PROGRAM = 1 << 20
"""Bytes from which a file that an agent's command names is a binary, and no program of the user's."""


class FrontEnd(Protocol):
    """A driver of a run in the place of its algorithm."""

    def spec(self, spec: RunSpec) -> RunSpec:
        """Return the run spec that it needs."""
        ...

    def display(self) -> observer.Observer:
        """Return what shows the run on the console."""
        ...

    def loop(self, *parts: Any) -> CoordinatorLoop:
        """Return the loop of an attempt, from the arguments of `CoordinatorLoop`."""
        ...


class CommandInvocation(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a command, made once and read by everything that begins a run."""

    ready: CheckedConfig
    mode: Mode
    say: Say
    """Function that prints a line."""
    fork_server: ServiceForkServer
    """Fork server of the services."""
    from_step: int | None = None
    """Step to resume after, if it is not the newest with a checkpoint."""
    supervision: SupervisorConnection | None = None
    """Supervision of this process, if another one takes over when it is lost."""
    reward_server: RewardServer | None = None
    """Address of the Python program that scores samples, if one does."""
    next_runs: tuple[CheckedConfig, ...] = ()
    """Runs that this one is a prerequisite of, the next first."""

    front_end: FrontEnd | None = None
    """The front end that drives the run; None if its algorithm does."""

    def of_prerequisite(self, prerequisite: CheckedConfig, mode: Mode) -> CommandInvocation:
        """Return the invocation of the run that comes before, which continues from its own progress."""
        return msgspec.structs.replace(
            self,
            ready=prerequisite,
            mode=mode,
            from_step=None,
            front_end=None,
            next_runs=(self.ready, *self.next_runs),
        )


class OpenedResources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a run holds open from its beginning to its end."""

    listening: admission.ListeningSocket
    earlier: ProcessesSnapshot | None
    """Processes of a lost coordinator, if the run goes on after that."""
    journal: Journal
    writers: MetricWriters
    exporter: MetricsExporter | None
    """Exporter for Prometheus, if that is on."""
    traces: watching.TraceObserver | None
    media_at: Listener | None
    """Where processes that do not see the run's folder ask for its media; None if the policy takes text alone."""
    watching: tuple[observer.Observer, ...]
    """Observers that need nothing of the attempt."""
    evaluations: CheckpointEvaluations | None
    """Evaluation during training, if that is on."""


def open_run(invocation: CommandInvocation, stack: contextlib.ExitStack) -> OpenedResources:
    """Open all that a run needs on this host; `stack` closes it. With ``--restart``, set aside what was there."""
    config, mode, say = invocation.ready.config, invocation.mode, invocation.say
    folder = Path(config.logger.log_dir)
    keys = (
        read_run_keys(folder) or admission.new_run_keys()
    )  # before the folder is set aside: services may wait with them
    # Before the journal: a run that cannot listen has not begun.
    earlier = None
    if mode == "resume":
        earlier = find_earlier(config, has_rewards=invocation.reward_server is not None)
    listening = _listen(config.cluster.address, keys, folder, earlier)
    if earlier is not None and listening.hub.address != earlier.address:
        earlier = earlier.release_names(earlier.staying)  # they look at another address
    stack.callback(listening.hub.close)
    exporter = watching.serve_prometheus(config.logger, stack)
    if exporter is not None:
        say(f"metrics: {exporter.url}")
    listener = helper_process.open_page_socket(config.logger.page)
    if listener is not None:
        stack.callback(listener.close)
    run_id = _name_run(config, mode, say)
    if mode == "restart":  # its model may lie within the folder that was just set aside
        make_model(config, mode, say)
    writers = MetricWriters()
    stack.callback(writers.close)
    if config.logger.wandb_enabled:  # also before: it may not be installed, and the service may refuse
        writers.add(_wandb(config, run_id))
    if config.logger.mlflow_enabled:
        writers.add(_mlflow(config, run_id))
    journal = _open_journal(invocation.ready, mode, run_id)
    stack.callback(journal.close)
    write_run_keys(folder, keys)
    _keep_inputs(invocation)
    invocation.ready.algorithm.keep_media()
    media_at = None if is_text_only(config.policy) else _serve_media(config, run_id, listening, stack)
    observers: list[observer.Observer] = []
    if listener is not None:
        page = helper_process.PageProcess(journal.folder, listener)
        stack.callback(page.close)
        say(f"page: {page.url}")
        observers.append(watching.PageObserver(page))
    if exporter is not None:
        exporter.name_run(run_id)
    traces = None
    if config.logger.opentelemetry.endpoint is not None:
        traces = watching.TraceObserver(config.logger.opentelemetry.endpoint, run_id)
        stack.callback(traces.end, say)
    evaluations = _begin_evaluations(invocation, journal, stack)
    return OpenedResources(
        listening=listening,
        earlier=earlier,
        journal=journal,
        writers=writers,
        exporter=exporter,
        traces=traces,
        media_at=media_at,
        watching=(*observers, *([] if evaluations is None else [evaluations])),
        evaluations=evaluations,
    )


def _begin_evaluations(
    invocation: CommandInvocation, journal: Journal, stack: contextlib.ExitStack
) -> CheckpointEvaluations | None:
    """Have checkpoints evaluated during training, if that is on; `stack` ends it."""
    config = invocation.ready.config
    if not config.eval.during_training:
        return None
    from tandem.coordinator.observers.checkpoint_evaluations import CheckpointEvaluations
    from tandem.coordinator.preparing.evaluation_settings import compute_evaluation_limit

    limit_s = compute_evaluation_limit(config)
    evaluations = CheckpointEvaluations(invocation.ready.source, config, journal, invocation.say, limit_s)
    stack.callback(evaluations.end)
    return evaluations


def _keep_inputs(invocation: CommandInvocation) -> None:
    """Keep the files that services, and a supervised run's next coordinator, read again: the user may edit them.

    A coordinator that takes the place of another uses those that are kept. A supervised prerequisite keeps the files
    of the runs that come after it, too, and they read these.
    """
    ready, supervision = invocation.ready, invocation.supervision
    run = Path(ready.config.logger.log_dir)
    before = run.absolute() / kept_inputs.FOLDER
    is_kept = supervision is not None and os.environ.get(kept_inputs.VARIABLE) == str(before)
    if not is_kept:
        if invocation.mode == "resume" and (line := kept_inputs.describe_change(before)):
            invocation.say(f"note: custom code has changed since the run was last started: {line}")
        _copy_inputs(invocation, run)
    if supervision is not None:
        supervision.note_begun(run)


def _copy_inputs(invocation: CommandInvocation, run: Path) -> None:
    """Copy the files into the run's folder, and have processes that start later use these."""
    supervision = invocation.supervision
    kept_runs = (invocation.ready, *(() if supervision is None else invocation.next_runs))
    modules = {name: path for checked in reversed(kept_runs) for name, path in checked.modules.items()}
    programs = [path for checked in kept_runs for path in _agent_programs(checked.config)]
    data = []
    if supervision is None:
        os.environ.pop(kept_inputs.VARIABLE, None)
    else:
        for checked in kept_runs:
            data += [*list_prompt_files(checked.config), *(path for _, path in list_data_files(checked.config))]
    try:
        folder = kept_inputs.keep(run, modules, data, programs)
    except OSError as error:
        invocation.say(f"note: files that the run reads are not kept, so leave them as they are: {error.strerror}")
        return
    os.environ.pop(kept_inputs.VARIABLE, None)
    if folder is not None:
        os.environ[kept_inputs.VARIABLE] = str(folder)


def _agent_programs(config: Config) -> list[str]:
    """Return the files that agents' commands name; an interpreter is none of them."""
    words = [word for settings in config.env.values() for word in settings.command or ()]
    return [word for word in words if Path(word).is_file() and Path(word).stat().st_size < _LONGEST_PROGRAM]


def _listen(address: str, keys: RunKeys, folder: Path, earlier: ProcessesSnapshot | None) -> admission.ListeningSocket:
    """Listen; if any port will do, at the address of an earlier coordinator, where its processes look for one."""
    earlier_keys = () if earlier is None else earlier.keys
    if earlier is not None and address.endswith(_ANY_PORT):
        with contextlib.suppress(ConfigError):  # another program has it now
            return admission.ListeningSocket(earlier.address, keys, find_key_file(folder), earlier_keys)
    return admission.ListeningSocket(address, keys, find_key_file(folder), earlier_keys)


def _serve_media(
    config: Config, run_id: str, listening: admission.ListeningSocket, stack: contextlib.ExitStack
) -> Listener:
    """Give the run's media to its processes that do not see its folder; `stack` ends it."""
    host = str(urlsplit(listening.hub.address).hostname)
    server = serve_media(config, host, run_id, listening.admitted)
    stack.callback(server.close)
    return server.at


def _name_run(config: Config, mode: Mode, say: Say) -> str:
    """Return the name of the run to continue, or a new one for a folder without a run, or without one any more."""
    folder = Path(config.logger.log_dir)
    if mode == "resume":
        with read_journal(folder) as journal:
            return journal.run_id
    if mode == "restart" and (folder / journal_file.JOURNAL_NAME).exists():
        checkpoints = Path(config.checkpointing.checkpoint_dir)
        _refuse_to_move_the_model(config, folder, checkpoints)
        with journal_file.hold_folder(folder):  # not that of a run in progress
            _bring_back_data(config, folder, set_aside(folder, say))
            if checkpoints.exists():  # it may lie within the run folder, which has just moved
                set_aside(checkpoints, say)
    journal_file.refuse_journal(folder)
    return journal_file.new_run_id()


def _wandb(config: Config, run_id: str) -> WandbWriter:
    settings = config.logger.wandb
    run = WandbRun(project=settings.project, name=settings.name, run_id=run_id, config=make_plain(config))
    return WandbWriter(Path(config.logger.log_dir), run)


def _mlflow(config: Config, run_id: str) -> MlflowWriter:
    settings = config.logger.mlflow
    run = MlflowRun(
        tracking_uri=settings.tracking_uri,
        experiment=settings.experiment_name,
        name=settings.run_name,
        run_id=run_id,
        config=make_plain(config),
    )
    return MlflowWriter(Path(config.logger.log_dir), run)


def _open_journal(ready: CheckedConfig, mode: Mode, run_id: str) -> Journal:
    config = ready.config
    folder = Path(config.logger.log_dir)
    if mode != "resume":
        journal = Journal.create(folder, config_to_json(config), config.algorithm, run_id)
    else:
        journal = Journal.open(folder)
        try:
            refuse_changes(journal, config)
        except RunFolderError:
            journal.close()
            raise
        journal.record_config(config_to_json(config))
    (folder / journal_file.CONFIG_NAME).write_text(
        f"{journal_file.RESOLVED_FROM}{Path(ready.source).absolute()}\n{dump_yaml(config)}"
    )
    (folder / "logs").mkdir(exist_ok=True)
    return journal


def _bring_back_data(config: Config, folder: Path, aside: Path) -> None:
    """Copy the run's data back from the folder that was set aside, if it lay within that."""
    for name in (config.data.train_data_path, config.data.val_data_path):
        path = Path(name or ".").absolute()
        if name and path.is_relative_to(folder.absolute()):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(aside / path.relative_to(folder.absolute()), path)


def _refuse_to_move_the_model(config: Config, *folders: Path) -> None:
    """Raise `RunFolderError` if setting `folders` aside would take away a model that is not made anew."""
    model = Path(config.policy.model_name).absolute()
    for folder in folders:
        if config.policy.new_model is None and model.is_relative_to(folder.absolute()):
            raise RunFolderError(
                f"cannot set {folder} aside for --restart: policy.model_name, {config.policy.model_name!r}, lies "
                "within it, and policy.new_model does not say how to make it; move the model elsewhere first"
            )


_COMMANDS_OF_A_COORDINATOR = 1 << 32


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state that an attempt takes over from those before it."""

    live_snapshot: live_file.LiveSnapshot
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
    heartbeat = admission.HeartbeatSettings(
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
        observers.append(finished_steps.TimeLimit(config.checkpointing.checkpoint_must_save_by, interrupts.ask))
    earlier = opened.journal.steps if invocation.from_step is None else list
    observers += finished_steps.validation_stop(config, earlier, interrupts.reach)
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
) -> tuple[CoordinatorLoop, live_file.LiveFile]:
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
    make_loop, make_batches = _choose_loop(config)
    make = make_loop if front_end is None else front_end.loop
    schedule = Scheduler if opened.media_at is None else partial(_MediaScheduler, opened.media_at)
    loop = make(
        schedule(
            spec,
            time.monotonic(),
            is_informative=partial(has_spread, config.rollout_section) if config.declaration.rolls_out else bool,
            first_command_id=snapshot.next_command_id,
        ),
        lasting,
        algorithm,
        make_batches(config, algorithm, sources),
        recorder,
        partial(_find_restored, invocation, samples, start.first_step, limits, run_id, recorder.note),
    )
    return loop, live


def _choose_loop(config: Config) -> tuple[type[CoordinatorLoop], type[StepBatches]]:
    """Return the loop of a run, and what makes its batches: of whole steps, or also of groups as they come."""
    if not config.streams_training:
        return CoordinatorLoop, StepBatches
    from tandem.coordinator.loop.streaming import StreamingBatches, StreamingLoop  # other runs need none of it

    return StreamingLoop, StreamingBatches


class _MediaScheduler(Scheduler):
    """The scheduler of a run with media: processes are told at their building where these are."""

    def __init__(self, media_at: Listener, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._media_at = media_at

    def handle(self, event: events.Event) -> list[events.Action]:
        """Take one event; return the actions it leads to, with the address of media in each command to build."""
        actions = super().handle(event)
        for place, action in enumerate(actions):
            if isinstance(action, events.DispatchCommand) and isinstance(action.command, BuildEngine | BuildTrainer):
                command = msgspec.structs.replace(action.command, media_at=self._media_at)
                actions[place] = msgspec.structs.replace(action, command=command)
        return actions


def find_first_command_id(opened: OpenedResources) -> int:
    """Return an id above that of every request of earlier coordinators: none is used twice in a run."""
    return 1 + (opened.journal.num_begun - 1) * _COMMANDS_OF_A_COORDINATOR


def _registry(
    config: Config, opened: OpenedResources, heartbeat: admission.HeartbeatSettings, known_processes: KnownProcesses
) -> ProcessRegistry:
    replies = Replies(SampleLimits.of(config), find_first_command_id(opened) - 1)
    expected, run_id = expected_processes(config), opened.journal.run_id
    keys = read_run_keys(opened.journal.folder) if config.refit.store else None
    return ProcessRegistry(
        opened.listening,
        expected,
        config_to_json(config),
        run_id,
        heartbeat,
        replies,
        config.cluster.max_rollouts,
        known_processes,
        derive_key(keys, "refit.store") if keys else b"",
    )


def _observers(
    invocation: CommandInvocation,
    opened: OpenedResources,
    lasting: Sequence[observer.Observer],
    spec: RunSpec,
    snapshot: RunSnapshot,
) -> tuple[live_file.LiveFile, observer.ObserverGroup]:
    """Make the observers of an attempt, and its live file among them; the next attempt takes over the file's state."""
    config, folder, history = invocation.ready.config, opened.journal.folder, opened.journal.steps()
    live = live_file.LiveFile(config, folder, spec.last_step, history, snapshot.live_snapshot)
    display: observer.Observer
    is_quick = not config.declaration.rolls_out
    if invocation.front_end is not None:
        display = invocation.front_end.display()
    else:
        is_due = finished_steps.QuickSteps(spec.last_step).is_due if is_quick else None
        began_at, again = snapshot.live_snapshot.began_at, snapshot.live_snapshot.records
        display = progress.ProgressDisplay(config, spec, history, began_at=began_at, again=again, is_due=is_due)
    observers: list[observer.Observer] = [
        *([finished_steps.StepLog(folder, spec.last_step)] if is_quick else []),
        *([watching.DashboardObserver(opened.writers)] if len(opened.writers) else []),
        display,
        live,
        finished_steps.CurveFile(folder, history),
        timeline.TimelineWriter(folder, spec.first_step, *([] if opened.traces is None else [opened.traces.send])),
        *(
            [watching.EngineServers(folder)]
            if config.generates and config.policy.generation.takes_external_requests
            else []
        ),
        # What it advises are keys of data and rewards, which a front end's clients bring.
        *([finished_steps.HealthWarnings(config, history)] if invocation.front_end is None else []),
        *lasting,
    ]
    if opened.exporter is not None:
        observers.append(watching.MetricsObserver(opened.exporter, live, history[-1] if history else None))
    if opened.traces is not None:
        observers.append(opened.traces)
    if invocation.supervision is not None:
        observers.append(watching.SupervisorObserver(invocation.supervision))
    return live, observer.ObserverGroup(observers)


def _find_restored(
    invocation: CommandInvocation, samples: SampleFolder, first_step: int, limits: RestoreLimits, run_id: str, say: Say
) -> dict[events.Place, events.RestoredGroup]:
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


def describe_processes(config: Config, listening: admission.ListeningSocket) -> str:
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
