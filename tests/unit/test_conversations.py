"""Conversations for SFT and pairs for DPO: from files, data sets and tasks to batches."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pytest
from data_harness import character_tokenizer, data_config

from tandem.common.errors import ConfigError, DataError, TandemError
from tandem.config import Config, notices
from tandem.config.named import NAMED
from tandem.coordinator.algorithms import make_algorithm
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets import load_conversations
from tandem.samples.model_files import load_tokenizer
from tandem.samples.tokenizer import Tokenizer

WRONG = "tandem.coordinator.data.worked:wrong_number"
ROLES = {"u": "user", "a": "assistant", "s": "system"}


def chat(*turns: str) -> list[dict[str, str]]:
    """``chat("u1", "a2")``: the user says 1, the assistant 2."""
    return [{"role": ROLES[turn[0]], "content": turn[1:]} for turn in turns]


def jsonl(rows: list[Any], name: str = "rows.jsonl") -> dict[str, Any]:
    Path(name).write_text("\n".join(json.dumps(row) for row in rows))
    return {"dataset_name": "jsonl", "train_data_path": name, "num_validation": 1}


def sequences(config: Config) -> list[tuple[str, str]]:
    """Prompt and counted text of every sequence of the first batch."""
    tokenizer = character_tokenizer(config)
    batch = make_algorithm(config, tokenizer).batch(1, "train")[0]
    assert batch is not None
    return [parts(tokenizer, batch, row) for row in range(len(batch.lengths_S))]


def parts(tokenizer: Tokenizer, batch: SampleBatch, row: int) -> tuple[str, str]:
    end = int(batch.lengths_S[: row + 1].sum())
    tokens, mask = (values[end - batch.lengths_S[row] : end] for values in (batch.token_ids_T, batch.loss_mask_T))
    first = int(mask.argmax())
    assert mask[first:].all(), "only the answer counts, and all of it"
    prompt, answer = (tokenizer.decode(part, skip_special_tokens=False) for part in (tokens[:first], tokens[first:]))
    return prompt, answer


def pairs(config: Config) -> set[tuple[str, ...]]:
    """All pairs of a configuration, as prompt, chosen and rejected text."""
    sets = load_conversations(config)
    return {
        (
            "|".join(message["role"][0] + message["content"] for message in pair.prompt),
            *("|".join(message["content"] for message in answer) for answer in pair.answers),
        )
        for pair in (*sets.train, *sets.validation)
    }


def error_of(config: Config, kind: type[TandemError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        load_conversations(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what messages came with ---------------------------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": '{"x": "1"}'}}


def test_messages_keep_all_of_their_fields_and_rows_their_tools() -> None:
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "strict": None}}}]
    talk = [
        {"role": "user", "content": "1", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "2", "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c"},
        {"role": "assistant", "content": "4", "weight": 0},
    ]
    rows = [{"messages": talk, "tools": json.dumps(tools) if as_text else tools} for as_text in (True, False)]
    rows[1]["messages"] = [{**talk[0], "content": "5"}, *talk[1:]]
    sets = load_conversations(data_config("sft", **jsonl(rows), chat_key="messages"))
    without_nulls = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
    for conversation in (*sets.train, *sets.validation):
        assert conversation.tools == tuple(without_nulls)
        assert conversation.prompt[0]["name"] == "ann"
        (answer,) = conversation.answers
        assert answer == [
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "2"},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
            {"role": "assistant", "content": "4", "weight": 0},
        ]


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        ({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "weight": 2}]}, {},
         "rows.jsonl:1: messages[1].weight is 2, must be 0 or 1"),
        ({"messages": [{"role": "user", "content": "1"}, {"role": "assistant"}]}, {},
         "rows.jsonl:1: messages[1]: a message of the role 'assistant' has no content"),
        ({"messages": chat("u1", "a2"), "functions": ["calc"]}, {"tool_key": "functions"},
         "rows.jsonl:1: 'functions' is not a list of tools as JSON schemas (data.tool_key)"),
    ],
)  # fmt: skip
def test_what_messages_cannot_mean_is_named(row: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    config = data_config("sft", **jsonl([row]), chat_key="messages", **settings)
    assert error_of(config) == problem


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1", "chosen": chat("a2", "u3", "a4"), "rejected": chat("a5")},
        {"prompt": "1", "chosen": chat("u1", "a2", "u3", "a4"), "rejected": chat("u1", "a5")},
        {"chosen": chat("u1", "a2", "u3", "a4"), "rejected": chat("u1", "a5")},
    ],
)
def test_a_pair_of_several_messages_has_its_prompt(row: dict[str, Any]) -> None:
    """In each form of TRL's (`docs/source/dataset_formats.md` of TRL 1.16): explicit and implicit prompts."""
    other = {"prompt": "9", "chosen": chat("u9", "a8"), "rejected": chat("u9", "a7")}
    assert pairs(data_config("dpo", **jsonl([row, other]))) == {("u1", "2|3|4", "5"), ("u9", "8", "7")}


