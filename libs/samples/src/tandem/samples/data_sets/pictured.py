"""NeMo-RL's data sets with images: their rows as question, image and answer, as NeMo-RL asks them.

Each function takes a row's place and the row, and returns one that `tandem.samples.images.rows` reads.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.common.errors import DataError
from tandem.common.files import irregular
from tandem.config.schema import DataConfig

Row = Mapping[str, Any]
Convert = Callable[[str, Row], Row]

_ANSWER = re.compile(r"<answer>(.*?)</answer>")
_COCO = "./coco_images"
_SIDE = 256
"""Width and height to which NeMo-RL scales the images of RefCOCO."""
_WHOLE = 1000
"""Width and height of an image in the coordinates of its answers."""


def converter(data: DataConfig) -> Convert | None:
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
