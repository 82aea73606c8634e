"""What do 512 images of 448 x 448 cost a step: encoded bytes that each rank processes, or pixel values sent to it?

Ours: ranks that do not see the run's folder fetch encoded images by digest from an `ImageServer`, check them, decode
them and compute the pixel values of a Qwen2.5-VL. Beside it: the server computes those once and sends them. Stand-ins
take the place of 8 ranks, and with ``--long`` of 1 and 64 too, one after the other in a process of their own, each for
its share of the images. Where the run's folder is shared, ours sends nothing, and ranks read the same bytes from the
disk.

Then the coordinator's own step over 512 samples with images of 224, 448 and 896 pixels a side, as
`benchmarks.sample_plane` takes it. Its seconds should not grow with pixels: it is given tokens and digests.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import sample_plane as plane
from benchmarks.measure import keep_ratios
from benchmarks.smoke import IS_SMOKE, sized
from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.keys import KeyPair
from tandem.common.messages import FetchImages, ImageRef, ImagesFetched, Listener
from tandem.common.wire import CallerConnections, Frames, Hub, MessageCodec, encode
from tandem.config.models.vision_families import VISION
from tandem.samples.images import towers
from tandem.samples.images.fetching import ImageFetcher, ImageServer
from tandem.samples.images.reading import decode
from tandem.samples.images.store import ImageFolder

NUM_IMAGES, SIDE = sized(512, 8), sized(448, 56)
RANKS = sized((8,), (1, 2), long=(1, 8, 64))
SIDES = sized((224, 448, 896), (56, 112))
NUM_ROUNDS = sized(5, 1)
TIMEOUT_S = 300.0
FAMILY = VISION["qwen2_5_vl"]
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
PIXELS_OF_TOKEN = 28 * 28
RUN_ID = "run"


def photograph(side: int, seed: int) -> bytes:
    """Return a JPEG of soft colours and a little noise, as large as that of a photograph."""
    from PIL.Image import Resampling, fromarray

    draw = np.random.default_rng(seed)
    soft = fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side, side), Resampling.BICUBIC)
    noisy = np.clip(np.asarray(soft) + draw.normal(0, 8, (side, side, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    fromarray(noisy).save(file, "JPEG", quality=90)
    return file.getvalue()


def pixel_values(processor: Any, data: bytes) -> np.ndarray[Any, Any]:
    """Return what the tower takes of an image."""
    found = towers.pixels(FAMILY, processor, decode(data, "image")).tensors["pixel_values"]
    values: np.ndarray[Any, Any] = found.numpy()
    return values


# --- the ranks -------------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct):
    """What stand-ins are told."""

    at: Listener
    own: KeyPair
    shares: list[list[str]]
    """Digests of each rank's images."""
    folder: str
    processor: str
    sends_pixels: bool


