"""``coordinator init``: write a commented starting configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.distribution import install_command
from tandem.common.errors import OK, TandemError
from tandem.coordinator.commands.arguments import Commands

if TYPE_CHECKING:
    from tandem.launch.starting import UserChoices

_DEFAULT_FILE = "tandem.yaml"


def add(commands: Commands) -> None:
    """Declare the command."""
    init = commands.add_parser(
        "init",
        help="write a commented starting configuration",
        description="Write a starting configuration from a few choices. On a terminal, choices that are not given as "
        "options are asked for; elsewhere they take their defaults. An algorithm that samples, on a new "
        "model, gets a second file, FILE_sft.yaml: SFT that makes the model. Nothing is overwritten.",
    )
    init.add_argument("file", nargs="?", default=_DEFAULT_FILE, metavar="FILE", help=f"(default: {_DEFAULT_FILE})")
    init.add_argument("--algorithm", metavar="NAME", help="grpo (default), sft, dpo, ppo, rm or distillation")
    source = init.add_mutually_exclusive_group()
    source.add_argument("--task", metavar="TASK", help="a task of reasoning-gym (default: chain_sum)")
    source.add_argument("--from", dest="data", metavar="FILE", help="a JSONL or CSV file with the problems")
    init.add_argument(
        "--model", metavar="MODEL", help="a Hugging Face folder, a name on the Hub, or new (default): a small one"
    )
    init.add_argument("--teacher", metavar="MODEL", help="the model to distil; a new one is made by SFT")
    init.add_argument("--lora", action="store_true", help="train low-rank adapters, and no other weights")
    init.add_argument("--engine", metavar="NAME", help="transformers (default) or vllm")
    init.add_argument("--environment", metavar="NAME", help="scores problems of a file: exact_match (default) or math")
    init.set_defaults(carry_out=_init)


def _init(arguments: argparse.Namespace) -> int:
    from tandem.launch import starting as options
    from tandem.launch.starting import refuse_if_there, write_configurations, write_new_file

    path = Path(arguments.file)
    refuse_if_there(path)  # before any question
    choices = _choices(arguments)
    options.check_choices(choices)
    files = write_configurations(choices, options.look_at(choices), path)
    for written in files:
        refuse_if_there(written)
    for written, text in files.items():
        write_new_file(written, text)
    *first, _ = files
    print("".join(f"{each} is written: SFT, which comes first and makes the model\n" for each in first), end="")
    print(f"{path} is written; next: coordinator check {path}")
    if not options.is_installed(choices.engine):
        print(f"note: {choices.engine} is not installed here; {install_command(choices.engine)}", file=sys.stderr)
    return OK


def _choices(arguments: argparse.Namespace) -> UserChoices:
    """Return the choices: from options, else from answers on a terminal, else from defaults."""
    from tandem.launch import starting as options

    asks = sys.stdin.isatty()
    check = partial(options.check_name, "algorithm", known_names=options.ALGORITHMS)
    algorithm = _choose(arguments.algorithm, "algorithm", options.ALGORITHMS, "grpo", check, asks=asks)
    file, task = arguments.data, arguments.task
    if file is None and task is None:
        tasks = {
            name: text
            for name, text in options.TASKS.items()
            if algorithm not in options.OF_PAIRS or name in options.OF_NUMBERS
        }
        check = partial(options.check_source, algorithm)
        answer = _choose(None, "a task, or a JSONL or CSV file", tasks, "chain_sum", check, asks=asks)
        task, file = (None, answer) if options.is_file(answer) else (answer, None)
    offered = {options.NEW: "a small one, from scratch; or the folder of a Hugging Face model"}
    model = _choose(arguments.model, "model", offered, options.NEW, options.check_model, asks=asks)
    rolls_out = algorithm in options.ROLLS_OUT
    check = partial(options.check_name, "engine", known_names=options.ENGINES)
    engine = _choose(arguments.engine, "engine", options.ENGINES, "transformers", check, asks=asks and rolls_out)
    scores = asks and rolls_out and file is not None
    check = partial(options.check_name, "environment", known_names=options.ENVIRONMENTS)
    environment = _choose(arguments.environment, "environment", options.ENVIRONMENTS, "exact_match", check, asks=scores)
    return options.UserChoices(
        algorithm=algorithm,
        task=task,
        file=file,
        model=model,
        engine=engine,
        environment=environment,
        teacher=arguments.teacher,
        lora=arguments.lora,
    )


def _choose(
    argument: str | None,
    label: str,
    choices: Mapping[str, str],
    default: str,
    check: Callable[[str], None],
    *,
    asks: bool,
) -> str:
    """Return the given value, else the answer on a terminal, else the default. An invalid answer is asked for again."""
    if argument is not None or not asks:
        return default if argument is None else argument
    print(f"{label}:")
    for name, text in choices.items():
        print(f"  {name:<16} {text}")
    while True:
        try:
            answer = input(f"{label} [{default}]: ").strip() or default
            check(answer)
        except EOFError:
            print()
            return default
        except TandemError as error:
            print(str(error).removeprefix("--"))
        else:
            print()
            return answer
