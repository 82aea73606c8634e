"""What those send who mean no good: frames made of those of every message, and of nothing."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import strategies as st

from tandem.common.messages import PROTOCOL_VERSION, Hello
from tandem.common.wire import encode
from tests.protocol.examples import every_message, example

Frames = list[bytes]

CORPUS: list[Frames] = [
    [bytes(frame) for frame in encode(example(message), {"text": np.arange(7)})] for message in every_message()
]
"""One message of each kind, of every link, with an array."""
_HELLO = Hello(protocol_version=PROTOCOL_VERSION, service="rollout", host="here", pid=1)
_VERSIONS = (-(1 << 63), -1, 0, 1, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, (1 << 64) - 1)
_LARGE = 1 << 22
_DEEP = 100_000


def _bit_flipped(frame: bytes, place: int) -> bytes:
    if not frame:
        return frame
    byte, bit = divmod(place % (8 * len(frame)), 8)
    return frame[:byte] + bytes([frame[byte] ^ (1 << bit)]) + frame[byte + 1 :]


@st.composite
def _changed(draw: st.DrawFn) -> Frames:
    """A message of any link, with bits flipped, or cut off, or with frames in another order, doubled or left out."""
    frames = list(draw(st.sampled_from(CORPUS)))
    match draw(st.sampled_from(("as it is", "bits", "cut", "order", "doubled", "fewer", "more"))):
        case "bits":
            for place in draw(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=8)):
                row = place % len(frames)
                frames[row] = _bit_flipped(frames[row], place)
        case "cut":
            row = draw(st.integers(0, len(frames) - 1))
            frames[row] = frames[row][: draw(st.integers(0, max(0, len(frames[row]) - 1)))]
        case "order":
            frames = draw(st.permutations(frames))
        case "doubled":
            frames = frames * draw(st.integers(2, 50))
        case "fewer":
            frames = frames[: draw(st.integers(1, len(frames)))]
        case "more":
            frames += draw(st.lists(st.binary(max_size=64), min_size=1, max_size=100))
    return frames


def _version(number: int) -> Frames:
    plain = msgspec.msgpack.decode(encode(_HELLO)[0])
    return [msgspec.msgpack.encode(plain | {"protocol_version": number}), *map(bytes, encode(_HELLO)[1:])]


def _large(byte: int, size: int) -> Frames:
    return [bytes([byte]) * size]


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)

FRAMES: st.SearchStrategy[Frames] = st.one_of(
    _changed(),
    _changed(),
    st.lists(st.binary(max_size=512), min_size=1, max_size=6),
    st.builds(_version, st.sampled_from(_VERSIONS)),
    st.builds(lambda value: [msgspec.msgpack.encode(value)], _values),
    st.builds(
        lambda tag, value: [msgspec.msgpack.encode(value | {"type": tag})],
        st.sampled_from([message.__name__ for message in every_message()]),
        st.dictionaries(st.text(max_size=20), _values, max_size=4),
    ),
    # Arrays in arrays: no bottom, or one that is far down.
    st.builds(lambda byte: _large(byte, _DEEP), st.sampled_from((0x91, 0x81, 0xDC))),
    # A length that nothing follows: 4 GB of bytes, of an array, of a map.
    st.builds(lambda head: [head + b"\xff\xff\xff\xff"], st.sampled_from((b"\xc6", b"\xdb", b"\xdd", b"\xdf"))),
    st.builds(_large, st.integers(0, 255), st.integers(1, _LARGE)),
)
"""Any message that is none, or none that its sender may send."""