# --- reward models ---------------------------------------------------------------------------------------------------


def test_of_a_reward_models_sequence_the_padding_behind_it_counts() -> None:
    """What a trainer reads there is said of the last token that is none: where Transformers' classifier reads it."""
    dpo, rm = (data_config(name, rejected_template=WRONG) for name in ("dpo", "rm"))
    given = ["".join(each) for each in sequences(dpo)]
    shutil.rmtree("model")
    assert sequences(rm) == [(text, "<pad>") for text in given]


def test_where_padding_is_what_ends_a_response_the_score_is_that_of_what_comes_before() -> None:
    config = data_config("rm", rejected_template=WRONG)
    tokenizer = character_tokenizer(config)
    tokenizer._hugging_face.pad_token = None
    assert tokenizer.pad_id == tokenizer.eos_id
    batch = make_algorithm(config, tokenizer).batch(1, "train")[0]
    assert batch is not None
    found = [parts(tokenizer, batch, row) for row in range(len(batch.lengths_S))]
    assert {counted for _, counted in found} == {"<eos>"}
    assert not any("<eos>" in text for text, _ in found)


def test_numbers_in_conversations_are_those_of_json() -> None:
    talk = [{"role": "user", "content": "1", "score": 0.5}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": talk}, {"messages": [{**talk[0], "content": "3"}, talk[1]]}]
    data = jsonl(rows)
    path = Path(data["train_data_path"])
    path.write_text(path.read_text().replace("0.5", "0.50"))
    sets = load_conversations(data_config("sft", **{**data, "num_validation": 1}, chat_key="messages"))
    assert {each.prompt[0]["content"] for each in (*sets.train, *sets.validation)} == {"1", "3"}


def test_margins_are_those_of_the_rows() -> None:
    rows = [{"prompt": f"{i}", "chosen": "1", "rejected": "2", "ahead": -i / 4} for i in range(1, 9)]
    data = jsonl([*rows, {"prompt": "0", "chosen": "1", "rejected": "2", "ahead": 9}])
    config = data_config("rm", **data, margin_key="ahead", shuffle=False)
    running = make_algorithm(config, tokenizer := character_tokenizer(config))
    (batch, metrics), (held_out, _) = running.batch(1, "train"), running.batch(1, "validate")
    assert metrics == {}
    margins = [*batch.rewards_S[::2].tolist(), *held_out.rewards_S[::2].tolist()]
    assert sorted(margins) == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 9.0]
    assert not batch.rewards_S[1::2].any(), "the worse response has none"
    plain = data_config("rm", **jsonl(rows))
    assert not make_algorithm(plain, tokenizer).batch(1, "train")[0].rewards_S.any()


@pytest.mark.parametrize("ahead", ["much", None, True, [1.0]])
def test_a_margin_is_a_number(ahead: object) -> None:
    rows = [{"prompt": "1", "chosen": "1", "rejected": "2", "ahead": ahead}]
    config = data_config("rm", **jsonl(rows), margin_key="ahead")
    assert error_of(config) == "rows.jsonl:1: 'ahead' is not a number (data.margin_key)"


def test_only_reward_models_have_margins() -> None:
    with pytest.raises(ConfigError) as caught:
        data_config("dpo", rejected_template=WRONG, margin_key="ahead")
    assert str(caught.value) == (
        "configuration: data.margin_key: ahead, but only a reward model learns margins: algorithm is dpo"
    )


def test_epochs_alone_may_end_a_run() -> None:
    config = data_config("rm", rejected_template=WRONG, num_train=64)
    assert config.rm.max_num_steps == -1
    config = msgspec.structs.replace(config, rm=msgspec.structs.replace(config.rm, max_num_epochs=3))
    assert make_algorithm(config, tokenizer := character_tokenizer(config)).num_steps == 24
    config = msgspec.structs.replace(config, rm=msgspec.structs.replace(config.rm, max_num_steps=5))
    assert make_algorithm(config, tokenizer).num_steps == 5


