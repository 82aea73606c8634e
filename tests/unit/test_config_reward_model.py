"""The configuration of reward models: what they share with pairs of DPO, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import Config, build_config

POLICY: dict[str, Any] = {"model_name": "model", "max_total_sequence_length": 32, "train_global_batch_size": 16}
DATA = {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "0"}
MEGATRON: dict[str, Any] = {"enabled": True}


def rm(policy: dict[str, Any] | None = None, **section: Any) -> Config:
    return build_config({"rm": section, "policy": POLICY | (policy or {}), "data": DATA})


def test_batches_count_pairs() -> None:
    config = rm()
    assert (config.algorithm, config.sequences_per_sample) == ("rm", 2)
    assert config.policy.sequence_packing.train_mb_tokens == 2 * 32 * config.policy.train_micro_batch_size
    assert config.declaration.head_of("policy") == "score"
    assert not config.needs_reference


def test_its_model_may_say_what_it_is_and_no_other_may() -> None:
    said = {"reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}}
    assert rm(said).policy.reward_model_cfg.enabled
    with pytest.raises(NotSupportedYet) as caught:
        build_config({"dpo": {}, "policy": POLICY | said, "data": DATA})
    assert str(caught.value) == "configuration: not supported yet: policy.reward_model_cfg.enabled (true)"


@pytest.mark.parametrize(
    ("policy", "section", "expected"),
    [
        (
            {"reward_model_cfg": {"enabled": True, "reward_model_type": "regression"}},
            {},
            "policy.reward_model_cfg.reward_model_type: regression, but training on pairs needs bradley_terry",
        ),
        (
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 48}},
            {},
            "policy.sequence_packing.train_mb_tokens: 48 is less than a pair of policy.max_total_sequence_length (64)",
        ),
        ({}, {"val_perod": 1}, "rm.val_perod: unknown key; did you mean 'val_period'?"),
    ],
)
def test_what_is_wrong_is_one_line(policy: dict[str, Any], section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rm(policy, **section)
    assert str(caught.value) == f"configuration: {expected}"


def test_a_schedule_of_a_known_length_needs_no_number_of_steps() -> None:
    cosine = {"lr_decay_style": "cosine"}
    assert rm({"megatron_cfg": MEGATRON | {"scheduler": cosine | {"lr_decay_iters": 9}}}).rm.max_num_steps == -1
    assert rm({"megatron_cfg": MEGATRON | {"scheduler": cosine}}, max_num_steps=9).rm.max_num_steps == 9
