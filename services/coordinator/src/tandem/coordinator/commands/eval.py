"""``coordinator eval``: score models on held-out problems."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path

from tandem.common import signals
from tandem.common.errors import FAILED, INTERRUPTED, OK
from tandem.config import load_evaluation, notices
from tandem.coordinator.commands.arguments import Commands, add_config


def add(commands: Commands) -> None:
    """Declare the command."""
    evaluation = commands.add_parser(
        "eval", help="score models on held-out problems: accuracy, pass@k, votes", description=_DESCRIPTION
    )
    add_config(evaluation)
    evaluation.add_argument(
        "--model",
        dest="models",
        nargs="+",
        action="extend",
        metavar="FOLDER",
        help="a Hugging Face folder, a checkpoint (step_N), or a run folder; several, or a pattern, make one table "
        "(default: policy.model_name)",
    )
    evaluation.add_argument(
        "--checkpoints",
        choices=("newest", "best", "all"),
        default="newest",
        help="which checkpoints of a run folder to score (default: newest; best is by checkpointing.metric_name)",
    )
    evaluation.set_defaults(carry_out=_eval)


_DESCRIPTION = """Draw samples for the held-out problems of a configuration (of a run, or of an evaluation in NeMo-RL's
form) and score them. The section eval sets how many and how; results are in eval.save_path."""


def _eval(arguments: argparse.Namespace) -> int:
    models = [word for word in arguments.models or () if _is_path(word)]
    # The shell's words after --model have no end: settings among them are taken out here.
    overrides = [*arguments.overrides, *(word for word in arguments.models or () if not _is_path(word))]
    config = load_evaluation(arguments.config, overrides)
    from tandem.coordinator.evaluation.evaluate import find_models
    from tandem.coordinator.preparing.evaluation_settings import check_settings, evaluation_config

    check_settings(config, arguments.config)
    for notice in notices(config):
        print(f"note: {notice}", flush=True)
    evaluated_models = find_models(models or [config.policy.model_name], arguments.checkpoints)
    folder = Path(config.eval.save_path or f"{config.logger.log_dir}/eval")
    signals.interrupt_when_asked()

    from rich.console import Console

    from tandem.coordinator.evaluation.evaluate import evaluate, prepare, prepare_folder
    from tandem.launch.fork_server import ServiceForkServer
    from tandem.launch.launch import preload
    from tandem.launch.nodes import launched_processes
    from tandem.observe.evaluation import print_table

    say = partial(print, flush=True)
    kinds = [
        k
        for k, count in launched_processes(evaluation_config(config, evaluated_models[0].folder, folder)).items()
        if count
    ]
    with ServiceForkServer(
        partial(preload, kinds, config.policy.environment), config.cluster.deadlines.join_s
    ) as server:
        readies = prepare(arguments.config, config, evaluated_models, folder)
        prepare_folder(folder, say)
        finish, evaluation = evaluate(config, evaluated_models, readies, folder, say, server)
    if evaluation is not None:
        print_table(evaluation, config, Console())
        print(f"results are in {folder}", flush=True)
    match finish.outcome:
        case "finished":
            return OK
        case "interrupted":
            words = ["coordinator", "eval", arguments.config, *overrides, *(["--model", *models] if models else [])]
            print(f"interrupted; begin again with: {shlex.join(words)}", flush=True)
            return INTERRUPTED
        case "failed":
            print(f"error: {finish.error}", file=sys.stderr)
            return FAILED


def _is_path(word: str) -> bool:
    return "=" not in word or Path(word).exists()
