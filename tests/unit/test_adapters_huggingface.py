"""Experts that transformers fuses in memory, named as in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_harness import make_model

from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.huggingface import HuggingFace, as_checkpoint
from tandem.refit.checks import check
from tandem.refit.digests.task import digest_layout
from tandem.refit.layout import Box, Layout, LayoutBuilder, contiguous_strides, whole

GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def plain(shapes: dict[str, tuple[int, ...]]) -> Layout:
    builder = LayoutBuilder("host")
    for name, shape in shapes.items():
        tensor, storage = builder.tensor(name, shape, "float32"), builder.storage(name, 4 * int(np.prod(shape)))
        builder.add(tensor, whole(shape), storage, 0, contiguous_strides(shape, 4))
    return builder.build()


def digests(layout: Layout, memory: Any) -> dict[str, int]:
    names = [tensor.name for tensor in layout.tensors]
    return dict(zip(names, digest_layout(layout, memory).tolist(), strict=True))


def test_a_mixture_of_experts_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    memory = dict(model.named_parameters())
    described = HuggingFace().layout(make_shape(model.config.to_dict(), "float32"), 0, "host")
    found = as_checkpoint(plain({name: tuple(parameter.shape) for name, parameter in memory.items()}))
    check(found, "trainer-0")
    assert digests(found, memory) == digests(described, memory)


def test_a_shard_of_fused_experts_is_cut_at_their_edges() -> None:
    """A shard of rows 2 to 8 of experts 1 and 2, where an expert has 5 rows of its gate, then 5 to project up."""
    whole_EIH = torch.arange(3 * 10 * 4, dtype=torch.float32).reshape(3, 10, 4)
    builder = LayoutBuilder("host")
    tensor, _ = builder.tensor(GATE_UP, (3, 10, 4), "float32"), builder.tensor(DOWN, (3, 4, 5), "float32")
    shard = whole_EIH[1:3, 2:8].contiguous()
    strides = contiguous_strides(shard.shape, 4)
    builder.add(tensor, Box((1, 2, 0), (2, 6, 4)), builder.storage(GATE_UP, shard.nbytes), 0, strides)
    found = as_checkpoint(builder.build())
    prefix = GATE_UP.removesuffix("gate_up_proj")
    for expert in range(3):
        for part, rows, first in (("gate", slice(2, 5), 2), ("up", slice(5, 8), 0)):
            pieces = found.pieces_of(f"{prefix}{expert}.{part}_proj.weight")
            assert len(pieces) == (expert > 0)
            for piece in pieces:
                assert piece.box == Box((first, 0), (3, 4))
                seen = shard.as_strided((3, 4), [stride // 4 for stride in piece.strides], piece.offset // 4)
                assert torch.equal(seen, whole_EIH[expert, rows])
        assert found.pieces_of(f"{prefix}{expert}.down_proj.weight") == ()


def test_experts_that_are_fused_otherwise_stay_as_they_are() -> None:
    layout = plain({GATE_UP: (3, 4, 10), DOWN: (3, 5, 4)})
    assert as_checkpoint(layout) is layout
