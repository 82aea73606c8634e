"""Requests of the Responses API, translated to requests of chats.

There is one conversation and one way to render it, that of chats: this module turns input items into its messages. An
assistant's message of a chat is several items here: reasoning, text, and a call each. Items that come back are joined
again by the response in their ids, or else by what follows what.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tandem.rollout.openai_api import protocol
from tandem.rollout.openai_api.refusals import OpenAIRefused

_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "logprobs": (),
    "n": (1,),
}
"""Unsupported fields, with the values, besides null, that have no effect."""
_STATE = "nothing is stored here: send the whole conversation as input"
_STATE_FIELDS: Mapping[str, tuple[Any, ...]] = {"previous_response_id": (), "conversation": (), "store": (False,)}
"""Fields that need a server that stores responses, with the values that do not."""
_CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of chats that have another name here."""
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})[0-9a-f]{4}")
LOGPROBS = "message.output_text.logprobs"
"""Member of `include` that asks for log-probabilities."""


# --- input items -----------------------------------------------------------------------------------------------------


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    """A text of a message."""

    text: str


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """A text that the model has written."""

    text: str


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image of a message."""

    image_url: str
    """A data URI: nothing is fetched."""
    detail: str | None = None
    """Accepted, as in chats."""


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage]
    id: str | None = None


class CallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function by the model."""

    name: str
    arguments: str
    """Arguments in JSON."""
    call_id: str
    id: str | None = None
    namespace: str | None = None


class CallResultItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    output: str | list[InputText | InputImage]
    call_id: str | None = None


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """A text of reasoning."""

    text: str


