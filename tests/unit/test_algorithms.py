"""The declarations of the algorithms: what they name exists, and nothing else in the tree knows algorithms by name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.common.user_code import named
from tandem.config import Config, build_config
from tandem.config.schema import declarations as algorithms
from tandem.config.schema.columns import BUILT_IN, MODELS, TAKEN, TEACHER
from tandem.config.schema.declarations import ALGORITHMS, Algorithm
from tandem.samples import batch
from tandem.samples.batch import SAMPLES, TABLE

ROOT = Path(__file__).parents[2]
DECLARED = Path(algorithms.__file__)
WRITERS = (
    "launch/starting.py",
    "tandem/coordinator/evaluation.py",
    "commands/init.py",
    "config/nemo_eval.py",
    "coordinator/tinker/driving.py",
)
"""What writes configurations for users: these have an algorithm's name in them. What runs one asks for none."""
SECTIONS = {
    "GrpoConfig",
    "PpoConfig",
    "SftConfig",
    "DpoConfig",
    "RewardModelConfig",
    "DistillationConfig",
    "OffPolicyDistillation",
}

MINIMAL = {"policy": {"model_name": "model"}, "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"}}
DATA = {"dpo": {"rejected_template": "0"}, "rm": {"rejected_template": "0"}}
HELD: dict[str, dict[str, object]] = {name: {"teacher": {}} for name in ("distillation", "off_policy_distillation")}


def config_of(name: str, **sections: object) -> Config:
    data = {**MINIMAL["data"], **DATA.get(name, {})}
    return build_config(MINIMAL | {"algorithm": name, "data": data, **HELD.get(name, {}), **sections})


def questions_of(path: Path) -> Iterator[str]:
    """Yield each place of a module that compares with an algorithm's name, or asks which section it has."""
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[ast.expr] = []
        match node:
            case ast.Compare(left=ast.Attribute(attr="name")):
                pass  # an estimator of advantages may have the name of an algorithm
            case ast.Compare():
                found = [node.left, *node.comparators]
            case ast.MatchValue():
                found = [node.value]
            case ast.Dict():
                found = [key for key in node.keys if key is not None]
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                names = {each.id for each in ast.walk(kinds) if isinstance(each, ast.Name)}
                if names & SECTIONS:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} isinstance of {', '.join(sorted(names & SECTIONS))}"
        for each in (inner for expression in found for inner in ast.walk(expression)):
            if isinstance(each, ast.Constant) and each.value in ALGORITHMS:
                yield f"{path.relative_to(ROOT)}:{each.lineno} {each.value!r}"


def test_nobody_asks_for_an_algorithm_by_name() -> None:
    found = [path for folder in ("libs", "services") for path in (ROOT / folder).rglob("*.py") if path != DECLARED]
    modules = [path for path in found if not any(writer in str(path) for writer in WRITERS)]
    assert 100 < len(modules) < len(found) < len(modules) + 10
    assert [place for path in modules for place in questions_of(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        'config.algorithm != "grpo"',
        'config.algorithm in ("sft", "dpo")',
        '{"grpo": 1}[config.algorithm]',
        "isinstance(section, GrpoConfig)",
        "isinstance(section, (SftConfig, DpoConfig))",
        'match config.algorithm:\n    case "dpo":\n        pass',
    ],
)
def test_a_question_for_a_name_would_be_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "asks.py").write_text(text)
    assert list(questions_of(tmp_path / "asks.py"))


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_what_a_declaration_names_is_there(algorithm: Algorithm) -> None:
    config = config_of(algorithm.name)
    assert config.declaration is algorithm
    assert config.algorithm_section is getattr(config, algorithm.name)
    paths = [(algorithm.running, ["config", "tokenizer"])]
    for training in algorithm.trainings:
        assert hasattr(config, training.loss_section)
        paths.append((training.loss, ["settings", "counts", "device"]))
    paths += [(path, ["config", "scored"]) for path in [config.advantage_estimator] if path]
    for path, first in paths:
        assert list(inspect.signature(named(path)).parameters) == first
    assert all(callable(rule) for path in algorithm.rules for rule in named(path))
    assert config.checkpointing.metric_name == algorithm.metrics[0]
    assert config.policy.train_global_batch_size == algorithm.train_global_batch_size
    assert ("reference" in config.holds) == config.needs_reference


