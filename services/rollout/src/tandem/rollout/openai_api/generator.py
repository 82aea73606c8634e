"""The protocol of generators behind the API, and the model that the API serves."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import Media, SamplingParameters
from tandem.config.schema.generation import ToolCallParser
from tandem.rollout.engine import Alternatives, PromptScores
from tandem.rollout.engines.served import ResponseGrammar
from tandem.rollout.openai_api.protocol import ChatRequest, no_such_model
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.samples.responses import ResponseMarkers
from tandem.samples.sampling_masks import SamplingMasks
from tandem.samples.tokenizer import Tokenizer


class ResponseChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a response since the previous chunk."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution that it was drawn from."""
    versions: list[int]
    """Weight version that made each token."""
    alternatives: list[Alternatives] | None = None
    """Alternatives to each token, if the request asked for them."""
    finish_reason: Literal["stop", "length"] | None = None
    """Reason in the last chunk, None in all others. A token that ends the response is one of its tokens."""
    masks: SamplingMasks | None = None
    """Sampling mask of each token, if the engine notes them."""
    prompt_scores: PromptScores | None = None
    """Probabilities of the prompt's tokens, in the first chunk, if the request asked for them."""
    routed_experts_TX: NDArray[np.uint8] | None = None
    """Expert routing of the whole sequence, as in `tandem.rollout.engine.EngineCompletion`; in the last chunk only."""


class ResponseGenerator(Protocol):
    """A maker of responses. A slow one may yield a response as a single chunk."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        seed: int,
        media: Media = (),
        *,
        is_streamed: bool = True,
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Yield a response as it is made; closing or cancelling the iteration abandons the rest.

        `media` are those of the prompt. If it is not streamed, it may be yielded at its end. Raises `OpenAIRefused`.
        """
        ...


class RequestMedia(Protocol):
    """A keeper of what requests have besides text."""

    def mark(self, url: str) -> str:
        """Keep a file, given as a data URI, and return its marker. Raises `OpenAIRefused`."""
        ...

    def check(self, text: str) -> None:
        """Raise `OpenAIRefused` for a marker in a text of what is not kept."""
        ...