def test_each_of_several_wrong_answers_makes_a_pair() -> None:
    config = data_config("rm", rejected_template="tandem.coordinator.data.worked:wrong_answers")
    sets = load_conversations(config)
    assert [len(sets.train), len(sets.validation)] == [6 * int(config.data.num_train or 0), 6 * 20]
    prompts = [{tuple(pair.prompt[0].items()) for pair in side} for side in (sets.train, sets.validation)]
    assert not prompts[0] & prompts[1], "all pairs of a sum are on one side"
    for first in range(0, len(sets.train), 6):
        right, wrong = zip(*(pair.answers for pair in sets.train[first : first + 6]), strict=True)
        assert len({each[0]["content"] for each in right}) == 1
        said = [each[0]["content"] for each in wrong]
        assert right[0][0]["content"] not in said
        answer = int(right[0][0]["content"].removeprefix(" = "))
        off = [abs(int(text.removeprefix(" = ")) - answer) for text in said[:3]]
        assert len(set(said[:3])) == 3
        assert all(1 <= by <= 5 for by in off)
    assert pairs(config) == pairs(config), "always the same"


# --- DPO -------------------------------------------------------------------------------------------------------------


def test_pairs_lie_side_by_side_the_chosen_one_first() -> None:
    config = data_config("dpo", rejected_template=WRONG)
    found = sequences(config)
    assert len(found) == 2 * config.policy.train_global_batch_size, "batches count pairs"
    for (prompt, chosen), (same_prompt, rejected) in zip(found[::2], found[1::2], strict=True):
        assert prompt == same_prompt
        right = eval(prompt.removeprefix("<bos>"))
        assert chosen == f" = {right}<eos>"
        wrong = int(rejected.removeprefix(" = ").removesuffix("<eos>"))
        assert 1 <= abs(wrong - right) <= 5


def test_an_epoch_has_every_pair_and_validation_those_held_out() -> None:
    config = data_config("dpo", rejected_template=WRONG, num_train=64)
    tokenizer = character_tokenizer(config)
    running = make_algorithm(config, tokenizer)
    assert running.num_steps == 8
    used = [
        parts(tokenizer, running.batch(step, "train")[0], row)[0] for step in range(1, 9) for row in range(0, 16, 2)
    ]
    assert len(set(used)) == 64
    held_out = {parts(tokenizer, running.batch(1, "validate")[0], row)[0] for row in range(40)}
    assert len(held_out) == 20
    assert not held_out & set(used)


@pytest.mark.parametrize(("val_batches", "count"), [(1, 8), (3, 20), (0, 20), (-1, 20)])
def test_validation_takes_so_many_batches_or_everything(val_batches: int, count: int) -> None:
    config = data_config("dpo", rejected_template=WRONG)
    config = msgspec.structs.replace(config, dpo=msgspec.structs.replace(config.dpo, val_batches=val_batches))
    batch = make_algorithm(config, character_tokenizer(config)).batch(1, "validate")[0]
    assert batch is not None
    assert len(batch.lengths_S) == 2 * count


@pytest.mark.parametrize(("val_batches", "easy", "hard"), [(1, 5, 8), (0, 5, 12)])
def test_several_files_are_validated_on_each_by_itself(val_batches: int, easy: int, hard: int) -> None:
    for name, numbers in {"train": range(5, 30), "easy": range(5), "hard": range(30, 42)}.items():
        jsonl([{"prompt": str(i), "chosen": " = 1", "rejected": " = 2"} for i in numbers], f"{name}.jsonl")
    paths = {"easy": "easy.jsonl", "hard": "hard.jsonl"}
    config = data_config("dpo", dataset_name="jsonl", train_data_path="train.jsonl", val_data_paths=paths)
    assert config.data.num_validation is None, "all of each"
    config = msgspec.structs.replace(config, dpo=msgspec.structs.replace(config.dpo, val_batches=val_batches))
    tokenizer = character_tokenizer(config)
    running = make_algorithm(config, tokenizer)
    batch = running.batch(1, "validate")[0]
    assert batch is not None
    found = [parts(tokenizer, batch, row)[0] for row in range(0, len(batch.lengths_S), 2)]
    assert found == [f"<bos>{i}" for i in (*range(easy), *range(30, 30 + hard))]
    assert running.validation_parts == {"easy": 2 * easy, "hard": 2 * hard}, "sequences"
    assert len(load_conversations(config).train) == 25


