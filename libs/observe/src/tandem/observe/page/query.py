"""The parameters of a request, checked; a problem is one line of text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from tandem.common.errors import TandemError

Choice = TypeVar("Choice", bound=str)


class BadQuery(TandemError):
    """A malformed parameter."""


def read_whole_number(request: Request, name: str, default: int, least: int = 0, largest: int = 2**53) -> int:
    """Return a parameter that is a whole number."""
    number = maybe_read_whole_number(request, name, least, largest)
    return default if number is None else number


def maybe_read_whole_number(request: Request, name: str, least: int = 0, largest: int = 2**53) -> int | None:
    """Return a parameter that is a whole number; None if it is not given."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20 and least <= int(text) <= largest:
        return int(text)
    raise BadQuery(f"{name}={text[:40]}: expected a whole number from {least} to {largest}")


def maybe_read_number(request: Request, name: str) -> float | None:
    """Return a parameter that is a number; None if it is not given."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        number = float(text)
        if number == number:
            return number
    raise BadQuery(f"{name}={text[:40]}: expected a number")


def read_choice(request: Request, name: str, choices: Sequence[Choice]) -> Choice:
    """Return a parameter that is one of the choices; the first if it is not given."""
    text = request.query_params.get(name) or choices[0]
    for value in choices:
        if value == text:
            return value
    raise BadQuery(f"{name}={text[:40]}: expected one of {', '.join(choices)}")
