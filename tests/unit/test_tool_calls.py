"""Calls of tools, as OpenAI's own client gets them and sends them back, in answers, streams and episodes of agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from serving_harness import at, client
from tools_harness import CALC, CALL, QUESTION, VOCABULARY, Scripted, asked, episode, make_tokenizer, spoken

from tandem.config.schema.generation import ToolCallParser
from tandem.rollout.environments import Score
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.text import ChatReader
from tandem.samples.responses import ResponseMarkers, chat_markers

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ADDED = ("add", {"a": 1, "b": [2, "}"]})
TEXTS: dict[str, tuple[ToolCallParser, str, str, list[tuple[str, dict[str, Any]]]]] = {
    "text": ("hermes", " 1 < 2 <tool ", " 1 < 2 <tool ", []),
    "a call": ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
    "text and calls": (
        "hermes",
        f"I add.\n\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>\n",
        "I add.",
        [ADDED, ADDED],
    ),
    "text behind": ("hermes", f"<tool_call>{ADD}</tool_call>\n Done. ", "Done.", [ADDED]),
    "no end": ("hermes", f"So: <tool_call>\n{ADD}\n", "So:", [ADDED]),
    "cut": ("hermes", f"So: <tool_call>\n{ADD[:-1]}", f"So: <tool_call>\n{ADD[:-1]}", []),
    "no JSON": ("hermes", "<tool_call>add(1)</tool_call>!", "<tool_call>add(1)</tool_call>!", []),
    "no JSON, and a call": (
        "hermes",
        f"<tool_call>add(1)</tool_call><tool_call>{ADD}</tool_call>",
        "<tool_call>add(1)</tool_call>",
        [ADDED],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
    "no object": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": "1"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "1"}</tool_call>',
        [],
    ),
    "no number": (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>',
        [],
    ),
    "too deep": ("hermes", f"<tool_call>{'[' * 2_000}</tool_call>", f"<tool_call>{'[' * 2_000}</tool_call>", []),
    "llama": ("llama3_json", ADD.replace("arguments", "parameters"), "", [ADDED]),
    "llama's tag": ("llama3_json", f"\n<|python_tag|>{ADD}", "", [ADDED]),
    "several": ("llama3_json", f"{ADD}; {ADD};\n{ADD}", "", [ADDED] * 3),
    # As vLLM 0.32's parser and TRL 1.16's response template read it.
    "llama's text": ("llama3_json", f"Sure:\n{ADD}", "Sure:", [ADDED]),
    "llama's text and tag": ("llama3_json", f"Let me {{x}}. <|python_tag|>{ADD}; {ADD}\n", "Let me {x}.", [ADDED] * 2),
    "llama's text and JSON": ("llama3_json", 'So {"name": 1} ', 'So {"name": 1} ', []),
    "llama's text behind": ("llama3_json", f"Sure: {ADD} done", f"Sure: {ADD} done", []),
    "llama's JSON": ("llama3_json", '{"answer": 1} ', '{"answer": 1} ', []),
    "one is none": ("llama3_json", f"{ADD}; add(1)", f"{ADD}; add(1)", []),
    "llama, cut": ("llama3_json", ADD[:-2], ADD[:-2], []),
    "code": ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "hermes to llama": ("llama3_json", f"<tool_call>{ADD}</tool_call>", f"<tool_call>{ADD}</tool_call>", []),
}


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize(("parser", "text", "content", "calls"), TEXTS.values(), ids=TEXTS)
def test_what_is_a_call_and_what_is_text_however_it_comes(
    parser: ToolCallParser, text: str, content: str, calls: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    reader = ChatReader(chat_markers(ResponseMarkers(), parser, may_call=True), "key")
    parts = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.finish())
    assert "".join(part.text for part in parts) == content
    found = [call for part in parts for call in part.tool_calls]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)
    assert reader.has_calls == bool(calls)


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    reader = ChatReader(chat_markers(ResponseMarkers(), "hermes", may_call=True), "key")
    assert [reader.push(text).text for text in ("I think ", "that <", "tool", "box>", " <tool_call>")] == [
        "I think",
        " that",
        "",
        " <toolbox>",
        "",
    ]


ASK: dict[str, Any] = {"model": "m", "messages": QUESTION, "tools": [CALC]}


def test_the_client_gets_calls_whole_and_in_a_stream(tmp_path: Path) -> None:
    response = spoken(f"Let me see.\n{CALL}\n{CALL}")
    with asked(tmp_path, response, response, spoken(CALL)) as made:
        (choice,) = made.chat.completions.create(**ASK, seed=5).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls = choice.message.tool_calls
        assert calls is not None
        assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [  # type: ignore[union-attr]
            ("function", "calc", {"a": 12, "b": 3})
        ] * 2
        assert len({call.id for call in calls}) == 2
        with made.chat.completions.stream(**ASK, seed=5) as stream:
            events = [*stream]
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == choice.message.content
        assert streamed.message.tool_calls is not None
        assert [(c.id, c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == [
            (c.id, c.function.name, c.function.arguments)  # type: ignore[union-attr]
            for c in calls
        ]
        assert len([event for event in events if event.type == "tool_calls.function.arguments.done"]) == 2
        (silent,) = made.chat.completions.create(**ASK).choices
        assert silent.message.content is None


def test_what_is_no_call_or_is_not_to_be_one_is_text(tmp_path: Path) -> None:
    broken = "<tool_call>calc(12, 3)</tool_call>"
    responses = [spoken(broken), spoken(CALL), spoken(CALL), spoken(CALL)[:-1]]
    with asked(tmp_path, *responses) as made:

        def ask(**changes: Any) -> Any:
            (choice,) = made.chat.completions.create(**{**ASK, **changes}).choices
            return choice

        malformed = ask()
        assert (malformed.finish_reason, malformed.message.content) == ("stop", broken)
        assert malformed.message.tool_calls is None
        for change in ({"tool_choice": "none"}, {"tools": []}):
            text = ask(**change)
            assert (text.finish_reason, text.message.tool_calls) == ("stop", None)
            assert text.message.content == CALL.replace("<tool_call>", "").replace("</tool_call>", ""), "special tokens"
        cut = ask()
        assert cut.finish_reason == "length"
        assert len(cut.message.tool_calls) == 1
    with asked(tmp_path, spoken(CALL), parser=None) as made:
        (choice,) = made.chat.completions.create(**ASK).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "it may be 'auto' or 'none'"),
        ({"tool_choice": {"type": "function", "function": {"name": "calc"}}}, "tool_choice", "'auto' or 'none'"),
    ],
)
def test_a_call_cannot_be_demanded(tmp_path: Path, change: dict[str, Any], param: str, words: str) -> None:
    with asked(tmp_path) as made:
        with pytest.raises(openai.BadRequestError) as raised:
            made.chat.completions.create(**ASK, **change)
        assert (raised.value.status_code, raised.value.param) == (400, param)
        assert words in raised.value.message


def test_without_parallel_calls_the_first_is_shown_and_all_tokens_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.32 shows them (``maybe_filter_parallel_tool_calls``)."""
    first, second = spoken(f"{CALL}\n{CALL}"), spoken("36")
    with episode(tmp_path, monkeypatch, first, second) as (made, played, policy):
        alone: dict[str, Any] = {**ASK, "model": "policy", "parallel_tool_calls": False}
        (choice,) = made.chat.completions.create(**alone, stream=False).choices
        assert choice.finish_reason == "tool_calls"
        assert len(choice.message.tool_calls) == 1
        messages = [*QUESTION, choice.message, *results(*choice.message.tool_calls, texts=("36",))]
        made.chat.completions.create(**{**alone, "messages": messages})
        assert policy.prompts[1][: len(policy.prompts[0]) + len(first)] == [*policy.prompts[0], *first]
        assert played.session.exchanges[1].parent == 0
    with asked(tmp_path, first) as made:
        chunks = [*made.chat.completions.create(**ASK, parallel_tool_calls=False, stream=True)]
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        assert {delta.index for delta in deltas} == {0}


