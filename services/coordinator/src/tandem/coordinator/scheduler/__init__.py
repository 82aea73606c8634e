"""The scheduler, pure: tables of rollout groups, engines and requests, and the rules that move them."""

from __future__ import annotations

from tandem.coordinator.scheduler.scheduler import Scheduler
from tandem.coordinator.scheduler.spec import RunSpec

__all__ = ["RunSpec", "Scheduler"]
