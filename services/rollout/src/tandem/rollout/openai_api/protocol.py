"""Requests, answers and stream chunks of OpenAI's API, with vLLM's fields for token ids.

All input is checked here. Unknown fields are ignored, as OpenAI's own clients expect of servers. A known field that
would change the answer and is not supported is refused, unless its value changes nothing, and so is a field with the
name of a variable of the chat template, since it would change the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tandem.common.errors import nearest
from tandem.common.messages import SamplingParameters
from tandem.rollout.engines.served import Factor, Penalty, ResponseGrammar, ServedSampling
from tandem.rollout.openai_api.refusals import OpenAIRefused
from tandem.samples.chat_templates import REASONING_FIELDS

MAX_CHOICES = 1024
"""Responses that one request may ask for: prompts times ``n``."""
_MAX_STOPS = 64
_MOST_VERSIONS = 1024
_CHANGES_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "logits_processors": ([],),
}
"""Unsupported fields, with the values, beside null, that have no effect."""
_MESSAGE_FIELDS: Mapping[str, str] = {
    "function_call": "give tool_calls",
    "prefix": "an assistant's message cannot be continued",
    "audio": "give text",
}
"""Unsupported fields of messages that would change a prompt, and what to do."""

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
NumAlternatives = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**31)]
Stop = str | Annotated[list[str], Meta(max_length=_MAX_STOPS)]


# --- requests --------------------------------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = None


class JsonSchema(Struct, frozen=True, kw_only=True):
    """A schema for JSON responses."""

    name: str = ""
    schema: dict[str, Any] = msgspec.field(default_factory=dict)
    strict: bool | None = None
    """Always true here."""


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """The format of a response."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema(self) -> dict[str, Any] | None:
        """Schema of the response's JSON; None if it may be any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.type == "json_object" or self.json_schema is None else self.json_schema.schema


class GenerationFields(Struct, frozen=True, kw_only=True):
    """The common fields of requests for text; null means absent."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    """vLLM's field; 0 and -1 mean no limit."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """vLLM's field."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    """vLLM's field."""
    response_format: ResponseFormat | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_MAX_STOPS)] | None = None
    """vLLM's field; these come beside the model's own."""
    ignore_eos: bool | None = None
    """vLLM's field: generate past the model's own stop tokens."""
    skip_special_tokens: bool | None = None
    """vLLM's field: false shows special tokens in the text."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's field: the answer has ``prompt_token_ids`` and ``token_ids``."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's field: log-probabilities name a token by its id, as ``token_id:7``."""
    weight_version: Version | None = None
    """Our own field: the weight version that makes the response. Refused with 409 where the engine lacks it."""
    kept_versions: Annotated[list[Version], Meta(max_length=_MOST_VERSIONS)] | None = None
    """Our own field: versions that later requests may name."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a response."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in dict.fromkeys(stop) if text)

    @property
    def num_alternatives(self) -> int:
        """Alternatives to return at each position, with their log-probabilities."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are asked for."""
        return False

    @property
    def response_schema(self) -> dict[str, Any] | None:
        """Schema of the response's JSON; None if it may be any text."""
        return None if self.response_format is None else self.response_format.schema

    def served(self, sampling: SamplingParameters, grammar: ResponseGrammar | None) -> SamplingParameters:
        """Return the sampling parameters, with any options beyond training's that were asked for."""
        served = ServedSampling(
            **msgspec.structs.asdict(sampling),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            num_alternatives=self.num_alternatives,
            scores_prompt=self.scores_prompt,
            grammar=grammar,
            weight_version=self.weight_version,
            kept_versions=tuple(self.kept_versions or ()),
        )
        return served if served.changes_logits or served.weight_version is not None else sampling

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """A text in a message."""

    text: str


class ImageUrl(Struct, frozen=True):
    """An image of a message."""

    url: str
    """A data URI: nothing is fetched, and no file is read."""
    detail: str = "auto"
    """Accepted: the model's own settings decide how finely images are looked at."""


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: ImageUrl


class CalledFunction(Struct, frozen=True):
    """A function and arguments in a call by the assistant."""

    name: str
    arguments: str = "{}"
    """Arguments in JSON."""


