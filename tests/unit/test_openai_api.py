"""OpenAI's API before the embedded engine, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import http.client
import json
import string
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine_harness
import numpy as np
import openai
import pytest
import torch
from serving_harness import EOS, MAX_LENGTH, NAME, SPECIAL, VOCABULARY, Driving, client, make_model, served, text_ids
from transformers import PreTrainedTokenizerFast

from tandem.common.errors import ModelError
from tandem.common.messages import SamplingParameters
from tandem.config.schema.policy import NewModel
from tandem.rollout.engines.sampling import restrict
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.refusals import MAX_BODY_BYTES, OpenAIRefused
from tandem.samples.model_files import load_model_tokenizer, write_new_model
from tandem.samples.tokenizer import Tokenizer

CHAT: Any = [{"role": "user", "content": "Hi"}]
CHAT_IDS = [256, 258, *text_ids("Hi"), 259]


class Tiny:
    """What the tests of this file share."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder)
        self.tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder), str(folder))
        engine = engine_harness.make_engine(folder, self.model, num_slots=16, max_length=MAX_LENGTH)
        self.driving = Driving(engine)
        self.url = ""
        self.client: openai.OpenAI

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Return what Hugging Face's `generate` makes."""
        prompt = torch.tensor([prompt_ids])
        with torch.no_grad():
            made = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False
            )
        result: list[int] = made[0, len(prompt_ids) :].tolist()
        return result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    shared = Tiny(tmp_path_factory.mktemp("model"))
    with shared.driving, served(shared.driving, shared.tokenizer) as url, client(url) as asked:
        shared.url, shared.client = url, asked
        yield shared
    assert shared.driving.error is None
    assert shared.driving.engine.num_unfinished == 0


def test_a_repetition_penalty_is_that_of_hugging_face(tiny: Tiny) -> None:
    answer = tiny.client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        temperature=0,
        max_tokens=12,
        extra_body={"return_token_ids": True, "repetition_penalty": 1.5},
    )
    prompt = torch.tensor([CHAT_IDS])
    expected = tiny.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, repetition_penalty=1.5
    )
    assert answer.choices[0].token_ids == expected[0, len(CHAT_IDS) :].tolist()  # type: ignore[attr-defined]


def test_a_greedy_chat_is_what_hugging_face_generates(tiny: Tiny) -> None:
    answer = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, temperature=0, max_tokens=20, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    expected = tiny.greedy(CHAT_IDS, 20)
    assert answer.prompt_token_ids == CHAT_IDS  # type: ignore[attr-defined]
    assert choice.token_ids == expected  # type: ignore[attr-defined]
    assert choice.message.content == tiny.decode(expected)
    assert choice.finish_reason == ("stop" if expected[-1] == EOS else "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT_IDS), len(expected))


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_alternatives_are_the_likeliest_tokens_of_hugging_faces_model(tiny: Tiny, sampling: dict[str, Any]) -> None:
    asked: dict[str, Any] = {**sampling, "max_tokens": 12, "seed": 5}
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    chat = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, logprobs=True, top_logprobs=4, **asked, **ids
    ).choices[0]
    pieces = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, logprobs=True, top_logprobs=4, stream=True, **asked
    )
    streamed = [one for piece in pieces if piece.choices[0].logprobs for one in piece.choices[0].logprobs.content or []]
    plain = tiny.client.completions.create(model=NAME, prompt=CHAT_IDS, logprobs=4, **asked, **ids).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content == streamed
    token_ids = chat.token_ids  # type: ignore[attr-defined]
    assert token_ids == plain.token_ids  # type: ignore[attr-defined]
    with torch.no_grad():
        logits_TV = tiny.model(torch.tensor([[*CHAT_IDS, *token_ids]])).logits[0, len(CHAT_IDS) - 1 : -1]
    scaled_TV = logits_TV.float() / sampling["temperature"]
    top_p_T = torch.full([len(token_ids)], sampling.get("top_p", 1.0))
    expected_TV = restrict(scaled_TV, torch.zeros(len(token_ids), dtype=torch.int64), top_p_T).log_softmax(-1)
    for place, (token_id, found) in enumerate(zip(token_ids, streamed, strict=True)):
        expected = expected_TV[place].topk(4)
        others = [bytes(each.bytes or []) for each in found.top_logprobs]
        assert others == [tiny.tokenizer.token_bytes(token) for token in expected.indices.tolist()]
        np.testing.assert_allclose([each.logprob for each in found.top_logprobs], expected.values, atol=1e-4)
        assert found.logprob == pytest.approx(float(expected_TV[place, token_id]), abs=1e-4)
        assert plain.logprobs is not None
        assert plain.logprobs.top_logprobs is not None
        its = plain.logprobs.top_logprobs[place]
        assert its[found.token] == found.logprob
        for other in found.top_logprobs:  # of tokens with the same text, such as parts of characters, it has one
            assert its[other.token] >= other.logprob or other.token == found.token


