"""Reading of the rollout log: its shards, whole or in part, as tables or as a program's samples.

`tandem.samples.sample_record` has its format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from tandem.common.errors import SamplesError
from tandem.common.messages import Branch, Purpose, SampleScored
from tandem.samples import sample_record
from tandem.samples.batch import Float32s, SampleBatch
from tandem.samples.routed_experts import COLUMN, Bytes
from tandem.samples.sample_files import FOLDER, LOGPROBS, SHARD, files
from tandem.samples.sample_writing import check_schema, unreadable

_SCORED = SampleScored.__struct_fields__
_FROM_ARROW: dict[str, Callable[[Any], Any]] = {
    "components": dict,
    "spent": dict,
    "tokens_by_version": tuple,
    sample_record.ROLES: tuple,
    sample_record.ROLE_REWARDS: tuple,
    "branches": lambda branches: tuple(Branch(**branch) for branch in branches),
}
"""Conversions of a column's values to fields, where the two differ."""


def steps(folder: Path, purpose: Purpose = "train") -> list[int]:
    """Return the steps that have shards, in order."""
    return sorted({file.step for file in files(folder, SHARD, purpose)})


def read_step(
    folder: Path, step: int, run_id: str | None = None, purpose: Purpose = "train"
) -> list[sample_record.RecordedSample]:
    """Return the samples of a step, ordered by group and sample; none if it has no shard.

    Raises `SamplesError`, which names the file, for a shard that is damaged, has another format, or belongs to a run
    other than `run_id`, if that is given.
    """
    shards = [file.path for file in files(folder, SHARD, purpose) if file.step == step]
    samples = [sample for path in shards for sample in samples_of(read_shard(path, run_id))]
    return sorted(samples, key=lambda sample: (sample.scored.group, sample.scored.sample))


def read_shard(
    path: Path,
    run_id: str | None = None,
    columns: Sequence[str] | None = None,
    schema: pa.Schema = sample_record.SCHEMA,
) -> pa.Table:
    """Return a shard's table, or some columns of it; the whole table is bitwise the one that was written.

    Raises `SamplesError`, as `read_step` does.
    """
    try:
        content = None if columns is not None else path.read_bytes()
        source = path if content is None else pa.BufferReader(content)
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            digest = (file.metadata.metadata or {}).get(sample_record.DIGEST)
            if content is not None and digest is not None:  # checked first, since damage may affect the later checks
                _check_digest(path, content, digest)
            check_schema(path, file.schema_arrow, run_id, schema)
            if digest is None:
                raise SamplesError(f"{path} cannot be read as part of the rollout log: it has no digest")
            return file.read(columns=columns)
    except sample_record.UNREADABLE as error:
        raise unreadable(path, error) from error


