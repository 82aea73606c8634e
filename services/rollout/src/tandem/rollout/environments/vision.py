"""Environments with images: responses scored by functions as NeMo-RL has them, and replies that show.

The functions are NeMo-RL's, by its names and with its values. Each takes the reference and the response, and returns a
value and whether the response is correct, or None if it does not judge that. The answer is what stands between the
first opening and the last closing tag.
"""

from __future__ import annotations

import inspect
import io
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from tandem.common.errors import DataError, RewardError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.config.schema.environments import ARGUMENTS, RewardArguments, RewardFunctionConfig
from tandem.rollout.environments.answers import reference
from tandem.rollout.environments.environment import ConversingEnvironment, Score, Step, Turn
from tandem.samples.chat_templates import Messages
from tandem.samples.images.reading import ImageLimits, described
from tandem.samples.images.rows import image_folder
from tandem.samples.markers import mark_images, marker

Judged = tuple[float, bool | None]
_Box = tuple[float, float, float, float]
_Choose = Callable[[tuple[float, float]], float]

_LEAST_AREA = 1e-3
"""Areas are at least this, so that no box is divided by nothing."""
_CORRECT_FROM = 0.5
_BOX = "\\boxed{"
_WHERE = "a Turn"


class Showing:
    """An environment whose replies may have lists of parts for contents, as in OpenAI's API, images among them.

    An image is encoded bytes, an image of Pillow, a path, or a data URI.
    """

    step: Step

    def __init__(self, environment: ConversingEnvironment, config: Config) -> None:
        """Stand in for an environment of a run."""
        self._images = image_folder(config)
        self._limits = ImageLimits(max_pixels=config.data.max_image_pixels)
        step: Callable[[Problem, Messages], Any] = environment.step
        self.step = self._later(step) if inspect.iscoroutinefunction(step) else self._show_directly(step)

    def _show_directly(self, step: Callable[[Problem, Messages], Score | Turn]) -> Step:
        return lambda problem, conversation: self._marked(step(problem, conversation))

    def _later(self, step: Callable[[Problem, Messages], Awaitable[Score | Turn]]) -> Step:
        async def awaited(problem: Problem, conversation: Messages) -> Score | Turn:
            return self._marked(await step(problem, conversation))

        return awaited

    def _marked(self, result: Score | Turn) -> Score | Turn:
        """Return a reply with texts for contents. Raises `RewardError` for an image that cannot be read."""
        if not isinstance(result, Turn) or not _has_parts(result.messages):
            return result
        try:
            return Turn(mark_images(result.messages, self._keep), result.reward)
        except DataError as error:
            text = str(error)
            raise RewardError(text if text.startswith(_WHERE) else f"{_WHERE}: {text}") from error

    def _keep(self, image: object) -> str:
        """Keep an image in the run's folder; return its marker."""
        if type(image).__module__.partition(".")[0] == "PIL":
            written = io.BytesIO()
            image.save(written, "PNG")  # type: ignore[attr-defined]
            image = written.getvalue()
        marked, source = described(image, _WHERE, self._limits)
        self._images.put(marked.digest, source)
        return marker(*marked)


def _has_parts(messages: object) -> bool:
    """Tell whether some content of messages is not a text; what are no messages is refused elsewhere."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        return False
    return any(not isinstance(each.get("content", ""), str) for each in messages)


def tagged(response: str, tag: str) -> str | None:
    """Return what is between a tag's first opening and last closing; None without both."""
    match = re.search(rf"<{tag}>(.*)</{tag}>", response, re.DOTALL)
    return None if match is None else match[1]


def has_format(reference: str, response: str, *, think_tag: str = "think", answer_tag: str = "answer") -> Judged:
    """Return 0.25 for a reasoning in tags, and 0.75 for an answer in tags."""
    thinks, answers = (tagged(response, tag) is not None for tag in (think_tag, answer_tag))
    return 0.25 * thinks + 0.75 * answers, None


def exact_alnum(reference: str, response: str, *, answer_tag: str = "answer") -> Judged:
    """Return 1 if the answer has the letters and digits of the reference, whatever their case."""
    answer = tagged(response, answer_tag)
    correct = answer is not None and _alphanumeric(answer) == _alphanumeric(reference)
    return float(correct), correct


def math_expr(reference: str, response: str, *, tag: str = "answer") -> Judged:
    """Return 1 if the answer equals the reference as an expression, by math-verify.

    The library's own time limits use signals; the process in which this runs is killed instead.
    """
    from tandem.rollout.environments.math import is_equal, parse_reference, parse_response

    answer = tagged(response, tag)
    if answer is None:
        return 0.0, False
    boxed = answer if answer.startswith(_BOX) else f"{_BOX}{answer}}}"
    correct = is_equal(parse_reference(_unboxed(reference)), parse_response(boxed))
    return float(correct), correct


def bbox_giou(reference: str, response: str, *, giou_penalty_thres: float = 10.0, answer_tag: str = "answer") -> Judged:
    """Return the intersection over union of two boxes ``[x1, y1, x2, y2]``.

    Where it is below `giou_penalty_thres`, return the generalised one (GIoU, Rezatofighi et al. 2019,
    arXiv:1902.09630), which also tells how far apart the boxes are: from -1 to 1.
    """
    answer = tagged(response, answer_tag)
    expected, actual = _box(reference), None if answer is None else _box(answer)
    if expected is None or actual is None:
        return 0.0, False
    common = _area(_between(max, min, expected, actual))
    union = max(_LEAST_AREA, _area(expected) + _area(actual) - common)
    overlap = common / union
    if overlap < giou_penalty_thres:
        hull = max(_LEAST_AREA, _area(_between(min, max, expected, actual)))
        overlap -= (hull - union) / hull
    return overlap, overlap > _CORRECT_FROM


FUNCTIONS: MappingProxyType[str, Callable[..., Judged]] = MappingProxyType(
    {"format": has_format, "exact_alnum": exact_alnum, "math_expr": math_expr, "bbox_giou": bbox_giou}
)
"""Functions by NeMo-RL's names."""


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


def _between(first: _Choose, last: _Choose, box_a: _Box, box_b: _Box) -> _Box:
    """Return the box with the chosen ones of two boxes' first corners, and of their last ones."""
    x1, y1, x2, y2 = zip(box_a, box_b, strict=True)
    return first(x1), first(y1), last(x2), last(y2)


def _area(box: _Box) -> float:
    x1, y1, x2, y2 = box
    return max(0.0, x2 - x1) * max(0.0, y2 - y1)


def _box(text: str) -> _Box | None:
    """Return four numbers with commas between them, in brackets or not; None for anything else.

    A box whose right is left of its left, or whose bottom is above its top, is none: its area would count as positive
    outside of any hull, and be worth any reward.
    """
    try:
        numbers = [float(number) for number in re.sub(r"[\[\]]", "", text).split(",")]
    except ValueError:
        return None
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        return None
    x1, y1, x2, y2 = numbers
    return (x1, y1, x2, y2) if x1 <= x2 and y1 <= y2 else None


def _alphanumeric(text: str) -> str:
    return "".join(character for character in text if character.isalnum()).lower()


def _unboxed(text: str) -> str:
    """Return the content of a box that a text begins with and ends with, or else the text."""
    return text[len(_BOX) : -1] if text.startswith(_BOX) and text.endswith("}") else text