class ServedModel:
    """A model as requests see it: name, tokenizer, limits. A subclass with its own chats overrides `chat_ids`."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        generator: ResponseGenerator,
        *,
        max_length: int,
        vocabulary: int,
        stop_token_ids: Sequence[int] = (),
        aliases: Sequence[str] = (),
        tool_call_parser: ToolCallParser | None = None,
        shows_versions: bool = False,
        media: RequestMedia | None = None,
    ) -> None:
        """Describe the model.

        Args:
            name: by which requests ask for it.
            tokenizer: of the model.
            generator: makes its responses.
            max_length: of a sequence in tokens, prompt included.
            vocabulary: number of tokens that the model can read.
            stop_token_ids: those that end a response, besides the model's own (`Tokenizer.turn_ends`).
            aliases: other names for it.
            tool_call_parser: how it writes tool calls; None where they stay text.
            shows_versions: whether answers name the weight versions that made them.
            media: keeper of images in requests; None where the model, or its engine here, takes text alone.

        """
        self.name = name
        self.aliases = tuple(aliases)
        self.shows_versions = shows_versions
        self.tokenizer = tokenizer
        self.generator = generator
        self.max_length = max_length
        self.vocabulary = vocabulary
        self.stop_token_ids, _ = tokenizer.stop_conditions(stop_token_ids)
        self.tool_call_parser = tool_call_parser
        self.response_markers = ResponseMarkers.of_tokenizer(tokenizer)
        """How its chat template marks reasoning and calls."""
        self.media = media
        self.created = int(time.time())
        self._grammar_tokenizer: Any = None
        """The tokenizer for grammars, once a response has asked for JSON."""

    def check_name(self, name: str | None) -> None:
        """Raise `OpenAIRefused` for a request that names another model."""
        names = (self.name, *self.aliases)
        if name is not None and name not in names:
            raise no_such_model(name, names)

    def messages_of(self, request: ChatRequest) -> list[dict[str, Any]]:
        """Return the messages in the form of chat templates, with markers for media. Raises `OpenAIRefused`."""
        messages = [message.for_template(self._mark) for message in request.messages]
        if self.media is not None:
            for message in messages:
                self.media.check(message["content"])
        return messages

    def _mark(self, url: str) -> str:
        if self.media is None:
            reason = "its engine reads none" if self.tokenizer.takes_media else "it is a text model"
            raise OpenAIRefused(f"messages: {self.name} answers texts here, not images: {reason}", param="messages")
        return self.media.mark(url)

    def chat_ids(self, request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that the model is to answer: the whole conversation, rendered by the chat template.

        `messages` are those of the request. Tokens that it gives for the first of them stay as they are. Raises
        `OpenAIRefused` and what `Tokenizer.encode_chat` raises.
        """
        given_ids = self.encode_given(request, messages)
        if given_ids is not None:
            return given_ids
        return self.tokenizer.encode_chat(messages, add_generation_prompt=True, variables=self.variables_of(request))

    def encode_given(self, request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """Return the tokens of a conversation that continues tokens in the request; None if it gives none.

        Only the messages after those are rendered. Raises what `chat_ids` raises.
        """
        prefix = request.sampled_prefix
        if prefix is None or not prefix[1] or prefix[0] == len(messages):
            return None
        num_given, prefix_ids = prefix
        if max(prefix_ids) >= self.vocabulary:
            raise OpenAIRefused(f"the token id {max(prefix_ids)} must be less than {self.vocabulary}", param="messages")
        variables, turn = self.variables_of(request), messages[num_given - 1]
        return [
            *prefix_ids,
            *self.tokenizer.encode_continuation(messages[num_given:], prefix_ids[-1], variables, turn),
        ]

    def grammar_of(self, schema: Mapping[str, Any]) -> ResponseGrammar:
        """Return the grammar of a schema's JSON. Raises `OpenAIRefused` if the model cannot keep to it."""
        from tandem.rollout.openai_api.grammars import JsonGrammar, check_characters, grammar_tokenizer

        check_characters(self.tokenizer.alphabet, schema)
        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = grammar_tokenizer(self.tokenizer, self.vocabulary)
        return JsonGrammar(self._grammar_tokenizer, schema)

    def variables_of(self, request: ChatRequest) -> dict[str, Any]:
        """Return the chat template's variables besides the messages. Raises `OpenAIRefused`."""
        tools = request.offered_tools
        if tools and not self.tokenizer.reads_tools:
            raise OpenAIRefused(f"tools: the chat template of {self.name} does not support tools", param="tools")
        template_variables = self.tokenizer.template_variables
        arguments = request.chat_template_kwargs or {}
        if request.unknown_fields or arguments.keys() - template_variables:
            self._refuse_variables(
                request.unknown_fields, {name: arguments[name] for name in arguments.keys() - template_variables}
            )
        effort = {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort is not None else {}
        variables = {name: value for name, value in {**effort, **arguments}.items() if name in template_variables}
        return {**variables, "tools": tools} if tools else variables

    def _refuse_variables(self, fields: Sequence[str], arguments: Mapping[str, Any]) -> None:
        """Raise `OpenAIRefused` for fields and arguments that would change the prompt by way of the chat template."""
        variables = _variables(self.tokenizer)
        field = next((name for name in fields if name in variables), None)
        if field is not None:
            message = f"{field}: this is a variable of {self.name}'s chat template: give it in chat_template_kwargs"
            raise OpenAIRefused(message, param=field, code="unsupported")
        names = [name for name in arguments if name in variables and (name, arguments[name]) != _GENERATION_PROMPT]
        if names:
            message = f"chat_template_kwargs: {names[0]!r} cannot be set here: leave it out"
            raise OpenAIRefused(message, param="chat_template_kwargs", code="unsupported")


_GENERATION_PROMPT = ("add_generation_prompt", True)


def _variables(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the variables that a chat template reads."""
    template = tokenizer.hugging_face.chat_template
    sources = template.values() if isinstance(template, dict) else () if template is None else (template,)
    return frozenset[str]().union(*map(_variables_of, sources))


@functools.cache
def _variables_of(source: str) -> frozenset[str]:
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        parsed = environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
    except jinja2.TemplateSyntaxError:  # with tags that only Transformers knows
        return frozenset()
    return frozenset(jinja2.meta.find_undeclared_variables(parsed))
