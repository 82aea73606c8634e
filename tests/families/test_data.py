"""Rows of users' files in every family: what is learned of them, and with which tokens, beside Transformers 5.24."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.common.messages import Problem
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm, EncodedSequence, RewardModelAlgorithm
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.preparing.shown_rows import rows_in_text
from tandem.rollout.environments.reward_model import RewardModel
from tandem.samples.tokenizer import Tokenizer
from tests.harness import families
from tests.harness.families import Family

CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": '{"x": "12*3"}'}}
"""As OpenAI writes it: the arguments are JSON text."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Work out a product.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "It"}}},
        },
    }
]
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "12*3?"},
    {"role": "assistant", "content": None, "reasoning_content": "The tool knows.", "tool_calls": [CALL]},
    {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It is 36."},
]


OPENS_THOUGHTS = (
    *("deepseekv3", "deepseek_r1_distill", "nemotron_3_nano"),
    *("nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
)
"""Families whose generation prompts open a thought, or an empty one, that their conversations lack."""


def configuration(family: Family, algorithm: str, folder: Path, rows: list[dict[str, Any]], **data: Any) -> Config:
    """Return the configuration of a run on these rows, with the family's tokenizer."""
    greeting = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]
    other: dict[str, Any] = {"messages": greeting} if "messages" in rows[0] else {"input": "1+1?", "output": "Two."}
    if "chosen" in rows[0]:
        other = {"prompt": "Hello", "chosen": "Hello.", "rejected": "No."}
    for name, part in (("train", rows), ("held_out", [other])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    section = {
        "dataset_name": "jsonl",
        "train_data_path": str(folder / "train.jsonl"),
        "val_data_path": str(folder / "held_out.jsonl"),
        "max_input_seq_length": 2000,
        **data,
    }
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "policy": {
            "model_name": str(families.folder(family)),
            "train_global_batch_size": len(rows) * (2 if algorithm == "grpo" else 1),
            "train_micro_batch_size": 1,
            "max_total_sequence_length": 2048,
        },
        "data": section,
    }
    if algorithm == "grpo":
        settings["grpo"] = {"num_prompts_per_step": len(rows), "num_generations_per_prompt": 2}
        settings["env"] = {"exact_match": {}}
    return build_config(settings)


def loaded(family: Family) -> Tokenizer:
    return Tokenizer(families.hugging_face(family), str(families.folder(family)))


def sft(family: Family, folder: Path, row: dict[str, Any], **data: Any) -> tuple[EncodedSequence, tuple[str, ...]]:
    """Return the sequence that SFT makes of a row, and its notices."""
    data = {"chat_key": "messages", "add_generation_prompt": True, **data}
    algorithm = DataSetAlgorithm(configuration(family, "sft", folder, [row], **data), loaded(family))
    ((sequence,),) = algorithm._train.draw(0, 1)
    return sequence, algorithm.notices


def learned_text(tokenizer: Tokenizer, sequence: EncodedSequence) -> str:
    tokens = [token for token, counts in zip(sequence.token_ids, sequence.loss_mask, strict=True) if counts]
    return tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_call_its_reasoning_and_its_tools_are_learned_as_the_template_writes_them(
    family: Family, tmp_path: Path
) -> None:
    if family.name in families.NO_CALLS:
        pytest.skip("its template writes no calls")
    tokenizer = loaded(family)
    sequence, notices = sft(family, tmp_path, {"messages": AGENT, "tools": TOOLS})
    arguments: Any = CALL["function"]["arguments"] if family.name == "deepseekv3" else {"x": "12*3"}
    call = {**CALL, "function": {"name": "calc", "arguments": arguments}}
    whole = [AGENT[0], {**AGENT[1], "content": "", "tool_calls": [call]}, *AGENT[2:]]
    expected = tokenizer.hugging_face.apply_chat_template(whole, tools=TOOLS, tokenize=False)
    text = tokenizer.decode(sequence.token_ids, skip_special_tokens=False)
    assert expected.startswith(text.removesuffix("<|user|>") if family.name == "glm4moe" else text)
    learned = learned_text(tokenizer, sequence)
    assert "calc" in learned
    assert "12*3" in learned
    assert "It is 36." in learned
    assert "36" not in learned.replace("It is 36.", ""), "the tool's answer is not learned"
    says_so = any("'reasoning_content'" in notice for notice in notices)
    assert ("The tool knows." in learned) is not says_so, "what the template drops is said"


