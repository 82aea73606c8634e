"""The samples of a run, as the page asks for them: filtered, sorted, a page at a time, and one with its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.common.errors import SamplesError
from tandem.common.messages import Purpose
from tandem.common.sample_files import FOLDER, SHARD
from tandem.coordinator.page.tokens import texts_of

Sort = Literal["group", "reward", "length", "advantage"]
SORTS: tuple[Sort, ...] = ("group", "reward", "length", "advantage")
PURPOSES: tuple[Purpose, ...] = ("train", "validate")

_KINDS = {"train": "step", "validate": "validation"}
_NAME = re.compile(r"(step|validation)-(\d{8,})\..+")
_COLUMNS = (
    *("step", "group", "sample", "problem_id", "question", "prompt", "response", "reference_answer", "reward"),
    *("components", "correct", "advantage", "finish_reason", "num_turns", "failure", "prompt_length"),
    *("response_length", "oldest_version", "newest_version", "rollout"),
)
_ARRAYS = ("token_ids", "loss_mask", "generation_logprobs", "versions")
_TRAINER_LOGPROBS = "trainer_logprobs"
"""Where the record has them."""
_SORTED_BY = {"reward": "reward", "length": "response_length", "advantage": "advantage"}
_SEARCHED = ("question", "prompt", "response", "reference_answer", "problem_id")
_MAX_STEPS = 200
"""Of which the samples of a problem are looked up, the newest."""


class SampleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What of the samples of a step is asked for."""

    step: int | None = None
    """None for the newest."""
    purpose: Purpose = "train"
    sort: Sort = "group"
    descending: bool = False
    contains: str = ""
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    offset: int = 0
    limit: int = 50


class SampleRows(msgspec.Struct, frozen=True, kw_only=True):
    """A page of samples."""

    step: int | None
    total: int
    """That the query asks for."""
    steps: dict[str, tuple[int, int]]
    """The first step and the last that are recorded, by purpose."""
    rows: list[dict[str, Any]]


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a sample."""

    id: int
    text: str
    """That is complete with it; where a character takes several tokens, it is the last one's."""
    made_by_policy: bool
    logprob: float | None
    trainer_logprob: float | None
    version: int | None


def query_samples(run: Path, query: SampleQuery, run_id: str) -> SampleRows:
    """Return what a query asks for. Raises `SamplesError` for a damaged file."""
    there = {purpose: steps for purpose in PURPOSES if (steps := _shards(run, purpose))}
    shards = there.get(query.purpose, {})
    step = query.step if query.step is not None else max(shards, default=None)
    rows = [] if step is None else _rows_of(shards.get(step, []), run_id)
    chosen = [row for row in rows if _is_chosen(row, query)]
    chosen.sort(key=lambda row: (row["group"], row["sample"]))
    if query.sort != "group":
        column = _SORTED_BY[query.sort]
        # What has no such number, as no advantage where it was not trained on, is last either way.
        sign = -1 if query.descending else 1
        chosen.sort(key=lambda row: (row[column] is None, sign * (row[column] or 0.0)))
    elif query.descending:
        chosen.reverse()
    return SampleRows(
        step=step,
        total=len(chosen),
        steps={purpose: (min(steps), max(steps)) for purpose, steps in there.items()},
        rows=chosen[query.offset : query.offset + query.limit],
    )


def one_sample(
    run: Path, place: tuple[int, int, int], purpose: Purpose, run_id: str, models: Sequence[str]
) -> dict[str, Any]:
    """Return a sample with its tokens, by its step, group and number; `models` are where a tokenizer may be.

    Raises `SamplesError` if there is none.
    """
    step, group, sample = place
    for path in _shards(run, purpose).get(step, []):
        for row in _rows_of([path], run_id, with_arrays=True):
            if (row["group"], row["sample"]) == (group, sample):
                arrays = {name: row.pop(name, None) for name in (*_ARRAYS, _TRAINER_LOGPROBS)}
                return row | {"tokens": _tokens(arrays, models)}
    raise SamplesError(f"{run} has no recorded sample {sample} of group {group} of step {step}, for {purpose}")


def samples_of_problem(run: Path, problem_id: str, run_id: str) -> list[dict[str, Any]]:
    """Return the samples of a problem in the newest steps, in order of steps, those of validation among them."""
    found: list[dict[str, Any]] = []
    for purpose in PURPOSES:
        shards = _shards(run, purpose)
        for step in sorted(shards)[-_MAX_STEPS:]:
            rows = _rows_of(shards[step], run_id, filters=[("problem_id", "==", problem_id)])
            found += [row | {"purpose": purpose} for row in rows if row["problem_id"] == problem_id]
    return sorted(found, key=lambda row: (row["step"], row["purpose"], row["group"], row["sample"]))


def _shards(run: Path, purpose: Purpose) -> dict[int, list[Path]]:
    """Return the shards that are there, by step."""
    found: dict[int, list[Path]] = {}
    for path in sorted((run / FOLDER).glob(f"{_KINDS[purpose]}-*{SHARD}")):
        if (named := _NAME.fullmatch(path.name)) is not None:
            found.setdefault(int(named[2]), []).append(path)
    return found


def _rows_of(
    paths: Sequence[Path],
    run_id: str,
    *,
    with_arrays: bool = False,
    filters: list[tuple[str, str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Read shards; one that was deleted meanwhile, as the oldest are, has no rows."""
    from tandem.common.sample_record import SCHEMA, read_shard  # Arrow takes a while to be imported

    arrays = [name for name in (*_ARRAYS, _TRAINER_LOGPROBS) if with_arrays and name in SCHEMA.names]
    rows: list[dict[str, Any]] = []
    for path in paths:
        if filters is not None and not _may_have(path, filters):
            continue
        try:
            table = read_shard(path, run_id, [*_COLUMNS, *arrays])
        except SamplesError:
            if path.exists():
                raise
            continue
        for row in table.to_pylist():
            row["components"] = dict(row["components"] or [])
            rows.append(row)
    return rows


def _may_have(path: Path, filters: list[tuple[str, str, str]]) -> bool:
    """Tell whether a shard has a row that passes: of most, only the one column is read."""
    import pyarrow.parquet as pq

    ((column, _, value),) = filters
    try:
        return value in pq.read_table(path, columns=[column]).column(column).to_pylist()
    except (OSError, ValueError):
        return path.exists()  # what is wrong with it, its reader says


def _is_chosen(row: dict[str, Any], query: SampleQuery) -> bool:
    if query.group is not None and row["group"] != query.group:
        return False
    if query.min_reward is not None and not row["reward"] >= query.min_reward:
        return False
    if query.max_reward is not None and not row["reward"] <= query.max_reward:
        return False
    text = query.contains.casefold()
    return not text or any(text in (row[column] or "").casefold() for column in _SEARCHED)


def _tokens(arrays: dict[str, Any], models: Sequence[str]) -> list[Token]:
    ids: list[int] = arrays["token_ids"]
    made: list[bool] = arrays["loss_mask"]
    trainer = arrays[_TRAINER_LOGPROBS] or [None] * len(ids)
    return [
        Token(
            id=token_id,
            text=text,
            made_by_policy=is_made,
            logprob=logprob if is_made else None,
            trainer_logprob=trainer_logprob if is_made else None,
            version=version if is_made else None,
        )
        for token_id, text, is_made, logprob, trainer_logprob, version in zip(
            ids, texts_of(models, ids), made, arrays["generation_logprobs"], trainer, arrays["versions"], strict=True
        )
    ]
