"""The endpoint with real templates: prompts as Transformers renders them, answers as the templates mark them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers.decoders import DecodeStream

from tandem.rollout.openai_api.choices import ChatView, ResponseBuilder, chat_job, joined
from tandem.rollout.openai_api.generator import ResponseChunk, ServedModel
from tandem.rollout.openai_api.protocol import ChatAnswer, ChatRequest, read_request
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.rollout.openai_api.responses_request import read_responses_request
from tandem.samples.tokenizer import Tokenizer
from tests.harness import families
from tests.harness.families import NO_CALLS, Family
from tests.harness.family_responses import ARGUMENTS, CALL, QUESTION, REASONING, TOOL, rendered

FIELDS = ("reasoning_content", "reasoning", "thinking")
AGAIN = {"role": "user", "content": "And tomorrow?"}


def serve(family: Family) -> ServedModel:
    """Return a model that is never asked to generate."""
    tokenizer = Tokenizer(families.hugging_face(family), family.name)
    return ServedModel(
        "m",
        tokenizer,
        None,  # type: ignore[arg-type]
        max_length=100_000,
        vocabulary=1_000_000,
        tool_call_parser="auto",
    )


def request_of(**fields: Any) -> ChatRequest:
    """Return a request as it is read from a client's JSON."""
    return read_request(json.dumps({"model": "m", **fields}).encode(), ChatRequest)


def prompt_of(family: Family, **fields: Any) -> str:
    """Return the prompt of a request as text."""
    model = serve(family)
    (prompt_ids,) = chat_job(model, request_of(**fields)).prompts
    return model.tokenizer.decode(prompt_ids, skip_special_tokens=False)


def expected(family: Family, messages: list[Any], **variables: Any) -> str:
    """Return the prompt that Transformers renders."""
    hugging_face = families.hugging_face(family)
    read = families.as_read(family, messages)
    text = hugging_face.apply_chat_template(read, tokenize=False, add_generation_prompt=True, **variables)
    token_ids = hugging_face(text, add_special_tokens=False)["input_ids"]
    return str(hugging_face.decode(token_ids, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("field", FIELDS)
def test_reasoning_of_earlier_turns_reaches_the_template(family: Family, field: str) -> None:
    called: dict[str, Any] = {"role": "assistant", "content": "", field: REASONING}
    messages = [*QUESTION, called, AGAIN]
    assert prompt_of(family, messages=messages) == expected(family, messages)
    if family.name in NO_CALLS:
        return
    takes_text = family.name == "deepseekv3"
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS) if takes_text else ARGUMENTS}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "Sunny."}
    messages = [*QUESTION, {**called, "tool_calls": [{**CALL, "function": function}]}, result]
    as_text = {**CALL, "function": {**function, "arguments": json.dumps(ARGUMENTS)}}
    tools = {} if takes_text else {"tools": [TOOL]}  # DeepSeek's template shows none
    prompt = prompt_of(family, messages=[*QUESTION, {**called, "tool_calls": [as_text]}, result], **tools)
    assert prompt == expected(family, messages, **tools)
    if family.name in ("gptoss", "qwen3", "qwen3_5_think", "gemma4_v5", "nemotron_3_nano", "glm4moe"):
        assert REASONING in prompt


def test_reasoning_effort_and_further_variables_reach_the_template(family: Family) -> None:
    low = {"reasoning_effort": "low"}
    assert prompt_of(family, messages=QUESTION, **low) == expected(family, QUESTION, **low)
    variables = {"enable_thinking": False, "reasoning_effort": "high"}
    prompt = prompt_of(family, messages=QUESTION, chat_template_kwargs=variables, **low)
    assert prompt == expected(family, QUESTION, **variables)
    source = families.hugging_face(family).chat_template
    if family.name == "gptoss":
        assert "Reasoning: high" in prompt
    if "enable_thinking" in source:
        with pytest.raises(OpenAIRefused, match="give it in chat_template_kwargs"):
            prompt_of(family, messages=QUESTION, enable_thinking=False)
    else:
        assert prompt_of(family, messages=QUESTION, enable_thinking=False) == expected(family, QUESTION)


