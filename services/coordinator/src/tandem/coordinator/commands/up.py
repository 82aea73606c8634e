"""``coordinator up``: run a configuration."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.common import kept_inputs, signals
from tandem.common.errors import FAILED, OK, ConfigError, DamagedCheckpoint, RunFolderError, TandemError, is_shortage
from tandem.common.process_lifetime import die_with
from tandem.config import config_from_json, config_to_json, load_config
from tandem.coordinator.commands.arguments import Commands, add_config, load_configuration
from tandem.coordinator.commands.running import run_to_end, say_how_to_continue
from tandem.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.launch.preparing.beginning import Mode


def add(commands: Commands) -> None:
    """Declare the command."""
    up = commands.add_parser("up", help="run a configuration: launch, train, tear down")
    add_config(up)
    modes = up.add_mutually_exclusive_group()
    modes.add_argument("--resume", action="store_true", help="continue the run that is in the run folder")
    modes.add_argument(
        "--restart", action="store_true", help="set an earlier run in the run folder aside and begin anew"
    )
    up.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="with --resume: go on from the checkpoint of this step, and do later ones again",
    )
    up.add_argument(
        "--supervise",
        action="store_true",
        help="start the coordinator again when it is killed, as often as cluster.max_replacements says",
    )
    up.add_argument(
        "--unfinished-code",
        type=int,
        default=OK,
        metavar="CODE",
        help="exit code where checkpointing.checkpoint_must_save_by ends the run before its last step (default: 0)",
    )
    up.add_argument("--began-in", type=Path, action="append", default=[], help=argparse.SUPPRESS)
    up.add_argument("--supervised-by", type=int, default=0, help=argparse.SUPPRESS)
    up.add_argument("--supervision-fd", type=int, help=argparse.SUPPRESS)
    up.add_argument("--configs-fd", type=int, help=argparse.SUPPRESS)
    up.set_defaults(carry_out=_up)


def _up(arguments: argparse.Namespace) -> int:
    signals.interrupt_when_asked()
    if arguments.supervised_by:
        die_with(arguments.supervised_by)
    mode: Mode = "resume" if arguments.resume else "restart" if arguments.restart else "new"
    supervised = None
    if arguments.configs_fd is not None:
        supervised = SupervisedConfigs(arguments.configs_fd, arguments.began_in)
    load = load_config if supervised is None else supervised.load
    config = load_configuration(load, arguments, mode)
    if mode == "resume" and supervised is None:
        _mend_journal(Path(config.logger.log_dir), config)
    if arguments.supervise:
        words = [arguments.config, *arguments.overrides, f"--unfinished-code={arguments.unfinished_code}"]
        options = ["--resume"] * arguments.resume + ["--restart"] * arguments.restart
        options += [] if arguments.from_step is None else ["--from", str(arguments.from_step)]
        configs = pack_configs(arguments.config, config)
        return Supervisor(words, Path(config.logger.log_dir), config.cluster, configs=configs).run(options)
    supervise = [] if arguments.supervision_fd is None else ["--supervise"]
    words = ["coordinator", "up", arguments.config, *arguments.overrides, "--resume", *supervise]
    supervision = None
    if arguments.supervision_fd is not None:
        from tandem.launch.supervision import SupervisorConnection

        supervision = SupervisorConnection(arguments.supervision_fd, arguments.supervised_by, config.cluster, load)
    try:
        return run_to_end(
            arguments.config,
            config,
            mode,
            arguments.from_step,
            words,
            supervision=supervision,
            unfinished_code=arguments.unfinished_code,
        )
    except DamagedCheckpoint as error:
        if supervision is not None and error.whole_step is not None and not error.config_file:
            supervision.go_back(error.whole_step)
        raise
    except (TandemError, OSError) as error:
        if is_shortage(error):  # whatever its kind: the next coordinator may have what this one lacked
            print(f"error: {error}", file=sys.stderr)
            if supervision is None:
                say_how_to_continue(error, config, words)
            return FAILED
        if supervision is not None and isinstance(error, TandemError):
            supervision.fail(error)
        raise


def pack_configs(path: str, config: Config) -> bytes:
    """Return a configuration, read from `path`, and those of its prerequisites, for `SupervisedConfigs`.

    One that cannot be read is left out: it may not be needed, and the error is said where it is.
    """
    configs = {path: config_to_json(config).decode()}
    while (path := config.prerequisite or "") and path not in configs:
        try:
            config = load_config(path)
        except TandemError:
            break
        configs[path] = config_to_json(config).decode()
    return msgspec.json.encode(configs)


class SupervisedConfigs:
    """Configurations that a supervised run continues with, whatever their files say by now.

    They are those that the supervisor has read, until a run has begun; then the run's folder has its own. Files that
    its runs read are those that it began with, too.
    """

    def __init__(self, descriptor: int, begun: Sequence[Path]) -> None:
        """Read the supervisor's from a descriptor, which is closed. `begun` are the folders of runs that have begun."""
        with open(descriptor, "rb") as file:
            self._configs = msgspec.json.decode(file.read(), type=dict[str, str])
        self._begun = begun
        for run in begun[-1:]:  # it has the files of those that come after it, too
            _use_inputs(run)

    def load(self, path: str, overrides: Sequence[str] = ()) -> Config:
        """Return the configuration that was read from a file. Raises `ConfigError`."""
        packed = self._configs.get(path)
        config = load_config(path, overrides) if packed is None else config_from_json(packed.encode())
        begun = Path(config.logger.log_dir)
        return (_began_with(begun) or config) if begun in self._begun else config


def _began_with(run: Path) -> Config | None:
    """Return the configuration of a run that has begun; None if the journal cannot be read.

    Its prerequisite is left out once that has made the models.
    """
    from tandem.launch.preparing.needed_models import list_missing_models
    from tandem.observe.run_folder.checkpoints import config_of
    from tandem.observe.run_folder.journal import read_journal
    from tandem.observe.run_folder.journal_file import CONFIG_NAME

    with contextlib.suppress(ConfigError):  # the file may be damaged, too
        _mend_journal(run, load_config(str(run / CONFIG_NAME)))
    try:
        with read_journal(run) as journal:
            config = config_of(journal)
    except RunFolderError:
        return None
    return config if list_missing_models(config) else msgspec.structs.replace(config, prerequisite=None)


def _use_inputs(run: Path) -> None:
    """Have this process, and those that it starts, read the files that a run's folder keeps.

    Raises:
        ConfigError: one that is too large to be kept has changed.

    """
    inputs = run.absolute() / kept_inputs.FOLDER
    if not inputs.is_dir():
        return
    if path := kept_inputs.find_changed_data(inputs):
        raise ConfigError(
            f"{path} has changed since the run began, and is too large to be kept with it (beyond "
            f"{kept_inputs.MOST_BYTES >> 30} GiB in all): put it back, or continue with what it is by --resume"
        )
    os.environ[kept_inputs.VARIABLE] = str(inputs)


def _mend_journal(run: Path, config: Config) -> None:
    """Rebuild the journal of a run that is to be resumed, if it is damaged, and say so."""
    from tandem.observe.run_folder.rebuilding import damage_of, rebuild_journal

    if (damage := damage_of(run)) is not None:
        print(f"{damage}: {rebuild_journal(run, config)}", flush=True)