def stand_in() -> None:
    """Be the ranks; print the seconds of each, of the processor and in all, and the bytes that came."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    processor = towers.load_processor(asked.processor)
    pixel_values(processor, photograph(56, 0))  # whatever is imported late
    found = []
    for rank, digests in enumerate(asked.shares):
        began, began_at = time.process_time(), time.perf_counter()
        if asked.sends_pixels:
            num_bytes = sum(size for size in receive(asked.at, asked.own, digests))
        else:
            images = ImageFolder(Path(asked.folder) / str(rank))
            fetcher = ImageFetcher(images, name=f"trainer-{rank}", run_id=RUN_ID, key_pair=asked.own)
            fetcher.begin(asked.at, asked.at.address)
            fetcher.fetch(digests, TIMEOUT_S)
            num_bytes = 0
            for digest in digests:
                data = images.get(digest)
                num_bytes += len(data)
                pixel_values(processor, data)
        found.append((time.process_time() - began, time.perf_counter() - began_at, num_bytes))
    print(json.dumps(found))


def receive(at: Listener, own: KeyPair, digests: list[str]) -> Iterator[int]:
    """Ask for the pixel values of one image after the other; yield their bytes."""
    codec: MessageCodec[ImagesFetched] = MessageCodec(ImagesFetched)
    callers, left = CallerConnections({"server": at}, own, max_bytes=1 << 30), [*digests]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while left:
            assert time.monotonic() < deadline
            for _, frames in callers.receive(0.2):
                if frames is not None:
                    left.pop()
                    yield codec.decode(frames).arrays["pixel_values"].nbytes
                if left:
                    callers.send("server", encode(FetchImages(run_id=RUN_ID, request_id=0, digests=(left[-1],))))
    finally:
        callers.close()


# --- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def sending_pixels(images: ImageFolder, processor: Any, admitted: AdmittedKeys) -> Iterator[Listener]:
    """Answer with pixel values, computed here."""
    hub, ended = Hub("tcp://127.0.0.1:*", new_key_pair(), admitted), threading.Event()
    codec: MessageCodec[FetchImages] = MessageCodec(FetchImages)

    def answer(request: FetchImages) -> Frames:
        values = pixel_values(processor, images.get(request.digests[0]))
        reply = ImagesFetched(request_id=0, digests=request.digests, sizes=(values.nbytes,), gone=())
        return encode(reply, {"pixel_values": values})

    def serve() -> None:
        while not ended.is_set():
            for peer, frames in hub.receive(0.2):
                hub.send(peer, answer(codec.decode(frames).message))
        hub.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield hub.at
    finally:
        ended.set()
        thread.join()


@contextmanager
def sending_encoded(images: ImageFolder, processor: Any, admitted: AdmittedKeys) -> Iterator[Listener]:
    """Answer with encoded bytes."""
    server = ImageServer("127.0.0.1", RUN_ID, images, admitted)
    try:
        yield server.at
    finally:
        server.close()


def step_of_ranks(
    serve: Callable[..., Any], num_ranks: int, images: ImageFolder, digests: list[str], processor: Path, folder: Path
) -> dict[str, float]:
    """Give each rank its share of the images; return bytes and seconds."""
    own = new_key_pair()
    with serve(images, towers.load_processor(processor), AdmittedKeys([own.public])) as at:
        asked = Asked(
            at=at,
            own=own,
            shares=[digests[rank::num_ranks] for rank in range(num_ranks)],
            folder=str(folder),
            processor=str(processor),
            sends_pixels=serve is sending_pixels,
        )
        began = time.process_time()
        words = [sys.executable, "-m", "benchmarks.test_images"]
        ended = subprocess.run(
            words, cwd=Path(__file__).parents[1], input=msgspec.json.encode(asked), capture_output=True, timeout=900
        )
        server_s = time.process_time() - began
    assert ended.returncode == 0, ended.stderr.decode()
    found = json.loads(ended.stdout)
    return {
        "bytes to all ranks": sum(num_bytes for *_, num_bytes in found),
        "seconds of processor time of the server": server_s,
        "seconds of processor time of a rank, median": statistics.median(cpu for cpu, *_ in found),
        "seconds of a rank, median": statistics.median(seconds for _, seconds, _ in found),
    }


# --- the coordinator -------------------------------------------------------------------------------------------------


class Seeing(plane.Cluster):
    """A coordinator whose prompts have an image each."""

    def __init__(self, side: int, length: int) -> None:
        num_tokens = side * side // PIXELS_OF_TOKEN
        grid = (1, side // 14, side // 14)
        self._images = {
            group: (
                ImageRef(
                    digest=hashlib.sha256(str(group).encode()).hexdigest(),
                    width=side,
                    height=side,
                    grid=grid,
                    num_tokens=num_tokens,
                ),
            )
            for group in range(plane.NUM_GROUPS)
        }
        super().__init__(*sized((8, 8), (2, 2)), length)
        shown = (5,) * num_tokens
        text = {group: prompt[: plane.PROMPT // 2] for group, prompt in self.prompts.items()}
        self.prompts = {group: (*shown, *prompt) for group, prompt in text.items()}
        self._num_made = length - len(self.prompts[0])

    def commands(self, way: float) -> Iterator[tuple[str, Any]]:
        for engine, command in super().commands(way):
            groups = tuple(msgspec.structs.replace(group, media=self._images[group.group]) for group in command.groups)
            yield engine, msgspec.structs.replace(command, groups=groups)


def step_of_coordinator(side: int) -> float:
    """Return the median of a step's seconds of processor time."""
    cluster = Seeing(side, 2048)
    try:
        cluster.step()  # warms up
        return statistics.median(cluster.step()["all"] for _ in range(NUM_ROUNDS))
    finally:
        cluster.stop()


@pytest.mark.timeout(1800)
def test_images_of_a_step(benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "NUM_GROUPS", sized(64, 8))
    processor = tmp_path / "processor"
    processor.mkdir()
    (processor / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    (processor / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    images, digests = ImageFolder(tmp_path / "images"), []
    for seed in range(NUM_IMAGES):
        data = photograph(SIDE, seed)
        digests.append(hashlib.sha256(data).hexdigest())
        images.put(digests[-1], data)
    ways = {"encoded, processed by each rank": sending_encoded, "pixel values": sending_pixels}
    ranks: dict[str, Any] = {}
    coordinator: dict[str, float] = {}

    def measure() -> None:
        for num_ranks in RANKS:
            for way, serve in ways.items():
                folder = tmp_path / f"{num_ranks}"
                found = step_of_ranks(serve, num_ranks, images, digests, processor, folder)
                ranks.setdefault(f"{num_ranks} ranks", {})[way] = found
        for side in SIDES:
            coordinator[f"{side} x {side}"] = step_of_coordinator(side)

    benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update(
        {
            "images": NUM_IMAGES,
            "pixels a side": SIDE,
            "load average of the machine": os.getloadavg(),
            "ranks": ranks,
            "seconds of processor time of the coordinator, a step": coordinator,
        }
    )
    encoded, pixels = ways
    sent = "bytes to all ranks"
    fewer = {name: of[pixels][sent] / of[encoded][sent] for name, of in ranks.items()}
    keep_ratios(benchmark, "bytes, times fewer than pixel values", fewer, aim=10)
    print()
    for name, found in ranks.items():
        print(name, json.dumps(found, indent=1))
    print(coordinator)
    for found in ranks.values():
        ours, theirs = (found[way] for way in ways)
        assert ours["bytes to all ranks"] < theirs["bytes to all ranks"] / 10 or IS_SMOKE
    assert IS_SMOKE or coordinator["896 x 896"] < 1.5 * coordinator["224 x 224"]


if __name__ == "__main__":
    stand_in()
