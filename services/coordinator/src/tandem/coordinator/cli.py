"""The ``coordinator`` command line: parse it, carry out a command, report failures on one line."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from tandem.common import descriptors, errors, gc_tuning, kept_inputs, outputs, signals
from tandem.common.distribution import version
from tandem.common.network import forget_empty_endpoint
from tandem.coordinator.bisecting import bisect
from tandem.coordinator.clusters import kubernetes, ray, slurm
from tandem.coordinator.commands import (
    chat,
    check,
    completion,
    doctor,
    eval,
    init,
    join,
    models,
    plan,
    replay,
    report,
    runs,
    samples,
    serve,
    tinker,
    up,
    view,
)
from tandem.coordinator.commands.arguments import NEWER, CarryOut, Commands
from tandem.coordinator.sweeping import sweep

AddCommand: TypeAlias = Callable[[Commands], None]
"""Declares a command, and the function that carries it out."""
GROUPS: dict[str, dict[str, AddCommand]] = {
    "start a run": {
        "init": init.add,
        "check": check.add,
        "plan": plan.add,
        "up": up.add,
        "sweep": sweep.add,
        "replay": replay.add,
    },
    "look at a run": {
        "view": view.add,
        "samples": samples.add,
        "diagnose": report.add_diagnose,
        "bisect": bisect.add,
        "report": report.add_report,
        "runs": runs.add_runs,
        "note": runs.add_note,
        "refits": report.add_refits,
    },
    "weights and models": {
        "eval": eval.add,
        "chat": chat.add,
        "serve": serve.add,
        "tinker": tinker.add,
        "merge": models.add_merge,
        "push": models.add_push,
    },
    "machines": {
        "doctor": doctor.add,
        "slurm": slurm.add,
        "kubernetes": kubernetes.add,
        "ray": ray.add,
        "join": join.add_join,
        "rollouts": join.add_rollouts,
        "keys": join.add_keys,
    },
    "shell": {"completion": completion.add},
}
"""Commands by purpose, in the order in which a newcomer meets them."""
_LASTING = frozenset({"up", "sweep", "replay", "bisect", "view", "eval", "serve", "tinker", "ray", "join", "rollouts"})
"""Commands that continue when their output has no reader any more."""
EXAMPLES = {
    "": "coordinator up examples/arithmetic.yaml grpo.max_num_steps=20",
    "init": "coordinator init --algorithm grpo --task chain_sum mine.yaml",
    "check": "coordinator check examples/arithmetic.yaml",
    "doctor": "coordinator doctor examples/arithmetic.yaml",
    "plan": "coordinator plan examples/plans/llama-8b-fsdp8-to-tp2.yaml",
    "keys": "coordinator keys examples/arithmetic.yaml",
    "up": "coordinator up examples/arithmetic.yaml grpo.max_num_steps=20",
    "sweep": "coordinator sweep examples/arithmetic.yaml grpo.seed=1,2,3 policy.optimizer.kwargs.lr=1e-3,2e-3",
    "join": "coordinator join config.yaml cluster.num_nodes=2 --node 1 --coordinator tcp://10.0.0.1:5555",
    "rollouts": "coordinator rollouts config.yaml --store s3://weights/run --coordinator tcp://10.0.0.1:5555 --num 2",
    "runs": "coordinator runs results --search grpo.seed=1 --differences",
    "note": "coordinator note results/arithmetic --tag baseline --text 'as in the paper'",
    "view": "coordinator view results/arithmetic results/arithmetic_sft",
    "samples": "coordinator samples results/arithmetic --step 12 --worst",
    "report": "coordinator report results/arithmetic results/seed1",
    "diagnose": "coordinator diagnose results/arithmetic",
    "bisect": "coordinator bisect results/arithmetic",
    "refits": "coordinator refits results/arithmetic",
    "replay": "coordinator replay results/arithmetic --from 50 loss_fn.ratio_clip_max=0.28",
    "eval": "coordinator eval examples/arithmetic.yaml --model results/arithmetic eval.num_tests_per_prompt=8",
    "merge": "coordinator merge results/arithmetic_lora merged",
    "push": "coordinator push results/arithmetic org/arithmetic@main --private",
    "serve": "coordinator serve results/arithmetic",
    "chat": "coordinator chat results/arithmetic",
    "tinker": "coordinator tinker examples/tinker.yaml",
    "slurm": "coordinator slurm config.yaml cluster.num_nodes=4 --time 12:00:00 --submit",
    "kubernetes": "coordinator kubernetes config.yaml --image registry.example/tandem:cuda --claim workspace",
    "ray": "coordinator ray config.yaml cluster.num_nodes=4 cluster.gpus_per_node=8",
    "completion": "coordinator completion bash",
}
"""Example command lines, by command, for the help and after a wrong command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0 is success, 1 a failed run, 2 invalid input, 130 an interrupted run that has saved, 141 output whose
    reader has ended.
    """
    gc_tuning.retire_at_exit()
    forget_empty_endpoint()
    os.environ.pop(kept_inputs.VARIABLE, None)  # of a run that this command is started in
    descriptors.raise_limit()
    arguments = _parse(argv)
    try:
        signals.unblock_signals()
        with outputs.outlast_readers() if arguments.command in _LASTING else contextlib.nullcontext():
            carry_out: CarryOut = arguments.carry_out
            code = carry_out(arguments)
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        outputs.discard(outputs.STANDARD[:1])
        return errors.UNREAD
    except errors.ConfigError as error:
        problems = _name_other_command(arguments) or error.problems
        for line in problems:
            print(f"error: {line}", file=sys.stderr)
        if len(problems) > 1:
            print(f"{len(problems)} problems", file=sys.stderr)
        return errors.BAD_INPUT
    except errors.DamagedCheckpoint as error:
        print(f"error: {error}; {_way_out(error, arguments)}", file=sys.stderr)
        return errors.FAILED
    except errors.TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return errors.FAILED
    except OSError as error:
        if not errors.is_shortage(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return errors.FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """An argument parser that shows an example command line."""

    @property
    def example(self) -> str:
        """Example of this command, or of all."""
        return f"example: {EXAMPLES[self.prog.partition(' ')[2]]}"

    def error(self, message: str) -> NoReturn:
        """Print usage, the error and an example; exit with code 2."""
        self.exit(errors.BAD_INPUT, f"{self.format_usage()}{self.prog}: error: {message}\n{self.example}\n")

    def format_help(self) -> str:
        """Return the text of ``--help``, with an example at its end unless the command has an epilog."""
        return super().format_help() if self.epilog else f"{super().format_help()}\n{self.example}\n"


class _GroupedHelp(argparse.HelpFormatter):
    """Help in which each command has a line, by purpose."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        lines = {command.dest: f"    {command.dest:12}{command.help}\n" for command in action._choices_actions}
        return "".join(
            f"  {purpose}:\n{''.join(map(lines.__getitem__, commands))}" for purpose, commands in GROUPS.items()
        )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Settings may stand before and after options, which argparse alone does not allow."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in EXAMPLES:
        groups = "\n".join(f"  {purpose}: {', '.join(commands)}" for purpose, commands in GROUPS.items())
        parser.error(f"there is no command {words[0]!r}{errors.nearest(words[0], EXAMPLES)}\n{groups}")
    arguments, extra_words = parser.parse_known_args(argv)
    unknown = [word for word in extra_words if word.startswith("-") or "=" not in word or "overrides" not in arguments]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if extra_words:
        arguments.overrides += extra_words
    if getattr(arguments, "newer", False):
        arguments.overrides = [*arguments.overrides, NEWER]
    if arguments.command == "up" and arguments.from_step is not None and not arguments.resume:
        parser.error("--from STEP says where to --resume: give both")
    if arguments.command == "replay" and arguments.resume and arguments.to_step is not None:
        parser.error("--to STEP is set when a replay begins: leave it out with --resume")
    if arguments.command == "replay" and arguments.resume and arguments.without is not None:
        parser.error("--without FILE is set when a replay begins: leave it out with --resume")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="coordinator",
        description="Tandem: post-training for language models.",
        formatter_class=_GroupedHelp,
    )
    parser.add_argument("--version", action="version", version=f"tandem {version()}")
    title = "commands, each with its own --help"
    commands = parser.add_subparsers(title=title, dest="command", required=True, metavar="COMMAND")
    for add in itertools.chain.from_iterable(group.values() for group in GROUPS.values()):
        add(commands)
    parser.set_defaults(root=parser)
    return parser


