"""``coordinator check --show``: rows as the model will have them, token by token, and what is learned of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_harness import character_tokenizer, data_config
from rich.text import Text

from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.cli import main
from tandem.coordinator.preparing.shown_rows import rows_in_text, text_of_tokens
from tandem.samples.model_files import load_tokenizer


def lines_of(algorithm: str, num_rows: int, *, is_coloured: bool = False, **data: Any) -> list[Text]:
    config = data_config(algorithm, **data)
    tokenizer = load_tokenizer(config) if Path("model").exists() else character_tokenizer(config)
    running = make_algorithm(config, tokenizer)
    return rows_in_text(config, running, tokenizer, num_rows, is_coloured=is_coloured)


def files(*rows: dict[str, str]) -> dict[str, Any]:
    for name, part in (("train", rows), ("held_out", ({**rows[0], "input": "9 + 9", "prompt": "9 + 9"},))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    paths = {"train_data_path": "train.jsonl", "val_data_path": "held_out.jsonl"}
    return {"dataset_name": "jsonl", "shuffle": False, **paths}


SUMS = ({"input": "1 + 1", "output": " = 2"}, {"input": "2 + 5", "output": " = 7"})
PAIR = {"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"}


def test_a_row_of_sft_has_its_learned_tokens_marked_its_turn_end_named_and_its_bos() -> None:
    one, two = (lines_of("sft", num_rows, **files(*SUMS)) for num_rows in (1, 9))
    assert [line.plain for line in one] == [
        "━━ train.jsonl:1: 11 tokens, 5 of them learned",
        "  <bos>1 + 1⟦ = 2<eos>⟧",
        "begins     with BOS, '<bos>' (1)",
        "turns end  '<eos>' (2)",
        "",
    ]
    assert len(two) == 2 * len(one), "no row comes twice"


def test_on_a_terminal_learned_tokens_have_a_style_and_no_brackets() -> None:
    line = lines_of("sft", 1, is_coloured=True, **files(*SUMS))[1]
    assert line.plain == "  <bos>1 + 1 = 2<eos>"
    styled = "".join(line.plain[span.start : span.end] for span in line.spans if "green" in str(span.style))
    assert styled == " = 2<eos>"


def test_a_turn_that_nothing_ends_is_said() -> None:
    config = data_config("sft", **files(*SUMS), add_eos=False)
    tokenizer = character_tokenizer(config)
    tokenizer.hugging_face.chat_template = None  # it would write the end
    lines = rows_in_text(config, make_algorithm(config, tokenizer), tokenizer, 1, is_coloured=False)
    *_, end, note, _ = (line.plain for line in lines)
    assert end.startswith("turns end  '2' (")
    assert "is the last token of a learned turn, and ends none" in note


def test_both_answers_of_a_preference_are_shown() -> None:
    lines = [line.plain for line in lines_of("dpo", 1, **files(PAIR))]
    assert [line for line in lines if "⟦" in line] == ["  <bos>1 + 1⟦ = 2<eos>⟧", "  <bos>1 + 1⟦ = 3<eos>⟧"]
    assert [line.split(":")[1].split(", ")[1] for line in lines if "━━" in line] == ["chosen", "rejected"]


def test_a_reward_model_judges_at_the_last_token_of_a_row() -> None:
    lines = [line.plain for line in lines_of("rm", 1, **files(PAIR))]
    assert lines[1] == "  <bos>1 + 1 = 2<eos>"
    assert lines[3] == "judged at  '<eos>' (2)"


def test_a_prompt_is_shown_as_rollouts_have_it_with_what_ends_a_response() -> None:
    lines = [line.plain for line in lines_of("grpo", 2, **files(*SUMS))]
    assert [line for line in lines if line.startswith("  ")] == ["  <bos>1 + 1", "  <bos>2 + 5"]
    assert [line for line in lines if line.startswith("reference")] == ["reference   = 2", "reference   = 7"]
    assert lines[-2].startswith("stops      a response ends at '<eos>' (2), or after ")


def test_many_equal_tokens_in_a_row_are_one_and_their_number() -> None:
    tokenizer = character_tokenizer(data_config())
    text = text_of_tokens([1, *tokenizer.encode("1" * 300 + "22")], tokenizer)
    assert text.plain == "<bos>1(×300)22"


@pytest.mark.parametrize(("words", "num"), [((), 3), (("1",), 1)])
def test_the_command_shows_rows_and_prints_nothing_of_them_without_the_option(
    words: tuple[str, ...], num: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "algorithm": "sft",
        "policy": {
            "model_name": "model",
            "new_model": {"config": {"model_type": "qwen3", "hidden_size": 8}, "characters": "0123456789+-= "},
            "train_global_batch_size": 4,
            "max_total_sequence_length": 32,
        },
        "data": files(*SUMS, *SUMS),
        "sft": {"max_num_steps": 1},
        "logger": {"log_dir": "run"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["check", "run.yaml", "--show", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("⟦") == num
    assert main(["check", "run.yaml"]) == 0
    assert shown.endswith(capsys.readouterr().out), "the rest is the same"
