"""Token ids in messages of chats, as NeMo Gym's model server (0.4) takes them and sends them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving_harness import at, client
from tools_harness import CALC, CALL, QUESTION, VOCABULARY, Scripted, episode, make_tokenizer, spoken

from tandem.rollout.environments import Score
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.generator import ServedModel

ASK: dict[str, Any] = {"model": "policy", "messages": QUESTION, "tools": [CALC]}
# What `responses_api_models/vllm_model/app.py` adds to each request for training.
OF_GYM: dict[str, Any] = {"logprobs": True, "top_logprobs": 0, "extra_body": {"return_tokens_as_token_ids": True}}
FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
RESULT = {"role": "tool", "tool_call_id": "x", "content": "36"}
AFTER = "\n<|im_start|>user\n<tool_response>\n36\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_message_has_the_tokens_that_were_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = spoken(CALL)
    with episode(tmp_path, monkeypatch, first, first) as (made, _, policy):
        (choice,) = made.chat.completions.create(**ASK, **OF_GYM).choices
        assert choice.message.prompt_token_ids == policy.prompts[0]
        assert choice.message.generation_token_ids == first
        assert choice.message.generation_log_probs == [-0.5] * len(first)
        # The fields by which the model server checks what it was given.
        assert [each.token for each in choice.logprobs.content] == [f"token_id:{token}" for token in first]
        tokenized = httpx.post(str(made.base_url).removesuffix("v1/") + "tokenize", json=ASK, timeout=60).json()
        assert tokenized["tokens"] == policy.prompts[0]
        (plain,) = made.chat.completions.create(**ASK, logprobs=True).choices
        assert not {*FIELDS} & plain.message.model_dump().keys(), "they come where they are asked for"


@pytest.mark.parametrize("by_message", [True, False])
def test_a_conversation_continues_from_the_tokens_that_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_message: bool
) -> None:
    first, second = spoken(CALL), spoken("36")
    with episode(tmp_path, monkeypatch, first, second) as (made, played, policy):
        message = made.chat.completions.create(**ASK, **OF_GYM).choices[0].message.model_dump(exclude_none=True)
        given = {name: message.pop(name) for name in FIELDS}
        prefix = [*given["prompt_token_ids"], *given["generation_token_ids"]]
        # It would not be known again by its text: the gym moves reasoning and white space about.
        changed = {**message, "content": "otherwise"}
        body: dict[str, Any] = {"messages": [*QUESTION, {**changed, **(given if by_message else {})}, RESULT]}
        extra = {} if by_message else {"required_prefix_token_ids": prefix}
        url = str(made.base_url).removesuffix("v1/")
        tokenized = httpx.post(f"{url}tokenize", json={**ASK, **body, **extra}, timeout=60).json()["tokens"]
        made.chat.completions.create(**{**ASK, **body}, extra_body=extra)
        assert policy.prompts[1] == tokenized
        assert policy.prompts[1][: len(prefix)] == prefix
        assert played.tokenizer.decode(policy.prompts[1][len(prefix) :], skip_special_tokens=False) == AFTER
        scored, arrays = played.session.finish(Score(1.0, correct=True), version=0)
    (branch,) = scored.branches
    assert branch.num_made == len(first) + len(second)
    assert arrays.token_ids_T.tolist() == [*policy.prompts[1], *second]


def test_tokens_that_are_none_are_refused_and_those_of_an_unfinished_conversation_have_no_effect(
    tmp_path: Path,
) -> None:
    policy = Scripted(spoken("36"), spoken("36"))
    model = ServedModel("policy", make_tokenizer(tmp_path), policy, max_length=4096, vocabulary=VOCABULARY)
    said = {"role": "assistant", "content": "36", "prompt_token_ids": [1], "generation_token_ids": [2, VOCABULARY]}
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        messages: list[Any] = [*QUESTION, said, {"role": "user", "content": "and?"}]
        with pytest.raises(openai.BadRequestError, match=f"token id {VOCABULARY} must be less than {VOCABULARY}"):
            made.chat.completions.create(model="policy", messages=messages)
        made.chat.completions.create(model="policy", messages=messages[:1])
        extra = {"required_prefix_token_ids": [1, 2, 3]}
        made.chat.completions.create(model="policy", messages=messages[:1], extra_body=extra)
    assert policy.prompts[0] == policy.prompts[1], "nobody has answered yet"
