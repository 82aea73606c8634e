"""The protobuf messages of the SDK that the front end reads and writes.

The SDK sends the data of a gradient as protobuf, and takes that and samples only as protobuf. Names and numbers of
fields are those of its ``tinker_public.proto`` (0.38). All input is checked: `MalformedMessage` says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

_FLOAT32, _INT64 = 1, 2
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
STOP_REASONS = {"stop": 0, "length": 1}

_NO_LOGPROB = -99999.0
"""Log-probability, of token 0, that stands for none."""
_PACKAGE = "tandem.tinker"
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    # Texts and messages that are decoded one by one, so that an error names its place, are bytes: so they look on the
    # wire. An entry of a map is a message with a key and a value there.
    "ForwardBackwardRequest": {
        "model_id": (1, "bytes"),
        "seq_id": (2, "int32"),
        "data": (3, "repeated bytes"),
        "loss_fn": (4, "bytes"),
        "loss_fn_config": (5, "repeated bytes"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "repeated bytes"),
    },
    "NumberEntry": {"key": (1, "bytes"), "value": (2, "double")},
    "SettingEntry": {"key": (1, "bytes"), "value": (2, "LossConfigValue")},
    "LossConfigValue": {"number": (1, "double"), "text": (2, "bytes")},
    "Datum": {
        "model_input": (1, "repeated Chunk"),
        "loss_fn_inputs": (2, "repeated TensorEntry"),
        "model_input_spans": (3, "repeated bytes"),
        "loss_fn_input_spans": (4, "repeated bytes"),
    },
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "bytes"), "dmel": (3, "bytes")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "TensorEntry": {"key": (1, "bytes"), "value": (2, "Tensor")},
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "bytes"),
        "dtype": (3, "int32"),
        "shape": (4, "repeated int64"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "bytes"),
        "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "repeated NumberEntry"),
    },
    "ArrayRecord": {"fields": (2, "repeated BatchedTensorEntry"), "num_datums": (3, "int32")},
    "BatchedTensorEntry": {"key": (1, "bytes"), "value": (2, "BatchedTensor")},
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "SampleResponse": {
        "sequences": (1, "repeated SampledSequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
}
"""Number and type of the fields that are read or written, by message."""

Likeliest = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the likeliest first."""


def _make_classes() -> dict[str, Any]:
    """Return the class of each message, from a pool of its own: the SDK has the same names."""
    file = FileDescriptorProto(name="tandem/tinker.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _FIELDS.items():
        description = file.message_type.add(name=message)
        for name, (number, words) in fields.items():
            *repeated, type_name = words.split()
            label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            field = description.field.add(name=name, number=number, label=label)
            if type_name in _FIELDS:
                field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{type_name}"
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{type_name.upper()}")
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


CLASSES = _make_classes()
"""Class of each message, by name."""


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
    request = _decode("ForwardBackwardRequest", body, "the request")
    problems: list[str] = []
    data: list[TrainingDatum] = []
    settings: dict[str, float | str] = {}
    model_id = loss = ""
    try:
        model_id = _text(request.model_id)
        loss = _text(request.loss_fn)
        _refuse_unknown(request, "")
        settings = _settings(request)
    except MalformedMessage as error:
        problems.append(str(error))
    for index, encoded in enumerate(request.data):
        try:
            data.append(_datum(encoded))
        except MalformedMessage as error:
            problems.append(f"data[{index}]: {error}")
            break
    if not model_id:
        raise MalformedMessage(next(iter(problems), "it names no model"))
    return GradientRequest(
        model_id=model_id,
        seq_id=request.seq_id,
        data=tuple(data),
        loss=loss,
        settings=settings,
        is_forward=request.forward_only,
        problem=next(iter(problems), ""),
    )


def _decode(message: str, body: bytes, title: str) -> Any:
    """Decode a message. Raises `MalformedMessage` if it is cut off, or not a message at all."""
    try:
        return CLASSES[message].FromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"{title} is cut off, or is no {message}") from error


def _refuse_unknown(message: Any, title: str) -> None:
    """Refuse a field that is not known, or is of another type. Raises `MalformedMessage`."""
    for field in UnknownFieldSet(message):
        raise MalformedMessage(f"{title}an unknown field {field.field_number}")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage("a text is not UTF-8") from error


