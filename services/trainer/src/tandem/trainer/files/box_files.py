"""Slices (boxes) of tensors in safetensors files: ranks write what they hold, and read what they need.

A file has the boxes that one process wrote, each under the name of its tensor and the index of its first element, as
``name@0,128``. The file's header has the shapes of the whole tensors. Readers look up the headers of all files, and
read only the overlap of each box with what they want. Nothing is pickled or gathered.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tandem.common.errors import CheckpointError
from tandem.refit.layout import Box
from tandem.samples import manifest

_FILES = "boxes-*.safetensors"
_SHAPES = "shapes"


class BoxPart(NamedTuple):
    """A box of a tensor, and its elements in the box's shape."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    elements: torch.Tensor


def snapshot(parts: Iterable[BoxPart]) -> Iterator[BoxPart]:
    """Yield the parts with copied elements, on the CPU, so that they can be written while training goes on."""
    for part in parts:
        yield part._replace(elements=part.elements.detach().to("cpu", copy=True).contiguous())


def write(folder: Path, writer: int, parts: Iterable[BoxPart], max_file_bytes: int) -> dict[Path, dict[str, str]]:
    """Write the parts to files of about this size, which only process `writer` writes.

    Return the files, not yet synced, with the digests of their contents.

    The parts come from a `snapshot`. If it is still being taken, memory holds the parts of one file. Raises the file
    system's errors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digests: dict[Path, dict[str, str]] = {}
    for batch in _batches(parts, max_file_bytes):
        path = folder / f"boxes-{writer:05d}-{len(digests):05d}.safetensors"
        tensors = {f"{part.name}@{','.join(map(str, part.box.start))}": part.elements for part in batch}
        shapes = json.dumps({part.name: part.shape for part in batch})
        digests[path] = digests_of(tensors)
        save_file(tensors, path, metadata={"format": "pt", _SHAPES: shapes})
    return digests


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each contiguous tensor in CPU memory, as in a manifest."""
    flat = {name: tensor.detach().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: manifest.digest_of(tensor.numpy().data) for name, tensor in flat.items()}


def boxes_of_range(shape: Sequence[int], strides: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of an array with its elements at offsets from `first` up to `stop`.

    Args:
        shape: shape of the array. Its first element has offset 0.
        strides: strides of the array, which has no element twice. A later dimension may have a larger stride.
        first: first offset, which may lie before the array.
        stop: end offset, which may lie behind it.
    """
    # With one element, the stride has no meaning.
    steps = [stride if n > 1 else sys.maxsize for n, stride in zip(shape, strides, strict=True)]
    order = sorted(range(len(shape)), key=lambda dim: -steps[dim])
    back = sorted(range(len(shape)), key=order.__getitem__)
    dims = [(shape[dim], steps[dim]) for dim in order]
    for box in _boxes_in_order([n for n, _ in dims], _num_below(first, dims), _num_below(stop, dims)):
        yield Box(*(tuple(values[place] for place in back) for values in (box.start, box.shape)))


def _num_below(limit: int, dims: Sequence[tuple[int, int]]) -> int:
    """Return the number of elements of an array at an offset below `limit`.

    `dims` has the size and the stride of each dimension, the largest stride first. They do not overlap.
    """
    if limit <= 0 or not dims:
        return int(limit > 0)
    (num, stride), *inner = dims
    index = (limit - 1) // stride
    num_inner = math.prod(n for n, _ in inner)
    return num * num_inner if index >= num else index * num_inner + _num_below(limit - index * stride, inner)


def _boxes_in_order(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together form a range of the elements of a row-major array."""
    if first >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row, *inner = math.prod(shape[1:]), *shape[1:]
    whole_from, whole_to = -(-first // row), stop // row
    if whole_from > whole_to:  # within one row
        ends = [(whole_to, first - whole_to * row, stop - whole_to * row)]
    else:
        ends = [(whole_from - 1, row - (whole_from * row - first), row), (whole_to, 0, stop - whole_to * row)]
        if whole_from < whole_to:
            yield Box((whole_from, *(0 for _ in inner)), (whole_to - whole_from, *inner))
    for index, a, b in ends:
        for box in _boxes_in_order(inner, a, b):
            yield Box((index, *box.start), (1, *box.shape))


class BoxFiles:
    """The files of a folder, for reading; none where an optimizer keeps no state."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the whole tensors that have boxes here."""
        self._boxes: dict[str, list[tuple[Box, Any, str]]] = {}
        for path in sorted(folder.glob(_FILES)):
            file: Any = safe_open(path, framework="pt")
            shapes = json.loads(file.metadata()[_SHAPES])
            self.shapes |= {name: tuple(shape) for name, shape in shapes.items()}
            for key in file.keys():  # noqa: SIM118
                name, _, start = key.rpartition("@")
                shape = tuple(file.get_slice(key).get_shape())
                box = Box(tuple(map(int, start.split(","))) if shape else (), shape)
                self._boxes.setdefault(name, []).append((box, file, key))

    def require_any(self) -> None:
        """Raise `CheckpointError` if there are no files."""
        if not self._boxes:
            raise CheckpointError("it has no boxes-*.safetensors: it is not whole")

    def read(self, name: str, shape: tuple[int, ...], box: Box, into: torch.Tensor) -> None:
        """Fill `into` with the elements of a box of a tensor. Both have the same shape. Raises `CheckpointError`."""
        self.require_any()
        if name not in self._boxes:
            raise CheckpointError(f"{name} is in none of its files: one is missing, or another optimizer wrote them")
        if self.shapes[name] != shape:
            raise CheckpointError(f"{name} has shape {self.shapes[name]}, the model's has {shape}")
        num_read = 0
        for file_box, file, key in self._boxes[name]:
            common = file_box.intersect(box)
            if common is not None:
                elements = file.get_slice(key)[_region(common, file_box)]
                if elements.is_floating_point() != into.is_floating_point():
                    raise CheckpointError(f"{name} is {elements.dtype} and should be {into.dtype}: another optimizer's")
                into[_region(common, box)] = elements.to(into.device)
                num_read += common.num_elements
        if num_read < box.num_elements:
            raise CheckpointError(
                f"a file is missing: {num_read} of {box.num_elements} elements of {name}{box} are there"
            )


def _region(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the position of one box in an array that is the other."""
    steps = zip(inner.start, inner.shape, outer.start, strict=True)
    return tuple(slice(start - first, start - first + n) for start, n, first in steps)


def _batches(parts: Iterable[BoxPart], max_bytes: int) -> Iterator[list[BoxPart]]:
    batch: list[BoxPart] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + part.elements.nbytes > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.elements.nbytes
    if batch:
        yield batch