def test_what_a_template_drops_is_said(family: Family, tmp_path: Path) -> None:
    row = {"messages": [AGENT[0], {"role": "assistant", "reasoning_content": "A product.", "content": "36"}]}
    sequence, notices = sft(family, tmp_path, row)
    is_there = "A product." in learned_text(loaded(family), sequence)
    named = [notice for notice in notices if "does not write 'reasoning_content'" in notice]
    assert len(named) == (0 if is_there else 1)
    assert all("train.jsonl:1" in notice or "held_out.jsonl:1" in notice for notice in named)


QUESTION = {"role": "user", "content": "12*3?"}
SPEAKERS: dict[str, list[dict[str, Any]]] = {
    "developer": [{"role": "developer", "content": 'Be "brief", o vorple.'}, QUESTION],
    "system": [{"role": "system", "content": 'Be "brief", o vorple.'}, QUESTION],
    "tool": [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": 'The "vorple" is 36.', "tool_call_id": "call_1"},
    ],
}


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
@pytest.mark.parametrize("role", SPEAKERS)
def test_whose_message_a_template_drops_is_said(family: Family, role: str, algorithm: str, tmp_path: Path) -> None:
    """Of prompts that are learned after, and of those that responses are generated for."""
    answer = [{"role": "assistant", "content": "Done."}] if algorithm == "sft" else []
    asked, tokenizer = SPEAKERS[role], loaded(family)
    arguments: Any = '{"x": "12*3"}' if family.name == "deepseekv3" else {"x": "12*3"}
    call = {**CALL, "function": {"name": "calc", "arguments": arguments}}
    whole = [{**each, "content": "", "tool_calls": [call]} if "tool_calls" in each else each for each in asked]
    try:
        text = tokenizer.hugging_face.apply_chat_template(
            families.as_read(family, [*whole, *answer]), tokenize=False, add_generation_prompt=not answer
        )
    except Exception as error:  # a template refuses in its own way
        pytest.skip(f"its template refuses these messages: {error}")
    if algorithm == "sft":
        _, notices = sft(family, tmp_path, {"messages": [*asked, *answer]})
    else:
        row = {"input": asked, "output": "36"}
        config = configuration(family, "grpo", tmp_path, [row], input_key="input", output_key="output")
        notices = GrpoAlgorithm(config, tokenizer).notices
    named = [notice for notice in notices if f"the content of a message of the role {role!r}" in notice]
    assert len(named) == (0 if "vorple" in text else 1)
    assert all("train.jsonl:1" in notice for notice in named)
    is_call_dropped = any("does not write 'tool_calls' of the assistant's messages" in notice for notice in notices)
    assert is_call_dropped is (role == "tool" and "calc" not in text)


def test_a_prompt_has_the_tools_of_its_row(family: Family, tmp_path: Path) -> None:
    """In rollouts as in SFT: that of Transformers' template with these tools."""
    rows = [{"input": "12*3?", "output": "36", "tools": TOOLS}]
    data = {"input_key": "input", "output_key": "output", "add_generation_prompt": True}
    tokenizer = loaded(family)
    rollouts = GrpoAlgorithm(configuration(family, "grpo", tmp_path, rows, **data), tokenizer)
    (group,) = rollouts.prompt_groups(1, "train", [0])
    expected = tokenizer.hugging_face.apply_chat_template(
        families.as_read(family, [QUESTION]), tools=TOOLS, add_generation_prompt=True
    )
    assert [*group.prompt_ids] == expected["input_ids"]
    algorithm = DataSetAlgorithm(configuration(family, "sft", tmp_path, rows, **data), tokenizer)
    ((sequence,),) = algorithm._train.draw(0, 1)
    prompt = sequence.token_ids[: sequence.loss_mask.index(True)]
    if family.name in OPENS_THOUGHTS:
        prompt = prompt[: len(prompt) - family.name.startswith("nemotron_3")]
    assert group.prompt_ids[: len(prompt)] == prompt
    is_shown = "Work out a product." in tokenizer.decode(group.prompt_ids)
    for notices in (rollouts.notices, algorithm.notices):
        assert any("does not write 'tools'" in notice for notice in notices) is not is_shown


