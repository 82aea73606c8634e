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

from tandem.common.errors import ConfigError, DataError
from tandem.config import Config, build_config, notices
from tandem.config.dump import make_plain
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.samples.data_sets import load_conversations, load_problems
from tandem.samples.data_sets.prompts import PromptWriter
from tandem.samples.model_files import load_tokenizer


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


def listed(algorithm: str = "grpo", checkpointing: dict[str, Any] | None = None, **data: Any) -> Config:
    """Return a configuration with such a section ``data``."""
    settings: dict[str, Any] = {
        "checkpointing": checkpointing or {},
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
    batch = running.batch(1, "train")[0]
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


def test_null_means_that_nothing_is_validated() -> None:
    train = [{"data_path": write("a.jsonl", range(10))}, {"data_path": write("b.jsonl", range(20, 25))}]
    config = listed(train=train, validation=None)
    assert (config.data.num_validation, config.has_validation) == (0, False)
    assert config.checkpointing.metric_name == "reward", "the default is a metric that is measured"
    problems = load_problems(config)
    assert (len(problems.train), problems.validation) == (15, [])
    assert GrpoAlgorithm(config, character_tokenizer(config)).num_validation == 0
    again = build_config(make_plain(config))
    assert make_plain(again) == make_plain(config)
    problems = load_problems(listed(train=train))
    assert (len(problems.train), len(problems.validation)) == (14, 1), "what is not said is a tenth of the first"
    split = [{**each, "split_validation_size": 0.2} for each in train]
    assert len(load_problems(listed(train=split, validation=None)).validation) == 3
    assert listed(train=train, validation=None, num_validation=4).data.num_validation == 4
    flat = data_config(dataset_name="jsonl", train_data_path="a.jsonl", input_key="question", output_key="reply")
    assert len(load_problems(flat).validation) == 1
    keys = {"input_key": "question", "output_key": "reply", "validation": None}
    flat = data_config(dataset_name="jsonl", train_data_path="a.jsonl", **keys)
    assert len(load_problems(flat).train) == 10
    learning = listed("sft", train=train, validation=None)
    assert learning.checkpointing.metric_name == "loss"
    assert DataSetAlgorithm(learning, load_tokenizer(learning)).validation_parts == {}


def test_one_of_several_validation_sets_ranks_checkpoints() -> None:
    sets = {
        "train": [{"data_path": "a.jsonl", "split_validation_size": 4}, {"data_path": "b.jsonl"}],
        "validation": [{"data_path": "a.jsonl"}, {"data_path": "hard.jsonl"}],
    }
    assert listed(**sets).data.validation_names == ("a", "a_validation", "hard")
    for given, metric in (
        ("val_hard/accuracy", "val_hard/accuracy"),
        ("val:hard/accuracy", "val_hard/accuracy"),
        ("validation-hard_accuracy", "val_hard/accuracy"),
        ("train:reward", "reward"),
    ):
        config = listed(**sets, checkpointing={"metric_name": given})
        assert config.checkpointing.metric_name == metric
        assert config.checkpointing.higher_is_better
    config = listed("sft", **sets, checkpointing={"metric_name": "val:validation-hard_loss"})
    assert (config.checkpointing.metric_name, config.checkpointing.higher_is_better) == ("val_hard/loss", False)
    with pytest.raises(ConfigError, match=r"grpo has no val_hrd/accuracy, only .*; did you mean 'val_hard/accuracy'"):
        listed(**sets, checkpointing={"metric_name": "val_hrd/accuracy"})
    with pytest.raises(ConfigError, match="grpo has no val_hard/accuracy, only val_reward"):
        listed(train={"data_path": "a.jsonl"}, checkpointing={"metric_name": "val_hard/accuracy"})
    config = listed(train={"data_path": "a.jsonl"}, validation=None, checkpointing={"metric_name": "val:reward"})
    assert "val_reward is never measured (there is nothing to validate on" in "\n".join(notices(config))
    with pytest.raises(ConfigError, match=r"data.num_validation: 0, but data.validation is given"):
        listed(**sets, num_validation=0)


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
        (
            {"train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "env_name": "maths"}]},
            "data.train[1].env_name: 'maths' is not an entry of env (exact_match, math)",
        ),
        (
            {"train": {"data_path": "a.jsonl"}, "validation": {"data_path": "b.jsonl", "weight": 2}},
            "data.validation[0].weight: only training sets have a weight",
        ),
        (
            {"train": {"data_path": "a.jsonl"}, "use_multiple_dataloader": True},
            "data.use_multiple_dataloader: needs several data sets in data.train",
        ),
        (
            {"train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl"}], "use_multiple_dataloader": True},
            "data.num_prompts_per_dataloader: required with data.use_multiple_dataloader",
        ),
        (
            {
                "train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl"}],
                "use_multiple_dataloader": True,
                "num_prompts_per_dataloader": 3,
            },
            "data.num_prompts_per_dataloader: grpo.num_prompts_per_step (4) is not a multiple of 3",
        ),
        (
            {
                "train": [{"data_path": "a.jsonl", "weight": 2}, {"data_path": "b.jsonl"}],
                "use_multiple_dataloader": True,
                "num_prompts_per_dataloader": 2,
            },
            "data.use_multiple_dataloader: sets take turns, but a set of data.train has a weight",
        ),
    ],
)
def test_mistakes_get_a_line(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listed(**data)
    assert str(caught.value).startswith(f"configuration: {expected}")


def drawn_sets(config: Config, steps: Iterable[int]) -> list[list[str]]:
    """Return, of each step, the files that its problems are of."""
    has_model = Path(config.policy.model_name).exists()
    running = GrpoAlgorithm(config, load_tokenizer(config) if has_model else character_tokenizer(config))
    return [
        [group.problem.problem_id.split(".")[0] for group in running.prompt_groups(step, "train", range(4))]
        for step in steps
    ]


def test_sets_have_environments_of_their_own(here: Path) -> None:
    (here / "sum.txt").write_text("= {}")
    config = listed(
        train=[
            {"data_path": write("one.jsonl", range(10))},
            # The same file, asked in another way and scored by another.
            {"data_path": "one.jsonl", "env_name": "math", "prompt_file": "sum.txt"},
        ],
        validation=[
            {"data_path": write("v.jsonl", [70, 71])},
            {"data_path": write("w.jsonl", [80]), "env_name": "math"},
        ],
    )
    assert config.environments == ("exact_match", "math")
    assert config.of_environment("math").data.environment == "math"
    tokenizer = character_tokenizer(config)
    running = GrpoAlgorithm(config, tokenizer)
    groups = [group for step in range(1, 6) for group in running.prompt_groups(step, "train", range(4))]
    assert {(group.environment, tokenizer.decode(group.prompt_ids).count("=")) for group in groups} == {
        ("exact_match", 0),
        ("math", 1),
    }
    assert [group.environment for group in groups].count("math") == 10, "an epoch has each problem of each set once"
    validated = running.prompt_groups(0, "validate", range(3))
    assert [group.environment for group in validated] == ["exact_match", "exact_match", "math"]
    metrics = running.validation_metrics([scored(group, 0, reward=float(group)) for group in range(3)])
    assert metrics["val_v/reward"] == metrics["val_env_exact_match/reward"] == 0.5
    assert metrics["val_w/reward"] == metrics["val_env_math/reward"] == 2.0
    alone = listed(train=[{"data_path": "one.jsonl"}], num_validation=2)
    assert alone.environments == ("exact_match",)
    group = GrpoAlgorithm(alone, tokenizer).prompt_groups(1, "train", [0])[0]
    assert group.environment == "", "said only where there are several"


def test_steps_have_so_much_of_each_set_as_weights_say() -> None:
    paths = [write("a.jsonl", range(3)), write("b.jsonl", range(100, 160)), write("c.jsonl", range(300, 310))]
    weights = [0.5, None, 0.5]
    sets = [{"data_path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    config = listed(train=sets, validation={"data_path": write("v.jsonl", [999])})
    steps = drawn_sets(config, range(1, 20))
    assert all(sorted(step) == ["a", "b", "b", "c"] for step in steps), "those that say none have 1"
    assert drawn_sets(config, [7]) == [steps[6]], "whatever was drawn before"
    running = GrpoAlgorithm(config, load_tokenizer(config))
    drawn = [group.problem for step in range(1, 31) for group in running.prompt_groups(step, "train", range(4))]
    of_b = [problem.question for problem in drawn if int(problem.question) in range(100, 160)]
    assert len(of_b) == len(set(of_b)) == 60, "each set has epochs of its own"
    of_a = [problem.question for problem in drawn if int(problem.question) < 3]
    assert [sorted(of_a[first : first + 3]) for first in range(0, 30, 3)] == [["0", "1", "2"]] * 10
    rare = listed(
        train=[{"data_path": "a.jsonl", "weight": 1e-6}, {"data_path": "b.jsonl"}], validation={"data_path": "v.jsonl"}
    )
    assert sum(step.count("a") for step in drawn_sets(rare, range(1, 251))) == 1, "one place in a thousand is the least"


def test_data_sets_have_their_turns() -> None:
    sets = [{"data_path": write("a.jsonl", range(4))}, {"data_path": write("b.jsonl", range(100, 108))}]
    held = {"data_path": write("v.jsonl", [999])}
    turns = {"use_multiple_dataloader": True, "num_prompts_per_dataloader": 2, "shuffle": False}
    config = listed(train=sets, validation=held, **turns)
    running = GrpoAlgorithm(config, character_tokenizer(config))
    steps = [[g.problem.question for g in running.prompt_groups(step, "train", range(4))] for step in (1, 2, 3)]
    assert steps == [["0", "1", "100", "101"], ["2", "3", "102", "103"], ["0", "1", "104", "105"]], "as NeMo-RL's guide"
    many = listed(train=[*sets, {"data_path": write("c.jsonl", [200])}], validation=held, **turns)
    assert drawn_sets(many, (1, 2, 3)) == [["a", "a", "b", "b"], ["c", "c", "a", "a"], ["b", "b", "c", "c"]]


CHOOSER = """
def choose(step, sizes, num_prompts):
    assert sizes == {"a": 4, "b": 8} and num_prompts == 4
    return ["a"] * (step % 3) + ["b"] * (4 - step % 3)

def wrong(step, sizes, num_prompts):
    return ["c"] * num_prompts

def broken(step, sizes, num_prompts):
    raise KeyError("no such set")
"""


def test_a_function_chooses_between_data_sets(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "chooser_of_sets.py").write_text(CHOOSER)
    monkeypatch.syspath_prepend(here)
    sets = [{"data_path": write("a.jsonl", range(4))}, {"data_path": write("b.jsonl", range(100, 108))}]
    held = {"data_path": write("v.jsonl", [999])}

    def drawn(name: str, steps: Iterable[int]) -> list[list[str]]:
        own = {"use_multiple_dataloader": True, "custom_dataloader": f"chooser_of_sets.{name}", "shuffle": False}
        config = listed(train=sets, validation=held, **own)
        tokenizer = load_tokenizer(config) if Path("model").exists() else character_tokenizer(config)
        running = GrpoAlgorithm(config, tokenizer)
        return [[g.problem.question for g in running.prompt_groups(step, "train", range(4))] for step in steps]

    steps = drawn("choose", range(1, 5))
    assert steps == [
        ["0", "100", "101", "102"],
        ["1", "2", "103", "104"],
        ["105", "106", "107", "100"],
        ["3", "101", "102", "103"],
    ]
    assert drawn("choose", [4]) == [steps[3]], "a resumed run asks again"
    with pytest.raises(DataError, match=r"chooser_of_sets.wrong returned .*, not 4 names of data sets \(a, b\)"):
        drawn("wrong", [1])
    with pytest.raises(DataError, match=r"chooser_of_sets.broken raised KeyError for step 1"):
        drawn("broken", [1])
    with pytest.raises(ConfigError, match=r"data.custom_dataloader"):
        drawn("missing", [1])
    theirs = "examples.custom_dataloader.custom_dataloader.example_custom_dataloader"
    turns = {"use_multiple_dataloader": True, "num_prompts_per_dataloader": 2, "custom_dataloader": theirs}
    assert drawn_sets(listed(train=sets, validation=held, **turns), [1]) == [["a", "a", "b", "b"]]
    unused = listed(train=sets, validation=held, custom_dataloader=theirs, num_prompts_per_dataloader=16)
    assert unused.data.chooser is None, "what is not switched on is not read"


def test_a_set_of_which_nothing_fits_is_named() -> None:
    Path("long.jsonl").write_text(json.dumps({"question": "1" * 99, "reply": "1"}) + "\n")
    sets = [{"data_path": write("a.jsonl", range(9)), "weight": 1}, {"data_path": "long.jsonl", "weight": 1}]
    config = listed(train=sets, validation={"data_path": write("v.jsonl", [999])})
    with pytest.raises(DataError, match=r"^data.train\[1\]: each of the first 1 is longer than policy"):
        GrpoAlgorithm(config, character_tokenizer(config))


def test_conversations_are_drawn_by_weight() -> None:
    sets = [{"data_path": write("a.jsonl", range(4)), "weight": 3}, {"data_path": write("b.jsonl", range(10, 40))}]
    config = listed("sft", train=sets, validation={"data_path": write("v.jsonl", [99])}, shuffle=False)
    batch = DataSetAlgorithm(config, character_tokenizer(config)).batch(1, "train")[0]
    assert batch is not None
    assert int((batch.lengths_S == batch.lengths_S.min()).sum()) == 6, "those of a, which are shorter"


def test_questions_with_choices(here: Path) -> None:
    rows = [
        {"question": "How many?", "options": {"A": "one", "B": "two", "C": None}, "reply": "B"},
        {"question": "Which?", "options": ["this", "that"], "reply": "A"},
    ]
    (here / "choices.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (here / "how.txt").write_text("Answer with a letter.")
    sets = {"data_path": "choices.jsonl", "processor": "multichoice_qa_processor", "prompt_file": "how.txt"}
    config = listed(train=sets, validation={**sets, "data_path": write_choices("held.jsonl")})
    problems = load_problems(config)
    assert [problem.question for problem in problems.train] == [
        "Question: How many?\nOptions:\nA) one\nB) two",
        "Question: Which?\nOptions:\nA) this\nB) that",
    ]
    assert [problem.answer for problem in problems.train] == ["B", "A"]
    said = PromptWriter(config.data.train_sets[0]).messages(problems.train[1])
    assert said[-1]["content"] == "Answer with a letter.\n\nQuestion: Which?\nOptions:\nA) this\nB) that"
    (here / "bad.jsonl").write_text(json.dumps({"question": "Which?", "options": "this", "reply": "A"}) + "\n")
    with pytest.raises(DataError, match=r"^bad.jsonl:1: 'options' holds neither texts by letter nor a list of texts"):
        load_problems(listed(train={**sets, "data_path": "bad.jsonl"}, num_validation=1))


def write_choices(name: str) -> str:
    """Write one more question with choices."""
    Path(name).write_text(json.dumps({"question": "Who?", "options": ["he", "she"], "reply": "A"}) + "\n")
    return name


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
