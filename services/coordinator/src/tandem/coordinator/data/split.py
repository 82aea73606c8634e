"""Which problems train and which are held out.

Membership is decided by the problem itself: by a hash of its prompt. So train and validation never share a problem, and
no run, whatever its seed, trains on a problem that another run of the same data section is validated on; the SFT stage
and the GRPO stage of one example among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from tandem.common.config import Config
from tandem.common.config.schema import Data
from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.coordinator.data import sources
from tandem.coordinator.data.prompts import fill_template

_MAX_DUPLICATES = 20
"""A generator that yields this many times more problems than wanted, and still too few distinct ones, has run dry."""


class ProblemSets(msgspec.Struct, frozen=True, kw_only=True):
    """Problems to train on and problems held out."""

    train: list[Problem]
    validation: list[Problem]


def load_problems(config: Config) -> ProblemSets:
    """Load or make the problems of a run.

    Raises:
        DataError: a source is missing, empty, malformed, or has too few distinct problems.
        ConfigError: the task or one of its parameters does not exist, or a template names a missing field.

    """
    data = config.data
    seed = config.algorithm_section.seed
    match data.dataset_name:
        case "reasoning_gym":
            return _generated(data, sources.reasoning_gym(data, seed))
        case "jsonl":
            train = sources.jsonl(str(data.train_data_path), data)
            held_out = None if data.val_data_path is None else sources.jsonl(data.val_data_path, data)
        case name:
            train = sources.hub(name, data.split, data)
            held_out = None if data.val_split is None else sources.hub(name, data.val_split, data)
    return _from_files(data, train, held_out)


def _generated(data: Data, problems: Iterator[Problem]) -> ProblemSets:
    """Draw from an endless generator until both sets are full."""
    num_train, num_validation = data.num_train or 0, data.num_validation or 0
    share = num_validation / (num_train + num_validation)
    wanted = {True: num_validation, False: num_train}
    found: dict[bool, list[Problem]] = {True: [], False: []}
    seen: set[str] = set()
    for drawn, problem in enumerate(problems):
        if all(len(found[held]) >= wanted[held] for held in (True, False)):
            break
        if drawn > _MAX_DUPLICATES * (num_train + num_validation):
            raise DataError(
                f"data.task {data.task!r} has only {len(seen)} distinct problems with these task_params: "
                f"{len(found[False])} to train on (data.num_train {num_train}) and {len(found[True])} held out "
                f"(data.num_validation {num_validation})"
            )
        prompt = _prompt(data, problem)
        if prompt not in seen:
            seen.add(prompt)
            held = _position(prompt) < share
            if len(found[held]) < wanted[held]:
                found[held].append(problem)
    return ProblemSets(train=found[False], validation=found[True])


def _from_files(data: Data, train: list[Problem], held_out: list[Problem] | None) -> ProblemSets:
    """Split one file, or take two apart; a problem in both is held out."""
    train = list(_distinct(data, train))
    if held_out is None:
        ordered = sorted(train, key=lambda problem: _position(_prompt(data, problem)))
        validation = ordered[: data.num_validation]
    else:
        validation = list(_distinct(data, held_out))[: data.num_validation]
    kept_out = {_prompt(data, problem) for problem in validation}
    train = [problem for problem in train if _prompt(data, problem) not in kept_out][: data.num_train]
    for name, problems in (("train on", train), ("validate on", validation)):
        if not problems:
            raise DataError(f"data: {data.train_data_path or data.dataset_name} leaves no problem to {name}")
    return ProblemSets(train=train, validation=validation)


def _distinct(data: Data, problems: Iterable[Problem]) -> Iterator[Problem]:
    seen: set[str] = set()
    for problem in problems:
        prompt = _prompt(data, problem)
        if prompt not in seen:
            seen.add(prompt)
            yield problem


def _prompt(data: Data, problem: Problem) -> str:
    return fill_template("data.prompt_template", data.prompt_template, problem)


def _position(prompt: str) -> float:
    """Return a number from 0 to 1 that is fixed for each prompt and evenly spread over prompts."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") / 2**64
