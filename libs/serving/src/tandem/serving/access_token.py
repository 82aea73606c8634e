"""The token that servers ask for: from a file, the environment, or a flag, which ps shows."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tandem.common.errors import ConfigError

VARIABLE = "TANDEM_TOKEN"
_LONGEST = 4096


def add_token(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the options for a token to a parser; their help states the purpose."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--token", help=f"{purpose}; every user of this machine can read it in ps: prefer --token-file, or {VARIABLE}"
    )
    ways.add_argument("--token-file", type=Path, metavar="FILE", help="file that holds the token, of mode 0600")


def token_of(arguments: argparse.Namespace) -> str | None:
    """Return the token by flag, file or environment, in this order; None without one. Raise `ConfigError`."""
    if arguments.token is not None:
        return _check(arguments.token, "--token")
    if arguments.token_file is not None:
        return _check(_read(arguments.token_file), f"--token-file {arguments.token_file}")
    if VARIABLE in os.environ:
        return _check(os.environ[VARIABLE], VARIABLE)
    return None


def _read(path: Path) -> str:
    from tandem.common.files import irregular
    from tandem.common.keys import refuse_others

    if (kind := irregular(path)) is not None:
        raise ConfigError(f"--token-file {path}: it is {kind}, not a file")
    try:
        with path.open("rb") as file:
            refuse_others(path, os.fstat(file.fileno()))
            return file.read(_LONGEST + 1).decode()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: cannot read it: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--token-file {path}: it is not text") from None


def _check(text: str, source: str) -> str:
    """Return a token that fits a header; whitespace around it, such as the end of a file's line, is removed."""
    token = text.strip()
    if not token:
        raise ConfigError(f"{source}: the token is empty")
    if len(token) > _LONGEST or not token.isprintable():
        raise ConfigError(f"{source}: a token is one printable line of at most {_LONGEST} characters")
    return token
