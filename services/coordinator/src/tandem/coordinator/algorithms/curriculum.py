"""The levels of a reasoning-gym composite's tasks, which follow accuracy (``task_params.curriculum``).

The levels of a step are a function of the accuracies of finished steps, which the journal has, and of nothing else: a
resumed run has the same. While step `s` is in progress, the steps up to `s` plus the age have been drawn. So the levels
of a step come from the steps before it that were finished then, with any age.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.config import Config
from tandem.coordinator.algorithms.places import PlaceUnknown
from tandem.observe.run_folder.journal import StepRecord
from tandem.samples.data_sets import EncodedProblem, PromptEncoder
from tandem.samples.data_sets.levelled import LevelledProblems
from tandem.samples.data_sets.reasoning_tasks import COMPOSITE, CurriculumSettings, find_highest_level, read_curriculum

Levels = Mapping[str, int]


class CurriculumLevels:
    """The levels of all tasks that a curriculum moves, step by step."""

    def __init__(self, settings: CurriculumSettings, first_levels: Levels, age: int) -> None:
        """`age` is how many steps may be drawn ahead of the one in progress."""
        self._settings = settings
        self._highest = {task: find_highest_level(task, settings) for task in first_levels}
        self._age = age
        self._after: list[Levels] = [dict(first_levels)]
        """Levels after each finished step; the first entry is before step 1."""
        self._accuracies: list[dict[str, tuple[int, float]]] = [{}]
        """Level and accuracy of each task of each finished step."""

    def of(self, step: int) -> Levels:
        """Return the levels at which a step draws. Raise `PlaceUnknown` if a step that decides is not finished."""
        decided_after = max(0, step - 1 - self._age)
        if decided_after >= len(self._after):
            raise PlaceUnknown(f"step {decided_after} has yet to train")
        return self._after[decided_after]

    def finish(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take a step's accuracies; return its levels, as metrics."""
        del self._after[step:], self._accuracies[step:]
        levels = self.of(step)
        accuracies = {task: metrics.get(f"train_{task}/accuracy") for task in levels}
        self._accuracies.append(
            {task: (levels[task], value) for task, value in accuracies.items() if value is not None}
        )
        self._after.append({task: self._decide(task, level) for task, level in self._after[-1].items()})
        return {f"train_{task}/level": float(level) for task, level in levels.items()}

    def resume(self, steps: Iterable[StepRecord]) -> None:
        """Go on after the steps of a journal, in order."""
        del self._after[1:], self._accuracies[1:]
        for record in steps:
            if record.step > 0:
                self.finish(record.step, record.metrics)

    def _decide(self, task: str, level: int) -> int:
        """Return the level of a task after its last steps, of which those count that were drawn since it has this one.

        Steps that were drawn earlier, at another level, may finish after a change.
        """
        settings, accuracies = self._settings, list[float]()
        for step in range(len(self._after), 0, -1):
            if self._after[step - 1][task] != level or len(accuracies) == settings.last_k:
                break
            drawn, accuracy = self._accuracies[step].get(task, (None, 0.0))
            if drawn == level:
                accuracies.append(accuracy)
        if len(accuracies) < settings.last_k:
            return level
        mean = sum(accuracies) / len(accuracies)
        if mean >= settings.success_threshold:
            return min(level + 1, self._highest[task])
        return max(level - 1, 0) if mean <= settings.failure_threshold else level


class TaskCurriculum:
    """The levels of a run's tasks, and its problems at these levels."""

    def __init__(self, config: Config, encoder: PromptEncoder) -> None:
        self._problems = LevelledProblems(config.data, encoder)
        problems = self._problems
        self.levels = CurriculumLevels(problems.settings, problems.first_levels, config.max_trajectory_age_steps)

    def draw(self, step: int, encoded: EncodedProblem) -> EncodedProblem:
        """Return the problem that stands in the place of this one in a step. Raise `PlaceUnknown` as `levels.of`."""
        level = self.levels.of(step).get(encoded.set_name)
        return encoded if level is None else self._problems.replace_level(encoded, level)


def make_curriculum(config: Config, encoder: PromptEncoder) -> TaskCurriculum | None:
    """Return the curriculum of a run; None if its levels stay as they are."""
    data = config.data
    is_moved = data.task == COMPOSITE and not config.evaluates and read_curriculum(data.task_params) is not None
    return TaskCurriculum(config, encoder) if is_moved else None
