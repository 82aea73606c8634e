"""``coordinator samples``: which samples of a record it shows, and how."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from run_harness import Run, make_config, record
from samples_harness import recorded, sample_of, scored

from tandem.common.errors import SamplesError
from tandem.common.texts import visible
from tandem.config import build_config, config_to_json
from tandem.config.schema import NewModel
from tandem.coordinator.cli import main
from tandem.observe.run_folder.journal_writer import Journal
from tandem.observe.samples import SampleQuery, Sort, recorded_steps, search, select
from tandem.observe.samples_text import chat_text, print_samples
from tandem.samples.model_files import load_tokenizer, write_new_model
from tandem.samples.sample_files import FOLDER, shard_path
from tandem.samples.sample_record import RecordedSample

CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


def a_sample(group: int, sample: int, reward: float, *, step: int = 3, **more: Any) -> RecordedSample:
    """A sample of two tokens of prompt, with texts that tell it apart."""
    known = scored(
        group, sample, prompt_length=2, response_length=2 + sample, reward=reward, response=f"answer {group}.{sample}"
    )
    usual = {"step": step, "rollout": f"rollout-{group % 2}", "advantage": -float(group) if sample else None}
    return recorded(known, sample_of(4 + sample, first_token=10 * group + sample), **usual | more)


def a_record() -> list[RecordedSample]:
    """Four groups of two, of two rollouts."""
    return [a_sample(group, sample, reward=(7 * group + 3 * sample) % 8) for group in range(4) for sample in range(2)]


def places(samples: list[RecordedSample]) -> list[tuple[int, int]]:
    return [(sample.scored.group, sample.scored.sample) for sample in samples]


def shown(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return what the command says."""
    code = main(["samples", *words])
    out, errors = capsys.readouterr()
    return code, out, errors


# --- what is chosen --------------------------------------------------------------------------------------------------


def test_samples_come_in_the_order_and_the_pages_that_are_asked_for() -> None:
    run = Run()
    record(run, a_record())
    folder = Path("run")

    def of(sort: Sort = "group", **query: Any) -> list[tuple[int, int]]:
        return places(select(folder, SampleQuery(sort=sort, **query), run.journal.run_id))

    by_place = [divmod(i, 2) for i in range(8)]
    by_reward = sorted(by_place, key=lambda place: ((7 * place[0] + 3 * place[1]) % 8, place))
    assert of() == by_place
    assert of(descending=True) == by_place[::-1]
    assert of("reward") == by_reward
    assert of("reward", descending=True, limit=3) == by_reward[:-4:-1]
    assert of("reward", offset=2, limit=3) == by_reward[2:5]
    assert of("reward", offset=7, limit=3) == by_reward[7:]
    assert of("reward", min_reward=1, max_reward=3) == by_reward[2:5]
    assert of("length", limit=2) == [(0, 0), (1, 0)], "the shorter ones first"
    assert of("advantage") == [(3, 1), (2, 1), (1, 1), (0, 1), *by_place[::2]], "what has none is last"
    assert of("advantage", descending=True) == [(0, 1), (1, 1), (2, 1), (3, 1), *by_place[::2]]
    assert of(group=2) == [(2, 0), (2, 1)]
    assert of(problem_id="problem-1") == [(1, 0), (1, 1)]
    assert of(contains="ANSWER 3.1") == [(3, 1)]
    assert of(contains="problem-2") == [(2, 0), (2, 1)]
    assert of(contains="<s>2+2", limit=1) == [(0, 0)]
    assert of(contains="nowhere") == []
    found = search(folder, SampleQuery(group=1, limit=1))
    assert (found.step, found.num_samples, found.num_chosen, found.groups) == (3, 8, 2, (0, 1, 2, 3))


def test_what_is_returned_is_what_was_recorded_and_tokens_only_where_they_are_asked_for() -> None:
    run = Run()
    made = a_record()
    record(run, made)
    for whole, short, sample in zip(
        select(Path("run"), SampleQuery()), select(Path("run"), SampleQuery(with_tokens=False)), made, strict=True
    ):
        for name in set(RecordedSample.__struct_fields__) - {"arrays"}:
            assert getattr(whole, name) == getattr(short, name) == getattr(sample, name)
        for name, array in sample.arrays.columns.items():
            assert np.array_equal(getattr(whole.arrays, name), array)
            assert getattr(short.arrays, name).sum() == 0
            assert getattr(short.arrays, name).dtype == array.dtype


