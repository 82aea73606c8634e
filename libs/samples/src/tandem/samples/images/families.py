"""The tokens of an image by arithmetic on its size: no pixels, no torch.

The results equal those of the processors of Transformers, which import torch; the coordinator does without it. Tests
compare them over thousands of sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.common.errors import DataError, ModelError
from tandem.common.files import irregular
from tandem.config.models.vision_families import VisionFamily, find_vision_family
from tandem.samples.tokenizer import Tokenizer

Grid = tuple[int, ...]
"""Numbers of `tandem.common.messages.ImageRef.grid`."""
Int64s = npt.NDArray[np.int64]

_MAX_CROPS_SIDE = 4096
"""Longest side to which SmolVLM and Idefics3 resize an image, whatever their settings say."""
_MAX_ASPECT = 200
"""Largest ratio of an image's sides for Qwen."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The template of a new model of texts, with images where the message has them."""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A model's settings for images, from its files. The numbers of other families keep their defaults."""

    family: VisionFamily
    image_token_id: int
    """Id of the family's `VisionFamily.image_token`."""
    tokens_per_image: int = 0
    """Features of an image, or of each crop; zero for Qwen, where they depend on the size."""
    patch_size: int = 14
    """Qwen: side of a patch, in pixels."""
    merge_size: int = 2
    """Qwen: patches a side that become one feature."""
    min_pixels: int = 56 * 56
    """Qwen: least pixels after resizing."""
    max_pixels: int = 28 * 28 * 1280
    """Qwen: most pixels after resizing."""
    is_resized: bool = True
    """Whether an image is resized to fit."""
    longest_edge: int = 4 * 364
    """SmolVLM and Idefics3: longest side after resizing."""
    crop_size: int = 364
    """SmolVLM and Idefics3: side of a crop."""
    is_split: bool = True
    """SmolVLM and Idefics3: whether a large image is divided into crops."""


