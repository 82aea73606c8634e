"""The ``trainer`` command: one training rank."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from tandem.common.messages import ToTrainer
from tandem.launch.run_service import RunnableService, run_service
from tandem.launch.service import ServiceContext


def main(argv: Sequence[str] | None = None) -> int:
    """Run one trainer process until the run ends; return the exit code."""
    return run_service("trainer", ToTrainer, _make, argv)


def preload() -> None:
    """Import slow modules, without touching a device."""
    importlib.import_module("tandem.trainer.service")
    importlib.import_module("tandem.trainer.backends.dtensor")  # this also imports what Megatron-Core's backend needs


def _make(context: ServiceContext) -> RunnableService:
    os.environ.update(context.config.policy.environment)
    # Imported once the process has joined: torch takes seconds, and heartbeats must flow meanwhile.
    from tandem.trainer.service import TrainerService

    if context.config.refit.store is not None:
        from tandem.trainer.publishing import PublishingTrainer

        return PublishingTrainer(context)
    return TrainerService(context)


if __name__ == "__main__":
    sys.exit(main())
