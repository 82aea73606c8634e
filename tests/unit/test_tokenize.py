"""Tokens of texts and chats by vLLM's paths: those of Transformers' tokenizer, and of the chats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_harness
import httpx
import openai
import pytest
from serving_harness import MAX_LENGTH, NAME, VOCABULARY, Driving, client, make_model, served
from transformers import PreTrainedTokenizerFast

from tandem.samples.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


class Tiny:
    """A served model, and Transformers' own tokenizer beside it."""

    def __init__(self, folder: Path) -> None:
        model = make_model(folder)
        self.hugging_face = PreTrainedTokenizerFast.from_pretrained(folder)
        self.tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder), str(folder))
        self.driving = Driving(engine_harness.make_engine(folder, model, num_slots=2, max_length=MAX_LENGTH))
        self.url = ""
        self.client: openai.OpenAI

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        response = httpx.post(f"{self.url}/{path}", json=fields, timeout=60)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refused(self, path: str, **fields: Any) -> str:
        response = httpx.post(f"{self.url}/{path}", json=fields, timeout=60)
        assert response.status_code in (400, 404)
        return str(response.json()["error"]["message"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    shared = Tiny(tmp_path_factory.mktemp("model"))
    with shared.driving, served(shared.driving, shared.tokenizer) as shared.url, client(shared.url) as shared.client:
        yield shared
    assert shared.driving.error is None


@pytest.mark.parametrize("text", ["Hi", "\u00fcber 3 \u20ac", "<eos>", ""])
@pytest.mark.parametrize("special", [{}, {"add_special_tokens": True}, {"add_special_tokens": False}])
def test_texts_have_the_tokens_of_transformers(tiny: Tiny, text: str, special: dict[str, bool]) -> None:
    answer = tiny.post("tokenize", prompt=text, model=NAME, return_token_strs=True, **special)
    expected = tiny.hugging_face.encode(text, **special) if text else []
    assert answer["tokens"] == expected
    assert (answer["count"], answer["max_model_len"]) == (len(expected), MAX_LENGTH)
    assert answer["token_strs"] == tiny.hugging_face.convert_ids_to_tokens(expected)
    assert tiny.post("tokenize", prompt=text, **special)["token_strs"] is None
    assert tiny.post("detokenize", tokens=expected)["prompt"] == tiny.hugging_face.decode(expected)


@pytest.mark.parametrize("messages", [MESSAGES[:1], [*MESSAGES, MESSAGES[0]]])
def test_a_chat_has_the_tokens_that_it_is_asked_with(tiny: Tiny, messages: Any) -> None:
    answer = tiny.post("tokenize", messages=messages, model=NAME)
    asked = tiny.client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer["tokens"] == asked.prompt_token_ids  # type: ignore[attr-defined]
    assert answer["tokens"] == tiny.hugging_face.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_a_whole_conversation_may_end_with_its_answer(tiny: Tiny) -> None:
    answer = tiny.post("tokenize", messages=MESSAGES, add_generation_prompt=False, add_special_tokens=False)
    assert answer["tokens"] == tiny.hugging_face.apply_chat_template(
        MESSAGES, add_generation_prompt=False, return_dict=False
    )


def test_the_tokenizer_is_described(tiny: Tiny) -> None:
    answer = httpx.get(f"{tiny.url}/tokenizer_info", timeout=60).json()
    assert answer["chat_template"] == tiny.hugging_face.chat_template
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert answer[name] == getattr(tiny.hugging_face, name)


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"prompt": "Hi", "model": "other"}, "the model 'other' does not exist"),
        ("tokenize", {"messages": MESSAGES[:1], "add_special_tokens": True}, "add_special_tokens: this server"),
        ("tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message: this server"),
        ("tokenize", {"messages": []}, "messages"),
        ("detokenize", {"tokens": [VOCABULARY]}, f"the token id {VOCABULARY} must be less than {VOCABULARY}"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "Hi"}, "tokens"),
    ],
)
def test_what_has_no_answer_is_refused(tiny: Tiny, path: str, fields: dict[str, Any], reason: str) -> None:
    assert reason in tiny.refused(path, **fields)
