"""The recorded samples that trials leave out: by group, by engine, by data set, by age."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.coordinator.algorithms.left_out import SampleEdit
from tandem.observe.diagnosis.rewards import LEAST_RIGHT, MANY_RIGHT, holds_answer
from tandem.samples import recorded_shards, sample_files

_COLUMNS = (
    *("step", "group", "sample", "problem_id", "reference_answer", "response", "reward", "failure", "rollout"),
    "oldest_version",
)


class SampleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded sample without its tokens."""

    step: int
    group: int
    sample: int
    problem_id: str
    reference_answer: str
    response: str
    reward: float
    failure: str
    rollout: str
    oldest_version: int

    @property
    def age(self) -> int:
        """Steps between the weights that began it and those that it trains."""
        return self.step - 1 - self.oldest_version

    @property
    def source(self) -> str:
        """File, or set of generated problems, that its problem is from."""
        name, separator, number = self.problem_id.rpartition(":")
        if not (separator and number.isdecimal()):
            name = self.problem_id.rpartition("-")[0]
        return name or self.problem_id

    def __str__(self) -> str:
        """Name it, with its problem and its reward."""
        return (
            f"step {self.step}, group {self.group}, sample {self.sample} (problem {self.problem_id}, reward "
            f"{self.reward:.6g})"
        )


class SamplePartition(NamedTuple):
    """Samples that have something in common which others have not."""

    name: str
    samples: list[SampleFacts]


def read_facts(run: Path, run_id: str, first_step: int, last_step: int) -> list[SampleFacts]:
    """Return the samples of some steps, in order. Raises `SamplesError`."""
    facts = []
    for file in sample_files.files(run / sample_files.FOLDER, sample_files.SHARD):
        if first_step <= file.step <= last_step:
            rows = recorded_shards.read_shard(file.path, run_id, _COLUMNS).to_pylist()
            facts += [msgspec.convert(row, SampleFacts) for row in rows]
    return sorted(facts, key=lambda fact: (fact.step, fact.group, fact.sample))


def group_facts(facts: Iterable[SampleFacts]) -> list[tuple[SampleFacts, ...]]:
    """Return samples by rollout group."""
    groups: dict[tuple[int, int], list[SampleFacts]] = {}
    for fact in facts:
        groups.setdefault((fact.step, fact.group), []).append(fact)
    return [tuple(group) for group in groups.values()]


def edits_of(facts: Sequence[SampleFacts]) -> tuple[SampleEdit, ...]:
    """Return the edits that leave samples out."""
    return tuple(SampleEdit(step=fact.step, group=fact.group, sample=fact.sample) for fact in facts)


def rewards_by_answers(facts: Sequence[SampleFacts]) -> tuple[SampleEdit, ...]:
    """Return the edits with which samples that hold their reference answer have 1, and others 0, where it is known.

    None if too few samples hold it to judge rewards by it, beyond those that hold the answer of another problem.
    """
    answered = [fact for fact in facts if fact.reference_answer and not fact.failure]
    shifted = [*answered[len(answered) // 2 :], *answered[: len(answered) // 2]]
    num_right = sum(holds_answer(fact.response, fact.reference_answer) for fact in answered)
    num_right -= sum(
        holds_answer(fact.response, shifted_fact.reference_answer)
        for fact, shifted_fact in zip(answered, shifted, strict=True)
        if shifted_fact.reference_answer != fact.reference_answer
    )
    if num_right < max(LEAST_RIGHT, MANY_RIGHT * len(answered)):
        return ()
    edits = []
    for fact in answered:
        reward = float(holds_answer(fact.response, fact.reference_answer))
        if reward != fact.reward:
            edits.append(SampleEdit(step=fact.step, group=fact.group, sample=fact.sample, reward=reward))
    return tuple(edits)


def list_partitions(facts: Sequence[SampleFacts], environments: Mapping[str, str]) -> list[list[SamplePartition]]:
    """Return the samples by engine, by environment and by data set, where there are several.

    `environments` has the environment that scores the problems of each file.
    """
    key_by_title: dict[str, Callable[[SampleFacts], str]] = {
        "the samples of engine": lambda fact: fact.rollout,
        "the samples of environment": lambda fact: environments.get(fact.source, ""),
        "the samples of data set": lambda fact: fact.source,
    }
    partitions = []
    for title, key in key_by_title.items():
        sets: dict[str, list[SampleFacts]] = {}
        for fact in facts:
            sets.setdefault(key(fact), []).append(fact)
        if len(sets) > 1:
            partitions.append([SamplePartition(f"{title} {name}", members) for name, members in sets.items()])
    return partitions


def list_old(facts: Sequence[SampleFacts]) -> list[SamplePartition]:
    """Return the sets of samples beyond an age, the oldest ones first."""
    ages = sorted({fact.age for fact in facts}, reverse=True)
    partitions = []
    for age in ages[:-1]:
        old = [fact for fact in facts if fact.age >= age]
        steps = "a step" if age == 1 else f"{age} steps"
        partitions.append(SamplePartition(f"samples {steps} old or older", old))
    return partitions
