"""The protocol of what builds an engine, and the factory of a configuration's engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem.common.user_code import named
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.samples.routed_experts import replayed_experts
from tandem.samples.sampling_masks import masks_of_run

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.rollout.engine import Engine
    from tandem.serving.server_process import ServingHandover

EngineMedia = Mapping[str, Any]
"""The further arguments of an engine whose model takes more than text (`tandem.rollout.media`)."""


class EngineFactory(Protocol):
    """The builder of the engines of a kind; `tandem.config.engine_kinds` names one for each."""

    def prepare_process(self, num_threads: int) -> None:
        """Set what libraries read once, before torch is imported."""

    def build(self, config: Config, media: EngineMedia | None) -> Engine:
        """Return the engine of a run, whose weights come by refits. Raises `ModelError`, `ConfigError`."""

    def load(self, serving: ServingHandover, media: EngineMedia | None) -> Engine:
        """Return an engine with the weights of a model folder, as version 0. Raises `ModelError`, `ConfigError`."""


def find_factory(name: str) -> EngineFactory:
    """Return the factory of an engine, by its name in ``policy.generation.backend``."""
    factory: EngineFactory = named(ENGINE_KINDS[name].factory)
    return factory


class EmbeddedFactory:
    """Builds the embedded engine, of a text model or of one that sees, with one set of adapters or several."""

    def prepare_process(self, num_threads: int) -> None:
        """Do nothing: it runs in the rollout process, on the CPU."""

    def build(self, config: Config, media: EngineMedia | None) -> Engine:
        """Return the engine of a run."""
        policy, generation = config.policy, config.policy.generation
        settings: dict[str, Any] = {
            "num_slots": generation.transformers_cfg.num_slots,
            "max_total_sequence_length": policy.max_total_sequence_length,
            "dtype": policy.precision,
            "experts": replayed_experts(config),
            "mask_format": masks_of_run(config),
            "config_overrides": policy.engine_config_overrides,
        }
        folder = Path(policy.model_name)
        if generation.num_adapter_sets > 1:
            from tandem.rollout.engines.adapters import AdaptersEngine

            return AdaptersEngine(folder, num_sets=generation.num_adapter_sets, **settings)
        return _make(folder, media, settings)

    def load(self, serving: ServingHandover, media: EngineMedia | None) -> Engine:
        """Return an engine with the weights of a model folder."""
        settings = {
            "num_slots": serving.max_batch_size,
            "max_total_sequence_length": serving.max_length,
            "dtype": serving.precision,
            "num_threads": serving.num_threads,
            "with_weights": True,
        }
        return _make(Path(serving.model_folder), media, settings)


def _make(folder: Path, media: EngineMedia | None, settings: dict[str, Any]) -> Engine:
    if media is not None:
        from tandem.rollout.engines.vision import VisionEngine

        return VisionEngine(folder, **media, **settings)
    from tandem.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(folder, **settings)


FACTORY: EngineFactory = EmbeddedFactory()
