"""Restored samples: groups that a resumed run had generated and need not generate again.

The files of coming steps in the rollout log are put aside first (`tandem.samples.sample_files`), so that the log
itself holds only what the run stands by. A group is restored if it is complete, from this run, and of a problem that it
would draw. Engines must also have been verified to hold its weights; for samples that were trained on, they were. The
scheduler checks whether the run's weights are still the same (`tandem.coordinator.scheduler.groups.table`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandem.common.errors import SamplesError
from tandem.config import Config
from tandem.coordinator.algorithms.places import PlaceUnknown
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.scheduler.events import Place, RestoredGroup
from tandem.observe.run_folder.journal import JournalReader
from tandem.samples.sample_files import SHARD, RestoreLimits, SampleFolder, files, read_limits

_COLUMNS = ("command_id", "group", "sample", "problem_id", "oldest_version", "newest_version", "rollout")


def limits_of(config: Config, journal: JournalReader) -> RestoreLimits:
    """Return the limits on restored samples, from the journal before it drops the records after the checkpoint."""
    refits = journal.refits()
    quarantined: dict[str, tuple[int, ...]] = {}
    for refit in refits:
        for engine in refit.quarantined:
            quarantined[engine] = (*quarantined.get(engine, ()), refit.version)
    is_proven = config.refit.verify != "off"
    newest = max((refit.version for refit in refits), default=-1)
    return RestoreLimits(newest_proven=newest if is_proven else None, quarantined=quarantined)


class _Found(NamedTuple):
    """A complete group in a file."""

    step: int
    number: int
    problem_id: str
    oldest_version: int
    restored: RestoredGroup


class RestoredSamples:
    """Groups that were put aside in the rollout log's folder."""

    def __init__(self, config: Config, folder: SampleFolder, run_id: str, say: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder
        self._run_id = run_id
        self._say = say
        self._size = config.rollout_section.num_generations_per_prompt

    def find(self, algorithm: RunningAlgorithm, first_step: int) -> dict[Place, RestoredGroup]:
        """Return the groups that need not be generated, from `first_step` on; report their number."""
        restored: dict[Place, RestoredGroup] = {}
        lost: set[int] = set()
        for aside in self._folder.aside():
            # If a newer folder had a step's samples, those of an older one do not belong to the later weights.
            lost_before = frozenset(lost)
            for group in self._groups(aside, lost):
                place = group.step, group.number
                is_wanted = first_step <= group.step <= algorithm.num_steps and place not in restored
                is_wanted = is_wanted and group.step not in lost_before
                if is_wanted and self._is_still_asked(algorithm, group):
                    restored[place] = group.restored
        if restored:
            first, last = min(restored)[0], max(restored)[0]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            self._say(f"{len(restored)} groups of {steps} had been generated, and are not generated again")
        return restored

    def _is_still_asked(self, algorithm: RunningAlgorithm, group: _Found) -> bool:
        """Return whether the run would draw the same problem, with weights that are not too old."""
        oldest = group.step - 1 - self._config.max_trajectory_age_steps
        try:
            (prompt_group,) = algorithm.prompt_groups(group.step, "train", [group.number])
        except PlaceUnknown:  # with dynamic sampling, what a later step draws depends on the steps before it
            return False
        return prompt_group.problem.problem_id == group.problem_id and group.oldest_version >= oldest

    def _groups(self, aside: Path, lost: set[int]) -> Iterator[_Found]:
        """Yield the valid groups that were put aside together; trained ones first, then the newest.

        Add to `lost` the steps with a file that cannot be read.
        """
        try:
            limits = read_limits(aside)
        except OSError as error:
            self._say(f"what was put aside in {aside} is generated again: {error.strerror}")
            return
        candidates: list[tuple[bool, _Found]] = []
        for file in files(aside):
            is_shard = file.path.suffix == SHARD
            try:
                groups = [*self._read(file.path, file.step, None if is_shard else limits)]
            except SamplesError as error:
                self._say(f"{error}; its samples are generated again")
                lost.add(file.step)
                continue
            candidates += [(is_shard, group) for group in groups]
        candidates.sort(key=lambda item: (item[0], item[1].restored.command_id), reverse=True)
        for _, group in candidates:
            if limits.below is None or group.restored.newest_version < limits.below:
                yield group

    def _read(self, path: Path, step: int, limits: RestoreLimits | None) -> Iterator[_Found]:
        """Yield the groups in a file that are complete and, with `limits`, made with verified weights."""
        from tandem.samples.recorded_shards import read_shard
        from tandem.samples.sample_writing import read_unfinished  # importing Arrow takes a while

        read = read_shard if path.suffix == SHARD else read_unfinished
        groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in read(path, self._run_id).select(_COLUMNS).to_pylist():
            groups.setdefault((row["command_id"], row["group"]), []).append(row)
        for (command_id, number), rows in groups.items():
            if {row["sample"] for row in rows} != {*range(self._size)}:
                continue
            newest = max(row["newest_version"] for row in rows)
            oldest = min(row["oldest_version"] for row in rows)
            first = rows[0]
            if limits is not None and not _is_proven(limits, first["rollout"], oldest, newest):
                continue
            file = str(path.relative_to(self._folder.path))
            restored = RestoredGroup(file=file, command_id=command_id, newest_version=newest)
            yield _Found(step, number, first["problem_id"], oldest, restored)


def _is_proven(limits: RestoreLimits, engine: str, oldest: int, newest: int) -> bool:
    """Return whether an engine was verified to hold all versions from the oldest to the newest."""
    if limits.newest_proven is None:
        return True
    suspect = limits.quarantined.get(engine, ())
    return newest <= limits.newest_proven and not any(oldest <= version <= newest for version in suspect)
