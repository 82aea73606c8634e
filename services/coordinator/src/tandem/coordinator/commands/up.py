"""``coordinator up``: run a configuration."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common import kept_inputs
from tandem.common.errors import FAILED, OK, ConfigError, DamagedCheckpoint, RunFolderError, TandemError, is_shortage
from tandem.common.process_lifetime import die_with
from tandem.config import load_config
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
    up.add_argument("--began-in", type=Path, help=argparse.SUPPRESS)
    up.add_argument("--supervised-by", type=int, default=0, help=argparse.SUPPRESS)
    up.add_argument("--supervision-fd", type=int, help=argparse.SUPPRESS)
    up.set_defaults(carry_out=_up)


def _up(arguments: argparse.Namespace) -> int:
    if arguments.supervised_by:
        die_with(arguments.supervised_by)
    mode: Mode = "resume" if arguments.resume else "restart" if arguments.restart else "new"
    began = None if arguments.began_in is None else _began_with(arguments.began_in)
    config = load_configuration(load_config, arguments, mode) if began is None else began
    if mode == "resume" and began is None:
        _mend_journal(Path(config.logger.log_dir), config)
    if arguments.supervise:
        words = [arguments.config, *arguments.overrides, f"--unfinished-code={arguments.unfinished_code}"]
        options = ["--resume"] * arguments.resume + ["--restart"] * arguments.restart
        options += [] if arguments.from_step is None else ["--from", str(arguments.from_step)]
        return Supervisor(words, Path(config.logger.log_dir), config.cluster).run(options)
    supervise = [] if arguments.supervision_fd is None else ["--supervise"]
    words = ["coordinator", "up", arguments.config, *arguments.overrides, "--resume", *supervise]
    supervision = None
    if arguments.supervision_fd is not None:
        from tandem.launch.supervision import SupervisorConnection

        supervision = SupervisorConnection(arguments.supervision_fd, arguments.supervised_by, config.cluster)
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


def _began_with(run: Path) -> Config | None:
    """Return the configuration of the run that this coordinator goes on with, whatever its file says by now.

    Files that the run reads again are those that it began with, too. Its prerequisite is left out once that has made
    the models. None if the journal cannot be read.
    """
    import msgspec

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
    inputs = run.absolute() / kept_inputs.FOLDER
    if inputs.is_dir():
        if path := kept_inputs.find_changed_data(inputs):
            raise ConfigError(
                f"{path} has changed since the run began, and is too large to be kept with it (beyond "
                f"{kept_inputs.MOST_BYTES >> 30} GiB in all): put it back, or continue with what it is by --resume"
            )
        os.environ[kept_inputs.VARIABLE] = str(inputs)
    return config if list_missing_models(config) else msgspec.structs.replace(config, prerequisite=None)


def _mend_journal(run: Path, config: Config) -> None:
    """Rebuild the journal of a run that is to be resumed, if it is damaged, and say so."""
    from tandem.observe.run_folder.rebuilding import damage_of, rebuild_journal

    if (damage := damage_of(run)) is not None:
        print(f"{damage}: {rebuild_journal(run, config)}", flush=True)
