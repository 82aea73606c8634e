"""The ``rollout`` command: one generation engine."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence

from tandem.common.messages import ToRollout
from tandem.common.process_lifetime import adopt_orphans, end_descendants
from tandem.config import placement
from tandem.config.threads import count_threads
from tandem.launch.run_service import RunnableService, run_service
from tandem.launch.service import ServiceContext
from tandem.rollout.engines.factory import find_factory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rollout process until the run ends; return the exit code."""
    adopt_orphans()
    try:
        return run_service("rollout", ToRollout, _make, argv)
    finally:
        end_descendants()  # whatever an environment in this process has started


def preload() -> None:
    """Import what takes long without touching a device; not vLLM, which needs environment variables of the engine."""
    importlib.import_module("tandem.rollout.service")
    importlib.import_module("tandem.rollout.engines.transformers")


def _make(context: ServiceContext) -> RunnableService:
    visible = placement.select_visible_to_reward_models(context.config, context.index, os.environ)
    os.environ[placement.VISIBLE_TO_REWARD_MODELS] = json.dumps(visible)
    generation = context.config.policy.generation
    if generation.kind.is_on_gpus:
        os.environ[placement.VISIBLE] = placement.select_visible_to_engine(context.config, context.index, os.environ)
    threads = count_threads(context.config, "rollouts", len(os.sched_getaffinity(0)))
    find_factory(generation.backend).prepare_process(threads)
    # Imported once the process has joined: torch takes seconds, and heartbeats flow meanwhile.
    from tandem.rollout.service import RolloutService

    if context.config.refit.store is not None:
        from tandem.rollout.mirroring import MirroringRollout

        return MirroringRollout(context)
    return RolloutService(context)


if __name__ == "__main__":
    sys.exit(main())
