"""Arguments that several commands take, and the exit codes that all of them have."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

SETTINGS = "key=value"
"""What help calls settings that replace a configuration's."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds its parser."""
CarryOut: TypeAlias = Callable[[argparse.Namespace], int]
"""What a command does with its arguments; returns the exit code. Its parser has it as the default ``carry_out``."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Have a parser take a configuration file and settings that replace the file's."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar=SETTINGS, help="settings that replace the file's")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Have a parser take a run folder."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: logger.log_dir of its configuration")


def number(which: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Return what reads a finite number from the command line."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            number = float(text)
            if is_valid(number) and math.isfinite(number):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {which}")

    return read


def count(text: str) -> int:
    """Read a count of at least one from the command line."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