def test_tokens_of_log_probabilities_are_named_by_their_ids(tiny: Tiny) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "seed": 5}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    plain = tiny.client.completions.create(model=NAME, prompt=CHAT_IDS, logprobs=3, extra_body=ids, **asked).choices[0]
    chat = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, logprobs=True, top_logprobs=3, extra_body=ids, **asked
    ).choices[0]
    names = [f"token_id:{token}" for token in plain.token_ids]  # type: ignore[attr-defined]
    assert plain.logprobs is not None
    assert plain.logprobs.tokens == names
    assert chat.logprobs is not None
    content = chat.logprobs.content or []
    assert [each.token for each in content] == names
    with torch.no_grad():
        logits_TV = tiny.model(torch.tensor([[*CHAT_IDS, *plain.token_ids]])).logits  # type: ignore[attr-defined]
    for place, name in enumerate(names):
        likeliest = [f"token_id:{token}" for token in logits_TV[0, len(CHAT_IDS) - 1 + place].topk(3).indices]
        assert [other.token for other in content[place].top_logprobs] == likeliest
        assert {*(plain.logprobs.top_logprobs or [])[place]} == {*likeliest, name}


def test_a_greedy_token_has_no_alternative(tiny: Tiny) -> None:
    answer = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, logprobs=True, top_logprobs=4, temperature=0, max_tokens=3
    )
    assert answer.choices[0].logprobs is not None
    for each in answer.choices[0].logprobs.content or []:
        assert [(other.token, other.logprob) for other in each.top_logprobs] == [(each.token, 0.0)]


def test_a_stream_that_nobody_reads_leaves_its_place_to_others_until_it_is_read(tiny: Tiny) -> None:
    driver, num_tokens = tiny.driving.driver, MAX_LENGTH - len(CHAT_IDS)
    sampling = SamplingParameters(
        temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=num_tokens, stop_token_ids=(), stop_strings=()
    )

    async def rest_of(stream: Any) -> list[int]:
        return [token_id async for chunk in stream for token_id in chunk.token_ids]

    async def scenario() -> None:
        expected = await rest_of(driver.generate(CHAT_IDS, sampling, 0))
        streams = [driver.generate(CHAT_IDS, sampling, 0) for _ in range(16)]  # as many as the engine has slots
        begun = [(await anext(stream)).token_ids for stream in streams]
        async with asyncio.timeout(60):
            while driver.num_running:
                await asyncio.sleep(0.01)
        assert driver.num_unfinished == 16, "nobody has read them, and they have given way"
        assert await rest_of(driver.generate(CHAT_IDS, sampling, 0, is_streamed=False)) == expected
        for beginning, stream in zip(begun, streams, strict=True):
            tokens = beginning + await rest_of(stream)
            assert tokens == expected
            assert len(tokens) == num_tokens

    asyncio.run(scenario())


def test_a_short_answer_does_not_wait_for_long_ones_which_continue_where_they_were(tiny: Tiny) -> None:
    driver = tiny.driving.driver
    finished: list[int] = []

    async def rest_of(num_tokens: int) -> list[int]:
        sampling = SamplingParameters(
            temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=num_tokens, stop_token_ids=(), stop_strings=()
        )
        stream = driver.generate(CHAT_IDS, sampling, 0)
        tokens = [token_id async for chunk in stream for token_id in chunk.token_ids]
        finished.append(num_tokens)
        return tokens

    async def scenario() -> None:
        num_tokens = MAX_LENGTH - len(CHAT_IDS)
        with tiny.driving.held():
            tasks = [asyncio.create_task(rest_of(num_tokens)) for _ in range(64)]  # four times as many as have a place
            tasks.append(asyncio.create_task(rest_of(4)))
            await asyncio.sleep(0.1)
        answers = await asyncio.gather(*tasks)
        assert answers == [tiny.greedy(CHAT_IDS, num_tokens)] * 64 + [answers[0][:4]]

    asyncio.run(scenario())
    assert finished[0] == 4, "all others have 87 tokens to make"


