"""The configuration of vision models: what is not built is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config
from tandem.config.models.families import MEGATRON_VISION
from tandem.config.notice_rules import notices
from tests.harness.vision_models import write_vision_files

DATA = {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "0"}
FREEZE = "policy.dtensor_cfg.automodel_kwargs.freeze_config"


def config_of(folder: Path, policy: dict[str, Any] | None = None, algorithm: str = "sft", **others: Any) -> Config:
    own = {"model_name": str(folder), "max_total_sequence_length": 512, **(policy or {})}
    return build_config({algorithm: {}, "policy": own, "data": DATA, **others})


def frozen(**parts: Any) -> dict[str, Any]:
    return {"dtensor_cfg": {"automodel_kwargs": {"freeze_config": parts}}}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "idefics3"])
def test_models_that_see_are_trained_by_the_dtensor_backend(family: str, tmp_path: Path) -> None:
    folder = write_vision_files(family, tmp_path, num_key_value_heads=2)
    assert config_of(folder).policy.dtensor_cfg.enabled
    tensor_ranks = {"dtensor_cfg": {"tensor_parallel_size": 2}}
    assert config_of(folder, tensor_ranks, cluster={"trainers": 2}).policy.dtensor_cfg.tensor_parallel_size == 2


@pytest.mark.parametrize("family", MEGATRON_VISION)
def test_some_are_trained_by_megatron_core(family: str, tmp_path: Path) -> None:
    megatron = {"enabled": True, "tensor_model_parallel_size": 2, "sequence_parallel": True, "optimizer": {"lr": 1e-6}}
    policy = {"megatron_cfg": megatron, **frozen(freeze_vision_tower=True)}
    config = config_of(write_vision_files(family, tmp_path), policy, cluster={"trainers": 2})
    assert config.policy.megatron_cfg.enabled


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("family", "algorithm", "policy", "expected"),
    [
        (
            "qwen2_5_vl",
            "sft",
            {"dtensor_cfg": {"context_parallel_size": 2}},
            "policy.dtensor_cfg.context_parallel_size: 2, which with images is not built",
        ),
        (
            "smolvlm",
            "sft",
            {"dtensor_cfg": {"tensor_parallel_size": 2, "sequence_parallel": True, "custom_parallel_plan": "own.plan"}},
            "policy.dtensor_cfg.sequence_parallel: true, which with a plan for a vision model (own.plan) is not",
        ),
        (
            "smolvlm",
            "sft",
            {"megatron_cfg": {"enabled": True, "context_parallel_size": 2}},
            "policy.megatron_cfg.context_parallel_size: 2, which with images is not built",
        ),
        (
            "gemma3",
            "sft",
            {"megatron_cfg": {"enabled": True}},
            "policy.megatron_cfg.enabled: true, but Megatron-Core trains qwen2_5_vl, qwen3_vl, smolvlm, idefics3 with "
            "images here, not gemma3",
        ),
        (
            "qwen3_vl",
            "sft",
            {"megatron_cfg": {"enabled": True, "pipeline_model_parallel_size": 3, "optimizer": {"lr": 1e-6}}},
            "policy.megatron_cfg.pipeline_model_parallel_size: images reach the first 2 layers of a qwen3_vl, and the "
            "first stage has 1; num_layers_in_first_pipeline_stage may give it more",
        ),
        (
            "gemma3",
            "grpo",
            {"generation": {"backend": "vllm"}},
            "policy.generation.backend: vllm, but refits write vLLM's qwen2_5_vl, qwen3_vl, smolvlm, idefics3, not its "
            "gemma3",
        ),
        (
            "smolvlm",
            "grpo",
            {"generation": {"backend": "vllm", "vllm_cfg": {"pipeline_parallel_size": 2}}},
            "policy.generation.vllm_cfg.pipeline_parallel_size: 2, which with images is not built",
        ),
        (
            "smolvlm",
            "grpo",
            {"generation": {"backend": "vllm", "vllm_cfg": {"precision": "fp8"}}},
            "policy.generation.vllm_cfg.precision: fp8, which with images is not built",
        ),
        (
            "qwen3_vl",
            "grpo",
            {"generation": {"backend": "vllm", "vllm_kwargs": {"speculative_config": DRAFTS}}},
            "policy.generation.vllm_kwargs.speculative_config: cannot be combined with a vision model",
        ),
        ("smolvlm", "rm", {}, "policy.model_name: smolvlm: a score head is not built with images"),
        (
            "smolvlm",
            "sft",
            frozen(freeze_vison_tower=True),
            f"{FREEZE}.freeze_vison_tower: unknown key; did you mean 'freeze_vision_tower'?",
        ),
        (
            "smolvlm",
            "sft",
            frozen(freeze_vision_tower="yes"),
            f"{FREEZE}.freeze_vision_tower: 'yes' is not true or false",
        ),
    ],
)
def test_what_is_not_built_is_refused(
    family: str, algorithm: str, policy: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    sizes = policy.get("megatron_cfg", {})
    num = sizes.get(
        "pipeline_model_parallel_size", 2 if "dtensor_cfg" in policy or "context_parallel_size" in sizes else 1
    )
    trainers = {"cluster": {"trainers": num}}
    with pytest.raises(ConfigError) as caught:
        config_of(write_vision_files(family, tmp_path, num_key_value_heads=2), policy, algorithm, **trainers)
    assert expected in str(caught.value)


def test_only_other_arguments_of_nemo_rls_library_have_no_effect(tmp_path: Path) -> None:
    folder = write_vision_files("smolvlm", tmp_path)
    quiet = config_of(folder, frozen(freeze_vision_tower=True, freeze_audio_tower=True))
    told = config_of(folder, {"dtensor_cfg": {"automodel_kwargs": {"force_hf": True, "freeze_config": {}}}})
    key = "policy.dtensor_cfg.automodel_kwargs"
    assert not [line for line in notices(quiet) if key in line]
    assert [line for line in notices(told) if key in line and "force_hf" in line and "freeze_config" not in line]
