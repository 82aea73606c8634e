"""The media of a rollout's prompts: where its engine reads them, and what keeps those of requests.

Images are the only kind. What reads them is imported only for a model that takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tandem.common.messages import Media, SampleScored, SamplingParameters
from tandem.config import Config
from tandem.rollout.conversation import SampleConversation
from tandem.rollout.engine import SequenceRequest
from tandem.samples import chat_templates
from tandem.samples.batch import SampleBatch, media_columns
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.rollout.engines.factory import EngineMedia
    from tandem.rollout.openai_api.images import RequestImages


class MediaConversation(SampleConversation):
    """One sample of a prompt group of a model that takes more than text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begin with the prompt, as any conversation does."""
        super().__init__(*args, **kwargs)
        self._media = [*(self.group.media or ())]
        """Media of the prompt and of the environment's replies."""
        self._num_before_answer = 0
        """Media before the environment's last reply."""

    def request(self, request_id: int, sampling: SamplingParameters) -> SequenceRequest:
        """Return the request to the engine for the next response."""
        return msgspec.structs.replace(super().request(request_id, sampling), media=tuple(self._media))

    def add_answer(self, messages: chat_templates.Messages, token_ids: list[int], media: Media | None = None) -> None:
        """Append the environment's reply, with its media."""
        super().add_answer(messages, token_ids, media)
        self._num_before_answer = len(self._media)
        self._media += media or ()

    def take_back_answer(self) -> None:
        """Forget the environment's last reply: it has media that cannot be read, by trainers neither."""
        super().take_back_answer()
        del self._media[self._num_before_answer :]

    def finish(self, *args: Any, **kwargs: Any) -> tuple[SampleScored, SampleBatch]:
        """Return the finished sample, as any conversation does, with the columns of its media."""
        sample, arrays = super().finish(*args, **kwargs)
        return sample, arrays.replace(**media_columns([tuple(self._media)]))


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
        read_image = received.get
    else:
        assert config is not None, "a server keeps what it is sent"
        read_image = image_folder(config).get
    return {"read_image": read_image, "undrawable": undrawable, "limits": limits}
