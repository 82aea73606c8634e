"""Tools in conversations: a tokenizer and a chat template as Qwen's, and a policy that says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import torch
from engine_harness import make_model, sampling
from rollout_harness import CHARACTERS
from serving_harness import at, client, text_ids
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.common.messages import Generate, ImageRef, Problem, PromptGroup, SamplingParameters
from tandem.config import Config, build_config
from tandem.config.schema import NewModel
from tandem.config.schema.generation import ToolCallParser
from tandem.rollout.agents.episodes import Episode
from tandem.rollout.openai_api.app import make_app, only_with
from tandem.rollout.openai_api.generator import ResponseChunk, ServedModel
from tandem.samples.model_files import write_new_model
from tandem.samples.tokenizer import Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|python_tag|>"]
"""The marks of calls are special here, as in some models: they are to be read nonetheless."""
VOCABULARY = 256 + len(SPECIAL)
END = 257
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""That of Qwen 2.5 in all that matters."""
IDS: dict[str, Any] = {"return_token_ids": True}
CALC: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Work out a product.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def make_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer each of whose ordinary tokens spells a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>")
    wrapped.chat_template = TEMPLATE
    return Tokenizer(wrapped, str(folder))


CALL = '<tool_call>\n{"arguments":{"a":12,"b":3},"name":"calc"}</tool_call>'
"""Not as the template would write it: the order and the spaces are the policy's own."""
LEARNED = '<tool_call>\n{"name": "calc", "arguments": {"a": 12, "b": 3}}\n</tool_call>'
"""As the template writes it."""
QUESTION: Any = [{"role": "user", "content": "12 * 3"}]


def spoken(text: str) -> list[int]:
    """Return tokens that say so; the marks of calls are one token each."""
    ids: list[int] = []
    for part in text.replace("<tool_call>", "\0<\0").replace("</tool_call>", "\0>\0").split("\0"):
        ids += {"<": [258], ">": [259]}.get(part, text_ids(part))
    return [*ids, END]


def write_calling_model(folder: Path) -> None:
    """Write a tiny model that has learned one conversation by heart: it calls the tool, and repeats what that says."""
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": END, "max_position_embeddings": 1024}
    model = make_model("qwen3", folder, **sizes, **ids, initializer_range=0.05)
    tokenizer = make_tokenizer(folder)
    variables = {"tools": [CALC]}
    before = tokenizer.encode_chat(QUESTION, add_generation_prompt=True, variables=variables)
    result = tokenizer.encode_continuation([{"role": "tool", "content": "36"}], END, variables)
    parts = [(before, False), (spoken(LEARNED), True), (result, False), (spoken("36"), True)]
    token_ids = torch.tensor([token for part, _ in parts for token in part])
    labels = torch.tensor([token if is_said else -100 for part, is_said in parts for token in part])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(200):
        loss = model(input_ids=token_ids[None], labels=labels[None]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if float(loss.detach()) < 0.01:
            break
    else:
        raise AssertionError(f"it has not learned its conversation: {float(loss.detach())}")
    model.save_pretrained(folder)
    tokenizer.save(folder)


def check_calls(client: openai.OpenAI, model: str) -> None:
    """Hold the conversation that the model knows, whole and as a stream, log-probabilities included."""
    asked: dict[str, Any] = {"model": model, "tools": [CALC], "temperature": 0, "max_tokens": 100, "logprobs": True}
    messages: list[Any] = [*QUESTION]
    (choice,) = client.chat.completions.create(messages=messages, **asked, extra_body=IDS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.token_ids == spoken(LEARNED)  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"a": 12, "b": 3})
    chunks = [*client.chat.completions.create(messages=messages, **asked, stream=True, extra_body=IDS)]
    pieces = [chunk.choices[0] for chunk in chunks]
    assert [token for piece in pieces for token in getattr(piece, "token_ids", None) or []] == spoken(LEARNED)
    logprobs = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content or []]
    assert choice.logprobs is not None
    assert [one.token for one in logprobs] == [one.token for one in choice.logprobs.content or []]
    deltas = [delta for piece in pieces for delta in piece.delta.tool_calls or []]
    assert [(delta.index, delta.function.name) for delta in deltas if delta.function] == [(0, "calc"), (0, None)]
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert pieces[-1].finish_reason == "tool_calls"
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "36"}]
    (last,) = client.chat.completions.create(messages=messages, **asked).choices
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("36", None, "stop")


class Scripted:
    """A generator that makes given tokens, one in each chunk, response by response."""

    def __init__(self, *responses: Sequence[int]) -> None:
        self.responses = [*responses]
        self.prompts: list[list[int]] = []
        self._number = itertools.count()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        seed: int,
        images: tuple[ImageRef, ...] = (),
        *,
        is_streamed: bool = True,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the next response."""
        self.prompts.append([*prompt_ids])
        token_ids = self.responses[next(self._number)]
        for place, token_id in enumerate(token_ids, 1):
            is_last = place == len(token_ids)
            reason = None if not is_last else "stop" if token_id in sampling.stop_token_ids else "length"
            yield ResponseChunk(token_ids=[token_id], logprobs=[-0.5], versions=[0], finish_reason=reason)  # type: ignore[arg-type]


@contextlib.contextmanager
def asked(folder: Path, *responses: list[int], parser: ToolCallParser | None = "hermes") -> Iterator[openai.OpenAI]:
    """Yield a client of a policy that says what it is told to."""
    generator = Scripted(*responses)
    model = ServedModel(
        "m", make_tokenizer(folder), generator, max_length=4096, vocabulary=VOCABULARY, tool_call_parser=parser
    )
    with at(make_app(only_with(None, model), deadline_s=60)) as url, client(url) as made:
        yield made


def config_of(folder: Path) -> Config:
    write_new_model(folder / "model", NewModel(config={"model_type": "qwen3"}, characters=CHARACTERS))
    settings: dict[str, Any] = {
        "grpo": {},
        "policy": {
            "model_name": str(folder / "model"),
            "max_total_sequence_length": 4096,
            "generation": {"tool_call_parser": "hermes"},
        },
        "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
        "env": {"mine": {"command": ["true"]}},
    }
    return build_config(settings)


@contextlib.contextmanager
def episode(folder: Path, monkeypatch: pytest.MonkeyPatch, *responses: list[int]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a client, the episode that it plays, and the policy, which says what it is told to."""
    monkeypatch.setattr("tandem.rollout.agents.episodes.vocabulary_size", lambda policy: VOCABULARY)
    policy, tokenizer, config = Scripted(*responses), make_tokenizer(folder), config_of(folder)
    problem = Problem(problem_id="p", question="", answer="", metadata={})
    group = PromptGroup(group=0, problem=problem, prompt_ids=(1,), seeds=(1,))
    how = sampling(max_new_tokens=512, stop_token_ids=(END,))
    command = Generate(
        command_id=1, deadline_s=60, cancel_before=1, step=1, purpose="train", sampling=how, groups=(group,)
    )

    async def begin() -> Episode:
        return Episode(1, group, 0, command, config, policy, tokenizer)  # type: ignore[arg-type]

    played = asyncio.run(begin())
    with at(make_app(lambda _: played, deadline_s=60)) as url, client(url) as made:
        yield made, played, policy
