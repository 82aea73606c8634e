"""The valid part of a configuration that is refused: what else is wrong with it can be looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.errors import ConfigError
from tandem.config import load_config, valid_part
from tandem.config.conform import STAND_IN

GOOD: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 4},
    "policy": {
        "model_name": "model",
        "train_global_batch_size": 8,
        "max_total_sequence_length": 32,
        "generation": {"max_new_tokens": 8},
    },
    "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
}


def write(**sections: Any) -> Path:
    Path("mine.yaml").write_text(
        yaml.safe_dump({key: {**GOOD.get(key, {}), **sections.get(key, {})} for key in GOOD | sections})
    )
    return Path("mine.yaml")


def test_wrong_keys_are_left_out_and_the_others_are_there() -> None:
    path = write(grpo={"sede": 1}, policy={"precision": "float33", "train_micro_batch_size": 3})
    with pytest.raises(ConfigError):
        load_config(path)
    part = valid_part(path, ["data.num_train=many"])
    assert part is not None
    assert (part.config.policy.model_name, part.config.data.train_data_path) == ("model", "train.jsonl")
    assert part.config.policy.tokenizer.name == "model", "what is derived is derived"
    assert part.source_of("policy.model_name") == "mine.yaml"
    assert part.source_of("data.num_train") == "command line"


@pytest.mark.parametrize(
    "policy",
    [{"model_name": 3}, {"model_name": 3, "max_total_sequence_length": "x"}, {"train_global_batch_size": None}],
)
def test_what_is_required_and_wrong_has_a_stand_in(policy: dict[str, Any]) -> None:
    part = valid_part(write(policy=policy))
    assert part is not None
    assert part.config.policy.model_name == (STAND_IN if "model_name" in policy else "model")
    assert part.config.data.train_data_path == "train.jsonl"


def test_what_is_no_configuration_has_no_valid_part() -> None:
    assert valid_part("nothing.yaml") is None
    Path("mine.yaml").write_text("a: [")
    assert valid_part("mine.yaml") is None
