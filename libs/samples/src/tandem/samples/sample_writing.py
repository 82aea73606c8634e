"""Writing of the rollout log: shards, log-probabilities, and unfinished files that become shards.

`tandem.samples.sample_record` has its format.

A trainer adds the policy's log-probabilities of a step that has trained, and waits for nothing: a thread gets them from
the device and writes them. A slow or full disk stops nothing: missing parts are reported once.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_hexdigest

from tandem.common.errors import SamplesError
from tandem.common.messages import SampleKey, SampleScored
from tandem.samples.batch import MASKS, MEDIA, Float32s, Int32s, SampleBatch
from tandem.samples.routed_experts import COLUMN
from tandem.samples.sample_files import LOGPROBS, shard_path, temporary_path
from tandem.samples.sample_record import (
    ARRAYS,
    DIGEST,
    EXPERTS,
    FORMAT,
    FORMAT_KEY,
    LOGPROBS_SCHEMA,
    MEDIA_COLUMN,
    NO_DIGEST,
    ROLE_REWARDS,
    ROLES,
    RUN_ID,
    SAMPLING_MASKS,
    SCHEMA,
    UNREADABLE,
    RecordedSample,
    schema_with,
    write_media,
)

_ROW_GROUP = 128
"""Samples per row group, so that reading a few samples of a big shard does not read all tokens."""


def write_shard(path: Path, run_id: str, table: pa.Table) -> int:
    """Write a table as the shard of this path, replacing any existing one; return the number of bytes.

    The file gets its name once it is complete and on disk. It contains the digest of its own bytes: Parquet's checksums
    cover only the contents of pages, so that a flipped bit between them would go unnoticed. Raises `OSError`.
    """
    table = table.replace_schema_metadata(_metadata(run_id))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({DIGEST: NO_DIGEST})
    content = bytearray(sink.getvalue())
    at = content.rindex(NO_DIGEST)
    content[at : at + len(NO_DIGEST)] = xxh3_64_hexdigest(content).encode()
    temporary = temporary_path(path)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(content)


def write_logprobs(
    folder: Path,
    run_id: str,
    step: int,
    trainer: str,
    keys: Sequence[tuple[int, int, int]],
    lengths_S: Int32s,
    logprobs_T: Float32s,
) -> None:
    """Write a trainer's log-probabilities of the tokens of its sequences; groups, samples and branches are `keys`.

    Raises `OSError`.
    """
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_S)]), pa.int32())
    columns_KS = np.array(keys, dtype=np.int64).reshape(-1, 3).T.copy()
    columns = [
        pa.array(np.full(len(keys), step, dtype=np.int64)),
        *map(pa.array, columns_KS),
        pa.ListArray.from_arrays(offsets, pa.array(logprobs_T, pa.float32()), type=LOGPROBS_SCHEMA.field(-1).type),
    ]
    table = pa.Table.from_arrays(columns, schema=LOGPROBS_SCHEMA)
    write_shard(shard_path(folder / LOGPROBS, step, trainer), run_id, table)


class UnfinishedFile:
    """An unfinished file, as seen by its only writer. Every method raises `OSError`; the file is unusable after
    that."""

    def __init__(self, path: Path, run_id: str, schema: pa.Schema = SCHEMA) -> None:
        """Create the file; `schema` is that of `schema_with` for samples with optional columns."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)  # unbuffered, so that a killed process loses nothing
        self._write(schema.with_metadata(_metadata(run_id)).serialize())

    def append(self, samples: Sequence[RecordedSample]) -> None:
        """Write samples, all of one step."""
        for batch in table_of(samples).to_batches():
            self._write(batch.serialize())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, message: pa.Buffer) -> None:
        unwritten = memoryview(message)
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) or 0 :]


