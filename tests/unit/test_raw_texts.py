"""Raw text to learn from: files of every kind, joined as NeMo-RL joins rows, tokenised without a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from data_harness import character_tokenizer
from pyarrow import parquet

from tandem.common.errors import ConfigError, DataError
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.launch.preparing.hub_data import find_missing_files
from tandem.samples.data_sets import load_conversations
from tandem.samples.model_files import load_tokenizer

TEXTS = ["one two three", "four", "", "five six", "seven eight nine ten"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(entry: dict[str, Any], **others: Any) -> Config:
    """A configuration in NeMo-RL's form, with this entry of ``data.train``."""
    return build_config(
        {
            "distillation": {"num_prompts_per_step": 4, "max_num_steps": 3, "max_num_epochs": 1, "val_period": 0},
            "teachers": [{"model_name": "teacher", "projection_matrix_path": None}],
            "loss_fn": {"vocab_topk": 8},
            "policy": {"model_name": "model", "max_total_sequence_length": 6},
            "data": {
                "train": {"dataset_name": "arrow_text", "processor": "kd_data_processor", "split": "train", **entry},
                "validation": None,
                **others,
            },
        }
    )


def texts_of(entry: dict[str, Any]) -> list[str]:
    return [each.answers[0][0]["content"] for each in load_conversations(config_of(entry)).train]


def write(suffix: str, key: str) -> str:
    """Write `TEXTS` as files of rows; return the path with a wildcard that matches them."""
    for number, rows in enumerate((TEXTS[:2], TEXTS[2:])):
        path = f"part-{number}{suffix}"
        match suffix:
            case ".txt":
                Path(path).write_text("".join(f"{text}\n" for text in rows))
            case ".parquet":
                parquet.write_table(pyarrow.table({key: rows}), path)
            case ".arrow":
                folder = Path(f"folder-{number}")
                datasets.Dataset.from_dict({key: rows}).save_to_disk(folder)
                next(folder.glob("*.arrow")).rename(path)
            case _:
                Path(path).write_text("".join(json.dumps({key: text}) + "\n" for text in rows))
    return f"part-*{suffix}"


@pytest.mark.parametrize("suffix", [".txt", ".parquet", ".arrow", ".jsonl"])
def test_rows_of_all_files_are_texts_and_empty_ones_are_not(suffix: str) -> None:
    key = "text" if suffix == ".txt" else "body"
    found = texts_of({"data_files": write(suffix, key), "text_key": key})
    assert found == [text for text in TEXTS if text]


@pytest.mark.parametrize("num_characters", [1, 5, 16, 17, 18, 1000])
def test_rows_are_joined_as_nemo_rl_joins_them(num_characters: int) -> None:
    """By the rule of `ArrowTextDataset` (NeMo-RL, ``nemo_rl/data/datasets/response_datasets/arrow_text_dataset.py``):
    consecutive rows, until their characters together reach the number; what is left at the end is a text too."""
    rows, expected = [text for text in TEXTS if text], list[str]()
    while rows:
        count = next((n for n in range(1, len(rows) + 1) if sum(map(len, rows[:n])) >= num_characters), len(rows))
        expected.append("\n".join(rows[:count]))
        rows = rows[count:]
    found = texts_of({"data_files": write(".jsonl", "text"), "characters_per_sample": num_characters})
    assert found == expected


@pytest.mark.parametrize(("add_bos", "beginning"), [(True, "one t"), (False, "one tw")])
def test_every_token_but_the_first_is_learned_and_what_is_too_long_is_cut(add_bos: bool, beginning: str) -> None:
    config = config_of({"data_files": write(".jsonl", "text")}, shuffle=False, add_bos=add_bos)
    character_tokenizer(config, "efghinorstuvwx ")
    tokenizer = load_tokenizer(config)
    (found,), (second,), *_ = DataSetAlgorithm(config, tokenizer).conversations(1, 4)
    assert tokenizer.decode(list(found.token_ids)) == beginning, "no template, no mark of an end"
    assert (found.token_ids[0] == tokenizer.bos_id) == add_bos
    assert (found.loss_mask, found.name) == ((False, *[True] * 5), "part-0.jsonl:1")
    assert tokenizer.decode(list(second.token_ids)) == "four"


def test_a_part_is_held_out_by_its_text() -> None:
    sets = load_conversations(config_of({"data_files": write(".jsonl", "text"), "split_validation_size": 1}))
    train, held = ([each.answers[0][0]["content"] for each in part] for part in (sets.train, sets.validation))
    assert (len(train), len(held)) == (3, 1)
    assert {*train, *held} == {text for text in TEXTS if text}


def test_files_that_are_not_here_are_named() -> None:
    assert [*find_missing_files(config_of({"data_files": "none/*.arrow"}))] == [
        "data.train[0].data_files: 'none/*.arrow' does not exist"
    ]
    on_the_hub = ("hf://datasets/owner/name/part/*.parquet", "owner/name")
    assert [line for place in on_the_hub for line in find_missing_files(config_of({"data_files": place}))] == []


def test_what_is_no_text_is_named() -> None:
    Path("a.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'text' is not text \(data\.text_key\)"):
        texts_of({"data_files": "a.jsonl"})
    Path("a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"'a\.jsonl' holds no text in the field 'text'"):
        texts_of({"data_files": "a.jsonl"})
    Path("a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"cannot read 'a\.txt'"):
        texts_of({"data_files": "a.txt"})


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"dataset_name": "openai_format", "data_path": "a.jsonl"},
            "data.train[0].processor: kd_data_processor reads raw text: data.train[0].dataset_name is openai_format, "
            "not arrow_text",
        ),
        ({}, "data.train[0].data_path: required where dataset_name is arrow_text"),
    ],
)
def test_raw_text_is_arrow_text(entry: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(entry)
    assert expected in [line.removeprefix("configuration: ") for line in caught.value.problems]
