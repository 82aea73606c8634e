"""Choose samples from a run's record: which step's, which of them, in which order, how many.

What decides is read first, of all samples of the step; then the samples that were chosen, and no other. It is the same
for a run that goes on, whose files come and go meanwhile, and for one that has ended.
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
from tandem.observe.run_folder.recorded import steps_in_words
from tandem.samples.batch import Float32s
from tandem.samples.sample_files import FOLDER, SHARD, RecordFile, files
from tandem.samples.sample_record import (
    WITHOUT_ARRAYS,
    RecordedSample,
    read_logprobs,
    read_rows,
    read_shard,
    samples_of,
    steps,
)

Sort = Literal["group", "reward", "advantage", "length"]

_DECIDING = ("group", "sample", "problem_id", "reward", "advantage", "response_length")
_SORTED_BY: Mapping[Sort, str] = {"reward": "reward", "advantage": "advantage", "length": "response_length"}
_TEXTS = ("prompt", "question", "response", "reference_answer", "problem_id")
"""Where a text is looked for."""
_ATTEMPTS = 5
"""How often files are looked up that are deleted while they are read, as the oldest are where the record is bounded."""


class SampleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which samples of a run's record to return."""

    purpose: Purpose = "train"
    """``train`` for what a step was trained on, ``validate`` for what it was validated by."""
    step: int | None = None
    """None for the newest that is recorded."""
    group: int | None = None
    """Of this rollout group only."""
    problem_id: str | None = None
    """Of this problem only."""
    contains: str = ""
    """Only those whose prompt, response, reference answer or problem's name has this text, in capitals or not."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    sort: Sort = "group"
    """``length`` is that of what the policy made. What has no advantage is last, either way."""
    descending: bool = False
    offset: int = 0
    """How many of the chosen ones to leave out first."""
    limit: int | None = None
    """How many to return at most."""
    with_tokens: bool = True
    """Whether to read the tokens as well; without them, the samples' arrays are empty."""


class Selection(NamedTuple):
    """What a query chose."""

    step: int
    num_samples: int
    """Of the step, for the query's purpose."""
    num_chosen: int
    """Of these, before `SampleQuery.offset` and `SampleQuery.limit`."""
    groups: tuple[int, ...]
    """Of the step, in order."""
    samples: list[RecordedSample]


def select(run: Path, query: SampleQuery, run_id: str | None = None) -> list[RecordedSample]:
    """Return samples of the run in a folder, as `search` does."""
    return search(run, query, run_id).samples


def recorded_steps(run: Path, purpose: Purpose = "train") -> list[int]:
    """Return the steps that have recorded samples, in order."""
    return steps(run / FOLDER, purpose)


def trainer_logprobs(run: Path, step: int, run_id: str | None = None) -> dict[tuple[int, int], Float32s]:
    """Return what the policy in training says of each token of a step's samples, by group and place.

    They are log-probabilities of all tokens of the sequence, NaN where the trainer computed none, as in the prompt;
    from before the step's first optimizer step where a pass of its own computes them, else as the loss had them.
    Nothing is returned where they are not recorded. Raises `SamplesError` as `search` does.
    """
    return read_logprobs(run / FOLDER, step, run_id)


def search(run: Path, query: SampleQuery, run_id: str | None = None) -> Selection:
    """Return what a query chooses from the record of the run in a folder, and how much there is.

    Raises `SamplesError`, on one line, for a step that is not recorded, and for a file that is damaged or of a run
    other than `run_id`, where that is given.
    """
    folder = run / FOLDER
    for attempt in range(_ATTEMPTS):
        found = files(folder, SHARD, query.purpose)
        step = _step(folder, query, found)
        shards = [file.path for file in found if file.step == step]
        try:
            return _search(shards, step, query, run_id)
        except SamplesError:
            if attempt == _ATTEMPTS - 1 or all(path.exists() for path in shards):
                raise
    raise AssertionError("the last attempt returns or raises")


def _step(folder: Path, query: SampleQuery, found: Sequence[RecordFile]) -> int:
    there = sorted({file.step for file in found})
    what = "samples" if query.purpose == "train" else "validation samples"
    if not there:
        raise SamplesError(f"{folder} has no {what}: logger.samples says how much is kept")
    if query.step is None:
        return there[-1]
    if query.step not in there:
        raise SamplesError(f"{folder} has no {what} of step {query.step}, only those of {steps_in_words(there)}")
    return query.step


def _search(shards: Sequence[Path], step: int, query: SampleQuery, run_id: str | None) -> Selection:
    columns = [*_DECIDING, *(_TEXTS if query.contains else ())]
    tables = [read_shard(path, run_id, columns) for path in shards]
    table = pa.concat_tables(tables)
    # Of each sample the number of its shard, and its row there.
    shard_S = np.repeat(np.arange(len(tables)), [len(part) for part in tables])
    row_S = np.concatenate([np.arange(len(part)) for part in tables])
    chosen_S = np.flatnonzero(_is_chosen(table, query))
    end = None if query.limit is None else query.offset + query.limit
    page_S = chosen_S[_order(table.take(chosen_S), query)][query.offset : end]
    found: dict[int, RecordedSample] = {}
    for number, path in enumerate(shards):
        places = page_S[shard_S[page_S] == number]
        if len(places):
            rows = read_rows(path, row_S[places].tolist(), run_id, None if query.with_tokens else WITHOUT_ARRAYS)
            found |= zip(places.tolist(), samples_of(rows), strict=True)
    return Selection(
        step=step,
        num_samples=len(table),
        num_chosen=len(chosen_S),
        groups=tuple(np.unique(table["group"].to_numpy()).tolist()),
        samples=[found[place] for place in page_S.tolist()],
    )


def _order(table: pa.Table, query: SampleQuery) -> NDArray[np.int64]:
    """Return the order of these rows."""
    sign = -1 if query.descending else 1
    places = [table["sample"].to_numpy(), table["group"].to_numpy()]
    if query.sort == "group":
        return np.lexsort([sign * place for place in places])
    values = sign * table[_SORTED_BY[query.sort]].to_numpy().astype(np.float64)  # NaN where there is none: it is last
    return np.lexsort([*places, values])


def _is_chosen(table: pa.Table, query: SampleQuery) -> NDArray[np.bool_]:
    """Tell of each row whether it is asked for."""
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
