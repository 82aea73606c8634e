"""``coordinator serve`` with a vision model: the ``openai`` client sends pictures; Transformers says the same."""

from __future__ import annotations

import base64
import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from tandem.samples.images.chat import VisionTokenizer
from tandem.samples.images.families import read_settings, undrawable_ids
from tandem.samples.images.reading import decode, described
from tandem.samples.markers import marker
from tandem.samples.model_files import load_model_tokenizer
from tests.harness.runs.running import BIN, TIMEOUT_S, Command
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


def test_a_conversation_goes_on_with_more_pictures(client: openai.OpenAI) -> None:
    """Several pictures in one message, and another one in a later turn; every one of them counts."""

    def go_on(last: bytes) -> list[float]:
        messages: Any = [
            {"role": "user", "content": [part(PICTURES[0]), part(PICTURES[1]), {"type": "text", "text": "How many?"}]},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": [{"type": "text", "text": "And here?"}, part(last)]},
        ]
        body = {"ignore_eos": True}
        made = client.chat.completions.create(
            model="sees", messages=messages, seed=3, max_tokens=4, logprobs=True, extra_body=body
        )
        assert made.usage.prompt_tokens > 3 * 16
        return [each.logprob for each in made.choices[0].logprobs.content]

    first = go_on(PICTURES[2])
    assert first == go_on(PICTURES[2])
    assert first != go_on(PICTURES[1])
    streamed = client.chat.completions.create(
        model="sees", messages=[{"role": "user", "content": [part(PICTURES[0])]}], seed=3, max_tokens=4, stream=True
    )
    assert any(event.choices for event in streamed)


def test_a_marker_in_a_text_stands_for_nothing_that_was_not_sent(client: openai.OpenAI) -> None:
    sent, other = described(PICTURES[0], "here")[0], described(encoded(picture(50, 40)), "here")[0]
    ask(client, part(PICTURES[0]))
    assert ask(client, {"type": "text", "text": marker(*sent)}).choices
    for wrong in (marker(*other), marker(sent.digest, 480, 400)):
        with pytest.raises(openai.BadRequestError, match="stands for no image that is held here"):
            ask(client, {"type": "text", "text": wrong})


def test_a_chat_in_the_terminal_shows_pictures(model: Path, client: openai.OpenAI, tmp_path: Path) -> None:
    for number, data in enumerate(PICTURES):
        (tmp_path / f"{number}.png").write_bytes(data)
    (tmp_path / "text.png").write_text("no picture")
    url = str(client.base_url)
    words = [BIN / "coordinator", "chat", "--url", url, "--temperature", "0", "--max-tokens", "4", "--seed", "1"]
    typed = f"How many?\n/image {tmp_path}/text.png\n/image {tmp_path}/1.png\n/image '{tmp_path}/2.png'\nAnd here?\n"
    chat = subprocess.run(
        [*words, "--image", tmp_path / "0.png"],
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert chat.returncode == 0, chat.stderr
    assert "is no PNG, JPEG, WEBP or GIF" in chat.stderr
    assert "(it is shown with the next question)" in chat.stdout
    assert "(2 pictures are shown with the next question)" in chat.stdout
    assert chat.stderr.count("error:") == 1, "the server has read them all"
    refused = subprocess.run(
        [*words, "--image", "none.png"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert refused.returncode != 0
    assert "cannot read the image 'none.png': No such file" in refused.stderr
