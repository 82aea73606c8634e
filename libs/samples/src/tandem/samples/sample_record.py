"""The record of samples: what a run trained on, as files that pandas reads.

    RUN/samples/step-00000012.rollout-0.parquet                      a shard: all that a step trained on of one rollout
    RUN/samples/validation-00000010.rollout-0.parquet                the same of what a step was validated by
    RUN/samples/logprobs/step-00000012.trainer-0.parquet             what the policy in training says of a step's tokens
    RUN/samples/unfinished/step-00000012.rollout-0.3f9a.arrows       what finished of a step that is not trained on yet

A row is a sample. A shard gets its name when it is whole; it has a digest of all its bytes, and its pages have
checksums for who reads a part. An unfinished file is an Arrow stream that only grows: however its writer ended, all
that it had written as a whole can be read. Each file says in its metadata which run it is of, and nothing of another
run is ever read as this one's.

No torch here: the coordinator reads the record by itself.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.common.errors import SamplesError
from tandem.common.messages import Branch, Purpose, SampleKey, SampleScored
from tandem.samples.batch import SAMPLES, Batch, Float32s, Int32s
from tandem.samples.manifest import digest_of
from tandem.samples.routed_experts import COLUMN, Bytes
from tandem.samples.sample_files import LOGPROBS, SHARD, files, shard_path, temporary_path

FORMAT = 5
"""Counts up when the meaning of a column changes, or what a file must have."""
_EXPERTS = "routed_experts"
"""Column of bytes, those of each token (`tandem.samples.routed_experts`); null where no routing is replayed."""
_RUN_ID, _FORMAT, _DIGEST = b"tandem.run_id", b"tandem.format", b"tandem.digest"
_NO_DIGEST = b"digest-goes-here"
"""What a shard has in the place of its digest when the digest is taken, of the same length."""
_UNREADABLE = OSError, pa.ArrowException, UnicodeDecodeError
"""What Arrow raises for a file that is not there, is no such file, or is damaged."""
_ROW_GROUP = 128
"""Samples that are read together: who looks at a few of a big shard reads no other's tokens."""

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("problem_id", pa.string()),
        ("question", pa.string()),
        ("reference_answer", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("spent", pa.map_(pa.string(), pa.float64())),
        ("correct", pa.bool_()),
        ("extracted_answer", pa.string()),
        ("advantage", pa.float32()),
        ("finish_reason", pa.string()),
        ("num_turns", pa.int64()),
        ("failure", pa.string()),
        ("timed_out", pa.bool_()),
        ("dropped", pa.bool_()),
        ("prompt_length", pa.int64()),
        ("response_length", pa.int64()),
        ("num_tokens", pa.int64()),
        ("branches", pa.list_(pa.struct([(name, pa.int64()) for name in Branch.__struct_fields__]))),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("tokens_by_version", pa.list_(pa.int64())),
        ("rollout", pa.string()),
        ("command_id", pa.int64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("generation_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        (_EXPERTS, pa.large_binary()),
    ]
)
"""The columns of every file of samples; ``docs/samples.md`` says what is in them."""
_LOGPROBS = pa.schema(
    [
        *((name, pa.int64()) for name in ("step", "group", "sample", "branch")),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
"""The columns of every file of log-probabilities: of each token of the sequence, NaN where the trainer has none."""
_SCORED = SampleScored.__struct_fields__
_FROM_ARROW: dict[str, Callable[[Any], Any]] = {
    "components": dict,
    "spent": dict,
    "tokens_by_version": tuple,
    "branches": lambda branches: tuple(Branch(**branch) for branch in branches),
}
"""What makes a field of what Arrow has in its column, where that is not the same."""
_ARRAYS = {name.removesuffix("_T"): name for name in SAMPLES if name.endswith("_T")}
"""The array of a batch that a column has."""
WITHOUT_ARRAYS = tuple(name for name in SCHEMA.names if name not in (*_ARRAYS, _EXPERTS))
"""The columns that have no number for each token."""
_FIELDS = {"reference_answer": "answer"}
"""The field of a column that is called otherwise."""


class RecordedSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that there is to know of one finished sample, from which its step can be trained on again."""

    step: int
    rollout: str
    """That made it."""
    command_id: int
    """Of the order that it was made for."""
    scored: SampleScored
    """With the text of the response."""
    arrays: Batch
    """Of this one sequence, or of each of an agent's branches."""
    advantage: float | None = None
    """None where the sample was not trained on, as when dynamic sampling filters its group out."""
    problem_id: str
    question: str
    answer: str
    """The reference answer; empty where there is none."""
    prompt: str
    """As the model saw it: decoded from its tokens, special ones included."""
    started_at: float
    """Unix time at which the rollout was asked for it."""
    finished_at: float
    """Unix time at which its last reward was there."""


def steps(folder: Path, purpose: Purpose = "train") -> list[int]:
    """Return the steps that have shards, in order."""
    return sorted({file.step for file in files(folder, SHARD, purpose)})


def read_step(folder: Path, step: int, run_id: str | None = None, purpose: Purpose = "train") -> list[RecordedSample]:
    """Return the samples of a step, in the order of groups and samples; none if it has no shard.

    Raises `SamplesError`, which names the file, for a shard that is damaged, is no shard, or is of a run other than
    `run_id`, where that is given.
    """
    shards = [file.path for file in files(folder, SHARD, purpose) if file.step == step]
    samples = [sample for path in shards for sample in samples_of(read_shard(path, run_id))]
    return sorted(samples, key=lambda sample: (sample.scored.group, sample.scored.sample))


def read_shard(
    path: Path, run_id: str | None = None, columns: Sequence[str] | None = None, schema: pa.Schema = SCHEMA
) -> pa.Table:
    """Return a shard's table, or some columns of it; the table whole is that which was written, to the bit.

    Raises `SamplesError`, as `read_step` does.
    """
    try:
        content = None if columns is not None else path.read_bytes()
        source = path if content is None else pa.BufferReader(content)
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            digest = (file.metadata.metadata or {}).get(_DIGEST)
            if content is not None and digest is not None:  # first: damage may be in what is checked next
                _check_digest(path, content, digest)
            _check(path, file.schema_arrow, run_id, schema)
            if digest is None:
                raise SamplesError(f"{path} cannot be read as a record of samples: it has no digest")
            return file.read(columns=columns)
    except _UNREADABLE as error:
        raise SamplesError(f"{path} cannot be read as a record of samples: {_line(error)}") from error


def read_rows(
    path: Path, rows: Sequence[int], run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return some rows of a shard, in this order, reading no more of it than the row groups that hold them.

    Raises `SamplesError`, as `read_step` does.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check(path, file.schema_arrow, run_id)
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            wanted, places, first, num_read = {*rows}, dict[int, int](), 0, 0
            groups = []
            for number, size in enumerate(sizes):
                inside = [row for row in range(first, first + size) if row in wanted]
                if inside:
                    groups.append(number)
                    places |= {row: num_read + row - first for row in inside}
                    num_read += size
                first += size
            return file.read_row_groups(groups, columns=columns).take([places[row] for row in rows])
    except _UNREADABLE as error:
        raise SamplesError(f"{path} cannot be read as a record of samples: {_line(error)}") from error


def write_shard(folder: Path, run_id: str, step: int, rollout: str, table: pa.Table, purpose: Purpose = "train") -> int:
    """Write a rollout's samples of a step, in the place of any shard that it had; return the number of bytes.

    The file has its name once it is whole, on disk. Raises `OSError`.
    """
    return _write_parquet(shard_path(folder, step, rollout, purpose), run_id, table)


def _write_parquet(path: Path, run_id: str, table: pa.Table) -> int:
    """Write a file that has its name once it is whole, on disk; return the number of bytes. Raises `OSError`."""
    content = _parquet(table.replace_schema_metadata(_metadata(run_id)))
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


def _parquet(table: pa.Table) -> bytearray:
    """Return a table as a file in Parquet's format that has the digest of its own bytes.

    Parquet's checksums are of the contents of pages: a bit may flip in what lies between them and nobody complains.
    """
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({_DIGEST: _NO_DIGEST})
    content = bytearray(sink.getvalue())
    at = content.rindex(_NO_DIGEST)
    content[at : at + len(_NO_DIGEST)] = digest_of(memoryview(content)).encode()
    return content


def _check_digest(path: Path, content: bytes, digest: bytes) -> None:
    """Raise `SamplesError` unless the bytes of a shard are those that were written."""
    at = content.rfind(digest)
    if digest_of(content[:at] + _NO_DIGEST + content[at + len(_NO_DIGEST) :]).encode() != digest:
        raise SamplesError(f"{path} cannot be read as a record of samples: its bytes are not those that were written")


def write_logprobs(
    folder: Path,
    run_id: str,
    step: int,
    trainer: str,
    keys: Sequence[tuple[int, int, int]],
    lengths_S: Int32s,
    logprobs_T: Float32s,
) -> None:
    """Write what a trainer's policy says of the tokens of its sequences; groups, samples and branches are `keys`.

    Raises `OSError`.
    """
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_S)]), pa.int32())
    columns = [
        pa.array([step] * len(keys), pa.int64()),
        *(pa.array([key[place] for key in keys], pa.int64()) for place in range(3)),
        pa.ListArray.from_arrays(offsets, pa.array(logprobs_T, pa.float32()), type=_LOGPROBS.field("logprobs").type),
    ]
    table = pa.Table.from_arrays(columns, schema=_LOGPROBS)
    _write_parquet(shard_path(folder / LOGPROBS, step, trainer), run_id, table)


