"""A server of the Tinker API whose clients are told that it has many engines: a module that tests start."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.coordinator import cli
from tandem.serving.tinker import app


def main(arguments: Sequence[str]) -> int:
    """Run the real command, patched."""
    app._FEW_ENGINES = 0
    return cli.main(arguments)
