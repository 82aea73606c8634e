"""The tensors of a Hugging Face checkpoint by the headers of its files: names, shapes, element types.

For the architectures known here they come from ``config.json``; for any other, from the headers of the safetensors
files. Names are those of checkpoints, in which every expert has its own tensors. `tandem.refit.adapters.huggingface`
handles how transformers fuses experts in memory.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import ModelError
from tandem.config.models import lora
from tandem.config.models.vision_families import VISION
from tandem.refit.adapters.geometry import (
    BIAS,
    FAMILIES,
    OUTPUT_LAYER,
    SCALAR_HEAD,
    DecoderGeometry,
    geometry_of,
    tensors_of,
)
from tandem.refit.adapters.vision import as_text, language_config, tensors_of_seeing
from tandem.refit.layout import Tensor

_QUANTISED = re.compile(r"_proj(_with_mqa)?\.weight$")
_HALF = 2
"""Smallest element size, in bytes, of a checkpoint's unquantised weights; smaller types are quantised."""
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Longest header in bytes; the format's own limit."""

FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element, for the element types of weights."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class TensorPlace(NamedTuple):
    """Location, shape and element type of a tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """Element type as safetensors spells it, such as ``BF16``."""
    start: int
    num_bytes: int


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those in its index, else all in the folder. Raises `ModelError`."""
    index = folder / _INDEX
    if index.is_file():
        try:
            files = sorted({folder / str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors files: {error}") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no safetensors files")
    return files


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and element type of every tensor in a checkpoint, in the order of its files.

    Raises `ModelError`.
    """
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files_of(folder):
        tensors |= _read_header(file)
    return tensors


def read_places(folder: Path) -> dict[str, TensorPlace]:
    """Return the location of every tensor in a checkpoint, in the order of its files. Raises `ModelError`."""
    places: dict[str, TensorPlace] = {}
    for path in files_of(folder):
        first, header = _read_json(path)
        try:
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                places[name] = TensorPlace(
                    path, tuple(entry["shape"]), str(entry["dtype"]), first + start, stop - start
                )
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} has no readable safetensors header: {error}") from error
    return places


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    _, header = _read_json(path)
    try:
        return {name: (tuple(entry["shape"]), _DTYPES[entry["dtype"]]) for name, entry in header.items()}
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path} has no readable safetensors header: {error}") from error


def _read_json(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the first byte after the header, and the header's entries. Raises `ModelError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return 8 + length, header
    except (OSError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path} has no readable safetensors header: {error}") from error


class ModelShape(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The tensors and sizes of a model. Made by `make_shape` or `read_shape`; equal only to itself."""

    tensors: tuple[Tensor, ...]
    """The tensors of its checkpoint; tied tensors appear once. All layouts share this tuple."""
    geometry: DecoderGeometry | None
    """Sizes of a known architecture; None for others, which Megatron-Core and vLLM cannot lay out."""
    family: str = ""
    """The ``model_type`` of a vision model, if it is known here; empty for any other."""
    language: DecoderGeometry | None = None
    """Sizes of the language model of one that sees; None for any other."""

    @property
    def num_parameters(self) -> int:
        """Number of elements in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position in `tensors`, by name."""
        return {tensor.name: index for index, tensor in enumerate(self.tensors)}

    @property
    def required_geometry(self) -> DecoderGeometry:
        """The geometry. Raises `ModelError` if there is none."""
        if self.geometry is None:
            raise ModelError(f"only the tensors of this model are known; an adapter knows {', '.join(FAMILIES)}")
        return self.geometry

    @cached_property
    def as_text(self) -> ModelShape:
        """This model with its language model's tensors named, and its sizes known, as in a model of text."""
        if not self.family:
            return self
        family = VISION[self.family]
        named = (msgspec.structs.replace(tensor, name=as_text(tensor.name, family)) for tensor in self.tensors)
        return ModelShape(tuple(named), self.language, self.family)

    def shape_of(self, pattern: str) -> tuple[int, ...] | None:
        """Return the shape of the tensors that match a name pattern; None if there are none."""
        positions = self.indices(pattern)
        present = positions[positions >= 0]
        return self.tensors[present[0]].shape if present.size else None

    def indices(self, pattern: str) -> NDArray[np.int64]:
        """Return the positions in `tensors` of those that match a name pattern, -1 for those that the model lacks.

        Args:
            pattern: a name, with ``{layer}`` and ``{expert}`` in place of their numbers.

        Returns:
            Shape (layers, experts), (layers,) or (), depending on the placeholders of the pattern.

        """
        cache: dict[str, NDArray[np.int64]] = self.__dict__.setdefault("indices of pattern", {})
        if pattern not in cache:
            find = self.index.get
            positions: Any = find(pattern, -1)
            if "{layer}" in pattern:
                experts = self.required_geometry.experts
                rows = [pattern.replace("{layer}", str(layer)) for layer in range(self.required_geometry.num_layers)]
            if "{expert}" in pattern:
                numbers = range(experts.num_experts if experts else 0)
                positions = [[find(row.replace("{expert}", str(expert)), -1) for expert in numbers] for row in rows]
            elif "{layer}" in pattern:
                positions = [find(row, -1) for row in rows]
            cache[pattern] = np.asarray(positions, dtype=np.int64)
        return cache[pattern]

    @cached_property
    def formats(self) -> NDArray[np.int64]:
        """A number for each tensor, shape (tensors,): equal for equal element types and blocks of scales."""
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        tensor_formats = [numbers.setdefault((tensor.dtype, tensor.block), len(numbers)) for tensor in self.tensors]
        return np.array(tensor_formats, np.int64)

    @cached_property
    def has_head_norms(self) -> bool:
        """Whether attention has a norm for each head's queries."""
        return any(".self_attn.q_norm." in tensor.name for tensor in self.tensors)

    @cached_property
    def has_scalar_head(self) -> bool:
        """Whether a layer to one number takes the place of the output layer."""
        return f"{SCALAR_HEAD}.weight" in self.index

    @cached_property
    def names_of_scales(self) -> frozenset[str]:
        """Names of the tensors of scales."""
        return frozenset(tensor.scales for tensor in self.tensors if tensor.scales)

    def cast(self, dtype: str) -> ModelShape:
        """Return the model with its weights in another element type; router biases stay in float32."""
        tensors = tuple(
            tensor if tensor.name.endswith(BIAS) else Tensor(tensor.name, tensor.shape, dtype)
            for tensor in self.tensors
        )
        return msgspec.structs.replace(self, tensors=tensors)

    def add_scalar_head(self, *, has_bias: bool) -> ModelShape:
        """Return the model with a layer from a hidden state to one number in place of the output layer."""
        norm = self.tensors[self.index["model.norm.weight"]]
        tensors = [tensor for tensor in self.tensors if tensor.name != OUTPUT_LAYER]
        tensors.append(Tensor(f"{SCALAR_HEAD}.weight", (1, *norm.shape), norm.dtype))
        if has_bias:
            tensors.append(Tensor(f"{SCALAR_HEAD}.bias", (1,), norm.dtype))
        return ModelShape(tuple(tensors), msgspec.structs.replace(self.required_geometry, is_tied=False))

    def add_adapters(self, layers: Iterable[str], rank: int, dtype: str | None = None) -> ModelShape:
        """Return the model with low-rank adapters of these layers after its own tensors (`tandem.config.models.lora`).

        They have the layers' element type unless another is given.
        """
        added = []
        for layer in layers:
            weight = self.tensors[self.index[f"{layer}.weight"]]
            num_out, num_in = weight.shape
            added.append(Tensor(f"{layer}.{lora.A}", (rank, num_in), dtype or weight.dtype))
            added.append(Tensor(f"{layer}.{lora.B}", (num_out, rank), dtype or weight.dtype))
        return msgspec.structs.replace(self, tensors=(*self.tensors, *added))

    def quantised(self, block: tuple[int, int] = (128, 128), dtype: str = "float8_e4m3fn") -> ModelShape:
        """Return the model with its linear layers' weights quantised, with one float32 scale per block.

        Follows the checkpoint of DeepSeek-V3 (arXiv:2412.19437, section 3.3): embeddings, norms, biases, routers and
        the output layer stay unquantised. The scales of ``name`` are called ``name_scale_inv``.
        """
        tensors: list[Tensor] = []
        for tensor in self.tensors:
            if not _QUANTISED.search(tensor.name):
                tensors.append(tensor)
                continue
            scales = tensor.name + "_scale_inv"
            rows, columns = (-(-n // size) for n, size in zip(tensor.shape, block, strict=True))
            tensors.append(Tensor(tensor.name, tensor.shape, dtype, block, scales))
            tensors.append(Tensor(scales, (rows, columns), "float32"))
        return ModelShape(tuple(tensors), self.geometry)


def make_shape(config: Mapping[str, Any], dtype: str | None = None) -> ModelShape:
    """Return the shape of the model described by a ``config.json``.

    A vision model has its tensors by the names that they have in memory, and no geometry.

    Args:
        config: the file's content.
        dtype: element type of the weights; default: the file's own, or bfloat16 if it names none.

    Raises:
        ModelError: the architecture is unknown, or a field is missing or of the wrong kind.

    """
    if config.get("model_type") not in (*FAMILIES, *VISION):
        raise ModelError(f"model_type {config.get('model_type')!r} has no catalogue; known are {', '.join(FAMILIES)}")
    try:
        named = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if config["model_type"] in VISION:
            language = geometry_of(language_config(config))
            return ModelShape(tuple(tensors_of_seeing(config, named)), None, config["model_type"], language)
        geometry = geometry_of(config)
        return ModelShape(tuple(tensors_of(config, geometry, named)), geometry)
    except KeyError as error:
        raise ModelError(f"the model's configuration lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"the model's configuration does not describe a {config['model_type']}: {error}") from error


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of a checkpoint, from ``config.json`` and the headers of its safetensors files.

    For a known architecture (with a language model's head or a one-label classifier's) the tensors come from the
    configuration, and the headers must agree with them. Other tensors in the files take no part in a refit, such as the
    multi-token prediction layers of DeepSeek-V3 or the scales of a quantised checkpoint. For any other architecture,
    all tensors in the headers are used.

    Raises:
        ModelError: a file is missing or damaged, or contradicts the configuration.

    """
    entries = read_headers(folder)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if config.get("model_type") not in FAMILIES:
        return ModelShape(tuple(Tensor(name, shape, dtype) for name, (shape, dtype) in entries.items()), None)
    model = make_shape(config)
    if f"{SCALAR_HEAD}.weight" in entries and OUTPUT_LAYER not in entries:
        model = model.add_scalar_head(has_bias=f"{SCALAR_HEAD}.bias" in entries)
    tensors = []
    for tensor in model.tensors:
        shape, dtype = entries.get(tensor.name, (None, ""))
        if shape != tensor.shape:
            actual = "none" if shape is None else f"shape {shape}"
            raise ModelError(f"{folder}: {tensor.name} should have shape {tensor.shape}, the checkpoint has {actual}")
        is_weight = dtype in FLOATS and FLOATS[dtype] >= _HALF
        tensors.append(Tensor(tensor.name, tensor.shape, dtype) if is_weight else tensor)
    return ModelShape(tuple(tensors), model.geometry)
