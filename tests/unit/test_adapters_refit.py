"""Weights that go from one library's layout to another's by a plan arrive as that library would have loaded them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from adapters_harness import (
    DEEPSEEK,
    GEMMA3,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    PHI3,
    QWEN2,
    QWEN3_MOE,
    Arrays,
    materialise,
    model_of,
    weights_of,
)

from tandem.refit.adapters.deployment import HostNames, ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.checks import check, check_writable
from tandem.refit.layout import SharedMemory
from tandem.refit.planner import TransferPlan, plan, survey
from tandem.refit.transfer import LinkTransfer

PAIRS = {
    "Megatron TP × PP to vLLM TP": (LLAMA, Megatron(tp=2, pp=2), Vllm(tp=4)),
    "Megatron EP to vLLM TP": (QWEN3_MOE, Megatron(dp=4, ep=4), Vllm(tp=2, replicas=2)),
    "Megatron EP × ETP to vLLM EP": (
        DEEPSEEK,
        Megatron(tp=2, pp=2, dp=2, ep=2, etp=1),
        Vllm(tp=2, dp=2, expert_parallel=True),
    ),
    "Megatron, experts transposed, to vLLM": (QWEN3_MOE, Megatron(tp=2, dp=2, ep=2, experts="legacy"), Vllm(tp=4)),
    "FSDP to vLLM TP": (QWEN2, DTensor(shard=4), Vllm(tp=2)),
    "FSDP of fused experts to vLLM TP beyond the key heads": (QWEN3_MOE, DTensor(shard=3), Vllm(tp=8)),
    "FSDP × EP to vLLM TP": (QWEN3_MOE, DTensor(shard=4, expert=2), Vllm(tp=2)),
    "HSDP × EP to vLLM EP": (
        GLM4_MOE,
        DTensor(replicate=2, shard=4, expert=2),
        Vllm(tp=2, dp=2, expert_parallel=True),
    ),
    "FSDP × TP to transformers": (LLAMA, DTensor(shard=3, tensor=2), HuggingFace()),
    "Megatron TP to vLLM TP, fused in the checkpoint": (PHI3, Megatron(tp=2, pp=2), Vllm(tp=4)),
    "FSDP × TP to vLLM TP, fused in the checkpoint": (PHI3, DTensor(shard=3, tensor=2), Vllm(tp=4)),
    "FSDP × TP to vLLM, four norms": (GEMMA3, DTensor(shard=2, tensor=2), Vllm(tp=2)),
    "FSDP × TP to transformers, experts fused in the checkpoint": (
        GPT_OSS,
        DTensor(shard=3, tensor=2),
        HuggingFace(num_replicas=2),
    ),
    "FSDP to vLLM EP, routers with a bias": (GLM4_MOE, DTensor(shard=3), Vllm(tp=2, dp=2, expert_parallel=True)),
    "Megatron EP to transformers, routers with a bias": (
        GLM4_MOE,
        Megatron(tp=2, dp=2, ep=2, etp=1),
        HuggingFace(),
    ),
    "transformers to Megatron": (QWEN2, HuggingFace(), Megatron(tp=2, pp=2, vpp=2)),
}


def run(transfer: LinkTransfer, memory: Mapping[str, Arrays]) -> None:
    """Copy integers as the transfer says."""
    at = transfer.copies
    for row in range(len(at)):
        shape = at.shape_CD[row].tolist()
        source = memory[transfer.source][transfer.source_storages[at.source_C[row]].name]
        destination = memory[transfer.destination][transfer.destination_storages[at.destination_C[row]]]
        offsets = int(at.source_offset_C[row]), int(at.destination_offset_C[row])
        kinds = [np.float32 if dtype == "float32" else np.int32 for dtype in transfer.dtypes(row)]
        from_, to = (
            np.ndarray(shape, kind, memory_B, offset, strides.tolist())
            for kind, memory_B, offset, strides in zip(
                kinds,
                (source, destination),
                offsets,
                (at.source_strides_CD[row], at.destination_strides_CD[row]),
                strict=True,
            )
        )
        to[...] = from_


def refit(planned: TransferPlan, memory: Mapping[str, Arrays]) -> None:
    transfers = [transfer for program in planned.programs.values() for transfer in program.receives]
    for transfer in sorted(transfers, key=lambda transfer: transfer.round):
        run(transfer, memory)


@pytest.mark.parametrize(("config", "trainer", "engine"), PAIRS.values(), ids=PAIRS)
def test_what_arrives_is_what_was_meant(
    config: dict[str, Any], trainer: ParallelDeployment, engine: ParallelDeployment
) -> None:
    model = model_of(config)
    weights = weights_of(model)
    hosts = HostNames("trainers", per_host=4), HostNames("engines", per_host=4)
    sources, wanted = (
        {f"{hosts.name}-{rank}": layout for rank, layout in enumerate(sizes.layouts(model, hosts))}
        for sizes, hosts in zip((trainer, engine), hosts, strict=True)
    )
    memory = {name: materialise(layout, weights) for name, layout in sources.items()}
    for name, layout in wanted.items():
        check(layout, name)
        check_writable(layout, name)
        memory[name] = {storage.name: np.zeros(storage.num_bytes, np.uint8) for storage in layout.storages}
    refit(plan(sources, wanted, allow_alias=False), memory)
    for name, layout in wanted.items():
        for storage, expected_B in materialise(layout, weights).items():
            np.testing.assert_array_equal(memory[name][storage], expected_B, f"{name} {storage}")


UNPADDED = LLAMA | {"vocab_size": 256}
ONE_GROUP = UNPADDED | {"num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "trainer", "engine", "copied"),
    [
        (UNPADDED, HuggingFace(), HuggingFace(), ()),
        (UNPADDED, HuggingFace(), Vllm(), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
        (UNPADDED, Megatron(), HuggingFace(), ("q_proj", "k_proj", "v_proj")),
        (UNPADDED, Megatron(), Vllm(), ("q_proj", "k_proj", "v_proj")),
        (ONE_GROUP, Megatron(), Vllm(), ()),
    ],
    ids=["like to like", "vLLM fuses", "Megatron fuses", "both fuse", "both fuse, one group of heads"],
)
def test_an_engine_reads_in_place_what_is_fused_alike(
    config: dict[str, Any], trainer: ParallelDeployment, engine: ParallelDeployment, copied: tuple[str, ...]
) -> None:
    """Megatron-Core has queries, keys and values by groups of heads, vLLM one after the other."""
    model, host = model_of(config), HostNames("node", has_gpus=False)
    (held,), (wanted,) = (sizes.layouts(model, host) for sizes in (trainer, engine))
    storages = tuple(msgspec.structs.replace(each, address=SharedMemory(0, 0, 0)) for each in held.storages)
    held = msgspec.structs.replace(held, storages=storages)
    found = survey({"trainer": held}, {"engine": wanted}, allow_alias=True)
    expected = [tensor for tensor in held.tensors if set(copied) & set(tensor.name.split("."))]
    assert sum(link.num_bytes for link in found.links) == sum(4 * math.prod(tensor.shape) for tensor in expected)