def read_unfinished(path: Path, run_id: str | None = None) -> pa.Table:
    """Return the contents of an unfinished file, without an incomplete batch at its end.

    Raises `SamplesError` if the file does not begin like an unfinished one, or belongs to a run other than `run_id`.
    """
    try:
        if not path.stat().st_size:  # the writer ended, or the disk was full, before the header was written
            return SCHEMA.empty_table()
        with pa.OSFile(str(path)) as file:  # not mapped, since another process may delete it meanwhile
            stream, batches = pa.ipc.open_stream(file), []
            check_schema(path, stream.schema, run_id)
            with suppress(StopIteration, OSError, pa.ArrowInvalid):
                while True:
                    batches.append(stream.read_next_batch())
            return pa.Table.from_batches(batches, stream.schema)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def table_of(samples: Sequence[RecordedSample]) -> pa.Table:
    """Return samples as a table."""
    arrays, has_roles = samples[0].arrays.columns, bool(samples[0].scored.role_rewards)
    optional = {MEDIA_COLUMN: MEDIA[0] in arrays, SAMPLING_MASKS: MASKS[0] in arrays}
    optional |= dict.fromkeys((ROLES, ROLE_REWARDS), has_roles)
    schema = schema_with(optional) if any(optional.values()) else SCHEMA
    offsets = pa.array([0, *accumulate(map(len, map(_READ["token_ids"], samples)))], pa.int32())
    columns = []
    for field in schema:
        values = list(map(_READ[field.name], samples))
        if field.name in ARRAYS:
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)), type=field.type))
        else:
            try:
                columns.append(pa.array(values, field.type))
            except UnicodeEncodeError:  # a lone surrogate, which an environment may return
                texts = [None if text is None else text.encode("utf-8", "replace").decode() for text in values]
                columns.append(pa.array(texts, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def keys_of(table: pa.Table) -> list[SampleKey]:
    """Return the key of each row: the command id of the sample, its group, and its index there."""
    columns = table.select(["command_id", "group", "sample"]).columns
    return [*zip(*map(pa.ChunkedArray.to_pylist, columns), strict=True)]


def _branches(sample: RecordedSample) -> Any:
    return msgspec.to_builtins(sample.scored.branches)


def _experts(sample: RecordedSample) -> bytes | None:
    experts_TX = sample.arrays.columns.get(COLUMN)
    return None if experts_TX is None else experts_TX.tobytes()


def _masks(sample: RecordedSample) -> bytes:
    return sample.arrays.mask_lengths_T.tobytes() + sample.arrays.mask_words_W.tobytes()


_READ: dict[str, Callable[[RecordedSample], Any]] = {
    name: attrgetter(
        f"arrays.{ARRAYS[name]}"
        if name in ARRAYS
        else f"scored.{name}"
        if name in SampleScored.__struct_fields__
        else {"reference_answer": "answer"}.get(name, name)
    )
    for name in (*SCHEMA.names, ROLES, ROLE_REWARDS)
} | {"branches": _branches, EXPERTS: _experts, MEDIA_COLUMN: write_media, SAMPLING_MASKS: _masks}
"""Reads a column's value of a sample."""


def _metadata(run_id: str) -> dict[bytes, bytes]:
    return {RUN_ID: run_id.encode(), FORMAT_KEY: str(FORMAT).encode()}


def check_schema(path: Path, schema: pa.Schema, run_id: str | None, expected: pa.Schema = SCHEMA) -> None:
    """Raise `SamplesError` unless a file is part of a rollout log, and of this run."""
    metadata = schema.metadata or {}
    if RUN_ID not in metadata or FORMAT_KEY not in metadata:
        raise SamplesError(f"{path} is not part of a rollout log")
    is_expected = schema.equals(expected)
    if not is_expected and expected is SCHEMA:
        is_expected = schema.equals(schema_with(dict.fromkeys(schema.names, True)))
    if metadata[FORMAT_KEY] != str(FORMAT).encode() or not is_expected:
        file_format = metadata[FORMAT_KEY].decode(errors="replace")
        raise SamplesError(
            f"{path} has format {file_format} of the rollout log, this release reads format {FORMAT}: use the release "
            "that wrote it"
        )
    file_run_id = metadata[RUN_ID].decode(errors="replace")
    if run_id is not None and file_run_id != run_id:
        raise SamplesError(f"{path} is of the run {file_run_id}, not {run_id}")


def unreadable(path: Path, error: Exception) -> SamplesError:
    """Return the error of a file that cannot be read, with a reader's message on one line."""
    reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
    return SamplesError(f"{path} cannot be read as part of the rollout log: {reason}")


_MOST_WAITING = 4
"""Steps that may wait for the disk. Nothing is written for further steps."""
_CLOSE_S = 3.0
"""How long the waiting steps may take when the service ends."""


class _Step(NamedTuple):
    """The part of a step to be written."""

    step: int
    keys: Sequence[tuple[int, int, int]]
    """Group, sample and branch of each sequence."""
    lengths_S: Int32s
    logprobs: Callable[[], Float32s]


class LogprobRecorder:
    """The writer of one trainer's log-probabilities."""

    def __init__(self, folder: Path, run_id: str, trainer: str) -> None:
        """Take the folder of the rollout log, the run's id and the trainer's name."""
        self._folder = folder
        self._run_id = run_id
        self._trainer = trainer
        self._queue: queue.Queue[_Step | None] = queue.Queue(_MOST_WAITING)
        self._has_complained = False
        self._thread = threading.Thread(target=self._write, name="record of log-probabilities", daemon=True)
        self._thread.start()

    def add(self, step: int, samples: SampleBatch, logprobs: Callable[[], Float32s]) -> None:
        """Write the result of `logprobs`, end to end for these sequences. The thread calls it."""
        keys = [*zip(samples.group_S.tolist(), samples.sample_S.tolist(), samples.branch_S.tolist(), strict=True)]
        try:
            self._queue.put_nowait(_Step(step, keys, samples.lengths_S, logprobs))
        except queue.Full:
            self._complain("the disk is slower than steps are trained")

    def close(self) -> None:
        """Write the steps that still wait, and end the thread. One that the disk holds up ends with the process."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._complain(f"writing the last steps takes over {_CLOSE_S:g} s")

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                logprobs_T = item.logprobs()
                write_logprobs(
                    self._folder, self._run_id, item.step, self._trainer, item.keys, item.lengths_S, logprobs_T
                )
            except OSError as error:
                self._complain(error.strerror or str(error))
            except Exception as error:
                self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, reason: str) -> None:
        """Report once that not everything is logged."""
        if not self._has_complained:
            self._has_complained = True
            line = f"{self._trainer}: log-probabilities are missing in the record {self._folder}: {reason}"
            print(line, file=sys.stderr, flush=True)