def test_json_is_written_by_a_model_whose_tokens_are_characters(tiny: Tiny, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "num_hidden_layers": 2}
    write_new_model(
        tmp_path / "new", NewModel(characters=string.ascii_letters + string.digits + '{}[]":, _é', config=config)
    )
    tokenizer = load_model_tokenizer(tmp_path / "new")
    vocabulary = len(tokenizer.hugging_face)
    model = ServedModel(NAME, tokenizer, tiny.driving.driver, max_length=MAX_LENGTH, vocabulary=vocabulary)
    draw = np.random.default_rng(0)
    for _ in range(20):
        matcher, token_ids = model.grammar_of(PLACE).begin(), list[int]()
        while (token_id := int(draw.choice(matcher.allowed_V(vocabulary).nonzero()[0]))) != tokenizer.eos_id:
            token_ids.append(token_id)
            matcher.take([token_id])
        found = json.loads(tokenizer.decode(token_ids))
        assert [*found] == ["name", "is_far", "colour"]
    write_new_model(tmp_path / "digits", NewModel(characters="0123456789+=", config=config))
    tokenizer = load_model_tokenizer(tmp_path / "digits")
    model = ServedModel(NAME, tokenizer, tiny.driving.driver, max_length=MAX_LENGTH, vocabulary=15)
    model.grammar_of({"type": "integer"})
    with pytest.raises(
        OpenAIRefused, match=r"each is a character, and there is none for '\{' or '\}' or '\"' or ':' or ',' or ' '"
    ):
        model.grammar_of({"type": "object"})


