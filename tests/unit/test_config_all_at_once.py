"""Everything that is wrong with a configuration is said at once: each by the file that says it, and by its full key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.errors import ConfigError, NotSupportedYet
from tandem.config import load_config
from tandem.config.load import load_evaluation

NEMO_RL = Path(__file__).parent / "nemo_rl"


def refused(over: dict[str, Any], base: Path = NEMO_RL / "grpo_math_1B.yaml") -> list[str]:
    Path("mine.yaml").write_text(yaml.safe_dump({"defaults": str(base), **over}))
    with pytest.raises(ConfigError) as caught:
        load_config("mine.yaml")
    return list(caught.value.problems)


def test_each_kind_of_mistake_in_a_nemo_rl_file_is_named_at_once() -> None:
    lines = refused(
        {
            "grpo": {"max_num_stepz": 3, "val_period": "often", "num_generations_per_prompt": "${nowhere.to.be}"},
            "policy": {"train_global_batch_size": 500, "generation": {"backend": "sglang"}},
            "data": {"train": {"dataset_name": "OpenMathInstruct-2", "max_samples": "many"}},
            "cluster": {"address": "127.0.0.1"},
        }
    )
    expected = [
        "mine.yaml: not supported yet: policy.generation.backend (sglang)",
        "mine.yaml: grpo.num_generations_per_prompt: cannot be resolved: ",
        "mine.yaml: data.train.max_samples: expected",
        "mine.yaml: grpo.max_num_stepz: unknown key; did you mean 'max_num_steps'?",
        "mine.yaml: grpo.val_period: expected an integer at least 0, got 'often'",
        "mine.yaml: cluster.address: '127.0.0.1' is not tcp://host:port or tcp://host:*",
    ]
    for begin in expected:
        assert [line for line in lines if line.startswith(begin)], (begin, lines)
    assert len(lines) == len(expected), lines


def test_the_file_that_says_it_is_named() -> None:
    Path("base.yaml").write_text(
        yaml.safe_dump(
            {"defaults": str(NEMO_RL / "grpo_math_1B.yaml"), "grpo": {"seed": "x"}, "cluster": {"address": 3}}
        )
    )
    lines = refused({"grpo": {"nonsense": 1}, "policy": {"scheduler": [{"milestones": [3]}]}}, Path("base.yaml"))
    assert {line.split(": ")[0] + " " + line.split(": ")[1] for line in lines} == {
        "base.yaml grpo.seed",
        "base.yaml cluster.address",
        "mine.yaml grpo.nonsense",
        "mine.yaml policy.scheduler",
    }


def test_what_a_mistake_alone_brings_about_is_not_said_as_well() -> None:
    """The batch fits the default of the key that is meant no better than what was written."""
    (line,) = refused({"grpo": {"num_prompts_per_stepp": 3}})
    assert line.startswith("mine.yaml: grpo.num_prompts_per_stepp: unknown key; did you mean 'num_prompts_per_step'?")


def test_keys_and_values_that_are_called_alike_hide_nothing() -> None:
    """Many keys end with `name`; and a value that is suggested is no key that was told of."""
    lines = refused(
        {
            "grpo": {"adv_estimator": {"name": "grppo"}},
            "policy": {"scheduler": [{"name": "torch.optim.lr_scheduler.LinearLRR"}]},
            "checkpointing": {"metric_name": "val:acc"},
        }
    )
    assert [line.split(": ")[1] for line in lines] == [
        "grpo.adv_estimator.name",
        "policy.scheduler[0].name",
        "checkpointing.metric_name",
    ]


def test_several_references_to_nowhere_are_all_named() -> None:
    lines = refused({"grpo": {"seed": "${a.b}", "val_period": "${c.d}"}})
    assert sorted(line.split(": ")[1] for line in lines) == ["grpo.seed", "grpo.val_period"]


def test_what_is_not_built_hides_nothing() -> None:
    over = {"policy": {"generation": {"backend": "sglang"}}, "cluster": {"address": "127.0.0.1"}}
    Path("mine.yaml").write_text(yaml.safe_dump({"defaults": str(NEMO_RL / "grpo_math_1B.yaml"), **over}))
    with pytest.raises(NotSupportedYet) as caught:
        load_config("mine.yaml")
    assert len(caught.value.problems) == 2


def test_keys_of_an_evaluation_are_those_that_were_written() -> None:
    Path("base.yaml").write_text(yaml.safe_dump({"generation": {"model_name": "model", "temperature": "warm"}}))
    Path("eval.yaml").write_text(
        yaml.safe_dump(
            {"defaults": "base.yaml", "data": {"dataset_name": "math500"}, "env": {"math": {}}, "evil": {"a": 1}}
        )
    )
    with pytest.raises(ConfigError) as caught:
        load_evaluation("eval.yaml")
    begins = [": ".join(line.split(": ")[:2]) for line in caught.value.problems]
    assert sorted(begins) == ["base.yaml: generation.temperature", "eval.yaml: evil"]