def test_the_models_that_score_a_batch() -> None:
    plain = config_of("grpo")
    assert plain.scored_by(1) == ("reference",)
    assert plain.scored_by(2) == ("policy", "reference")
    free = config_of("grpo", loss_fn={"reference_policy_kl_penalty": 0})
    assert free.scored_by(1) == ()
    assert free.holds == ("policy",)
    assert not config_of("sft").needs_reference
    assert config_of("dpo").needs_reference


def test_a_teacher_says_rows_of_numbers() -> None:
    for name in HELD:
        plain = config_of(name, **{name: {"topk_logits_k": 3}})
        assert plain.holds == ("policy", "teacher")
        assert plain.scored_by(1) == ("teacher",)
        columns = plain.columns_of(1)
        assert [(each.number, each.num_each and each.num_each(plain)) for each in columns] == [(0, 3), (1, 3)]
    with pytest.raises(ConfigError, match="teacher: null, but distillation needs a model to learn from"):
        build_config(MINIMAL | {"algorithm": "distillation"})


def test_models_are_trained_in_order_and_the_policy_not_from_the_first_step_on() -> None:
    plain = config_of("grpo")
    assert plain.declaration.trains == plain.trained_in(1) == ("policy",)
    later = config_of("ppo", ppo={"policy_training_start_step": 2}, loss_fn={"reference_policy_kl_penalty": 0})
    assert [later.trained_in(step) for step in (1, 2, 3)] == [("value",), ("value",), ("value", "policy")]
    assert later.holds == ("policy", "value")
    assert later.scored_by(1) == ("value",)
    validates = config_of("ppo", ppo={"max_num_steps": 0})
    assert validates.holds == ("policy",)


def test_an_array_of_every_column_is_where_its_source_has_it() -> None:
    sources = {"engine": (SAMPLES, "T"), "coordinator": (TABLE, "S")}
    for column in BUILT_IN.values():
        if column.source in sources:
            names, axis = sources[column.source]
            assert f"{column.name}_{axis}" in names
            assert batch.DECLARED[f"{column.name}_{axis}"] == column.dtype
        else:
            assert column.model == (None if column.source == "trainer" else column.source)
    trainings = [training for algorithm in ALGORITHMS.values() for training in algorithm.trainings]
    assert {column.name for training in trainings for column in training.columns} <= set(BUILT_IN)
    of_sequences = {name.removesuffix("_S") for name in TABLE if name.endswith("_S")}
    assert of_sequences == TAKEN - {TEACHER} | {
        name for name, column in BUILT_IN.items() if column.source == "coordinator"
    }


def test_the_step_of_a_trainer_knows_no_model_but_the_policy() -> None:
    path = ROOT / "services/trainer/src/tandem/trainer/step.py"
    said = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert said & {*MODELS} == {"policy"}


def test_a_step_has_so_many_optimizer_steps() -> None:
    assert [config_of(name).num_optimizer_steps for name in ALGORITHMS] == [1, 4, 1, 1, 1, 2, 1]
    several = config_of(
        "grpo",
        grpo={"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
        policy={"model_name": "model", "train_global_batch_size": 8, "train_micro_batch_size": 8},
    )
    assert (several.units_per_step, several.num_optimizer_steps) == (32, 4)


def test_logits_are_divided_by_the_temperature_that_samples_are_drawn_at() -> None:
    policy = {"model_name": "model", "generation": {"temperature": 0.5}}
    found = {name: config_of(name, policy=policy).scoring_temperature for name in ALGORITHMS}
    assert {name for name, temperature in found.items() if temperature == 0.5} == {"grpo", "ppo", "distillation"}
    assert {found[name] for name in ("sft", "dpo", "rm", "off_policy_distillation")} == {1.0}


def test_an_algorithm_that_is_not_declared() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(MINIMAL | {"algorithm": "grp"})
    assert (
        str(caught.value) == "configuration: algorithm: 'grp' is not one of distillation, dpo, grpo, "
        "off_policy_distillation, ppo, rm, sft; did you mean 'grpo'?"
    )
    with pytest.raises(ConfigError, match=r"algorithm: \[\"grpo\"\] is not one of distillation, dpo, "):
        build_config(MINIMAL | {"algorithm": ["grpo"]})
