"""Completions that echo their prompt, with its log-probabilities: what evaluations ask for, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_harness
import numpy as np
import openai
import pytest
import torch
from openai.types import CompletionChoice
from openai.types.completion_choice import Logprobs
from serving_harness import MAX_LENGTH, NAME, Driving, client, make_model, served, text_ids
from transformers import PreTrainedTokenizerFast

from tandem.samples.tokenizer import Tokenizer

IDS: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}


class Tiny:
    """A served model, and Transformers' own beside it."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model(folder)
        self.tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder), str(folder))
        self.driving = Driving(engine_harness.make_engine(folder, self.model, num_slots=4, max_length=MAX_LENGTH))
        self.client: openai.OpenAI

    def logprobs_TV(self, token_ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities of what may follow each token."""
        with torch.no_grad():
            logits_TV: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits_TV.float().log_softmax(-1)

    def complete(self, prompt: Any, **fields: Any) -> list[CompletionChoice]:
        return self.client.completions.create(model=NAME, prompt=prompt, **fields).choices

    def check_prompt(self, choice: CompletionChoice, prompt_ids: list[int], num_top: int) -> Logprobs:
        """Compare a prompt's log-probabilities with those of the model's own forward pass."""
        scored = choice.logprobs
        assert scored is not None
        assert scored.token_logprobs is not None
        assert scored.tokens is not None
        assert scored.top_logprobs is not None
        size = len(prompt_ids)
        assert scored.tokens[:size] == [f"token_id:{token}" for token in prompt_ids]
        assert (scored.token_logprobs[0], scored.top_logprobs[0]) == (None, None)
        expected_TV = self.logprobs_TV(prompt_ids)
        for place in range(1, size):
            expected_V = expected_TV[place - 1]
            logprob = float(expected_V[prompt_ids[place]])
            assert scored.token_logprobs[place] == pytest.approx(logprob, abs=1e-4)
            likeliest = {f"token_id:{token}" for token in expected_V.topk(num_top).indices.tolist()}
            top = scored.top_logprobs[place]
            assert {*top} == {*likeliest, scored.tokens[place]}
            is_greedy = int(expected_V.argmax()) == prompt_ids[place]
            assert is_greedy == (scored.token_logprobs[place] == max(top.values()))
        return scored


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    shared = Tiny(tmp_path_factory.mktemp("model"))
    with shared.driving, served(shared.driving, shared.tokenizer) as url, client(url) as asked:
        shared.client = asked
        yield shared
    assert shared.driving.error is None
    assert shared.driving.engine.num_unfinished == 0


def test_a_prompt_and_its_response_are_scored_as_transformers_does(tiny: Tiny) -> None:
    """What is drawn at a temperature has the probability of that; the prompt, which nothing drew, the model's own."""
    prompt_ids = text_ids("The cat sat")
    (choice,) = tiny.complete(
        prompt_ids, echo=True, logprobs=3, max_tokens=6, temperature=0.5, seed=4, extra_body={**IDS, "ignore_eos": True}
    )
    scored = tiny.check_prompt(choice, prompt_ids, 3)
    token_ids = choice.token_ids  # type: ignore[attr-defined]
    assert choice.prompt_token_ids == prompt_ids  # type: ignore[attr-defined]
    assert choice.text == tiny.tokenizer.decode([*prompt_ids, *token_ids])
    expected = engine_harness.reference_logprobs(tiny.model, tuple(prompt_ids), np.array(token_ids, np.int32), 0.5)
    assert scored.token_logprobs is not None
    np.testing.assert_allclose(scored.token_logprobs[len(prompt_ids) :], expected, atol=1e-4)


def test_several_prompts_are_scored_and_nothing_is_generated(tiny: Tiny) -> None:
    texts = ["The cat", "No", "x"]
    choices = tiny.complete(texts, echo=True, logprobs=1, max_tokens=0, extra_body=IDS)
    assert [choice.text for choice in choices] == texts
    for choice, text in zip(choices, texts, strict=True):
        prompt_ids = tiny.tokenizer.encode(text)
        scored = tiny.check_prompt(choice, prompt_ids, 1)
        assert scored.tokens is not None
        assert len(scored.tokens) == len(prompt_ids)
        assert (choice.finish_reason, choice.token_ids) == ("length", [])  # type: ignore[attr-defined]
    usage = tiny.client.completions.create(model=NAME, prompt=texts, echo=True, logprobs=1, max_tokens=0).usage
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, sum(len(tiny.tokenizer.encode(t)) for t in texts))


def test_a_stream_begins_with_the_prompt(tiny: Tiny) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 5, "seed": 9, "n": 2}
    whole = tiny.complete("The cat sat", **asked, extra_body={"ignore_eos": True})
    stream = tiny.client.completions.create(
        model=NAME, prompt="The cat sat", stream=True, **asked, extra_body={"ignore_eos": True}
    )
    parts = [choice for chunk in stream for choice in chunk.choices]
    for choice in whole:
        of_choice = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in of_choice) == choice.text
        assert of_choice[0].text.startswith("The cat sat")
        assert choice.logprobs is not None
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in of_choice if part.logprobs for value in getattr(part.logprobs, field)]
            assert joined == getattr(choice.logprobs, field), field


def test_without_log_probabilities_only_the_text_is_repeated(tiny: Tiny) -> None:
    (choice,) = tiny.complete("The cat", echo=True, max_tokens=3, temperature=0)
    (alone,) = tiny.complete("The cat", max_tokens=3, temperature=0)
    assert (choice.text, choice.logprobs) == ("The cat" + alone.text, None)


def test_an_alternative_that_looks_like_the_token_is_still_there(tiny: Tiny) -> None:
    """Half characters look alike; were one to stand for another, a token would pass for the likeliest that is not."""
    halves = [token for token in range(256) if tiny.tokenizer.token_text(token) == "\N{REPLACEMENT CHARACTER}"]
    prompt_ids = [*text_ids("a"), *halves[::3]]
    (choice,) = tiny.complete(prompt_ids, echo=True, logprobs=1, max_tokens=0)
    assert choice.logprobs is not None
    top, scored = choice.logprobs.top_logprobs or [], choice.logprobs.token_logprobs or []
    likeliest_T = tiny.logprobs_TV(prompt_ids).argmax(-1).tolist()
    assert {*likeliest_T} & {*halves}, "or none looks like the token"
    for place in range(1, len(prompt_ids)):
        is_greedy = likeliest_T[place - 1] == prompt_ids[place]
        assert is_greedy == (scored[place] == max(top[place].values()))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 only scores a prompt, with echo: true and logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens: 0 only scores a prompt, with echo: true and logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 20, "n": 1024, "prompt": [[1] * 80]}, "1720320 with their alternatives, at most"),
    ],
)
def test_what_cannot_be_answered_is_refused(tiny: Tiny, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        tiny.complete(**{"prompt": "The cat", **fields})


def test_chats_have_no_echo(tiny: Tiny) -> None:
    with pytest.raises(openai.BadRequestError, match="echo: this server does not support it"):
        tiny.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi"}], extra_body={"echo": True}
        )