class SummaryText(Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A summary of reasoning, by another server."""

    text: str


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None

    @property
    def text(self) -> str:
        """The reasoning, or what another server has said of it."""
        return "\n".join(part.text for part in self.content or self.summary)


InputItem = MessageItem | CallItem | CallResultItem | ReasoningItem
"""An item of the conversation."""


# --- requests --------------------------------------------------------------------------------------------------------


class FunctionTool(Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted, as in chats: arguments are as the model writes them."""
    defer_loading: bool | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """The format of a response's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """Options of a response's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """Options of reasoning."""

    effort: str | None = None
    """How much to think, for chat templates that tell the model."""
    summary: str | None = None
    """Accepted: reasoning comes as it is, and not as a summary."""
    context: Literal["auto", "all_turns"] | None = None
    """Accepted: the chat template decides how much of earlier reasoning the model reads."""


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """``POST /v1/responses``: the fields that chats have not, or have by other names; null means absent."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: protocol.Positive | None = None
    tools: list[FunctionTool] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: protocol.NumAlternatives | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    store: bool | None = None
    truncation: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def read_responses_request(body: bytes) -> tuple[ResponsesRequest, protocol.ChatRequest]:
    """Return a request, and the chat that it is. Raises `OpenAIRefused` as `read_request` does."""
    fields = protocol.read_fields(body)
    for name, replacement in _CHAT_NAMES.items():
        if fields.get(name) is not None:
            raise OpenAIRefused(
                f"{name}: this is a field of /v1/chat/completions: its name in /v1/responses is {replacement}",
                param=name,
                code="unsupported",
            )
    for name, values in _STATE_FIELDS.items():
        if fields.get(name) not in (None, *values):
            raise OpenAIRefused(f"{name}: {_STATE}", param=name, code="unsupported")
    protocol.refuse_effects(fields, _NO_EFFECT)
    items = fields.get("input")
    if isinstance(items, list):
        fields["input"] = [_add_type(item) for item in items]
    request = protocol.convert_fields(fields, ResponsesRequest)
    # What this API does not know is read as in chats: vLLM's fields, unsupported ones, variables of the chat template.
    shared_fields = {name: value for name, value in fields.items() if name not in ResponsesRequest.__struct_fields__}
    for name in (*_STATE_FIELDS, *_NO_EFFECT, "stream_options"):
        shared_fields.pop(name, None)
    chat_fields = {
        "messages": [*_instructions(request), *translate_items(request.input)],
        "max_completion_tokens": request.max_output_tokens,
        "tools": None if request.tools is None else [_translate_tool(*item) for item in enumerate(request.tools)],
        "logprobs": request.wants_logprobs,
        "top_logprobs": request.top_logprobs,
        "response_format": _translate_format(request.text),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
    }
    with chat_fields_renamed():
        return request, protocol.convert_request({**shared_fields, **chat_fields}, protocol.ChatRequest)


@contextlib.contextmanager
def chat_fields_renamed() -> Iterator[None]:
    """Have refusals name the fields as this API does."""
    try:
        yield
    except OpenAIRefused as error:
        message, param = str(error), error.body.param
        for name, replacement in _CHAT_NAMES.items():
            message = re.sub(rf"\b{name}\b", replacement, message)
            param = None if param is None else re.sub(rf"^{name}\b", replacement, param)
        body = error.body
        raise OpenAIRefused(message, status=error.status, kind=body.type, param=param, code=body.code) from error


def _add_type(item: Any) -> Any:
    """Return an item with its type, which messages may leave out."""
    is_untyped = isinstance(item, dict) and "role" in item and item.get("type") is None
    return {**item, "type": "message"} if is_untyped else item


def _instructions(request: ResponsesRequest) -> list[dict[str, Any]]:
    return [] if not request.instructions else [{"role": "system", "content": request.instructions}]


def _translate_tool(place: int, tool: FunctionTool) -> dict[str, Any]:
    if tool.defer_loading:
        message = f"tools[{place}].defer_loading: tools are not searched for here: leave it out"
        raise OpenAIRefused(message, param=f"tools[{place}].defer_loading", code="unsupported")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _translate_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    text_format = text.format
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.schema is None:
        raise OpenAIRefused("text.format.schema: it is missing", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": text_format.name, "schema": text_format.schema}}


# --- items to messages -----------------------------------------------------------------------------------------------


def translate_items(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of a chat that input items are. Raises `OpenAIRefused`."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    turn: _AssistantTurn | None = None
    for place, item in enumerate(items):
        if isinstance(item, CallResultItem):
            content = item.output if isinstance(item.output, str) else _translate_parts(item.output)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            if turn is not None:
                turn.has_results = True
        elif isinstance(item, MessageItem) and item.role != "assistant":
            content = item.content if isinstance(item.content, str) else _translate_parts(item.content)
            messages.append({"role": item.role, "content": content})
            turn = None
        else:
            if turn is None or not turn.continues_with(item):
                turn = _AssistantTurn(_response_of(item))
                messages.append(turn.message)
            turn.add(item, f"input[{place}]")
    return messages


class _AssistantTurn:
    """One message of the assistant, and the items that it was sent as."""

    def __init__(self, response: str | None) -> None:
        self._response = response
        self.has_results = False
        """Whether results of its calls have followed."""
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._has_text = False

    def continues_with(self, item: InputItem) -> bool:
        """Return whether an item belongs to this message: its id says so, or else what may follow what."""
        response = _response_of(item)
        if self._response is not None and response is not None:
            return self._response == response
        has_calls = "tool_calls" in self.message
        if self.has_results or isinstance(item, CallItem):
            return not self.has_results
        return not self._has_text and not (has_calls and isinstance(item, ReasoningItem))

    def add(self, item: InputItem, path: str) -> None:
        """Take an item. Raises `OpenAIRefused`."""
        self._response = self._response or _response_of(item)
        match item:
            case ReasoningItem():
                if item.encrypted_content and not item.text:
                    message = f"{path}.encrypted_content: it cannot be read here: leave the item out"
                    raise OpenAIRefused(message, param=f"{path}.encrypted_content", code="unsupported")
                self._join("reasoning_content", item.text)
            case MessageItem():
                self._has_text = True
                self._join("content", _text_of(item, path))
            case CallItem():
                if item.namespace is not None:
                    message = f"{path}.namespace: tools have none here: leave it out"
                    raise OpenAIRefused(message, param=f"{path}.namespace", code="unsupported")
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self.message.setdefault("tool_calls", []).append(call)

    def _join(self, field: str, text: str) -> None:
        if text:
            self.message[field] = self.message.get(field, "") + text


def _response_of(item: InputItem) -> str | None:
    """Return the response that an item of this server's came with; None for an item from elsewhere."""
    match = None if isinstance(item, CallResultItem) or item.id is None else _ITEM_ID.fullmatch(item.id)
    return None if match is None else match[1]


def _text_of(item: MessageItem, path: str) -> str:
    if isinstance(item.content, str):
        return item.content
    if any(isinstance(part, InputImage) for part in item.content):
        message = f"{path}.content: an assistant's message has texts, and no images"
        raise OpenAIRefused(message, param=f"{path}.content", code="unsupported")
    return "\n".join(part.text for part in item.content if not isinstance(part, InputImage))


def _translate_parts(parts: Sequence[InputText | OutputText | InputImage]) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in parts
    ]


def item_id(kind: Literal["rs", "msg", "fc"], response: str, place: int) -> str:
    """Return the id of an output item: its response's, 24 hexadecimal digits, and its place there."""
    return f"{kind}_{response}{place:04x}"


def echo_fields(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    reasoning, text = request.reasoning or ReasoningOptions(), request.text or TextOptions()
    text_format = text.format or TextFormat(type="text")
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "text": {"format": _shown_format(text_format), "verbosity": "medium"},
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in request.tools or []
        ],
        "top_logprobs": request.top_logprobs or 0,
    }


def _shown_format(text_format: TextFormat) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": text_format.type}
    if text_format.type == "json_schema":
        fields |= {"name": text_format.name, "schema": text_format.schema, "strict": True}
    return fields
