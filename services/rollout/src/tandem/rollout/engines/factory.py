"""The protocol of what builds an engine, and the factory of a configuration's engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem.common.user_code import named
from tandem.config.engine_kinds import ENGINE_KINDS
from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits
from tandem.samples.routed_experts import replayed_experts
from tandem.samples.sampling_masks import masks_of_run

if TYPE_CHECKING:
    from tandem.config import Config
    from tandem.rollout.engine import Engine
    from tandem.samples.images.reading import ImageLimits
    from tandem.samples.tokenizer import Tokenizer
    from tandem.serving.server_process import ServingHandover

ReadImage = Callable[[str], bytes]
"""The encoded bytes of an image by its digest; a text model asks for none."""


class EngineFactory(Protocol):
    """The builder of the engines of a kind; `tandem.config.engine_kinds` names one for each."""

    def prepare_process(self, num_threads: int) -> None:
        """Set what libraries read once, before torch is imported."""

    def build(self, config: Config, tokenizer: Tokenizer, read_image: ReadImage, limits: ImageLimits) -> Engine:
        """Return the engine of a run, whose weights come by refits. Raises `ModelError`, `ConfigError`."""

    def load(self, serving: ServingHandover, tokenizer: Tokenizer, read_image: ReadImage) -> Engine:
        """Return an engine with the weights of a model folder, as version 0. Raises `ModelError`, `ConfigError`."""


def find_factory(name: str) -> EngineFactory:
    """Return the factory of an engine, by its name in ``policy.generation.backend``."""
    factory: EngineFactory = named(ENGINE_KINDS[name].factory)
    return factory


def describe_images(tokenizer: Tokenizer, read_image: ReadImage, limits: ImageLimits) -> dict[str, Any]:
    """Return the further arguments of an engine whose model sees: `read_image`, within `limits`."""
    from tandem.samples.images.chat import VisionTokenizer
    from tandem.samples.images.families import undrawable_ids

    assert isinstance(tokenizer, VisionTokenizer), "no other one sees"
    undrawable = undrawable_ids(tokenizer, tokenizer.settings.family)
    return {"read_image": read_image, "undrawable": undrawable, "limits": limits}


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