def test_a_turn_of_weight_0_is_not_learned(family: Family, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Grumble.", "weight": 0},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four."},
    ]
    tokenizer = loaded(family)
    sequence, _ = sft(family, tmp_path, {"messages": messages})
    learned = learned_text(tokenizer, sequence)
    assert "Four." in learned
    assert "Grumble" not in learned
    assert "Grumble." in tokenizer.decode(sequence.token_ids, skip_special_tokens=False)


def test_the_prompt_of_sft_is_the_prompt_of_rollouts(family: Family, tmp_path: Path) -> None:
    rows = [{"input": "2+2?", "output": "Four."}]
    data = {"input_key": "input", "output_key": "output", "add_generation_prompt": True}
    tokenizer = loaded(family)
    rollouts = GrpoAlgorithm(configuration(family, "grpo", tmp_path, rows, **data), tokenizer)
    (group,) = rollouts.prompt_groups(1, "train", [0])
    algorithm = DataSetAlgorithm(configuration(family, "sft", tmp_path, rows, **data), tokenizer)
    ((sequence,),) = algorithm._train.draw(0, 1)
    prompt = sequence.token_ids[: sequence.loss_mask.index(True)]
    if family.name in OPENS_THOUGHTS:
        # Their generation prompts open a thought, and their templates drop it from what is given.
        prompt = prompt[: len(prompt) - family.name.startswith("nemotron_3")]
        assert group.prompt_ids[: len(prompt)] == prompt
    else:
        assert group.prompt_ids == prompt
    sampling = rollouts.sampling("train")
    ends = {tokenizer.hugging_face.convert_tokens_to_ids(end) for end in (family.eos, *family.ends)}
    assert ends <= {*sampling.stop_token_ids}
    assert sequence.token_ids[-1] in sampling.stop_token_ids


def test_without_a_template_both_begin_with_what_the_tokenizer_begins_with(family: Family, tmp_path: Path) -> None:
    rows = [{"input": "2+2=", "output": "4"}]
    data = {"input_key": "input", "output_key": "output"}
    hugging_face = families.hugging_face(family)
    template, hugging_face.chat_template = hugging_face.chat_template, None
    try:
        tokenizer = loaded(family)
        rollouts = GrpoAlgorithm(configuration(family, "grpo", tmp_path, rows, **data), tokenizer)
        (group,) = rollouts.prompt_groups(1, "train", [0])
        algorithm = DataSetAlgorithm(configuration(family, "sft", tmp_path, rows, **data), tokenizer)
        ((sequence,),) = algorithm._train.draw(0, 1)
    finally:
        hugging_face.chat_template = template
    expected = hugging_face("2+2=")["input_ids"]
    assert [*group.prompt_ids] == expected
    assert [*sequence.token_ids[: sequence.loss_mask.index(True)]] == expected
    assert sequence.token_ids[-1] == tokenizer.eos_id


def test_a_stop_string_that_is_a_token_stops_as_that_token(family: Family, tmp_path: Path) -> None:
    tokenizer = loaded(family)
    marker = next(text for text, _ in tokenizer._undivided.items() if text not in family.ends)
    token_ids, texts = tokenizer.stop_conditions((), (marker, "\nUser:"))
    assert texts == ("\nUser:",)
    assert tokenizer.hugging_face.convert_tokens_to_ids(marker) in token_ids


