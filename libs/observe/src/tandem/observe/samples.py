"""Queries of a run's rollout log: samples of a step, chosen, sorted and limited.

The columns that decide are read first, for all samples of the step, and then the chosen samples only. This works for
live runs, where files come and go meanwhile, as for finished ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tandem.common.errors import SamplesError
from tandem.common.messages import Purpose
from tandem.observe.run_folder.checkpoints import steps_in_words
from tandem.samples.batch import Float32s
from tandem.samples.recorded_shards import read_logprobs, read_rows, read_shard, samples_of, steps
from tandem.samples.sample_files import FOLDER, SHARD, RecordFile, files
from tandem.samples.sample_record import WITHOUT_ARRAYS, RecordedSample

Sort = Literal["group", "reward", "advantage", "length"]

_DECIDING = ("group", "sample", "problem_id", "reward", "advantage", "response_length")
_SORTED_BY: Mapping[Sort, str] = {"reward": "reward", "advantage": "advantage", "length": "response_length"}
_TEXTS = ("prompt", "question", "response", "reference_answer", "problem_id")
"""Columns that are searched for a text."""
_ATTEMPTS = 5
"""Attempts to read files that are deleted meanwhile, as the oldest are if the rollout log is bounded."""


class SampleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A query of a run's samples."""

    purpose: Purpose = "train"
    """``train`` for samples that a step was trained on, ``validate`` for those of its validation."""
    step: int | None = None
    """Step; None for the newest that is recorded."""
    group: int | None = None
    """Only this rollout group."""
    problem_id: str | None = None
    """Only this problem."""
    contains: str = ""
    """Only samples with this text, in any case, in their prompt, response, reference answer or problem's name."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    sort: Sort = "group"
    """Order; ``length`` is the number of generated tokens. Samples without an advantage come last, either way."""
    descending: bool = False
    offset: int = 0
    """Number of chosen samples to skip."""
    limit: int | None = None
    """Most samples to return."""
    with_tokens: bool = True
    """Whether to read the tokens as well; without them, the samples' arrays are empty."""


class SampleSelection(NamedTuple):
    """The result of a query."""

    step: int
    num_samples: int
    """Number of the step's samples for the query's purpose."""
    num_chosen: int
    """Number of those that match, before `SampleQuery.offset` and `SampleQuery.limit`."""
    groups: tuple[int, ...]
    """Groups of the step, in order."""
    samples: list[RecordedSample]


def select(run: Path, query: SampleQuery, run_id: str | None = None) -> list[RecordedSample]:
    """Return samples of the run in a folder, chosen as by `search`."""
    return search(run, query, run_id).samples


def recorded_steps(run: Path, purpose: Purpose = "train") -> list[int]:
    """Return the steps with recorded samples, in order."""
    return steps(run / FOLDER, purpose)


def trainer_logprobs(run: Path, step: int, run_id: str | None = None) -> dict[tuple[int, int], Float32s]:
    """Return the trainer's log-probabilities of each token of a step's samples, by group and place.

    They cover all tokens of a sequence, with NaN where the trainer computed none, as in the prompt. They are from
    before the step's first optimizer step if a separate pass computes them, and otherwise from the loss. Empty if they
    are not recorded. Raises `SamplesError` as `search` does.
    """
    return read_logprobs(run / FOLDER, step, run_id)


def search(run: Path, query: SampleQuery, run_id: str | None = None) -> SampleSelection:
    """Return the samples that match a query in the rollout log of the run in a folder, and their numbers.

    Raises `SamplesError`, on one line, if the step is not recorded, or a file is damaged or of a run other than
    `run_id`.
    """
    folder = run / FOLDER
    for attempt in range(_ATTEMPTS):
        shard_files = files(folder, SHARD, query.purpose)
        step = _step(folder, query, shard_files)
        shards = [file.path for file in shard_files if file.step == step]
        try:
            return _search(shards, step, query, run_id)
        except SamplesError:
            if attempt == _ATTEMPTS - 1 or all(path.exists() for path in shards):
                raise
    raise AssertionError("the last attempt returns or raises")


def _step(folder: Path, query: SampleQuery, shard_files: Sequence[RecordFile]) -> int:
    steps = sorted({file.step for file in shard_files})
    kind = "samples" if query.purpose == "train" else "validation samples"
    if not steps:
        raise SamplesError(f"{folder} has no {kind}: logger.samples says how much is kept")
    if query.step is None:
        return steps[-1]
    if query.step not in steps:
        raise SamplesError(f"{folder} has no {kind} of step {query.step}, only those of {steps_in_words(steps)}")
    return query.step


def _search(shards: Sequence[Path], step: int, query: SampleQuery, run_id: str | None) -> SampleSelection:
    columns = [*_DECIDING, *(_TEXTS if query.contains else ())]
    tables = [read_shard(path, run_id, columns) for path in shards]
    table = pa.concat_tables(tables)
    # The number of each sample's shard, and its row there.
    shard_S = np.repeat(np.arange(len(tables)), [len(part) for part in tables])
    row_S = np.concatenate([np.arange(len(part)) for part in tables])
    chosen_S = np.flatnonzero(_is_chosen(table, query))
    end = None if query.limit is None else query.offset + query.limit
    page_S = chosen_S[_order(table.take(chosen_S), query)][query.offset : end]
    sample_at: dict[int, RecordedSample] = {}
    for number, path in enumerate(shards):
        places = page_S[shard_S[page_S] == number]
        if len(places):
            rows = read_rows(path, row_S[places].tolist(), run_id, None if query.with_tokens else WITHOUT_ARRAYS)
            sample_at |= zip(places.tolist(), samples_of(rows), strict=True)
    return SampleSelection(
        step=step,
        num_samples=len(table),
        num_chosen=len(chosen_S),
        groups=tuple(np.unique(table["group"].to_numpy()).tolist()),
        samples=[sample_at[place] for place in page_S.tolist()],
    )


def _order(table: pa.Table, query: SampleQuery) -> NDArray[np.int64]:
    """Return the order of these rows."""
    sign = -1 if query.descending else 1
    places = [table["sample"].to_numpy(), table["group"].to_numpy()]
    if query.sort == "group":
        return np.lexsort([sign * place for place in places])
    values = sign * table[_SORTED_BY[query.sort]].to_numpy().astype(np.float64)  # missing ones are NaN, last
    return np.lexsort([*places, values])


def _is_chosen(table: pa.Table, query: SampleQuery) -> NDArray[np.bool_]:
    """Return which rows match the query."""
    reward_S = table["reward"].to_numpy()
    chosen_S: NDArray[np.bool_] = (reward_S >= query.min_reward) & (reward_S <= query.max_reward)
    if query.group is not None:
        chosen_S &= table["group"].to_numpy() == query.group
    if query.problem_id is not None:
        chosen_S &= pc.equal(table["problem_id"], query.problem_id).to_numpy()
    if query.contains:
        has = [pc.match_substring(table[name], query.contains, ignore_case=True).to_numpy() for name in _TEXTS]
        chosen_S &= np.logical_or.reduce(has)
    return chosen_S
