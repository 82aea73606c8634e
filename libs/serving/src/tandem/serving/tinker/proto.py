"""The five protobuf messages of the SDK that the front end reads and writes, by their field numbers.

The SDK sends the data of a gradient as protobuf, and takes that and samples only as protobuf. The numbers are those of
its ``tinker_public.proto``. All input is checked: `MalformedMessage` says what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_MOST_BITS = 70
STOP_REASONS = {"stop": 0, "length": 1}

_NO_LOGPROB = -99999.0
"""Log-probability, of token 0, that stands for none."""

Value = int | bytes
Likeliest = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the likeliest first."""


class MalformedMessage(Exception):
    """The bytes are not the message that they should be."""


class TrainingDatum(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence to train on."""

    token_ids: NDArray[np.int32]
    inputs: dict[str, NDArray[np.float32] | NDArray[np.int64]]
    """Loss inputs, by name."""


class GradientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The SDK's ``ForwardBackwardRequest``."""

    model_id: str
    seq_id: int
    data: tuple[TrainingDatum, ...]
    loss: str
    settings: dict[str, float | str]
    is_forward: bool
    problem: str = ""
    """The first thing wrong with the rest, which may be incomplete then; empty if nothing is."""


# --- reading ---------------------------------------------------------------------------------------------------------


def read_gradient_request(body: bytes) -> GradientRequest:
    """Read a request. Raises `MalformedMessage` for one that does not say which it is: the client's numbers go on."""
    model_id, loss, seq_id, is_forward, problem = "", "", 0, False, ""
    data: list[TrainingDatum] = []
    old: dict[str, float | str] = {}
    new: dict[str, float | str] = {}
    for number, value in _fields(body):
        try:
            match number, value:
                case 1, bytes():
                    model_id = _text(value)
                case 2, int():
                    seq_id = value
                case 3, bytes():
                    data.append(_datum(value))
                case 4, bytes():
                    loss = _text(value)
                case 5, bytes():
                    name, setting = _entry(value)
                    old[name] = _double(setting)
                case 6, int():
                    is_forward = bool(value)
                case 7, bytes():
                    name, setting = _entry(value)
                    new[name] = _setting(setting)
                case _:
                    raise MalformedMessage(f"an unknown field {number}")
        except MalformedMessage as error:
            place = f"data[{len(data)}]: " if number == 3 else ""
            problem = problem or f"{place}{error}"
    if not model_id:
        raise MalformedMessage(problem or "it names no model")
    return GradientRequest(
        model_id=model_id,
        seq_id=seq_id,
        data=tuple(data),
        loss=loss,
        settings=new or old,
        is_forward=is_forward,
        problem=problem,
    )


def _fields(body: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the fields of a message: number, and an integer or bytes."""
    at, size = 0, len(body)
    while at < size:
        tag, at = _varint(body, at)
        kind, number = tag & 7, tag >> 3
        if kind == _VARINT:
            value, at = _varint(body, at)
            yield number, value
            continue
        if kind == _BYTES:
            length, at = _varint(body, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise MalformedMessage(f"no field has the wire type {kind}")
        if at + length > size:
            raise MalformedMessage(f"field {number} is cut off")
        yield number, body[at : at + length]
        at += length


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(body) or shift >= _MOST_BITS:
            raise MalformedMessage("a number is cut off, or too long")
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage("a text is not UTF-8") from error


def _double(value: Value) -> float:
    if isinstance(value, int) or len(value) not in (0, 8):
        raise MalformedMessage("a number is no double")
    return float(struct.unpack("<d", value)[0]) if value else 0.0


def _entry(body: bytes) -> tuple[str, Value]:
    """Read an entry of a map."""
    key = ""
    value: Value = b""
    for number, content in _fields(body):
        if number == 1 and isinstance(content, bytes):
            key = _text(content)
        elif number == 2:
            value = content
    return key, value


def _setting(body: Value) -> float | str:
    for number, content in _fields(body) if isinstance(body, bytes) else ():
        if number == 1:
            return _double(content)
        if number == 2 and isinstance(content, bytes):
            return _text(content)
    raise MalformedMessage("loss_fn_config_v2: a value has neither number nor text")


def _datum(body: bytes) -> TrainingDatum:
    chunks: list[NDArray[np.int32]] = []
    inputs: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
    for number, value in _fields(body):
        if not isinstance(value, bytes):
            raise MalformedMessage(f"Datum: field {number} is no message")
        if number == 1:
            chunks.append(_chunk(value))
        elif number == 2:
            name, tensor = _entry(value)
            if not isinstance(tensor, bytes):
                raise MalformedMessage("Datum.loss_fn_inputs: a value is no tensor")
            inputs[name] = _tensor(name, tensor)
        elif number not in (3, 4):  # provenance, which is for another loss
            raise MalformedMessage(f"Datum: an unknown field {number}")
    token_ids = np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int32)
    return TrainingDatum(token_ids=token_ids, inputs=inputs)


def _chunk(body: bytes) -> NDArray[np.int32]:
    for number, value in _fields(body):
        if number != 1:
            raise MalformedMessage("model_input: images and audio are not served; only encoded_text is")
        for inner, tokens in _fields(value) if isinstance(value, bytes) else ():
            if inner == 1 and isinstance(tokens, bytes) and len(tokens) % 4 == 0:
                return np.frombuffer(tokens, dtype="<i4").astype(np.int32)
        return np.zeros(0, dtype=np.int32)
    raise MalformedMessage("model_input: a chunk is empty")


def _tensor(name: str, body: bytes) -> NDArray[np.float32] | NDArray[np.int64]:
    """Read a tensor of one dimension."""
    dense = b""
    dtype, shape = 0, list[int]()
    for number, value in _fields(body):
        match number, value:
            case 1, bytes():
                dense = value
            case 2, _:
                raise MalformedMessage(
                    f"{name}: sparse tensors, which several targets at a position have, are not served"
                )
            case 3, int():
                dtype = value
            case 4, bytes():  # packed
                at = 0
                while at < len(value):
                    size, at = _varint(value, at)
                    shape.append(size)
            case 4, int():
                shape.append(value)
            case _:
                raise MalformedMessage(f"{name}: an unknown field {number} of a tensor")
    if dtype not in _DTYPES:
        raise MalformedMessage(f"{name}: must be float32 or int64")
    if len(dense) % _DTYPES[dtype].itemsize:
        raise MalformedMessage(f"{name}: its bytes are no whole numbers")
    values: NDArray[Any] = np.frombuffer(dense, dtype=_DTYPES[dtype])
    if len(shape) > 1:
        raise MalformedMessage(f"{name}: has {len(shape)} dimensions; several targets at a position are not served")
    if shape and shape[0] != len(values):
        raise MalformedMessage(f"{name}: has {len(values)} numbers, and its shape says {shape[0]}")
    return values


# --- writing ---------------------------------------------------------------------------------------------------------


def gradient_output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return a ``ForwardBackwardOutput`` with the log-probabilities of each sequence."""
    ends = np.concatenate([[0], np.cumsum([4 * len(each) for each in logprobs])]).astype("<i8")
    data = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    batched = _put(1, data) + _put(2, ends.tobytes()) + _put(3, _FLOAT32)
    record = _put(2, _put(1, b"logprobs") + _put(2, batched)) + _put(3, len(logprobs))
    named = b"".join(_put(3, _put(1, name.encode()) + _put_double(2, value)) for name, value in metrics.items())
    return _put(1, b"ArrayRecord") + _put(2, record) + named


class SampledSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    likeliest: Sequence[Likeliest] = ()
    """The likeliest tokens at the place of each; empty if none were asked for."""


def sample_output(
    sequences: Sequence[SampledSequence],
    prompt_logprobs: NDArray[np.float32] | None,
    likeliest: tuple[Sequence[Likeliest], int] | None = None,
    num_of_samples: int = 0,
) -> bytes:
    """Return a ``SampleResponse``.

    Args:
        sequences: the samples.
        prompt_logprobs: log-probabilities of the prompt's tokens.
        likeliest: the likeliest tokens at the place of each of the prompt's, and how many were asked for.
        num_of_samples: how many likeliest tokens were asked for at the place of each sampled one.

    """
    parts = []
    for sequence in sequences:
        tokens = np.asarray(sequence.token_ids, dtype="<i4").tobytes()
        logprobs = np.asarray(sequence.logprobs, dtype="<f4").tobytes()
        fields = _put(1, STOP_REASONS[sequence.stop_reason]) + _put(2, tokens) + _put(3, logprobs)
        if num_of_samples:
            fields += _put(4, _likeliest(sequence.likeliest, num_of_samples))
        parts.append(_put(1, fields))
    if prompt_logprobs is not None:
        parts.append(_put(2, prompt_logprobs.astype("<f4").tobytes()))
    if likeliest is not None:
        parts.append(_put(3, _likeliest(*likeliest)))
    return b"".join(parts)


def _likeliest(places: Sequence[Likeliest], num: int) -> bytes:
    """Return a ``TopkLogprobs``: a row of `num` tokens for each place, filled up with what stands for none."""
    token_ids = np.zeros((len(places), num), dtype="<i4")
    logprobs = np.full((len(places), num), _NO_LOGPROB, dtype="<f4")
    for row, candidates in enumerate(places):
        for column, (token_id, logprob) in enumerate(candidates[:num]):
            token_ids[row, column], logprobs[row, column] = token_id, logprob
    return _put(1, token_ids.tobytes()) + _put(2, logprobs.tobytes()) + _put(3, num) + _put(4, len(places))


def _put(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value)
    return _number(number << 3 | _BYTES) + _number(len(value)) + value


def _put_double(number: int, value: float) -> bytes:
    return _number(number << 3 | _FIXED64) + struct.pack("<d", value)


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
