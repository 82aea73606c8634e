"""The ``refit`` command: one node's weight plane."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.common.messages import ToRefit
from tandem.launch.run_service import run_service
from tandem.refit.service import RefitService


def main(argv: Sequence[str] | None = None) -> int:
    """Run one refit process until the run ends; return the exit code."""
    return run_service("refit", ToRefit, RefitService, argv)


def preload() -> None:
    """Import slow modules: there are none."""


if __name__ == "__main__":
    sys.exit(main())
