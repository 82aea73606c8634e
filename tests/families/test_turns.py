"""What ends a turn, and what is learned of a conversation, in every family: beside TRL 1.16's templates for training.

TRL's ``*_training.jinja`` mark what the assistant generates. Transformers 5.24 returns the mask, and the tokens of the
whole conversation. TRL learns what its templates write after the token that ends a turn, a line break for example, too;
generation never gets there, so here a turn ends with that token.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.samples.tokenizer import EncodedConversation, Tokenizer
from tests.harness import families
from tests.harness.families import NO_CALLS, Family

CALL = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": {"x": "12*3"}}}
OTHER_CALL = {"id": "call_2", "type": "function", "function": {"name": "calc", "arguments": {"x": "5*5"}}}
SUM = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": SUM,
    "two turns": [*SUM, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}],
    "system": [{"role": "system", "content": "Be brief."}, *SUM],
    "reasoning": [SUM[0], {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hello."}],
    "tool": [
        {"role": "user", "content": "12*3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is 36."},
    ],
    "text with a call": [
        {"role": "user", "content": "12*3?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is 36."},
    ],
    "system after a tool": [
        {"role": "user", "content": "12*3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "36."},
    ],
    "two in a row": [*SUM, {"role": "assistant", "content": "And more."}],
    "three in a row": [*SUM, {"role": "assistant", "content": "And more."}, {"role": "assistant", "content": "Bye."}],
    "late system": [
        *SUM,
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four."},
    ],
    "system between turns": [
        *SUM,
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Ok."},
    ],
    "spaces": [
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "  Hello. \n\n"},
        {"role": "user", "content": "\n2+2?"},
        {"role": "assistant", "content": " Four. "},
    ],
    "two calls": [
        {"role": "user", "content": "12*3 and 5*5?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER_CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "tool", "name": "calc", "content": "25", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "36 and 25."},
    ],
    "second round": [
        {"role": "user", "content": "12*3, then 5*5?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "", "tool_calls": [OTHER_CALL]},
        {"role": "tool", "name": "calc", "content": "25", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "36 and 25."},
    ],
    "texts with calls": [
        {"role": "user", "content": "12*3, then 5*5?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Now the other.", "tool_calls": [OTHER_CALL]},
        {"role": "tool", "name": "calc", "content": "25", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "36 and 25."},
    ],
    "calls after two questions": [
        {"role": "user", "content": "12*3"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "calc", "content": "36", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "36."},
        {"role": "user", "content": "Now 5*5"},
        {"role": "assistant", "content": "", "tool_calls": [OTHER_CALL]},
        {"role": "tool", "name": "calc", "content": "25", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "25."},
    ],
}
IN_A_ROW, TOOLS = (
    ("two in a row", "three in a row", "system between turns"),
    (
        *("tool", "two calls", "text with a call", "system after a tool"),
        *("second round", "texts with calls", "calls after two questions"),
    ),
)
OPEN_THOUGHTS = ("qwen3_5_think", "qwen3_6", "qwen3_8")
"""Families whose generation prompt ends with ``<think>`` and a line break. The line breaks of an empty thought would
join it: the text is divided there, since a response is generated after the tokens of its prompt."""


def loaded(family: Family, *, training: bool = False) -> Tokenizer:
    return Tokenizer(families.hugging_face(family, training=training), str(families.folder(family)))


def turns_of(token_ids: list[int], mask: list[int] | list[bool]) -> list[list[int]]:
    """Return the runs of tokens that are learned."""
    runs: list[list[int]] = []
    previous = False
    for token, is_learned in zip(token_ids, mask, strict=True):
        if is_learned:
            runs = [*runs[:-1], [*runs[-1], token]] if previous else [*runs, [token]]
        previous = bool(is_learned)
    return runs


def up_to_the_end(turn: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return a turn up to the token that ends it: after it, TRL's template may write a line break or another end."""
    ends = tokenizer.turn_ends.all_ids
    inside = [place for place, token in enumerate(turn) if token in ends]
    rests = [(place, [token for token in turn[place:] if token not in ends]) for place in inside]
    closing = [place for place, rest in rests if not tokenizer.decode(rest).strip()]
    return turn[: closing[0] + 1] if closing else turn


