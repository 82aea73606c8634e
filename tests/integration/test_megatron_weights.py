"""The weights of Megatron-Core's ranks: out of a checkpoint, back into one, and where engines find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from tandem.common.errors import ModelError
from tandem.refit.adapters.catalogue import from_checkpoint
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.layout import Layout, whole
from tandem.refit.transports import shm
from tandem.trainer import checkpoints
from tandem.trainer.backends.megatron.sources import SafetensorsFolder
from tandem.trainer.backends.megatron.weights import RankWeights, parameters_of
from tandem.trainer.models import without_weights
from tests.integration.megatron_harness import build_chunks, make_checkpoint, parallel
from tests.integration.trainer_harness import make_config, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

LOCAL = {"transformer_engine": False, "experts": "sequential", "vocabulary_divisor": 8}
CASES = {
    "one rank": ("qwen3", Megatron(**LOCAL)),
    "TP2": ("llama", Megatron(tp=2, **LOCAL)),
    "TP2, tied, biases": ("qwen2", Megatron(tp=2, **LOCAL)),
    "TP2 with a rank of padding alone": ("qwen3", Megatron(tp=2, **LOCAL | {"vocabulary_divisor": 32})),
    "PP2, tied": ("qwen3 tied", Megatron(pp=2, **LOCAL)),
    "PP2 with virtual stages": ("qwen3", Megatron(pp=2, vpp=2, **LOCAL)),
    "DP2": ("qwen3 tied", Megatron(dp=2, **LOCAL)),
    "EP2": ("qwen3_moe", Megatron(dp=2, ep=2, **LOCAL)),
    "TP2 with whole experts, EP2": ("qwen3_moe", Megatron(tp=2, ep=2, etp=1, **LOCAL)),
    "TP2 and of experts": ("qwen3_moe", Megatron(tp=2, etp=2, **LOCAL)),
}


@pytest.mark.parametrize(("model", "sizes"), CASES.values(), ids=CASES)
def test_what_is_loaded_is_read_by_engines_and_gathered_again(model: str, sizes: Megatron, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", model, max_file_size="40KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    expected = tensors_in(checkpoint)
    gathered, *others = run_ranks(sizes.num_ranks, load_and_gather, checkpoint, sizes)
    assert not any(others)
    assert gathered.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(torch.from_numpy(gathered[name]), tensor), name


def load_and_gather(rank: int, checkpoint: Path, sizes: Megatron) -> dict[str, Any]:
    with parallel(sizes):
        chunks, model = build_chunks(checkpoint, sizes)
        for parameter in parameters_of(chunks).values():
            parameter.detach().fill_(float("nan"))
        held = RankWeights(chunks, sizes, model)
        held.load(SafetensorsFolder(checkpoint))
        assert all(parameter.isfinite().all() for parameter in parameters_of(chunks).values())
        layouts: list[Any] = [None] * sizes.num_ranks
        dist.all_gather_object(layouts, held.shared.layout)
        assert_holds(layouts[rank - 1], tensors_in(checkpoint))
        dist.barrier()
        return {name: tensor.numpy() for batch in held.gathered(5000) for name, tensor in batch.items()}


def test_parameters_that_the_checkpoint_does_not_imply_are_refused(tmp_path: Path) -> None:
    checkpoint, other = (make_checkpoint(tmp_path / model, model) for model in ("llama", "qwen3"))
    (message,) = run_ranks(1, hold_another, checkpoint, other)
    assert message == (
        "parameter decoder.layers.0.self_attention.k_layernorm.weight: Megatron-Core has none, the checkpoint implies "
        "32 bytes"
    )


def hold_another(rank: int, checkpoint: Path, other: Path) -> str:
    with parallel(Megatron(**LOCAL)):
        chunks, _ = build_chunks(checkpoint, Megatron(**LOCAL))
        with pytest.raises(ModelError) as refused:
            RankWeights(chunks, Megatron(**LOCAL), from_checkpoint(other))
        return str(refused.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"another": torch.zeros(2)}, "lacks weight"),
        ({"weight": torch.zeros(2, 3)}, r"weight should have shape \(2, 2\), the checkpoint has \(2, 3\)"),
        ({"weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, r"weight in .* is quantised \(F8_E4M3\)"),
    ],
    ids=["missing", "other shape", "quantised"],
)
def test_a_tensor_that_cannot_be_loaded_is_named(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        SafetensorsFolder(tmp_path).read("weight", (2, 2), whole((2, 2)))


@pytest.mark.parametrize("damage", ["no files", "no index", "no tensors"])
def test_files_that_cannot_be_read_are_named(damage: str, tmp_path: Path) -> None:
    if damage == "no index":
        (tmp_path / "model.safetensors.index.json").write_text("[]")
    elif damage == "no tensors":
        (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=str(tmp_path)):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("qwen3 tied", Megatron(tp=2, **LOCAL)), ("qwen3_moe", Megatron(dp=2, ep=2, **LOCAL))],
    ids=["tied", "experts"],
)
def test_what_is_saved_is_the_model_to_hugging_face(model: str, sizes: Megatron, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", model)
    transformers.GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(checkpoint)
    run_ranks(sizes.num_ranks, save, checkpoint, sizes, tmp_path / "step_1")
    policy = tmp_path / "step_1" / checkpoints.POLICY
    assert len(list(policy.glob("model-*.safetensors"))) > 1
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(each) for each in (checkpoint, policy))
    token_ids_BT = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(before(token_ids_BT).logits, after(token_ids_BT).logits)
    assert after.generation_config.temperature == 0.25
    assert after.config.dtype == torch.float32
    assert after.config.architectures == before.config.architectures


def save(rank: int, checkpoint: Path, sizes: Megatron, folder: Path) -> None:
    with parallel(sizes):
        chunks, model = build_chunks(checkpoint, sizes)
        held = RankWeights(chunks, sizes, model)
        held.load(SafetensorsFolder(checkpoint))
        described = without_weights(str(checkpoint), torch.float32)
        config = make_config(checkpoint)
        num_bytes = checkpoints.write_policy(folder, described, held.gathered(), config, max_file_bytes=50_000)
        assert (num_bytes > 0) == (rank == 0)


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_holds(layout: Layout, expected: dict[str, torch.Tensor]) -> None:
    """Another process finds in the memory of a layout what the checkpoint has there."""
    layout.check("rank")
    memory = {storage.name: shm.open_storage(storage, "rank", "engine") for storage in layout.storages}
    for tensor in layout.tensors:
        for piece in layout.pieces_of(tensor.name):
            flat = memory[piece.parameter].view(torch.float32)
            there = flat.as_strided(piece.box.shape, [step // 4 for step in piece.strides], piece.offset // 4)
            region = tuple(map(slice, piece.box.start, piece.box.stop))
            assert torch.equal(there, expected[tensor.name][region]), tensor.name