def test_a_reward_model_scores_where_it_was_trained(family: Family, tmp_path: Path) -> None:
    """The last token before the padding that a reward model's training puts behind each sequence."""
    row = {"prompt": "2+2?", "chosen": "Four.", "rejected": "Five."}
    config = configuration(family, "rm", tmp_path, [row])
    tokenizer = loaded(family)
    algorithm = RewardModelAlgorithm(config, tokenizer)
    ((chosen, _),) = algorithm._train.draw(0, 1)
    environment = RewardModel.__new__(RewardModel)  # its model is not asked
    environment._tokenizer, environment._longest, environment._pad_id = tokenizer, None, tokenizer.pad_id
    problem = Problem(
        problem_id="p", question="2+2?", answer="4", metadata={}, prompt=({"role": "user", "content": "2+2?"},)
    )
    scored = environment.encode(problem, [{"role": "assistant", "content": "Four."}])
    last = environment._last(scored)
    assert chosen.token_ids[: last + 1] == tuple(scored[: last + 1])
    assert chosen.loss_mask.index(True) == last + 1


def test_a_shown_row_is_the_text_of_the_template_with_what_is_learned_marked(family: Family, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "Four, I think."}]
    tokenizer = loaded(family)
    config = configuration(
        family, "sft", tmp_path, [{"messages": messages}], chat_key="messages", add_generation_prompt=True
    )
    algorithm = DataSetAlgorithm(config, tokenizer)
    head, row, *rest = (line.plain for line in rows_in_text(config, algorithm, tokenizer, 1, is_coloured=False))
    text = "\n".join(line.removeprefix("  ") for line in row.split("\n"))
    ((sequence,),) = algorithm.conversations(1, 1)
    assert f"{len(sequence.token_ids)} tokens" in head
    expected = tokenizer.hugging_face.apply_chat_template(families.as_read(family, messages), tokenize=False)
    if family.name not in OPENS_THOUGHTS:  # divided where a thought opens
        plain = text.replace("⟦", "").replace("⟧", "")
        if family.tokenizer == "llama2":  # it has a space of its own after each special token
            plain, expected = (each.replace(" ", "") for each in (plain, expected))
        assert expected.startswith(plain.removesuffix("<|user|>") if family.name == "glm4moe" else plain)
    before, _, learned = text.partition("⟦")
    assert "Four, I think." in learned
    assert "What is 2+2?" in before
    bos = tokenizer.hugging_face.bos_token
    if bos is not None and sequence.token_ids[0] == tokenizer.bos_id:
        assert f"with BOS, {bos!r}" in rest[0]
    end = sequence.token_ids[-1]
    assert f"({end})" in rest[1]
    assert repr(tokenizer.hugging_face.convert_ids_to_tokens(end)) in rest[1]
    assert end in tokenizer.turn_ends.all_ids
    assert rest[2:] == [""], "every turn ends with a token that ends turns"


def test_a_shown_prompt_is_the_template_with_its_generation_prompt_and_what_stops_a_response_is_named(
    family: Family, tmp_path: Path
) -> None:
    rows = [{"input": "What is 2+2?", "output": "Four."}]
    tokenizer = loaded(family)
    config = configuration(family, "grpo", tmp_path, rows, input_key="input", output_key="output")
    algorithm = GrpoAlgorithm(config, tokenizer)
    lines = [line.plain for line in rows_in_text(config, algorithm, tokenizer, 1, is_coloured=False)]
    shown = "\n".join(line.removeprefix("  ") for line in lines[1].split("\n"))
    question = families.as_read(family, [{"role": "user", "content": "What is 2+2?"}])
    expected = tokenizer.hugging_face.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    if family.tokenizer == "llama2":  # it has a space of its own after each special token
        shown, expected = shown.replace(" ", ""), expected.replace(" ", "")
    assert shown == expected
    assert "reference  Four." in lines
    (stops,) = (line for line in lines if line.startswith("stops"))
    for end in (*family.ends, family.eos):
        token = tokenizer.hugging_face.convert_tokens_to_ids(end)
        assert (f"{end!r} ({token})" in stops) is (token in algorithm.sampling("train").stop_token_ids)
    assert f"{family.eos!r} (" in stops
