"""Where problems come from, which are held out, and what is said about data that cannot be used."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reasoning_gym
import yaml
from data_harness import NUM_SUMS, SUMS, character_tokenizer, data_config

from tandem.common.errors import ConfigError, DataError, TandemError
from tandem.common.messages import Problem
from tandem.common.values import fill_template
from tandem.config import Config
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.samples.data_sets import load_problems, sources
from tests.harness.ports import refusing_port

TASKS_TRAIN, TASKS_HELD_OUT = ["0 + 5", "5 - 9", "2 + 6", "2 - 5"], ["4 - 8", "8 + 0", "8 - 4", "3 + 5"]
FILES_HELD_OUT = ["all.jsonl:6", "all.jsonl:7", "all.jsonl:3"]
ROWS = [{"input": f"{i} + 1", "output": i + 1, "level": {"easy": i < 5}} for i in range(10)]


def prompts(config: Config, problems: list[Problem]) -> list[str]:
    return [fill_template("", config.data.prompt_template, problem) for problem in problems]


def jsonl(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def error_of(config: Config, kind: type[TandemError]) -> str:
    with pytest.raises(kind) as caught:
        load_problems(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_generated_problems_are_the_tasks_own_and_score_as_such() -> None:
    config = data_config()
    problems = load_problems(config)
    assert (len(problems.train), len(problems.validation)) == (60, 20)
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    for problem in problems.train + problems.validation:
        first, sign, second = problem.metadata["expression"].split()
        value = int(first) + int(second) if sign == "+" else int(first) - int(second)
        entry = {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}
        assert score(str(value), entry) == 1.0


def test_training_and_validation_share_no_problem_and_repeat_none() -> None:
    config = data_config()
    problems = load_problems(config)
    everything = prompts(config, problems.train + problems.validation)
    assert len(set(everything)) == len(everything) == 80
    assert len({problem.problem_id for problem in problems.train + problems.validation}) == 80


def test_problems_depend_on_the_seed_and_on_nothing_else() -> None:
    assert load_problems(data_config(seed=1)) == load_problems(data_config(seed=1))
    one, two = (load_problems(data_config(seed=seed)) for seed in (1, 2))
    assert prompts(data_config(), one.train) != prompts(data_config(), two.train)


def test_no_run_trains_on_what_another_of_the_same_data_holds_out() -> None:
    configs = [data_config(algorithm, seed) for algorithm in ("sft", "grpo") for seed in (1, 2, 3)]
    runs = [(prompts(c, p.train), prompts(c, p.validation)) for c in configs for p in [load_problems(c)]]
    for (train, _), (_, validation) in itertools.product(runs, runs):
        assert not set(train) & set(validation)


def test_seeds_reach_tasks_that_take_32_bits_only() -> None:
    config = data_config(seed=2**62, task="pool_matrix", task_params={}, prompt_template="{question}")
    assert len(load_problems(config).train) == 60


def test_a_task_without_a_reference_answer_has_none() -> None:
    problem = next(sources.reasoning_gym(data_config(task="rush_hour", task_params={}).data, 0))
    assert problem.answer is None
    entry = {"answer": None, "metadata": problem.metadata}
    assert reasoning_gym.get_score_answer_fn("rush_hour")("", entry) == 0.0


def test_too_few_distinct_problems_are_counted() -> None:
    message = error_of(data_config(num_train=300), DataError)
    assert message.startswith(f"data.task 'chain_sum' has only {NUM_SUMS} distinct problems with these task_params: ")
    assert "(data.num_train 300)" in message
    assert "(data.num_validation 20)" in message


def test_most_of_a_small_space_can_be_had() -> None:
    problems = load_problems(data_config(num_train=170, num_validation=12))
    assert (len(problems.train), len(problems.validation)) == (170, 12)


def test_all_of_a_small_space_can_be_had_in_whatever_shares() -> None:
    for num_validation in (20, 37, 100, 199):
        config = data_config(num_train=NUM_SUMS - num_validation, num_validation=num_validation)
        problems = load_problems(config)
        assert (len(problems.train), len(problems.validation)) == (NUM_SUMS - num_validation, num_validation)
        assert len(set(prompts(config, problems.train + problems.validation))) == NUM_SUMS


def test_the_split_of_a_task_is_that_of_the_first_release() -> None:
    # Written down: a run that is resumed must find its problems where they were.
    config = data_config()
    problems = load_problems(config)
    assert prompts(config, problems.train[:4]) == TASKS_TRAIN
    assert prompts(config, problems.validation[:4]) == TASKS_HELD_OUT


def test_more_problems_than_anyone_can_wait_for_are_refused_at_once() -> None:
    assert error_of(data_config(num_train=10**12), DataError) == (
        "data.num_train 1000000000000 and data.num_validation 20: data.task 'chain_sum' makes at most 1000000 problems "
        "for a run, all before it begins"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task": "chainsum"}, "data.task: reasoning-gym has no task 'chainsum'; did you mean 'chain_sum'?"),
        (
            {"task_params": {"min_term": 2}},
            "data.task_params: chain_sum has no parameter 'min_term'; did you mean 'min_terms'? "
            "(parameters are allow_negation, max_digits, max_terms, min_digits, min_terms)",
        ),
        (
            {"task_params": {"min_terms": 4, "max_terms": 3}},
            "data.task_params: chain_sum refuses {'min_terms': 4, 'max_terms': 3}: max_terms must be >= min_terms "
            "(parameters are allow_negation, max_digits, max_terms, min_digits, min_terms)",
        ),
        (
            {"prompt_template": "{expresion}"},
            "data.prompt_template: cannot fill '{expresion}': 'expresion' (fields are answer, difficulty, expression, "
            "metadata, num_digits, num_terms, question, source_dataset, source_index)",
        ),
    ],
)
def test_what_a_task_does_not_take_is_named(data: dict[str, Any], message: str) -> None:
    assert error_of(data_config(**data), ConfigError) == message


# --- JSONL -----------------------------------------------------------------------------------------------------------


def test_a_file_is_split_and_keeps_its_other_fields() -> None:
    config = data_config(dataset_name="jsonl", train_data_path=jsonl("all.jsonl", ROWS), num_validation=3)
    problems = load_problems(config)
    assert (len(problems.train), len(problems.validation)) == (7, 3)
    everything = sorted(problems.train + problems.validation, key=lambda p: int(p.answer))
    assert [p.question for p in everything] == [row["input"] for row in ROWS]
    assert everything[4].problem_id == "all.jsonl:5"
    assert everything[4].metadata == {"level": {"easy": True}}


def test_a_file_of_its_own_is_held_out_even_of_the_training_file() -> None:
    config = data_config(
        dataset_name="jsonl",
        train_data_path=jsonl("train.jsonl", [*ROWS, *ROWS[:2]]),
        val_data_path=jsonl("validation.jsonl", ROWS[8:]),
        num_train=5,
    )
    problems = load_problems(config)
    assert [p.question for p in problems.train] == [row["input"] for row in ROWS[:5]]
    assert [p.question for p in problems.validation] == [row["input"] for row in ROWS[8:]]


def split(rows: list[dict[str, Any]], **data: Any) -> tuple[list[Problem], list[Problem]]:
    config = data_config(dataset_name="jsonl", train_data_path=jsonl("all.jsonl", rows), **data)
    problems = load_problems(config)
    assert not {content(p) for p in problems.train} & {content(p) for p in problems.validation}
    return problems.train, problems.validation


def content(problem: Problem) -> str:
    return json.dumps([problem.question, problem.answer, problem.metadata], sort_keys=True)


@pytest.mark.parametrize(("num_rows", "num_held_out"), [(2, 1), (12, 1), (300, 30), (3000, 256)])
def test_a_tenth_is_held_out_where_nothing_says_how_many(num_rows: int, num_held_out: int) -> None:
    rows = [{**ROWS[0], "input": f"{number} + 1"} for number in range(num_rows)]
    train, held_out = split(rows, num_validation=None, num_train=None)
    assert (len(train), len(held_out)) == (num_rows - num_held_out, num_held_out)


def test_the_split_of_a_file_is_that_of_the_first_release() -> None:
    train, held_out = split(ROWS, num_validation=3)
    assert [p.problem_id for p in held_out] == FILES_HELD_OUT
    assert [p.problem_id for p in train] == [
        f"all.jsonl:{i}" for i in range(1, 11) if f"all.jsonl:{i}" not in FILES_HELD_OUT
    ]


def test_rows_with_the_same_prompt_are_problems_of_their_own() -> None:
    games = [{"input": "Guess.", "output": str(i), "secret": i} for i in range(50)]
    train, held_out = split(games, num_validation=8)
    assert (len(train), len(held_out)) == (42, 8)
    assert len({p.problem_id for p in train + held_out}) == 50
    states = [{"input": "Guess.", "output": "", "secret": i} for i in range(50)]
    train, held_out = split(states, num_validation=8)
    assert (len(train), len(held_out)) == (42, 8), "a game's state is among the other fields"


def test_rows_that_are_the_same_are_on_one_side_and_count_each() -> None:
    train, held_out = split([*ROWS, *ROWS, *ROWS], num_validation=9)
    assert (len(train), len(held_out)) == (21, 9)
    train, held_out = split([*ROWS, *ROWS, *ROWS], num_validation=8)
    assert (len(train), len(held_out)) == (21, 8), "a third of the last is left over"


@pytest.mark.parametrize("num_validation", [1, 10, 19, 20])
def test_a_row_that_repeats_itself_leaves_another_to_train_on(num_validation: int) -> None:
    train, held_out = split([ROWS[0]] * 20 + [ROWS[1]], num_validation=num_validation)
    assert len(held_out) == num_validation
    assert train


def test_what_is_left_over_is_said() -> None:
    rows = [*ROWS, *ROWS, *ROWS]
    config = data_config(dataset_name="jsonl", train_data_path=jsonl("all.jsonl", rows), num_validation=8)
    assert load_problems(config).num_set_aside == 1
    running = GrpoAlgorithm(config, character_tokenizer(config))
    assert running.notices == (
        "data: 1 of 30 left out: what is held out (data.num_validation) has the same prompt or content",
    )


def test_a_problem_that_is_trained_on_and_validated_on_is_refused_with_both_places() -> None:
    other = {**ROWS[4], "output": "another answer"}
    config = data_config(
        dataset_name="jsonl",
        train_data_path=jsonl("train.jsonl", ROWS),
        val_data_path=jsonl("validation.jsonl", [other, ROWS[7], dict(reversed(ROWS[3].items()))]),
    )
    assert error_of(config, DataError) == (
        "data: train.jsonl:4 and validation.jsonl:3 hold the same problem (and 1 more), which would be trained on and "
        "validated on: take it out of one of them"
    )
    jsonl("validation.jsonl", [other])
    problems = load_problems(config)
    assert (len(problems.train), len(problems.validation)) == (10, 1), (
        "the same question with another answer is another"
    )


def test_the_fields_of_question_and_answer_are_named() -> None:
    rows = [{"q": "1 + 1", "a": "2"}, {"q": "1 + 2", "a": "3"}]
    path = jsonl("all.jsonl", rows)
    config = data_config(dataset_name="jsonl", train_data_path=path, num_validation=1, input_key="q", output_key="a")
    problems = load_problems(config)
    assert {p.answer for p in problems.train + problems.validation} == {"2", "3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"input": "1", "output": "2"}\n{"input": "1",\n',
            "all.jsonl:2 is not a JSON object: Input data was truncated",
        ),
        ('["input", "output"]\n', "all.jsonl:1 is not a JSON object: Expected `object`, got `array`"),
        (
            '\n{"inputs": "1", "output": "2"}\n',
            "all.jsonl:2 has no field 'input' (data.input_key); its fields are inputs, output; did you mean 'inputs'?",
        ),
        ("\n\n", "data: 'all.jsonl' holds no problem"),
        (
            '{"input": null, "output": "2"}',
            "all.jsonl:1 has null in the field 'input' (data.input_key)",
        ),
        (
            "\n".join(['{"input": "1", "output": "2"}'] * 3),
            "data: all.jsonl has 3 problems, 1 of them distinct, and with 1 of them held out (data.num_validation) "
            "none is left to train on",
        ),
        (
            '{"input": "1", "\\n": "2", "' + "a" * 100 + '": 0}\n',
            "all.jsonl:1 has no field 'output' (data.output_key); its fields are input, '\\n', " + "a" * 77 + "...",
        ),
        (
            json.dumps({f"field{i}": 0 for i in range(100)}),
            "all.jsonl:1 has no field 'input' (data.input_key); its fields are "
            + ", ".join(f"field{i}" for i in range(20))
            + ", ...",
        ),
        (
            '{"input": "1", "output": "2"}\n',
            "data: all.jsonl has 1 distinct problems, and with 1 of them held out (data.num_validation) none is left "
            "to train on",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_line(text: str, message: str) -> None:
    Path("all.jsonl").write_text(text)
    config = data_config(dataset_name="jsonl", train_data_path="all.jsonl", num_validation=1)
    assert error_of(config, DataError) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"input": "\xff", "output": "2"}', "is not UTF-8: byte 0xff at position 12 of the line"),
        (b'{"\xc3": 1}', "is not UTF-8: byte 0xc3 at position 3 of the line"),
        (b"\x80", "is not UTF-8: byte 0x80 at position 1 of the line"),
        (b'{"input": "\\ud800", "output": "2"}', "is not a JSON object: JSON is malformed: "),
        (b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested more than 200 levels deep"),
        (b'{"input": ' + b"[" * 100_000, "is nested more than 200 levels deep"),
        (b'{"input": ' + b"[" * 200 + b"]" * 200 + b"}", "is nested more than 200 levels deep"),
        (b'{"input": "' + b" " * (1 << 24) + b'"}', "is longer than 16 MiB, the most that a row may have"),
    ],
)
@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_bytes_that_are_no_data_are_named_with_their_line(name: str, line: bytes, message: str) -> None:
    text = json.dumps(ROWS[0]).encode() + b"\r\n\n" + line + b"\n"
    Path(name).write_bytes(gzip.compress(text, 1) if name.endswith(".gz") else text)
    found = error_of(data_config(dataset_name="jsonl", train_data_path=name), DataError)
    assert found.startswith(f"{name}:3 {message}")
    assert len(found) < 200


def test_many_brackets_in_a_text_are_no_nesting() -> None:
    rows = [{**row, "deep": [["{[" * 300]]} for row in ROWS]
    assert split(rows, num_validation=3)[0][0].metadata["deep"] == [["{[" * 300]]


def socket_at(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


MAKE: dict[str, Callable[[str], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": os.mkdir,
    "a socket": socket_at,
    "a character device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_is_not_opened(kind: str) -> None:
    MAKE[kind]("odd.jsonl")
    good = jsonl("good.jsonl", ROWS)
    message = f"data: cannot read 'odd.jsonl': it is {kind}, not a file of one JSON object a line"
    for settings in ({"train_data_path": "odd.jsonl"}, {"train_data_path": good, "val_data_path": "odd.jsonl"}):
        assert error_of(data_config(dataset_name="jsonl", **settings), DataError) == message
    os.rename("odd.jsonl", "odd.jsonl.gz")
    config = data_config(dataset_name="jsonl", train_data_path="odd.jsonl.gz")
    assert error_of(config, DataError) == message.replace("odd.jsonl", "odd.jsonl.gz")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_is_no_file_is_not_opened_in_a_folder_of_data_either(kind: str) -> None:
    folder = hub_folder(kind)
    os.mkfifo(f"{folder}/train-2.{kind}")
    assert error_of(data_config(dataset_name=folder, num_validation=3), DataError) == (
        f"data.dataset_name: cannot load 'repository': 'repository/train-2.{kind}' is a FIFO, not a data file"
    )
    os.mkfifo("fifo")
    assert error_of(data_config(dataset_name="fifo", num_validation=3), DataError) == (
        "data.dataset_name: cannot load 'fifo': 'fifo' is a FIFO, not a data file"
    )


def test_a_missing_file_is_one_line() -> None:
    config = data_config(dataset_name="jsonl", train_data_path="none.jsonl")
    assert error_of(config, DataError) == "data: cannot read 'none.jsonl': No such file or directory"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_validation": 11}, "data.num_validation: all.jsonl has only 10 distinct problems, not 11"),
        (
            {"num_validation": 4, "num_train": 7},
            "data.num_train: without those held out, all.jsonl has only 6 distinct problems, not 7",
        ),
    ],
)
def test_a_file_with_too_few_problems_is_counted(counts: dict[str, int], message: str) -> None:
    config = data_config(dataset_name="jsonl", train_data_path=jsonl("all.jsonl", ROWS), **counts)
    assert error_of(config, DataError) == message


# --- Hub datasets ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def hub_folder(kind: str) -> str:
    """Write a dataset with two splits the way a repository of the Hub holds one."""
    folder = Path("repository")
    folder.mkdir()
    for split, rows in (("train", ROWS[:8]), ("test", ROWS[8:])):
        table = datasets.Dataset.from_list(rows)
        path = folder / f"{split}.{kind}"
        {"json": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind](path)
    return str(folder)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_splits_of_a_dataset_are_loaded(kind: str) -> None:
    config = data_config(dataset_name=hub_folder(kind), val_split="test")
    problems = load_problems(config)
    assert [(p.question, p.answer) for p in problems.train] == [(f"{i} + 1", i + 1) for i in range(8)]
    assert [(p.question, p.answer) for p in problems.validation] == [(f"{i} + 1", i + 1) for i in (8, 9)]
    if kind == "parquet":
        assert problems.train[0].metadata == {"level": {"easy": True}}


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("is_folder", [True, False])
def test_short_floats_are_the_decimals_that_were_written(bits: int, is_folder: bool) -> None:
    number = {16: pa.float16(), 32: pa.float32()}[bits]
    numbers = [0.1, -2.5, 1e-4, 3.0]
    schema = {
        "input": pa.string(),
        "output": number,
        "list": pa.list_(number),
        "deep": pa.struct({"of": pa.list_(pa.struct({"x": number, "n": pa.int64()})), "y": pa.float64()}),
        "large": pa.large_list(number),
    }
    rows = [
        {
            "input": f"{value} =",
            "output": value,
            "list": [value, None, 0.3],
            "deep": {"of": [{"x": 0.7, "n": 16777217}, None], "y": 0.1},
            "large": None if value < 0 else [0.2],
        }
        for value in numbers
    ]
    table = pa.Table.from_arrays(
        [pa.array([row[name] for row in rows], arrow_type) for name, arrow_type in schema.items()],
        schema=pa.schema(schema),
    )
    os.mkdir("numbers")
    pq.write_table(table, "numbers/train.parquet")
    place = {"dataset_name": "numbers"} if is_folder else {"train_data_path": "numbers/train.parquet"}
    config = data_config(**{"dataset_name": "jsonl", "num_validation": 0, **place})
    problems = {problem.question: problem for problem in load_problems(config).train}
    assert [problems[row["input"]].answer for row in rows] == numbers
    kept = problems["0.1 ="].metadata
    assert {name: kept[name] for name in ("list", "deep", "large")} == {
        "list": [0.1, None, 0.3],
        "deep": {"of": [{"x": 0.7, "n": 16777217}, None], "y": 0.1},
        "large": [0.2],
    }


def test_a_repository_as_the_hub_holds_one_has_its_subsets() -> None:
    configs = []
    for subset, rows in (("easy", ROWS[:5]), ("hard", ROWS[5:])):
        folder = Path("repository", subset)
        folder.mkdir(parents=True)
        datasets.Dataset.from_list(rows[:3]).to_parquet(folder / "train-00000-of-00002.parquet")
        datasets.Dataset.from_list(rows[3:4]).to_parquet(folder / "train-00001-of-00002.parquet")
        datasets.Dataset.from_list(rows[4:]).to_parquet(folder / "test-00000-of-00001.parquet")
        files = [{"split": split, "path": f"{subset}/{split}-*"} for split in ("train", "test")]
        configs.append({"config_name": subset, "data_files": files})
    card = {"license": "apache-2.0", "configs": configs}
    Path("repository/README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n# Sums\n")
    problems = load_problems(data_config(dataset_name="repository", subset="hard", val_split="test"))
    assert sorted(p.question for p in problems.train) == ["5 + 1", "6 + 1", "7 + 1", "8 + 1"]
    assert [p.question for p in problems.validation] == ["9 + 1"]


def test_one_split_is_split_again() -> None:
    problems = load_problems(data_config(dataset_name=hub_folder("json"), num_validation=3))
    assert (len(problems.train), len(problems.validation)) == (5, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_key": "problem"}, "has no field 'problem' (data.input_key); its fields are input, output, level"),
        ({"split": "dev"}, "data.dataset_name: cannot load 'repository', split 'dev': Unknown split \"dev\"."),
        (
            {"subset": "hard"},
            "data.dataset_name: cannot load 'repository', split 'train': BuilderConfig 'hard' not found.",
        ),
    ],
)
def test_what_a_dataset_lacks_is_named(data: dict[str, str], message: str) -> None:
    found = error_of(data_config(dataset_name=hub_folder("json"), num_validation=3, **data), DataError)
    assert message in found


def test_a_dataset_that_cannot_be_fetched_is_one_line_and_torch_stays_out() -> None:
    folder = hub_folder("parquet")
    probe = (
        "import sys; from data_harness import data_config; from tandem.common.errors import DataError\n"
        "from tandem.samples.data_sets import load_problems\n"
        f"load_problems(data_config(dataset_name={folder!r}, num_validation=3))\n"
        "try: load_problems(data_config(dataset_name='nobody/nothing'))\n"
        "except DataError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    message, has_torch = run_probe(probe, {"HF_HUB_OFFLINE": "1"}).stdout.splitlines()
    assert message.startswith("data.dataset_name: cannot load 'nobody/nothing', split 'train': ")
    assert has_torch == "False"


def test_a_hub_that_cannot_be_reached_is_said_at_once() -> None:
    probe = (
        "from data_harness import data_config; from tandem.samples.data_sets import load_problems\n"
        "from tandem.common.errors import DataError; import time\n"
        "import datasets, huggingface_hub\n"  # which takes seconds by itself
        "before = time.monotonic()\n"
        "try: load_problems(data_config(dataset_name='nobody/nothing'))\n"
        "except DataError as error: print(error)\n"
        "print(time.monotonic() - before)"
    )
    with refusing_port() as port:
        endpoint = f"http://127.0.0.1:{port}"
        done = run_probe(probe, {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"})
    message, seconds = done.stdout.splitlines()
    assert message == (
        "data.dataset_name: cannot load 'nobody/nothing', split 'train': "
        f"{endpoint} cannot be reached (Connection refused), and there is no copy here"
    )
    assert float(seconds) < 5.0
    assert done.stderr == ""


def run_probe(probe: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=inherited | {"HF_HOME": str(Path("home").absolute()), "PYTHONPATH": path} | environment,
    )


def test_sums_are_as_many_as_the_harness_says() -> None:
    expressions = {
        entry["metadata"]["expression"]
        for entry in reasoning_gym.create_dataset("chain_sum", size=5000, seed=0, **SUMS["task_params"])
    }
    assert len(expressions) == NUM_SUMS
