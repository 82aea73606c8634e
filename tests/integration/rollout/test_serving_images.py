"""``coordinator serve`` with a model that sees: the ``openai`` client sends pictures; Transformers says the same."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from tandem.samples.images.chat import VisionTokenizer
from tandem.samples.images.families import read_settings, undrawable_ids
from tandem.samples.images.markers import marker
from tandem.samples.images.reading import decode, described
from tandem.samples.tokenizer import load_model_tokenizer
from tests.harness.runs.running import Command
from tests.harness.vision_models import encoded, image_processor, picture, write_vision_model

PICTURES = [encoded(picture(48, 40, seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("served") / "sees")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[openai.OpenAI]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.chdir(model.parent)
        server = stack.enter_context(Command("coordinator", "serve", model, "--port", "0", "--max-length", "256"))
        url = server.wait_for(r"serving \S+ at (http://\S+)/v1")[1]
        yield stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60))


def part(data: bytes) -> dict[str, Any]:
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def ask(client: openai.OpenAI, *parts: dict[str, Any]) -> Any:
    """Return an answer, with the log-probabilities of its tokens."""
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "How many?"}]}]
    return client.chat.completions.create(
        model="sees",
        messages=messages,
        temperature=1,
        seed=3,
        max_tokens=6,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )


def logprobs_of(model: Path, data: bytes, token_ids: list[int], prompt_ids: list[int]) -> list[float]:
    """Return Transformers' own log-probabilities of an answer about a picture."""
    network = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    pixels = image_processor(model)(images=[decode(data)], return_tensors="pt", input_data_format="channels_last")
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    kinds = (ids == network.config.image_token_id).long()
    with torch.no_grad():
        logits = network(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0, len(prompt_ids) - 1 : -1].double()
    logits[:, list(undrawable_ids(load_model_tokenizer(model), read_settings(model).family))] = -torch.inf
    return [float(row.log_softmax(0)[token]) for row, token in zip(logits, token_ids, strict=True)]


def test_pictures_are_answered_as_transformers_answers_them(model: Path, client: openai.OpenAI) -> None:
    tokenizer = VisionTokenizer(load_model_tokenizer(model), model)
    answers = []
    for data in PICTURES[:2]:
        made = ask(client, part(data)).choices[0]
        content = f"{marker(*described(data, 'here')[0])}How many?"
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": content}], add_generation_prompt=True)
        got = made.logprobs.content
        token_ids = [tokenizer.encode(each.token)[0] for each in got]
        wanted = logprobs_of(model, data, token_ids, prompt_ids)
        assert [each.logprob for each in got] == pytest.approx(wanted, abs=1e-5)
        answers.append([each.logprob for each in got])
    assert answers[0] != answers[1], "one size, one question, another picture"


def test_what_is_no_picture_is_refused_and_the_next_one_is_answered(client: openai.OpenAI) -> None:
    for url, says in (
        ("https://example.com/a.png", "nothing is fetched over a network"),
        ("/etc/passwd", "an image is a data URI here"),
        ("data:image/png;base64,AAAA", "no PNG, JPEG, WEBP or GIF"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            ask(client, {"type": "image_url", "image_url": {"url": url}})
    assert ask(client, part(PICTURES[0]), part(PICTURES[2])).choices[0].message.content
