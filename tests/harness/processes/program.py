"""A program in a process of its own: a module that tests start with the text of the program."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    exec(compile(arguments[0], "<program>", "exec"), {"__name__": "__main__"})
    return 0