def test_responses_have_the_prompts_of_chats(family: Family) -> None:
    call = {**CALL, "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
    shows_calls = family.name not in NO_CALLS
    shows_tools = shows_calls and family.name != "deepseekv3"
    text = "" if family.name == "gptoss" else "I look."  # which refuses reasoning, text and a call in one message
    assistant: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": REASONING}
    messages = [*QUESTION, {**assistant, "tool_calls": [call]} if shows_calls else assistant]
    items: list[Any] = [
        *QUESTION,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": REASONING}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
    ]
    if shows_calls:
        messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": "Sunny."})
        items += [
            {"type": "function_call", "call_id": CALL["id"], **call["function"]},
            {"type": "function_call_output", "call_id": CALL["id"], "output": "Sunny."},
        ]
    tools: dict[str, Any] = {"tools": [TOOL]} if shows_tools else {}
    flat_tools: dict[str, Any] = {"tools": [{"type": "function", **TOOL["function"]}]} if shows_tools else {}
    for more in ([], [AGAIN]):
        prompt = prompt_of(family, messages=[*messages, *more], reasoning_effort="low", **tools)
        fields = {"model": "m", "input": [*items, *more], "reasoning": {"effort": "low"}, **flat_tools}
        _, request = read_responses_request(json.dumps(fields).encode())
        model = serve(family)
        (prompt_ids,) = chat_job(model, request).prompts
        assert model.tokenizer.decode(prompt_ids, skip_special_tokens=False) == prompt


def answer_of(family: Family, prompt: str, response: str, **fields: Any) -> ChatAnswer:
    """Return the answer of a model that responds with the tokens of a text, one by one."""
    model, request = serve(family), request_of(messages=QUESTION, **fields)
    hugging_face = families.hugging_face(family)
    prompt_ids = hugging_face(prompt, add_special_tokens=False)["input_ids"]
    token_ids = hugging_face(response, add_special_tokens=False)["input_ids"]
    growing = ResponseBuilder(model, request, prompt_ids, 1)
    pieces = [
        growing.add(
            ResponseChunk(
                token_ids=[token_id],
                logprobs=[-1.0],
                versions=[0],
                finish_reason="stop" if place == len(token_ids) else None,
            )
        )
        for place, token_id in enumerate(token_ids, 1)
    ]
    return ChatView(model, request, chat_job(model, request)).answer([joined(pieces)])


def test_bytes_of_tokens_are_the_text_of_the_answer(family: Family) -> None:
    """As the streams of the package tokenizers decode it, which vLLM 0.32 uses: SentencePiece's first space is kept."""
    hugging_face = families.hugging_face(family)
    question = families.as_read(family, QUESTION)
    prompt = hugging_face.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt_ids = hugging_face(prompt, add_special_tokens=False)["input_ids"]
    token_ids = hugging_face("Fine, 東京 4 °C.", add_special_tokens=False)["input_ids"]
    decoder = DecodeStream(ids=prompt_ids, skip_special_tokens=True)
    expected = "".join(decoder.step(hugging_face._tokenizer, token_id) or "" for token_id in token_ids)
    answer = answer_of(family, prompt, "Fine, 東京 4 °C.", logprobs=True)
    (choice,) = answer.choices
    assert (choice.message.reasoning_content or "") + (choice.message.content or "") == expected
    assert choice.logprobs is not None
    assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode() == expected


def test_reasoning_is_apart_from_the_answer(family: Family) -> None:
    message = {"role": "assistant", "content": "Fine, 4 °C.", "reasoning_content": REASONING, "thinking": REASONING}
    prompt, response = rendered(family, message)
    (choice,) = answer_of(family, prompt, response).choices
    assert choice.message.content is not None
    assert choice.message.content.strip() == "Fine, 4 °C."
    assert (choice.message.reasoning_content == REASONING) == (REASONING in response)
    assert choice.finish_reason == "stop"


def test_calls_come_as_calls(family: Family) -> None:
    if family.name in NO_CALLS or family.name == "deepseekv3":
        pytest.skip("the template writes no calls, or no objects")
    call = CALL | {"function": {"name": "get_weather", "arguments": ARGUMENTS}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt, response = rendered(family, message, tools=[TOOL])
    (choice,) = answer_of(family, prompt, response, tools=[TOOL]).choices
    assert isinstance(choice.message.tool_calls, list)
    (function,) = [each.function for each in choice.message.tool_calls]
    assert (function.name, json.loads(function.arguments)) == ("get_weather", ARGUMENTS)
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
