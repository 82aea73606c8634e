"""Training of adapters on Megatron-Core against a plain loop with PEFT, in which fused layers share a matrix."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.common.errors import TandemError
from tandem.config import Config
from tandem.config.models.lora import is_adapter
from tandem.trainer.backends import make_backend
from tests.harness.trainers.megatron_harness import (
    CP2,
    EP2,
    OPTIMIZER,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    make_checkpoint,
    tensors_in,
)
from tests.harness.trainers.reference_lora import (
    Start,
    Trained,
    assert_same_training,
    plain_steps,
    sft_loss,
    write_adapters,
)
from tests.harness.trainers.trainer_harness import (
    digest_of,
    make_config,
    make_groups,
    run_ranks,
    said_by,
    train_on,
)

pytestmark = pytest.mark.usefixtures("rank_server")

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
FULL = {"activation_checkpointing": True}
BALANCED = {"moe_router_bias_update_rate": 0.01}
"""Which would change what routers add to their scores, and so the base."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recomputed": ("qwen3 tied", 1, FULL),
    "TP2": ("qwen3 tied", 2, TP2),
    "TP2+SP+DP2": ("qwen3 tied", 4, TP2 | SP),
    "PP2 with virtual stages": ("qwen3 tied", 2, PP2 | VIRTUAL),
    "CP2": ("qwen3 tied", 2, CP2),
    "fused in the checkpoint": ("phi3", 1, {}),
    "fused in the checkpoint, TP2+SP": ("phi3", 2, TP2 | SP),
    "fused in the checkpoint, PP2": ("phi3", 2, PP2),
    "shared experts, TP2+SP+EP2": ("glm4_moe", 2, TP2 | SP | EP2 | BALANCED),
}


MODELS = {"qwen3 tied": True, "phi3": False, "glm4_moe": True}
"""And whether Megatron-Core fuses what a checkpoint has apart."""


class Plain(NamedTuple):
    """What a plain loop comes to."""

    start: Start
    trained: Trained

    @property
    def folder(self) -> Path:
        return self.start.folder


@pytest.fixture(scope="module")
def plains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plain]:
    """SFT of adapters of each model, a conversation at a time."""
    found = {}
    for model, shares in MODELS.items():
        folder = make_checkpoint(tmp_path_factory.mktemp("model"), model)
        start = write_adapters(folder, tmp_path_factory.mktemp("adapters"), shares=shares)
        found[model] = Plain(start, plain_steps(start, BATCHES, sft_loss))
    return found


@pytest.fixture
def plain(plains: dict[str, Plain]) -> Plain:
    return plains["qwen3 tied"]


def config_of(folder: Path, megatron: dict[str, Any], peft: dict[str, Any], **keys: Any) -> Config:
    settings = {
        "enabled": True,
        "optimizer": OPTIMIZER,
        **megatron,
        "peft": {"enabled": True, "dim": 4, "alpha": 16, **peft},
    }
    return make_config(folder, **{"algorithm": "sft", **keys}, megatron_cfg=settings)


def rank(rank: int, config: Config, folder: Path) -> Any:
    """Train on all batches; nothing but adapters may change."""
    backend: Any = make_backend(config, checkpoint=None)
    weights = backend._held["policy", 0].weights
    base = {name: each.detach().clone() for name, each in weights.parameters.items() if not is_adapter(name)}
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES]
    for name, before in base.items():
        assert torch.equal(before, weights.parameters[name]), name
    backend.save(folder).num_bytes.result()
    tensors = [each for each in backend.weights().layout.tensors if is_adapter(each.name) or each.is_frozen]
    assert len(tensors) == len(backend.weights().layout.tensors)
    assert {each.product_scale for each in tensors if each.name.endswith("lora_B.weight")} == {4.0}
    return [(each["loss"], each["grad_norm"]) for each in metrics]


@pytest.mark.parametrize(("model", "num_ranks", "megatron"), CASES.values(), ids=CASES)
def test_three_steps_are_those_of_plain_peft(
    model: str, num_ranks: int, megatron: dict[str, Any], plains: dict[str, Plain], tmp_path: Path
) -> None:
    start, trained = plains[model]
    adapters: dict[str, Any] = {"restore_from": str(start.adapters)}
    if model == "glm4_moe":
        adapters["exclude_modules"] = ["*.mlp.experts.*"]
    config = config_of(start.folder, megatron, adapters, trainers=num_ranks)
    for steps in run_ranks(num_ranks, rank, config, tmp_path):
        assert_same_training(steps, tmp_path / "policy", start, trained)