def read_rows(
    path: Path, rows: Sequence[int], run_id: str | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return some rows of a shard, in this order, reading only the row groups that hold them.

    Raises `SamplesError`, as `read_step` does.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_schema(path, file.schema_arrow, run_id)
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            requested, places, first, num_read = {*rows}, dict[int, int](), 0, 0
            groups = []
            for number, size in enumerate(sizes):
                inside = [row for row in range(first, first + size) if row in requested]
                if inside:
                    groups.append(number)
                    places |= {row: num_read + row - first for row in inside}
                    num_read += size
                first += size
            return file.read_row_groups(groups, columns=columns).take([places[row] for row in rows])
    except sample_record.UNREADABLE as error:
        raise unreadable(path, error) from error


def _check_digest(path: Path, content: bytes, digest: bytes) -> None:
    """Raise `SamplesError` unless the bytes of a shard are those that were written."""
    at = content.rfind(digest)
    if (
        xxh3_64_hexdigest(
            content[:at] + sample_record.NO_DIGEST + content[at + len(sample_record.NO_DIGEST) :]
        ).encode()
        != digest
    ):
        raise SamplesError(f"{path} cannot be read as part of the rollout log: its bytes have changed")


def read_logprobs(folder: Path, step: int, run_id: str | None = None) -> dict[tuple[int, int], Float32s]:
    """Return the trainers' log-probabilities of a step's samples, by group and index; empty if there are none.

    An array covers each token of the sequence, or of all branches end to end; NaN where the trainer has none. Raises
    `SamplesError`, as `read_step` does.
    """
    branches_of: dict[tuple[int, int], dict[int, Float32s]] = {}
    for path in [file.path for file in files(folder / LOGPROBS, SHARD) if file.step == step]:
        table = read_shard(path, run_id, schema=sample_record.LOGPROBS_SCHEMA)
        names = ("group", "sample", "branch")
        keys = zip(*(table[name].to_pylist() for name in names), strict=True)
        for (group, sample, branch), logprobs in zip(keys, _lists(table["logprobs"]), strict=True):
            branches_of.setdefault((group, sample), {})[branch] = logprobs
    return {
        key: np.concatenate([branches[number] for number in sorted(branches)]) for key, branches in branches_of.items()
    }


def samples_of(table: pa.Table) -> list[sample_record.RecordedSample]:
    """Return the samples of a table, in its order; if the table lacks the columns of arrays, the arrays are empty."""
    names = sample_record.schema_with(dict.fromkeys(table.column_names, True)).names
    columns = {name: _values(table, name) for name in names}
    return [
        sample_record.RecordedSample(
            step=row["step"],
            rollout=row["rollout"],
            command_id=row["command_id"],
            scored=SampleScored(
                **{name: _FROM_ARROW.get(name, _as_it_is)(row[name]) for name in _SCORED if name in row}
            ),
            arrays=SampleBatch(
                lengths_S=np.array(
                    [branch["num_tokens"] for branch in row["branches"]] or [len(row["token_ids"])], dtype=np.int32
                ),
                **{field: row[column] for column, field in sample_record.ARRAYS.items()},
                **_columns(row[sample_record.EXPERTS], len(row["token_ids"])),
                **sample_record.read_media(row.get(sample_record.MEDIA_COLUMN), len(row["branches"])),
                **_masks(row.get(sample_record.SAMPLING_MASKS), row["branches"], len(row["token_ids"])),
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


def _columns(experts: bytes | None, num_tokens: int) -> dict[str, Bytes]:
    """Return the per-token columns of a row beside its arrays."""
    return {} if experts is None else {COLUMN: np.frombuffer(experts, np.uint8).reshape(num_tokens, -1)}


def _masks(masks: bytes | None, branches: Sequence[Mapping[str, int]], num_tokens: int) -> dict[str, NDArray[Any]]:
    """Return the columns of a row's sampling masks."""
    if masks is None:
        return {}
    lengths_T, words_W = np.split(np.frombuffer(masks, dtype=np.int32), [num_tokens])
    starts = np.cumsum([0, *(branch["num_tokens"] for branch in branches[:-1])])
    return {
        "num_mask_words_S": np.add.reduceat(lengths_T, starts, dtype=np.int32),
        "mask_lengths_T": lengths_T,
        "mask_words_W": words_W,
    }


def _values(table: pa.Table, column: str) -> Sequence[Any]:
    """Return a column row by row; arrays are views of one contiguous array."""
    if column == sample_record.EXPERTS and column not in table.column_names:
        return [None] * table.num_rows
    if column not in sample_record.ARRAYS:
        return list(table[column].to_pylist())
    if column not in table.column_names:
        return [np.zeros(0, sample_record.SCHEMA.field(column).type.value_type.to_pandas_dtype())] * table.num_rows
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


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample that a step was trained on or validated on."""

    step: int
    """Step that it was trained on, or after which it was generated for validation."""
    group: int
    """Rollout group within the step: the samples of one prompt."""
    sample: int
    """Index within the group."""
    problem_id: str
    """Identifier of its row in the data."""
    prompt: str
    """Prompt as the model saw it, special tokens included."""
    response: str
    """Text after the prompt: the policy's responses, and what an environment inserted between them."""
    reference: str
    """Reference answer; empty if there is none."""
    reward: float
    components: dict[str, float]
    """Components of the reward: what each reward function returned, by its name."""
    correct: bool
    """Whether it counts as solved."""
    advantage: float | None
    """Advantage; None where the sample was not trained on, as in validation."""
    finish_reason: str
    """``stop``, ``length`` or ``turns``."""
    num_tokens: int
    """Length of the whole sequence."""
    failure: str
    """Description of what went wrong with its reward; empty if nothing did."""


def read_samples(run_folder: Path, step: int | None, run_id: str, purpose: Purpose) -> list[Sample]:
    """Return the samples of a step, or of the newest recorded one. Raise `SamplesError` if they cannot be read."""
    folder = run_folder / FOLDER
    if step is None:
        recorded_steps = steps(folder, purpose)
        if not recorded_steps:
            return []
        step = recorded_steps[-1]
    return [_sample(recorded) for recorded in read_step(folder, step, run_id, purpose)]


def _sample(recorded: sample_record.RecordedSample) -> Sample:
    scored = recorded.scored
    return Sample(
        step=recorded.step,
        group=scored.group,
        sample=scored.sample,
        problem_id=recorded.problem_id,
        prompt=recorded.prompt,
        response=scored.response,
        reference=recorded.answer,
        reward=scored.reward,
        components=dict(scored.components),
        correct=scored.correct,
        advantage=recorded.advantage,
        finish_reason=scored.finish_reason,
        num_tokens=scored.num_tokens,
        failure=scored.failure,
    )
