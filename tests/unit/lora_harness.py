"""Trainers of adapters, and engines, in the memory of this process: plain tensors, described as backends do."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import torch

from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.deployment import HostNames, ParallelDeployment
from tandem.refit.digests.comparison import Digests, DigestVerdict, compare
from tandem.refit.layout import ITEM_SIZES, Box, Layout, LayoutBuilder, contiguous_strides
from tandem.refit.planner import TransferPlan, plan
from tandem.refit.transports import shm
from tandem.refit.weights import Weights

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "tie_word_embeddings": False,
}
HOST = HostNames("host", per_host=8, has_gpus=False)
MODEL = make_shape(CONFIG, "float32")
RANK, SCALE = 4, 8.0

Tensors = dict[str, torch.Tensor]


def targeted(model: ModelShape, *last: str) -> list[str]:
    """Return the layers whose name ends in one of these; of all linear ones, if there are none."""
    ends = last or ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    names = [tensor.name.removesuffix(".weight") for tensor in model.tensors if len(tensor.shape) == 2]
    return [name for name in names if name.endswith(ends)]


class LoraRefit:
    """Trainers, each with its share of a model and of adapters, and one engine of one rank or more."""

    def __init__(
        self,
        trainers: ParallelDeployment,
        engine: ParallelDeployment,
        wanted: ModelShape,
        *layers: str,
        allow_alias: bool = False,
        adapter_dtype: torch.dtype = torch.float32,
        model: ModelShape = MODEL,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self.random = random
        self.layers = list(layers) or targeted(model)
        self.base: Tensors = {tensor.name: torch.randn(tensor.shape, generator=random) for tensor in model.tensors}
        self.adapters: Tensors = {}
        for layer in self.layers:
            rows, columns = self.base[f"{layer}.weight"].shape
            for kind, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                matrix = torch.randn(shape, generator=random) / 4
                self.adapters[f"{layer}.lora_{kind}.weight"] = matrix.to(adapter_dtype)
        self.trainers: dict[str, Weights] = {}
        self.sources: dict[str, Layout] = {}
        for rank, layout in enumerate(trainers.layouts(model, HOST)):
            self._add_trainer(rank, trainers.num_ranks, layout)
        self.wanted: dict[str, Layout] = {}
        self.live: dict[str, Tensors] = {}
        self.engines: dict[str, Weights] = {}
        for rank, layout in enumerate(engine.layouts(wanted, HOST)):
            name = f"rollout-{rank}"
            self.wanted[name] = layout
            self.live[name] = {
                storage.name: torch.full((storage.num_bytes,), 7, dtype=torch.uint8) for storage in layout.storages
            }
            self.engines[name] = Weights(layout, self.live[name])
        self.plan: TransferPlan = plan(self.sources, self.wanted, allow_alias=False, alias_frozen=allow_alias)
        self.install()

    def install(self) -> None:
        for name, weights in {**self.trainers, **self.engines}.items():
            weights.install([self.plan.programs[name]])

    def train(self) -> None:
        """Change all adapters, in place, as an optimizer does."""
        for name, matrix in self.adapters.items():
            matrix += torch.randn(matrix.shape, generator=self.random).to(matrix.dtype) / 16
            for weights in self.trainers.values():
                fill(weights, name, matrix)

    def refit(self, version: int, joining_engines: tuple[str, ...] | None = None) -> dict[str, int]:
        counted: dict[str, int] = {}
        for weights in self.engines.values():
            counted |= weights.apply(version, 60.0, (), joining_engines)
        return counted

    def verdict(self) -> DigestVerdict:
        held = {name: (self.sources[name], self.digests(weights)) for name, weights in self.trainers.items()}
        engine = {name: (self.plan.received[name], self.digests(weights)) for name, weights in self.engines.items()}
        return compare(held, {"rollout": engine})

    @staticmethod
    def digests(weights: Weights) -> Digests:
        (digests,) = weights.digest_task(None).results()
        return digests

    def meant(self, name: str, region: tuple[slice, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return what an engine should compute with in a region of a tensor: as peft merges that region.

        The bits of a product depend on its shape: on some processors a few columns of it, computed by themselves, are
        rounded otherwise than in the whole. So the whole is compared within rounding, and the region to the bit.
        """
        made = self.base[name][region].to(dtype, copy=True)
        layer = name.removesuffix(".weight")
        if layer in self.layers:
            a, b = (self.adapters[f"{layer}.lora_{kind}.weight"].float() for kind in "AB")
            rows, columns = region
            whole = ((b @ a) * SCALE)[region]
            product = (b[rows] @ a[:, columns].contiguous()) * SCALE
            torch.testing.assert_close(product, whole, rtol=1e-5, atol=1e-5)
            made += product
        return made

    def held(self, dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return of every piece of every engine: its tensor, what it has, and what it should have."""
        found = []
        for name, layout in self.wanted.items():
            for row in range(len(layout.pieces)):
                tensor, piece = layout.tensors[layout.pieces.tensor_P[row]], layout.piece(row)
                live_dtype, size = getattr(torch, tensor.dtype), ITEM_SIZES[tensor.dtype]
                flat = self.live[name][piece.parameter].view(live_dtype)
                strides = [stride // size for stride in piece.strides]
                live = flat.as_strided(piece.box.shape, strides, flat.storage_offset() + piece.offset // size)
                found.append((tensor.name, live, self.meant(tensor.name, piece.box.region, dtype)))
        return found

    def assert_holds(self, dtype: torch.dtype) -> None:
        for name, live, meant in self.held(dtype):
            assert torch.equal(live, meant), name

    def _add_trainer(self, rank: int, num: int, layout: Layout) -> None:
        builder = LayoutBuilder(layout.host, layout.device)
        for tensor in layout.tensors:
            builder.tensor(tensor.name, tensor.shape, tensor.dtype)
        memory: Tensors = {}
        for storage in layout.storages:
            memory[storage.name] = torch.zeros(storage.num_bytes // 4)
            builder.storage(storage.name, storage.num_bytes, shm.share(memory[storage.name]))
        for row in range(len(layout.pieces)):
            piece, at = layout.piece(row), layout.pieces
            builder.add(int(at.tensor_P[row]), piece.box, int(at.storage_P[row]), piece.offset, piece.strides)
        for name, matrix in self.adapters.items():
            tensor = builder.tensor(name, matrix.shape, str(matrix.dtype).removeprefix("torch."))
            step = math.ceil(matrix.shape[0] / num)
            first = min(rank * step, matrix.shape[0])
            box = Box((first, 0), (min(step, matrix.shape[0] - first), matrix.shape[1]))
            memory[name] = torch.zeros(box.shape, dtype=matrix.dtype)
            if box.num_elements:
                storage = builder.storage(name, memory[name].nbytes, shm.share(memory[name]))
                builder.add(tensor, box, storage, 0, contiguous_strides(box.shape, matrix.element_size()))
        made = mark(builder.build())
        weights = Weights(made, memory)
        for name, value in {**self.base, **self.adapters}.items():
            fill(weights, name, value)
        self.trainers[f"trainer-{rank}"], self.sources[f"trainer-{rank}"] = weights, made


def mark(layout: Layout) -> Layout:
    """Return a trainer's layout that says what is frozen, and by what products are multiplied."""
    tensors = tuple(
        msgspec.structs.replace(
            tensor,
            is_frozen=".lora_" not in tensor.name,
            product_scale=SCALE if tensor.name.endswith(".lora_B.weight") else 0.0,
        )
        for tensor in layout.tensors
    )
    return msgspec.structs.replace(layout, tensors=tensors)


def fill(weights: Weights, name: str, value: torch.Tensor) -> None:
    """Write what a trainer has of a tensor."""
    layout = weights.layout
    index = next(index for index, tensor in enumerate(layout.tensors) if tensor.name == name)
    for row in np.flatnonzero(layout.pieces.tensor_P == index).tolist():
        piece = layout.piece(row)
        memory = weights.storages[piece.parameter].view(-1)
        strides = [stride // value.element_size() for stride in piece.strides]
        memory.as_strided(piece.box.shape, strides, piece.offset // value.element_size()).copy_(value[piece.box.region])
