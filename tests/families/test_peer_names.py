"""Every setting of TRL and verl gets an answer: its name here, or that there is nothing like it.

The fields are read from the sources of TRL 1.16.0 and verl 0.9.0, which are installed without what they import.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.config.peer_names import TRL, find_peer_keys
from tandem.config.schema.declarations import ALGORITHMS

OF_TRL = {"GRPOConfig": "grpo_config.py", "SFTConfig": "sft_config.py", "DPOConfig": "dpo_config.py"}
OF_VERL = {
    "ActorConfig": ("workers/config/actor.py", "actor_rollout_ref.actor"),
    "FSDPActorConfig": ("workers/config/actor.py", "actor_rollout_ref.actor"),
    "McoreActorConfig": ("workers/config/actor.py", "actor_rollout_ref.actor"),
    "PolicyLossConfig": ("workers/config/actor.py", "actor_rollout_ref.actor.policy_loss"),
    "OptimizerConfig": ("workers/config/optimizer.py", "actor_rollout_ref.actor.optim"),
    "FSDPOptimizerConfig": ("workers/config/optimizer.py", "actor_rollout_ref.actor.optim"),
    "AlgoConfig": ("trainer/config/algorithm.py", "algorithm"),
    "KLControlConfig": ("trainer/config/algorithm.py", "algorithm.kl_ctrl"),
    "FilterGroupsConfig": ("trainer/config/algorithm.py", "algorithm.filter_groups"),
    "RolloutCorrectionConfig": ("trainer/config/algorithm.py", "algorithm.rollout_correction"),
    "RolloutConfig": ("workers/config/rollout.py", "actor_rollout_ref.rollout"),
    "HFModelConfig": ("workers/config/model.py", "actor_rollout_ref.model"),
}


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def fields_of(file: Path, name: str) -> Iterator[str]:
    """Yield the fields that a class of a file declares itself."""
    (defined,) = (
        each for each in ast.parse(file.read_text()).body if isinstance(each, ast.ClassDef) and each.name == name
    )
    for node in defined.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            yield node.target.id


@pytest.mark.parametrize("name", OF_TRL)
def test_every_field_of_trl_has_a_row(name: str) -> None:
    fields = [*fields_of(folder_of("trl") / "trainer" / OF_TRL[name], name)]
    assert len(fields) > 20
    assert not {*fields} - TRL.keys()


def test_every_field_of_transformers_that_is_common_is_one_of_its_arguments() -> None:
    """The rows of TRL's table are fields of TRL's or Transformers' classes, or were in an earlier release."""
    import transformers

    own = {field for name, file in OF_TRL.items() for field in fields_of(folder_of("trl") / "trainer" / file, name)}
    arguments = transformers.TrainingArguments.__dataclass_fields__
    assert TRL.keys() - own - arguments.keys() <= {"max_prompt_length", "warmup_ratio", "logging_dir"}
    assert not arguments.keys() - TRL.keys()


@pytest.mark.parametrize("name", OF_VERL)
def test_every_field_of_verl_has_an_answer(name: str) -> None:
    file, section = OF_VERL[name]
    fields = [*fields_of(folder_of("verl") / file, name)]
    assert len(fields) > 3
    for field in fields:
        (setting,) = find_peer_keys(f"{section}.{field}", 1)
        assert setting.peer == "verl"
        assert setting.hint.startswith("; ")
    assert section in ALGORITHMS or any(find_peer_keys(f"{section}.{field}", 1)[0].equivalent for field in fields)