def read_logprobs(folder: Path, step: int, run_id: str | None = None) -> dict[tuple[int, int], Float32s]:
    """Return what trainers say of the tokens of a step's samples, by group and place; nothing where it is not there.

    Of each token of the sequence, or of all branches end to end, NaN where the trainer has none. Raises `SamplesError`,
    as `read_step` does.
    """
    found: dict[tuple[int, int], dict[int, Float32s]] = {}
    for path in [file.path for file in files(folder / LOGPROBS, SHARD) if file.step == step]:
        table = read_shard(path, run_id, schema=_LOGPROBS)
        names = ("group", "sample", "branch")
        keys = zip(*(table[name].to_pylist() for name in names), strict=True)
        for (group, sample, branch), logprobs in zip(keys, _lists(table["logprobs"]), strict=True):
            found.setdefault((group, sample), {})[branch] = logprobs
    return {key: np.concatenate([branches[number] for number in sorted(branches)]) for key, branches in found.items()}


class UnfinishedFile:
    """An unfinished file as its one writer sees it. Every method raises `OSError`; then it is good for nothing more."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Begin the file."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)  # what is written is the kernel's at once: a kill takes nothing back
        self._write(SCHEMA.with_metadata(_metadata(run_id)).serialize())

    def append(self, samples: Sequence[RecordedSample]) -> None:
        """Write samples, all of one step."""
        for batch in table_of(samples).to_batches():
            self._write(batch.serialize())

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    def _write(self, message: pa.Buffer) -> None:
        rest = memoryview(message)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]


def read_unfinished(path: Path, run_id: str | None = None) -> pa.Table:
    """Return what was written to an unfinished file, without what was cut off at its end.

    Raises `SamplesError` if it does not begin as such a file does, or is of a run other than `run_id`.
    """
    try:
        if not path.stat().st_size:  # its writer ended, or its disk was full, before it had begun
            return SCHEMA.empty_table()
        with pa.OSFile(str(path)) as file:  # not mapped: elsewhere, it may be deleted meanwhile
            stream = pa.ipc.open_stream(file)
            _check(path, stream.schema, run_id)
            return pa.Table.from_batches(_whole_batches(stream), stream.schema)
    except _UNREADABLE as error:
        raise SamplesError(f"{path} cannot be read as a record of samples: {_line(error)}") from error


def table_of(samples: Sequence[RecordedSample]) -> pa.Table:
    """Return samples as a table."""
    arrays = Batch.concatenate([sample.arrays.only(SAMPLES) for sample in samples])
    num_tokens = [len(sample.arrays.token_ids_T) for sample in samples]
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_tokens)]), pa.int32())
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(getattr(arrays, _ARRAYS[field.name])), type=field.type)
        if field.name in _ARRAYS
        else pa.array([_value(sample, field.name) for sample in samples], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def samples_of(table: pa.Table) -> list[RecordedSample]:
    """Return the samples of a table, in its order; without arrays' columns in the table their arrays are empty."""
    columns = {name: _values(table, name) for name in SCHEMA.names}
    return [
        RecordedSample(
            step=row["step"],
            rollout=row["rollout"],
            command_id=row["command_id"],
            scored=SampleScored(**{name: _FROM_ARROW.get(name, _as_it_is)(row[name]) for name in _SCORED}),
            arrays=Batch(
                lengths_S=np.array(
                    [branch["num_tokens"] for branch in row["branches"]] or [len(row["token_ids"])], dtype=np.int32
                ),
                **{field: row[column] for column, field in _ARRAYS.items()},
                **_columns(row[_EXPERTS], len(row["token_ids"])),
            ),
            advantage=row["advantage"],
            problem_id=row["problem_id"],
            question=row["question"],
            answer=row["reference_answer"],
            prompt=row["prompt"],
            started_at=row["started_at"],
            finished_at=row["finished_at"],
        )
        for row in (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    ]


def keys_of(table: pa.Table) -> list[SampleKey]:
    """Return the key of each row: the order that the sample was made for, its group, and its place there."""
    return [*zip(*(table[name].to_pylist() for name in ("command_id", "group", "sample")), strict=True)]


def _value(sample: RecordedSample, column: str) -> Any:
    """Return what a sample has in a column that is no array."""
    if column == _EXPERTS:
        experts_TX = sample.arrays.columns.get(COLUMN)
        return None if experts_TX is None else experts_TX.tobytes()
    value = getattr(sample.scored if column in _SCORED else sample, _FIELDS.get(column, column))
    if column == "branches":
        return msgspec.to_builtins(value)
    # Half of a character that is written as two, as an environment may say it, is no UTF-8.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _columns(experts: bytes | None, num_tokens: int) -> dict[str, Bytes]:
    """Return what a row has of each token beside its arrays."""
    return {} if experts is None else {COLUMN: np.frombuffer(experts, np.uint8).reshape(num_tokens, -1)}


def _values(table: pa.Table, column: str) -> Sequence[Any]:
    """Return a column row by row; arrays are views of all of it laid end to end."""
    if column == _EXPERTS and column not in table.column_names:
        return [None] * table.num_rows
    if column not in _ARRAYS:
        return list(table[column].to_pylist())
    if column not in table.column_names:
        return [np.zeros(0, SCHEMA.field(column).type.value_type.to_pandas_dtype())] * table.num_rows
    return _lists(table[column])


def _lists(column: pa.ChunkedArray) -> list[Any]:
    """Return the arrays of a column of lists."""
    chunks: list[pa.ListArray] = column.chunks
    return [
        numbers[start:end]
        for chunk in chunks
        for offsets, numbers in [(chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False))]
        for start, end in itertools.pairwise(offsets)
    ]


