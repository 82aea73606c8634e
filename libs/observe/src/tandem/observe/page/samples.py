"""The samples of a run for the page: a list of some, one with its tokens, or rows of a data set.

Texts of tokens come from the model's own tokenizer file, without importing transformers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tandem.common.errors import SamplesError
from tandem.common.messages import Purpose
from tandem.observe.page.thumbnails import later_in
from tandem.observe.page.worker import PageWorker
from tandem.observe.shown_rows import MODULE, RowsAnswer, RowsRequest, RunRows

if TYPE_CHECKING:  # Arrow is slow to import
    from tokenizers import Tokenizer

    from tandem.observe.samples import SampleQuery
    from tandem.samples.sample_record import RecordedSample

SORTS: tuple[Literal["group", "reward", "length", "advantage"], ...] = ("group", "reward", "length", "advantage")
PURPOSES: tuple[Purpose, ...] = ("train", "validate")
_MAX_STEPS = 200
"""Number of newest steps in which samples of a problem are looked up."""
_TOKENIZER_FILE = "tokenizer.json"
_MOST_BYTES = 1 << 26
_DEADLINE_S = 300.0
"""Seconds for an answer, the start of the process and the reading of the data included."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""The page asks no other host, so data of a hub is that of its cache."""


class PageRows:
    """The rows of runs, by one process, of the run that was last asked for. Threads may share it."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        """Start nothing yet."""
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._run = Path()
        self._worker: PageWorker | None = None

    def of(self, run: Path, request: RowsRequest) -> RunRows:
        """Return rows of a run. Raises `SamplesError` with the reason if it has none, or reading them fails."""
        if not self._lock.acquire(timeout=2 * self._deadline_s):
            raise SamplesError("other rows take too long: ask again later")
        try:
            if self._worker is None or self._run != run:
                self._end()
                self._run, self._worker = run, PageWorker([MODULE, str(run)], _MOST_BYTES, _OFFLINE)
            data = self._worker.ask(msgspec.json.encode(request), time.monotonic() + self._deadline_s)
        finally:
            self._lock.release()
        if data is None:
            raise SamplesError(
                f"the rows of {run} cannot be shown: reading them failed, or took longer than {self._deadline_s:g} s; "
                "`coordinator samples` says why"
            )
        answer = msgspec.json.decode(data, type=RowsAnswer)
        if answer.rows is None:
            raise SamplesError(answer.error)
        return answer.rows

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class SampleRows(msgspec.Struct, frozen=True, kw_only=True):
    """A page of samples."""

    step: int | None
    total: int
    """Number of samples that match the query."""
    steps: dict[str, tuple[int, int]]
    """First and last recorded step, by purpose."""
    rows: list[dict[str, Any]]


class SampleToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a sample."""

    id: int
    text: str
    """Text that the token completes; a character of several tokens belongs to the last one."""
    made_by_policy: bool
    logprob: float | None
    trainer_logprob: float | None
    version: int | None


def query_samples(run: Path, query: SampleQuery, run_id: str) -> SampleRows:
    """Return the samples that match a query. Raises `SamplesError` for a damaged file."""
    from tandem.observe.samples import recorded_steps, search

    steps_of = {purpose: steps for purpose in PURPOSES if (steps := recorded_steps(run, purpose))}
    ends: dict[str, tuple[int, int]] = {purpose: (steps[0], steps[-1]) for purpose, steps in steps_of.items()}
    steps = steps_of.get(query.purpose, [])
    if not steps or (query.step is not None and query.step not in steps):
        return SampleRows(step=query.step, total=0, steps=ends, rows=[])
    selection = search(run, query, run_id)
    return SampleRows(
        step=selection.step, total=selection.num_chosen, steps=ends, rows=[_row(each) for each in selection.samples]
    )


