"""The refit service: plans transfers, and decides which weight version is current.

It consumes layouts and digests and produces transfer programs and commits. It waits for nothing but the coordinator's
next order. No weights pass through it.
"""

from __future__ import annotations

import time
from typing import assert_never

from tandem.common.errors import RefitError
from tandem.common.messages import CommitVersion, PlanTransfers, RefitOrder, TransfersPlanned, VersionCommitted
from tandem.common.service import Member
from tandem.common.wire import Arrays
from tandem.refit import digest, layout, planner, program


class RefitService:
    """One node's weight plane."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.version: int | None = None
        """The current version: the newest that every engine holds whole."""

    def handle(self, order: RefitOrder, arrays: Arrays) -> None:
        """Carry out one order."""
        match order:
            case PlanTransfers():
                with self._member.phase("planning transfers"):
                    self._plan(order)
            case CommitVersion():
                with self._member.phase(f"committing version {order.version}"):
                    self._commit(order)
            case other:
                assert_never(other)

    def work(self) -> bool:
        """There is nothing to do between orders."""
        return False

    def close(self) -> None:
        """There is nothing to release: the memory belongs to trainers and engines."""

    def _plan(self, order: PlanTransfers) -> None:
        started = time.perf_counter()
        plan = planner.plan(
            {name: layout.decode(encoded) for name, encoded in order.sources.items()},
            {name: layout.decode(encoded) for name, encoded in order.destinations.items()},
            allow_alias=order.allow_alias,
        )
        reply = TransfersPlanned(
            command_id=order.command_id,
            programs={engine: program.encode(p) for engine, p in plan.programs.items()},
            num_bytes=plan.num_bytes,
            seconds=time.perf_counter() - started,
        )
        self._member.reply(order.command_id, reply)

    def _commit(self, order: CommitVersion) -> None:
        """Make the version current if every engine computes with exactly what the trainer meant to send."""
        sent = digest.combine(*order.sources.values())
        for engine, held in order.destinations.items():
            if held != sent:
                raise RefitError(
                    f"{engine} does not hold version {order.version}: the digest of its weights is {held:016x}, "
                    f"the trainer's is {sent:016x}"
                )
        self.version = order.version
        self._member.reply(order.command_id, VersionCommitted(command_id=order.command_id, version=order.version))
