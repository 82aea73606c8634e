"""Hugging Face checkpoints converted to Megatron-Core's weights, once for all runs.

A converted checkpoint is a folder of safetensors files with the parameters of a ``GPTModel`` on one rank: names, fused
queries, keys and values, fused gate and up projection, padded vocabulary, as Megatron-Core has them with Transformer
Engine. Ranks of any parallelism read their parts of it.

A folder appears whole or not at all: it is written under another name, then renamed. The converting process holds a
lock of the operating system, which ends with the process in any case. If the file system has no locks, two processes
may convert at once, and either result is good.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from tandem.common.errors import DamagedCheckpoint, ModelError
from tandem.config import Config, schema
from tandem.config.schema.columns import Model
from tandem.refit.adapters import catalogue, geometry
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.layout import ITEM_SIZES, Box, Layout, LayoutPiece
from tandem.samples import manifest
from tandem.samples.manifest import FileRecord
from tandem.trainer.backends.megatron import weights
from tandem.trainer.files.box_files import digests_of
from tandem.trainer.files.checkpoints import FileProof, sync, sync_folder
from tandem.trainer.models import load_model

FORMAT = 2
"""Version of the format, which changes with it, so that nothing older is read."""
_ONE_RANK = Megatron(transformer_engine=True, experts="grouped")
_FILE_BYTES = 2**30
_SAMPLE_BYTES = 4096
_POLL_S = 0.2
_ABOUT = "converted.json"


def open_tensors(source: str, config: Config, name: Model = "policy") -> weights.CheckpointTensors:
    """Return the weights that a model starts from.

    They are converted first, if they have not been before or ``megatron_cfg.force_reconvert_from_hf`` is set. A folder
    without weights comes from the section's ``new_model``. Its weights are drawn with that seed, the same on every
    rank, as in `tandem.trainer.models.load_model`. A missing head for one number begins with zeros.

    Collective. Raises `ModelError`.
    """
    section, head = config.settings_of(name), config.declaration.head_of(name)
    tensors = _open(source, section, config.cluster.deadlines.build_s)
    return tensors if head == "vocabulary" else WithZeroHead(tensors)


def _open(source: str, section: schema.ModelConfig, deadline_s: float) -> ConvertedFolder | weights.TensorsInMemory:
    folder = Path(source)
    if section.new_model is not None and not any(folder.glob("*.safetensors")):
        model = load_model(str(folder), section, torch.float32)
        return weights.TensorsInMemory(revert_weight_conversion(model, model.state_dict()))
    order = _order() if section.megatron_cfg.force_reconvert_from_hf else ""
    shape = catalogue.read_shape(folder)
    target = convert_once(source, folder, shape, deadline_s, order)
    try:
        FileProof([(target, _files_of(target))]).conclude()
    except DamagedCheckpoint as error:
        raise ModelError(f"{error}; delete {target}, and {source} is converted again") from error
    return ConvertedFolder(target, shape)


def _order() -> str:
    """Return a number that all ranks of this run share, and no other run has."""
    number = torch.from_numpy(np.frombuffer(os.urandom(8), np.int64).copy())
    if torch.cuda.is_available():
        number = number.cuda()
    dist.broadcast(number, src=0)
    return f"{int(number) & (1 << 64) - 1:016x}"


def base_folder() -> Path:
    """Return the folder of converted checkpoints, the same as in NeMo-RL."""
    if base := os.environ.get("NRL_MEGATRON_CHECKPOINT_DIR"):
        return Path(base)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "nemo_rl"


def fingerprint(folder: Path) -> str:
    """Return a hash of a checkpoint: its configuration, and the name, header, size and tensor samples of each file.

    Training changes every tensor, so their first bytes tell two states of a model apart without reading all of them.
    Raises `ModelError`.
    """
    hasher = hashlib.blake2b(str(FORMAT).encode(), digest_size=16)
    for path in (folder / "config.json", *catalogue.files_of(folder)):
        try:
            with path.open("rb") as file:
                hasher.update(f"{path.name} {os.fstat(file.fileno()).st_size} ".encode())
                if path.suffix == ".json":
                    hasher.update(file.read())
                else:
                    _tell_tensors(file, hasher)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    return hasher.hexdigest()


def _tell_tensors(file: Any, hasher: Any) -> None:
    (length,) = struct.unpack("<Q", file.read(8))
    encoded = file.read(length)
    hasher.update(encoded)
    for name, entry in json.loads(encoded).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            file.seek(8 + length + start)
            hasher.update(file.read(min(_SAMPLE_BYTES, stop - start)))


def convert_once(source: str, folder: Path, model: catalogue.ModelShape, deadline_s: float, order: str = "") -> Path:
    """Return the converted checkpoint of a model, and make it first if there is none.

    Any number of processes on any nodes may call this at once: one converts, the others wait for it.

    Args:
        source: name or path from the user, which names the converted checkpoint.
        folder: folder of the checkpoint.
        model: shape of the checkpoint.
        deadline_s: how long to wait for the converting process.
        order: a checkpoint that was not converted with this id is converted again, unless the id is empty.

    Raises:
        ModelError: the checkpoint cannot be read, the converted one cannot be written, or the deadline has passed.
    """
    name = f"{source.strip('/').replace('/', '--')[-100:]}-{fingerprint(folder)}"
    target = base_folder() / name
    try:
        if _serves(target, order):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{name}.lock"), deadline_s) as is_held:
            if not _serves(target, order):
                if is_held:
                    for leftover in target.parent.glob(f"{name}.tmp-*"):  # of processes that died while converting
                        shutil.rmtree(leftover, ignore_errors=True)
                _replace(target, folder, model, order)
    except OSError as error:
        raise ModelError(f"{folder} cannot be converted to {target}: {error.strerror or error}") from error
    return target


def _serves(target: Path, order: str) -> bool:
    """Tell whether a folder is there, and so whole, and was made with this id, if there is one."""
    try:
        about = json.loads((target / _ABOUT).read_bytes())
    except (FileNotFoundError, ValueError):  # a damaged one is made again
        return False
    return not order or about.get("order") == order


def _files_of(target: Path) -> dict[str, FileRecord]:
    """Return the files of a converted checkpoint. Raises `DamagedCheckpoint`."""
    about = target / _ABOUT
    try:
        return msgspec.convert(json.loads(about.read_bytes())["files"], dict[str, FileRecord])
    except (OSError, ValueError, KeyError, msgspec.ValidationError) as error:
        raise DamagedCheckpoint(f"{about} {manifest.DAMAGED}: {error}") from error


@contextmanager
def _lock(path: Path, deadline_s: float) -> Iterator[bool]:
    """Hold a lock; yield False if the file system has none. Raises `ModelError` after the deadline."""
    deadline = time.monotonic() + deadline_s
    with path.open("a+") as file:
        is_held = False
        while not is_held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    raise ModelError(
                        f"waited {deadline_s:.0f} s for {holder}, which converts a checkpoint and holds {path}; it may "
                        "take as long as cluster.deadlines.build_s says"
                    ) from None
                time.sleep(_POLL_S)
            except OSError:
                break
        if is_held:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield is_held


def _replace(target: Path, folder: Path, model: catalogue.ModelShape, order: str) -> None:
    """Convert into a folder of this process, and put it in the place of the target."""
    process_name = f"{socket.gethostname()}-{os.getpid()}"
    temporary = target.with_name(f"{target.name}.tmp-{process_name}")
    former = target.with_name(f"{target.name}.tmp-{process_name}-former")
    try:
        temporary.mkdir()
        digests = _write(temporary, folder, model)
        files = {path.name: manifest.describe(path, of_path) for path, of_path in digests.items()}
        about = {"format": FORMAT, "order": order, "source": str(folder.resolve()), "files": msgspec.to_builtins(files)}
        (temporary / _ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        sync([*digests, temporary / _ABOUT])
        sync_folder(temporary)
        if target.exists():
            target.rename(former)  # its readers have its files open
        temporary.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _write(into: Path, folder: Path, model: catalogue.ModelShape) -> dict[Path, dict[str, str]]:
    """Write the parameters of one rank to files of a moderate size; return them with their digests."""
    layout, source = _ONE_RANK.parameters(model, 0), weights.SafetensorsFolder(folder)
    shapes = _shapes(layout)
    digests: dict[Path, dict[str, str]] = {}
    waiting: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        rows = np.flatnonzero(layout.pieces.storage_P == number).tolist()
        tensors = [layout.tensors[layout.pieces.tensor_P[row]] for row in rows]
        parameter = torch.zeros(shape, dtype=getattr(torch, tensors[0].dtype))
        for tensor, row in zip(tensors, rows, strict=True):
            piece = layout.piece(row)
            weights.view_of(parameter, piece).copy_(source.read(tensor.name, tensor.shape, piece.box))
        waiting[name] = parameter
        if sum(tensor.nbytes for tensor in waiting.values()) >= _FILE_BYTES or number == len(shapes) - 1:
            path = into / f"parameters-{len(digests):05d}.safetensors"
            digests[path] = digests_of(waiting)
            save_file(waiting, path, metadata={"format": "pt"})
            waiting = {}
    return digests


def _shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter. Its pieces are parts of all its columns, one below the other."""
    shapes = {}
    for number, storage in enumerate(layout.storages):
        row = int(np.flatnonzero(layout.pieces.storage_P == number)[0])
        tensor, columns = layout.tensors[layout.pieces.tensor_P[row]], layout.piece(row).box.shape[1:]
        num_rows = storage.num_bytes // ITEM_SIZES[tensor.dtype] // math.prod(columns)
        shapes[storage.name] = (num_rows, *columns)
    return shapes


