"""Whole and sharded models of transformers lie where torch and transformers put them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import transformers
from adapters_harness import (
    DEEPSEEK,
    EVERY,
    GPT_OSS,
    LLAMA,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    Weights,
    assert_holds,
    replicas,
    weights_of,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.common.errors import RefitError
from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.deployment import HostNames, locate
from tandem.refit.adapters.dtensor import TENSOR_PLAN, DTensor, local_box
from tandem.refit.adapters.geometry import BIAS
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.layout import CudaMemory, Storage, Tensor, contiguous_strides
from tandem.trainer.backends.sharding import share_out


@contextmanager
def process_of(rank: int, world_size: int) -> Iterator[None]:
    """A process group without peers; nothing below communicates."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def real_model(config: dict[str, Any], weights: Weights, folder: Path) -> Any:
    """The model of transformers, loaded by it from a checkpoint of our weights."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def parameters_of(model: Any) -> Weights:
    """Local parts of the parameters and of the router's bias, which is a buffer."""
    found = dict(model.named_parameters())
    found |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return {
        name: (value.to_local() if isinstance(value, TorchDTensor) else value).detach() for name, value in found.items()
    }


@pytest.mark.parametrize("config", EVERY.values(), ids=EVERY)
def test_a_whole_model_is_that_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    model = make_shape(config, "float32")
    weights = weights_of(model)
    expected = parameters_of(real_model(config, weights, tmp_path))
    (layout,) = HuggingFace().layouts(model, HostNames("here", has_gpus=False))
    assert (layout.host, layout.device) == ("here-0", "cpu")
    assert_holds(layout, weights, expected)
    assert_holds(HuggingFace(fuses_experts=False).layout(model, 0, "here"), weights, weights)


def test_a_model_of_unknown_architecture_is_its_tensors() -> None:
    model = ModelShape((Tensor("a", (3, 5), "int32"), Tensor("b", (), "int32")), None)
    weights = {"a": torch.arange(1, 16, dtype=torch.int32).reshape(3, 5), "b": torch.tensor(7, dtype=torch.int32)}
    assert_holds(HuggingFace().layout(model, 0, "here"), weights, weights)
    shards = DTensor(shard=2).layouts(model, HostNames("here"))
    assert [[p.box.shape for p in layout.pieces_of("a")] for layout in shards] == [[(2, 5)], [(1, 5)]]
    assert replicas(shards) == {"a": {1}, "b": {2}}


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        dim = TENSOR_PLAN.get(".".join([*name.split(".")[-1:], "weight"]))
        if dim is not None and "experts." not in name + ".":
            is_embedding = isinstance(module, torch.nn.Embedding)
            plan[name] = RowwiseParallel() if is_embedding or dim == 1 else ColwiseParallel()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


MESHES = {
    "FSDP": (QWEN3, DTensor(shard=4)),
    "FSDP, uneven and empty": (QWEN3, DTensor(shard=7)),
    "FSDP of experts": (QWEN3_MOE, DTensor(shard=4)),
    "FSDP of experts, uneven": (QWEN3_MOE, DTensor(shard=3)),
    "FSDP of latent attention": (DEEPSEEK, DTensor(shard=3)),
    "FSDP of fused experts": (GPT_OSS, DTensor(shard=3)),
    "FSDP × TP of fused layers": (PHI3, DTensor(shard=2, tensor=2)),
    "HSDP": (LLAMA, DTensor(replicate=2, shard=2)),
    "EP": (QWEN3_MOE, DTensor(shard=2, expert=2)),
    "FSDP × EP": (QWEN3_MOE, DTensor(shard=4, expert=2)),
    "FSDP × EP, uneven": (QWEN3_MOE, DTensor(shard=6, expert=2)),
    "FSDP × EP, beside latent attention": (DEEPSEEK, DTensor(shard=4, expert=4)),
    "FSDP × EP × TP": (QWEN3_MOE, DTensor(shard=4, expert=2, tensor=2)),
    "HSDP × EP of fused experts": (GPT_OSS, DTensor(replicate=2, shard=4, expert=2)),
    "TP": (QWEN2, DTensor(tensor=4)),
    "FSDP × TP": (LLAMA, DTensor(shard=2, tensor=2)),
    "FSDP × TP, uneven": (LLAMA | {"intermediate_size": 30}, DTensor(shard=3, tensor=2)),
    "HSDP × TP with biases": (QWEN2, DTensor(replicate=2, shard=2, tensor=2)),
}


