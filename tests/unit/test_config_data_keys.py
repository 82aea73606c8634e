"""Keys of ``data``: one that changes what a run reads has no notice, and one that changes nothing has one.

Each kind of rows is read by the loaders of runs, with each key at another value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.common.errors import ConfigError, DataError
from tandem.config import Config, build_config, notices
from tandem.config.schema.data import OF_EACH_SET, DataConfig, DataSet
from tandem.samples.data_sets import load_conversations, load_problems
from tandem.samples.data_sets.prompts import PromptWriter

MESSAGES = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "problems": [{"input": f"{number} + 1", "output": str(number + 1), "field": "f"} for number in range(9)],
    "chats": [{"chat": [{"role": "user", "content": str(number)}, MESSAGES[1]], "field": "f"} for number in range(9)],
    "pairs": [{"prompt": f"{number}", "chosen": "a", "rejected": "b", "field": "f"} for number in range(9)],
    "texts": [{"text": f"text {number}", "field": "f"} for number in range(9)],
}
GENERATED = {
    "dataset_name": "reasoning_gym",
    "task": "chain_sum",
    "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "num_train": 60,
    "num_validation": 20,
}
FILE = {"dataset_name": "jsonl", "train_data_path": "problems.jsonl"}
CHATS = {"dataset_name": "openai_format", "train_data_path": "chats.jsonl", "chat_key": "chat"}
PAIRS = {"dataset_name": "PreferenceDataset", "train_data_path": "pairs.jsonl"}
LISTED = {"train": {"dataset_name": "ResponseDataset", "data_path": "problems.jsonl"}}
LISTED_CHATS = {"train": {"dataset_name": "openai_format", "data_path": "chats.jsonl", "chat_key": "chat"}}
LISTED_PAIRS = {"train": {"dataset_name": "PreferenceDataset", "data_path": "pairs.jsonl"}}
TEXTS = {"train": {"dataset_name": "arrow_text", "data_files": "texts.jsonl", "processor": "kd_data_processor"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, generated": ("grpo", GENERATED),
    "grpo, a file": ("grpo", FILE),
    "grpo, listed": ("grpo", LISTED),
    "ppo, a file": ("ppo", FILE),
    "sft, generated": ("sft", GENERATED),
    "sft, a file": ("sft", FILE),
    "sft, conversations": ("sft", CHATS),
    "sft, listed conversations": ("sft", LISTED_CHATS),
    "dpo, generated": ("dpo", {**GENERATED, "rejected_template": "{question}"}),
    "dpo, a file": ("dpo", PAIRS),
    "rm, listed": ("rm", LISTED_PAIRS),
    "texts": ("off_policy_distillation", TEXTS),
    "off-policy, a file": ("off_policy_distillation", FILE),
}
VALUES: dict[str, Any] = {
    **dict.fromkeys(("input_key", "output_key", "system_key", "prompt_key", "chosen_key", "text_key"), "field"),
    **dict.fromkeys(("rejected_key", "margin_key", "chat_key"), "field"),
    "tool_key": "field",
    "image_key": "field",
    "max_image_pixels": 7,
    "characters_per_sample": 30,
    "task_params": {"min_terms": 3, "max_terms": 3},
    "val_data_path": "more.jsonl",
    "val_split": "field",
    "subset": "field",
    "revision": "field",
    "download_dir": "field",
    "solution_template": "so {answer}",
    "rejected_template": "not {answer}",
    "prompt_template": "ask {question}",
    "prompt_file": "prompt.txt",
    "system_prompt": "Be brief.",
    "system_prompt_file": "system.txt",
    "num_prompts_per_dataloader": 2,
    "custom_dataloader": "mine.choose",
    "processor": "multichoice_qa_processor",
}
"""Another value of each key that decides what is read."""
NOT_OF_READING = frozenset(
    {
        # Which items there are, in which order, and what they are scored by: for every kind.
        *("dataset_name", "task", "num_train", "num_validation", "train_data_path", "val_data_paths", "commit"),
        *("train", "validation", "default", "split_validation_size", "shuffle", "environment", "max_input_seq_length"),
        *("use_multiple_dataloader", "split"),
        # With a notice, whatever the run, or refused: `tandem.config.unread_keys` and others.
        *("seed", "num_workers", "add_system_prompt"),
        # How they become tokens.
        *("add_bos", "add_eos", "add_generation_prompt"),
    }
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in ROWS.items():
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("more.jsonl").write_text("".join(f"{json.dumps(row)}\n" for rows in ROWS.values() for row in rows[:1]))
    Path("prompt.txt").write_text("Think of {}.")
    Path("system.txt").write_text("Be long.")
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))


def config_of(case: str, data: Mapping[str, Any]) -> Config:
    algorithm, _ = CASES[case]
    settings: dict[str, Any] = {"algorithm": algorithm, "policy": {"model_name": "model"}, "data": data}
    if algorithm in ("grpo", "ppo"):
        settings["env"] = {"exact_match": {}}
    if algorithm == "off_policy_distillation":
        settings["teacher"] = {"model_name": "model"}
    return build_config(settings)


def read(config: Config) -> Any:
    """Return what a run reads: prompts with problems and tools, or conversations; or the error."""
    try:
        if not config.declaration.rolls_out:
            return load_conversations(config)
        sets = load_problems(config)
        views = [source.data for source in sets.sources] or [config.data]
        writer = PromptWriter(views[0])
        items = [(problem, writer.messages(problem), writer.tools(problem)) for problem in sets.train]
        return items, sets.held_out
    except (ConfigError, DataError) as error:
        return str(error)


def changes(case: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each key of a case, the settings with another value of it, and what a notice names."""
    _, data = CASES[case]
    is_listed = "train" in data
    for name, value in VALUES.items():
        if is_listed and name in OF_EACH_SET:
            yield name, {**data, "train": {**data["train"], name: value}}, f"data.train[0].{name}"
        else:
            yield name, {**data, name: value}, f"data.{name}"


