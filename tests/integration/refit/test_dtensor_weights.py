"""Where the DTensor backend's weights come from, where they lie, and what it says about them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from tandem.common.errors import ModelError, TandemError
from tandem.config import Config
from tandem.config.schema import NewModel
from tandem.coordinator.forecast.sides import training
from tandem.refit.adapters.catalogue import read_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.checks import check
from tandem.refit.digests.comparison import combine
from tandem.refit.digests.task import digest_box
from tandem.refit.layout import Layout, SharedMemory, whole
from tandem.samples.model_files import write_new_model
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.trainers.trainer_harness import (
    ARCHITECTURES,
    FAMILIES,
    digest_of,
    make_batch,
    make_config,
    make_model,
    run_ranks,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")


def read_piecewise(layouts: Sequence[Layout], num_replicas: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    """Assemble whole tensors the way an engine would: from the layouts alone, through ``/proc/<pid>/fd/<fd>``.

    Every element is held once, or by as many ranks as `num_replicas`.
    """
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    written: dict[str, np.ndarray[Any, Any]] = {}
    for layout in layouts:
        check(layout, "rank")
        storages = {storage.name: storage for storage in layout.storages}
        for tensor in layout.tensors:
            assert tensor.dtype == "float32"
            whole_tensor = tensors.setdefault(tensor.name, np.zeros(tensor.shape, dtype=np.float32))
            count = written.setdefault(tensor.name, np.zeros(tensor.shape, dtype=np.int32))
            for piece in layout.pieces_of(tensor.name):
                storage = storages[piece.parameter]
                assert isinstance(storage.address, SharedMemory)
                fd = os.open(f"/proc/{storage.address.pid}/fd/{storage.address.fd}", os.O_RDONLY)
                with mmap.mmap(fd, storage.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                    view = np.ndarray(piece.box.shape, np.float32, mapped, piece.offset, piece.strides)
                    region = piece.box.region
                    assert not count[region].any() or np.array_equal(whole_tensor[region], view), "replicas are equal"
                    whole_tensor[region] = view
                    count[region] += 1
                    del view
                os.close(fd)
    for name, count in written.items():
        assert (count == count.flat[0]).all(), f"{name} is not covered evenly"
        is_buffer = name.endswith("e_score_correction_bias")
        assert count.flat[0] in ((len(layouts),) if is_buffer else (1, num_replicas)), name
    return tensors


def exchange_layouts(backend: DTensorBackend) -> list[Layout]:
    """Return every rank's layout."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, backend.weights().layout)
    return everyone


