"""The recorded samples that trials leave out: by group, by engine, by data set, by age."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.coordinator.algorithms.left_out import SampleEdit
from tandem.samples import recorded_shards, sample_files

_COLUMNS = (
    *("step", "group", "sample", "problem_id", "response", "reward", "failure", "rollout", "oldest_version"),
    "finish_reason",
)


class SampleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded sample without its tokens."""

    step: int
    group: int
    sample: int
    problem_id: str
    response: str
    reward: float
    failure: str
    rollout: str
    oldest_version: int
    finish_reason: str

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
    is_cause: bool
    """Whether what they have in common is the cause, rather than one of them, if the trouble is gone without them."""


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


def list_partitions(facts: Sequence[SampleFacts]) -> list[SamplePartition]:
    """Return the sets of samples of one engine, one data set, and of failed scores, if not all samples are one."""
    key_by_title: dict[str, Callable[[SampleFacts], str]] = {
        "the samples of engine": lambda fact: fact.rollout,
        "the samples of data set": lambda fact: fact.source,
    }
    partitions = []
    for title, key in key_by_title.items():
        sets: dict[Hashable, list[SampleFacts]] = {}
        for fact in facts:
            sets.setdefault(key(fact), []).append(fact)
        if len(sets) > 1:
            partitions += [SamplePartition(f"{title} {name}", each, is_cause=False) for name, each in sets.items()]
    failed = [fact for fact in facts if fact.failure]
    if 0 < len(failed) < len(facts):
        partitions.append(SamplePartition("the samples that could not be scored", failed, is_cause=True))
    return partitions


def list_old(facts: Sequence[SampleFacts]) -> list[SamplePartition]:
    """Return the sets of samples beyond an age, the oldest ones first."""
    ages = sorted({fact.age for fact in facts}, reverse=True)
    partitions = []
    for age in ages[:-1]:
        old = [fact for fact in facts if fact.age >= age]
        steps = "a step" if age == 1 else f"{age} steps"
        partitions.append(SamplePartition(f"samples {steps} old or older", old, is_cause=True))
    return partitions
