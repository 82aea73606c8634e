"""``coordinator samples``: show the samples or the rows that a run was trained on or validated on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.coordinator.commands.arguments import Commands, add_run
from tandem.launch.exit_codes import OK

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.samples.tokenizer import Tokenizer

_LIMIT = 10
_OF_SAMPLES = {"worst": False, "best": False, "group": None, "contains": "", "validation": False, "tokens": False}
"""Options that choose among samples, and mean nothing of rows, with their defaults."""


def add(commands: Commands) -> None:
    """Declare the command."""
    samples = commands.add_parser(
        "samples", help="show samples that a run recorded: prompts, responses, rewards; of SFT, DPO and rm, its rows"
    )
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
    from tandem.observe.run_folder.journal import read_journal
    from tandem.observe.run_folder.recorded import config_of
    from tandem.observe.samples import SampleQuery, search, trainer_logprobs
    from tandem.observe.samples_text import print_samples

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
    tokenizer = _tokenizer_of(run, config)
    if tokenizer is None:
        name = config.policy.tokenizer.name
        lacking = "responses are shown without special tokens, and several turns as one text"
        print(f"note: the tokenizer is neither in {name} nor in a checkpoint: {lacking}", file=sys.stderr)
    logprobs = None
    if arguments.tokens:
        logprobs = trainer_logprobs(run, selection.step, run_id) if query.purpose == "train" else {}
    pictures = None
    if tokenizer is not None and tokenizer.sees:
        from tandem.samples.images.store import ImageFolder
        from tandem.samples.images.texts import marked_texts

        pictures = marked_texts(tokenizer, ImageFolder(run / "images"))
    print_samples(selection, Console(), query.purpose, tokenizer, logprobs, pictures)
    return OK


def _rows(arguments: argparse.Namespace, config: Config) -> int:
    """Show the rows of a run that generates no samples: those that a step trained on, read from its data again."""
    from rich.console import Console

    from tandem.common.errors import RunFolderError, TandemError
    from tandem.coordinator.algorithms import make_algorithm
    from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
    from tandem.coordinator.preparing.shown_rows import print_lines, sequences_in_text
    from tandem.launch.preparing.hub_data import data_files
    from tandem.observe.run_folder.journal import read_journal

    run: Path = arguments.run
    given = [name for name in _OF_SAMPLES if getattr(arguments, name) != _OF_SAMPLES[name]]
    if given:
        raise RunFolderError(
            f"{run} is a run of {config.algorithm}, which generates no samples: its rows are chosen by --step and "
            f"--limit, not --{given[0]}"
        )
    with read_journal(run) as journal:
        last = journal.last_step() or 0
        began = journal.run.created_at
    step = max(1, last) if arguments.step is None else arguments.step
    if not 1 <= step <= max(1, last):
        raise RunFolderError(f"{run} has trained no step {step}, only those up to {last}")
    if (tokenizer := _tokenizer_of(run, config)) is None:
        raise RunFolderError(f"the tokenizer is neither in {config.policy.tokenizer.name} nor in a checkpoint of {run}")
    try:
        algorithm = make_algorithm(config, tokenizer)
    except TandemError as error:
        raise RunFolderError(
            f"the rows of {run} are read from its data again, which cannot be read: {error}"
        ) from error
    assert isinstance(algorithm, DataSetAlgorithm), "nothing is generated, and it is no replay"
    paths = [Path(path) for key, path in data_files(config) if key.startswith("data.train")]
    changed = [path for path in dict.fromkeys(paths) if path.is_file() and path.stat().st_mtime > began]
    notes = [
        f"{path} has changed since the run began: its rows may not be those that it trained on" for path in changed
    ]
    for note in (*notes, *algorithm.notices):
        print(f"note: {note}", file=sys.stderr)
    console = Console(highlight=False)
    size = config.policy.train_global_batch_size
    num_rows = min(arguments.limit, size)
    lines = sequences_in_text(algorithm, tokenizer, step, num_rows, is_coloured=console.is_terminal)
    print_lines([*lines], console)
    print(f"{num_rows} of the {size} rows of step {step}")
    return OK


def _range(groups: tuple[int, ...]) -> str:
    return f"{groups[0]} to {groups[-1]}" if len(groups) > 1 else str(groups[0])


def _tokenizer_of(run: Path, config: Config) -> Tokenizer | None:
    """Return the tokenizer of a run, or its copy in a checkpoint; None if neither is on this machine."""
    from tandem.common.errors import ModelError
    from tandem.observe.run_folder.recorded import checkpoints_of
    from tandem.samples.model_files import load_tokenizer

    checkpoints = checkpoints_of(run, config)
    folders = [checkpoints.folder_of(step) / "policy" for step in reversed(checkpoints.steps())]
    for folder in [Path(config.policy.tokenizer.name), *folders]:
        if (folder / "tokenizer.json").is_file():
            try:
                return load_tokenizer(config, folder)
            except ModelError as error:
                print(f"note: {error}", file=sys.stderr)
    return None