class WithZeroHead:
    """The tensors of a checkpoint, with zeros for the missing parts of a head that gives one number."""

    def __init__(self, tensors: ConvertedFolder | weights.TensorsInMemory) -> None:
        self._tensors = tensors

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor. Raises `ModelError`."""
        if name.startswith(f"{geometry.SCALAR_HEAD}.") and name not in self._tensors:
            return torch.zeros(box.shape)
        return self._tensors.read(name, shape, box)


class ConvertedFolder:
    """The tensors of a checkpoint, read from their places in a converted one. Raises `ModelError`."""

    def __init__(self, folder: Path, model: catalogue.ModelShape) -> None:
        self._folder, self._model = folder, model
        self._layout = _ONE_RANK.parameters(model, 0)
        self._pieces: dict[str, list[LayoutPiece]] = {}
        for row, index in enumerate(self._layout.pieces.tensor_P.tolist()):
            self._pieces.setdefault(self._layout.tensors[index].name, []).append(self._layout.piece(row))
        self._shapes = _shapes(self._layout)
        self._file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._file_of |= dict.fromkeys(file.keys(), file)
        if lost := self._shapes.keys() - self._file_of.keys():
            raise ModelError(f"the converted checkpoint {folder} lacks {sorted(lost)[0]}; delete it")

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._pieces

    def read(self, name: str, shape: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of a tensor that should have this shape, on the CPU. Raises `ModelError`."""
        if name not in self._pieces:
            raise ModelError(f"the converted checkpoint {self._folder} has no {name}")
        weights.require_shape(name, shape, self._model.tensors[self._model.index[name]].shape)
        values: torch.Tensor | None = None
        for piece in self._pieces[name]:
            common = piece.box.intersect(box)
            if common is None:
                continue
            elements = self._read(piece, common)
            if values is None:
                values = elements if common == box else torch.empty(box.shape, dtype=elements.dtype)
            if values is not elements:
                values[_region(common.start, common.shape, box.start)] = elements
        assert values is not None, f"{name} lies in some parameter"
        return values

    def _read(self, piece: LayoutPiece, box: Box) -> torch.Tensor:
        """Return a box within a piece, from the parameter that it lies in."""
        file, shape = self._file_of[piece.parameter], self._shapes[piece.parameter]
        size = piece.strides[-1]  # of an element: rows are contiguous
        first = np.unravel_index(piece.offset_of(box) // size, shape)
        elements: torch.Tensor = file.get_slice(piece.parameter)[_region(first, box.shape, (0,) * len(shape))]
        return elements


def _region(start: Sequence[Any], shape: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    steps = zip(start, shape, origin, strict=True)
    return tuple(slice(int(a) - first, int(a) - first + n) for a, n, first in steps)
