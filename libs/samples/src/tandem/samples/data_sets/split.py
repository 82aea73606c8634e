"""The split of problems into those to train on and those held out.

A problem is a row, identified by its place. Rows may share their prompt, or all of their content. The same content
(prompt, answer and all else) must never be both trained on and validated on.

Where Tandem splits the data, a hash of the content decides, of the prompt first. Train and validation thus never share
a problem. No run, whatever its seed, trains on a problem that another run of the same data section validates on; the
SFT and the GRPO stage of one example are such runs. Where the split is given, a problem on both sides is an error.

Problems that a task generates are identified by their prompt: a task repeats itself as often as it is asked, and
numbers each problem.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec

from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.common.values import encode_json, fill_template, text_of
from tandem.config import Config
from tandem.config.schema import DataConfig
from tandem.config.schema.environments import PACKAGED
from tandem.samples.data_sets import sources
from tandem.samples.data_sets.listed import HeldOut, collect_held_out, load_parts, take_items
from tandem.samples.data_sets.prompts import PromptedProblem
from tandem.samples.data_sets.reasoning_tasks import name_task

Item = TypeVar("Item")

_PATIENCE = 4
"""Patience with a generator: it has run dry after this many repeats in a row for each distinct problem seen.

If there is one more among ``D`` equally likely ones, it stays hidden that long with a probability of ``(1 - 1/D) ** (4
* D)``, less than 2 per cent.
"""
_MIN_PATIENCE = 1000
_MOST_MADE = 1_000_000
"""Most problems that a task generates: all are generated before the run begins, and kept."""


class TrainingSource(msgspec.Struct, frozen=True):
    """One of several sets of problems to train on."""

    name: str
    """Name in metrics."""
    data: DataConfig
    """Section ``data`` for this set alone: it says how prompts are written, and what scores the samples."""
    num_problems: int


class ProblemSets(msgspec.Struct, frozen=True, kw_only=True):
    """Problems to train on and held-out problems."""

    train: list[Problem]
    held_out: dict[str, list[Problem]]
    """By the names of the sets; a single set has the name ``""``."""
    sources: tuple[TrainingSource, ...] = ()
    """Sets that `train` concatenates; empty if there is one, which the section ``data`` describes."""
    views: Mapping[str, DataConfig] = {}
    """Section ``data`` of held-out sets that are listed, by name."""
    num_set_aside: int = 0
    """Problems that are left out because they are too similar to held-out ones."""

    @property
    def all_views(self) -> list[DataConfig]:
        """Sections ``data`` of all listed sets."""
        return [*(source.data for source in self.sources), *self.views.values()]

    def list_train(self, data: DataConfig) -> list[PromptedProblem]:
        """Return the training problems, each with its settings; `data` is the section of the run."""
        if not self.sources:
            return [PromptedProblem(each, data, name_task(data.task, each.metadata)) for each in self.train]
        ways = [(source.data, source.name if len(self.sources) > 1 else "") for source in self.sources]
        repeated = [way for way, source in zip(ways, self.sources, strict=True) for _ in range(source.num_problems)]
        return [PromptedProblem(problem, *way) for problem, way in zip(self.train, repeated, strict=True)]

    def list_held_out(self, data: DataConfig) -> dict[str, list[PromptedProblem]]:
        """Return the held-out problems, each with its settings, by the names of the sets."""
        return {
            name: [
                PromptedProblem(each, self.views.get(name, data), name or name_task(data.task, each.metadata))
                for each in problems
            ]
            for name, problems in self.held_out.items()
        }

    @property
    def validation(self) -> list[Problem]:
        """All held-out problems."""
        return [problem for problems in self.held_out.values() for problem in problems]


def load_problems(config: Config, reader: sources.RowReader | None = None) -> ProblemSets:
    """Load or generate the problems of a run; `reader` reads rows, by default of text alone.

    Raises:
        DataError: a source is missing, empty, malformed, or has too few distinct problems.
        ConfigError: the task or one of its parameters does not exist, or a template names a missing field.
    """
    sets = _load_sets(config, reader or sources.RowReader())
    if (
        any(config.env[name].nemo_gym is not None for name in config.environments)
        and config.data.dataset_name not in PACKAGED
    ):
        from tandem.samples.packaged_environments.tasks import try_agents

        try_agents(config, itertools.chain(sets.train, sets.validation))
    return sets


def _load_sets(config: Config, reader: sources.RowReader) -> ProblemSets:
    """Load or generate the problems of a run. Raises what `load_problems` raises."""
    data = config.data
    if data.train:
        return _load_listed(config, reader)
    seed = config.algorithm_section.seed
    match data.dataset_name:
        case "reasoning_gym":
            return _draw_generated(data, sources.reasoning_gym(data, seed))
        case "sliding_puzzle":
            return _draw_generated(data, sources.sliding_puzzle(data, seed))
        case name if name in PACKAGED:
            return _load_packaged(config)
        case "shapes":
            return _draw_generated(data, reader.draw_shapes(data, seed))
        case _:
            train_rows, held_out_rows = reader.read(
                data, text_key=data.input_key, only_held_out=config.evaluates, keeps_digits=True
            )

    def problems(rows: sources.Rows) -> list[Problem]:
        return [sources.problem(row_name, row, data) for row_name, row in rows]

    identity = _identity(partial(_prompt, data))
    apart = {name: problems(rows) for name, rows in held_out_rows.items()}
    if apart and config.evaluates:
        return ProblemSets(train=[], held_out=_take_held_out(data, apart, identity))
    sides = hold_out(data, problems(train_rows), apart, identity, keep_prompts_together=False)
    return ProblemSets(train=sides.train, held_out=sides.held_out, num_set_aside=sides.num_set_aside)


def _load_packaged(config: Config) -> ProblemSets:
    """Load the tasks of a packaged environment."""
    from tandem.samples.packaged_environments.tasks import list_tasks

    train, validation = list_tasks(config)
    apart = {} if validation is None else {"": validation}
    identity = _identity(partial(_prompt, config.data))
    if apart and config.evaluates:
        return ProblemSets(train=[], held_out=_take_held_out(config.data, apart, identity))
    sides = hold_out(config.data, train, apart, identity, keep_prompts_together=False)
    return ProblemSets(train=sides.train, held_out=sides.held_out, num_set_aside=sides.num_set_aside)


def _load_listed(config: Config, reader: sources.RowReader) -> ProblemSets:
    """Load the problems of several datasets."""
    is_alone = config.evaluates and bool(config.data.validation)
    training, validation = load_parts(config, partial(_load_sets, reader=reader), with_train=not is_alone)
    problem_lists: list[list[Problem]] = [take_items(part) for part in training]
    train = [problem for problems in problem_lists for problem in problems]
    held_sets: dict[str, HeldOut[Problem]] = collect_held_out(training, validation)
    held_problems = {name: items for name, (items, _) in held_sets.items()}
    refuse_leakage(train, held_problems, _identity(lambda problem: text_of(problem.question)))
    return ProblemSets(
        train=train,
        held_out=held_problems,
        sources=tuple(
            TrainingSource(part.name, part.data, len(items))
            for part, items in zip(training, problem_lists, strict=True)
        ),
        views={name: data for name, (_, data) in held_sets.items()},
        num_set_aside=sum(part.sets.num_set_aside for part in training),
    )


def _identity(prompt: Callable[[Problem], str]) -> ItemIdentity[Problem]:
    """Return the identity of problems: their prompts, and their whole content."""

    def content(problem: Problem) -> str:
        parts = (prompt(problem), problem.answer, problem.metadata)
        return encode_json(parts, order="sorted").decode()

    return ItemIdentity(place=lambda problem: problem.problem_id, prompt=prompt, content=content)


def _draw_generated(data: DataConfig, problems: Iterator[Problem]) -> ProblemSets:
    """Draw from an endless generator until both sets are full."""
    num_train, num_validation = data.num_train or 0, data.num_validation or 0
    if num_train + num_validation > _MOST_MADE:
        raise DataError(
            f"data.num_train {num_train} and data.num_validation {num_validation}: {_name(data)} makes at most "
            f"{_MOST_MADE} problems for a run, all before it begins"
        )
    share = _find_held_out_share(data)
    sizes = {True: num_validation, False: num_train}
    sides: dict[bool, list[Problem]] = {True: [], False: []}
    seen: dict[str, Problem] = {}
    num_repeats = 0
    while any(len(sides[is_held_out]) < sizes[is_held_out] for is_held_out in (True, False)):
        problem = next(problems)
        prompt = _prompt(data, problem)
        num_repeats = num_repeats + 1 if prompt in seen else 0
        if num_repeats > max(_MIN_PATIENCE, _PATIENCE * len(seen)):
            return _all_there_is(data, seen)
        if num_repeats == 0:
            seen[prompt] = problem
            is_held_out = _position(prompt) < share
            if len(sides[is_held_out]) < sizes[is_held_out]:
                sides[is_held_out].append(problem)
    return ProblemSets(train=sides[False], held_out={"": sides[True]})


def is_held_out(data: DataConfig, problem: Problem) -> bool:
    """Return whether a generated problem is among those that are held out, by its prompt; see `_draw_generated`."""
    return _position(_prompt(data, problem)) < _find_held_out_share(data)


def _find_held_out_share(data: DataConfig) -> float:
    num_train, num_validation = data.num_train or 0, data.num_validation or 0
    return num_validation / (num_train + num_validation)


def _all_there_is(data: DataConfig, seen: Mapping[str, Problem]) -> ProblemSets:
    """Split all the problems that a generator can make, by prompt; the hash alone gave too few of one side."""
    num_train, num_validation = data.num_train or 0, data.num_validation or 0
    if len(seen) < num_train + num_validation:
        raise DataError(
            f"{_name(data)} has only {len(seen)} distinct problems with these task_params: fewer than "
            f"{num_train + num_validation}, those to train on (data.num_train {num_train}) and those held out "
            f"(data.num_validation {num_validation})"
        )
    held_out = {prompt: seen[prompt] for prompt in sorted(seen, key=_position)[:num_validation]}
    train = [problem for prompt, problem in seen.items() if prompt not in held_out]
    return ProblemSets(train=train[:num_train], held_out={"": list(held_out.values())})


def _name(data: DataConfig) -> str:
    return f"data.dataset_name {data.dataset_name!r}" if data.task is None else f"data.task {data.task!r}"


class ItemIdentity(msgspec.Struct, Generic[Item], frozen=True, kw_only=True):
    """Functions that identify an item for splitting."""

    place: Callable[[Item], str]
    """File and line, or dataset and row."""
    prompt: Callable[[Item], str]
    content: Callable[[Item], str]
    """Whole content, the prompt included."""


class SplitSides(msgspec.Struct, Generic[Item], frozen=True, kw_only=True):
    """Items to train on, and items to validate on, by name."""

    train: list[Item]
    held_out: dict[str, list[Item]]
    num_set_aside: int = 0
    """Number of items on neither side."""


def hold_out(
    data: DataConfig,
    train: Sequence[Item],
    apart: Mapping[str, Sequence[Item]],
    identity: ItemIdentity[Item],
    *,
    keep_prompts_together: bool,
) -> SplitSides[Item]:
    """Split one file, or cut several, into items to train on and items to validate on, by name.

    With `keep_prompts_together`, when one file is split, no training item has the prompt of a held-out one, unless too
    few would be left.

    Raise `DataError` if there are fewer than wanted, or if separate files share an item.
    """
    train_name = data.train_data_path or f"{data.dataset_name}[{data.split}]"
    if not apart:
        return _split(data, train_name, train, identity, keep_prompts_together=keep_prompts_together)
    held_out = _take_held_out(data, apart, identity)
    if len(train) < (data.num_train or 1):
        raise DataError(
            f"data.num_train: {train_name} has only {_describe_count(train, identity)}, not {data.num_train}"
        )
    train_items = list(train[: data.num_train])
    refuse_leakage(train_items, held_out, identity)
    return SplitSides(train=train_items, held_out=held_out)


def _take_held_out(
    data: DataConfig, apart: Mapping[str, Sequence[Item]], identity: ItemIdentity[Item]
) -> dict[str, list[Item]]:
    """Take held-out items from sources of their own. Raise `DataError` if there are fewer than wanted."""
    names = {"": f"{data.dataset_name}[{data.val_split}]", **sources.validation_paths(data)}
    for name, items in apart.items():
        if len(items) < (data.num_validation or 1):
            raise DataError(
                f"data.num_validation: {names[name]} has only {_describe_count(items, identity)}, not "
                f"{data.num_validation}"
            )
    return {name: list(items[: data.num_validation]) for name, items in apart.items()}


def refuse_leakage(train: Sequence[Item], held_out: Mapping[str, Sequence[Item]], identity: ItemIdentity[Item]) -> None:
    """Raise `DataError` if a training item is held out as well."""
    held_places = {
        identity.content(item): identity.place(item) for items in held_out.values() for item in reversed(items)
    }
    shared = [
        (identity.place(item), held_places[key]) for item in train if (key := identity.content(item)) in held_places
    ]
    if shared:
        train_place, held_place = shared[0]
        more = f" (and {len(shared) - 1} more)" if len(shared) > 1 else ""
        raise DataError(
            f"data: {train_place} and {held_place} hold the same problem{more}, which would be trained on and "
            "validated on: take it out of one of them"
        )


def _split(
    data: DataConfig, name: str, items: Sequence[Item], identity: ItemIdentity[Item], *, keep_prompts_together: bool
) -> SplitSides[Item]:
    """Split one file in the first way that leaves enough to train on."""
    num_held_out = _num_held_out(data, len(items))
    if len(items) < num_held_out:
        raise DataError(f"data.num_validation: {name} has only {_describe_count(items, identity)}, not {num_held_out}")
    prompts = [identity.prompt(item) for item in items]
    contents = [identity.content(item) for item in items]
    # Prompts decide; contents break ties.
    order = sorted(range(len(items)), key=lambda i: (_position(prompts[i]), _position(contents[i])))
    by_prompt = sorted(range(len(items)), key=lambda i: _position(prompts[i]))
    ways: list[tuple[list[int], list[str]]] = [(by_prompt[:num_held_out], prompts)] if keep_prompts_together else []
    ways += [(held_indexes, contents) for held_indexes in _choices(_groups(order, contents), num_held_out)]
    max_num_train = 0
    for held_indexes, keys in ways:
        kept_out = {keys[i] for i in held_indexes}
        train_indexes = [i for i in range(len(items)) if keys[i] not in kept_out]
        if len(train_indexes) >= (data.num_train or 1):
            return SplitSides(
                train=[items[i] for i in train_indexes[: data.num_train]],
                held_out={"": [items[i] for i in held_indexes]},
                num_set_aside=len(items) - len(held_indexes) - len(train_indexes),
            )
        max_num_train = max(max_num_train, len(train_indexes))
    if max_num_train:
        raise DataError(
            f"data.num_train: without those held out, {name} has only {max_num_train} "
            f"{_distinct(len(items), len(set(contents)))}problems, not {data.num_train}"
        )
    raise DataError(
        f"data: {name} has {_describe_count(items, identity)}, and with {num_held_out} of them held out "
        "(data.num_validation) none is left to train on"
    )


def share_held_out(num_rows: int) -> int:
    """Return the number of rows to hold out of `num_rows`: a tenth, 256 at most, and one at least."""
    return min(256, max(1, num_rows // 10))


def _num_held_out(data: DataConfig, num_items: int) -> int:
    """Return how many items of one file to hold out: by a number, a size, or by themselves."""
    size = data.split_validation_size
    if data.num_validation is not None:
        return data.num_validation or int(size if size >= 1 else round(size * num_items))
    return int(size if size >= 1 else round(size * num_items)) if size else share_held_out(num_items)


def _groups(order: Sequence[int], contents: Sequence[str]) -> list[list[int]]:
    """Group items of the same content."""
    groups: dict[str, list[int]] = {}
    for index in order:
        groups.setdefault(contents[index], []).append(index)
    return list(groups.values())


def _choices(groups: Sequence[list[int]], num_held_out: int) -> Iterator[list[int]]:
    """Yield choices of `num_held_out` items to hold out that cut few groups; the rest of a cut group is of no use."""
    held_indexes: list[int] = []
    cut_groups: list[list[int]] = []
    for group in groups:
        if len(held_indexes) + len(group) <= num_held_out:
            held_indexes += group
        else:
            cut_groups.append(group)
    if len(held_indexes) < num_held_out:
        held_indexes += min(cut_groups, key=len)[: num_held_out - len(held_indexes)]
    yield held_indexes
    large = [group for group in groups if len(group) >= num_held_out]
    if large:
        yield min(large, key=len)[:num_held_out]


def _describe_count(items: Sequence[Item], identity: ItemIdentity[Item]) -> str:
    num_distinct = len({identity.content(item) for item in items})
    if num_distinct == len(items):
        return f"{len(items)} distinct problems"
    return f"{len(items)} problems, {num_distinct} of them distinct"


def _distinct(count: int, num_distinct: int) -> str:
    return "distinct " if count == num_distinct else ""


def _prompt(data: DataConfig, problem: Problem) -> str:
    if isinstance(problem.question, str):
        return fill_template("data.prompt_template", data.prompt_template, problem)
    return text_of(problem.question)


def _position(text: str) -> float:
    """Return a number from 0 to 1 that is fixed for each text and evenly spread over texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