def _settings(request: Any) -> dict[str, float | str]:
    """Return the settings of the loss: those of version 2, if there are any."""
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    for encoded in request.loss_fn_config:
        entry = _decode("NumberEntry", encoded, "loss_fn_config")
        _refuse_unknown(entry, "loss_fn_config: ")
        numbers[_text(entry.key)] = entry.value
    for encoded in request.loss_fn_config_v2:
        entry = _decode("SettingEntry", encoded, "loss_fn_config_v2")
        value = entry.value
        if value.HasField("number"):
            values[_text(entry.key)] = value.number
        elif value.HasField("text"):
            values[_text(entry.key)] = _text(value.text)
        else:
            raise MalformedMessage("loss_fn_config_v2: a value has neither number nor text")
    return values or numbers


def _datum(encoded: bytes) -> TrainingDatum:
    datum = _decode("Datum", encoded, "it")
    _refuse_unknown(datum, "Datum: ")
    chunks = [_chunk(chunk) for chunk in datum.model_input]
    inputs = {}
    for entry in datum.loss_fn_inputs:
        name = _text(entry.key)
        inputs[name] = _tensor(name, entry.value)
    token_ids = np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int32)
    return TrainingDatum(token_ids=token_ids, inputs=inputs)


def _chunk(chunk: Any) -> NDArray[np.int32]:
    if chunk.HasField("image") or chunk.HasField("dmel") or len(UnknownFieldSet(chunk)):
        raise MalformedMessage("model_input: images and audio are not served; only encoded_text is")
    if not chunk.HasField("encoded_text"):
        raise MalformedMessage("model_input: a chunk is empty")
    tokens = chunk.encoded_text.tokens
    if len(tokens) % 4:
        raise MalformedMessage("model_input: its bytes are no whole tokens")
    return np.frombuffer(tokens, dtype="<i4").astype(np.int32)


def _tensor(name: str, tensor: Any) -> NDArray[np.float32] | NDArray[np.int64]:
    """Read a tensor of one dimension."""
    if tensor.HasField("sparse_csr"):
        raise MalformedMessage(f"{name}: sparse tensors, which several targets at a position have, are not served")
    _refuse_unknown(tensor, f"{name}: ")
    if tensor.dtype not in _DTYPES:
        raise MalformedMessage(f"{name}: must be float32 or int64")
    dtype = _DTYPES[tensor.dtype]
    if len(tensor.dense) % dtype.itemsize:
        raise MalformedMessage(f"{name}: its bytes are no whole numbers")
    values: NDArray[Any] = np.frombuffer(tensor.dense, dtype=dtype)
    shape = tensor.shape
    if len(shape) > 1:
        raise MalformedMessage(f"{name}: has {len(shape)} dimensions; several targets at a position are not served")
    if shape and shape[0] != len(values):
        raise MalformedMessage(f"{name}: has {len(values)} numbers, and its shape says {shape[0]}")
    return values


# --- writing ---------------------------------------------------------------------------------------------------------


def gradient_output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return a ``ForwardBackwardOutput`` with the log-probabilities of each sequence."""
    output = CLASSES["ForwardBackwardOutput"](loss_fn_output_type=b"ArrayRecord")
    record = output.loss_fn_outputs.add(num_datums=len(logprobs))
    tensor = record.fields.add(key=b"logprobs").value
    tensor.data = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    tensor.offsets = np.cumsum([0, *(4 * len(each) for each in logprobs)]).astype("<i8").tobytes()
    tensor.dtype = _FLOAT32
    for name, value in metrics.items():
        output.metrics.add(key=name.encode(), value=value)
    return bytes(output.SerializeToString())


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
    output = CLASSES["SampleResponse"]()
    for sequence in sequences:
        sample = output.sequences.add(
            stop_reason=STOP_REASONS[sequence.stop_reason],
            tokens=np.asarray(sequence.token_ids, dtype="<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, dtype="<f4").tobytes(),
        )
        if num_of_samples:
            _fill(sample.topk_sampled_logprobs, sequence.likeliest, num_of_samples)
    if prompt_logprobs is not None:
        output.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if likeliest is not None:
        _fill(output.topk_prompt_logprobs, *likeliest)
    return bytes(output.SerializeToString())


def _fill(table: Any, places: Sequence[Likeliest], num: int) -> None:
    """Fill a ``TopkLogprobs``: a row of `num` tokens for each place, filled up with what stands for none."""
    token_ids = np.zeros((len(places), num), dtype="<i4")
    logprobs = np.full((len(places), num), _NO_LOGPROB, dtype="<f4")
    for row, candidates in enumerate(places):
        for column, (token_id, logprob) in enumerate(candidates[:num]):
            token_ids[row, column], logprobs[row, column] = token_id, logprob
    table.token_ids, table.logprobs = token_ids.tobytes(), logprobs.tobytes()
    table.k, table.length = num, len(places)
