"""The scheduler: tables of rollout groups, engines and requests, and rules that move them. Pure: no sockets."""

from __future__ import annotations

from tandem.coordinator.scheduler.scheduler import Scheduler
from tandem.coordinator.scheduler.spec import RunSpec

__all__ = ["RunSpec", "Scheduler"]
