"""Rows with images, among them those of NeMo-RL's data sets, and pictures of coloured shapes.

A function for a data set of NeMo-RL's takes a row's place and the row, and returns one that
`tandem.samples.images.rows` reads: question, image and answer, as NeMo-RL asks them.
"""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from tandem.common.errors import ConfigError, DataError
from tandem.common.files import irregular
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.config.named import is_local
from tandem.config.schema import DataConfig
from tandem.samples.data_sets import sources
from tandem.samples.images.rows import ImageRows, image_folder

Row = Mapping[str, Any]
Convert = Callable[[str, Row], Row]

_COLOURS = ("red", "green", "blue", "black")
_CELLS = 4
"""Cells across a picture, and down; each has one shape at most."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>")
_COCO = "./coco_images"
_SIDE = 256
"""Width and height to which NeMo-RL scales the images of RefCOCO."""
_WHOLE = 1000
"""Width and height of an image in the coordinates of its answers."""


class PicturedRows(sources.RowReader):
    """The reader of the rows of data sets for a vision model."""

    is_text_only = False

    def __init__(self, config: Config) -> None:
        self.images = ImageRows(config)
        """The images of the rows read so far."""
        self._config = config

    def read(
        self,
        data: DataConfig,
        *,
        text_key: str | None = None,
        only_held_out: bool = False,
        keeps_digits: bool = False,
    ) -> tuple[sources.Rows, dict[str, sources.Rows]]:
        """Read rows as `RowReader` does, with markers for their images."""
        train, apart = sources.read_rows(data, only_held_out=only_held_out, keeps_digits=keeps_digits)
        is_file, convert = is_local(data.dataset_name), _find_converter(data)
        held_out = sources.validation_paths(data) if is_file else {}

        def add_markers(part_rows: sources.Rows, file: str | None) -> sources.Rows:
            """Return rows as texts, with markers for their images; relative paths begin at the folder of their file."""
            folder = None if file is None else Path(file).absolute().parent
            if convert is not None:
                part_rows = [(row_name, convert(row_name, row)) for row_name, row in part_rows]
            return [(row_name, self.images.row(row_name, row, text_key, folder)) for row_name, row in part_rows]

        train_file = data.train_data_path if is_file else None
        return add_markers(train, train_file), {
            name: add_markers(part, held_out.get(name)) for name, part in apart.items()
        }

    def draw_shapes(self, data: DataConfig, seed: int) -> Iterator[Problem]:
        """Yield questions about pictures of coloured shapes without end."""
        return _draw_shapes(data, seed, self.images)

    def keep(self) -> None:
        """Move all images found so far to the run's folder. Raise `RunFolderError` if that fails."""
        self.images.keep(image_folder(self._config).folder)


def _find_converter(data: DataConfig) -> Convert | None:
    """Return how the rows of a data set are read; None if they are read as they are."""
    make_converter = _CONVERTERS.get(data.dataset_name)
    return None if make_converter is None else make_converter(data)


def _clevr(data: DataConfig) -> Convert:
    """Read a row of CLEVR-CoGenT: the answer is in tags within its solution."""

    def convert(row_name: str, row: Row) -> Row:
        solution = str(_field(row_name, row, "solution", data))
        match = _ANSWER.search(solution)
        return {
            data.image_key or "image": _field(row_name, row, "image", data),
            data.input_key: str(_field(row_name, row, "problem", data)),
            data.output_key: (match[1] if match else solution).strip(),
        }

    return convert


def _geometry(data: DataConfig) -> Convert:
    """Read a row of Geometry3K: of its images the first counts, and stands in front."""

    def convert(row_name: str, row: Row) -> Row:
        images = _field(row_name, row, "images", data)
        return {
            data.image_key or "image": images[0]
            if isinstance(images, Sequence) and not isinstance(images, str | bytes)
            else images,
            data.input_key: str(_field(row_name, row, "problem", data)).replace("<image>", ""),
            data.output_key: str(_field(row_name, row, "answer", data)),
        }

    return convert