def test_a_pair_that_is_trained_on_and_validated_on_is_refused_with_both_places() -> None:
    for name, numbers in {"train": range(40), "easy": range(41, 45), "hard": range(30, 34)}.items():
        jsonl([{"prompt": str(i), "chosen": " = 1", "rejected": " = 2"} for i in numbers], f"{name}.jsonl")
    paths = {"easy": "easy.jsonl", "hard": "hard.jsonl"}
    settings = {"dataset_name": "jsonl", "train_data_path": "train.jsonl", "val_data_paths": paths}
    assert error_of(data_config("dpo", **settings)) == (
        "data: train.jsonl:31 and hard.jsonl:1 hold the same problem (and 3 more), which would be trained on and "
        "validated on: take it out of one of them"
    )
    sets = load_conversations(data_config("dpo", **settings, num_train=30))
    assert len(sets.train) == 30, "what is not trained on does no harm"


def test_one_set_has_no_parts() -> None:
    config = data_config("dpo", rejected_template=WRONG)
    assert make_algorithm(config, character_tokenizer(config)).validation_parts == {}


PAIR = ("u1 + 1", " = 2", " = 3")
OTHER = {"prompt": "2 + 2", "chosen": " = 4", "rejected": " = 5"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"},
        {"prompt": chat("u1 + 1"), "chosen": chat("a = 2"), "rejected": chat("a = 3")},
        {"prompt": "1 + 1", "chosen": chat("u1 + 1", "a = 2"), "rejected": chat("u1 + 1", "a = 3")},
        {"prompt": " 1 + 1", "chosen": chat("u1 + 1", "a = 2"), "rejected": chat("u1 + 1", "a = 3")},
        {"prompt": None, "chosen": chat("u1 + 1", "a = 2"), "rejected": chat("u1 + 1", "a = 3")},
        {
            "context": chat("u1 + 1"),
            "completions": [
                {"rank": 1, "completion": chat("a = 3")},
                {"rank": 0, "completion": chat("a = 2"), "reward": 4},
            ],
        },
    ],
    ids=["texts", "messages", "conversations", "with spaces", "null", "ranked"],
)
def test_a_file_may_have_pairs_in_any_usual_form(row: dict[str, Any]) -> None:
    assert pairs(data_config("dpo", **jsonl([row, OTHER]))) == {PAIR, ("u2 + 2", " = 4", " = 5")}


def test_the_fields_of_pairs_are_named() -> None:
    rows = [{"q": f"{i} + 1", "good": f" = {i + 1}", "bad": " = 0"} for i in range(3)]
    config = data_config("dpo", **jsonl(rows), prompt_key="q", chosen_key="good", rejected_key="bad")
    assert ("u2 + 1", " = 3", " = 0") in pairs(config)
    rows = [{"prompt": f"{i}", "chosen_response": "1", "rejected_response": "2"} for i in range(3)]
    config = data_config("dpo", **(jsonl(rows) | {"dataset_name": "DPODataset"}))
    assert pairs(config) == {(f"u{i}", "1", "2") for i in range(3)}


def test_a_prompt_may_have_several_pairs_and_all_are_held_out_with_it() -> None:
    rows = [{"prompt": str(i % 5), "chosen": str(i), "rejected": "0"} for i in range(1, 21)]
    sets = load_conversations(data_config("dpo", **jsonl([*rows, rows[0]])))
    assert len(sets.train) == 17, "one of them twice"
    (held_out,) = sets.validation
    assert all(pair.prompt != held_out.prompt for pair in sets.train)
    assert sets.num_set_aside == 3


