"""Problems of a reasoning-gym composite at levels other than those that its file names.

The problem that a place of the stream has at another level is a function of the problem there, the level and nothing
else. So nothing of it is kept, and a resumed run draws the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.config.schema import DataConfig
from tandem.samples.data_sets import sources
from tandem.samples.data_sets.order import NUM_CHECKED
from tandem.samples.data_sets.prompts import EncodedProblem, PromptedProblem, PromptEncoder
from tandem.samples.data_sets.reasoning_tasks import LEVEL, find_highest_level, read_curriculum, task_at_level
from tandem.samples.data_sets.split import is_held_out

_NUM_TRIED = 20
"""Problems of a level that are tried for one that fits and is not held out."""
_NUM_SHOWN = 4
"""Problems of each level that are made before the run begins."""


class LevelledProblems:
    """The problems of each task of a composite at each level."""

    def __init__(self, data: DataConfig, encoder: PromptEncoder) -> None:
        """Make some of every level that may come. Raise `DataError` if none of a level's can be trained on."""
        curriculum = read_curriculum(data.task_params)
        assert curriculum is not None, "or there are no levels"
        self.settings, self.first_levels = curriculum
        self._data = data
        self._encoder = encoder
        self.encode: Callable[[str, int, int], EncodedProblem] = functools.lru_cache(NUM_CHECKED)(self._encode)
        """Return the problem of a task and a level with this number. Raise `DataError` if none near it fits."""
        levels = [(task, range(find_highest_level(task, self.settings) + 1)) for task in self.first_levels]
        numbers = range(_NUM_SHOWN)
        shown = [self._make(task, level, number) for task, range_ in levels for level in range_ for number in numbers]
        encoder.check_characters(PromptedProblem(problem, data) for problem in shown)
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
            if is_held_out(self._data, problem):
                fault = "they are held out for validation"
                continue
            try:
                encoded = self._encoder.encode(PromptedProblem(problem, self._data, task))
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
        parameters = task_at_level(self._data.task_params, task, level)
        problem = sources.reasoning_gym_problem(str(self._data.task), parameters, number)
        name = f"{task}-level{level}-{number}"
        return msgspec.structs.replace(problem, problem_id=name, metadata={**problem.metadata, LEVEL: level})
