"""Data sets in lists (``data.train``, ``data.validation``), as NeMo-RL v0.7 has them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from data_harness import character_tokenizer, data_config
from samples_harness import scored

from tandem.common.config import Config, build_config
from tandem.common.errors import ConfigError, DataError, NotSupportedYet
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.data import load_conversations, load_problems


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, numbers: Iterable[int]) -> str:
    """Write problems: what is the number?"""
    rows = [{"question": f"{number}", "reply": f"{number}"} for number in numbers]
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(rows), name)
    elif name.endswith(".csv"):
        with open(name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return name


KEYS = {"input_key": "question", "output_key": "reply"}


def listed(algorithm: str = "grpo", **data: Any) -> Config:
    """Return a configuration with such a section ``data``."""
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        algorithm: {"seed": 1},
        "policy": {"model_name": "model", "train_global_batch_size": 8, "max_total_sequence_length": 64},
        "data": {"default": KEYS, **data},
        "env": {"exact_match": {}, "math": {}} if algorithm == "grpo" else {},
    }
    if algorithm == "grpo":
        settings["grpo"] |= {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}
        settings["data"]["default"] = {**KEYS, "env_name": "exact_match"}
    return build_config(settings)


def test_one_set_each_way_needs_no_list() -> None:
    config = listed(
        train={"data_path": write("train.jsonl", range(10)), "max_samples": 7},
        validation={"data_path": write("held.csv", range(20, 23)), "repeat": 2},
    )
    assert (config.data.dataset_name, config.data.environment) == ("ResponseDataset", "exact_match")
    problems = load_problems(config)
    assert [problem.question for problem in problems.train] == [str(number) for number in range(7)]
    assert list(problems.held_out) == [""], "a set that is alone has metrics of no other name"
    assert [problem.answer for problem in problems.validation] == ["20", "21", "22"] * 2


def test_several_sets_are_drawn_from_and_each_is_validated_by_itself(here: Path) -> None:
    (here / "sum.txt").write_text("= {}")
    config = listed(
        train=[
            {"data_path": write("one.jsonl", range(10)), "split_validation_size": 0.2},
            {"data_path": write("two.parquet", range(100, 106)), "prompt_file": "sum.txt", "repeat": 2},
        ],
        validation=[{"data_path": write("three.csv", range(300, 304)), "max_samples": 3}],
    )
    problems = load_problems(config)
    assert len(problems.train) == 8 + 2 * 6
    assert {name: len(part) for name, part in problems.held_out.items()} == {"one": 2, "three": 3}
    tokenizer = character_tokenizer(config)
    running = GrpoAlgorithm(config, tokenizer)
    groups = running.prompt_groups(1, "validate", range(5))
    assert [group.problem.problem_id.split(":")[0] for group in groups] == ["one.jsonl"] * 2 + ["three.csv"] * 3
    metrics = running.validation_metrics(
        [scored(group, 0, reward=float(group >= 2), correct=group >= 2) for group in range(5)]
    )
    assert metrics["val_reward"] == pytest.approx(0.6)
    assert (metrics["val_one/reward"], metrics["val_three/reward"]) == (0.0, 1.0)
    assert (metrics["val_one/accuracy"], metrics["val_three/accuracy"]) == (0.0, 1.0)
    drawn = {
        group.problem.question: tokenizer.decode(group.prompt_ids)
        for step in range(1, 6)
        for group in running.prompt_groups(step, "train", range(4))
    }
    assert all(("=" in prompt) == (int(question) >= 100) for question, prompt in drawn.items())
    assert len(drawn) == 14, "an epoch of 20 places"


def test_conversations_are_listed_too() -> None:
    config = listed(
        "sft",
        train=[{"data_path": write("one.jsonl", range(10))}, {"data_path": write("two.csv", range(10, 16))}],
        validation=[{"data_path": write("a.jsonl", range(20, 24))}, {"data_path": write("b.jsonl", range(30, 33))}],
        shuffle=False,
    )
    assert len(load_conversations(config).train) == 16
    tokenizer = character_tokenizer(config)
    running = DataSetAlgorithm(config, tokenizer)
    assert running.validation_parts == {"a": 4, "b": 3}
    batch = running.batch(1, "train")[0].tokens
    assert batch is not None
    ends = batch.lengths_S.cumsum().tolist()
    said = [tokenizer.decode(batch.token_ids_T[end - 2 : end].tolist()) for end in ends[:3]]
    assert said == ["0", "1", "2"], "in the order of the file, as shuffle: false says"


def test_what_is_trained_on_is_not_validated_on() -> None:
    config = listed(
        train={"data_path": write("train.jsonl", range(10))},
        validation={"data_path": write("held.jsonl", range(9, 12))},
    )
    with pytest.raises(DataError, match=r"train.jsonl:10 and held.jsonl:1 hold the same problem"):
        load_problems(config)


def test_some_are_held_out_where_nothing_is_given_to_validate_on() -> None:
    path = write("train.jsonl", range(10))
    assert len(load_problems(listed(train={"data_path": path, "split_validation_size": 4})).validation) == 4
    config = listed(train=[{"data_path": path}, {"data_path": write("more.jsonl", range(50, 53))}], num_validation=3)
    problems = load_problems(config)
    assert (len(problems.train), len(problems.validation)) == (10, 3)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": {"data_path": "a.jsonl", "spilt": "x"}}, "data.train.spilt: unknown key; did you mean 'split'?"),
        ({"train": [{"split": "x"}]}, "data.train[0].dataset_name: required, but not set: expected text"),
        ({"train": 3}, "data.train: expected a mapping, or a list of mappings, got 3"),
        ({"train": [{"dataset_name": "jsonl"}]}, "data.train[0].data_path: required where dataset_name is jsonl"),
        (
            {"train": {"data_path": "a.jsonl"}, "val_data_path": "b.jsonl"},
            "data.val_data_path: data.train is given: set data.validation",
        ),
        (
            {"train": {"data_path": "a.jsonl"}, "train_data_path": "b.jsonl"},
            "data.train_data_path: 'b.jsonl', but data.train says 'a.jsonl'",
        ),
        ({"validation": {"data_path": "a.jsonl"}}, "data.validation: data.train is not given"),
    ],
)
def test_mistakes_get_a_line(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listed(**data)
    assert str(caught.value).startswith(f"configuration: {expected}")


def test_sets_of_several_environments_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedYet) as caught:
        listed(train=[{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "env_name": "math"}])
    assert str(caught.value) == "configuration: not supported yet: data.train[1].env_name (math)"


def test_a_path_without_a_known_end_is_a_name_on_the_hub() -> None:
    data = listed(train=[{"data_path": "owner/name", "split": "all"}, {"dataset_name": "gsm8k"}]).data
    assert [(view.dataset_name, view.split, view.subset) for view in data.train_sets] == [
        ("owner/name", "all", None),
        ("gsm8k", "train", "main"),
    ]


def test_epochs_end_a_run_of_rollouts() -> None:
    sets = {
        "train": {"data_path": write("train.jsonl", range(12))},
        "validation": {"data_path": write("v.jsonl", [99])},
    }
    config = listed(**sets)
    tokenizer = character_tokenizer(config)
    assert GrpoAlgorithm(config, tokenizer).num_steps == 1_000_000
    twice = msgspec.structs.replace(config, grpo=msgspec.structs.replace(config.grpo, max_num_epochs=2))
    assert GrpoAlgorithm(twice, tokenizer).num_steps == 6


def test_answers_lie_where_a_path_says(here: Path) -> None:
    (here / "deep.jsonl").write_text(json.dumps({"prompt": [{"content": "1 + 1"}], "reward": {"truth": "2"}}) + "\n")
    keys = {"input_key": "prompt.0.content", "output_key": "reward.truth"}
    config = data_config(dataset_name="jsonl", train_data_path="deep.jsonl", val_data_path="deep.jsonl", **keys)
    with pytest.raises(DataError, match="hold the same problem"):
        load_problems(config)
    config = data_config(dataset_name="jsonl", train_data_path="deep.jsonl", val_split=None, **keys, num_validation=1)
    with pytest.raises(DataError, match=r"deep.jsonl has 1 distinct problems, and with 1 of them held out"):
        load_problems(config)