def results(*calls: Any, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in zip(calls, texts, strict=True)]


def test_a_conversation_with_calls_goes_on_from_the_very_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = spoken(f"Let me see.\n\n{CALL}\n{CALL}\n"), spoken(CALL), spoken("36")
    with episode(tmp_path, monkeypatch, first, second, third) as (made, played, policy):
        messages: list[Any] = [*ASK["messages"]]
        for texts in (("36", "37"), ("38",)):
            said = made.chat.completions.create(**{**ASK, "model": "policy", "messages": messages}, seed=3)
            message = said.choices[0].message
            messages += [message, *results(*message.tool_calls, texts=texts)]
        assert len({call.id for message in messages[1::3] for call in message.tool_calls}) == 3
        made.chat.completions.create(**{**ASK, "model": "policy", "messages": messages})
        one, two, three = policy.prompts
        decode = played.tokenizer.decode
        assert two[: len(one) + len(first)] == [*one, *first]
        assert decode(two[len(one) + len(first) :], skip_special_tokens=False) == (
            "\n<|im_start|>user\n<tool_response>\n36\n</tool_response>\n<tool_response>\n37\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert three[: len(two) + len(second)] == [*two, *second]
        scored, arrays = played.session.finish(Score(1.0, correct=True), version=0)
        (branch,) = scored.branches
        assert branch.num_made == len(first) + len(second) + len(third)
        assert arrays.token_ids_T.tolist() == [*three, *third]


def test_a_call_is_known_by_what_was_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = spoken(CALL)
    again = [spoken(str(number)) for number in range(5)]
    with episode(tmp_path, monkeypatch, first, *again) as (made, played, policy):

        def ask(message: Any, **changes: Any) -> bool:
            """Whether it goes on from the first response."""
            messages = [*ASK["messages"], message, {"role": "tool", "tool_call_id": "x", "content": "36"}]
            made.chat.completions.create(**{**ASK, "model": "policy", "messages": messages, **changes})
            return played.session.exchanges[-1].parent == 0

        said = made.chat.completions.create(**{**ASK, "model": "policy"}).choices[0].message
        plain = said.model_dump(exclude_none=True)
        (call,) = plain["tool_calls"]

        def changed(**function: Any) -> dict[str, Any]:
            return {**plain, "tool_calls": [{**call, "function": {**call["function"], **function}}]}

        assert ask({**plain, "content": ""}), "null and no text are the same"
        assert ask(changed(arguments='{ "b": 3, "a": 12 }')), "it is the arguments, not how they are written"
        assert ask(plain, tool_choice="none"), "the tools are shown as before"
        assert not ask(changed(arguments='{"a": 12, "b": 4}'))
        assert not ask({**plain, "content": "I call."}), "this it did not say"
        shown = played.tokenizer.decode(policy.prompts[-2], skip_special_tokens=False)
        assert '<tool_call>\n{"name": "calc", "arguments": {"a": 12, "b": 4}}\n</tool_call><|im_end|>' in shown
        assert shown.startswith('<|im_start|>system\n# Tools\n{"type": "function", "function": {"name": "calc"')


def test_reasoning_that_a_client_does_not_send_back_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = spoken(f"<think>\nA product.\n</think>\n\n{CALL}")
    again = [spoken(str(number)) for number in range(4)]
    with episode(tmp_path, monkeypatch, first, *again) as (made, played, policy):
        played.response_markers = ResponseMarkers.of_template("<think></think><tool_call>")

        def continues(**changes: Any) -> bool:
            """Return whether a request continues from the first response."""
            result = {"role": "tool", "tool_call_id": "x", "content": "36"}
            messages = [*ASK["messages"], {**plain, **changes}, result]
            made.chat.completions.create(**{**ASK, "model": "policy", "messages": messages})
            return played.session.exchanges[-1].parent == 0

        message = made.chat.completions.create(**{**ASK, "model": "policy"}).choices[0].message
        assert (message.content, message.reasoning_content) == (None, "A product.")
        plain = message.model_dump(exclude_none=True)
        assert plain.pop("reasoning_content") == "A product."
        assert continues()
        assert continues(reasoning_content="A product.")
        assert continues(reasoning="A product."), "vLLM's name for it"
        assert not continues(reasoning_content="A sum.")
        assert policy.prompts[1][: len(policy.prompts[0]) + len(first)] == [*policy.prompts[0], *first]


def test_reasoning_comes_apart_in_a_stream(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.hugging_face.chat_template += "{# <think></think> #}"
    responses = [spoken("<think>\nA product.\n</think>\n\nIt is 36.")] * 2
    model = ServedModel("m", tokenizer, Scripted(*responses), max_length=4096, vocabulary=VOCABULARY)
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        whole = made.chat.completions.create(model="m", messages=QUESTION).choices[0].message
        deltas = [
            chunk.choices[0].delta for chunk in made.chat.completions.create(model="m", messages=QUESTION, stream=True)
        ]
    assert (whole.content, whole.reasoning_content) == ("It is 36.", "A product.")  # type: ignore[attr-defined]
    assert "".join(delta.content or "" for delta in deltas) == "It is 36."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "A product."


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"extra_body": {"documents": [{"text": "a"}]}}, "documents"),
        ({"extra_body": {"builtin_tools": ["python"]}}, "builtin_tools"),
        ({"extra_body": {"chat_template_kwargs": {"add_generation_prompt": False}}}, "chat_template_kwargs"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "3", "prefix": True}]}, "messages"),
    ],
)
def test_what_would_change_the_prompt_and_cannot_is_refused(tmp_path: Path, change: dict[str, Any], param: str) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.hugging_face.chat_template += "{{ builtin_tools }}"
    model = ServedModel("m", tokenizer, Scripted(spoken("36")), max_length=4096, vocabulary=VOCABULARY)
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        with pytest.raises(openai.BadRequestError) as raised:
            made.chat.completions.create(**{"model": "m", "messages": QUESTION, **change})
        assert raised.value.param == param
        unknown = {"user": "me", "metadata": {"role": "user"}, "safety_identifier": "x", "unheard_of": 1}
        assert made.chat.completions.create(model="m", messages=QUESTION, extra_body=unknown).choices