def _refcoco(data: DataConfig) -> Convert:
    """Read a row of RefCOCO: a phrase, and the box that it describes, in thousandths of width and height.

    The image is scaled to a square. In the validation split the longest phrase is asked, elsewhere one that the row's
    number decides (NeMo-RL draws one).
    """
    folder = Path(data.download_dir or _COCO)
    scaled: dict[str, tuple[bytes, int, int]] = {}

    def convert(row_name: str, row: Row) -> Row:
        name = str(_field(row_name, row, "image_path", data))
        if name not in scaled:
            scaled[name] = _scale_image(row_name, folder / name.removeprefix("coco/"), data)
        image, width, height = scaled[name]
        phrases = _field(row_name, row, "captions", data)
        is_held_out = "val" in str(_field(row_name, row, "split", data))
        phrase = max(phrases, key=len) if is_held_out else random.Random(row_name.rpartition(":")[2]).choice(phrases)
        sizes = (width, height, width, height)
        box = [round(at / size * _WHOLE) for at, size in zip(_field(row_name, row, "bbox", data), sizes, strict=True)]
        return {
            data.image_key or "image": image,
            data.input_key: "Please provide the bounding box coordinate of the region described by the following "
            f"phrase: {phrase}",
            data.output_key: f"[{', '.join(map(str, box))}]",
        }

    return convert


def _scale_image(row_name: str, path: Path, data: DataConfig) -> tuple[bytes, int, int]:
    """Return an image scaled to a square, as PNG, and its own width and height. Raise `DataError`."""
    from tandem.samples.images.reading import ImageLimits, decode

    if (kind := irregular(path)) is not None:
        raise DataError(f"{row_name}: the image {str(path)!r} is {kind}, not a file")
    try:
        encoded = path.read_bytes()
    except OSError as error:
        key = f"data.download_dir ({data.download_dir or _COCO})"
        raise DataError(
            f"{row_name}: cannot read {str(path)!r}: {error.strerror}. {key} is a folder with COCO's train2014; "
            "nothing is downloaded to it"
        ) from error
    image = decode(encoded, row_name, ImageLimits(max_pixels=data.max_image_pixels))
    written = io.BytesIO()
    image.resize((_SIDE, _SIDE)).save(written, "PNG", compress_level=1)  # three times as fast
    return written.getvalue(), image.width, image.height


def _field(row_name: str, row: Row, name: str, data: DataConfig) -> Any:
    if row.get(name) is None:
        raise DataError(f"{row_name} has no {name!r}, which rows of {data.dataset_name} have: {', '.join(row)}")
    return row[name]


_CONVERTERS: MappingProxyType[str, Callable[[DataConfig], Convert]] = MappingProxyType(
    {"clevr-cogent": _clevr, "clevr_cogent": _clevr, "geometry3k": _geometry, "refcoco": _refcoco}
)


class _ShapeParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``data.task_params`` for shapes."""

    size: Annotated[int, msgspec.Meta(ge=16, le=1024)] = 32
    max_shapes: Annotated[int, msgspec.Meta(ge=1, le=9)] = 4
    blank: bool = False
    """Whether pictures show a few grey dots instead: a control, whose questions can only be guessed."""


def _draw_shapes(data: DataConfig, seed: int, images: ImageRows) -> Iterator[Problem]:
    """Yield questions about pictures without end; `images` keeps the pictures.

    A picture has up to ``max_shapes`` shapes of one colour. The question is how many there are, or of which colour.
    Raise `ConfigError` for a parameter that is unknown or out of bounds.
    """
    try:
        parameters = msgspec.convert(data.task_params, _ShapeParameters)
    except msgspec.ValidationError as error:
        valid = ", ".join(_ShapeParameters.__struct_fields__)
        raise ConfigError(f"data.task_params: {error} (parameters of shapes are {valid})") from error
    generator = random.Random(seed)
    for index in itertools.count():
        num, colour = generator.randint(1, parameters.max_shapes), generator.choice(_COLOURS)
        picture = _draw(generator, parameters, num, colour)
        question, answer = generator.choice((("how many?", str(num)), ("which colour?", colour)))
        name = f"shapes-{seed}-{index}"
        yield Problem(
            problem_id=name,
            question=images.mark_image(name, picture) + question,
            answer=answer,
            metadata={"number": num, "colour": colour},
        )


def _draw(generator: random.Random, parameters: _ShapeParameters, num: int, colour: str) -> bytes:
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