def test_conversations_that_all_begin_alike_are_split_by_what_follows() -> None:
    rows = [{"messages": chat("u1", f"a{i % 20}")} for i in range(40)]
    settings = jsonl(rows) | {"dataset_name": "openai_format", "num_validation": 8, "num_train": 32}
    sets = load_conversations(data_config("sft", **settings))
    train, validation = ([c.answers[0][0]["content"] for c in part] for part in (sets.train, sets.validation))
    assert (len(train), len(validation)) == (32, 8)
    assert not set(train) & set(validation), "what is the same is on the same side"
    assert sorted(train + validation) == sorted(str(i % 20) for i in range(40))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "1", "chosen": "2"},
            " has no field 'rejected' (data.rejected_key); its fields are prompt, chosen",
        ),
        (
            {"promt": "1", "chosen": "2", "rejected": "3"},
            " has no field 'prompt' (data.prompt_key); its fields are promt, chosen, rejected; did you mean 'promt'?",
        ),
        (
            {"prompt": 1, "chosen": "2", "rejected": "3"},
            ": 'prompt' is neither a text nor a list of messages: Expected `array`, got `int`",
        ),
        ({"prompt": "1", "chosen": [], "rejected": "3"}, ": 'chosen' holds no message"),
        (
            {"prompt": "1", "chosen": [{"role": "assistant"}], "rejected": "3"},
            ": chosen[0]: a message of the role 'assistant' has no content",
        ),
        (  # TRL 1.16 trains on the prompt and then on the conversation
            {"prompt": "else", "chosen": chat("u1", "a2"), "rejected": chat("u1", "a3")},
            ": 'prompt' is not what the conversation in 'chosen' begins with: leave one of the two out, or set "
            "data.prompt_key to a field that the rows lack, so that the conversation counts alone",
        ),
        (
            {"prompt": chat("u1", "a2"), "chosen": chat("u1", "a2"), "rejected": chat("u1", "a3")},
            ": 'prompt' is not what the conversation in 'chosen' begins with: leave one of the two out, or set "
            "data.prompt_key to a field that the rows lack, so that the conversation counts alone",
        ),
        (
            {"chosen": chat("u1", "a2"), "rejected": chat("u3", "a4")},
            ": 'chosen' and 'rejected' do not begin with the same prompt",
        ),
        (
            {"context": chat("u1"), "completions": [{"rank": 1, "completion": chat("a2")}] * 2},
            ": preferences are two completions of different rank, got ranks 1, 1",
        ),
        (
            {"context": chat("u1"), "completions": "2"},
            ": 'completions' is not a list of ranked completions: Expected `array`, got `str`",
        ),
        ([], " is not a JSON object: Expected `object`, got `array`"),
    ],
)
def test_a_row_that_is_no_pair_is_named_with_its_line(row: Any, message: str) -> None:
    assert error_of(data_config("dpo", **jsonl([OTHER, row]))) == f"rows.jsonl:2{message}"


def test_a_response_of_somebody_else_is_refused() -> None:
    config = data_config("dpo", **jsonl([OTHER, {"prompt": "1", "chosen": chat("u2"), "rejected": "3"}]))
    with pytest.raises(DataError, match=r"^problem 'rows.jsonl:2': its solution does not end with a turn of the"):
        make_algorithm(config, character_tokenizer(config))


def test_pairs_that_are_too_long_are_left_out_and_that_is_said() -> None:
    rows = [
        OTHER,
        {"prompt": "1", "chosen": "2" * 64, "rejected": "3"},
        {"prompt": "3", "chosen": "3", "rejected": "4"},
    ]
    config = data_config("dpo", **jsonl(rows))
    running = make_algorithm(config, character_tokenizer(config))
    assert running.notices == (
        "data: 1 of 3 left out: longer than data.max_input_seq_length and policy.max_total_sequence_length allow",
    )


def test_helpsteer_prefers_the_first_response_where_the_number_is_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"context": chat("u1"), "response1": "2", "response2": "3", "overall_preference": -2},
        {"context": chat("u4", "a5", "u6"), "response1": "7", "response2": "8", "overall_preference": 1},
        {"context": chat("u9"), "response1": "1", "response2": "2", "overall_preference": 0},
        {"context": chat("u3"), "response1": "1", "response2": "2", "overall_preference": 3},
    ]
    config = on_the_hub("HelpSteer3", rows, tmp_path, monkeypatch)
    assert pairs(config) == {("u1", "2", "3"), ("u4|a5|u6", "8", "7"), ("u3", "2", "1")}
    assert load_conversations(config).num_ties == 1


def test_tulus_pairs_are_whole_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"prompt": "1", "chosen": chat("u1", "a2", "u3", "a4"), "rejected": chat("u1", "a2", "u3", "a5")},
        {"prompt": "6", "chosen": chat("u6", "a7"), "rejected": chat("u6", "a8")},
    ]
    config = on_the_hub("Tulu3Preference", rows, tmp_path, monkeypatch, num_validation=1)
    assert pairs(config) == {("u1|a2|u3", "4", "5"), ("u6", "7", "8")}


@pytest.mark.parametrize(("only", "learned"), [(False, {"24", "68"}), (True, {"4", "8"})])
def test_only_the_last_turn_may_be_learned(only: bool, learned: set[str]) -> None:
    rows = [{"messages": chat("u1", "a2", "u3", "a4")}, {"messages": chat("u5", "a6", "u7", "a8")}]
    config = data_config("sft", **jsonl(rows), chat_key="messages")
    config = msgspec.structs.replace(config, sft=msgspec.structs.replace(config.sft, only_unmask_final=only))
    tokenizer = character_tokenizer(config)
    running = make_algorithm(config, tokenizer)
    found = set()
    for batch in (running.batch(1, "train")[0], running.batch(1, "validate")[0]):
        assert batch is not None
        first = slice(0, int(batch.lengths_S[0]))
        found.add(tokenizer.decode(batch.token_ids_T[first][batch.loss_mask_T[first]].tolist()))
    assert found == learned


