"""An environment of several reward functions, for responses with tags, as NeMo-RL has for images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from tandem.common.messages import Problem
from tandem.config.schema.image_rewards import ARGUMENTS, RewardArguments, RewardFunctionConfig
from tandem.rollout.environments.answers import reference
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.vision.rewards import FUNCTIONS, tagged


class ImageRewards:
    """A reward that is the mean, by weight, of functions of response and reference (``env.NAME.reward_functions``).

    A response is correct if each function that judges correctness says so; ``format`` does not.
    """

    reads = "text"

    def __init__(self, functions: Sequence[RewardFunctionConfig]) -> None:
        total = sum(each.weight for each in functions)
        self._functions = [(each.name, each.weight / total, _bound(each)) for each in functions]
        answer_function = next((each for each in functions if each.name != "format"), functions[0])
        kwargs = answer_function.kwargs or RewardArguments()
        self._tag = kwargs.tag if answer_function.name == "math_expr" else kwargs.answer_tag

    def score(self, problem: Problem, response: str) -> Score:
        """Call each function; the components are their values before weighting."""
        answer = reference(problem)
        values, verdicts = dict[str, float](), list[bool]()
        reward = 0.0
        for name, weight, function in self._functions:
            values[name], verdict = function(answer, response)
            reward += weight * values[name]
            verdicts += [verdict] if verdict is not None else []
        tagged_text = tagged(response, self._tag)
        return Score(
            reward=reward,
            correct=bool(verdicts) and all(verdicts),
            components=values,
            answer=None if tagged_text is None else tagged_text.strip() or None,
        )


def _bound(settings: RewardFunctionConfig) -> partial[tuple[float, bool | None]]:
    """Return a function with its arguments."""
    arguments = msgspec.structs.asdict(settings.kwargs) if settings.kwargs is not None else {}
    return partial(
        FUNCTIONS[settings.name], **{name: arguments[name] for name in ARGUMENTS[settings.name] if name in arguments}
    )
