"""The Responses API, asked by OpenAI's own client, whose types say what a response and its events are."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent
from serving_harness import at, client, text_ids
from tools_harness import CALC, CALL, QUESTION, VOCABULARY, Scripted, episode, make_tokenizer, spoken

from tandem.rollout.environments import Score
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.rollout.openai_api.responses_request import MessageItem, translate_items
from tandem.samples.responses import ResponseMarkers

TOOL = {"type": "function", "strict": True, **CALC["function"]}
ASK: dict[str, Any] = {"model": "m", "input": "12 * 3", "tools": [TOOL]}
THINKING = f"<think>\nA product.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
IDS = {"return_token_ids": True}
EVENTS: pydantic.TypeAdapter[ResponseStreamEvent] = pydantic.TypeAdapter(ResponseStreamEvent)
ITEMS = pydantic.TypeAdapter(list[ResponseInputItemParam])


def serve_thinking(folder: Path, *responses: list[int]) -> tuple[ServedModel, Scripted]:
    """Return a model that thinks, and the script that it follows."""
    tokenizer = make_tokenizer(folder)
    tokenizer.hugging_face.chat_template += "{# <think></think> #}"
    policy = Scripted(*responses)
    model = ServedModel("m", tokenizer, policy, max_length=4096, vocabulary=VOCABULARY, tool_call_parser="hermes")
    return model, policy


def events_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream as they are on the wire; each is one of OpenAI's, by its types."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", "/v1/responses", json.dumps({**body, "stream": True}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        frames = response.read().decode().removesuffix("\n\n").split("\n\n")
    finally:
        connection.close()
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def test_a_stream_has_openais_events_in_their_order_and_ends_with_the_whole_response(tmp_path: Path) -> None:
    model, _ = serve_thinking(tmp_path, *[spoken(THINKING)] * 2)
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        ask = {**ASK, "seed": 3, "include": ["message.output_text.logprobs"]}
        events = events_of(url, ask)
        response = made.responses.create(**{**ASK, "include": ask["include"]}, extra_body={"seed": 3})
    names = [event["type"].removeprefix("response.") for event in events]
    shortened = [name for place, name in enumerate(names) if name != names[place - 1]]
    text_events = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call_events = [f"function_call_arguments.{end}" for end in ("delta", "done")]
    item_events = [
        [name.format("reasoning_text") for name in text_events],
        [name.format("output_text") for name in text_events],
        call_events,
        call_events,
    ]
    items = [name for inner in item_events for name in ("output_item.added", *inner, "output_item.done")]
    assert shortened == ["created", "in_progress", *items, "completed"]
    assert names.count("reasoning_text.delta") > 5
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call", "function_call"]
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert finished == last["output"]
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        for event in [event for event in events if event["type"] == f"response.{kind}.done"]:
            deltas = [
                other["delta"]
                for other in events
                if other["type"] == f"response.{kind}.delta" and other["item_id"] == event["item_id"]
            ]
            assert "".join(deltas) == event["arguments" if kind == "function_call_arguments" else "text"]
    reasoning, message, *calls = last["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "A product."}]
    assert message["content"][0]["text"] == "Let me see."
    assert {json.loads(call["arguments"])["a"] for call in calls} == {12}
    assert len(message["content"][0]["logprobs"]) > len("A product.Let me see.")
    # The whole response is the same, but for its ids, its times, and the tokens that follow the text.
    whole = json.loads(response.to_json())
    Response.model_validate(whole)
    assert response.output_text == "Let me see."
    assert whole.keys() == last.keys()
    assert _without_ids(whole["output"]) == _without_ids(last["output"])
    for field in whole.keys() - {"id", "created_at", "completed_at", "output"}:
        assert whole[field] == last[field]
    assert response.usage is not None
    assert response.usage.output_tokens == len(spoken(THINKING))
    assert response.usage.output_tokens_details.reasoning_tokens == len("A product.")
    assert (response.store, response.previous_response_id, response.status) == (False, None, "completed")


def _without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = json.loads(json.dumps(items))
    for item in shown:
        del item["id"]
        for part in item.get("content", []):
            part.pop("logprobs", None)
    return shown


def test_the_clients_stream_helper_reads_them(tmp_path: Path) -> None:
    model, _ = serve_thinking(tmp_path, spoken(THINKING))
    with (
        at(make_app(only_with(None, model), deadline_s=60)) as url,
        client(url) as made,
        made.responses.stream(**ASK) as stream,
    ):
        events = [*stream]
        final = stream.get_final_response()
    assert final.output_text == "Let me see."
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Let me see."


def test_what_is_cut_off_is_incomplete_and_what_is_empty_is_a_message(tmp_path: Path) -> None:
    cut = spoken("<think>\nA prod")[:-1]
    model, _ = serve_thinking(
        tmp_path, cut, cut, spoken(""), spoken("<think>\nA product.\n</think>\n"), spoken("36")[:-1]
    )
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        response = made.responses.create(model="m", input="12 * 3", extra_body=IDS)
        assert response.incomplete_details is not None
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]  # type: ignore[union-attr]
        events = events_of(url, {"model": "m", "input": "12 * 3"})
        assert events[-1]["type"] == "response.incomplete"
        for _ in range(2):
            response = made.responses.create(model="m", input="12 * 3")
            assert (response.status, response.output_text, response.output[-1].type) == ("completed", "", "message")
        events = events_of(url, {"model": "m", "input": "12 * 3", "max_output_tokens": 2})
        (item,) = events[-1]["response"]["output"]
        assert (item["type"], item["status"], events[-1]["type"]) == ("message", "incomplete", "response.incomplete")


CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "instructions and a text": (
        [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    ),
    "parts": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in ("a", "b")]}],
        [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}],
    ),
    "reasoning, text, two calls and their results": (
        [
            *QUESTION,
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I see.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "calc", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "calc", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"type": None, "role": "assistant", "content": "3"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And?"},
        ],
        [
            *QUESTION,
            {
                "role": "assistant",
                "content": "I see.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": f"c{n}", "type": "function", "function": {"name": "calc", "arguments": f'{{"a": {n}}}'}}
                    for n in (1, 2)
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}]},
            {"role": "assistant", "content": "3"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And?"},
        ],
    ),
}


@pytest.mark.parametrize(("items", "messages"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_has_the_prompt_that_it_has_as_a_chat(
    tmp_path: Path, items: list[Any], messages: list[Any]
) -> None:
    ITEMS.validate_python([{name: value for name, value in item.items() if value is not None} for item in items])
    model, policy = serve_thinking(tmp_path, *[spoken("36")] * 2)
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        system: Any = {"role": "system", "content": "You calculate."}
        made.chat.completions.create(model="m", messages=[system, *messages], tools=[CALC])  # type: ignore[list-item]
        response = made.responses.create(
            model="m",
            instructions="You calculate.",
            input=items,
            tools=[TOOL],
            extra_body=IDS,  # type: ignore[list-item]
        )
    assert policy.prompts[0] == policy.prompts[1] == response.output[-1].prompt_token_ids  # type: ignore[union-attr]
    assert response.output[-1].generation_token_ids == spoken("36")  # type: ignore[union-attr]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("sends_ids", [True, False])
def test_an_episode_goes_on_from_the_very_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool, sends_ids: bool
) -> None:
    responses = [
        spoken(f"<think>\nOh.\n</think>\n\nLet me see.\n\n{CALL}\n{CALL}\n"),
        spoken(CALL),
        spoken("36"),
        spoken("Bye"),
    ]
    with episode(tmp_path, monkeypatch, *responses) as (made, played, policy):
        played.response_markers = ResponseMarkers.of_template("<think></think><tool_call>")
        items: list[Any] = [*QUESTION]

        def ask() -> Any:
            if not is_streamed:
                return made.responses.create(**{**ASK, "model": "policy", "input": items})
            *_, last = made.responses.create(**{**ASK, "model": "policy", "input": items}, stream=True)
            return last.response

        for _ in range(2):
            for item in ask().output:
                fields = item.model_dump(exclude_none=True)
                items.append(fields if sends_ids else {name: fields[name] for name in fields.keys() - {"id"}})
            calls = [item for item in items if item.get("type") == "function_call"]
            answered = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
            items += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "36"}
                for call in calls
                if call["call_id"] not in answered
            ]
        items += [*ask().output, {"role": "user", "content": "Thanks"}]
        ask()
        for before, response, after in zip(policy.prompts, responses, policy.prompts[1:], strict=False):
            assert after[: len(before) + len(response)] == [*before, *response]
        scored, arrays = played.session.finish(Score(1.0, correct=True), version=0)
        (branch,) = scored.branches
        assert branch.num_made == sum(map(len, responses))
        assert arrays.token_ids_T.tolist() == [*policy.prompts[-1], *responses[-1]]


def test_a_chat_may_go_on_as_responses_and_results_may_stand_between_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = spoken(f"{CALL}\n{CALL}")
    with episode(tmp_path, monkeypatch, first, spoken("36"), first, spoken("36")) as (made, played, policy):
        message = made.chat.completions.create(model="policy", messages=QUESTION, tools=[CALC]).choices[0].message
        calls = [
            {"type": "function_call", "call_id": call.id, **call.function.model_dump()} for call in message.tool_calls
        ]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "36"} for call in calls]
        made.responses.create(**{**ASK, "model": "policy", "input": [*QUESTION, *calls, *results]})
        assert policy.prompts[1][: len(policy.prompts[0]) + len(first)] == [*policy.prompts[0], *first]
        question = {"role": "user", "content": "12 * 4"}
        one, two = made.responses.create(**{**ASK, "model": "policy", "input": [question]}).output
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "36"} for call in (one, two)]
        items = [question, one, results[0], two, results[1]]
        made.responses.create(**{**ASK, "model": "policy", "input": items})
        assert policy.prompts[3][: len(policy.prompts[2]) + len(first)] == [*policy.prompts[2], *first]
        assert [exchange.parent for exchange in played.session.exchanges] == [None, 0, None, 2]


def test_text_behind_a_call_is_of_the_same_message_and_comes_in_its_place_in_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = spoken(f"Let me see.{CALL} Done.")
    with episode(tmp_path, monkeypatch, first, spoken("36")) as (made, _, policy):
        *_, last = made.responses.create(**{**ASK, "model": "policy"}, stream=True)
        assert [item.type for item in last.response.output] == ["message", "function_call", "message"]
        call = last.response.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "36"}
        made.responses.create(**{**ASK, "model": "policy", "input": [*QUESTION, *last.response.output, result]})
        assert policy.prompts[1][: len(policy.prompts[0]) + len(first)] == [*policy.prompts[0], *first]


def test_turns_of_two_responses_are_two_messages() -> None:
    def message(response: str, text: str) -> MessageItem:
        return MessageItem(role="assistant", content=text, id=f"msg_{response * 24}0000")

    same = translate_items([message("a", "1"), message("a", "2")])
    different = translate_items([message("a", "1"), message("b", "2")])
    assert [each["content"] for each in same] == ["12"]
    assert [each["content"] for each in different] == ["1", "2"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
        ({"store": True}, "store", "nothing is stored here"),
        ({"background": True}, "background", "does not support it"),
        ({"truncation": "auto"}, "truncation", "does not support it"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "does not support it"),
        ({"extra_body": {"messages": QUESTION}}, "messages", "its name in /v1/responses is input"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens", "is max_output_tokens"),
        ({"extra_body": {"reasoning_effort": "low"}}, "reasoning_effort", "is reasoning.effort"),
        ({"extra_body": {"n": 2}}, "n", "does not support it"),
        ({"tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        ({"tool_choice": {"type": "function", "name": "calc"}}, "tool_choice", "'auto' or 'none'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "not searched for"),
        ({"input": []}, "input", "length >= 1"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role", "nobody"),
        ({"input": [*QUESTION, {"type": "item_reference", "id": "x"}]}, "input[1].type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "input_file",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input",
            "input: m answers texts here, not images",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "calc", "arguments": "{"}]},
            "input",
            "input: the arguments of the call of 'calc' are not a JSON object",
        ),
        (
            {"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "cannot be read here",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "it is missing"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
            "text.format",
            "Invalid",
        ),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"temperature": -1}, "temperature", ">= 0.0"),
        ({"model": "other"}, "model", "does not exist"),
        ({"extra_body": {"builtin_tools": ["python"]}}, "builtin_tools", "give it in chat_template_kwargs"),
        ({"extra_body": {"logit_bias": {"5": 1}}}, "logit_bias", "does not support it"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], param: str, words: str) -> None:
    model, policy = serve_thinking(tmp_path)
    model.tokenizer.hugging_face.chat_template += "{{ builtin_tools }}"
    with (
        at(make_app(only_with(None, model), deadline_s=60)) as url,
        client(url) as made,
        pytest.raises(openai.APIStatusError) as raised,
    ):
        made.responses.create(**{**ASK, **change})
    assert raised.value.param == param
    assert words in raised.value.message
    assert policy.prompts == []


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    model, policy = serve_thinking(tmp_path, *[spoken("36")] * 2)
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        made.responses.create(**ASK)
        response = made.responses.create(
            **ASK,
            store=False,
            background=False,
            truncation="disabled",
            metadata={"a": "b"},
            user="me",
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}, "verbosity": "medium"},
            parallel_tool_calls=True,
            tool_choice="auto",
            max_tool_calls=3,
            prompt_cache_key="x",
            safety_identifier="y",
            service_tier="auto",
            extra_body={"unheard_of": 1},
        )
    assert policy.prompts[0] == policy.prompts[1]
    assert response.metadata == {"a": "b"}
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"


def test_an_error_within_a_stream_is_an_event(tmp_path: Path) -> None:
    model, _ = serve_thinking(tmp_path)

    class Failing(Scripted):
        """A policy whose engine fails after a token."""

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            """Yield a token."""
            async for chunk in Scripted(text_ids("a") * 2).generate(*arguments, **options):
                yield chunk
                raise OpenAIRefused("the engine has failed", status=500, kind="server_error", code="engine_failed")

    model.generator = Failing()
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        *_, last = events_of(url, ASK)
        assert (last["type"], last["code"], last["message"]) == ("error", "engine_failed", "the engine has failed")
        with pytest.raises(openai.APIError, match="the engine has failed"):
            for _ in made.responses.create(**ASK, stream=True):
                pass
