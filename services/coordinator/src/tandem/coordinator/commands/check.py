"""``coordinator check``: find what is wrong with a run before it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tandem.common.errors import OK, ConfigError, TandemError
from tandem.config import Config, dump_yaml, load_evaluation, notices, valid_part
from tandem.config.models import hub
from tandem.coordinator.commands.arguments import Commands, add_config, count, load_configuration

if TYPE_CHECKING:
    from rich.text import Text

    from tandem.coordinator.algorithms.running import RunningAlgorithm
    from tandem.coordinator.preparing.preflight import MakeAlgorithm
    from tandem.coordinator.preparing.prerequisite import CheckedConfig
    from tandem.samples.tokenizer import Tokenizer

_NUM_SHOWN = 3
"""Rows that ``--show`` shows unless it says how many."""


def add(commands: Commands) -> None:
    """Declare the command."""
    check = commands.add_parser("check", help="find what is wrong with a run, and start nothing")
    add_config(check)
    check.add_argument("--resolved", action="store_true", help="print the whole configuration, every default filled in")
    check.add_argument(
        "--show",
        type=count,
        nargs="?",
        const=_NUM_SHOWN,
        metavar="N",
        help="show the first N rows (default: 3) token by token as the model will have them, and what is learned",
    )
    check.set_defaults(carry_out=_check)


def _check(arguments: argparse.Namespace) -> int:
    try:
        config = load_configuration(load_evaluation, arguments, "new")  # or a run: the file says which
    except ConfigError:
        if (part := valid_part(arguments.config, arguments.overrides)) is not None:
            _list_ignored(part.config)
        raise
    if arguments.resolved:
        print(dump_yaml(config), end="")
    for notice in notices(config):
        if notice not in config.ignored:
            print(f"note: {notice}", file=sys.stderr)
    from tandem.coordinator.algorithms import make_algorithm
    from tandem.coordinator.preparing.preflight import preflight

    make: MakeAlgorithm = make_algorithm
    show: Callable[[], None] | None = None
    if arguments.show is not None:
        make, show = _show(arguments.show)
    try:
        ready = preflight(arguments.config, config, "new", make=make)
    except TandemError:
        _list_ignored(config)
        raise
    for note in [*ready.notices, *_earlier(ready)]:
        print(f"note: {note.removeprefix('note: ')}", file=sys.stderr)
    if show is not None:
        show()
        for notice in _print_rewards(ready, arguments.show):
            print(f"note: {notice}", file=sys.stderr)
    print(_summary(ready))
    _list_ignored(config)
    return OK


def _show(num_rows: int) -> tuple[MakeAlgorithm, Callable[[], None]]:
    """Return how to make an algorithm whose first rows are to be shown, and the function that prints them."""
    from rich.console import Console

    from tandem.coordinator.algorithms import make_algorithm
    from tandem.coordinator.preparing.shown_rows import print_lines, rows_in_text

    console = Console(highlight=False)
    lines: list[Text] = []

    def make(config: Config, tokenizer: Tokenizer) -> RunningAlgorithm:
        algorithm = make_algorithm(config, tokenizer)
        # The folder of a tokenizer that is yet to be made exists only now.
        lines.extend(rows_in_text(config, algorithm, tokenizer, num_rows, is_coloured=console.is_terminal))
        return algorithm

    return make, lambda: print_lines(lines, console)


def _print_rewards(ready: CheckedConfig, num_rows: int) -> tuple[str, ...]:
    """Print the rewards of the first reference answers, if the run has any; return what is wrong with them.

    Raises `ConfigError` if an environment cannot be made.
    """
    from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
    from tandem.coordinator.preparing.reference_rewards import reference_rewards
    from tandem.coordinator.preparing.shown_rows import draw_first_prompts

    if not isinstance(ready.algorithm, GrpoAlgorithm):
        return ()
    rewards = reference_rewards(ready.config, draw_first_prompts(ready.config, ready.algorithm, num_rows))
    if rewards.lines:
        print("\n".join(["rewards of the reference answers:", *(f"  {line}" for line in rewards.lines)]), end="\n\n")
    if rewards.problems:
        raise ConfigError(*rewards.problems)
    return rewards.notices


def _list_ignored(config: Config) -> None:
    """Print the keys that are ignored because only a newer NeMo-RL knows them."""
    if config.ignored:
        print("\n".join(["ignored:", *(f"  {line}" for line in config.ignored)]), flush=True)


def _earlier(ready: CheckedConfig) -> Iterator[str]:
    """Yield notes about what exists of a run, and about the one before it until that is done."""
    from tandem.coordinator.preparing.prerequisite import differences, is_done
    from tandem.launch.preparing.beginning import has_begun
    from tandem.launch.preparing.needed_models import find_model_differences

    config = ready.config
    if changed := find_model_differences(config):
        yield f"policy.new_model differs from {config.policy.model_name} in {changed}; --restart makes it again"
    if has_begun(config):
        yield f"{config.logger.log_dir} already holds a run: continue it with --resume, or begin again with --restart"
    if (before := ready.prerequisite) is None:
        return
    if changed := differences(before):
        yield f"prerequisite {before.source} differs from its run in {changed}; --restart makes it again"
    if not is_done(before):
        yield from (f"prerequisite {before.source}: {notice.removeprefix('note: ')}" for notice in before.notices)


def _summary(ready: CheckedConfig) -> str:
    """Describe a run on one line."""
    from tandem.launch.nodes import expected_processes

    config, first = ready.config, "" if ready.prerequisite is None else f", after {ready.prerequisite.source}"
    counts = expected_processes(config).items()
    processes = ", ".join(f"{count} {kind} process{'es' * (count > 1)}" for kind, count in counts)
    does = f"{ready.algorithm.num_steps} steps"
    if config.evaluates:
        num_samples = config.rollout_section.num_val_generations_per_prompt
        does = f"no step, but a validation on {ready.algorithm.num_validation} problems x {num_samples}"
    return f"OK: {config.algorithm} on {hub.show_reference(config.policy.model_name)}, {does}, {processes}{first}"
