"""Files of calls: all that changed a model, in order, to be done again and compared.

A run that clients drive has a file for each model, ``RUN/calls/MODEL.calls``. It is a row of frames: the length of a
message of msgpack, its digest, a digest of these two, the message. The first is a `CallHead`, the others are calls with
their outcomes. The last frame may be cut off, since a server that is killed writes no more of it; anything else that is
wrong is damage.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tandem.common.errors import RunFolderError
from tandem.common.messages import LossOfCall
from tandem.serving.tinker.calls import (
    INPUTS,
    AddGradients,
    CallFailed,
    GivenSequence,
    GradientsScored,
    RestoreState,
    SaveState,
    TakeStep,
)

FOLDER = "calls"
"""Folder of the files within the run folder."""
SUFFIX = ".calls"
_FORMAT = 1
_SIZES = struct.Struct("<IQ")
_PREFIX = struct.Struct("<IQI")
_MOST_BYTES = 1 << 29
"""Bytes of the largest frame; the most tokens of a gradient have a fifth of it."""


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all frames."""


class CallHead(_Frame, frozen=True, kw_only=True, tag="Head"):
    """The first frame."""

    format: int = _FORMAT
    run_id: str
    model: str
    """Id of the model."""
    began_at: float
    """Unix time."""


class _Done(_Frame, frozen=True, kw_only=True):
    """The base of calls."""

    index: int
    """Place among the calls of the model, from 0 on."""
    error: str = ""
    """The reason for a failure, as the client was told; empty without one."""


class GradientDone(_Done, frozen=True, kw_only=True):
    """A gradient, with the data of its sequences: arrays of all of them, one after the other."""

    loss_name: LossOfCall
    settings: dict[str, float]
    lengths: bytes
    token_ids: bytes
    targets: bytes | None
    """None: the tokens of the sequences."""
    inputs: dict[str, bytes]
    """Without those that are zero."""
    loss: float = 0.0
    logprobs: str = ""
    """Digest of the log-probabilities of all targets, which depend on all weights."""


class StepDone(_Done, frozen=True, kw_only=True):
    """A step of the optimizer."""

    step: TakeStep
    norm: float = 0.0


class RestoreDone(_Done, frozen=True, kw_only=True):
    """A state that was loaded, or the first weights."""

    folder: str
    with_optimizer: bool
    state: str
    """Digest of the state; empty for the first weights."""


class SaveDone(_Done, frozen=True, kw_only=True):
    """A state that was saved."""

    folder: str
    state: str = ""
    """Digest of the state."""


class RecordEnd(_Frame, frozen=True, kw_only=True, tag="Ended"):
    """The last frame of a record that was given up, with the reason."""

    why: str


Done = GradientDone | StepDone | RestoreDone | SaveDone
Frame = CallHead | Done | RecordEnd
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def path_of(folder: Path, model: str) -> Path:
    """Return the file of a model in a run's folder of calls."""
    return folder / f"{model}{SUFFIX}"


def encode(frame: Frame) -> bytes:
    """Return a frame as it is written."""
    message = _encoder.encode(frame)
    sizes = _SIZES.pack(len(message), xxhash.xxh3_64_intdigest(message))
    return sizes + xxhash.xxh32_intdigest(sizes).to_bytes(4, "little") + message


def read(path: Path, run_id: str) -> tuple[CallHead, Iterator[Done | RecordEnd]]:
    """Return the head of a file, and its calls, each read when it is asked for. Both raise `RunFolderError`."""
    frames = _frames(path)
    head = next(frames, None)
    if not isinstance(head, CallHead) or head.format != _FORMAT:
        raise RunFolderError(f"{path} is no file of calls that this release reads")
    if head.run_id != run_id:
        raise RunFolderError(f"{path} is of the run {head.run_id}, and the journal is of {run_id}")
    return head, _calls(path, frames)


def _calls(path: Path, frames: Iterator[Frame]) -> Iterator[Done | RecordEnd]:
    for count, frame in enumerate(frames):
        if isinstance(frame, CallHead) or (isinstance(frame, _Done) and frame.index != count):
            raise RunFolderError(f"{path} is damaged: call {count} is missing")
        yield frame


