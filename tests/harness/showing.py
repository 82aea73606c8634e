"""An environment that shows images. It imports no torch: the process of an environment imports its module."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.common.messages import Problem
from tandem.rollout.environments import Score, Turn


class Shows:
    """An environment that answers the first response with the image that the problem names, if it names one."""

    def step(self, problem: Problem, conversation: list[Mapping[str, str]]) -> Score | Turn:
        """Show the image once."""
        shown = str(problem.metadata["shows"])
        if shown and len(conversation) == 1:
            return Turn([{"role": "user", "content": f"{shown} and here?"}])
        return Score(1.0, correct=True)