# Three divides hardly anything: uneven and empty shards.
@pytest.mark.parametrize(
    ("architecture", "world_size", "tensor"),
    [
        ("qwen3", 1, 1),
        ("qwen3", 2, 1),
        *((name, 3, 1) for name in ARCHITECTURES),
        ("qwen3", 2, 2),
        *((name, 4, 2) for name in ARCHITECTURES),
        *((name, 4, 2) for name in FAMILIES),
        ("qwen2", 6, 2),
    ],
)
def test_other_processes_read_the_weights_in_place(
    architecture: str, world_size: int, tensor: int, tmp_path: Path
) -> None:
    config = make_config(
        make_model(tmp_path / "model", architecture),
        trainers=tensor,
        dtensor_cfg={"tensor_parallel_size": tensor},
    )
    run_ranks(world_size, read_each_other, config, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "world_size", "sizes"),
    [
        ("qwen3_moe", 2, {"expert_parallel_size": 2}),
        ("glm4_moe", 6, {"expert_parallel_size": 2}),  # four experts over three ranks
        ("gpt_oss", 4, {"expert_parallel_size": 2, "dp_replicate_size": 2}),
        ("qwen3_moe", 4, {"expert_parallel_size": 2, "tensor_parallel_size": 2}),
        ("qwen3", 4, {"dp_replicate_size": 2}),
    ],
)
def test_experts_and_replicas_are_read_in_place(
    architecture: str, world_size: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    config = make_config(
        make_model(tmp_path / "model", architecture), trainers=math.prod(sizes.values()), dtensor_cfg=sizes
    )
    run_ranks(world_size, read_each_other, config, tmp_path)


def read_each_other(rank: int, config: Config, folder: Path) -> None:
    backend = DTensorBackend(config, checkpoint=None)
    layouts = exchange_layouts(backend)
    assert_predicted(layouts, config)
    num_replicas = config.policy.dtensor_cfg.tensor_parallel_size * config.policy.dtensor_cfg.dp_replicate_size
    for number in range(3 if num_replicas == 1 else 2):  # where ranks share tensors, each batch takes them long
        if number:
            train_on(backend, make_batch(seed=number), config)
        backend.save(folder / str(number)).num_bytes.result()
        assert exchange_layouts(backend) == layouts, "what was said about the memory must stay true"
        if rank == dist.get_world_size() - 1:
            assert_equal(read_piecewise(layouts, num_replicas), folder / str(number))
        dist.barrier()
    backend.load(folder / "1")
    dist.barrier()
    assert exchange_layouts(backend) == layouts
    assert_equal(read_piecewise(layouts, num_replicas), folder / "1")
    dist.barrier()


def assert_predicted(layouts: Sequence[Layout], config: Config) -> None:
    """The planner's adapter lays the ranks out as they are."""
    model, sizes = read_shape(Path(config.policy.model_name)), training(config)
    assert isinstance(sizes, DTensor)
    sizes = msgspec.structs.replace(sizes, shard=len(layouts) // (sizes.replicate * sizes.tensor))
    predicted = sizes.layouts(model, HostNames("here", has_gpus=False))
    for live, expected in zip(layouts, predicted, strict=True):
        assert pieces_of(live) == pieces_of(expected)


def pieces_of(layout: Layout) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for tensor in layout.tensors:
        for piece in layout.pieces_of(tensor.name):
            # Where a dimension has one element, its stride says nothing.
            strides = [stride for stride, n in zip(piece.strides, piece.box.shape, strict=True) if n > 1]
            place = piece.parameter, piece.offset, strides
            found.setdefault(tensor.name, []).append((piece.box.start, piece.box.shape, *place))
    return found


def assert_equal(tensors: dict[str, np.ndarray[Any, Any]], folder: Path) -> None:
    expected = load_file(folder / "policy" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, values in tensors.items():
        assert np.array_equal(values, expected[name].numpy()), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_digest_shares_add_up_to_the_digest_of_the_model_engines_hold(precision: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    config = make_config(folder, precision=precision)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision))
    expected = combine(
        *(digest_box(name, tuple(p.shape), whole(tuple(p.shape)), p.detach()) for name, p in model.named_parameters())
    )
    for world_size in (1, 2, 3):
        shares = run_ranks(world_size, digest_before_and_after, config)
        assert combine(*(before for before, _ in shares)) == expected
        assert combine(*(after for _, after in shares)) != expected


def digest_before_and_after(rank: int, config: Config) -> tuple[int, int]:
    backend = DTensorBackend(config, checkpoint=None)
    before = digest_of(backend, config.policy.precision)
    train_on(backend, make_batch(), config)
    return before, digest_of(backend, config.policy.precision)


def initial_digest(rank: int, config: Config) -> tuple[int, int]:
    backend = DTensorBackend(config, checkpoint=None)
    return digest_of(backend), backend.num_parameters


def test_a_new_models_weights_are_decided_by_its_seed_alone(tmp_path: Path) -> None:
    new_model = NewModel(config=ARCHITECTURES["qwen3"], characters="0123456789+-= abcdefg", seed=3)
    write_new_model(tmp_path / "new", new_model)
    settings = msgspec.to_builtins(new_model)
    config = make_config(tmp_path / "new", new_model=settings)
    one = run_ranks(1, initial_digest, config)
    two = run_ranks(2, initial_digest, config)
    assert combine(*(share for share, _ in one)) == combine(*(share for share, _ in two))
    assert one[0][1] == two[0][1] == two[1][1] > 10_000
    other = run_ranks(1, initial_digest, make_config(tmp_path / "new", new_model={**settings, "seed": 4}))
    assert other[0] != one[0]


def build_error(rank: int, config: Config) -> str:
    with pytest.raises(TandemError) as raised:
        DTensorBackend(config, checkpoint=None)
    assert isinstance(raised.value, ModelError)
    return str(raised.value)


def test_a_folder_that_cannot_be_trained_from_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = make_model(tmp_path / "model")
    config = make_config(broken)
    tensors = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    (error,) = run_ranks(1, build_error, config)
    assert error == f"there are no weights in {str(broken)!r}, and policy.new_model does not say how to make them"

    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    (error,) = run_ranks(1, build_error, config)
    assert error == (
        f"the checkpoint in {str(broken)!r} lacks 1 tensors, the first is model.layers.1.mlp.up_proj.weight"
    )

    (broken / "model.safetensors").write_bytes(b"no tensors")
    (error,) = run_ranks(1, build_error, config)
    assert error.startswith(f"cannot load a model from {str(broken)!r}: ")
    assert "\n" not in error