def without_added_ends(encoded: EncodedConversation) -> list[int]:
    """Return the tokens without those that end a turn which the template itself does not close."""
    places = [place for place, is_learned in enumerate(encoded.loss_mask) if is_learned]
    ends = [place for place in places if place + 1 not in places]
    unclosed = [not turn.is_closed for turn in encoded.rendering.turns]
    if len(ends) != len(unclosed):  # the template joins turns, or drops one
        assert not any(unclosed[:-1]) or len(ends) == 1
        ends, unclosed = ends[-1:], unclosed[-1:]
    added = {place for place, is_added in zip(ends, unclosed, strict=True) if is_added}
    return [token for place, token in enumerate(encoded.token_ids) if place not in added]


def call_in_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def rendered(family: Family, messages: list[dict[str, Any]], *, training: bool = False) -> Any:
    """Return what Transformers makes of a conversation; arguments of calls as text where the template wants text."""
    hugging_face = families.hugging_face(family, training=training)
    messages = families.as_read(family, messages)
    as_text = [
        {**m, "tool_calls": [call_in_text(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]
    for form in (messages, as_text):
        try:
            return hugging_face.apply_chat_template(form, return_dict=True, return_assistant_tokens_mask=training)
        except TypeError:
            continue
        except Exception:  # a template refuses in its own way
            return None
    return None


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_is_learned_is_what_trl_marks(family: Family, name: str) -> None:
    """Whether the template marks it itself, or its turns are found."""
    if not family.has_training_template:
        pytest.skip("TRL has no template that marks what is learned")
    if name in TOOLS and family.name in NO_CALLS:
        pytest.skip("its template writes no tools")
    if (name, family.name) in (
        ("two calls", "gptoss"),
        ("system after a tool", "diffusion_gemma"),
    ):
        pytest.skip("its template drops the second call, or writes an end after the tool's answer")
    messages, tokenizer = CONVERSATIONS[name], loaded(family, training=True)
    expected = rendered(family, messages, training=True)
    if expected is None:
        with pytest.raises(ConfigError):
            tokenizer.encode_conversation(messages)
        return
    turns = [up_to_the_end(turn, tokenizer) for turn in turns_of(expected.input_ids, expected.assistant_masks)]
    if name in IN_A_ROW and len(turns) == 1:  # gptoss's template marks the header between them
        pytest.skip("its template joins the marks of two turns")
    prompts = {
        number: tokenizer.render_chat(messages[:number], add_generation_prompt=True)
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    plain = loaded(family).encode_conversation(messages)
    marks = tokenizer.encode_conversation(messages)
    is_same = plain.rendering.text == marks.rendering.text[: len(plain.rendering.text)]
    if name in TOOLS and family.name == "diffusion_gemma":
        # Its marks leave out the token with which a call ends.
        called, ended = tokenizer.undivided_ids(["<tool_call|>", "<|tool_response>"])
        turns = [[*turn, ended] if turn[-1] == called else turn for turn in turns]
    for encoded in (marks, plain) if is_same else (marks,):
        learned = turns_of([*encoded.token_ids], [*encoded.loss_mask])
        assert len(learned) == len(turns)
        for turn, other, span in zip(learned, turns, encoded.rendering.turns, strict=True):
            prompt = prompts[span.message]
            text, whole = (tokenizer.decode(each, skip_special_tokens=False) for each in (turn, other))
            assert whole.endswith(text)
            # What the generation prompt writes of a turn is not learned: the policy never generates it.
            given = whole.removesuffix(text)
            assert given in prompt
        if family.name not in OPEN_THOUGHTS:
            assert [*encoded.token_ids] == expected.input_ids[: len(encoded.token_ids)]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_rendered_and_tokenised_as_a_whole(family: Family, name: str) -> None:
    messages, tokenizer = CONVERSATIONS[name], loaded(family)
    expected = rendered(family, messages)
    if expected is None:
        with pytest.raises(ConfigError):
            tokenizer.encode_conversation(messages)
        return
    encoded = tokenizer.encode_conversation(messages)
    closed = without_added_ends(encoded)
    text = tokenizer.decode(closed, skip_special_tokens=False)
    assert tokenizer.decode(expected.input_ids, skip_special_tokens=False).startswith(text)
    if family.name not in OPEN_THOUGHTS:
        assert [*closed] == expected.input_ids[: len(closed)]
    ends = {*tokenizer.turn_ends.all_ids}
    if family.name == "glm4moe" and "system" in name:  # the next message's marker ends a turn, whoever speaks
        ends.add(tokenizer.hugging_face.convert_tokens_to_ids("<|system|>"))
    learned = turns_of([*encoded.token_ids], [*encoded.loss_mask])
    if family.name == "diffusion_gemma":  # it writes the text of a call after its result, without an end
        learned = [turn for turn in learned if tokenizer.decode(turn) not in ("Let me see.", "Now the other.")]
    assert all(turn[-1] in ends for turn in learned)
    assert encoded.loss_mask[-1], "it ends where the last turn ends"


def test_marks_that_leave_out_the_end_of_a_turn_add_no_second_end(family: Family) -> None:
    """As templates for training do that mark the content alone, such as those of Transformers' documentation."""
    if family.name not in ("qwen2_5_vl", "llama3", "phi3"):
        pytest.skip("one family of each way to end a turn")
    hugging_face = copy.copy(families.hugging_face(family))
    header, end = {
        "qwen2_5_vl": ("'<|im_start|>' + m.role + '\\n'", "'<|im_end|>\\n'"),
        "llama3": ("'<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'", "'<|eot_id|>'"),
        "phi3": ("'<|' + m.role + '|>\\n'", "'<|end|>\\n'"),
    }[family.name]
    prompt = header.replace("m.role", "'assistant'")
    hugging_face.chat_template = (
        f"{{% for m in messages %}}{{{{ {header} }}}}{{% if m.role == 'assistant' %}}{{% generation %}}"
        f"{{{{ m.content }}}}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{{{ {end} }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}"
    )
    tokenizer, messages = Tokenizer(hugging_face, str(families.folder(family))), CONVERSATIONS["two turns"]
    encoded = tokenizer.encode_conversation(messages)
    expected = hugging_face.apply_chat_template(messages, return_dict=True).input_ids
    assert [*encoded.token_ids] == expected[: len(encoded.token_ids)]
    learned = turns_of([*encoded.token_ids], [*encoded.loss_mask])
    closing = end.strip("'").removesuffix("\\n")
    assert [tokenizer.decode(turn, skip_special_tokens=False).lstrip() for turn in learned] == [
        f"Hello.{closing}",
        f"Four.{closing}",
    ]


def test_generation_ends_where_the_release_says_and_where_the_template_ends(family: Family) -> None:
    tokenizer = loaded(family)
    hugging_face = tokenizer.hugging_face
    ends = {hugging_face.convert_tokens_to_ids(end) for end in (*family.ends, family.eos)}
    assert ends <= {*tokenizer.turn_ends.stop_ids}
    learned = tokenizer.encode_conversation(SUM)
    assert learned.token_ids[-1] in tokenizer.turn_ends.stop_ids, "a policy that learned this stops there"


def test_no_message_between_two_turns_is_lost_whatever_ended_the_first(family: Family) -> None:
    """GLM ends a turn by the marker of the user, which stands after a system message."""
    tokenizer = loaded(family)
    between = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    for messages in (between, between[1:]):
        for stop_id in tokenizer.turn_ends.stop_ids:
            try:
                after = tokenizer.decode(tokenizer.encode_continuation(messages, stop_id))
            except ConfigError:
                continue  # a refusal loses nothing
            assert all(message["content"] in after for message in messages), after


@pytest.mark.parametrize("name", ["two turns", "tool", "two calls", "two in a row"])
def test_a_rollout_of_several_turns_has_the_tokens_of_the_whole_conversation(family: Family, name: str) -> None:
    """Prompt, response, continuation, response: the tokens that training on the whole conversation has."""
    if name in TOOLS and family.name in NO_CALLS:
        pytest.skip("its template writes no tools")
    tokenizer, messages = loaded(family), CONVERSATIONS[name]
    try:
        encoded = tokenizer.encode_conversation(messages)
    except ConfigError:
        pytest.skip("its template refuses this conversation")
    if len(encoded.rendering.turns) < 2:
        pytest.skip("its template drops a turn")
    first, *_, last = encoded.rendering.turns
    if name in IN_A_ROW and last.header == first.end:
        pytest.skip("its template joins two turns")
    prompt = tokenizer.encode_chat(messages[: first.message], add_generation_prompt=True)
    if [*encoded.token_ids[: len(prompt)]] != prompt:
        pytest.skip("its template drops from a past turn what its generation prompt opens")
    response = turns_of([*encoded.token_ids], [*encoded.loss_mask])[0]
    between = messages[first.message + 1 : last.message]
    after = tokenizer.encode_continuation(between, response[-1]) if between else []
    if not between:
        return
    sequence = [*prompt, *response, *after]
    assert sequence == [*encoded.token_ids[: len(sequence)]]
    for stop_id in tokenizer.turn_ends.stop_ids:
        other = tokenizer.encode_continuation(between, stop_id)
        assert stop_id == response[-1] or other[: len(after)] == after or other[1:] == after, "an end is written once"
