"""The media of samples, which models take besides tokens: images alone, and none in a run of text.

What reads them is imported only for a model that takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tandem.common.messages import Listener
from tandem.config import Config
from tandem.config.models.families import is_text_only
from tandem.launch.service import ServiceContext
from tandem.samples.batch import MEDIA, SampleBatch
from tandem.trainer.micro_batches import MediaFormat


class MediaFetcher(Protocol):
    """The way to media that the run's folder lacks here."""

    def begin(self, images_at: Listener | None, coordinator: str) -> None:
        """Take the coordinator's listener for them; its host is that of `coordinator`, its own address."""
        ...

    def fetch_batch(self, batch: SampleBatch, sources: Mapping[str, Listener], timeout_s: float) -> dict[str, str]:
        """Have the media of a batch in the folder; return why some are not to be had, by the source of a sample."""
        ...


def find_media_format(config: Config) -> MediaFormat | None:
    """Return the format of a run's media; None for text alone. Raises `ModelError`."""
    if is_text_only(config.policy):
        return None
    from tandem.trainer.batching.images import ImageFormat

    return ImageFormat.of(config)


def media_of(samples: SampleBatch, config: Config) -> MediaFormat | None:
    """Return the format of the media of samples; None where they have none. Raises `ModelError`."""
    return find_media_format(config) if MEDIA[0] in samples.columns else None


def make_media_fetcher(context: ServiceContext) -> MediaFetcher:
    """Return the way to media that the run's folder lacks here."""
    from tandem.samples.images.fetching import ImageFetcher
    from tandem.samples.images.rows import image_folder

    return ImageFetcher(image_folder(context.config), name=context.name, run_id=context.run_id, key_pair=context.keys)