def read_settings(folder: Path, name: str = "") -> ImageSettings:
    """Read what the files of a model's folder say about images; `name` is the model's, for errors.

    Raises `ModelError` if it is no family with images, or if a file is missing or wrong.
    """
    name = name or str(folder)
    config = _object(folder / "config.json", name)
    family = find_vision_family(config)
    if family is None:
        raise ModelError(f"{name}: {config.get('model_type', 'a model without model_type')} takes no images here")
    objects = [_object(folder / file, name) for file in PROCESSOR_FILES if (folder / file).exists()]
    # A processor_config.json of late has the image processor's settings in it; else they have a file of their own.
    nested = [each["image_processor"] for each in objects if isinstance(each.get("image_processor"), dict)]
    separate = [each for each in objects[-1:] if (folder / PROCESSOR_FILES[1]).exists()]
    if not nested and not separate:
        raise ModelError(
            f"{name} has no preprocessor_config.json (or processor_config.json), which says how images become tokens"
        )
    settings = [*nested, *separate][0]
    try:
        return _settings(family, config, settings)
    except (TypeError, KeyError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{name}: what its files say about images cannot be used: {error!r}") from error


def _settings(family: VisionFamily, config: Mapping[str, Any], settings: Mapping[str, Any]) -> ImageSettings:
    token_id = config.get("image_token_id", config.get("image_token_index"))
    if token_id is None:
        raise KeyError("image_token_id")
    size = settings.get("size") or {}
    is_resized = settings.get("do_resize") is not False
    common: dict[str, Any] = {"family": family, "image_token_id": int(token_id), "is_resized": is_resized}
    vision = config.get("vision_config") or {}
    if family.is_qwen:
        image_settings = ImageSettings(
            **common,
            patch_size=int(settings.get("patch_size", 14)),
            merge_size=int(settings.get("merge_size", 2)),
            min_pixels=int(settings.get("min_pixels") or size.get("shortest_edge", 56 * 56)),
            max_pixels=int(settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)),
        )
        tower = (int(vision.get("patch_size", image_settings.patch_size)), int(vision.get("spatial_merge_size", 2)))
        if tower != (image_settings.patch_size, image_settings.merge_size):
            sizes = (image_settings.patch_size, image_settings.merge_size)
            raise ValueError(
                f"patch_size and merge_size are {sizes[0]} and {sizes[1]}, and {tower[0]} and {tower[1]} in config.json"
            )
        return image_settings
    if not family.has_crops:
        if settings.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is not built")
        return ImageSettings(**common, tokens_per_image=int(config.get("mm_tokens_per_image", 256)))
    image_size, patch_size = int(vision.get("image_size", 224)), int(vision.get("patch_size", 32))
    longest = size.get("longest_edge", None if size else 4 * 364)
    if longest is None:
        raise KeyError("size.longest_edge")
    crop = int((settings.get("max_image_size") or {}).get("longest_edge", 364))
    if crop != image_size:
        raise ValueError(f"max_image_size is {crop}, the tower's image_size is {image_size}")
    return ImageSettings(
        **common,
        tokens_per_image=(image_size // patch_size) ** 2 // int(config.get("scale_factor", 2)) ** 2,
        longest_edge=int(longest),
        crop_size=crop,
        is_split=settings.get("do_image_splitting") is not False,
    )


def _object(path: Path, name: str) -> dict[str, Any]:
    if (kind := irregular(path)) is not None:
        raise ModelError(f"{name}: {str(path)!r} is {kind}, not a file")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{name} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot read {path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {path.name} holds no object")
    return content


def grid_of(settings: ImageSettings, width: int, height: int) -> Grid:
    """Return how an image of this size is divided: see `tandem.common.messages.ImageRef.grid`.

    Raises `DataError` for a size that the family cannot take.
    """
    if settings.family.is_qwen:
        return _patches(settings, width, height)
    if settings.family.has_crops:
        return _crops(settings, width, height)
    return ()


def _patches(settings: ImageSettings, width: int, height: int) -> Grid:
    factor = settings.patch_size * settings.merge_size
    if not settings.is_resized:
        if width % factor or height % factor:
            raise DataError(f"{width} × {height} pixels are no multiple of {factor}, and do_resize is false")
        return (1, height // settings.patch_size, width // settings.patch_size)
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise DataError(f"{width} × {height} pixels are too narrow: one side is over {_MAX_ASPECT} times the other")
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    if not rows or not columns:
        raise DataError(f"{width} × {height} pixels are too few: a side becomes zero")
    return (1, rows * settings.merge_size, columns * settings.merge_size)


def _crops(settings: ImageSettings, width: int, height: int) -> Grid:
    if not settings.is_split:
        return (0, 0)
    if settings.is_resized:
        width, height = _scale_to_longest(width, height, settings.longest_edge)
        width, height = _shrink_to_longest(width, height, _MAX_CROPS_SIDE)
    crop, ratio = settings.crop_size, width / height
    if width >= height:
        width = math.ceil(width / crop) * crop
        height = math.ceil(int(width / ratio) / crop) * crop
    else:
        height = math.ceil(height / crop) * crop
        width = math.ceil(int(height * ratio) / crop) * crop
    if not width or not height:
        raise DataError("its sides differ too much: one becomes zero")
    return (height // crop, width // crop) if max(width, height) > crop else (0, 0)


def _scale_to_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size with this longest side; the other one is even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _shrink_to_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > longest:
        width, height = longest, int(longest / ratio)
    elif height > width and height > longest:
        width, height = int(longest * ratio), longest
    return max(width, 1), max(height, 1)


def grid_size(family: VisionFamily) -> int:
    """Return how many numbers a grid has."""
    return 3 if family.is_qwen else 2 if family.has_crops else 0


def num_tokens(settings: ImageSettings, grid: Grid) -> int:
    """Return the number of features of an image, which is that of image tokens in its expansion."""
    if settings.family.is_qwen:
        frames, rows, columns = grid
        return frames * rows * columns // settings.merge_size**2
    if settings.family.has_crops:
        rows, columns = grid
        return (rows * columns + 1) * settings.tokens_per_image
    return settings.tokens_per_image


def expansion(settings: ImageSettings, grid: Grid) -> str:
    """Return the text that replaces the placeholder of an image."""
    family = settings.family
    if family.is_qwen:
        return family.image_token * num_tokens(settings, grid)
    features = family.image_token * settings.tokens_per_image
    if not family.has_crops:
        return f"\n\n{family.begin_token}{features}{family.end_token}\n\n"
    rows, columns = grid
    global_image = f"{family.begin_token}<global-img>{features}{family.end_token}"
    if not rows and not columns:
        return global_image
    lines = (
        "".join(f"{family.begin_token}<row_{row + 1}_col_{column + 1}>{features}" for column in range(columns))
        for row in range(rows)
    )
    return "".join(f"{line}\n" for line in lines) + f"\n{global_image}"


def expand(settings: ImageSettings, text: str, grids: Sequence[Grid]) -> str:
    """Return a text with the placeholder of each image, in order, replaced by its expansion.

    Raises `DataError` if there are more or fewer placeholders than images.
    """
    first, *parts = text.split(settings.family.placeholder)
    if len(parts) != len(grids):
        raise DataError(
            f"the conversation as text has {len(parts)} × {settings.family.placeholder} for {len(grids)} images"
        )
    return first + "".join(expansion(settings, grid) + part for grid, part in zip(grids, parts, strict=True))


def positions(settings: ImageSettings, token_ids_T: Sequence[int], grids: Sequence[Grid]) -> tuple[Int64s, int]:
    """Return the positions of tokens, a row or three (time, height, width), and the delta of those to come.

    A token generated at index `i` has position `i + delta` in every row. Raises `DataError` if the image tokens are
    not those of the images, in order.
    """
    ids_T = np.asarray(token_ids_T, np.int64)
    is_image_T = ids_T == settings.image_token_id
    expected = sum(num_tokens(settings, grid) for grid in grids)
    if (num_image_tokens := int(is_image_T.sum())) != expected:
        raise DataError(f"the sequence has {num_image_tokens} image tokens, its {len(grids)} images need {expected}")
    length = len(ids_T)
    if not settings.family.has_mrope:
        return np.arange(length, dtype=np.int64)[None], 0
    out_XT = np.empty((3, length), np.int64)
    starts = np.flatnonzero(is_image_T)
    at = position = used = 0
    for grid in grids:
        size = num_tokens(settings, grid)
        start = int(starts[used])
        if int(starts[used + size - 1]) != start + size - 1:
            raise DataError(f"the {size} tokens of an image are not side by side from token {start} on")
        position = _count_up(out_XT, at, start, position)
        sides = (grid[0], grid[1] // settings.merge_size, grid[2] // settings.merge_size)
        out_XT[:, start : start + size] = position + np.indices(sides).reshape(3, -1)
        position += max(sides[1:])
        at, used = start + size, used + size
    position = _count_up(out_XT, at, length, position)
    return out_XT, position - length


def _count_up(out_XT: Int64s, start: int, stop: int, position: int) -> int:
    """Write the positions of a stretch of text, and return the position after it."""
    out_XT[:, start:stop] = np.arange(position, position + stop - start)
    return position + stop - start


def undrawable_ids(tokenizer: Tokenizer, family: VisionFamily) -> tuple[int, ...]:
    """Return the ids of tokens that stand for pictures, in ascending order; a policy must never draw them.

    A drawn one would stand for an image that is not there. Raises `ModelError` if the tokenizer lacks the image token.
    """
    id_of_text = {text: _token_id(tokenizer, text) for text in dict.fromkeys((*family.tokens, family.image_token))}
    needed = (family.placeholder, family.image_token, family.begin_token, family.end_token)
    missing = [text for text in needed if id_of_text.get(text) is None]
    if missing:
        raise ModelError(
            f"the tokenizer in {tokenizer.where} has no token {missing[0]}, which {family.model_type} needs"
        )
    return tuple(sorted(token_id for token_id in id_of_text.values() if token_id is not None))


def _token_id(tokenizer: Tokenizer, text: str) -> int | None:
    hugging_face = tokenizer.hugging_face
    token_id = hugging_face.convert_tokens_to_ids(text)  # that of the unknown token, where there is one
    return int(token_id) if token_id is not None and hugging_face.convert_ids_to_tokens(token_id) == text else None


def _require_token_id(tokenizer: Tokenizer, text: str) -> int:
    token_id = _token_id(tokenizer, text)
    assert token_id is not None, "see check_tokenizer"
    return token_id


def check_tokenizer(tokenizer: Tokenizer, settings: ImageSettings) -> None:
    """Raise `ModelError` unless the tokenizer has the special tokens that images need, with the model's id."""
    undrawable_ids(tokenizer, settings.family)
    text = settings.family.image_token
    token_id = _token_id(tokenizer, text)
    if token_id != settings.image_token_id:
        raise ModelError(
            f"{text} is token {token_id} in {tokenizer.where} and {settings.image_token_id} in config.json"
        )


def collapse(token_ids: Iterable[int], tokenizer: Tokenizer, settings: ImageSettings) -> list[int]:
    """Return tokens with each image's expansion collapsed to its placeholder, as vLLM takes them and expands itself.

    Raises `DataError` if the tokens are no whole expansions.
    """
    family, ids = settings.family, list(token_ids)
    out: list[int] = []
    at = 0
    begin, placeholder = (_require_token_id(tokenizer, text) for text in (family.begin_token, family.placeholder))
    while at < len(ids):
        if ids[at] != begin:
            out.append(ids[at])
            at += 1
            continue
        at = _end_of_image(ids, at, tokenizer, settings)
        if family.has_image_blocks:
            out = _strip_newlines(out, tokenizer, at_end=True)
            ids[at:] = _strip_newlines(ids[at:], tokenizer, at_end=False)
        out.append(placeholder)
    return out


def _end_of_image(ids: Sequence[int], at: int, tokenizer: Tokenizer, settings: ImageSettings) -> int:
    """Return the index after the expansion of an image that begins at `at`."""
    family = settings.family
    if family.is_qwen:
        while at < len(ids) and ids[at] == settings.image_token_id:
            at += 1
        return at
    last = at
    if family.has_crops:
        mark = _require_token_id(tokenizer, "<global-img>")
        try:
            last = next(index for index in range(at, len(ids)) if ids[index] == mark)
        except StopIteration:
            raise DataError(f"the image at token {at} has no view of the whole") from None
    end = last + settings.tokens_per_image + 1
    if end >= len(ids) or ids[end] != _token_id(tokenizer, family.end_token):
        raise DataError(f"the image at token {at} is not followed by {family.end_token}")
    return end + 1


def _strip_newlines(ids: list[int], tokenizer: Tokenizer, *, at_end: bool) -> list[int]:
    """Return tokens without the two line breaks that an expansion of Gemma 3 has on this side."""
    end_ids: list[int] = []
    other_ids = list(ids)
    text = ""
    while other_ids and len(text) < 2:
        end_ids.append(other_ids.pop(-1 if at_end else 0))
        text = tokenizer.decode(end_ids[::-1] if at_end else end_ids, skip_special_tokens=False)
    if not (text.endswith("\n\n") if at_end else text.startswith("\n\n")):
        raise DataError("an image stands without the two line breaks around it")
    text_ids = tokenizer.encode(text[:-2] if at_end else text[2:]) if len(text) > 2 else []
    return [*other_ids, *text_ids] if at_end else [*text_ids, *other_ids]


def chat_template(family: VisionFamily) -> str:
    """Return the chat template of a family's new model."""
    return _TEMPLATE.replace("IMAGE", family.part)


def config_of(family: VisionFamily, settings: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration of a new model with the numbers of its tokens."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**(settings.get("text_config") or {}), "vocab_size": len(vocabulary), **ids}
    numbers = {field: vocabulary[token] for field, token in family.token_fields.items()}
    return {**settings, "text_config": text, **numbers}


def write_image_processor(folder: Path, family: VisionFamily, settings: Mapping[str, Any] | None) -> None:
    """Write the image processor's file."""
    content = {"image_processor_type": family.image_processor, **(settings or {})}
    (folder / PROCESSOR_FILES[1]).write_text(json.dumps(content, indent=2) + "\n")