def resume_rank(rank: int, config: Config, num: int, checkpoint: Path | None, folder: Path | None) -> Any:
    """Train on the first, or with a checkpoint the last, so many batches."""
    backend = make_backend(config, checkpoint=checkpoint)
    batches = BATCHES[-num:] if checkpoint is not None else BATCHES[:num]
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    if folder is not None:
        backend.save(folder).num_bytes.result()
    return metrics, digest_of(backend)


def test_new_adapters_are_resumed_to_the_bit_and_on_other_ranks(plain: Plain, tmp_path: Path) -> None:
    config = config_of(plain.folder, TP2, {"lora_A_init_method": "kaiming"}, precision="bfloat16", trainers=2)
    whole = run_ranks(2, resume_rank, config, 3, None, None)
    run_ranks(2, resume_rank, config, 1, None, tmp_path / "step_1")
    for (metrics, digest), (later, digest_after) in zip(
        whole, run_ranks(2, resume_rank, config, 2, tmp_path / "step_1", None), strict=True
    ):
        assert later == metrics[1:]
        assert digest_after == digest
    other = config_of(plain.folder, PP2, {"lora_A_init_method": "kaiming"}, precision="bfloat16", trainers=2)
    for metrics, _ in run_ranks(2, resume_rank, other, 2, tmp_path / "step_1", None):
        for found, expected in zip(metrics, whole[0][0][1:], strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], abs=0.02), "bfloat16 rounds otherwise"


def reference_rank(rank: int, config: Config, other: Config) -> Any:
    """Train with adapters; then ask for a reference, of them and of a backend that holds one of its own."""
    said: list[Any] = []
    for settings in (config, other):
        backend: Any = make_backend(settings, checkpoint=None)
        metrics = [train_on(backend, batch, settings).metrics for batch in BATCHES]
        said += [said_by(backend, BATCHES[0], settings, model) for model in ("reference", "policy")]
        said += [[name for name, _ in backend._held], metrics]
        backend.close()
    return said


def test_the_reference_is_the_base_and_no_second_copy(plain: Plain) -> None:
    keys: dict[str, Any] = {"algorithm": "dpo", "train_global_batch_size": 4, "train_micro_batch_size": 2}
    config = config_of(plain.folder, TP2, {}, **keys, trainers=2)
    other = make_config(plain.folder, **keys, megatron_cfg={"enabled": True, "optimizer": OPTIMIZER, **TP2}, trainers=2)
    for mine, policy, held, metrics, theirs, _, held_there, _ in run_ranks(2, reference_rank, config, other):
        assert (held, held_there) == (["policy"], ["policy", "reference"])
        assert np.array_equal(mine, theirs), "to the bit"
        assert np.abs(mine - policy).max() > 1e-3
        assert all(np.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in metrics)


def experts_rank(rank: int, config: Config, folder: Path) -> Any:
    backend = make_backend(config, checkpoint=None)
    metrics = [train_on(backend, batch, config).metrics for batch in BATCHES]
    backend.save(folder).num_bytes.result()
    return [each["grad_norm"] for each in metrics]


def refused_rank(rank: int, config: Config) -> str:
    with pytest.raises(TandemError) as raised:
        make_backend(config, checkpoint=None)
    return str(raised.value)


def test_what_can_have_adapters_beside_experts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe")
    sizes = TP2 | SP | {"expert_model_parallel_size": 2}
    config = config_of(folder, sizes, {"exclude_modules": ["*.mlp.experts.*"]}, trainers=2)
    assert all(norm > 0 for norms in run_ranks(2, experts_rank, config, tmp_path) for norm in norms)
    names = tensors_in(tmp_path / "policy")
    assert "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight" in names
    assert not [name for name in names if "mlp" in name]


def test_what_is_refused(plain: Plain, tmp_path: Path) -> None:
    experts = make_checkpoint(tmp_path / "experts", "qwen3_moe")
    uneven = tmp_path / "uneven"
    shutil.copytree(plain.start.adapters, uneven)
    tensors = load_file(uneven / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.2.self_attn.k_proj.lora_A.weight"] += 1.0
    save_file(tensors, uneven / "adapter_model.safetensors")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (
            experts,
            {"exclude_modules": ["*.layers.0.mlp.experts.*"]},
            "adapters of routed experts (decoder.layers.1.mlp.experts.linear_fc1) are not built",
        ),
        (
            plain.folder,
            {"target_modules": ["linear_kqv"]},
            "no layer is called 'linear_kqv'; did you mean 'linear_qkv'?",
        ),
        (plain.folder, {"restore_from": str(uneven)}, "model.layers.2.self_attn.k_proj differ"),
    ]
    for folder, adapters, expected in cases:
        (said,) = run_ranks(1, refused_rank, config_of(folder, {}, adapters))
        assert expected in said
