"""However ranks share the work under the DTensor backend, the numbers are those of Hugging Face in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from tandem.config import Config
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.trainers.reference import Numbers, assert_same_numbers, numbers_of, plain_numbers
from tests.harness.trainers.trainer_harness import ADAMW, FAMILIES, make_batch, make_config, make_groups, make_model

pytestmark = pytest.mark.usefixtures("rank_server")

TEMPERATURE = 0.7
KL = 0.1
BATCHES = [make_batch(seed=seed) for seed in range(2)]

TP2: dict[str, Any] = {"tensor_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
CP2: dict[str, Any] = {"context_parallel_size": 2}
EP2: dict[str, Any] = {"expert_parallel_size": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
HSDP: dict[str, Any] = {"dp_replicate_size": 2}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
PACKED: dict[str, Any] = {"packed": True}
"""Rows of 48 tokens: two or three sequences."""


def own_plan() -> dict[str, ParallelStyle]:
    """A plan in torch's own styles, which cuts only the feed-forward layers and the sequence between them."""
    whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.layers.*.input_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts=whole[0], desired_input_kwarg_layouts=whole[1], use_local_output=True
        ),
        "model.layers.*.self_attn.o_proj": ColwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def linear_plan() -> dict[str, ParallelStyle]:
    """A plan of linear layers alone: nothing of embeddings, norms of heads and the output layer."""
    attention, feed_forward = "model.layers.*.self_attn", "model.layers.*.mlp"
    by_rows = [f"{attention}.{part}_proj" for part in "qkv"] + [
        f"{feed_forward}.{part}_proj" for part in ("gate", "up")
    ]
    by_columns = [f"{attention}.o_proj", f"{feed_forward}.down_proj"]
    return {name: ColwiseParallel() for name in by_rows} | {name: RowwiseParallel() for name in by_columns}


LINEAR: dict[str, Any] = {"custom_parallel_plan": f"{__name__}.linear_plan"}
OWN: dict[str, Any] = {"custom_parallel_plan": f"{__name__}.own_plan"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "FSDP2": ("qwen3", 2, {}),
    "TP2 llama": ("llama", 2, TP2),
    "TP2 qwen2": ("qwen2", 2, TP2),
    "TP2 qwen3": ("qwen3", 2, TP2),
    "TP2 qwen3_moe": ("qwen3_moe", 2, TP2),
    "TP2 + SP": ("qwen3", 2, TP2 | SP),
    "TP2 + SP, biases": ("llama with biases", 2, TP2 | SP),
    "TP2 + SP of experts": ("qwen3_moe", 2, TP2 | SP),
    "FSDP2 + TP2": ("qwen2", 4, TP2),
    "FSDP2 + TP2 + SP": ("qwen3", 4, TP2 | SP),
    "a plan of one's own": ("llama", 2, TP2 | SP | OWN),
    "a plan of linear layers, embeddings tied": ("qwen3", 2, TP2 | LINEAR),
    "CP2": ("qwen3", 2, CP2),
    "CP2 + TP2": ("qwen2", 4, CP2 | TP2),
    "CP2 + TP2 + SP": ("qwen3_moe", 4, CP2 | TP2 | SP),
    "FSDP2 + CP2": ("llama", 4, CP2),
    "CPU offload": ("qwen3", 2, {"cpu_offload": True}),
    "CPU offload, FSDP2 + TP2": ("llama", 4, TP2 | {"cpu_offload": True}),
    "packed, FSDP2": ("qwen3", 2, PACKED),
    "packed, TP2 + SP": ("qwen3_moe", 2, PACKED | TP2 | SP),
    "packed, CP2 + TP2": ("qwen2", 4, PACKED | CP2 | TP2),
    "recomputed activations, TP2 + SP": ("qwen3", 2, TP2 | SP | RECOMPUTED),
    "EP2": ("qwen3_moe", 2, EP2),
    "EP2 + FSDP2": ("qwen3_moe", 4, EP2),
    "EP4": ("qwen3_moe", 4, EP4),
    "EP2 in replicas": ("qwen3_moe", 4, EP2 | HSDP),
    "EP2 + CP2": ("qwen3_moe", 4, EP2 | CP2),
    "EP2 + TP2": ("qwen3_moe", 4, EP2 | TP2),
    "EP2 + TP2 + SP": ("glm4_moe", 4, EP2 | TP2 | SP),
    "EP2 + FSDP2 + TP2 + SP": ("qwen3_moe", 8, EP2 | TP2 | SP),
    "EP2, packed, recomputed activations": ("qwen3_moe", 2, EP2 | PACKED | RECOMPUTED),
    "EP2, CPU offload": ("qwen3_moe", 4, EP2 | {"cpu_offload": True}),
    "EP2 glm4_moe": ("glm4_moe", 2, EP2),
    "EP2 gpt_oss": ("gpt_oss", 4, EP2),
    "HSDP": ("qwen3", 4, HSDP),
    "HSDP + TP2": ("qwen2", 4, HSDP | TP2),
    "HSDP + CP2": ("llama", 4, HSDP | CP2),
    "TP2 phi3": ("phi3", 2, TP2),
    "TP2 gpt_oss": ("gpt_oss", 2, TP2),
    "EP2 mixtral": ("mixtral", 2, EP2),
    **{f"TP2 {name}, by Transformers' plan": (name, 2, TP2) for name in ("smollm3", "seed_oss", "helium", "gemma")},
    **{f"TP2 + SP {name}": (name, 2, TP2 | SP) for name in FAMILIES},
    **{f"packed, CP2 {name}": (name, 2, PACKED | CP2) for name in (*FAMILIES, "gemma2")},
}