def _frames(path: Path) -> Iterator[Frame]:
    number = 0
    try:
        with path.open("rb") as file:
            while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
                length, digest, of_sizes = _PREFIX.unpack(prefix)
                is_right = xxhash.xxh32_intdigest(prefix[: _SIZES.size]) == of_sizes and length <= _MOST_BYTES
                message = file.read(length) if is_right else b""
                if is_right and len(message) < length:
                    return  # cut off
                if not is_right or xxhash.xxh3_64_intdigest(message) != digest:
                    raise RunFolderError(f"{path} is damaged: frame {number} is not what was written")
                yield _decoder.decode(message)
                number += 1
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged: frame {number}: {error}") from error


def gradient_done(index: int, call: AddGradients, answer: GradientsScored | CallFailed) -> GradientDone:
    """Return a gradient with its data."""
    sequences = call.sequences
    tokens = _join((sequence.token_ids for sequence in sequences), np.int32)
    inputs = {name: _join((sequence.inputs[name] for sequence in sequences), np.float32) for name in INPUTS}
    result: dict[str, Any] = (
        {"error": str(answer)}
        if isinstance(answer, CallFailed)
        else {"loss": answer.loss, "logprobs": digest_of(answer)}
    )
    return GradientDone(
        index=index,
        loss_name=call.loss,
        settings=call.settings,
        lengths=np.array([len(sequence.token_ids) for sequence in sequences], dtype="<i4").tobytes(),
        token_ids=tokens.tobytes(),
        targets=_join((sequence.targets for sequence in sequences), np.int32).tobytes()
        if call.has_other_targets
        else None,
        inputs={name: values.tobytes() for name, values in inputs.items() if values.view(np.int32).any()},
        **result,
    )


def call_of(gradient: GradientDone) -> AddGradients:
    """Return the call of a gradient. Raises `ValueError` if its arrays do not fit together."""
    lengths = np.frombuffer(gradient.lengths, dtype="<i4")
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("there are no sequences, or empty ones")
    total = int(lengths.sum())

    def parts(data: bytes | None, dtype: str) -> list[NDArray[Any]]:
        numbers = np.zeros(total, dtype=dtype) if data is None else np.frombuffer(data, dtype=dtype)
        if len(numbers) != total:
            raise ValueError(f"there are {len(numbers)} numbers for {total} tokens")
        return np.split(numbers, np.cumsum(lengths)[:-1])

    token_ids = parts(gradient.token_ids, "<i4")
    targets = token_ids if gradient.targets is None else parts(gradient.targets, "<i4")
    inputs = {name: parts(gradient.inputs.get(name), "<f4") for name in INPUTS}
    sequences = []
    for place, tokens in enumerate(token_ids):
        sequence_inputs = {name: values[place] for name, values in inputs.items()}
        sequences.append(GivenSequence(token_ids=tokens, targets=targets[place], inputs=sequence_inputs))
    return AddGradients(sequences=sequences, loss=gradient.loss_name, settings=gradient.settings, has_gradient=True)


def digest_of(scored: GradientsScored) -> str:
    """Return the digest of log-probabilities."""
    return xxhash.xxh3_64_hexdigest(_join(scored.logprobs, np.float32).tobytes())


def digest_of_state(call: SaveState | RestoreState) -> str:
    """Return the digest of a saved state, by those of its tensors; empty if there is none to read.

    Trainers have written those of their parts beside them. So only small files are read.
    """
    if not call.folder:
        return ""
    records: dict[str, Any] = {}
    try:
        for part in sorted(Path(call.folder).glob("manifest*.json")):
            records |= msgspec.json.decode(part.read_bytes(), type=dict[str, Any])
        tensors = {name: record.get("tensors") for name, record in records.items() if name.endswith(".safetensors")}
    except (OSError, msgspec.MsgspecError, AttributeError):
        return ""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(tensors, order="deterministic")) if tensors else ""