def schema(of: dict[str, Any]) -> Any:
    """Return what asks for JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": of, "strict": True}}


PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"},
        "is_far": {"type": "boolean"},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "is_far", "colour"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_json_of_a_schema_is_what_a_model_without_sense_writes(tiny: Tiny, temperature: float) -> None:
    asked: dict[str, Any] = {"response_format": schema(PLACE), "temperature": temperature, "max_tokens": 100, "n": 3}
    answer = tiny.client.chat.completions.create(model=NAME, messages=CHAT, seed=1, **asked)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content or "")
        assert [*found] == ["name", "is_far", "colour"]
        assert found["colour"] in ("red", "green")
        assert isinstance(found["is_far"], bool)
    pieces = tiny.client.chat.completions.create(model=NAME, messages=CHAT, seed=1, stream=True, **asked)
    texts = ["", "", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_json_mode_writes_an_object_and_nothing_else_is_bound(tiny: Tiny) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "seed": 2}
    alone = tiny.client.chat.completions.create(model=NAME, messages=CHAT, **asked).choices[0].message.content
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(tiny.client.chat.completions.create, model=NAME, messages=CHAT, **asked)
        bound = pool.submit(
            tiny.client.chat.completions.create,
            model=NAME,
            messages=CHAT,
            response_format={"type": "json_object"},
            logit_bias={},
            **asked,
        )
        assert plain.result().choices[0].message.content == alone
        choice = bound.result().choices[0]
    text = choice.message.content or ""
    assert text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_hugging_faces(tiny: Tiny, temperature: float) -> None:
    asked: dict[str, Any] = {"temperature": temperature, "max_tokens": 24, "seed": 5}
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    chat = tiny.client.chat.completions.create(model=NAME, messages=CHAT, logprobs=True, **asked, **ids).choices[0]
    plain = tiny.client.completions.create(model=NAME, prompt=CHAT_IDS, logprobs=0, **asked, **ids).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert plain.logprobs is not None
    token_ids = chat.token_ids  # type: ignore[attr-defined]
    assert token_ids == plain.token_ids  # type: ignore[attr-defined]
    expected = engine_harness.reference_logprobs(
        tiny.model, tuple(CHAT_IDS), np.array(token_ids, np.int32), temperature
    )
    for found in ([each.logprob for each in chat.logprobs.content], plain.logprobs.token_logprobs):
        assert found is not None
        np.testing.assert_allclose(found, expected, atol=1e-4)
    spelled = bytes(byte for each in chat.logprobs.content for byte in each.bytes or [])
    for special in SPECIAL:
        spelled = spelled.replace(special.encode(), b"")
    assert spelled.decode(errors="replace") == chat.message.content
    assert plain.logprobs.tokens is not None
    assert plain.logprobs.tokens == [each.token for each in chat.logprobs.content]


def test_a_stream_is_the_same_answer(tiny: Tiny) -> None:
    asked: dict[str, Any] = {"seed": 11, "max_tokens": 40, "n": 2, "logprobs": True}
    whole = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, extra_body={"return_token_ids": True}, **asked
    )
    stream = tiny.client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
        **asked,
    )
    chunks = list(stream)
    assert chunks[0].prompt_token_ids == CHAT_IDS  # type: ignore[attr-defined]
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    for expected in whole.choices:
        its = [each for chunk in chunks for each in chunk.choices if each.index == expected.index]
        assert its[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in its) == expected.message.content
        assert [each.finish_reason for each in its if each.finish_reason] == [expected.finish_reason]
        token_ids = [token for each in its for token in getattr(each, "token_ids", None) or []]
        assert token_ids == expected.token_ids  # type: ignore[attr-defined]
        logprobs = [one for each in its if each.logprobs for one in each.logprobs.content or []]
        assert expected.logprobs is not None
        assert logprobs == expected.logprobs.content
    assert len(chunks) > 20, "tokens come as they are made"


def test_completions_of_several_prompts_stream_as_they_answer(tiny: Tiny) -> None:
    asked: dict[str, Any] = {"prompt": ["ab", "cd"], "n": 2, "seed": 3, "max_tokens": 9, "logprobs": 0}
    whole = tiny.client.completions.create(model=NAME, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in tiny.client.completions.create(model=NAME, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len({choice.text for choice in whole.choices}) == 4


def test_a_prompt_is_text_or_token_ids(tiny: Tiny) -> None:
    def ask(prompt: Any) -> list[str]:
        asked = tiny.client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=8)
        return [choice.text for choice in asked.choices]

    (text,) = ask("ab")
    assert text == tiny.decode(tiny.greedy(text_ids("ab"), 8))
    assert ask(text_ids("ab")) == [text]
    assert ask([text_ids("ab"), text_ids("ab")]) == [text, text] == ask(["ab", "ab"])


def test_a_seed_repeats_what_it_made(tiny: Tiny) -> None:
    def ask(seed: int | None) -> list[str | None]:
        answer = tiny.client.chat.completions.create(model=NAME, messages=CHAT, seed=seed, n=3, max_tokens=20)
        return [choice.message.content for choice in answer.choices]

    first = ask(-4)
    assert len(set(first)) == 3
    assert ask(-4) == first
    assert ask(5) != first
    assert ask(None) != ask(None)


def test_a_stop_string_ends_the_text_before_it(tiny: Tiny) -> None:
    free = tiny.client.completions.create(model=NAME, prompt="x", seed=2, max_tokens=60).choices[0].text
    at = next(index for index in range(10, 40) if free[index : index + 2].isascii() and free[index : index + 2])
    stop = free[at : at + 2]
    asked: dict[str, Any] = {"prompt": "x", "seed": 2, "max_tokens": 60, "stop": [stop, "never there"]}
    choice = tiny.client.completions.create(model=NAME, **asked).choices[0]
    assert choice.text == free[: free.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = [chunk.choices[0] for chunk in tiny.client.completions.create(model=NAME, stream=True, **asked)]
    assert "".join(chunk.text for chunk in streamed) == choice.text
    assert streamed[-1].finish_reason == "stop"


def test_top_k_and_stop_token_ids(tiny: Tiny) -> None:
    expected = tiny.greedy(CHAT_IDS, 12)
    extra = {"top_k": 1, "stop_token_ids": [expected[5]], "return_token_ids": True}
    choice = tiny.client.chat.completions.create(
        model=NAME, messages=CHAT, max_completion_tokens=12, extra_body=extra
    ).choices[0]
    assert choice.token_ids == expected[: expected.index(expected[5]) + 1]  # type: ignore[attr-defined]
    assert choice.finish_reason == "stop"


def test_tools_and_variables_reach_the_template(tiny: Tiny) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    answer = tiny.client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        tools=[tool],
        max_tokens=1,
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"shout": True, "tokenize": True, "other": 1}},
    )
    ids = [256, *text_ids("[add]!"), *CHAT_IDS[1:]]
    assert answer.prompt_token_ids == ids  # type: ignore[attr-defined]


def test_responses_end_with_the_context(tiny: Tiny) -> None:
    prompt = [65] * (MAX_LENGTH - 3)
    extra = {"ignore_eos": True}
    asked = tiny.client.completions.create(model=NAME, prompt=prompt, max_tokens=1000, extra_body=extra)
    assert asked.usage is not None
    assert (asked.choices[0].finish_reason, asked.usage.completion_tokens) == ("length", 3)


def chat(tiny: Tiny, **changes: Any) -> Any:
    return tiny.client.chat.completions.create(**{"model": NAME, "messages": CHAT, "max_tokens": 4, **changes})


def complete(tiny: Tiny, **changes: Any) -> Any:
    return tiny.client.completions.create(**{"model": NAME, "prompt": "a", "max_tokens": 4, **changes})


@pytest.mark.parametrize(
    ("ask", "changes", "status", "param", "words"),
    [
        (chat, {"model": "tiny2"}, 404, "model", "did you mean 'tiny'"),
        (complete, {"prompt": [65] * MAX_LENGTH}, 400, "prompt", "maximum context length is 96"),
        (complete, {"prompt": [VOCABULARY]}, 400, "prompt", "must be less than 260"),
        (complete, {"prompt": []}, 400, "prompt", "empty"),
        (complete, {"prompt": [1, "a"]}, 400, "prompt", "token ids"),
        (complete, {"prompt": ""}, 400, "prompt", "no tokens"),
        (chat, {"temperature": -1}, 400, "temperature", "temperature: Expected"),
        (chat, {"temperature": "hot"}, 400, "temperature", "temperature: Expected"),
        (chat, {"top_p": 0}, 400, "top_p", "top_p"),
        (chat, {"n": 0}, 400, "n", "n: Expected"),
        (chat, {"messages": []}, 400, "messages", "messages"),
        (chat, {"messages": [{"role": "nobody", "content": ""}]}, 400, "messages[0].role", "nobody"),
        (chat, {"messages": [{"role": "system", "content": "x"}]}, 400, None, "no system messages"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            400,
            "messages[0].content[0].type",
            "input_audio",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "messages",
            "answers texts here, not images",
        ),
        (chat, {"logit_bias": {"5": 1}}, 400, "logit_bias", "does not support it"),
        (chat, {"extra_body": {"min_p": 1.5}}, 400, "min_p", "<= 1.0"),
        (chat, {"response_format": {"type": "xml"}}, 400, "response_format.type", "Invalid enum value 'xml'"),
        (chat, {"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema: it is missing"),
        (chat, {"response_format": schema({"type": "thing"})}, 400, "response_format", "Invalid type: thing"),
        (chat, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "<= 20"),
        (chat, {"top_logprobs": 3}, 400, "top_logprobs", "give logprobs: true as well"),
        (complete, {"best_of": 3}, 400, "best_of", "does not support it"),
        (complete, {"prompt": ["a"] * 600, "n": 2}, 400, "n", "at most 1024"),
    ],
)
def test_refusals(
    tiny: Tiny, ask: Callable[..., Any], changes: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        ask(tiny, **changes)
    assert raised.value.status_code == status
    assert raised.value.param == param
    assert words in raised.value.message


def test_what_changes_nothing_is_taken(tiny: Tiny) -> None:
    extra = {"unheard_of": 1, "best_of": 1, "min_p": 0.0, "audio": None}
    chat(tiny, presence_penalty=0, logit_bias={}, response_format={"type": "text"}, user="me", extra_body=extra)


def post(url: str, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model": "tiny"}', b"\xff", b'{"messages": 1}', b'{"messages": ' + b"[" * 100_000]
)
def test_what_is_no_request_is_refused_in_openais_shape(tiny: Tiny, body: bytes) -> None:
    status, answer = post(tiny.url, body)
    assert status == 400
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


def test_other_paths_and_large_bodies(tiny: Tiny) -> None:
    assert post(tiny.url, b"{}", "/v1/embeddings")[0] == 404
    assert post(tiny.url, b"{}", "/v1/models")[0] == 405
    status, answer = post(tiny.url, b" " * (MAX_BODY_BYTES + 1))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


def test_models_are_listed(tiny: Tiny) -> None:
    assert [card.id for card in tiny.client.models.list()] == [NAME]
    assert tiny.client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        tiny.client.models.retrieve("other")


def test_sixteen_requests_run_in_one_batch(tiny: Tiny) -> None:
    """While the engine is held, all arrive; then it makes a token of each in every step."""

    def ask(seed: int) -> str | None:
        return str(chat(tiny, seed=seed, max_tokens=10, extra_body={"ignore_eos": True}).choices[0].message.content)

    alone = [ask(seed) for seed in range(16)]
    engine = tiny.driving.engine
    batches: list[int] = []
    step = engine.step

    def counted() -> list[Any]:
        batches.append(engine.num_unfinished)
        return step()

    engine.step = counted  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(16) as pool:
            with tiny.driving.held():
                together = [pool.submit(ask, seed) for seed in range(16)]
                until(lambda: tiny.driving.driver.num_unfinished == 16)
            assert [each.result(60) for each in together] == alone
    finally:
        del engine.step
    assert batches == [16] * 10


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(tiny: Tiny, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first token of all three nothing more is made for it."""
    driving, engine = tiny.driving, tiny.driving.engine
    num_steps, step = 0, engine.step

    def one_step() -> list[Any]:
        nonlocal num_steps
        made = step()
        driving.hold()
        num_steps += 1  # last: whoever sees it may let the engine go on
        return made

    monkeypatch.setattr(engine, "step", one_step)
    body = {"model": NAME, "messages": CHAT, "ignore_eos": True, "stream": stream, "n": 3}
    connection = http.client.HTTPConnection(tiny.url.removeprefix("http://"), timeout=60)
    try:
        with driving.held():
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            until(lambda: driving.driver.num_unfinished == 3)
        until(lambda: num_steps == 1)
        assert engine.num_unfinished == 3
        connection.close()
        until(lambda: driving.driver.num_unfinished == 0)
    finally:
        driving.go_on()
    until(lambda: engine.num_unfinished == 0)
    assert num_steps == 1


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_interrupted_has_every_token_once(
    tiny: Tiny, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does something else after the third and the seventh token."""
    driver = tiny.driving.driver
    num_steps, work = 0, driver.work

    def one_step() -> None:
        nonlocal num_steps
        work()
        num_steps += 1
        if num_steps in (3, 7):
            driver.suspend()

    with tiny.driving.held():
        monkeypatch.setattr(driver, "work", one_step)
    asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 20, "temperature": 0, "stream": stream}
    made = tiny.client.chat.completions.create(**asked, extra_body={"return_token_ids": True, "ignore_eos": True})
    answers = [*made] if stream else [made]
    token_ids = [token for each in answers for one in each.choices for token in getattr(one, "token_ids", [])]
    assert token_ids == tiny.greedy(CHAT_IDS, 20)
    assert num_steps > 7


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_while_it_waits_is_never_generated_for(tiny: Tiny, stream: bool) -> None:
    driving = tiny.driving
    connection = http.client.HTTPConnection(tiny.url.removeprefix("http://"), timeout=60)
    with driving.held():
        body = {"model": NAME, "messages": CHAT, "stream": stream}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        until(lambda: driving.driver.num_unfinished == 1)
        connection.close()
        until(lambda: driving.driver.num_unfinished == 0)
    assert driving.engine.num_unfinished == 0


def test_the_deadline_ends_a_request(tiny: Tiny) -> None:
    with served(tiny.driving, tiny.tokenizer, deadline_s=0.3) as url, client(url) as asked:
        with tiny.driving.held():
            with pytest.raises(openai.APIStatusError) as raised:
                asked.chat.completions.create(model=NAME, messages=CHAT)
            assert raised.value.status_code == 504
            with pytest.raises(openai.APIError, match=r"not done within 0\.3 s"):
                list(asked.chat.completions.create(model=NAME, messages=CHAT, stream=True))
        until(lambda: tiny.driving.engine.num_unfinished == 0)


def test_a_token_is_required_where_there_is_one(tiny: Tiny) -> None:
    with served(tiny.driving, tiny.tokenizer, token="secret") as url:
        for wrong in ("none", "secre", "secrets"):
            with client(url, wrong) as asked, pytest.raises(openai.AuthenticationError):
                asked.chat.completions.create(model=NAME, messages=CHAT)
            with client(url, wrong) as asked, pytest.raises(openai.AuthenticationError):
                asked.models.list()
        with client(url, "secret") as asked:
            assert asked.chat.completions.create(model=NAME, messages=CHAT, max_tokens=1).choices


def test_an_engine_that_fails_says_so_to_all(tmp_path: Path, tiny: Tiny) -> None:
    model = make_model(tmp_path)
    model.model.norm.weight.data.fill_(float("nan"))
    driving = Driving(engine_harness.make_engine(tmp_path, model, max_length=MAX_LENGTH))
    with driving, served(driving, tiny.tokenizer) as url, client(url) as asked:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the engine has failed"):
                asked.chat.completions.create(model=NAME, messages=CHAT)
    assert isinstance(driving.error, ModelError)
