"""The weights of Megatron-Core's ranks: out of a checkpoint, back into one, and where engines find them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.refit.adapters.catalogue import read_shape
from tandem.refit.checks import check
from tandem.refit.layout import Layout, whole
from tandem.refit.transports import shm
from tandem.trainer.backends.megatron.weights import RankWeights, SafetensorsFolder
from tandem.trainer.files import checkpoints
from tests.harness.trainers.megatron_harness import (
    EP2,
    PLAIN,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    config_for,
    make,
    make_checkpoint,
    tensors_in,
)
from tests.harness.trainers.trainer_harness import run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, PLAIN),
    "TP2, its second rank of padding alone": ("llama", 2, TP2),
    "TP2, tied, biases": ("qwen2", 2, TP2 | PLAIN),
    "TP2, biases of all layers": ("llama with biases", 2, TP2),
    "PP2, tied": ("qwen3 tied", 2, PP2),
    "PP2 with virtual stages": ("qwen3", 2, PP2 | VIRTUAL),
    "DP2": ("qwen3 tied", 2, {}),
    "EP2": ("qwen3_moe", 2, EP2),
    "TP2 and of experts": ("qwen3_moe", 2, TP2 | SP | {"expert_tensor_parallel_size": 2}),
    "latent attention, shared experts, TP2, EP2": ("deepseek_v3", 2, TP2 | SP | EP2),
}


@pytest.mark.parametrize(("model", "num_ranks", "megatron"), CASES.values(), ids=CASES)
def test_what_is_loaded_is_read_by_engines_and_gathered_again(
    model: str, num_ranks: int, megatron: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", model, max_file_size="40KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    expected = tensors_in(checkpoint)
    gathered, *others = run_ranks(num_ranks, load_and_gather, checkpoint, config_for(checkpoint, num_ranks, megatron))
    assert not any(others)
    assert gathered.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(torch.from_numpy(gathered[name]), tensor), name


def load_and_gather(rank: int, checkpoint: Path, config: Config) -> dict[str, Any]:
    backend: Any = make(config)
    held = backend._held["policy", 0].weights
    for parameter in held.parameters.values():
        parameter.detach().fill_(float("nan"))
    held.load(SafetensorsFolder(checkpoint))
    assert all(parameter.isfinite().all() for parameter in held.parameters.values())
    if config.policy.megatron_cfg.optimizer["use_distributed_optimizer"]:
        assert len(held.shared.layout.storages) < len(held.parameters), "parameters lie in one buffer"
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, held.shared.layout)
    assert_holds(layouts[rank - 1], tensors_in(checkpoint))
    dist.barrier()
    return {name: tensor.numpy() for batch in held.gathered(5000) for name, tensor in batch.items()}


def test_parameters_that_the_checkpoint_does_not_imply_are_refused(tmp_path: Path) -> None:
    checkpoint, other = (make_checkpoint(tmp_path / model, model) for model in ("llama", "qwen3"))
    (message,) = run_ranks(1, hold_another, config_for(checkpoint, 1, {}), other)
    assert message == (
        "parameter decoder.layers.0.self_attention.k_layernorm.weight: Megatron-Core has none, the checkpoint implies "
        "32 bytes"
    )


def hold_another(rank: int, config: Config, other: Path) -> str:
    backend: Any = make(config)
    policy = backend._held["policy", 0]
    with pytest.raises(ModelError) as refused:
        RankWeights(policy.chunks, policy.settings.sizes, read_shape(other))
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
    ("model", "megatron"),
    [("qwen3 tied", TP2), ("qwen3_moe", EP2), ("llama with biases", TP2)],
    ids=["tied", "experts", "biases"],
)
def test_what_is_saved_is_the_model_to_hugging_face(model: str, megatron: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", model)
    transformers.GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(checkpoint)
    run_ranks(2, save, config_for(checkpoint, 2, megatron), tmp_path / "step_1")
    policy = tmp_path / "step_1" / checkpoints.POLICY
    assert len(list(policy.glob("model-*.safetensors"))) > 1
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(each) for each in (checkpoint, policy))
    token_ids_BT = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(before(token_ids_BT).logits, after(token_ids_BT).logits)
    assert after.generation_config.temperature == 0.25
    assert after.config.dtype == torch.float32
    assert after.config.architectures == before.config.architectures


def save(rank: int, config: Config, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints.save, "__kwdefaults__", {"max_file_bytes": 50_000})
        make(config).save(folder).num_bytes.result()


def assert_holds(layout: Layout, expected: dict[str, torch.Tensor]) -> None:
    """Another process finds in the memory of a layout what the checkpoint has there."""
    check(layout, "rank")
    memory = {storage.name: shm.open_storage(storage, "rank", "engine") for storage in layout.storages}
    for tensor in layout.tensors:
        for piece in layout.pieces_of(tensor.name):
            flat = memory[piece.parameter].view(torch.float32)
            there = flat.as_strided(piece.box.shape, [step // 4 for step in piece.strides], piece.offset // 4)
            assert torch.equal(there, expected[tensor.name][piece.box.region]), tensor.name
