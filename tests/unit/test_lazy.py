"""Data is tokenised when it is drawn; what is wrong with it is mostly said before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_harness import character_tokenizer, data_config

from tandem.common.errors import DataError
from tandem.config import Config
from tandem.coordinator.algorithms import make_algorithm
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.samples.data_sets import ItemLengths, LazyDataset, PromptEncoder, epoch_stream
from tandem.samples.data_sets.order import NUM_CHECKED
from tandem.samples.model_files import load_tokenizer

NUM = 2 * NUM_CHECKED
TOO_LONG = "longer than data.max_input_seq_length and policy.max_total_sequence_length allow"


def rows(num: int = NUM, **changed: str) -> dict[str, Any]:
    """Write sums to a file; ``_7="x"`` changes the question of row 7."""
    inputs = [changed.get(f"_{index}", f"{index} + 1") for index in range(num)]
    text = "\n".join(json.dumps({"input": asked, "output": f" = {index + 1}"}) for index, asked in enumerate(inputs))
    Path("sums.jsonl").write_text(text)
    return {"dataset_name": "jsonl", "train_data_path": "sums.jsonl", "val_data_path": "held_out.jsonl"}


@pytest.fixture(autouse=True)
def held_out() -> None:
    Path("held_out.jsonl").write_text('{"input": "- 1", "output": " = - 1"}\n')


def place(config: Config, position: int, num: int = NUM) -> int:
    """The row that a run draws at this position."""
    return epoch_stream(config.algorithm_section.seed, num, position, 1)[0]


def questions(running: DataSetAlgorithm | GrpoAlgorithm, config: Config, steps: range) -> list[str]:
    """What each step asks, in order."""
    if isinstance(running, GrpoAlgorithm):
        groups = [group for step in steps for group in running.prompt_groups(step, "train", range(4))]
        return [group.problem.question for group in groups]
    tokenizer, found = load_tokenizer(config), []
    for step in steps:
        made, _ = running.batch(step, "train")
        batch, end = made, 0
        assert batch is not None
        for length in batch.lengths_S:
            found.append(tokenizer.decode(batch.token_ids_T[end : end + length].tolist()).split(" = ")[0])
            end += length
    return found


def algorithm_of(config: Config) -> Any:
    return make_algorithm(config, load_tokenizer(config) if Path("model").exists() else character_tokenizer(config))


def test_only_the_first_items_are_encoded_at_once_and_the_rest_when_they_are_drawn() -> None:
    asked: list[int] = []

    def encode(item: int) -> str:
        asked.append(item)
        return str(item)

    config = data_config("sft", **rows())
    lazy = LazyDataset(config, range(NUM), encode)
    order = epoch_stream(config.sft.seed, NUM, 0, NUM)
    assert asked == order[:NUM_CHECKED]
    assert lazy.draw(0, NUM) == [str(item) for item in order]
    assert asked == order, "each once"
    made = data_config("sft", num_train=NUM)
    asked.clear()
    LazyDataset(made, range(NUM), encode)
    assert len(asked) == NUM, "what a task made is wrong altogether if it is wrong anywhere"


def test_what_a_task_made_is_encoded_at_once_only_where_it_may_be_too_long() -> None:
    """A token has four bytes here, and each item three tokens of a template; what is sure is a token a byte."""
    encoded: list[int] = []

    def encode(item: int) -> str:
        encoded.append(item)
        return "t" * (item // 4 + 3)

    config, limit = data_config("sft", num_train=NUM), 300
    lazy = LazyDataset(config, range(NUM), encode, lengths=ItemLengths(lambda item: item, len, limit))
    order = epoch_stream(config.sft.seed, NUM, 0, NUM)
    first, others = order[:NUM_CHECKED], order[NUM_CHECKED:]
    most_added = max(item // 4 + 3 - item for item in first)
    assert encoded == [*first, *(item for item in others if item + most_added > limit)]
    assert NUM_CHECKED < len(encoded) < NUM
    assert lazy.num_checked == NUM
    assert lazy.draw(0, NUM) == [encode(item) for item in order]


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_prompts_and_conversations_of_a_task_are_measured(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    kind, name = (PromptEncoder, "encode") if algorithm == "grpo" else (DataSetAlgorithm, "_encode")
    encode = getattr(kind, name)

    def encode_and_count(self: Any, item: Any) -> Any:
        encoded = encode(self, item)
        lengths.append(len(encoded.prompt_ids) if algorithm == "grpo" else len(encoded[0].token_ids))
        return encoded

    monkeypatch.setattr(kind, name, encode_and_count)
    settings = {"num_train": NUM, "task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
    algorithm_of(data_config(algorithm, **settings))
    assert NUM_CHECKED < len(lengths) < NUM, "the first, and those held out"
    with pytest.raises(DataError, match="its prompt has"):
        algorithm_of(data_config(algorithm, **settings, max_input_seq_length=2))


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_an_item_that_is_too_long_gives_its_place_to_the_next_whenever_it_is_drawn(algorithm: str) -> None:
    config = data_config(algorithm, **rows())
    late, early = place(config, NUM - 1), place(config, 0)
    config = data_config(algorithm, **rows(**{f"_{late}": "1" * 70, f"_{early}": "2" * 70}))
    running = algorithm_of(config)
    (notice,) = running.notices
    checked = NUM_CHECKED + 1
    assert notice == f"data: 1 of the first {checked} left out, and others when it is their turn: {TOO_LONG}"
    size = 8 if algorithm == "sft" else 4
    epoch = questions(running, config, range(1, NUM // size + 1))
    expected = [f"{(index + (index in (late, early))) % NUM} + 1" for index in epoch_stream(1, NUM, 0, NUM)]
    assert epoch == expected
    last = range(NUM // size, NUM // size + 1)
    assert questions(algorithm_of(config), config, last) == expected[-size:], "a resumed run draws the same"


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_characters_that_are_unknown_are_all_named_at_once_wherever_they_are(algorithm: str) -> None:
    config = data_config(algorithm, **rows())
    first, last = place(config, 0), place(config, NUM - 1)
    Path("held_out.jsonl").write_text('{"input": "- x", "output": " = z"}\n')
    changed = rows(**{f"_{first}": "x", f"_{last}": "yx?"})
    places = {"x": first + 1, "y?": last + 1} if first < last else {"yx?": last + 1}
    found = ", ".join(f"'{c}' (first in problem 'sums.jsonl:{row}')" for c, row in places.items())
    held_out, count = (", 'z' (first in problem 'held_out.jsonl:1')", 4) if algorithm == "sft" else ("", 3)
    with pytest.raises(DataError) as caught:
        algorithm_of(data_config(algorithm, **changed))
    assert str(caught.value) == f"the tokenizer in model does not know {count} characters: {found}{held_out}"


def test_characters_of_templates_are_named_by_template() -> None:
    settings = rows() | {
        "prompt_template": "Q{question}",
        "solution_template": "{answer}!1",
        "system_prompt": "be\n1",
        "prompt_file": "prompt.txt",
    }
    Path("prompt.txt").write_text("({})?")
    with pytest.raises(DataError) as caught:
        algorithm_of(data_config("sft", **settings))
    assert str(caught.value) == (
        "the tokenizer in model does not know 8 characters: 'be\\n' (first in data.system_prompt), '()?' (first in "
        "data.prompt_file), 'Q' (first in data.prompt_template), '!' (first in data.solution_template)"
    )
    Path("model/chat_template.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    with pytest.raises(DataError, match=r"not know 2 characters: '<>' \(first in the chat template\)$"):
        algorithm_of(data_config("grpo", **rows()))


def test_what_is_wrong_is_named_at_once_among_the_first_and_else_when_it_is_drawn() -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    settings = {"dataset_name": "openai_format", "train_data_path": "talk.jsonl", "val_data_path": "held_out.jsonl"}
    Path("held_out.jsonl").write_text(json.dumps({"messages": turns}))

    def config(bad: int | None) -> Config:
        lines = [
            turns + turns[:1] if index == bad else [{"role": "user", "content": str(index)}, turns[1]]
            for index in range(10, NUM + 10)
        ]
        Path("talk.jsonl").write_text("\n".join(json.dumps({"messages": line}) for line in lines))
        return data_config("sft", **settings)

    first, last = place(config(None), NUM_CHECKED - 1), place(config(None), NUM - 1)
    message = "its solution does not end with a turn of the assistant$"
    with pytest.raises(DataError, match=f"^problem 'talk.jsonl:{first + 1}': {message}"):
        algorithm_of(config(first + 10))
    running = algorithm_of(config(last + 10))
    for step in range(1, NUM // 8):
        running.batch(step, "train")
    with pytest.raises(DataError, match=f"^problem 'talk.jsonl:{last + 1}': {message}"):
        running.batch(NUM // 8, "train")


@pytest.mark.parametrize(("num", "which"), [(9, "every one"), (NUM, f"each of the first {NUM_CHECKED}")])
def test_a_file_of_which_nothing_fits_is_refused(num: int, which: str) -> None:
    long = {f"_{index}": f"{index} " + "1" * 70 for index in range(num)}
    with pytest.raises(DataError, match=f"^data: {which} is longer than policy.max_total_sequence_length allows$"):
        algorithm_of(data_config("sft", **rows(num, **long)))
    Path("held_out.jsonl").write_text(json.dumps({"input": "1" * 70, "output": "2"}))
    with pytest.raises(DataError, match=r"^data: everything held out is longer than policy.max_total_sequence"):
        algorithm_of(data_config("sft", **rows(num)))