def _name_other_command(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return what to say of a configuration that only ``coordinator tinker`` takes; nothing of any other."""
    if arguments.command == "tinker" or "overrides" not in arguments or not getattr(arguments, "config", None):
        return ()
    from tandem.coordinator.tinker.driving import is_for_clients

    if not is_for_clients(arguments.config, arguments.overrides):
        return ()
    words = ["coordinator", "tinker", arguments.config, *arguments.overrides]
    return (
        f"{arguments.config}: it has neither an algorithm nor data, which clients of the Tinker API bring: "
        f"{shlex.join(words)} serves them",
    )


def _way_out(error: errors.DamagedCheckpoint, arguments: argparse.Namespace) -> str:
    """Return the command line to use after a checkpoint was found damaged."""
    if arguments.command == "replay" and not arguments.resume:
        return "choose another with --from"
    if arguments.command == "replay" and error.whole_step is None:
        return "no other checkpoint of the replay is whole: begin a new one"
    words = ["coordinator", arguments.command, _subject(arguments), *arguments.overrides]
    if error.config_file:
        words = ["coordinator", "up", error.config_file]
    if error.whole_step is None:
        return f"no other checkpoint is whole: begin anew with {shlex.join([*words, '--restart'])}"
    options = ["--resume", "--from", str(error.whole_step)]
    return f"the newest that is whole is that of step {error.whole_step}: {shlex.join([*words, *options])}"


def _subject(arguments: argparse.Namespace) -> str:
    return str(arguments.run) if arguments.command == "replay" else str(arguments.config)


if __name__ == "__main__":
    sys.exit(main())
