"""What ends a turn, and what is learned of a conversation, in every family: beside TRL 1.16's templates for training.

TRL's ``*_training.jinja`` mark what the assistant generates. Transformers 5.24 returns the mask, and the tokens of the
whole conversation. TRL learns what its templates write after the token that ends a turn, a line break for example, too;
generation never gets there, so here a turn ends with that token.
"""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.errors import ConfigError
from tandem.samples.tokenizer import EncodedConversation, Tokenizer
from tests.harness import families
from tests.harness.families import Family

CALL = {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": {"x": "12*3"}}}
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
    "two in a row": [*SUM, {"role": "assistant", "content": "And more."}],
}
OPEN_THOUGHTS = ("qwen3_5_think", "qwen3_6", "qwen3_8")
"""Families whose generation prompt ends with ``<think>`` and a line break. The line breaks of an empty thought would
join it: the text is divided there, since a response is generated after the tokens of its prompt."""
NO_TOOLS = ("gemma", "gemma3", "cohere", "cohere2", "phi3", "phi3_5", "llama3", "deepseek_r1_distill")
"""Families whose templates refuse tools, or drop them."""


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


def rendered(family: Family, messages: list[dict[str, Any]], *, training: bool = False) -> Any:
    """Return what Transformers makes of a conversation; arguments of calls as text where the template wants text."""
    hugging_face = families.hugging_face(family, training=training)
    as_text = [
        {**m, "tool_calls": [{**CALL, "function": {"name": "calc", "arguments": '{"x": "12*3"}'}}]}
        if "tool_calls" in m
        else m
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
    if name == "tool" and family.name in NO_TOOLS:
        pytest.skip("its template writes no tools")
    messages, tokenizer = CONVERSATIONS[name], loaded(family, training=True)
    expected = rendered(family, messages, training=True)
    if expected is None:
        with pytest.raises(ConfigError):
            tokenizer.encode_conversation(messages)
        return
    turns = [up_to_the_end(turn, tokenizer) for turn in turns_of(expected.input_ids, expected.assistant_masks)]
    if name == "two in a row" and len(turns) == 1:  # gptoss's template marks the header between them
        pytest.skip("its template joins the marks of two turns")
    prompts = [
        tokenizer.render_chat(messages[:number], add_generation_prompt=True)
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    plain = loaded(family).encode_conversation(messages)
    marks = tokenizer.encode_conversation(messages)
    is_same = plain.rendering.text == marks.rendering.text[: len(plain.rendering.text)]
    for encoded in (marks, plain) if is_same else (marks,):
        learned = turns_of([*encoded.token_ids], [*encoded.loss_mask])
        assert len(learned) == len(turns)
        for turn, other, prompt in zip(learned, turns, prompts, strict=True):
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
    ends = tokenizer.turn_ends.all_ids
    assert all(turn[-1] in ends for turn in turns_of([*encoded.token_ids], [*encoded.loss_mask]))
    assert encoded.loss_mask[-1], "it ends where the last turn ends"


def test_generation_ends_where_the_release_says_and_where_the_template_ends(family: Family) -> None:
    tokenizer = loaded(family)
    hugging_face = tokenizer.hugging_face
    ends = {hugging_face.convert_tokens_to_ids(end) for end in (*family.ends, family.eos)}
    assert ends <= {*tokenizer.turn_ends.stop_ids}
    learned = tokenizer.encode_conversation(SUM)
    assert learned.token_ids[-1] in tokenizer.turn_ends.stop_ids, "a policy that learned this stops there"


@pytest.mark.parametrize("name", ["two turns", "tool", "two in a row"])
def test_a_rollout_of_several_turns_has_the_tokens_of_the_whole_conversation(family: Family, name: str) -> None:
    """Prompt, response, continuation, response: the tokens that training on the whole conversation has."""
    if name == "tool" and family.name in NO_TOOLS:
        pytest.skip("its template writes no tools")
    tokenizer, messages = loaded(family), CONVERSATIONS[name]
    try:
        encoded = tokenizer.encode_conversation(messages)
    except ConfigError:
        pytest.skip("its template refuses this conversation")
    first, *_, last = encoded.rendering.turns
    if name == "two in a row" and last.header == first.end:
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
