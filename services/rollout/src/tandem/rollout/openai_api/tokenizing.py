"""Tokens of texts and chats, and texts of tokens, by vLLM's paths `/tokenize` and `/detokenize`.

Clients that count or compare tokens ask for them: evaluations without a tokenizer of their own, and agents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.common.errors import ConfigError, DataError
from tandem.rollout.openai_api.bodies import read_body
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.protocol import (
    ChatRequest,
    TokenId,
    convert_fields,
    convert_request,
    read_fields,
    refuse_effects,
)
from tandem.rollout.openai_api.refusals import OpenAIRefused, as_response

_ONLY_OF_TEXTS = {"add_special_tokens": (False,)}
"""Fields of texts that chats do not have, with the values that change nothing."""
_OF_TOKENIZING = ("add_generation_prompt", "return_token_strs")


class TextTokenization(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize`` of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    """False omits what the tokenizer adds to a text, such as the beginning of a sequence."""
    return_token_strs: bool | None = None


class ChatTokenization(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``POST /tokenize`` of a chat that chats themselves do not have."""

    add_generation_prompt: bool | None = None
    """False leaves out the beginning of the answer."""
    return_token_strs: bool | None = None


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens as the vocabulary writes them, if asked for."""


class TokensToDecode(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens, special ones included."""

    prompt: str


class TokenizerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer, by the names of ``tokenizer_config.json``."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: Any
    """A text, texts by name, or null."""


def tokenize(model: ServedModel, body: bytes) -> TokenizedPrompt:
    """Return the tokens of a text, or of the prompt that a chat would have. Raises `OpenAIRefused` and `DataError`."""
    fields = read_fields(body)
    if "messages" in fields:
        token_ids, shows_texts = _tokenize_chat(model, fields)
    else:
        text = convert_fields(fields, TextTokenization)
        model.check_name(text.model)
        special = text.add_special_tokens is not False
        token_ids = model.tokenizer.encode(text.prompt, add_special_tokens=special) if text.prompt else []
        shows_texts = bool(text.return_token_strs)
    texts = model.tokenizer.hugging_face.convert_ids_to_tokens(token_ids) if shows_texts else None
    return TokenizedPrompt(count=len(token_ids), max_model_len=model.max_length, tokens=token_ids, token_strs=texts)


def _tokenize_chat(model: ServedModel, fields: dict[str, Any]) -> tuple[list[int], bool]:
    settings = convert_fields(fields, ChatTokenization)
    refuse_effects(fields, _ONLY_OF_TEXTS)
    request = convert_request(
        {name: value for name, value in fields.items() if name not in (*_OF_TOKENIZING, *_ONLY_OF_TEXTS)}, ChatRequest
    )
    model.check_name(request.model)
    messages = model.messages_of(request)
    if settings.add_generation_prompt is False:
        variables = model.variables_of(request)
        token_ids = model.tokenizer.encode_chat(messages, add_generation_prompt=False, variables=variables)
    else:
        token_ids = model.chat_ids(request, messages)
    return token_ids, bool(settings.return_token_strs)


def detokenize(model: ServedModel, body: bytes) -> DetokenizedText:
    """Return the text of tokens. Raises `OpenAIRefused`."""
    request = convert_fields(read_fields(body), TokensToDecode)
    model.check_name(request.model)
    highest = max(request.tokens, default=0)
    if highest >= model.vocabulary:
        raise OpenAIRefused(f"the token id {highest} must be less than {model.vocabulary}", param="tokens")
    return DetokenizedText(prompt=model.tokenizer.decode(request.tokens, skip_special_tokens=False))


def describe_tokenizer(model: ServedModel, _: bytes) -> TokenizerDescription:
    """Return what the tokenizer is."""
    hugging_face = model.tokenizer.hugging_face
    return TokenizerDescription(
        tokenizer_class=type(hugging_face).__name__,
        model_max_length=model.max_length,
        bos_token=hugging_face.bos_token,
        eos_token=hugging_face.eos_token,
        pad_token=hugging_face.pad_token,
        unk_token=hugging_face.unk_token,
        chat_template=hugging_face.chat_template,
    )


Answer = Callable[[ServedModel, bytes], msgspec.Struct]


class TokenizerPath:
    """The handler of one path."""

    def __init__(self, find: Callable[[Request], ServedModel], answer: Answer) -> None:
        """`find` returns the model of a request, or raises `OpenAIRefused`; `answer` takes it and the body."""
        self._find = find
        self._answer = answer

    async def respond(self, request: Request) -> Response:
        """Answer a request."""
        try:
            model = self._find(request)
            answer = self._answer(model, await read_body(request))
        except (ConfigError, DataError) as error:  # from a chat template, or a text without tokens
            return as_response(OpenAIRefused(str(error)))
        except OpenAIRefused as error:
            return as_response(error)
        return Response(msgspec.json.encode(answer), media_type="application/json")
