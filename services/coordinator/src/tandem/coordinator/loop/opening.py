"""The invocation of a run, and what it holds to its end: socket, run folder, journal, observers.

An invocation is the configuration to run, the mode, and the resources of its caller.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import msgspec

from tandem.common import kept_inputs
from tandem.common.errors import ConfigError, RunFolderError
from tandem.common.keys import RunKeys, find_key_file, read_run_keys, write_run_keys
from tandem.common.messages import Listener, RewardServer
from tandem.config import Config, config_to_json, dump_yaml, make_plain
from tandem.config.models.vision_families import family_of
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.observers.watching import PageObserver, TraceObserver, serve_prometheus
from tandem.coordinator.preparing.prerequisite import CheckedConfig
from tandem.coordinator.preparing.resuming import refuse_changes
from tandem.launch.admission import ListeningSocket, new_run_keys
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.known_processes import ProcessesSnapshot, find_earlier
from tandem.launch.page_process import PageProcess, open_page_socket
from tandem.launch.preparing.beginning import Mode, Say, set_aside
from tandem.launch.preparing.hub_data import list_data_files, list_prompt_files
from tandem.launch.preparing.needed_models import make_model
from tandem.launch.supervision import SupervisorConnection
from tandem.observe.exporters.telemetry import MetricWriters, MlflowRun, MlflowWriter, WandbRun, WandbWriter
from tandem.observe.run_folder import journal_file
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.images.rows import image_folder

if TYPE_CHECKING:
    from tandem.coordinator.loop.loop import CoordinatorLoop
    from tandem.coordinator.observers.checkpoint_evaluations import CheckpointEvaluations
    from tandem.coordinator.scheduler.spec import RunSpec
    from tandem.observe.exporters.prometheus import MetricsExporter  # needs an extra

_ANY_PORT = ":*"
_LONGEST_PROGRAM = 1 << 20
"""Bytes from which a file that an agent's command names is a binary, and no program of the user's."""


class FrontEnd(Protocol):
    """A driver of a run in the place of its algorithm."""

    def spec(self, spec: RunSpec) -> RunSpec:
        """Return the run spec that it needs."""
        ...

    def display(self) -> Observer:
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

    listening: ListeningSocket
    earlier: ProcessesSnapshot | None
    """Processes of a lost coordinator, if the run goes on after that."""
    journal: Journal
    writers: MetricWriters
    exporter: MetricsExporter | None
    """Exporter for Prometheus, if that is on."""
    traces: TraceObserver | None
    images_at: Listener | None
    """Where processes that do not see the run's folder ask for its images; None if the policy does not see."""
    watching: tuple[Observer, ...]
    """Observers that need nothing of the attempt."""
    evaluations: CheckpointEvaluations | None
    """Evaluation during training, if that is on."""


def open_run(invocation: CommandInvocation, stack: contextlib.ExitStack) -> OpenedResources:
    """Open all that a run needs on this host; `stack` closes it. With ``--restart``, set aside what was there."""
    config, mode, say = invocation.ready.config, invocation.mode, invocation.say
    folder = Path(config.logger.log_dir)
    keys = read_run_keys(folder) or new_run_keys()  # before the folder is set aside: services may wait with them
    # Before the journal: a run that cannot listen has not begun.
    earlier = None
    if mode == "resume":
        earlier = find_earlier(config, has_rewards=invocation.reward_server is not None)
    listening = _listen(config.cluster.address, keys, folder, earlier)
    if earlier is not None and listening.hub.address != earlier.address:
        earlier = earlier.release_names(earlier.staying)  # they look at another address
    stack.callback(listening.hub.close)
    exporter = serve_prometheus(config.logger, stack)
    if exporter is not None:
        say(f"metrics: {exporter.url}")
    listener = open_page_socket(config.logger.page)
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
    if invocation.ready.algorithm.images is not None:
        invocation.ready.algorithm.images.keep(image_folder(config).folder)
    images_at = None if family_of(config.policy) is None else _serve_images(config, run_id, listening, stack)
    watching: list[Observer] = []
    if listener is not None:
        page = PageProcess(journal.folder, listener)
        stack.callback(page.close)
        say(f"page: {page.url}")
        watching.append(PageObserver(page))
    if exporter is not None:
        exporter.name_run(run_id)
    traces = None
    if config.logger.opentelemetry.endpoint is not None:
        traces = TraceObserver(config.logger.opentelemetry.endpoint, run_id)
        stack.callback(traces.end, say)
    evaluations = _begin_evaluations(invocation, journal, stack)
    return OpenedResources(
        listening=listening,
        earlier=earlier,
        journal=journal,
        writers=writers,
        exporter=exporter,
        traces=traces,
        images_at=images_at,
        watching=(*watching, *([] if evaluations is None else [evaluations])),
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
    of the runs that come after it, too, and they go on with these.
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
    modules = {name: path for each in reversed(kept_runs) for name, path in each.modules.items()}
    programs = [path for each in kept_runs for path in _agent_programs(each.config)]
    data = []
    if supervision is None:
        os.environ.pop(kept_inputs.VARIABLE, None)
    else:
        for each in kept_runs:
            data += [*list_prompt_files(each.config), *(path for _, path in list_data_files(each.config))]
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


def _listen(address: str, keys: RunKeys, folder: Path, earlier: ProcessesSnapshot | None) -> ListeningSocket:
    """Listen; if any port will do, at the address of an earlier coordinator, where its processes look for one."""
    earlier_keys = () if earlier is None else earlier.keys
    if earlier is not None and address.endswith(_ANY_PORT):
        with contextlib.suppress(ConfigError):  # another program has it now
            return ListeningSocket(earlier.address, keys, find_key_file(folder), earlier_keys)
    return ListeningSocket(address, keys, find_key_file(folder), earlier_keys)


def _serve_images(config: Config, run_id: str, listening: ListeningSocket, stack: contextlib.ExitStack) -> Listener:
    """Give the run's images to its processes that do not see its folder; `stack` ends it."""
    from tandem.samples.images.fetching import ImageServer

    host = str(urlsplit(listening.hub.address).hostname)
    server = ImageServer(host, run_id, image_folder(config), listening.admitted)
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
