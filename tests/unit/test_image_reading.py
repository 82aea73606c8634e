"""Images are read within limits, and what cannot be read is refused in a line."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tandem.common.errors import ConfigError, DataError
from tandem.samples.images.reading import ImageLimits, decode, described
from tests.harness.vision_models import encoded, picture

WHERE = "data.train: row photos.jsonl:12"


def refused(value: object, says: str, **options: Any) -> None:
    with pytest.raises(DataError, match=says) as caught:
        described(value, WHERE, **options)
    assert str(caught.value).startswith(WHERE)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_form_gives_the_same_image(kind: str, tmp_path: Path) -> None:
    data = encoded(picture(50, 30), kind)
    path = tmp_path / "a picture.bin"
    path.write_bytes(data)
    uri = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
    ref, kept = described(data, WHERE)
    assert (ref.digest, ref.width, ref.height) == (hashlib.sha256(data).hexdigest(), 50, 30)
    assert kept == data
    for value in (uri, {"url": uri}, {"bytes": data, "path": "nowhere.png"}, bytearray(data)):
        assert described(value, WHERE) == (ref, data)
    for value in (path, str(path), {"bytes": None, "path": str(path)}):
        assert described(value, WHERE) == (ref, path)
    assert described(path.name, WHERE, folder=tmp_path) == (ref, path)
    assert decode(data).size == (50, 30)


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    refused("missing.png", r"no such image file .*missing\.png", folder=tmp_path)
    refused(str(tmp_path), "is a directory, not a file")
    refused("a\0b", "cannot read the image")
    refused("x" * 5000, "cannot read the image")
    refused(b"", "no PNG, JPEG, WEBP or GIF")
    refused(b"<svg/>", "no PNG, JPEG, WEBP or GIF")
    refused({}, "without bytes, url and path")
    refused({"bytes": {"bytes": {}}}, "without bytes, url and path")
    for value in (3, None, [], ""):
        refused(value, "an image is bytes, a path or a data URI")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refused(fifo, "is a FIFO, not a file")


@pytest.mark.parametrize(
    "value", ["https://example.org/a.png", "http://[::1/a.png", "HTTP://h/" + "x" * 9000, "s3://bucket/a", "file:///a"]
)
def test_addresses_are_refused(value: str) -> None:
    refused(value, "nothing is fetched over a network")
    refused({"url": value}, "nothing is fetched over a network")


@pytest.mark.parametrize("value", ["data:,x", "data:image/png,abc", "data:image/png;base64", "data:"])
def test_other_data_uris_are_refused(value: str) -> None:
    refused(value, "not of the form")


def test_a_damaged_data_uri_is_refused() -> None:
    refused("data:image/png;base64,ab*d", "data URI is damaged")
    refused("data:image/png;base64,abä", "data URI is damaged")


def test_clients_cannot_name_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture()))
    limits = ImageLimits(allow_paths=False)
    refused(str(path), "an image is a data URI here", limits=limits)
    refused({"path": str(path)}, "an image is a data URI here", limits=limits)


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    data = encoded(picture())
    path = tmp_path / "a.png"
    path.write_bytes(data)
    limits = ImageLimits(max_bytes=len(data) - 1)
    for value in (data, path, f"data:image/png;base64,{base64.b64encode(data).decode() * 3}"):
        refused(value, f"over {len(data) - 1} bytes", limits=limits)
    assert described(path, WHERE, ImageLimits(max_bytes=len(data)))[0].width == 48


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in ((b"IHDR", header), *chunks, (b"IEND", b"")))


def webp(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + sides


@pytest.mark.parametrize(
    "bomb",
    [
        png(50000, 50000, (b"IDAT", zlib.compress(bytes(100)))),
        webp(16383, 16383),
        b"GIF89a" + struct.pack("<HH", 60000, 60000) + bytes(3) + b",\0\0\0\0" + struct.pack("<HH", 9, 9) + b"\0\2\0;",
        encoded(picture(8, 8), "JPEG").replace(b"\x00\x08\x00\x08\x03", b"\xff\xff\xff\xff\x03"),
    ],
    ids=["png", "webp", "gif", "jpeg"],
)
def test_a_bomb_is_known_by_its_header(bomb: bytes) -> None:
    refused(bomb, r"the image is \d{5} × \d{5} pixels, data\.max_image_pixels is 33554432")
    with pytest.raises(DataError, match="max_image_pixels"):
        decode(bomb)


def test_the_limit_of_pixels() -> None:
    data = encoded(picture(20, 10))
    assert described(data, WHERE, ImageLimits(max_pixels=200))[0].width == 20
    refused(data, r"20 × 10 pixels, data\.max_image_pixels is 199", limits=ImageLimits(max_pixels=199))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_truncated_image_is_refused_by_its_header(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    refused(data[: len(data) // 2], "is damaged")
    refused(data[:40], "is damaged")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_image_is_not_decoded(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    for length in (12, 40, len(data) // 2, len(data) - 200):
        with pytest.raises(DataError, match=r"^image is damaged|no PNG"):
            decode(data[:length])


def test_a_flipped_bit_of_a_png_is_seen() -> None:
    data = bytearray(encoded(picture()))
    data[60] ^= 1
    refused(bytes(data), "is damaged")


@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]),
    at=st.integers(0, 2000),
    junk=st.binary(max_size=30),
    cut=st.integers(0, 2000),
)
def test_damage_is_a_data_error_or_an_image(kind: str, at: int, junk: bytes, cut: int) -> None:
    data = encoded(picture(40, 30), kind)
    at %= len(data)
    damaged = data[:at] + junk + data[at + len(junk) : len(data) - cut % len(data)]
    sizes = []
    for read in (lambda: described(damaged, WHERE)[0], lambda: decode(damaged)):
        with contextlib.suppress(DataError):
            image: Any = read()
            sizes.append((image.width, image.height))
    assert len(set(sizes)) < 2


def test_one_pixel() -> None:
    for size in ((1, 1), (1, 3), (3, 1)):
        data = encoded(Image.new("RGB", size, "red"))
        ref, _ = described(data, WHERE)
        assert (ref.width, ref.height) == size == decode(data).size


def test_transparent_places_are_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.putpixel((1, 2), (255, 0, 0, 255))
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.putpixel((1, 2), 1)
    for data in (
        encoded(clear),
        encoded(clear, "WEBP", lossless=True),
        encoded(palette, transparency=0),
        encoded(palette, "GIF", transparency=0),
    ):
        image = decode(data)
        assert (image.mode, image.getpixel((0, 0)), image.getpixel((1, 2))) == ("RGB", (255, 255, 255), (255, 0, 0))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "RGB", "RGBA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new("RGB", (8, 8), "white").convert(mode)
    decoded = decode(encoded(image, "JPEG" if mode == "CMYK" else "PNG"))
    assert (decoded.mode, decoded.size, decoded.getpixel((3, 3))) == ("RGB", (8, 8), (255, 255, 255))


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    values = np.full((4, 6), 0x8000, np.uint16)
    data = encoded(Image.fromarray(values))
    image = decode(data)
    assert (image.mode, image.size, image.getpixel((1, 1))) == ("RGB", (6, 4), (128, 128, 128))


def test_of_an_animation_it_is_the_first_frame() -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert described(data, WHERE)[0].width == 8
        assert decode(data).getpixel((2, 2)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_an_image_is_turned_as_its_camera_was_held(kind: str, turn: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(picture(50, 30), kind, exif=exif)
    ref, _ = described(data, WHERE)
    image = decode(data)
    assert (ref.width, ref.height) == image.size == ((30, 50) if turn >= 5 else (50, 30))
    with Image.open(io.BytesIO(data)) as theirs:
        assert ImageOps.exif_transpose(theirs).convert("RGB").tobytes() == image.tobytes()


def test_damaged_exif_data_turns_nothing() -> None:
    data = encoded(picture(50, 30), "JPEG", exif=b"Exif\0\0MM\0*" + b"\xff" * 40)
    assert described(data, WHERE)[0].width == 50
    assert decode(data).size == (50, 30)


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"images need the package pillow.*\[vision\]"):
        described(picture_bytes, WHERE)


picture_bytes = encoded(picture())


def test_no_torch_is_imported_and_no_pil_for_texts() -> None:
    probe = (
        "import sys\n"
        "import tandem.samples.images.families, tandem.samples.images.store, tandem.samples.images.chat\n"
        "import tandem.samples.images.reading, tandem.samples.tokenizer\n"
        "print([name for name in ('torch', 'PIL', 'transformers') if name in sys.modules])\n"
        "import base64\n"
        "from tandem.config.models.vision_families import VISION\n"
        "settings = tandem.samples.images.families.ImageSettings(family=VISION['gemma3'], image_token_id=5,"
        " tokens_per_image=4)\n"
        f"data = base64.b64decode({base64.b64encode(picture_bytes)!r})\n"
        "tandem.samples.images.reading.described(data, 'here')\n"
        "print('torch' in sys.modules, 'PIL' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\nFalse True\n", done.stderr
