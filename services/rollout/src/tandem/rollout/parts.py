"""The parts of a rollout: its engine, and what works beside it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tandem.observe.exporters.nvml import GpuMonitor
from tandem.refit.weight_client import WeightClient
from tandem.rollout.engine import Engine
from tandem.rollout.environments.scorer import RunEnvironments
from tandem.samples.media import MediaFetcher
from tandem.samples.sample_store import SampleStore
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.rollout.agents.agents import RolloutAgents
    from tandem.rollout.external_requests import ExternalRequests
    from tandem.rollout.sample_recorder import SampleRecorder


@dataclasses.dataclass(kw_only=True)
class RolloutParts:
    """The engine of a rollout, and what works beside it."""

    tokenizer: Tokenizer
    engine: Engine
    sample_engine: Engine | ExternalRequests
    """The engine as samples see it: itself, or what shares it among them and external requests."""
    weight_client: WeightClient
    store: SampleStore = dataclasses.field(init=False)
    environments: RunEnvironments | None
    """None where agents play."""
    is_async: bool
    """Whether the engine goes on while environments answer (``async_engine``)."""
    agents: RolloutAgents | None = None
    external_requests: ExternalRequests | None = None
    """None if external requests are not allowed."""
    recorder: SampleRecorder | None = None
    """None if there is no rollout log."""
    media: MediaFetcher | None = None
    """The way to media that the run's folder lacks here; None if the model takes text alone."""
    gpus: GpuMonitor | None = None
    """None where it computes on the CPU."""

    def close(self) -> None:
        """Release the engine and the environments."""
        for part in (
            self.external_requests,
            self.gpus,
            self.recorder,
            self.agents,
            self.environments,
            self.store,
            self.weight_client,
            self.engine,
        ):
            if part is not None:
                part.close()
