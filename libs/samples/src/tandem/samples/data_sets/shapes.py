"""Pictures of coloured shapes and questions about them, drawn from a seed, for models that see."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.config.schema import DataConfig
from tandem.samples.images.rows import ImageRows

COLOURS = ("red", "green", "blue", "black")
_CELLS = 4
"""Cells across a picture, and down; each has one shape at most."""


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``data.task_params`` for shapes."""

    size: Annotated[int, msgspec.Meta(ge=16, le=1024)] = 32
    max_shapes: Annotated[int, msgspec.Meta(ge=1, le=9)] = 4
    blank: bool = False
    """Whether pictures show a few grey dots instead: a control, whose questions can only be guessed."""


def shapes(data: DataConfig, seed: int, images: ImageRows) -> Iterator[Problem]:
    """Yield questions about pictures without end; `images` keeps the pictures.

    A picture has up to ``max_shapes`` shapes of one colour. The question is how many there are, or of which colour.
    Raise `ConfigError` for a parameter that is unknown or out of bounds.
    """
    try:
        parameters = msgspec.convert(data.task_params, _Parameters)
    except msgspec.ValidationError as error:
        valid = ", ".join(_Parameters.__struct_fields__)
        raise ConfigError(f"data.task_params: {error} (parameters of shapes are {valid})") from error
    generator = random.Random(seed)
    for index in itertools.count():
        num, colour = generator.randint(1, parameters.max_shapes), generator.choice(COLOURS)
        picture = _draw(generator, parameters, num, colour)
        question, answer = generator.choice((("how many?", str(num)), ("which colour?", colour)))
        name = f"shapes-{seed}-{index}"
        yield Problem(
            problem_id=name,
            question=images.mark_image(name, picture) + question,
            answer=answer,
            metadata={"number": num, "colour": colour},
        )


def _draw(generator: random.Random, parameters: _Parameters, num: int, colour: str) -> bytes:
    """Return a picture as PNG."""
    from PIL import Image, ImageDraw

    size = parameters.size
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    cell = size // _CELLS
    for place in generator.sample(range(_CELLS * _CELLS), num):
        x, y = cell * (place % _CELLS), cell * (place // _CELLS)
        shape = draw.rectangle if generator.random() < 0.5 else draw.ellipse
        if parameters.blank:
            draw.point([(generator.randrange(size), generator.randrange(size)) for _ in range(4)], fill="lightgrey")
        else:
            shape([x + cell // 8, y + cell // 8, x + cell - cell // 8 - 1, y + cell - cell // 8 - 1], fill=colour)
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return encoded.getvalue()
