"""``coordinator check --show``: rows as the model will have them, token by token, and what is learned of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_harness import character_tokenizer, data_config
from rich.text import Text

from tandem.config import build_config, config_to_json
from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.cli import main
from tandem.coordinator.preparing.shown_rows import rows_in_text, text_of_tokens
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
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


def sft_settings() -> dict[str, Any]:
    return {
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


@pytest.mark.parametrize(("words", "num"), [((), 3), (("1",), 1)])
def test_the_command_shows_rows_and_prints_nothing_of_them_without_the_option(
    words: tuple[str, ...], num: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = sft_settings()
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["check", "run.yaml", "--show", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count("⟦") == num
    assert main(["check", "run.yaml"]) == 0
    assert shown.endswith(capsys.readouterr().out), "the rest is the same"


# --- ``coordinator samples`` of a run that generates none -----------------------------------------------------------


def trained_run(num_steps: int = 2) -> list[str]:
    """Write the folder of a run of SFT as it ends; return the rows of its second step."""
    config = build_config(sft_settings() | {"sft": {"max_num_steps": num_steps, "max_num_epochs": 2}})
    tokenizer = character_tokenizer(config)
    with Journal.create(Path("run"), config_to_json(config), "sft") as journal:
        for step in range(1, num_steps + 1):
            journal.commit_step(StepRecord(step=step, version=step, metrics={}, seconds={}))
    running = make_algorithm(config, tokenizer)
    batch, _ = running.batch(2, "train")
    ends = batch.lengths_S.cumsum()
    starts = ends - batch.lengths_S
    rows = [batch.token_ids_T[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    return [tokenizer.decode(row, skip_special_tokens=False) for row in rows]


def test_samples_of_a_run_of_sft_are_the_rows_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    rows = trained_run()
    assert main(["samples", "run"]) == 0
    newest, errors = capsys.readouterr()
    assert errors == ""
    shown = [line.strip() for line in newest.splitlines() if line.startswith("  ")]
    assert [line.replace("⟦", "").replace("⟧", "") for line in shown] == rows
    assert newest.endswith("4 of the 4 rows of step 2\n")
    assert main(["samples", "run", "--step", "1", "--limit", "1"]) == 0
    assert capsys.readouterr().out.count("⟦") == 1


def test_samples_of_a_run_of_sft_say_what_has_changed_and_what_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    trained_run()
    os.utime("train.jsonl", (2e9, 2e9))
    assert main(["samples", "run"]) == 0
    assert "note: train.jsonl has changed since the run began" in capsys.readouterr().err
    Path("train.jsonl").unlink()
    assert main(["samples", "run"]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("error: the rows of run are read from its data again, which cannot be read: ")
    assert "train.jsonl" in errors


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--step", "3"], "run has trained no step 3, only those up to 2"),
        (
            ["--worst"],
            "run is a run of sft, which generates no samples: its rows are chosen by --step and --limit, not --worst",
        ),
    ],
)
def test_what_a_run_of_sft_has_not_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    trained_run()
    assert main(["samples", "run", *words]) == 1
    assert capsys.readouterr().err == f"error: {line}\n"
