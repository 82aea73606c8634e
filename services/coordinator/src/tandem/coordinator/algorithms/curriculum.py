"""The levels of a reasoning-gym composite's tasks, which follow accuracy (``task_params.curriculum``).

The levels of a step are a function of the accuracies of finished steps, which the journal has, and of nothing else: a
resumed run has the same. While step `s` is in progress, the steps up to `s` plus the age have been drawn. So the levels
of a step come from the steps before it that were finished then, with any age.

The problem that a place of the stream has at another level is a function of the problem there, the level and nothing
else. So nothing of it is kept, and a resumed run draws the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.config.schema import DataConfig
from tandem.coordinator.algorithms.places import PlaceUnknown
from tandem.observe.run_folder.journal import StepRecord
from tandem.samples.data_sets import EncodedProblem, PromptEncoder, order, prompts, reasoning_tasks, sources, split

_NUM_TRIED = 20
"""Problems of a level that are tried for one that fits and is not held out."""
_NUM_SHOWN = 4
"""Problems of each level that are made before the run begins."""


class LevelledProblems:
    """The problems of each task of a composite at each level."""

    def __init__(self, data: DataConfig, encoder: PromptEncoder) -> None:
        """Make some of every level that may come. Raise `DataError` if none of a level's can be trained on."""
        curriculum = reasoning_tasks.read_curriculum(data.task_params)
        assert curriculum is not None, "or there are no levels"
        self.settings, self.first_levels = curriculum
        self._data = data
        self._encoder = encoder
        self.encode: Callable[[str, int, int], EncodedProblem] = functools.lru_cache(order.NUM_CHECKED)(self._encode)
        """Return the problem of a task and a level with this number. Raise `DataError` if none near it fits."""
        levels = [
            (task, range(reasoning_tasks.find_highest_level(task, self.settings) + 1)) for task in self.first_levels
        ]
        numbers = range(_NUM_SHOWN)
        shown = [self._make(task, level, number) for task, range_ in levels for level in range_ for number in numbers]
        encoder.check_characters(prompts.PromptedProblem(problem, data) for problem in shown)
        for task, range_ in levels:
            for level in range_:
                self.encode(task, level, 0)

    def replace_level(self, encoded: EncodedProblem, level: int) -> EncodedProblem:
        """Return the problem that stands in the place of this one at a level."""
        if level == self.first_levels[encoded.set_name]:
            return encoded
        return self.encode(encoded.set_name, level, int(encoded.problem.problem_id.rpartition("-")[2]))

    def _encode(self, task: str, level: int, number: int) -> EncodedProblem:
        fault = ""
        for trial in range(_NUM_TRIED):
            problem = self._make(task, level, number + trial)
            if split.is_held_out(self._data, problem):
                fault = "they are held out for validation"
                continue
            try:
                encoded = self._encoder.encode(prompts.PromptedProblem(problem, self._data, task))
            except DataError as error:
                fault = str(error)
                continue
            if encoded is not None:
                return encoded
        raise DataError(
            f"data.task_params: none of {_NUM_TRIED} problems of {task} at level {level} can be trained on: {fault} "
            "(curriculum.max_level bounds the levels)"
        )

    def _make(self, task: str, level: int, number: int) -> Problem:
        parameters = reasoning_tasks.task_at_level(self._data.task_params, task, level)
        problem = sources.reasoning_gym_problem(str(self._data.task), parameters, number)
        name = f"{task}-level{level}-{number}"
        return msgspec.structs.replace(
            problem, problem_id=name, metadata={**problem.metadata, reasoning_tasks.LEVEL: level}
        )


Levels = Mapping[str, int]


class CurriculumLevels:
    """The levels of all tasks that a curriculum moves, step by step."""

    def __init__(self, settings: reasoning_tasks.CurriculumSettings, first_levels: Levels, age: int) -> None:
        """`age` is how many steps may be drawn ahead of the one in progress."""
        self._settings = settings
        self._highest = {task: reasoning_tasks.find_highest_level(task, settings) for task in first_levels}
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
    is_moved = (
        data.task == reasoning_tasks.COMPOSITE
        and not config.evaluates
        and reasoning_tasks.read_curriculum(data.task_params) is not None
    )
    return TaskCurriculum(config, encoder) if is_moved else None
