"""The media of a rollout's prompts: where its engine reads them, and what keeps those of requests.

Images are the only kind. What reads them is imported only for a model that takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.config import Config
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.rollout.engines.factory import EngineMedia
    from tandem.rollout.openai_api.images import RequestImages


def keep_received(config: Config, tokenizer: Tokenizer) -> RequestImages | None:
    """Return the keeper of images that external requests send, next to those in the run's folder; None without them."""
    if not tokenizer.takes_media or not config.policy.generation.takes_external_requests:
        return None
    from tandem.rollout.openai_api.images import limits_of, received_images
    from tandem.samples.images.rows import image_folder

    return received_images(image_folder(config).get, limits_of(config.data.max_image_pixels))


def keep_stored(config: Config, tokenizer: Tokenizer) -> RequestImages | None:
    """Return the keeper of images that agents send, in the run's folder; None for a model of text."""
    if not tokenizer.takes_media:
        return None
    from tandem.rollout.openai_api.images import limits_of, stored_images
    from tandem.samples.images.rows import image_folder

    return stored_images(image_folder(config), limits_of(config.data.max_image_pixels))


def keep_served(tokenizer: Tokenizer) -> RequestImages | None:
    """Return the keeper of images that requests to a server send; None for a model of text."""
    if not tokenizer.takes_media:
        return None
    from tandem.rollout.openai_api.images import received_images

    return received_images()


def describe_media(
    tokenizer: Tokenizer, received: RequestImages | None, config: Config | None = None
) -> EngineMedia | None:
    """Return the further arguments of an engine: how it reads images; None for a model of text.

    Args:
        tokenizer: of the model.
        received: keeper of images that requests send.
        config: of the run, in whose folder other images are; None for a server without a run.

    """
    if not tokenizer.takes_media:
        return None
    from tandem.samples.images.chat import VisionTokenizer
    from tandem.samples.images.families import undrawable_ids
    from tandem.samples.images.reading import DEFAULT_LIMITS, ImageLimits
    from tandem.samples.images.rows import image_folder

    assert isinstance(tokenizer, VisionTokenizer), "no other one takes media"
    undrawable = undrawable_ids(tokenizer, tokenizer.settings.family)
    limits = DEFAULT_LIMITS if config is None else ImageLimits(max_pixels=config.data.max_image_pixels)
    if received is not None:
        return {"read_image": received.get, "undrawable": undrawable, "limits": limits}
    assert config is not None, "a server keeps what it is sent"
    return {"read_image": image_folder(config).get, "undrawable": undrawable, "limits": limits}