class ToolCall(Struct, frozen=True, kw_only=True):
    """One call in an assistant message."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's name of `reasoning_content`."""
    thinking: str | None = None
    """GPT-OSS's name of `reasoning_content`."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    """NeMo Gym's field: tokens of the prompt that this message answered. They and the next are not rendered anew."""
    generation_token_ids: list[TokenId] | None = None
    """NeMo Gym's field: tokens of this message, as they were sampled."""

    def text(self, mark: Callable[[str], str]) -> str:
        """Return the text of the message; `mark` turns an image's address into the marker that stands for it."""
        if not isinstance(self.content, list):
            return self.content or ""
        parts = [mark(part.image_url.url) if isinstance(part, ImagePart) else part.text for part in self.content]
        return ("" if any(isinstance(part, ImagePart) for part in self.content) else "\n").join(parts)

    def for_template(self, mark: Callable[[str], str]) -> dict[str, Any]:
        """Return the message in the form of chat templates: the arguments of calls are objects."""
        message: dict[str, Any] = {"role": self.role, "content": self.text(mark)}
        for field in ("name", *REASONING_FIELDS, "tool_call_id"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


class ToolFunction(Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class ShownTool(Struct, frozen=True, kw_only=True):
    """A tool that the chat template shows the model."""

    type: Literal["function"]
    function: ToolFunction


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    tools: list[ShownTool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    reasoning_effort: str | None = None
    """How much to think, for chat templates that tell the model."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's field: variables of the chat template."""
    parallel_tool_calls: bool | None = None
    """False shows the first call of a response only; the others were made all the same, and are not hidden from what
    is trained on."""
    required_prefix_token_ids: list[TokenId] | None = None
    """NeMo-RL's field: tokens of the conversation up to its last assistant message."""
    unknown_fields: tuple[str, ...] = ()
    """Names of the fields that are no field of requests; set by the server."""

    @property
    def max_response_tokens(self) -> int | None:
        """Longest response asked for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return bool(self.logprobs)

    @property
    def num_alternatives(self) -> int:
        """Alternatives to return at each position, with their log-probabilities."""
        return self.top_logprobs or 0

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools for the chat template, which shows them even if none may be called."""
        tools: list[dict[str, Any]] = msgspec.to_builtins(self.tools or [])
        return tools

    @property
    def may_call(self) -> bool:
        """Whether to separate tool calls from text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def call_limit(self) -> int | None:
        """Most calls to show of a response; None means all."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def shows_sampled_ids(self) -> bool:
        """Whether a message has its own token ids, which NeMo Gym's model server would otherwise ask for."""
        return self.wants_logprobs and bool(self.return_tokens_as_token_ids)

    @property
    def sampled_prefix(self) -> tuple[int, list[int]] | None:
        """The number of messages whose tokens the request gives, and these tokens; None if it gives none.

        The last message that has tokens decides, unless ``required_prefix_token_ids`` does, as in NeMo-RL.
        """
        ends = [place for place, message in enumerate(self.messages, 1) if message.role == "assistant"]
        if self.required_prefix_token_ids is not None and ends:
            return ends[-1], self.required_prefix_token_ids
        for end in reversed(ends):
            message = self.messages[end - 1]
            if message.prompt_token_ids and message.generation_token_ids:
                return end, [*message.prompt_token_ids, *message.generation_token_ids]
        return None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    """0 scores the prompt alone."""
    logprobs: NumAlternatives | None = None
    echo: bool | None = None
    """Whether the prompt, and its log-probabilities if these are asked for, come before the response."""
    add_special_tokens: bool | None = None
    """vLLM's field: false omits what the tokenizer adds to a text, such as the beginning of a sequence."""
    detokenize: bool | None = None
    """vLLM's name: false leaves out all texts, also those of tokens with log-probabilities, which takes a while."""

    @property
    def max_response_tokens(self) -> int:
        """Longest response to generate; the default is as short as OpenAI's, and an engine makes at least one."""
        return 16 if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def wants_prompt_only(self) -> bool:
        """Whether the answer has no response."""
        return self.max_tokens == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are asked for."""
        return bool(self.echo) and self.wants_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.logprobs is not None

    @property
    def num_alternatives(self) -> int:
        """Alternatives to return at each position, with their log-probabilities."""
        return self.logprobs or 0

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, as text or as token ids. Raises `OpenAIRefused`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            prompt = [prompt]
        shape: Any = list[str] if prompt and isinstance(prompt[0], str) else list[list[TokenId]]
        try:
            prompts: list[str] | list[list[int]] = msgspec.convert(prompt, shape)
        except msgspec.ValidationError as error:
            raise OpenAIRefused(
                f"prompt: {error}; it is a text, token ids, or a list of either", param="prompt"
            ) from error
        if not prompts:
            raise OpenAIRefused("prompt: the list is empty", param="prompt")
        return prompts


Request = TypeVar("Request", ChatRequest, CompletionRequest)
Fields = TypeVar("Fields", bound=Struct)


def read_request(body: bytes, kind: type[Request]) -> Request:
    """Read a request. Raises `OpenAIRefused` if it is no JSON, has a wrong type, or asks for something unsupported."""
    return convert_request(read_fields(body), kind)


def read_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request. Raises `OpenAIRefused` unless it is a JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise OpenAIRefused(f"the body is not a JSON object: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OpenAIRefused(f"the body is not JSON: {error}") from error


def refuse_effects(fields: Mapping[str, Any], neutral_values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `OpenAIRefused` for fields that this server does not support, unless their values have no effect."""
    for name, values in neutral_values.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise OpenAIRefused(
                f"{name}: this server does not support it: leave it out", param=name, code="unsupported"
            )


def convert_request(fields: dict[str, Any], kind: type[Request]) -> Request:
    """Return the request that fields describe. Raises `OpenAIRefused` as `read_request` does."""
    supported = kind.__struct_fields__
    refuse_effects(fields, {name: values for name, values in _CHANGES_NOTHING.items() if name not in supported})
    if fields.get("tool_choice") not in (None, "none", "auto"):
        message = "tool_choice: the model cannot be forced to call a tool: it may be 'auto' or 'none'"
        raise OpenAIRefused(message, param="tool_choice", code="unsupported")
    if kind is ChatRequest:
        _check_messages(fields.get("messages"))
        unknown = fields.keys() - ChatRequest.__struct_fields__ - _CHANGES_NOTHING.keys()
        fields["unknown_fields"] = sorted(name for name in unknown if fields[name] is not None)
    request = convert_fields(fields, kind)
    if isinstance(request, CompletionRequest) and request.wants_prompt_only and not request.scores_prompt:
        raise OpenAIRefused(
            "max_tokens: 0 only scores a prompt, with echo: true and logprobs; give at least 1", param="max_tokens"
        )
    if request.num_alternatives and not request.wants_logprobs:
        raise OpenAIRefused("top_logprobs: give logprobs: true as well", param="top_logprobs")
    response_format = request.response_format
    if response_format is not None and response_format.type == "json_schema" and response_format.json_schema is None:
        raise OpenAIRefused("response_format.json_schema: it is missing", param="response_format")
    return request


def convert_fields(fields: dict[str, Any], kind: type[Fields]) -> Fields:
    """Return fields as a struct. Raises `OpenAIRefused`, with the path of what has a wrong type."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _ill_typed(error) from error
    except RecursionError as error:
        raise OpenAIRefused("the body is nested too deeply") from error


def _check_messages(messages: Any) -> None:
    """Raise `OpenAIRefused` for fields of messages that would change the prompt and that no template is given here."""
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        name = next((name for name in _MESSAGE_FIELDS if message.get(name) not in (None, False)), None)
        if name is not None:
            raise OpenAIRefused(
                f"messages: this server does not support {name!r}: {_MESSAGE_FIELDS[name]}",
                param="messages",
                code="unsupported",
            )


def no_such_model(name: str, names: tuple[str, ...]) -> OpenAIRefused:
    """Return the refusal of a model that is not served."""
    message = f"the model {name!r} does not exist; there is {', '.join(map(repr, names))}{nearest(name, names)}"
    return OpenAIRefused(message, status=404, kind="not_found_error", param="model", code="model_not_found")


def too_long(num_tokens: int, max_length: int) -> OpenAIRefused:
    """Return the refusal of a prompt that leaves no room."""
    return OpenAIRefused(
        f"the prompt has {num_tokens} tokens and the maximum context length is {max_length} tokens, which leaves no "
        "room for a response",
        param="prompt",
        code="context_length_exceeded",
    )


def _ill_typed(error: msgspec.ValidationError) -> OpenAIRefused:
    reason, _, path = str(error).partition(" - at `")
    path = re.sub(r"^\$\.?", "", path.removesuffix("`"))
    missing = re.search(r"required field `(\w+)`", reason)
    param = path or (missing[1] if missing else None)
    return OpenAIRefused(f"{path}: {reason}" if path else reason, param=param)


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except msgspec.DecodeError as error:
        message = f"messages: the arguments of the call of {call.function.name!r} are not a JSON object: {error}"
        raise OpenAIRefused(message, param="messages") from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


# --- answers ---------------------------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls"]


class TokenUsage(Struct, frozen=True, kw_only=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(Struct, frozen=True, kw_only=True):
    """A token that could have been drawn, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token's log-probability in the form of chats."""

    token: str
    logprob: float
    bytes: list[int]
    """Bytes of the token, even if they are only part of a character."""
    top_logprobs: list[TopLogprob] = []
    """Log-probabilities of the likeliest tokens at this position."""


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that comes with it: it follows nothing."""
    top_logprobs: list[dict[str, float] | None]
    """Log-probabilities of the likeliest tokens at each position, and of the token itself."""
    text_offset: list[int]


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Text; null if the message has tool calls only."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """Reasoning before the text, in models that mark it."""
    tool_calls: list[ToolCall] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Tokens before the message, if it shows its own."""
    generation_token_ids: list[int] | UnsetType = UNSET
    generation_log_probs: list[float] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One choice of a chat's answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, frozen=True, kw_only=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[int] | UnsetType = UNSET
    """Weight versions that made the tokens, in a run with refits."""


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """The next part of a function call."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """The next part of a message's calls: first the function's name, then its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(Struct, frozen=True, kw_only=True):
    """The next part of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """The next part of one choice of a chat."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Tokens of the prompt, in the first chunk of a stream."""
    weight_versions: list[int] | UnsetType = UNSET
    """Weight versions that made the tokens, in a run with refits."""


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One completion, or its next part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(Struct, frozen=True, kw_only=True):
    """Completions, or one chunk of their stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    weight_versions: list[int] | UnsetType = UNSET
    """Weight versions that made the tokens, in a run with refits."""


class ModelCard(Struct, frozen=True, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tandem"
    root: str
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
