"""``coordinator init``: write a commented starting configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from tandem.coordinator.commands.arguments import OK, Commands

_DEFAULT_FILE = "tandem.yaml"


def add(commands: Commands) -> None:
    """Declare the command."""
    init = commands.add_parser(
        "init",
        help="write a commented starting configuration",
        description="Write a starting configuration from a few choices. On a terminal those that are not given as "
        "options are asked for; elsewhere they have their defaults. Nothing is overwritten.",
    )
    init.add_argument("file", nargs="?", default=_DEFAULT_FILE, metavar="FILE", help=f"(default: {_DEFAULT_FILE})")
    init.add_argument("--algorithm", metavar="NAME", help="grpo (default), sft or dpo")
    source = init.add_mutually_exclusive_group()
    source.add_argument("--task", metavar="TASK", help="of reasoning-gym (default: chain_sum)")
    source.add_argument("--from", dest="data", metavar="FILE", help="a JSONL or CSV file has them")
    init.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder, or new (default): a small one")
    init.add_argument("--engine", metavar="NAME", help="transformers (default) or vllm")
    init.add_argument("--environment", metavar="NAME", help="scores problems of a file: exact_match (default) or math")
    init.set_defaults(carry_out=_init)


def _init(arguments: argparse.Namespace) -> int:
    from tandem.coordinator.starting import choices as chosen
    from tandem.coordinator.starting.write import starting_configuration, write_new_file

    path = Path(arguments.file)
    if path.exists():  # before any question
        write_new_file(path, "")
    asks = sys.stdin.isatty()
    algorithm = _choose(arguments.algorithm, "algorithm", chosen.ALGORITHMS, "grpo", asks=asks)
    file, task = arguments.data, arguments.task
    if file is None and task is None:
        answer = _choose(None, "a task, or a JSONL or CSV file", chosen.TASKS, "chain_sum", asks=asks)
        task, file = (None, answer) if Path(answer).is_file() or "." in answer else (answer, None)
    model = _choose(arguments.model, "model", {chosen.NEW: "a small one; or a folder"}, chosen.NEW, asks=asks)
    rolls_out = algorithm == "grpo"
    engine = _choose(arguments.engine, "engine", chosen.ENGINES, "transformers", asks=asks and rolls_out)
    scores = asks and rolls_out and file is not None
    environment = _choose(arguments.environment, "environment", chosen.ENVIRONMENTS, "exact_match", asks=scores)
    choices = chosen.Choices(
        algorithm=algorithm, task=task, file=file, model=model, engine=engine, environment=environment
    )
    chosen.check_choices(choices)
    write_new_file(path, starting_configuration(choices, chosen.look_at(choices), path))
    print(f"{path} is written; next: coordinator check {path}")
    if not chosen.is_installed(choices.engine):
        print(f"note: {choices.engine} is not installed here; pip install 'tandem[{choices.engine}]'", file=sys.stderr)
    return OK


def _choose(given: str | None, what: str, known: Mapping[str, str], default: str, *, asks: bool) -> str:
    """Return what was given, or else answered on a terminal, or else the default."""
    if given is not None or not asks:
        return default if given is None else given
    print(f"{what}:")
    for name, text in known.items():
        print(f"  {name:<16} {text}")
    try:
        return input(f"{what} [{default}]: ").strip() or default
    except EOFError:
        return default
