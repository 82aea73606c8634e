"""Read images of prompts from files, bytes and data URIs, within limits.

Nothing is fetched over a network. `reference` reads headers alone: it tells sizes and digests without decoding pixels,
so that the coordinator can do it for a whole data set. `decode` makes pixels. PIL is imported when the first image is
read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from tandem.common.distribution import install_command
from tandem.common.errors import ConfigError, DataError
from tandem.common.files import irregular
from tandem.samples.markers import MarkedImage

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

_T = TypeVar("_T")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ORIENTATION = 0x0112
"""EXIF's tag for how a camera was held."""
_END_OF_JPEG = b"\xff\xd9"
_MAX_SHOWN = 80
"""Most characters of a path or address in an error."""


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an image, so that none takes a process's memory or time."""

    max_bytes: int = 64 * 2**20
    """Most bytes of an encoded image."""
    max_pixels: int = 2**25
    """Most pixels: ``data.max_image_pixels``."""
    allow_paths: bool = True
    """Whether a text may name a file. False for what clients send: they could name any file of this machine."""


DEFAULT_LIMITS = ImageLimits()


def described(
    value: object, label: str, limits: ImageLimits = DEFAULT_LIMITS, folder: Path | None = None
) -> tuple[MarkedImage, bytes | Path]:
    """Return what a marker says of an image, and its bytes, or its path if it is a file.

    Raises `DataError` for an image that cannot be read, and `ConfigError` without Pillow.

    Args:
        value: encoded bytes, a path, a data URI, or a mapping with ``bytes``, ``path`` or ``url``, as the data sets of
            Hugging Face and the API of OpenAI have them.
        label: text that errors begin with, such as ``data.train: row FILE:12``.
        limits: limits of the image.
        folder: folder that relative paths begin at.
    """
    source = _source(value, label, limits, folder)
    data = _read(source, label, limits) if isinstance(source, Path) else source
    if len(data) > limits.max_bytes:
        raise DataError(f"{label}: the image has over {limits.max_bytes} bytes")
    width, height = _measure_size(data, label, limits)
    return MarkedImage(hashlib.sha256(data).hexdigest(), width, height), source


def decode(data: bytes, label: str = "image", limits: ImageLimits = DEFAULT_LIMITS) -> Image:
    """Return the pixels of an encoded image as RGB: turned as its EXIF data says, on white where it is transparent.

    Of an animation it is the first frame. Raises `DataError` if it is damaged or too large.
    """
    image = _open(data, label, limits)
    turn = _turn(image)
    _try(image.load, label)
    decoded: Image = _try(lambda: _as_rgb(image, turn), label)
    return decoded


def _source(value: object, label: str, limits: ImageLimits, folder: Path | None) -> bytes | Path:
    """Return the bytes of an image, or the path of its file."""
    if isinstance(value, Mapping):
        keys = ("bytes", "url", "path")  # some data sets have a path beside the bytes that leads nowhere
        inner = next((value[key] for key in keys if value.get(key) is not None), None)
        if inner is None or isinstance(inner, Mapping):
            raise DataError(f"{label}: the image is a mapping without bytes, url and path")
        return _source(inner, label, limits, folder)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str) and value[:5].lower() == "data:":
        return _decode_data_uri(value, label, limits)
    if isinstance(value, str) and _SCHEME.match(value):
        scheme, host, *_ = urlsplit(value) if "[" not in value else (value.split(":", 1)[0], "...")
        shown = f"{scheme}://{host}/..."[:_MAX_SHOWN]
        raise DataError(
            f"{label}: the image is {shown}, and nothing is fetched over a network: give a file or its bytes"
        )
    if not isinstance(value, (str, Path)) or not str(value):
        raise DataError(f"{label}: an image is bytes, a path or a data URI, not {type(value).__name__}")
    if not limits.allow_paths:
        raise DataError(f"{label}: an image is a data URI here, not {_show_path(value)}")
    return (folder or Path()) / value


