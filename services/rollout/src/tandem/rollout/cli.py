"""The ``rollout`` command: one generation engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tandem.common.messages import ToRollout
from tandem.common.service import Member, Service, run_service


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rollout process until the run ends; return the exit code."""
    return run_service("rollout", ToRollout, _make, argv)


def _make(member: Member) -> Service:
    # Imported once the process has joined: torch takes seconds, and heartbeats flow meanwhile.
    from tandem.rollout.service import RolloutService

    return RolloutService(member)


if __name__ == "__main__":
    sys.exit(main())