def on_the_hub(
    name: str, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **data: Any
) -> Config:
    """Put rows where the Hub's copy of a named data set would be looked for; if it has two splits, the last row is the
    other split."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = data_config("dpo" if NAMED[name].holds == "preferences" else "sft", dataset_name=name, **data)
    folder = Path(NAMED[name].path)
    folder.mkdir(parents=True)
    splits = {config.data.split: rows}
    if config.data.val_split is not None:
        splits = {config.data.split: rows[:-1], config.data.val_split: rows[-1:]}
    for split, its_rows in splits.items():
        datasets.Dataset.from_list(its_rows).to_parquet(folder / f"{split}.parquet")
    files = [{"split": split, "path": f"{split}.parquet"} for split in splits]
    card = {"configs": [{"config_name": config.data.subset or "default", "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    return config


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "HelpSteer3",
            {"context": chat("u1"), "response1": "2", "overall_preference": 1},
            " is not a pair of responses: Object missing required field `response2`",
        ),
        (
            "HelpSteer3",
            {"context": chat("u1"), "response1": "2", "response2": None, "overall_preference": 1},
            " is not a pair of responses: Expected `str`, got `null` - at `$.response2`",
        ),
        (
            "squad",
            {"context": "1", "question": "2"},
            " is not a question about a passage: Object missing required field",
        ),
        (
            "squad",
            {"context": "1", "question": "2", "answers": {"text": [], "answer_start": []}},
            " is not a question about a passage: Expected `array` of length >= 1 - at `$.answers.text`",
        ),
    ],
)
def test_a_row_of_a_data_set_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: dict[str, Any], message: str
) -> None:
    config = on_the_hub(name, [row, row], tmp_path, monkeypatch)
    assert error_of(config).startswith(f"{NAMED[name].path}[{config.data.split}]:0{message}")


def nothing(problem: Any) -> Any:
    return None


def no_content(problem: Any) -> Any:
    return [{"role": "assistant"}]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "Expected `str | array`, got `null`"),
        ("no_content", "message 1: a message of the role 'assistant' has no content"),
    ],
)
def test_a_solution_that_is_none_is_named_with_its_line(function: str, message: str) -> None:
    settings = jsonl([{"input": "1", "output": "2"}, {"input": "2", "output": "3"}])
    config = data_config("sft", **settings, solution_template=f"{__name__}:{function}")
    found = error_of(config)
    assert found.startswith("problem 'rows.jsonl:")
    assert f"{__name__}:{function} returned neither a text nor a list of texts or messages: {message}" in found


def test_a_system_message_that_is_no_text_is_named() -> None:
    rows = [{"talk": chat("u1", "a2"), "rules": "3"}, {"talk": chat("u4", "a5"), "rules": None}]
    config = data_config("sft", **jsonl(rows), chat_key="talk", system_key="rules")
    assert error_of(config) == "rows.jsonl:2: 'rules' is not text (data.system_key)"


def test_a_conversation_that_the_template_refuses_is_named_with_its_line() -> None:
    config = data_config(
        "sft",
        **(
            jsonl([{"messages": chat("u1", "a2")}] * 2 + [{"messages": chat("u3", "a4")}])
            | {"dataset_name": "openai_format"}
        ),
    )
    character_tokenizer(config)
    Path("model/chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"refuses messages of user: no \(problem 'rows.jsonl:\d'\)$"):
        make_algorithm(config, load_tokenizer(config))


# --- SFT -------------------------------------------------------------------------------------------------------------


def test_of_a_conversation_in_a_file_what_the_assistant_says_is_learned() -> None:
    rows = [{"messages": chat("u1", "a2", "u3", "a4")}, {"messages": chat("s0", "u5", "a6")}]
    config = data_config("sft", **(jsonl(rows) | {"dataset_name": "openai_format"}), system_prompt="7")
    found = {c.prompt[-1]["content"]: c for s in [load_conversations(config)] for c in (*s.train, *s.validation)}
    assert [list(found[key].prompt) for key in "15"] == [chat("s7", "u1"), chat("s0", "u5")]
    assert [list(found[key].answers[0]) for key in "15"] == [chat("a2", "u3", "a4"), chat("a6")]


def test_a_field_of_its_own_may_hold_the_system_message() -> None:
    rows = [{"talk": chat("u1", "a2"), "rules": "3"}, {"talk": chat("u4", "a5"), "rules": "6"}]
    config = data_config("sft", **jsonl(rows), chat_key="talk", system_key="rules")
    sets = load_conversations(config)
    assert {c.prompt[0]["content"] for c in (*sets.train, *sets.validation)} == {"3", "6"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (chat("u1"), "rows.jsonl:2: 'messages' has no turn of the assistant that follows another message"),
        (chat("a1", "u2", "a3"), "rows.jsonl:2: 'messages' has no turn of the assistant that follows another message"),
        ("hello", "rows.jsonl:2: 'messages' is not a list of messages: Expected `array`, got `str`"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_named(messages: Any, message: str) -> None:
    rows = [{"messages": chat("u1", "a2")}, {"messages": messages}]
    assert error_of(data_config("sft", **(jsonl(rows) | {"dataset_name": "openai_format"}))) == message


def node(said: str, *replies: dict[str, Any]) -> dict[str, Any]:
    return {"text": said[1:], "role": "prompter" if said[0] == "u" else "assistant", "replies": replies, "lang": "en"}


def test_every_thread_of_a_tree_is_a_conversation() -> None:
    first = node("u1", node("a2", node("u3", node("a4"), node("a5")), node("u6")), node("a7"))
    trees = [{"message_tree_id": "t", "prompt": first}, {"prompt": node("u8")}, node("u9", node("a0"))]
    with gzip.open("trees.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(tree) for tree in trees))
    Path("other.jsonl").write_text(json.dumps(node("u0", node("a0"))))
    settings = {"train_data_path": "trees.jsonl.gz", "val_data_path": "other.jsonl", "system_prompt": "5"}
    sets = load_conversations(data_config("sft", dataset_name="open_assistant", **settings))
    assert [(c.name, [*c.prompt, *c.answers[0]]) for c in (*sets.train, *sets.validation)] == [
        ("trees.jsonl.gz:1, thread 1", chat("s5", "u1", "a2", "u3", "a4")),
        ("trees.jsonl.gz:1, thread 2", chat("s5", "u1", "a2", "u3", "a5")),
        ("trees.jsonl.gz:1, thread 3", chat("s5", "u1", "a2")),  # nothing answers what the user says then
        ("trees.jsonl.gz:1, thread 4", chat("s5", "u1", "a7")),
        ("trees.jsonl.gz:3, thread 1", chat("s5", "u9", "a0")),
        ("other.jsonl:1, thread 1", chat("s5", "u0", "a0")),
    ]


def test_a_thread_of_which_nothing_else_is_left_comes_once() -> None:
    tree = node("u1", node("a2", node("u3"), node("u4")), node("a2"))
    other = node("u5", node("a6", node("u7", node("a8"))))
    sets = load_conversations(data_config("sft", **(jsonl([tree, other]) | {"dataset_name": "open_assistant"})))
    names = [c.name for c in (*sets.train, *sets.validation)]
    places = ["rows.jsonl:1, thread 1", "rows.jsonl:1, thread 3", "rows.jsonl:2, thread 1"]
    assert sorted(names) == places, "the same words elsewhere in the tree are another thread"


def test_a_tree_as_deep_as_a_row_may_be_is_read_and_a_deeper_one_is_refused() -> None:
    def chain(length: int) -> dict[str, Any]:
        tree = node("a2")
        for _ in range(length):
            tree = node("a2", node("u1", tree))
        return node("u1", tree)

    config = data_config("sft", **(jsonl([chain(48), chain(0)]) | {"dataset_name": "open_assistant"}))
    assert (
        max(len(c.answers[0]) for c in load_conversations(config).train + load_conversations(config).validation) == 97
    )
    jsonl([chain(0), chain(60)])
    assert error_of(config) == "rows.jsonl:2 is nested more than 200 levels deep"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"prompt": {"text": "1", "role": "user"}}, "Invalid enum value 'user' - at `$.role`"),
        (
            {"prompt": node("u1", {"text": 2, "role": "assistant"})},
            "Expected `str`, got `int` - at `$.replies[0].text`",
        ),
        ({"messages": []}, "Object missing required field `text`"),
    ],
)
def test_a_row_that_is_no_tree_is_named(tree: Any, message: str) -> None:
    rows = [node("u1", node("a2")), tree]
    config = data_config("sft", **(jsonl(rows) | {"dataset_name": "open_assistant"}))
    assert error_of(config) == f"rows.jsonl:2 is not a tree of messages: {message}"


def test_a_file_that_is_compressed_in_name_only_is_refused() -> None:
    config = data_config("sft", **(jsonl([1], "rows.jsonl.gz") | {"dataset_name": "open_assistant"}))
    assert error_of(config).startswith("data: cannot read 'rows.jsonl.gz': Not a gzipped file")


def test_squads_passage_is_the_system_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"context": "1 2 3", "question": "2 + 1", "answers": {"text": [" = 3", "3"], "answer_start": [4, 4]}},
        {"context": "4 5 6", "question": "2 + 2", "answers": {"text": [" = 4"], "answer_start": [0]}},
    ]
    config = on_the_hub("squad", rows, tmp_path, monkeypatch)
    sets = load_conversations(config)
    found = [(list(c.prompt), *map(list, c.answers)) for c in (*sets.train, *sets.validation)]
    assert found == [(chat("s1 2 3", "u2 + 1"), chat("a = 3")), (chat("s4 5 6", "u2 + 2"), chat("a = 4"))]


def test_of_openmathinstruct_the_wanted_field_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"problem": f"{i} + 1", "expected_answer": str(i + 1), "generated_solution": f" = {i + 1}"} for i in (1, 2)]
    settings = {"output_key": "generated_solution", "num_validation": 1}
    config = on_the_hub("openmathinstruct2", rows, tmp_path, monkeypatch, **settings)
    sets = load_conversations(config)
    found = sorted((c.prompt[0]["content"], c.answers[0][0]["content"]) for c in (*sets.train, *sets.validation))
    assert found == [("1 + 1", " = 2"), ("2 + 1", " = 3")]


# --- configuration ---------------------------------------------------------------------------------------------------


def test_a_seed_of_the_data_is_said_to_be_in_vain() -> None:
    config = data_config("sft", dataset_name="openmathinstruct2")
    assert notices(config) == []
    config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, seed=3))
    assert notices(config) == ["data.seed (3) has no effect: prompts decide what is held out, sft.seed the order"]


def test_named_data_sets_bring_their_splits_and_fields() -> None:
    data = data_config("grpo", dataset_name="OpenMathInstruct-2").data
    assert (data.split, data.input_key, data.output_key) == ("train_1M", "problem", "expected_answer")
    data = data_config("sft", dataset_name="openmathinstruct2", output_key="generated_solution").data
    assert (data.input_key, data.output_key) == ("problem", "generated_solution")
    data = data_config("dpo", dataset_name="HelpSteer3").data
    assert (data.subset, data.split, data.val_split, data.num_validation) == ("preference", "train", "validation", None)


FILES: dict[str, Any] = {"dataset_name": "jsonl", "train_data_path": "a", "val_data_paths": {"easy": "b"}}


@pytest.mark.parametrize(
    ("algorithm", "data", "message"),
    [
        ("dpo", {}, "rejected_template: required where dpo learns from data.dataset_name reasoning_gym"),
        (
            "grpo",
            {"dataset_name": "squad"},
            "dataset_name: squad holds conversations, which are for sft and off_policy_distillation",
        ),
        ("sft", {"dataset_name": "HelpSteer3"}, "dataset_name: HelpSteer3 holds preferences, which are for dpo and rm"),
        (
            "dpo",
            {"dataset_name": "DeepScaler"},
            "dataset_name: DeepScaler holds problems, which are for grpo, ppo, sft, distillation and "
            "off_policy_distillation",
        ),
        ("dpo", {"dataset_name": "DPODataset"}, "train_data_path: required where data.dataset_name is DPODataset"),
        (
            "sft",
            FILES | {"val_data_path": "b"},
            "val_data_paths: data.val_data_path is given too",
        ),
        (
            "sft",
            FILES | {"dataset_name": "squad"},
            "val_data_paths: only files are validated separately, and data.dataset_name is squad",
        ),
        (
            "sft",
            FILES | {"val_data_paths": {"a/b": "b"}},
            "val_data_paths: 'a/b' is not a valid metric name: use letters, digits, '_', '.' and '-'",
        ),
        (
            "sft",
            {"system_prompt": "a", "system_prompt_file": "b"},
            "system_prompt: data.system_prompt_file is given too",
        ),
    ],
)
def test_data_that_does_not_fit_the_algorithm_is_refused(algorithm: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="configuration: ") as caught:
        data_config(algorithm, **data)
    assert str(caught.value) == f"configuration: data.{message}"