@pytest.mark.parametrize("case", CASES)
def test_a_key_has_a_notice_where_it_changes_nothing_and_only_there(case: str) -> None:
    base = msgspec.json.encode(read(config_of(case, CASES[case][1])), enc_hook=str)
    assert notices_of(config_of(case, CASES[case][1])) == []
    wrong = []
    for name, data, key in changes(case):
        try:
            config = config_of(case, data)
        except ConfigError:
            continue
        is_told = any(line.startswith(f"{key} (") and " has no effect: " in line for line in notices(config))
        if name == "solution_template" and config.declaration.rolls_out:
            continue  # tasks have it for the supervised run before
        is_same = msgspec.json.encode(read(config), enc_hook=str) == base
        if is_told != is_same:
            wrong.append(f"{name}: {'nothing changes' if is_same else 'rows are read otherwise'}, told: {is_told}")
    assert not wrong, "\n".join(wrong)


def notices_of(config: Config) -> list[str]:
    return [line for line in notices(config) if line.startswith("data.")]


def test_every_key_of_data_is_tried_or_is_of_every_run() -> None:
    fields = {field.name for section in (DataConfig, DataSet) for field in msgspec.structs.fields(section)}
    of_sets_alone = {"data_path", "data_files", "max_samples", "repeat", "weight", "env_name"}
    assert fields == {*VALUES, *NOT_OF_READING, *of_sets_alone}


@pytest.mark.parametrize(
    ("case", "changed", "expected"),
    [
        (
            "grpo, a file",
            {"add_eos": False},
            "data.add_eos (false) has no effect: the chat template and the policy write the turns of rollouts",
        ),
        (
            "grpo, a file",
            {"add_generation_prompt": True},
            "data.add_generation_prompt (true) has no effect: the chat template and the policy write the turns of "
            "rollouts",
        ),
        (
            "grpo, a file",
            {"split": "test"},
            "data.split (test) has no effect: only data sets on the Hub have it",
        ),
        (
            "grpo, a file",
            {"processor": "multichoice_qa_procesor"},
            "data.processor (multichoice_qa_procesor) has no effect: it is none of NeMo-RL's functions, and other keys "
            "describe the rows; did you mean 'multichoice_qa_processor'?",
        ),
    ],
)
def test_what_is_told_of_other_keys(case: str, changed: dict[str, Any], expected: str) -> None:
    assert notices_of(config_of(case, {**CASES[case][1], **changed})) == [expected]


@pytest.mark.parametrize("key", ["train_data_path", "val_data_path"])
def test_a_file_beside_a_data_set_of_the_hub_is_told_of(key: str) -> None:
    said = notices_of(config_of("grpo, a file", {"dataset_name": "gsm8k", key: "problems.jsonl"}))
    reason = "data.dataset_name decides, and only that of a file, such as jsonl, reads one"
    assert said == [f"data.{key} (problems.jsonl) has no effect: {reason}"]
