"""Messages as frames: how they are encoded, decoded and checked; the first one in any version."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import VersionMismatch, WireError
from tandem.common.messages import PROTOCOL_VERSION, Message
from tandem.common.values import decode_number, encode_number

Incoming = TypeVar("Incoming")
Arrays = Mapping[str, NDArray[Any]]
Frames = list[bytes | memoryview]

memory_of = operator.attrgetter("buffer")
"""Returns the memory of a frame that was received without a copy."""
_ARRAY_KINDS = "biuf"
"""NumPy kinds that may travel: booleans, integers, floats. Objects and strings may not."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for malformed bytes; the last two are for invalid text and for excessive nesting."""

_MOST_ARRAYS = 64
_MOST_HEADER_BYTES, _MOST_MANIFEST_BYTES = 1 << 30, 1 << 16
"""Size limits far beyond any message: the largest headers hold a model's layout or the prompts of a step."""
_WHERE = re.compile(r"(.*?)(?: - at (`key` in )?`\$\.?(.*)`)?", re.DOTALL)
"""The form of msgspec's error messages: what is wrong, and where."""


class HelloProbe(msgspec.Struct, tag="Hello"):
    """The fields of a `Hello` that every version can read, whatever the later fields have become."""

    protocol_version: int
    service: Any = "process"
    host: Any = "?"
    pid: Any = 0


def check_version(frame: bytes | memoryview) -> None:
    """Raise `VersionMismatch` if the frame is a `Hello` of another version, `WireError` if it is not a `Hello`."""
    try:
        probe = msgspec.msgpack.decode(frame, type=HelloProbe)
    except UNDECODABLE as error:
        raise WireError(f"expected a Hello: {error}") from error
    if probe.protocol_version != PROTOCOL_VERSION:
        who = f"{probe.service} (pid {probe.pid} on {probe.host})"
        raise VersionMismatch(probe.protocol_version, PROTOCOL_VERSION, who)


class ArrayHeader(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of one raw frame."""

    name: Annotated[str, msgspec.Meta(max_length=100)]
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=8)]


class ReceivedMessage(msgspec.Struct, Generic[Incoming], frozen=True):
    """A message and the arrays that came with it, as read-only views of the received frames."""

    message: Incoming
    arrays: dict[str, NDArray[Any]]


class AnyTag(msgspec.Struct):
    """The tag of any message, with the id of the command that it is or answers."""

    type: str
    command_id: int | None = None


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_number)
tag_decoder = msgspec.msgpack.Decoder(AnyTag)
_manifest_decoder = msgspec.msgpack.Decoder(list[ArrayHeader])


def encode(message: Message, arrays: Arrays | None = None) -> Frames:
    """Return the frames of a message; array frames are views of the arrays, which must not change until sent.

    Raises `WireError` for an array that is not of booleans, integers or floats.
    """
    header = _encoder.encode(message)
    if not arrays:
        return [header]
    headers: list[ArrayHeader] = []
    frames: Frames = []
    for name, array in arrays.items():
        if array.dtype.kind not in _ARRAY_KINDS:
            raise WireError(f"array {name!r} of dtype {array.dtype} may not travel")
        headers.append(ArrayHeader(name, array.dtype.str, array.shape))
        # View it as bytes: a buffer of a dtype with foreign byte order could not be cast to them. A zero-size array has
        # no memory to view, so its frame is empty.
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b"")
    return [header, _encoder.encode(headers), *frames]


class MessageCodec(Generic[Incoming]):
    """A decoder for the messages of one direction of one kind of link."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(union, ext_hook=decode_number)

    def decode(self, frames: Sequence[bytes | memoryview]) -> ReceivedMessage[Incoming]:
        """Return a message and its arrays. Raises `WireError` for anything that is not a message of this link."""
        if not frames:
            raise WireError("empty message")
        if len(frames) > 2 + _MOST_ARRAYS:
            raise WireError(f"{len(frames)} frames, but a message has at most {_MOST_ARRAYS} arrays")
        limits = ("header", _MOST_HEADER_BYTES), ("list of arrays", _MOST_MANIFEST_BYTES)
        for frame, (name, max_bytes) in zip(frames, limits, strict=False):  # before any is read
            if len(frame) > max_bytes:
                raise WireError(f"a {name} of {len(frame)} bytes, but the limit is {max_bytes}")
        try:
            message = self._decoder.decode(frames[0])
        except UNDECODABLE as error:
            raise _describe_undecodable(frames[0], error) from error
        try:
            headers = _manifest_decoder.decode(frames[1]) if len(frames) > 1 else []
        except UNDECODABLE as error:
            raise WireError(f"not a message of this link: its list of arrays: {error}") from error
        if len(headers) != max(0, len(frames) - 2):
            raise WireError(f"{len(headers)} arrays announced, {max(0, len(frames) - 2)} came")
        arrays: dict[str, NDArray[Any]] = {}
        for header, frame in zip(headers, frames[2:], strict=True):
            if header.name in arrays:
                raise WireError("two arrays of the same name")
            arrays[header.name] = _decode_array(header, frame)
        return ReceivedMessage(message, arrays)


def _describe_undecodable(frame: bytes | memoryview, error: Exception) -> WireError:
    """Return the error for a malformed header, with message, field and command as far as they can be read."""
    try:
        tag = tag_decoder.decode(frame)
    except UNDECODABLE:
        return WireError(f"not a message of this link: {error}")
    match = _WHERE.fullmatch(str(error))
    if not isinstance(error, msgspec.ValidationError) or match is None or match[3] == "type":
        return WireError(f"not a message of this link: {error}", tag.command_id)
    field = f".{match[3]}" if match[3] else ""
    of_key = "for a key: " if match[2] else ""
    return WireError(f"{tag.type}{field}: {of_key}{match[1]}", tag.command_id)


def _decode_array(header: ArrayHeader, frame: bytes | memoryview) -> NDArray[Any]:
    try:
        dtype = np.dtype(header.dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # NumPy parses the text, and its parser's errors escape
        raise WireError(f"array {header.name!r} has unknown dtype {header.dtype!r}") from error
    if dtype.kind not in _ARRAY_KINDS or min(header.shape, default=0) < 0:
        raise WireError(f"array {header.name!r} of dtype {header.dtype!r} and shape {header.shape} may not travel")
    if len(frame) != dtype.itemsize * math.prod(header.shape):
        raise WireError(f"array {header.name!r} should be {header.shape} {dtype}, but its frame has {len(frame)} bytes")
    try:
        array = np.frombuffer(frame, dtype=dtype).reshape(header.shape)
    except (ValueError, OverflowError) as error:  # the dimensions exceed what NumPy can count
        raise WireError(f"array {header.name!r} has an impossible shape {header.shape}") from error
    array.flags.writeable = False  # the frame belongs to the message, which may have other holders
    return array
