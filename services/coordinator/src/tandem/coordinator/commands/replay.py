"""``coordinator replay``: train again on what a run recorded, or by the calls of its clients."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import ConfigError
from tandem.coordinator.commands.arguments import Commands
from tandem.coordinator.commands.running import run_to_end


def add(commands: Commands) -> None:
    """Declare the command."""
    replay = commands.add_parser("replay", help="train again on what a run recorded, with no engine")
    replay.add_argument("run", type=Path, metavar="RUN", help="run folder; with --resume that of the replay")
    replay.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings that replace the run's")
    replay.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="begin after this step, from the run's checkpoint (default: as early as samples are recorded)",
    )
    replay.add_argument(
        "--to", dest="to_step", type=int, metavar="STEP", help="end with this step (default: the newest recorded)"
    )
    replay.add_argument(
        "--without",
        type=Path,
        metavar="FILE",
        help='leave samples out: JSON lines such as {"step": 3, "group": 0, "sample": 5}',
    )
    replay.add_argument("--resume", action="store_true", help="continue the replay whose run folder RUN is")
    replay.set_defaults(carry_out=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.preparing.replay import (
        begin_replay,
        continue_replay,
        describe_start,
        is_driven,
        source_of,
    )

    run: Path = arguments.run
    if is_driven(run):
        return _replay_calls(arguments)
    if arguments.resume:
        config = continue_replay(run, arguments.overrides)
        words = ["coordinator", "replay", str(run), *arguments.overrides, "--resume"]
        return run_to_end(source_of(run), config, "resume", arguments.from_step, words)
    config = begin_replay(run, arguments.from_step, arguments.to_step, arguments.overrides, arguments.without).config
    for line in describe_start(config):
        print(line, flush=True)
    words = ["coordinator", "replay", config.logger.log_dir, "--resume"]
    return run_to_end(source_of(run), config, "new", None, words)


def _replay_calls(arguments: argparse.Namespace) -> int:
    """Replay a run that clients have driven."""
    from tandem.coordinator.tinker.replay import replay_calls

    options = {"--from": arguments.from_step, "--to": arguments.to_step, "--resume": arguments.resume or None}
    options["--without"] = arguments.without
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{option}: {arguments.run} was driven by clients, and their calls are replayed as a whole"
            )
    return replay_calls(arguments.run, arguments.overrides)
