"""The protocol of what builds an engine, and the factory of a configuration's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tandem.common.user_code import named
from tandem.config.engine_kinds import ENGINE_KINDS

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
