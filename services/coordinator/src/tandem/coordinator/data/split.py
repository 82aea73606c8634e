"""Which problems train and which are held out.

Membership is decided by the problem itself: by a hash of its prompt. So train and validation never share a problem, and
no run, whatever its seed, trains on a problem that another run of the same data section is validated on; the SFT stage
and the GRPO stage of one example among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from tandem.common.config import Config
from tandem.common.config.schema import Data
from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.coordinator.data import sources
from tandem.coordinator.data.prompts import fill_template

Item = TypeVar("Item")

_PATIENCE = 4
"""A generator has run dry once it has repeated itself, without a break, this many times for each distinct problem seen.
If there is one more among ``D`` equally likely ones, it stays hidden for so long with a probability of
``(1 - 1/D) ** (4 * D)``, less than 2 per cent."""
_MIN_PATIENCE = 1000


class ProblemSets(msgspec.Struct, frozen=True, kw_only=True):
    """Problems to train on and problems held out."""

    train: list[Problem]
    held_out: dict[str, list[Problem]]
    """By the names that ``data.val_data_paths`` gives; a set that is alone has the name ``""``."""

    @property
    def validation(self) -> list[Problem]:
        """Everything held out."""
        return [problem for problems in self.held_out.values() for problem in problems]


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
        case "sliding_puzzle":
            return _generated(data, sources.sliding_puzzle(data, seed))
        case _:
            train_rows, held_out_rows = sources.rows(data)

    def problems(rows: sources.Rows) -> list[Problem]:
        return [sources.problem(where, row, data) for where, row in rows]

    def prompt(problem: Problem) -> str:
        return _prompt(data, problem)

    train = problems(train_rows)
    apart = {name: problems(rows) for name, rows in held_out_rows.items()}
    kept, held_out = hold_out(data, train, apart, prompt_of=prompt, identity=prompt)
    return ProblemSets(train=kept, held_out=held_out)


def _generated(data: Data, problems: Iterator[Problem]) -> ProblemSets:
    """Draw from an endless generator until both sets are full."""
    num_train, num_validation = data.num_train or 0, data.num_validation or 0
    share = num_validation / (num_train + num_validation)
    wanted = {True: num_validation, False: num_train}
    found: dict[bool, list[Problem]] = {True: [], False: []}
    seen: set[str] = set()
    num_repeats = 0
    while any(len(found[held]) < wanted[held] for held in (True, False)):
        problem = next(problems)
        prompt = _prompt(data, problem)
        num_repeats = num_repeats + 1 if prompt in seen else 0
        if num_repeats > max(_MIN_PATIENCE, _PATIENCE * len(seen)):
            raise DataError(
                f"{_name(data)} has only {len(seen)} distinct problems with these task_params: "
                f"{len(found[False])} to train on (data.num_train {num_train}) and {len(found[True])} held out "
                f"(data.num_validation {num_validation})"
            )
        if num_repeats == 0:
            seen.add(prompt)
            held = _position(prompt) < share
            if len(found[held]) < wanted[held]:
                found[held].append(problem)
    return ProblemSets(train=found[False], held_out={"": found[True]})


def _name(data: Data) -> str:
    return f"data.dataset_name {data.dataset_name!r}" if data.task is None else f"data.task {data.task!r}"


def hold_out(
    data: Data,
    train: Sequence[Item],
    apart: Mapping[str, Sequence[Item]],
    *,
    prompt_of: Callable[[Item], str],
    identity: Callable[[Item], str],
) -> tuple[list[Item], dict[str, list[Item]]]:
    """Split one file, or take several apart, into what to train on and what to validate on, by name.

    What has the prompt of something held out is not trained on. Of what is the same by `identity` the first counts.
    Raises `DataError` if there are fewer than wanted.
    """
    train = _distinct(train, identity)
    train_name = data.train_data_path or f"{data.dataset_name}[{data.split}]"
    if apart:
        names = {"": f"{data.dataset_name}[{data.val_split}]", **sources.validation_paths(data)}
        source = {name: _distinct(items, identity) for name, items in apart.items()}
    else:
        names = {"": train_name}
        source = {"": sorted(train, key=lambda item: _position(prompt_of(item)))}
    held_out = {
        name: _first(items, data.num_validation, f"data.num_validation: {names[name]}")
        for name, items in source.items()
    }
    kept_out = {prompt_of(item) for items in held_out.values() for item in items}
    rest = [item for item in train if prompt_of(item) not in kept_out]
    if not rest:
        num_held_out = sum(map(len, held_out.values()))
        raise DataError(
            f"data: {train_name} has {len(train)} distinct problems, and with {num_held_out} of them held out "
            "(data.num_validation) none is left to train on"
        )
    return _first(rest, data.num_train, f"data.num_train: without those held out, {train_name}"), held_out


def _first(items: list[Item], wanted: int | None, where: str) -> list[Item]:
    """Return so many, all of them if the number is not given."""
    if wanted is not None and len(items) < wanted:
        raise DataError(f"{where} has only {len(items)} distinct problems, not {wanted}")
    return items[:wanted]


def _distinct(items: Iterable[Item], identity: Callable[[Item], str]) -> list[Item]:
    first: dict[str, Item] = {}
    for item in items:
        first.setdefault(identity(item), item)
    return list(first.values())


def _prompt(data: Data, problem: Problem) -> str:
    return fill_template("data.prompt_template", data.prompt_template, problem)


def _position(prompt: str) -> float:
    """Return a number from 0 to 1 that is fixed for each prompt and evenly spread over prompts."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") / 2**64