def _as_it_is(value: Any) -> Any:
    return value


def _whole_batches(stream: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield batches up to the first that is not there as a whole."""
    while True:
        try:
            yield stream.read_next_batch()
        except (StopIteration, OSError, pa.ArrowInvalid):
            return


def _metadata(run_id: str) -> dict[bytes, bytes]:
    return {_RUN_ID: run_id.encode(), _FORMAT: str(FORMAT).encode()}


def _check(path: Path, schema: pa.Schema, run_id: str | None, expected: pa.Schema = SCHEMA) -> None:
    """Raise `SamplesError` unless a file is part of a record of samples, and of this run."""
    metadata = schema.metadata or {}
    if _RUN_ID not in metadata or _FORMAT not in metadata:
        raise SamplesError(f"{path} is no record of samples")
    if metadata[_FORMAT] != str(FORMAT).encode() or not schema.equals(expected):
        said = metadata[_FORMAT].decode(errors="replace")
        raise SamplesError(
            f"{path} has format {said} of the record of samples, this release reads format {FORMAT}: use the release "
            "that wrote it"
        )
    found = metadata[_RUN_ID].decode(errors="replace")
    if run_id is not None and found != run_id:
        raise SamplesError(f"{path} is of the run {found}, not {run_id}")


def _line(error: Exception) -> str:
    """Return what a reader complains of, on one line."""
    return getattr(error, "strerror", None) or str(error).split("\n")[0]
