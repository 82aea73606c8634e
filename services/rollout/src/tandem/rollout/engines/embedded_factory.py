"""The factory of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.rollout.engines.factory import EngineFactory, ReadImage, describe_images
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits
from tandem.samples.routed_experts import replayed_experts
from tandem.samples.sampling_masks import masks_of_run

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.rollout.engine import Engine
    from tandem.samples.tokenizer import Tokenizer
    from tandem.serving.server_process import ServingHandover


class EmbeddedFactory:
    """Builds the embedded engine, of a text model or of one that sees, with one set of adapters or several."""

    def prepare_process(self, num_threads: int) -> None:
        """Do nothing: it runs in the rollout process, on the CPU."""

    def build(self, config: Config, tokenizer: Tokenizer, read_image: ReadImage, limits: ImageLimits) -> Engine:
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
        return _make(folder, tokenizer, read_image, limits, settings)

    def load(self, serving: ServingHandover, tokenizer: Tokenizer, read_image: ReadImage) -> Engine:
        """Return an engine with the weights of a model folder."""
        settings = {
            "num_slots": serving.max_batch_size,
            "max_total_sequence_length": serving.max_length,
            "dtype": serving.precision,
            "num_threads": serving.num_threads,
            "with_weights": True,
        }
        return _make(Path(serving.model_folder), tokenizer, read_image, DEFAULT_LIMITS, settings)


def _make(
    folder: Path, tokenizer: Tokenizer, read_image: ReadImage, limits: ImageLimits, settings: dict[str, Any]
) -> Engine:
    if tokenizer.sees:
        from tandem.rollout.engines.vision import VisionEngine

        return VisionEngine(folder, **describe_images(tokenizer, read_image, limits), **settings)
    from tandem.rollout.engines.transformers import TransformersEngine

    return TransformersEngine(folder, **settings)


FACTORY: EngineFactory = EmbeddedFactory()
