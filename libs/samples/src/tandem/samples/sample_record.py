"""The rollout log: the samples that a run trained on, in files that pandas reads.

    RUN/samples/step-00000012.rollout-0.parquet                      a shard: one rollout's samples of a training
    step
    RUN/samples/validation-00000010.rollout-0.parquet                the same for a step's validation
    RUN/samples/logprobs/step-00000012.trainer-0.parquet             log-probabilities under the policy in training
    RUN/samples/unfinished/step-00000012.rollout-0.3f9a.arrows       finished samples of a step not trained on yet

A row is a sample. A shard gets its name once it is complete. It has a digest of all its bytes, and its pages have
checksums for partial reads. An unfinished file is an Arrow stream that only grows: whatever happens to its writer,
all complete batches can be read. Each file names its run in its metadata, and files of another run are never read.

Torch is not imported here: the coordinator itself reads the rollout log.
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
from numpy.typing import NDArray

from tandem.common.errors import SamplesError
from tandem.common.messages import Branch, Purpose, SampleKey, SampleScored
from tandem.samples.batch import SAMPLES, Batch, Float32s, Int32s
from tandem.samples.images.columns import DIGEST_BYTES, GRID_SIZES
from tandem.samples.manifest import digest_of
from tandem.samples.routed_experts import COLUMN, Bytes
from tandem.samples.sample_files import LOGPROBS, SHARD, files, shard_path, temporary_path

FORMAT = 5
"""Format number, raised when the meaning of a column or the requirements of a file change."""
_EXPERTS = "routed_experts"
"""Column of bytes with each token's experts (`tandem.samples.routed_experts`); null if no routing is replayed."""
_RUN_ID, _FORMAT, _DIGEST = b"tandem.run_id", b"tandem.format", b"tandem.digest"
_NO_DIGEST = b"digest-goes-here"
"""Placeholder of the same length, in place of the digest while it is computed."""
_UNREADABLE = OSError, pa.ArrowException, UnicodeDecodeError
"""Errors of Arrow for a file that is missing, has another format, or is damaged."""
_ROW_GROUP = 128
"""Samples per row group, so that reading a few samples of a big shard does not read all tokens."""

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
"""Columns of every file of samples; ``docs/samples.md`` describes them."""
_IMAGES = "images"
_IMAGE = pa.struct([("digest", pa.binary()), ("grid", pa.list_(pa.int32())), ("branch", pa.int32())])
SEEING = SCHEMA.append(pa.field(_IMAGES, pa.list_(_IMAGE)))
"""Columns of samples of a model that sees: those, and each sample's images, the branches' end to end."""
_LOGPROBS = pa.schema(
    [
        *((name, pa.int64()) for name in ("step", "group", "sample", "branch")),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
"""Columns of every file of log-probabilities: one for each token of the sequence, NaN where the trainer has none."""
_SCORED = SampleScored.__struct_fields__
_FROM_ARROW: dict[str, Callable[[Any], Any]] = {
    "components": dict,
    "spent": dict,
    "tokens_by_version": tuple,
    "branches": lambda branches: tuple(Branch(**branch) for branch in branches),
}
"""Conversions of a column's values to fields, where the two differ."""
_ARRAYS = {name.removesuffix("_T"): name for name in SAMPLES if name.endswith("_T")}
"""The array of a batch that a column has."""
WITHOUT_ARRAYS = tuple(name for name in SCHEMA.names if name not in (*_ARRAYS, _EXPERTS))
"""Columns without a value for each token."""
_FIELDS = {"reference_answer": "answer"}
"""Fields of columns with other names."""


class RecordedSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that is known of a finished sample; its step can be trained on again from it."""

    step: int
    rollout: str
    """Rollout that generated it."""
    command_id: int
    """Id of the command that it was generated for."""
    scored: SampleScored
    """With the text of the response."""
    arrays: Batch
    """Arrays of this one sequence, or of each of an agent's branches."""
    advantage: float | None = None
    """Its advantage; None if the sample was not trained on, for example if dynamic sampling filtered out its group."""
    problem_id: str
    question: str
    answer: str
    """Reference answer; empty if there is none."""
    prompt: str
    """The prompt as the model saw it: decoded from its tokens, including special ones."""
    started_at: float
    """Unix time at which the rollout was asked for it."""
    finished_at: float
    """Unix time of its last reward."""


def steps(folder: Path, purpose: Purpose = "train") -> list[int]:
    """Return the steps that have shards, in order."""
    return sorted({file.step for file in files(folder, SHARD, purpose)})


def read_step(folder: Path, step: int, run_id: str | None = None, purpose: Purpose = "train") -> list[RecordedSample]:
    """Return the samples of a step, ordered by group and sample; none if it has no shard.

    Raises `SamplesError`, which names the file, for a shard that is damaged, has another format, or belongs to a run
    other than `run_id`, if that is given.
    """
    shards = [file.path for file in files(folder, SHARD, purpose) if file.step == step]
    samples = [sample for path in shards for sample in samples_of(read_shard(path, run_id))]
    return sorted(samples, key=lambda sample: (sample.scored.group, sample.scored.sample))


def read_shard(
    path: Path, run_id: str | None = None, columns: Sequence[str] | None = None, schema: pa.Schema = SCHEMA
) -> pa.Table:
    """Return a shard's table, or some columns of it; the whole table is bitwise the one that was written.

    Raises `SamplesError`, as `read_step` does.
    """
    try:
        content = None if columns is not None else path.read_bytes()
        source = path if content is None else pa.BufferReader(content)
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            digest = (file.metadata.metadata or {}).get(_DIGEST)
            if content is not None and digest is not None:  # checked first, since damage may affect the later checks
                _check_digest(path, content, digest)
            _check(path, file.schema_arrow, run_id, schema)
            if digest is None:
                raise SamplesError(f"{path} cannot be read as part of the rollout log: it has no digest")
            return file.read(columns=columns)
    except _UNREADABLE as error:
        raise SamplesError(f"{path} cannot be read as part of the rollout log: {_line(error)}") from error


def read_rows(
    path: Path, rows: Sequence[int], run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return some rows of a shard, in this order, reading only the row groups that hold them.

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
        raise SamplesError(f"{path} cannot be read as part of the rollout log: {_line(error)}") from error


def write_shard(folder: Path, run_id: str, step: int, rollout: str, table: pa.Table, purpose: Purpose = "train") -> int:
    """Write a rollout's samples of a step, replacing any existing shard; return the number of bytes.

    The file gets its name once it is complete and on disk. Raises `OSError`.
    """
    return _write_parquet(shard_path(folder, step, rollout, purpose), run_id, table)


def _write_parquet(path: Path, run_id: str, table: pa.Table) -> int:
    """Write a file atomically, and sync it to disk; return the number of bytes. Raises `OSError`."""
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
    """Return a table as a Parquet file that contains the digest of its own bytes.

    Parquet's checksums cover only the contents of pages: a flipped bit between them would go unnoticed.
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
        raise SamplesError(f"{path} cannot be read as part of the rollout log: its bytes have changed")


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
    columns = [
        pa.array([step] * len(keys), pa.int64()),
        *(pa.array([key[place] for key in keys], pa.int64()) for place in range(3)),
        pa.ListArray.from_arrays(offsets, pa.array(logprobs_T, pa.float32()), type=_LOGPROBS.field("logprobs").type),
    ]
    table = pa.Table.from_arrays(columns, schema=_LOGPROBS)
    _write_parquet(shard_path(folder / LOGPROBS, step, trainer), run_id, table)


def read_logprobs(folder: Path, step: int, run_id: str | None = None) -> dict[tuple[int, int], Float32s]:
    """Return the trainers' log-probabilities of a step's samples, by group and index; empty if there are none.

    An array covers each token of the sequence, or of all branches end to end; NaN where the trainer has none. Raises
    `SamplesError`, as `read_step` does.
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
    """An unfinished file, as seen by its only writer. Every method raises `OSError`; the file is unusable after
    that."""

    def __init__(self, path: Path, run_id: str, schema: pa.Schema = SCHEMA) -> None:
        """Create the file; `schema` is `SEEING` for a model that sees."""
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
        rest = memoryview(message)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]


def read_unfinished(path: Path, run_id: str | None = None) -> pa.Table:
    """Return the contents of an unfinished file, without an incomplete batch at its end.

    Raises `SamplesError` if the file does not begin like an unfinished one, or belongs to a run other than `run_id`.
    """
    try:
        if not path.stat().st_size:  # the writer ended, or the disk was full, before the header was written
            return SCHEMA.empty_table()
        with pa.OSFile(str(path)) as file:  # not mapped, since another process may delete it meanwhile
            stream = pa.ipc.open_stream(file)
            _check(path, stream.schema, run_id)
            return pa.Table.from_batches(_whole_batches(stream), stream.schema)
    except _UNREADABLE as error:
        raise SamplesError(f"{path} cannot be read as part of the rollout log: {_line(error)}") from error


def table_of(samples: Sequence[RecordedSample]) -> pa.Table:
    """Return samples as a table."""
    arrays = Batch.concatenate([sample.arrays.only(SAMPLES) for sample in samples])
    schema = SEEING if "num_images_S" in samples[0].arrays.columns else SCHEMA
    num_tokens = [len(sample.arrays.token_ids_T) for sample in samples]
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_tokens)]), pa.int32())
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(getattr(arrays, _ARRAYS[field.name])), type=field.type)
        if field.name in _ARRAYS
        else pa.array([_value(sample, field.name) for sample in samples], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def samples_of(table: pa.Table) -> list[RecordedSample]:
    """Return the samples of a table, in its order; if the table lacks the columns of arrays, the arrays are empty."""
    names = SEEING.names if _IMAGES in table.column_names else SCHEMA.names
    columns = {name: _values(table, name) for name in names}
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
                **_images(row.get(_IMAGES), row["branches"]),
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
    """Return the key of each row: the command id of the sample, its group, and its index there."""
    return [*zip(*(table[name].to_pylist() for name in ("command_id", "group", "sample")), strict=True)]


def _value(sample: RecordedSample, column: str) -> Any:
    """Return a sample's value in a column that is not an array."""
    if column == _EXPERTS:
        experts_TX = sample.arrays.columns.get(COLUMN)
        return None if experts_TX is None else experts_TX.tobytes()
    if column == _IMAGES:
        digests = map(np.ndarray.tobytes, sample.arrays.image_digests_IX)
        grids = sample.arrays.image_grids_IX.tolist()
        counts = sample.arrays.num_images_S
        branches = np.repeat(np.arange(len(counts)), counts).tolist()
        return [
            {"digest": digest, "grid": grid, "branch": branch}
            for digest, grid, branch in zip(digests, grids, branches, strict=True)
        ]
    value = getattr(sample.scored if column in _SCORED else sample, _FIELDS.get(column, column))
    if column == "branches":
        return msgspec.to_builtins(value)
    # A lone surrogate, which an environment may return, cannot be encoded as UTF-8.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _columns(experts: bytes | None, num_tokens: int) -> dict[str, Bytes]:
    """Return the per-token columns of a row beside its arrays."""
    return {} if experts is None else {COLUMN: np.frombuffer(experts, np.uint8).reshape(num_tokens, -1)}


def _images(images: list[dict[str, Any]] | None, branches: Sequence[object]) -> dict[str, NDArray[Any]]:
    """Return the columns of a row's images."""
    if images is None:
        return {}
    digests = np.frombuffer(b"".join(image["digest"] for image in images), dtype=np.uint8)
    branch_I = np.array([image["branch"] for image in images], dtype=np.int64)
    return {
        "num_images_S": np.bincount(branch_I, minlength=max(1, len(branches))).astype(np.int32),
        "image_digests_IX": digests.reshape(-1, DIGEST_BYTES),
        "image_grids_IX": np.array([image["grid"] for image in images], dtype=np.int32).reshape(-1, GRID_SIZES),
    }


def _values(table: pa.Table, column: str) -> Sequence[Any]:
    """Return a column row by row; arrays are views of one contiguous array."""
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
    """Yield batches up to the first incomplete one."""
    while True:
        try:
            yield stream.read_next_batch()
        except (StopIteration, OSError, pa.ArrowInvalid):
            return


def _metadata(run_id: str) -> dict[bytes, bytes]:
    return {_RUN_ID: run_id.encode(), _FORMAT: str(FORMAT).encode()}


def _check(path: Path, schema: pa.Schema, run_id: str | None, expected: pa.Schema = SCHEMA) -> None:
    """Raise `SamplesError` unless a file is part of a rollout log, and of this run."""
    metadata = schema.metadata or {}
    if _RUN_ID not in metadata or _FORMAT not in metadata:
        raise SamplesError(f"{path} is not part of a rollout log")
    is_expected = schema.equals(expected) or (expected is SCHEMA and schema.equals(SEEING))
    if metadata[_FORMAT] != str(FORMAT).encode() or not is_expected:
        said = metadata[_FORMAT].decode(errors="replace")
        raise SamplesError(
            f"{path} has format {said} of the rollout log, this release reads format {FORMAT}: use the release "
            "that wrote it"
        )
    found = metadata[_RUN_ID].decode(errors="replace")
    if run_id is not None and found != run_id:
        raise SamplesError(f"{path} is of the run {found}, not {run_id}")


def _line(error: Exception) -> str:
    """Return a reader's error message on one line."""
    return getattr(error, "strerror", None) or str(error).split("\n")[0]