def read_sample(
    run: Path, place: tuple[int, int, int], purpose: Purpose, run_id: str, models: Sequence[str]
) -> dict[str, Any]:
    """Return a sample with its tokens, by step, group and number; `models` are places of a tokenizer.

    Raises `SamplesError` if there is none.
    """
    from tandem.observe.samples import SampleQuery, recorded_steps, select, trainer_logprobs

    step, group, number = place
    if step in recorded_steps(run, purpose):
        for sample in select(run, SampleQuery(purpose=purpose, step=step, group=group), run_id):
            if sample.scored.sample == number:
                recorded = trainer_logprobs(run, step, run_id) if purpose == "train" else {}
                logprobs_T = recorded.get((group, number))
                trainer = None if logprobs_T is None else logprobs_T.tolist()
                return _row(sample) | {"tokens": _tokens(sample, trainer, models)} | later_in(sample)
    raise SamplesError(f"{run} has no recorded sample {number} of group {group} of step {step}, for {purpose}")


def samples_of_problem(run: Path, problem_id: str, run_id: str) -> list[dict[str, Any]]:
    """Return the samples of a problem in the newest steps, in order of steps, including validation."""
    from tandem.observe.samples import SampleQuery, recorded_steps, select

    rows: list[dict[str, Any]] = []
    for purpose in PURPOSES:
        for step in recorded_steps(run, purpose)[-_MAX_STEPS:]:
            query = SampleQuery(purpose=purpose, step=step, problem_id=problem_id, with_tokens=False)
            try:
                samples = select(run, query, run_id)
            except SamplesError:
                if step in recorded_steps(run, purpose):
                    raise
                continue  # the oldest samples are deleted if the rollout log is bounded
            rows += [_row(sample) | {"purpose": purpose} for sample in samples]
    return sorted(rows, key=lambda row: (row["step"], row["purpose"], row["group"], row["sample"]))


def _row(sample: RecordedSample) -> dict[str, Any]:
    """Return a sample under the names of the rollout log's columns."""
    scored: dict[str, Any] = msgspec.to_builtins(sample.scored)
    return scored | {
        "step": sample.step,
        "rollout": sample.rollout,
        "problem_id": sample.problem_id,
        "question": sample.question,
        "reference_answer": sample.answer,
        "prompt": sample.prompt,
        "advantage": sample.advantage,
    }


def _tokens(sample: RecordedSample, trainer: Sequence[float] | None, models: Sequence[str]) -> list[SampleToken]:
    arrays = sample.arrays
    ids: list[int] = arrays.token_ids_T.tolist()
    columns = zip(
        ids,
        _read_texts(models, ids),
        arrays.loss_mask_T.tolist(),
        arrays.generation_logprobs_T.tolist(),
        trainer or [math.nan] * len(ids),
        arrays.versions_T.tolist(),
        strict=True,
    )
    return [
        SampleToken(
            id=token_id,
            text=text,
            made_by_policy=is_made,
            logprob=logprob if is_made else None,
            trainer_logprob=None if not is_made or math.isnan(trainer_logprob) else trainer_logprob,
            version=version if is_made else None,
        )
        for token_id, text, is_made, logprob, trainer_logprob, version in columns
    ]


def _read_texts(models: Sequence[str], ids: Sequence[int]) -> list[str]:
    """Return a text for each token; a character of several tokens is given to the last one, and the others are empty.

    The tokenizer is that of the first model with a readable one; a model is a folder or a name in the Hub's cache.
    Without a tokenizer, texts are numbers in brackets.
    """
    tokenizer = next(filter(None, map(_find_tokenizer, models)), None)
    if tokenizer is None:
        return [f"[{token_id}]" for token_id in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token_id) or "" for token_id in ids]


def _find_tokenizer(model: str) -> Tokenizer | None:
    """Return a model's tokenizer, from a folder or else the Hub's cache; None if there is none."""
    path = (Path(model) / _TOKENIZER_FILE).absolute()
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        cached_path = None
        with contextlib.suppress(HFValidationError):  # not a name of a model
            cached_path = try_to_load_from_cache(model, _TOKENIZER_FILE)  # downloads nothing
        if not isinstance(cached_path, str):
            return None
        path = Path(cached_path)
    return _read_tokenizer(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_tokenizer(path: Path, changed_at: int) -> Tokenizer | None:
    from tokenizers import Tokenizer

    with contextlib.suppress(Exception):  # the library has no error class of its own
        return Tokenizer.from_file(str(path))
    return None
