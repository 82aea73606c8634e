"""The media of samples, which models take besides tokens: images alone, and none in a run of text.

What reads them is imported only for a model that takes them.
"""

from __future__ import annotations

from tandem.config import Config
from tandem.config.models.families import is_text_only
from tandem.trainer.micro_batches import MediaFormat


def find_media_format(config: Config) -> MediaFormat | None:
    """Return the format of a run's media; None for text alone. Raises `ModelError`."""
    if is_text_only(config.policy):
        return None
    from tandem.trainer.batching.images import ImageFormat

    return ImageFormat.of(config)
