"""``coordinator samples``: show the samples or the rows that a run was trained on or validated on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands, add_run

if TYPE_CHECKING:
    from tandem.config import Config

_LIMIT = 10
_OF_SAMPLES = {"worst": False, "best": False, "group": None, "contains": "", "validation": False, "tokens": False}
"""Options that choose among samples, and mean nothing of rows, with their defaults."""


def add(commands: Commands) -> None:
    """Declare the command."""
    samples = commands.add_parser("samples", help="show samples or rows of a run: prompts, responses, rewards")
    add_run(samples)
    samples.add_argument("--step", type=int, metavar="N", help="samples of this step (default: the newest recorded)")
    which = samples.add_mutually_exclusive_group()
    which.add_argument("--worst", action="store_true", help="those with the lowest rewards first")
    which.add_argument("--best", action="store_true", help="those with the highest rewards first")
    samples.add_argument("--group", type=int, metavar="G", help="only this group: the samples of one prompt")
    samples.add_argument("--contains", default="", metavar="TEXT", help="only those that have this text in them")
    samples.add_argument("--limit", type=_positive, default=_LIMIT, metavar="N", help=f"at most N (default: {_LIMIT})")
    samples.add_argument("--validation", action="store_true", help="validation samples instead of training ones")
    samples.add_argument(
        "--tokens", action="store_true", help="also the tokens, and how far engine and trainer disagree on each"
    )
    samples.set_defaults(carry_out=_samples)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _samples(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.common.errors import RunFolderError, SamplesError
    from tandem.observe.run_folder.checkpoints import config_of, tokenizer_of
    from tandem.observe.run_folder.journal import read_journal
    from tandem.observe.samples import SampleQuery, search, trainer_logprobs
    from tandem.observe.samples_text import print_samples
    from tandem.samples.media import read_texts_in

    run: Path = arguments.run
    with read_journal(run) as journal:
        run_id, config = journal.run_id, config_of(journal)
    if config.replay is not None:
        raise RunFolderError(f"{run} is a replay, of samples of {config.replay.run}: look at those")
    if not config.declaration.rolls_out:
        return _rows(arguments, config)
    query = SampleQuery(
        purpose="validate" if arguments.validation else "train",
        step=arguments.step,
        group=arguments.group,
        contains=arguments.contains,
        sort="reward" if arguments.worst or arguments.best else "group",
        descending=arguments.best,
        limit=arguments.limit,
    )
    selection = search(run, query, run_id)
    if arguments.group is not None and arguments.group not in selection.groups:
        raise SamplesError(f"step {selection.step} has no group {arguments.group}, only {_range(selection.groups)}")
    tokenizer = tokenizer_of(run, config)
    if tokenizer is None:
        name = config.policy.tokenizer.name
        lacking = "responses are shown without special tokens, and several turns as one text"
        print(f"note: the tokenizer is neither in {name} nor in a checkpoint: {lacking}", file=sys.stderr)
    logprobs = None
    if arguments.tokens:
        logprobs = trainer_logprobs(run, selection.step, run_id) if query.purpose == "train" else {}
    texts = read_texts_in(run, tokenizer)
    print_samples(selection, Console(), query.purpose, tokenizer, logprobs, texts)
    return OK


def _rows(arguments: argparse.Namespace, config: Config) -> int:
    """Show the rows of a run that generates no samples: those that a step trained on, read from its data again."""
    from rich.console import Console

    from tandem.common.errors import RunFolderError
    from tandem.coordinator.preparing.shown_rows import RecordedRows, print_lines, sequences_in_text

    run: Path = arguments.run
    options = [name for name in _OF_SAMPLES if getattr(arguments, name) != _OF_SAMPLES[name]]
    if options:
        raise RunFolderError(
            f"{run} is a run of {config.algorithm}, which generates no samples: its rows are chosen by --step and "
            f"--limit, not --{options[0]}"
        )
    recorded = RecordedRows(run)
    step = recorded.check_step(arguments.step)
    for note in recorded.notes:
        print(f"note: {note}", file=sys.stderr)
    console = Console(highlight=False)
    num_rows = min(arguments.limit, recorded.size)
    is_coloured = console.is_terminal
    lines = sequences_in_text(recorded.algorithm, recorded.tokenizer, step, num_rows, is_coloured=is_coloured)
    print_lines([*lines], console)
    print(f"{num_rows} of the {recorded.size} rows of step {step}")
    return OK


def _range(groups: tuple[int, ...]) -> str:
    return f"{groups[0]} to {groups[-1]}" if len(groups) > 1 else str(groups[0])
