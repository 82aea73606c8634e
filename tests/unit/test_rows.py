"""Data that a program has in memory: every form of it becomes the same file, which the run reads back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import msgspec
import numpy as np
import pytest
from environment_harness import config

from tandem.common.errors import DataError
from tandem.common.messages import ResponseToScore
from tandem.config.schema import DataConfig
from tandem.coordinator.api.configuration import CheckedRows, of_rows, row_keys, rows_of
from tandem.coordinator.api.rewards import reward_functions
from tandem.samples.data_sets import sources

ROWS = [{"problem": f"{number} + 1", "answer": number + 1, "tags": ["sum"]} for number in range(3)]


def data(**over: Any) -> DataConfig:
    made = config("exact_match").data

    return msgspec.structs.replace(made, **over)


def read_back(rows: CheckedRows) -> list[dict[str, Any]]:
    """Return what a reward function is given of each row, by way of the file."""
    path = rows.path(Path("run"), "train")
    rows.write(path)
    keys = of_rows(str(path), None)["data"]
    (function,) = reward_functions(lambda **columns: 0.0, None)
    settings = data(**{name: keys[name] for name in ("input_key", "output_key")})
    problems = [sources.problem(where, row, settings) for where, row in sources.jsonl(str(path))]
    return [
        function.arguments([ResponseToScore(number=0, problem=problem, response="r")], None) for problem in problems
    ]


def test_functions_get_rows_as_they_were() -> None:
    expected = [{**row, "prompt": row["problem"], "response": "r"} for row in ROWS]
    assert read_back(rows_of(ROWS, data(), "dataset")) == expected


def test_every_form_of_the_same_rows_is_the_same_file() -> None:
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    forms = [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), "rows.jsonl", Path("rows.jsonl")]
    assert len({rows_of(form, data(), "dataset").path(Path("run"), "train") for form in forms}) == 1
    other = rows_of(ROWS[:2], data(), "dataset").path(Path("run"), "train")
    assert other != rows_of(ROWS, data(), "dataset").path(Path("run"), "train")


def test_configured_columns_come_first() -> None:
    rows = [{"prompt": "no", "mine": "yes", "answer": "no", "theirs": 7}]
    (line,) = rows_of(rows, data(input_key="mine", output_key="theirs"), "dataset").content.splitlines()
    assert json.loads(line) == {**rows[0], "_question": "yes", "_answer": 7}


def test_messages_are_kept_and_what_numpy_has_is_written() -> None:
    messages = [{"role": "user", "content": "1 + 1"}]
    (given,) = read_back(rows_of([{"prompt": messages, "n": np.int64(3), "v": np.arange(2)}], data(), "dataset"))
    assert given == {"prompt": messages, "response": "r", "n": 3, "v": [0, 1]}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            r"dataset\[0\]\['prompt'\]: the last of its messages is the assistant's",
        ),
        (None, r"dataset\[0\]: 'prompt' is None"),
    ],
)
def test_prompts_that_cannot_be_used_are_said(prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        rows_of([{"prompt": prompt}], data(), "dataset")


def test_a_row_cannot_have_our_own_fields() -> None:
    with pytest.raises(DataError, match=r"^dataset\[0\]: rows must not have a field named '_answer'"):
        rows_of([{"prompt": "x", "_answer": 1}], data(), "dataset")


def test_columns_of_other_data_are_those_of_its_rows() -> None:
    assert row_keys(config("exact_match")) == ("input", "output")
    assert row_keys(config("reasoning_gym", task="chain_sum")) == ("question", "answer")
