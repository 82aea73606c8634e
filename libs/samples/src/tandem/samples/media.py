"""The media of a run, which prompts have besides tokens: files, the way between processes, texts.

Images are the only kind. What reads them is imported where a model takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tandem.common.curve import AdmittedKeys
from tandem.common.keys import KeyPair
from tandem.common.messages import FetchMedia, Listener, Media
from tandem.common.wire import Frames
from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.samples.tokenizer import Tokenizer


class MediaServer(Protocol):
    """The media of a run, for its processes on other hosts."""

    at: Listener
    """Its listener."""

    def close(self) -> None:
        """Stop serving."""
        ...


class MediaFetcher(Protocol):
    """A process's copy of the run's media, and its way to those that it lacks."""

    def begin(self, media_at: Listener | None, coordinator: str) -> None:
        """Take the coordinator's listener for them; its host is that of `coordinator`, its own address."""
        ...

    def fetch(self, digests: Iterable[str], timeout_s: float) -> list[str]:
        """Have these in the folder; return why some are not to be had, with the names of those asked."""
        ...

    def fetch_batch(self, batch: SampleBatch, sources: Mapping[str, Listener], timeout_s: float) -> dict[str, str]:
        """Have the media of a batch in the folder; return why some are not to be had, by the source of a sample."""
        ...


class MediaTexts(Protocol):
    """A decoder of sequences with media."""

    def text_of(self, token_ids: Sequence[int], digests: Sequence[str], references: Media = ()) -> str:
        """Return the text of tokens, special ones included, with a marker for each of the media.

        Args:
            token_ids: tokens of a part of a sequence that divides no media.
            digests: its media, in order; more of them may follow.
            references: references of media whose files need not be asked.

        """
        ...


def serve_media(config: Config, host: str, run_id: str, admitted: AdmittedKeys) -> MediaServer:
    """Serve the run's media on a port of `host` to the processes with these keys."""
    from tandem.samples.images.fetching import ImageServer
    from tandem.samples.images.rows import image_folder

    return ImageServer(host, run_id, image_folder(config), admitted)


def answer_requests(config: Config, run_id: str) -> Callable[[FetchMedia], Frames]:
    """Return the answers to requests for media that this process's run folder has."""
    from tandem.samples.images.fetching import answer
    from tandem.samples.images.rows import image_folder

    return partial(answer, image_folder(config), run_id)


def make_media_fetcher(config: Config, name: str, run_id: str, key_pair: KeyPair) -> MediaFetcher:
    """Return the way to media that the run's folder lacks here, for the process of this name with these keys."""
    from tandem.samples.images.fetching import ImageFetcher
    from tandem.samples.images.rows import image_folder

    return ImageFetcher(image_folder(config), name=name, run_id=run_id, key_pair=key_pair)


def read_texts(tokenizer: Tokenizer, config: Config) -> MediaTexts | None:
    """Return the decoder of a run's sequences; None if its model takes text alone."""
    if not tokenizer.takes_media:
        return None
    from tandem.samples.images.chat import marked_texts
    from tandem.samples.images.rows import image_folder

    return marked_texts(tokenizer, image_folder(config))


def read_texts_in(run: Path, tokenizer: Tokenizer | None) -> MediaTexts | None:
    """Return the decoder of the sequences of a run's folder; None if its model takes text alone, or is not known."""
    if tokenizer is None or not tokenizer.takes_media:
        return None
    from tandem.samples.images.chat import marked_texts
    from tandem.samples.images.store import ImageFolder

    return marked_texts(tokenizer, ImageFolder(run / "images"))
