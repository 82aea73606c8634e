"""GPT-OSS's responses: read as openai-harmony 0.0.8 reads their tokens.

Its vocabulary is a file that it would fetch. The tokenizer has the same tokens, and it checks their digest.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.samples.responses import ResponseParser, ResponseStream
from tandem.samples.tokenizer import Tokenizer
from tests.harness import families
from tests.harness.families import FAMILIES
from tests.harness.family_responses import QUESTION

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openai_harmony") is None, reason="openai-harmony is not installed"
)
NUM_BYTES = 256
ANALYSIS, COMMENTARY, FINAL = (f"<|channel|>{name}" for name in ("analysis", "commentary", "final"))
NEXT = "<|end|><|start|>assistant"
JSON = '<|message|>{"city": "Paris", "days": [1, null]}<|call|>'
RESPONSES = (
    f"{FINAL}<|message|>4<|return|>",
    f"{ANALYSIS}<|message|>x{NEXT}{FINAL}<|message|>4<|return|>",
    f"{ANALYSIS}<|message|>x{NEXT}{ANALYSIS}<|message|>y{NEXT}{FINAL}<|message|>4<|return|>",
    f"{ANALYSIS}<|message|>to=functions.f{NEXT}{FINAL}<|message|>4<|end|>",
    f"{ANALYSIS}<|message|>{NEXT}{FINAL}<|message|>4<|return|>",
    f"{ANALYSIS}<|message|>two\n\nlines{NEXT}{FINAL}<|message|>a < b, <b>c</b> and {{}}<|return|>",
    "<|message|>4<|return|>",
    f"{FINAL}<|message|><|return|>",
    f"{FINAL}<|message|>unfinished",
    f"{ANALYSIS}<|message|>unfinished",
    f"{ANALYSIS}<|message|>x{NEXT}{COMMENTARY} to=functions.f <|constrain|>json{JSON}",
    f"{ANALYSIS}<|message|>x{NEXT} to=functions.f{COMMENTARY} <|constrain|>json{JSON}",
    f"{ANALYSIS}<|message|>x{NEXT} to=functions.f{COMMENTARY} json{JSON}",
    f" to=functions.f {COMMENTARY} <|constrain|>json{JSON}",
    f"{COMMENTARY} to=functions.f{JSON}",
    f"{COMMENTARY} to=functions.f code{JSON}",
    f"{COMMENTARY}  to=functions.a.b-c_2  <|constrain|>json{JSON}",
    f"{ANALYSIS} to=functions.f <|constrain|>json{JSON}",
    f"{ANALYSIS} to=python code<|message|>print(1)<|call|>",
    f"{COMMENTARY} to=browser.search{JSON}",
    f"{COMMENTARY}<|message|>I look.{NEXT}{COMMENTARY} to=functions.f <|constrain|>json{JSON}",
    f"{COMMENTARY}<|message|>Soon.{NEXT}{FINAL}<|message|>4<|return|>",
    f"{COMMENTARY} to=functions.f <|constrain|>json<|message|>not json<|call|>",
    f"{COMMENTARY} to=functions.f <|constrain|>json<|message|>[1]<|call|>",
    f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"city":',
)


def list_bytes() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for (Radford et al. 2019, `encoder.py`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(NUM_BYTES + at): byte for at, byte in enumerate(hidden)}


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield openai-harmony's encoding of GPT-OSS."""
    harmony = importlib.import_module("openai_harmony")
    vocabulary = json.loads(Path(os.environ["TANDEM_FAMILIES"], "gptoss", "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    folder, of_character = tmp_path_factory.mktemp("vocabulary"), list_bytes()
    lines = [
        base64.b64encode(bytes(of_character[character] for character in token)) + f" {rank}\n".encode()
        for token, rank in sorted(vocabulary.items(), key=lambda item: int(item[1]))
    ]
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def read_messages(encoding: Any, response: str) -> list[dict[str, Any]]:
    """Return the messages that openai-harmony reads in a response's tokens."""
    harmony = importlib.import_module("openai_harmony")
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for token_id in encoding.encode(response, allowed_special="all"):
        parser.process(token_id)
    parser.process_eos()
    return [message.to_dict() for message in parser.messages]


@pytest.mark.parametrize("response", RESPONSES)
def test_responses_are_read_as_harmony_reads_them(encoding: Any, response: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == "gptoss")
    hugging_face = families.hugging_face(family)
    prompt = hugging_face.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls, malformed = [], []
    for message in read_messages(encoding, response):
        recipient, text = message.get("recipient") or "", "".join(part["text"] for part in message["content"])
        if recipient.startswith("functions."):
            try:
                arguments = json.loads(text)
            except ValueError:
                arguments = None
            if isinstance(arguments, dict):
                calls.append((recipient.removeprefix("functions."), arguments))
            else:  # which stays content
                malformed.append(text)
                texts["content"].append(text)
        else:
            is_hidden = message.get("channel") == "analysis" or bool(recipient)
            texts["reasoning" if is_hidden else "content"].append(text)

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    parser = ResponseParser.of(Tokenizer(hugging_face, family.name))
    parsed = parser.parse(response, prompt=prompt, tools=[tool])
    assert parsed.reasoning == ("\n".join(filter(None, texts["reasoning"])) or None)
    assert parsed.content == "\n".join(filter(None, texts["content"]))
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert [*parsed.malformed_calls] == malformed
    stream = ResponseStream(parser.markers.reader(prompt, [tool]))
    deltas = [*map(stream.push, parser.visible(response)), stream.finish()]
    assert [(call.name, call.arguments) for delta in deltas for call in delta.tool_calls] == calls
    assert "".join(delta.content for delta in deltas) == parsed.content
    assert "".join(delta.reasoning for delta in deltas) == (parsed.reasoning or "")