def _join(arrays: Iterable[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays]).astype(np.dtype(dtype).newbyteorder("<"), copy=False)


_NAMES = {GradientDone: "gradient", StepDone: "step", SaveDone: "saved state", RestoreDone: "load"}


class CallComparison:
    """The calls of one model, as far as they were done again."""

    def __init__(self, model: str, why_over: str) -> None:
        self._model = model
        self._why_over = why_over
        self._counts = dict.fromkeys((GradientDone, StepDone, SaveDone), 0)
        """Calls that were compared."""
        self._num_equal = 0
        self._first = ""
        """The first difference."""
        self._gap = 0.0
        """The largest relative difference of a loss or norm."""
        self.has_failed = False
        """Whether a call failed that had not, so that the model cannot go on."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self._first

    def compare_gradient(self, recorded: GradientDone, scored: GradientsScored | None, error: str) -> None:
        """Compare a gradient: its loss, and the log-probabilities that it was taken at."""
        difference = self._failure(recorded, error)
        if not difference and scored is not None:
            difference = self._number("loss", recorded.loss, scored.loss)
            difference = difference or (
                "" if digest_of(scored) == recorded.logprobs else "its log-probabilities differ"
            )
        self._count(recorded, difference)

    def compare_step(self, recorded: StepDone, norm: float | None, error: str) -> None:
        """Compare a step: the norm of its gradient."""
        difference = self._failure(recorded, error)
        if not difference and norm is not None:
            difference = self._number("norm", recorded.norm, norm)
        self._count(recorded, difference)

    def compare_saved(self, recorded: SaveDone, state: str, error: str) -> None:
        """Compare a saved state: the digests of its tensors, those of the optimizer too."""
        difference = self._failure(recorded, error)
        if not difference and state != recorded.state:
            difference = "its tensors differ" if recorded.state else "the record has no digests of its tensors"
        self._count(recorded, difference)

    def note_restored(self, recorded: RestoreDone, error: str) -> None:
        """Note that a state was loaded, or could not be."""
        self._note(recorded, self._failure(recorded, error))

    def describe(self, run: Path, changed: Collection[str]) -> str:
        """Return a line about the model, and a second one if its record has ended early."""
        counted = [
            f"{count} {_NAMES[kind]}{'' if count == 1 else 's'}" for kind, count in self._counts.items() if count
        ]
        calls = " and ".join(filter(None, [", ".join(counted[:-1]), *counted[-1:]])) or "no calls"
        if self.is_equal:
            summary = f"{self._model}: {calls}: equal to the bit to those of {run}"
        else:
            cause = f"as {', '.join(changed)} changed" if changed else "though nothing was changed"
            num = f"{self._num_equal} of {sum(self._counts.values())}"
            gap = f"losses and norms within {self._gap:.1g}"
            summary = f"{self._model}: {calls}: {num} are equal to the bit to those of {run}, {gap}, {cause}"
            summary = f"{summary}; the first that differs is {self._first}"
        return summary if not self._why_over else f"{summary}\n{self._model}: its record ends there: {self._why_over}"

    def _count(self, recorded: Done, difference: str) -> None:
        self._counts[type(recorded)] += 1
        self._num_equal += not difference
        self._note(recorded, difference)

    def _note(self, recorded: Done, difference: str) -> None:
        if difference and not self._first:
            self._first = f"call {recorded.index}, a {_NAMES[type(recorded)]}: {difference}"

    def _failure(self, recorded: Done, error: str) -> str:
        """Return how a failure differs from the record; empty if both have failed, or neither."""
        if error and not recorded.error:
            self.has_failed = True
            return f"it has failed: {error}"
        return "it has not failed, and had before" if recorded.error and not error else ""

    def _number(self, name: str, before: float, after: float) -> str:
        if struct.pack("<d", before) == struct.pack("<d", after) or (before != before and after != after):
            return ""
        self._gap = max(self._gap, abs(after - before) / max(abs(before), 1e-30))
        return f"its {name} is {after!r}, and was {before!r}"
