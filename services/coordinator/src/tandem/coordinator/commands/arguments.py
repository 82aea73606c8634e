"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tandem.common.errors import ConfigError
from tandem.config import Config

if TYPE_CHECKING:
    from tandem.launch.preparing.beginning import Mode

SETTINGS = "key=value"
"""Name of settings that replace a configuration's, in help texts."""

NEWER = "nemo_rl_version=newer"
"""Setting that ``--newer`` stands for."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Subparsers to which a command adds its own."""
CarryOut: TypeAlias = Callable[[argparse.Namespace], int]
"""Function that carries out a command and returns the exit code; the parser's default ``carry_out``."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add a configuration file, and settings that replace the file's, to a parser."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar=SETTINGS, help="settings that replace the file's")
    parser.add_argument(
        "--newer",
        action="store_true",
        help="ignore keys that only a newer NeMo-RL knows, as `nemo_rl_version: '0.8'` in the file does; a near miss "
        "of a known key stays an error",
    )


def load_configuration(load: Callable[[str, list[str]], Config], arguments: argparse.Namespace, mode: Mode) -> Config:
    """Load the configuration of `add_config`. Its `ConfigError` also names what does not exist."""
    try:
        return load(arguments.config, arguments.overrides)
    except ConfigError as error:
        from tandem.launch.preparing.missing import add_missing  # takes a while to import

        raise add_missing(error, arguments.config, arguments.overrides, mode) from None


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add a run folder to a parser."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: logger.log_dir of its configuration")


def number(which: str, is_valid: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a function that reads a finite number from the command line."""

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
