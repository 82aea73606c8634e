"""Fetching of images that a process's own view of the run's folder lacks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from samples_harness import RUN_ID, TRAINERS

from tandem.common import messages
from tandem.common.curve import new_key_pair
from tandem.common.messages import FetchImages, ImagesFetched, Listener
from tandem.common.wire import Frames, Hub, MessageCodec, encode
from tandem.samples.images import fetching
from tandem.samples.images.fetching import ImageFetcher, ImageServer
from tandem.samples.images.store import ImageFolder
from tandem.samples.sample_store import SampleStore
from tests.harness.members import MEMBER

ADDRESS = "tcp://127.0.0.1:1"
"""The coordinator's own; images have a port beside it."""


def filled(folder: Path, *images: bytes) -> ImageFolder:
    """Return a folder with these images."""
    found = ImageFolder(folder)
    for image in images:
        found.put(digest_of(image), image)
    return found


def digest_of(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()


def fetcher_into(folder: ImageFolder, at: Listener | None) -> ImageFetcher:
    fetcher = ImageFetcher(folder, name="trainer-1", run_id=RUN_ID, key_pair=MEMBER)
    fetcher.begin(at, ADDRESS)
    return fetcher


@contextmanager
def served(images: ImageFolder) -> Iterator[Listener]:
    server = ImageServer("127.0.0.1", RUN_ID, images, TRAINERS)
    try:
        yield server.at
    finally:
        server.close()


@contextmanager
def stored(images: ImageFolder) -> Iterator[Listener]:
    """Serve images beside samples, as a rollout does."""
    store = SampleStore("127.0.0.1", RUN_ID, 10, TRAINERS)
    store.give_media(partial(fetching.answer, images, RUN_ID))
    try:
        yield store.at
    finally:
        store.close()


@pytest.fixture
def here(tmp_path: Path) -> ImageFolder:
    return ImageFolder(tmp_path / "here")


def test_what_is_lacking_comes_in_messages_of_bounded_size(
    tmp_path: Path, here: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [bytes([number]) * 40 for number in range(9)] + [b"large" * 100]
    sent: list[tuple[int, int]] = []
    answer = fetching.answer

    def counted(*args: object) -> Frames:
        frames = answer(*args)  # type: ignore[arg-type]
        reply = MessageCodec[ImagesFetched](ImagesFetched).decode(frames)
        sent.append((len(reply.message.digests), len(reply.arrays["bytes_B"])))
        return frames

    monkeypatch.setattr(fetching, "answer", counted)
    monkeypatch.setattr(messages, "MAX_IMAGE_BYTES_FETCHED", 100)
    here.put(digest_of(images[0]), images[0])
    with served(filled(tmp_path / "there", *images)) as at:
        assert fetcher_into(here, at).fetch(map(digest_of, images), 20.0) == []
        assert sent == [(2, 80)] * 4 + [(1, 500)], "a single image is sent whatever its size"
        assert fetcher_into(here, at).fetch(map(digest_of, images), 20.0) == []
    assert len(sent) == 5, "nothing is asked for that is there"
    assert [here.get(digest_of(image)) for image in images] == images


def test_samples_sources_are_asked_before_the_coordinator(tmp_path: Path, here: ImageFolder) -> None:
    ours, theirs, drawn = b"rollout-0's own", b"rollout-1's own", b"a data set's"
    with ExitStack() as stack:
        sources = {
            "rollout-0": stack.enter_context(stored(filled(tmp_path / "a", ours))),
            "rollout-1": stack.enter_context(stored(filled(tmp_path / "b", theirs))),
        }
        at = stack.enter_context(served(filled(tmp_path / "c", drawn)))
        fetcher = fetcher_into(here, at)
        wanted = {digest_of(ours): "rollout-0", digest_of(theirs): "rollout-1", digest_of(drawn): "rollout-1"}
        assert fetcher.fetch_from(wanted, sources, 20.0) == {}
        assert all(here.has(digest) for digest in wanted)
        gone = digest_of(b"nobody's")
        missing = fetcher.fetch_from({gone: "rollout-1"}, sources, 20.0)
    why = f"trainer-1 lacks image {gone[:12]}: rollout-1: it does not have it; coordinator: it does not have it"
    assert missing == {"rollout-1": why}


def test_a_damaged_image_and_one_of_another_run_are_not_given(tmp_path: Path, here: ImageFolder) -> None:
    images = filled(tmp_path / "there", b"whole", b"harmed")
    harmed = digest_of(b"harmed")
    images.path(harmed).write_bytes(b"other")
    with served(images) as at:
        missing = fetcher_into(here, at).fetch([digest_of(b"whole"), harmed], 20.0)
        assert missing == [f"trainer-1 lacks image {harmed[:12]}: coordinator: it does not have it"]
        assert here.has(digest_of(b"whole"))
        other = ImageFetcher(ImageFolder(tmp_path / "other"), name="trainer-1", run_id="other", key_pair=MEMBER)
        other.begin(at, ADDRESS)
        assert "does not have it" in other.fetch([digest_of(b"whole")], 20.0)[0]


@contextmanager
def answering(answer: Callable[[FetchImages], Frames | None]) -> Iterator[Listener]:
    """Answer by a function, as a process that is not ours might."""
    hub = Hub("tcp://127.0.0.1:*", new_key_pair(), TRAINERS)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            for peer, frames in hub.receive(0.05):
                reply = answer(MessageCodec[FetchImages](FetchImages).decode(frames).message)
                if reply is not None:
                    hub.send(peer, reply)
        hub.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield hub.at
    finally:
        ended.set()
        thread.join()


def reply_with(data: bytes, **changes: object) -> Callable[[FetchImages], Frames]:
    def answer(request: FetchImages) -> Frames:
        fields = {"request_id": request.request_id, "digests": request.digests, "sizes": (len(data),), "gone": ()}
        return encode(ImagesFetched(**fields | changes), {"bytes_B": np.frombuffer(data, np.uint8)})  # type: ignore[arg-type]

    return answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (reply_with(b"another"), "it sent what is not asked for: bytes_B: an image is not image"),
        (reply_with(b"asked", sizes=(4,)), "sizes: not those of 1 images of 5 bytes"),
        (reply_with(b"", digests=(), sizes=()), "digests: not those that were asked for"),
        (reply_with(b"asked", gone=("0" * 64,)), "digests: not those that were asked for"),
        (reply_with(b"asked", digests=("0" * 64,)), "digests: not those that were asked for"),
        (lambda _: encode(ImagesFetched(request_id=0, digests=(), sizes=(), gone=())), "digests: not those"),
        (lambda _: [b"\xc1"], "not a message of this link"),
        (lambda _: None, "it has not sent it within 0.5 s"),
    ],
)
def test_what_comes_is_checked(answer: Callable[[FetchImages], Frames | None], why: str, here: ImageFolder) -> None:
    with answering(answer) as at:
        (said,) = fetcher_into(here, at).fetch([digest_of(b"asked")], 0.5 if "within" in why else 20.0)
    assert said.startswith(f"trainer-1 lacks image {digest_of(b'asked')[:12]}: coordinator: ")
    assert why in said
    assert not here.has(digest_of(b"asked"))


def test_nobody_is_waited_for_for_ever(here: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PATIENCE_S", 0.3)
    gone = Listener(address="tcp://127.0.0.1:9", public_key=MEMBER.public)
    assert (
        "coordinator: nobody answers at tcp://127.0.0.1:9"
        in fetcher_into(here, gone).fetch([digest_of(b"asked")], 20.0)[0]
    )
    assert "nobody could be asked" in fetcher_into(here, None).fetch([digest_of(b"asked")], 20.0)[0]