@pytest.mark.parametrize(("config", "sizes"), MESHES.values(), ids=MESHES)
def test_shards_are_those_of_fsdp2_and_tensor_parallelism(
    config: dict[str, Any], sizes: DTensor, tmp_path: Path
) -> None:
    model = make_shape(config, "float32")
    weights = weights_of(model)
    loaded = real_model(config, weights, tmp_path)
    for rank, layout in enumerate(sizes.layouts(model, HostNames("here"))):
        with process_of(rank, sizes.num_ranks):
            names = ("replicate", "shard", "tensor")
            mesh = init_device_mesh("cpu", (sizes.replicate, sizes.shard, sizes.tensor), mesh_dim_names=names)
            over = ("replicate", "shard") if sizes.replicate > 1 else ("shard",)
            real, of_experts = copy.deepcopy(loaded), []
            if sizes.expert > 1:
                axes = ("replicate", "shard", "expert", "tensor")
                shape = (sizes.replicate, sizes.shard // sizes.expert, sizes.expert, sizes.tensor)
                divided = init_device_mesh("cpu", shape, mesh_dim_names=axes)
                of_experts = share_out(real, divided["expert", "tensor"])
            if sizes.tensor > 1:
                tensor_parallel(real, mesh["tensor"])
            for module in of_experts:
                fully_shard(module, mesh=divided[over])
            fully_shard(real, mesh=mesh[over])
            assert_holds(layout, weights, parameters_of(real))


@pytest.mark.parametrize(("config", "sizes"), MESHES.values(), ids=MESHES)
def test_every_element_is_held_by_each_replica_once(config: dict[str, Any], sizes: DTensor) -> None:
    model = make_shape(config, "float32")
    for name, counts in replicas(sizes.layouts(model, HostNames("here"))).items():
        is_cut = ".".join(name.split(".")[-2:]) in TENSOR_PLAN and ".experts." not in name
        num_copies = sizes.replicate if is_cut else sizes.replicate * sizes.tensor
        assert counts == {sizes.num_ranks if name.endswith(BIAS) else num_copies}, name


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    mesh=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    dims=st.tuples(*[st.sampled_from([None, 0, 1])] * 2),
    data=st.data(),
)
def test_a_box_is_that_of_dtensor_on_any_mesh(
    shape: tuple[int, int], mesh: tuple[int, int], dims: tuple[int | None, ...], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, math.prod(mesh) - 1))
    cuts = [(axis, dim) for axis, dim in enumerate(dims) if dim is not None]
    box = local_box(shape, mesh, divmod(rank, mesh[1]), cuts)
    with process_of(rank, math.prod(mesh)):
        device_mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh)).reshape(mesh))
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        local_shape, start = compute_local_shape_and_global_offset(torch.Size(shape), device_mesh, placements)
    assert box.shape == tuple(local_shape)
    assert not box.num_elements or box.start == tuple(start)


def test_strides_are_of_the_local_part() -> None:
    model = make_shape(LLAMA, "bfloat16")
    layout = DTensor(shard=2, tensor=2).layout(model, 3, "here", "GPU-1")
    (piece,) = layout.pieces_of("model.layers.0.mlp.down_proj.weight")
    assert (piece.box.start, piece.box.shape) == ((8, 12), (8, 12))
    assert (piece.offset, piece.strides) == (0, contiguous_strides((8, 12), 2))
    assert layout.device == "GPU-1"


def test_live_parameters_are_located_by_name() -> None:
    layout = HuggingFace().layout(make_shape(LLAMA, "bfloat16"), 0, "here")
    address = CudaMemory(pid=1, device="GPU-1", handle=b"h", offset=512)
    live = {storage.name: Storage(storage.name, storage.num_bytes, address) for storage in layout.storages}
    located = locate(layout, live | {"rotary": Storage("rotary", 4, address)})
    assert {storage.address for storage in located.storages} == {address}
    assert located.pieces is layout.pieces
    norm = "model.norm.weight"
    with pytest.raises(RefitError, match=r"model.norm.weight should have 32 bytes, the process has 64 bytes"):
        locate(layout, live | {norm: Storage(norm, 64, address)})
    with pytest.raises(RefitError, match=r"model.norm.weight should have 32 bytes, the process has no such parameter"):
        locate(layout, {name: storage for name, storage in live.items() if name != norm})


def test_tensors_of_one_parameter_have_one_element_type() -> None:
    model = make_shape(QWEN3_MOE, "float32")
    name = "model.layers.5.mlp.experts.3.up_proj.weight"
    mixed = [msgspec.structs.replace(t, dtype="bfloat16") if t.name == name else t for t in model.tensors]
    mixed_model = ModelShape(tuple(mixed), model.geometry)
    with pytest.raises(RefitError, match="gate_up_proj: the tensors that lie in it have different element types"):
        HuggingFace().layout(mixed_model, 0, "here")
    without = ModelShape(tuple(t for t in model.tensors if t.name != name), model.geometry)
    with pytest.raises(RefitError, match="gate_up_proj: the model lacks some of the tensors that lie in it"):
        HuggingFace().layout(without, 0, "here")


def test_a_plan_that_cannot_be_is_refused() -> None:
    model = make_shape(LLAMA)
    with pytest.raises(RefitError, match=r"input_layernorm.weight has no dimension 1"):
        DTensor(tensor=2, plan={"input_layernorm.weight": 1}).layout(model, 0, "here")
    with pytest.raises(RefitError, match="ranks share experts only where a layer has all of them in one parameter"):
        DTensor(shard=2, expert=2, fuses_experts=False).layout(make_shape(QWEN3_MOE), 0, "here")
    with pytest.raises(RefitError, match="no rank 4 among 4"):
        DTensor(shard=4).layout(model, 4, "here")
