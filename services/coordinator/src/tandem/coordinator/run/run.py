"""One run from its configuration to its outcome: make all that the loop needs, and undo it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tandem.common.assignment import scoring_trainers
from tandem.common.config import (
    Config,
    config_to_json,
    dump_yaml,
    to_plain,
)
from tandem.common.errors import DamagedCheckpoint, ModelError, RunFolderError
from tandem.common.keys import key_file, read_run_keys, write_run_keys
from tandem.common.messages import Listener, RewardServer
from tandem.common.telemetry import MetricWriters, MlflowRun, MlflowWriter, TensorBoardWriter, WandbRun, WandbWriter
from tandem.coordinator.algorithms.rewards import has_spread
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.page.beside import PageProcess, page_socket
from tandem.coordinator.run.batches import Batches
from tandem.coordinator.run.checkpoints import CheckpointFolder
from tandem.coordinator.run.ending import recorded
from tandem.coordinator.run.fork_server import ForkServer
from tandem.coordinator.run.journal import Journal, read_journal
from tandem.coordinator.run.journal_file import CONFIG_NAME, JOURNAL_NAME, RESOLVED_FROM, new_run_id, refuse_journal
from tandem.coordinator.run.kept_samples import KeptSamples, limits_of
from tandem.coordinator.run.launch import Admits, LocalProcesses
from tandem.coordinator.run.loop import Loop
from tandem.coordinator.run.members import Listening, Pulse, Registry, new_run_keys
from tandem.coordinator.run.model_folder import check_model
from tandem.coordinator.run.onlookers import Onlookers
from tandem.coordinator.run.prerequisite import Mode, Ready, has_begun, how_to_begin, make_model, set_aside
from tandem.coordinator.run.progress import Progress
from tandem.coordinator.run.recorder import Recorder
from tandem.coordinator.run.replies import Limits, Replies
from tandem.coordinator.run.resuming import FROM_THE_MODEL, Resuming, Start, refuse_changes
from tandem.coordinator.run.sample_folder import KeptLimits, SampleFolder
from tandem.coordinator.run.spec import KINDS, expected_processes, launched_processes, run_spec
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import Finish, Outcome
from tandem.coordinator.scheduler.kept import KeptGroup, Place


def run(
    ready: Ready,
    mode: Mode,
    say: Callable[[str], None],
    fork_server: ForkServer,
    from_step: int | None = None,
    reward_server: RewardServer | None = None,
) -> Finish:
    """Run a configuration, and before it the run that makes its model, if that has not been done yet.

    `fork_server` forks the services. `from_step` names the step to resume after, where it is not the newest with a
    checkpoint. `reward_server` is where a Python program scores samples, if one does.

    Raises:
        TandemError: something is wrong that is known before any process starts.

    """
    config, algorithm = ready.config, ready.algorithm
    if ready.prerequisite is not None:
        finish = _run_prerequisite(ready.prerequisite, config.policy.model_name, mode, say, fork_server, reward_server)
        if finish is not None and finish.outcome != "finished":
            return finish
        if not Path(config.policy.model_name).exists():
            raise ModelError(
                f"policy.model_name: the prerequisite {ready.prerequisite.source} has ended, but "
                f"{config.policy.model_name!r} does not exist"
            )
        if mode == "resume" and not has_begun(config):
            mode = "new"  # what was interrupted was the prerequisite
        for notice in check_model(config):  # it was not there before
            say(f"note: {notice}")
    make_model(config, mode, say)
    for notice in ready.notices:
        say(notice)
    folder = Path(config.logger.log_dir)
    keys = read_run_keys(folder) or new_run_keys()  # before its folder is set aside: services may wait with them
    with contextlib.ExitStack() as stack:
        listening = Listening(
            config.cluster.address, keys, key_file(folder)
        )  # before the journal: without it a run has not begun
        stack.callback(listening.hub.close)
        listener = page_socket(config.logger.page)
        if listener is not None:
            stack.callback(listener.close)
        run_id = _name_run(config, mode, say)
        if mode == "restart":  # the model that it makes may lie within the folder that was just set aside
            make_model(config, mode, say)
        writers = MetricWriters()
        stack.callback(writers.close)
        if config.logger.wandb_enabled:  # likewise: it may not be installed, and the service may refuse
            writers.add(_wandb(config, run_id))
        if config.logger.mlflow_enabled:
            writers.add(_mlflow(config, run_id))
        journal = _open_journal(ready, mode, run_id)
        stack.callback(journal.close)
        write_run_keys(folder, keys)
        page = None
        if listener is not None:
            page = PageProcess(journal.folder, listener)
            stack.callback(page.close)
            say(f"page: {page.url}")
        return recorded(
            journal,
            lambda: _run(
                config, algorithm, journal, listening, writers, say, fork_server, from_step, reward_server, page
            ),
        )


def _run_prerequisite(
    ready: Ready,
    model: str,
    mode: Mode,
    say: Callable[[str], None],
    fork_server: ForkServer,
    reward_server: RewardServer | None,
) -> Finish | None:
    """Bring the prerequisite run to its end, from wherever it stands; None if it had ended already."""
    how = how_to_begin(ready, mode == "restart", say)
    if how is None:
        return None
    say(f"prerequisite {ready.source}: making {model}")
    try:
        return run(ready, how, say, fork_server, reward_server=reward_server)
    except DamagedCheckpoint as error:
        error.config_file = error.config_file or ready.source
        raise


def _name_run(config: Config, mode: Mode, say: Callable[[str], None]) -> str:
    """Return the name of the run to continue, or a new one for a folder in which there is no run, or none any more."""
    folder = Path(config.logger.log_dir)
    if mode == "resume":
        with read_journal(folder) as journal:
            return journal.run_id
    if mode == "restart" and (folder / JOURNAL_NAME).exists():
        checkpoints = Path(config.checkpointing.checkpoint_dir)
        _refuse_to_move_the_model(config, folder, checkpoints)
        _bring_back_data(config, folder, set_aside(folder, say))
        if checkpoints.exists():  # it may lie within the run folder, which has just moved
            set_aside(checkpoints, say)
    refuse_journal(folder)
    return new_run_id()


def _wandb(config: Config, run_id: str) -> WandbWriter:
    settings = config.logger.wandb
    run = WandbRun(project=settings.project, name=settings.name, run_id=run_id, config=to_plain(config))
    return WandbWriter(Path(config.logger.log_dir), run)


def _mlflow(config: Config, run_id: str) -> MlflowWriter:
    settings = config.logger.mlflow
    run = MlflowRun(
        tracking_uri=settings.tracking_uri,
        experiment=settings.experiment_name,
        name=settings.run_name,
        run_id=run_id,
        config=to_plain(config),
    )
    return MlflowWriter(Path(config.logger.log_dir), run)


def _open_journal(ready: Ready, mode: Mode, run_id: str) -> Journal:
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
    (folder / CONFIG_NAME).write_text(f"{RESOLVED_FROM}{Path(ready.source).absolute()}\n{dump_yaml(config)}")
    (folder / "logs").mkdir(exist_ok=True)
    return journal


def _bring_back_data(config: Config, folder: Path, aside: Path) -> None:
    """Copy the data that a run is to have from the folder that was set aside, where it lay within that."""
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


def _run(
    config: Config,
    algorithm: RunningAlgorithm,
    journal: Journal,
    listening: Listening,
    writers: MetricWriters,
    say: Callable[[str], None],
    fork_server: ForkServer,
    from_step: int | None,
    reward_server: RewardServer | None,
    page: PageProcess | None,
) -> Finish:
    checkpoints = CheckpointFolder(
        Path(config.checkpointing.checkpoint_dir),
        keep_top_k=config.checkpointing.keep_top_k,
        higher_is_better=config.checkpointing.higher_is_better,
        run_id=journal.run_id,
    )
    if config.checkpointing.enabled:
        checkpoints.prepare()
    origin = _origin(config)
    resuming = Resuming(config, journal, checkpoints, say, origin)
    if config.evaluates and journal.last_step() is not None:
        say(f"nothing to do: {journal.folder} has been evaluated, or trained on")
        return Finish(outcome="finished")
    limits = limits_of(config, journal)
    start = resuming.start(from_step)
    if start != origin:
        say(f"resuming at step {start.first_step} from {start.resume_from}")
    if start.first_step > algorithm.num_steps and not config.evaluates:
        say(f"nothing to do: {journal.folder} has all of its {algorithm.num_steps} steps")
        return Finish(outcome="finished")
    samples = SampleFolder(config.logger, [f"trainer-{index}" for index in scoring_trainers(config)])
    kept = _put_aside(config, samples, start.first_step, limits, journal.run_id, algorithm, say)
    spec = run_spec(
        config,
        first_step=start.first_step,
        last_step=algorithm.num_steps,
        num_validation=algorithm.num_validation,
        resume_from=start.resume_from,
        checkpoint_folder=checkpoints.temporary_pattern,
        samples_folder=str(samples.path),
        reward_server=reward_server,
    )
    with contextlib.ExitStack() as stack:
        credentials = Admits(listening.hub.at, listening.admitted)
        processes = LocalProcesses(credentials, Path(config.logger.log_dir) / "logs", fork_server)
        pulse = Pulse(interval_s=config.cluster.heartbeat_interval_s, timeout_s=config.cluster.heartbeat_timeout_s)
        replies = Replies(Limits.of(config))
        registry = Registry(
            listening, expected_processes(config), config_to_json(config), journal.run_id, pulse, replies
        )
        sources = _serve_record(algorithm, registry, journal.run_id, start.first_step, stack)
        history = journal.steps()
        progress = Progress(config, spec, history)
        if config.logger.tensorboard_enabled:
            folder = journal.folder / config.logger.tensorboard.log_dir
            writers.add(TensorBoardWriter(folder, start.first_step))
        stack.callback(progress.close)
        onlookers = Onlookers(config, journal.folder, range(spec.first_step, spec.last_step + 1), history, page)
        recorder = Recorder(config, journal, checkpoints, samples, writers, progress, onlookers)
        say(_who_runs_where(config, listening))
        scheduler = Scheduler(spec, time.monotonic(), is_informative=partial(has_spread, config.grpo), kept=kept)
        loop = Loop(scheduler, registry, processes, algorithm, Batches(config, algorithm, sources), recorder)
        outcome: Outcome = "failed"
        error: Exception | None = None
        try:
            _launch(config, processes, registry)
            finish = loop.run()
            outcome, error = finish.outcome, finish.error
            damage = resuming.damage_in(finish, start)
        except DamagedCheckpoint as damaged:
            error = damage = damaged
        finally:
            onlookers.end(outcome, str(error or ""))
            loop.stop(f"the run {outcome}" if outcome == "finished" else f"the run was {outcome}")
        if damage is not None:
            raise resuming.with_way_out(damage, start.first_step - 1)
        return finish


def _put_aside(
    config: Config,
    samples: SampleFolder,
    first_step: int,
    limits: KeptLimits,
    run_id: str,
    algorithm: RunningAlgorithm,
    say: Callable[[str], None],
) -> dict[Place, KeptGroup]:
    """Take what is recorded of the steps that are to come out of the record; return what need not be generated."""
    try:
        samples.put_aside_after(first_step - 1, limits)
    except OSError as error:
        say(f"what had been generated is generated again: cannot use {samples.path}: {error.strerror}")
        return {}
    if config.logger.samples == "off" or not config.generates:
        return {}
    return KeptSamples(config, samples, run_id, say).find(algorithm, first_step)


def _origin(config: Config) -> Start:
    """Return where a run begins that has no checkpoint yet."""
    if config.replay is None:
        return FROM_THE_MODEL
    from tandem.coordinator.run.replay import origin_of

    return origin_of(config)


def _serve_record(
    algorithm: RunningAlgorithm, registry: Registry, run_id: str, first_step: int, stack: contextlib.ExitStack
) -> dict[str, Listener]:
    """Have trainers fetch recorded samples where the algorithm is to train on these; return where, by source."""
    from tandem.coordinator.algorithms.recorded import RecordedAlgorithm

    if not isinstance(algorithm, RecordedAlgorithm):
        return {}
    stack.callback(algorithm.close)
    return algorithm.serve(registry.address, run_id, first_step, registry.trainers)


def _launch(config: Config, processes: LocalProcesses, registry: Registry) -> None:
    """Start what the coordinator launches itself."""
    for kind, count in launched_processes(config).items():
        for index in range(count):
            registry.reserve(processes.start(kind, index))


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
