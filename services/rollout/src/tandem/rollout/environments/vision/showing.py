"""Replies of an environment that show images: bytes go to the run's folder, markers into the text."""

from __future__ import annotations

import inspect
import io
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tandem.common.errors import DataError, RewardError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.rollout.environments.environment import ConversingEnvironment, Score, Step, Turn
from tandem.samples.chat_templates import Messages
from tandem.samples.images.markers import mark_images, marker
from tandem.samples.images.reading import ImageLimits, described
from tandem.samples.images.rows import image_folder

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