def _decode_data_uri(value: str, label: str, limits: ImageLimits) -> bytes:
    head, comma, body = value.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise DataError(f"{label}: the image's data URI is not of the form data:image/...;base64,...")
    if len(body) > limits.max_bytes * 4 // 3 + 4:
        raise DataError(f"{label}: the image has over {limits.max_bytes} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{label}: the image's data URI is damaged: {error}") from error


def _read(path: Path, label: str, limits: ImageLimits) -> bytes:
    if (kind := irregular(path)) is not None:
        raise DataError(f"{label}: the image {_show_path(path)} is {kind}, not a file")
    try:
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except FileNotFoundError:
        raise DataError(f"{label}: no such image file {_show_path(path)}") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(f"{label}: cannot read the image {_show_path(path)}: {reason}") from error


def _show_path(path: object) -> str:
    text = ascii(str(path))[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"...{text[-_MAX_SHOWN:]}"


def _measure_size(data: bytes, label: str, limits: ImageLimits) -> tuple[int, int]:
    """Return width and height after the turn that EXIF asks for, and check what can be checked without decoding."""
    image = _open(data, label, limits)
    width, height = (int(side) for side in image.size)
    turn = _turn(image)
    if image.format == "PNG":
        _try(image.verify, label)  # the sums of its chunks
    elif image.format == "JPEG" and image.fp is not None and data.find(_END_OF_JPEG, image.fp.tell()) < 0:
        raise DataError(f"{label} is damaged: the image file is truncated")
    return (height, width) if turn >= 5 else (width, height)


def _open(data: bytes, label: str, limits: ImageLimits) -> ImageFile:
    """Return an image with its header read; its size is within limits."""
    kind = kind_of(data)
    if kind is None:
        raise DataError(f"{label}: the image is no PNG, JPEG, WEBP or GIF")
    if (canvas := _webp_canvas(data)) is not None:
        _check_size(canvas, label, limits)  # its reader takes memory for the canvas at once
    image = _try(lambda: _readers()[kind](io.BytesIO(data)), label)
    _check_size(image.size, label, limits)
    return image


def _check_size(size: tuple[int, int], label: str, limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise DataError(f"{label} is damaged: the image is {width} × {height} pixels")
    if width * height > limits.max_pixels:
        raise DataError(
            f"{label}: the image is {width} × {height} pixels, data.max_image_pixels is {limits.max_pixels}"
        )


def kind_of(data: bytes) -> str | None:
    """Return which of the formats that are read an encoded image has, by its first bytes; None if it has none."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "WEBP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Return the size that an extended WEBP file announces; None for others, which hold a single small header."""
    if kind_of(data) != "WEBP" or data[12:16] != b"VP8X" or len(data) < 30:
        return None
    return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1


def _readers() -> dict[str, Callable[[Any], ImageFile]]:
    """Return PIL's readers. `Image.open` would refuse or warn of a large image without saying how large it is."""
    try:
        from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    except ImportError as error:
        raise ConfigError(
            f"images need the package pillow, which is not installed: {install_command('vision')}"
        ) from error
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged remarks about a picture that is whole
    return {
        "PNG": PngImagePlugin.PngImageFile,
        "JPEG": JpegImagePlugin.JpegImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "WEBP": WebPImagePlugin.WebPImageFile,
    }


def _try(act: Callable[[], _T], label: str) -> _T:
    try:
        return act()
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # readers raise whatever a damaged file makes them raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{label} is damaged: {reason[:200]}") from error


def _turn(image: ImageFile) -> int:
    """Return EXIF's number for how to turn an image, 1 for not at all; taken before pixels are decoded."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # it could follow the pixels, which only decoding tells
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged remarks do not damage the picture
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _as_rgb(image: Image, turn: int) -> Image:
    from PIL import Image as images

    turns = images.Transpose
    method = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(turn)
    if image.mode.startswith("I"):  # 16 bits a pixel; PIL would cut off all that is above 255
        values = np.asarray(image).astype(np.int64) >> 8
        image = images.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    elif "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        drawn = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", drawn.size, "white"), drawn)
    turned = image if method is None else image.transpose(method)
    return turned.convert("RGB")