def test_the_newest_step_is_the_default_and_steps_are_listed() -> None:
    run = Run()
    for step in (1, 2, 4):
        record(run, [a_sample(0, 0, 1.0, step=step)])
    assert search(Path("run"), SampleQuery()).step == 4
    assert search(Path("run"), SampleQuery(step=2)).samples[0].step == 2
    assert recorded_steps(Path("run")) == [1, 2, 4]
    assert recorded_steps(Path("run"), "validate") == []
    with pytest.raises(SamplesError, match=r"^run/samples has no samples of step 3, only those of steps 1, 2, 4$"):
        select(Path("run"), SampleQuery(step=3))
    with pytest.raises(SamplesError, match=r"^run/samples has no validation samples: logger.samples says how much"):
        select(Path("run"), SampleQuery(purpose="validate"))


def test_of_a_big_shard_only_what_is_needed_is_read() -> None:
    run = Run()
    record(run, [a_sample(group, sample, 0.0, rollout="rollout-0") for group in range(100) for sample in range(2)])
    path = shard_path(Path("run") / FOLDER, 3, "rollout-0")
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups > 1
    last = metadata.row_group(metadata.num_row_groups - 1)
    column = next(
        last.column(i) for i in range(last.num_columns) if last.column(i).path_in_schema.startswith("token_ids")
    )
    with path.open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    assert places(select(Path("run"), SampleQuery(group=5))) == [(5, 0), (5, 1)]
    assert len(select(Path("run"), SampleQuery(with_tokens=False))) == 200
    with pytest.raises(SamplesError, match=r"step-00000003.rollout-0.parquet cannot be read"):
        select(Path("run"), SampleQuery(group=99))


# --- what is printed -------------------------------------------------------------------------------------------------


def test_the_command_shows_a_sample_with_all_that_is_known_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    known = scored(
        0, 1, reward=0.5, components={"form": 0.25}, finish_reason="length", response="5", oldest_version=2,
        newest_version=3, tokens_by_version=(1, 1), prompt_length=2, response_length=2, failure="boom", dropped=True,
    )  # fmt: skip
    record(run, [recorded(known, sample_of(4), step=3, prompt=CHAT, advantage=-0.25)])
    code, out, errors = shown("run", capsys=capsys)
    assert code == 0
    assert "the tokenizer is neither in model nor in a checkpoint" in errors
    assert out.splitlines() == [
        "━━ step 3, group 0, sample 1",
        "problem    problem-0",
        "prompt",
        "  <|im_start|>system",
        "  Be brief.<|im_end|>",
        "  <|im_start|>user",
        "  2+2=<|im_end|>",
        "  <|im_start|>assistant",
        "  ",
        "response",
        "  5",
        "reference  4",
        "reward     0.5 (not correct), form 0.25",
        "advantage  -0.25",
        "weights    version 2 (1 tokens), version 3 (1 tokens)",
        "ended      length: no room for more tokens; 2 tokens of prompt, 2 generated; by rollout-0 in 1.5 s",
        "failure    the environment failed: boom; the sample is dropped",
        "",
        "1 samples of step 3",
    ]


def test_a_page_of_samples_says_how_many_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    record(Run(), a_record())
    _, out, _ = shown("run", "--worst", "--limit", "2", capsys=capsys)
    heads = [line for line in out.splitlines() if line.startswith("━━")]
    assert heads == ["━━ step 3, group 0, sample 0", "━━ step 3, group 3, sample 1"]
    assert out.splitlines()[-1] == "8 samples of step 3, 6 of them not shown: see --limit"
    _, out, _ = shown("run", "--contains", "answer 2", capsys=capsys)
    assert out.splitlines()[-1] == "2 chosen of the 8 samples of step 3"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "--step", "9"], "run/samples has no samples of step 9, only those of step 3"),
        (["run", "--group", "4"], "step 3 has no group 4, only 0 to 3"),
        (["run", "--validation"], "run/samples has no validation samples: logger.samples says how much is kept"),
        (["elsewhere"], "elsewhere holds no run: there is no such folder; there are run"),
        (["runs"], "runs holds no run: there is no such folder; there are run; did you mean 'run'?"),
        (["."], ". holds no run: there is no journal.sqlite in it; there are run"),
    ],
)
def test_what_is_not_there_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    record(Run(), a_record())
    assert shown(*words, capsys=capsys) == (1, "", f"error: {line}\n")