MAKE = functools.partial(DTensorBackend, checkpoint=None)


def config_of(model: Path, num_ranks: int, settings: dict[str, Any], **policy: Any) -> Config:
    packing = {"train_mb_tokens": 48, "logprob_mb_tokens": 96, "sequence_length_round": 8}
    return make_config(
        model,
        loss={"reference_policy_kl_penalty": KL},
        temperature=TEMPERATURE,
        trainers=num_ranks,
        dtensor_cfg={key: value for key, value in settings.items() if key != "packed"},
        sequence_packing={"enabled": "packed" in settings, **packing},
        **{"share_prompts": False, **policy},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models lie, each in a folder of its architecture's name."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The numbers of an architecture's model in one process, each computed once."""

    @functools.cache
    def numbers(architecture: str) -> Numbers:
        make_model(folder / architecture, architecture)
        return plain_numbers(folder / architecture, BATCHES, temperature=TEMPERATURE, kl=KL)

    return numbers


@pytest.mark.parametrize(("architecture", "num_ranks", "settings"), CASES.values(), ids=CASES)
def test_the_numbers_are_those_of_one_process(
    architecture: str, num_ranks: int, settings: dict[str, Any], plain: Any, folder: Path, tmp_path: Path
) -> None:
    expected = plain(architecture)
    config = config_of(folder / architecture, num_ranks, settings)
    found = numbers_of(num_ranks, MAKE, config, BATCHES, tmp_path)
    assert_same_numbers(found, expected, 1e-5)
    assert max(norm for _, norm in expected.steps) > 1.0, "clipping is part of what is compared"


@pytest.mark.parametrize("settings", [TP2, TP2 | SP], ids=["TP2", "TP2 + SP"])
def test_shared_prompts_change_no_number(settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    batches = [make_groups(4, 4, seed=seed) for seed in range(2)]
    expected = plain_numbers(model, batches, temperature=TEMPERATURE, kl=KL)
    config = config_of(model, 2, settings, share_prompts=True, train_micro_batch_size=4)
    assert_same_numbers(numbers_of(2, MAKE, config, batches, tmp_path / "saved"), expected, 1e-5)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("qwen3", TP2 | SP), ("qwen3", CP2), ("qwen3_moe", EP2)],
    ids=["TP2 + SP", "CP2", "EP2"],
)
def test_bfloat16_stays_close(
    architecture: str, settings: dict[str, Any], plain: Any, folder: Path, tmp_path: Path
) -> None:
    expected = plain(architecture)
    config = config_of(folder / architecture, 2, settings, precision="bfloat16")
    found = numbers_of(2, MAKE, config, BATCHES, tmp_path)
    assert abs(found.logprobs_T - expected.logprobs_T).max() < 0.1
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, expected.steps, strict=True):
        assert loss == pytest.approx(expected_loss, abs=0.02)
        assert norm == pytest.approx(expected_norm, rel=0.05)
    step = ADAMW["lr"]
    for name, tensor in expected.weights.items():
        assert (found.weights[name] - tensor).abs().max() <= 2 * len(BATCHES) * step, name