def test_a_damaged_shard_is_one_line_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    record(Run(), a_record())
    path = shard_path(Path("run") / FOLDER, 3, "rollout-1")
    path.write_bytes(path.read_bytes()[:-20])
    code, out, errors = shown("run", capsys=capsys)
    assert (code, out) == (1, "")
    assert errors.startswith(f"error: {path} cannot be read as part of the rollout log: ")
    assert errors.count("\n") == 1


def test_a_run_without_samples_of_its_own_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    replay = {"run": "run", "run_id": "x", "from_step": 0, "to_step": 3}
    config = msgspec.to_builtins(make_config()) | {"replay": replay}
    with Journal.create(Path("again"), config_to_json(build_config(config)), "grpo"):
        pass
    line = "error: again is a replay, of samples of run: look at those\n"
    assert shown("again", capsys=capsys) == (1, "", line)


def test_turns_are_told_apart_with_the_runs_tokenizer() -> None:
    run = Run()
    write_new_model(Path("model"), NewModel(characters="0123456789+-= ", config={"model_type": "qwen3"}))
    tokenizer = load_tokenizer(run.config)
    arrays = sample_of(9, prompt_length=3)
    ids = [1, *tokenizer.encode("2+"), *tokenizer.encode("35"), 2, *tokenizer.encode("="), *tokenizer.encode("7"), 2]
    mask = [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    arrays = arrays.replace(token_ids_T=np.array(ids, np.int32), loss_mask_T=np.array(mask))
    known = scored(0, 0, prompt_length=3, response_length=4, num_turns=2, response="35\n=\n7")
    record(run, [recorded(known, arrays, step=3, prompt="<bos>2+")])
    out = io.StringIO()
    print_samples(search(Path("run"), SampleQuery()), Console(file=out, width=20), "train", tokenizer)
    lines = out.getvalue().splitlines()
    first = lines.index("response 1 of 2")
    assert lines[first : first + 6] == [
        "response 1 of 2",
        "  35",
        "environment",
        "  <eos>=",
        "response 2 of 2",
        "  7<eos>",
    ]
    assert "2 turns; by rollout-0" in out.getvalue(), "a narrow page breaks no line"


def test_roles_and_special_tokens_have_styles_on_a_terminal_and_nothing_else_changes() -> None:
    text = chat_text(f"{CHAT}4 < 5<|im_end|>")
    assert text.plain == f"{CHAT}4 < 5<|im_end|>"
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans if span.style}
    assert styles["system\nBe brief."] == "yellow"
    assert styles["user\n2+2="] == "cyan"
    assert styles["assistant\n4 < 5"] == "green"
    assert styles["<|im_start|>"] == "dim italic"
    llama = chat_text("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>")
    assert {"user", "Hi"} <= {llama.plain[s.start : s.end].strip() for s in llama.spans if str(s.style) == "cyan"}
    mistral = chat_text("<s>[INST] Hi [/INST] Ho</s>")
    assert [mistral.plain[s.start : s.end] for s in mistral.spans if str(s.style) == "cyan"] == [" Hi "]


def test_what_a_model_says_cannot_reach_the_terminal() -> None:
    assert visible("a\x1b[2Jb\r\nc\rd\te\x9b\u202e") == r"a\x1b[2Jb" + "\n" + r"c\rd" + "\te" + r"\x9b\u202e"
    run = Run()
    known = scored(0, 0, response="\x1b]0;owned\x07")
    record(run, [recorded(known, sample_of(2), step=3, prompt="\x1b[2J", problem_id="\x1b[5m", answer="\x07")])
    out = io.StringIO()
    print_samples(search(Path("run"), SampleQuery()), Console(file=out), "train", None)
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
