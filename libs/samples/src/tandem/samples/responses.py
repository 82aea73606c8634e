"""Read responses by the markers of a model's family: reasoning, final text, and tool calls.

Which markers these are is learned from the chat template, as the template itself writes them. A family without any
known marker may have a `response_template` of Transformers, which then reads its whole responses.

A response is read the same whether it comes whole or in parts.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from tandem.common.errors import ConfigError
from tandem.samples.chat_templates import reasoning_of
from tandem.samples.tool_formats import TOOL_FORMATS, FunctionCall, ToolFormat, Tools, read_atem_calls

if TYPE_CHECKING:
    from tandem.config.schema.generation import ToolCallParser
    from tandem.samples.tokenizer import Tokenizer

_REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
"""Markers before and after reasoning."""
THINKING = _REASONING[0]
"""Tags around thinking that policies learn to write whatever their family is."""
_FRAMES = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""Markers around final text, of Cohere's models."""
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")

Kind = Literal["content", "reasoning", "call", "malformed"]


class ParsedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, read by the markers of its family, without markers and special tokens."""

    reasoning: str | None
    """Text of the reasoning; None if there is none."""
    content: str
    """Text for the user: all of the response but reasoning and calls."""
    answer: str
    """The last part of `content`: after all reasoning and calls, in the last channel; empty if nothing follows them."""
    tool_calls: tuple[FunctionCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """Texts that begin as a call does but are none; they are part of `content`."""
    is_reasoning_closed: bool = True
    """Whether all reasoning has ended; false for a response that was cut within it."""


class ResponseDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next certain texts and calls of a response."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[FunctionCall, ...] = ()


class ResponsePart(NamedTuple):
    """A piece of a response as a reader gives it."""

    kind: Kind
    text: str = ""
    call: FunctionCall | None = None
    is_first: bool = False
    """Whether a new block begins with it."""


class ResponseReader(Protocol):
    """A reader of one response, as it comes."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the response is within reasoning now."""
        ...

    def push(self, text: str) -> Iterator[ResponsePart]:
        """Add text; yield what is certain now."""
        ...

    def finish(self) -> Iterator[ResponsePart]:
        """Yield the rest."""
        ...


class MessageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format of responses that are several messages, each with a header that names its recipient."""

    signs: tuple[str, ...]
    """Texts of which a chat template with this format has each."""
    ends: tuple[str, ...]
    """Markers that end a message's text."""
    headers: tuple[str, ...]
    """Texts that a header begins with."""
    further_markers: tuple[str, ...]
    """Further markers."""
    kind_of: Callable[[str, str], Kind]
    """Return what a message is, by its header and its recipient, which may be empty."""
    read_calls: Callable[[str, str, Tools], tuple[FunctionCall, ...]]
    """Read the calls of a message to a function, by recipient and text, given the tools on offer; none if it is not a
    call."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.ends, "<|message|>", *self.further_markers)


def _harmony_kind(header: str, recipient: str) -> Kind:
    """Return what a message of GPT-OSS is. Commentary without a recipient is content, as vLLM has it."""
    channel = _CHANNEL.search(header)
    if recipient.startswith("functions."):
        return "call"
    is_hidden = channel is not None and (channel[1] == "analysis" or bool(recipient))
    return "reasoning" if is_hidden else "content"


def _read_harmony_call(recipient: str, text: str, tools: Tools) -> tuple[FunctionCall, ...]:
    try:
        arguments = msgspec.json.decode(text.strip() or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return ()
    return (FunctionCall(name=recipient.removeprefix("functions."), arguments=arguments),)


def _muse_kind(header: str, recipient: str) -> Kind:
    """Return what a message of Muse Glimmer is, by its recipient: the model itself, the user, or a function."""
    return "reasoning" if recipient == "self" else "content" if recipient in ("", "user") else "call"


MESSAGE_FORMATS: Mapping[str, MessageFormat] = {
    "openai": MessageFormat(
        signs=("<|channel|>", "<|message|>"),
        ends=("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"),
        headers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to="),
        further_markers=("<|constrain|>",),
        kind_of=_harmony_kind,
        read_calls=_read_harmony_call,
    ),
    "muse_glimmer": MessageFormat(
        signs=("<|message|>", "<atem:invoke"),
        ends=("<|eom|>", "<|eot|>", "<|start|>"),
        headers=("<|start|>", "<|message|>", "to="),
        further_markers=(),
        kind_of=_muse_kind,
        read_calls=lambda recipient, text, tools: read_atem_calls(text, tools),
    ),
}
"""Formats by the names of vLLM's parsers; the first whose signs a chat template has is the template's."""


class ResponseMarkers(msgspec.Struct, frozen=True, kw_only=True):
    """The markers of a family."""

    reasoning: tuple[tuple[str, str], ...] = ()
    """Pairs before and after reasoning."""
    tool_format: ToolFormat | None = None
    """Format of tool calls; None if calls are text."""
    frames: tuple[str, ...] = ()
    """Markers around final text."""
    messages: MessageFormat | None = None
    """Format of responses that are several messages; None if they are not."""
    reads_calls: bool = True
    """Whether messages to functions are calls, where responses are messages."""

    @staticmethod
    @functools.cache
    def of_template(source: str) -> ResponseMarkers:
        """Return the markers that a chat template writes, by its text."""
        for messages in MESSAGE_FORMATS.values():
            if all(sign in source for sign in messages.signs):
                return ResponseMarkers(messages=messages)
        formats = (
            layout.of_template(source)
            for layout in TOOL_FORMATS.values()
            if any(sign in source for sign in layout.signs)
        )
        pairs = tuple(pair for pair in _REASONING if pair[0] in source or pair[1] in source)
        frames = tuple(frame for frame in _FRAMES if frame in source)
        return ResponseMarkers(reasoning=pairs, tool_format=next(formats, None), frames=frames)

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> ResponseMarkers:
        """Return the markers that a tokenizer's chat template writes; none without one."""
        template = tokenizer.hugging_face.chat_template
        return cls.of_template(template if isinstance(template, str) else "\n".join((template or {}).values()))

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them."""
        calls = () if self.tool_format is None else self.tool_format.markers
        pairs = [marker for pair in self.reasoning for marker in pair]
        return (*(() if self.messages is None else self.messages.markers), *pairs, *self.frames, *calls)

    def select_shown_tokens(self, special_tokens: Iterable[str]) -> frozenset[str]:
        """Return the special tokens that a reader must see, since they are markers or parts of one."""
        return frozenset(token for token in special_tokens if any(token in marker for marker in self.texts))

    def end_of_reasoning(self, prompt: str) -> str:
        """Return the marker that ends the reasoning which a prompt opens; nothing if it opens none."""
        return next((end for begin, end in self.reasoning if prompt.rstrip().endswith(begin)), "")

    def find_opened_reasoning(self, prompt: str) -> str:
        """Return the end of a prompt from the marker on that opens reasoning; nothing if it opens none."""
        begins = (begin for begin, _ in self.reasoning if prompt.rstrip().endswith(begin))
        return next((prompt[prompt.rindex(begin) :] for begin in begins), "")

    def reader(self, prompt: str = "", tools: Tools = ()) -> ResponseReader:
        """Return a reader of a response to a prompt, of which only the end matters."""
        if self.messages is None:
            opens_thinking = prompt.rstrip().endswith(THINKING[0])
            return MarkedReader(self, self.end_of_reasoning(prompt), tools, opens_thinking=opens_thinking)
        reader = MessagesReader(self.messages, tools, reads_calls=self.reads_calls)
        _, begin, header = prompt.rpartition("<|start|>assistant")
        list(reader.push(header if begin else ""))
        return reader


class ResponseParser:
    """A parser of the responses of one model."""

    def __init__(
        self,
        markers: ResponseMarkers,
        *,
        prompt: str = "",
        special_tokens: Sequence[str] = (),
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        """Parse by `markers`, or where there are none by Transformers' `response_template`.

        `prompt` is what the template writes before a response, unless `parse` is given another; `special_tokens` are
        left out of all texts, unless they are markers.
        """
        self.markers = markers
        self._prompt = prompt
        skipped = sorted({*special_tokens} - markers.select_shown_tokens(special_tokens), key=len, reverse=True)
        self._skipped = re.compile("|".join(map(re.escape, skipped)) or r"(?!)")
        self._response_template = None if markers.texts else response_template

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ResponseParser:
        """Return the parser of a model by its tokenizer and chat template."""
        hugging_face = tokenizer.hugging_face
        special = [token.content for token in hugging_face.added_tokens_decoder.values() if token.special]
        return cls(
            ResponseMarkers.of_tokenizer(tokenizer),
            prompt=_generation_prompt(tokenizer),
            special_tokens=special,
            response_template=getattr(hugging_face, "response_template", None),
        )

    def replace_markers(self, markers: ResponseMarkers) -> ResponseParser:
        """Return a parser of the same model that reads other markers."""
        parser = copy.copy(self)
        parser.markers = markers
        return parser

    @property
    def reads_markers(self) -> bool:
        """Whether responses can have anything but text."""
        return bool(self.markers.texts) or self._response_template is not None

    def visible(self, text: str) -> str:
        """Return a response without special tokens, unless they are markers."""
        return self._skipped.sub("", text)

    def parse(self, text: str, *, prompt: str | None = None, tools: Tools = ()) -> ParsedResponse:
        """Parse a response with its special tokens.

        `prompt` is the text before it: whether the response begins within reasoning is seen at its end. `tools` give
        arguments their types in formats that write them without quotes.
        """
        prompt = self._prompt if prompt is None else prompt
        if self._response_template is not None:
            return self._parse_with_template(self._response_template, text, prompt, tools)
        for begin, end in dict.fromkeys((*self.markers.reasoning, THINKING)):
            # Reasoning that ends without a beginning has begun with the response.
            before, closed, _ = text.partition(end)
            if closed and begin not in before and not self.markers.end_of_reasoning(prompt):
                prompt = begin
        reader = self.markers.reader(prompt, tools)
        blocks = _Blocks()
        for part in (*reader.push(self._skipped.sub("", text)), *reader.finish()):
            blocks.add(part)
        return blocks.parsed(is_reasoning_closed=not reader.is_reasoning)

    def _parse_with_template(self, template: Mapping[str, Any], text: str, prompt: str, tools: Tools) -> ParsedResponse:
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(text, dict(template), prefix=prompt, tools=[dict(tool) for tool in tools])
            calls = tuple(_call_of_message(call) for call in message.get("tool_calls", ()))
        except (ValueError, TypeError, LookupError):  # not a response as the template describes it
            message, calls = {"content": text}, ()
        reasoning = reasoning_of(message)
        content = self._skipped.sub("", message.get("content") or "")
        return ParsedResponse(reasoning=reasoning, content=content, answer=content, tool_calls=calls)


def _call_of_message(call: Mapping[str, Any]) -> FunctionCall:
    function = call["function"]
    return FunctionCall(name=function["name"], arguments=dict(function["arguments"]), id=call.get("id") or "")


def _generation_prompt(tokenizer: Tokenizer) -> str:
    """Return the end of a prompt by the chat template; nothing if it refuses a question."""
    if not tokenizer.has_chat_template:
        return ""
    try:
        return tokenizer.render_chat([{"role": "user", "content": "?"}], add_generation_prompt=True)
    except ConfigError:
        return ""


class _Blocks:
    """The parts of a whole response, joined."""

    def __init__(self) -> None:
        self._contents: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[FunctionCall] = []
        self._malformed: list[str] = []
        self._last: Kind | None = None

    def add(self, part: ResponsePart) -> None:
        if part.call is not None:
            self._calls.append(part.call)
            self._last = "call"
            return
        blocks = self._reasoning if part.kind == "reasoning" else self._contents
        kind: Kind = "reasoning" if part.kind == "reasoning" else "content"
        if part.kind == "malformed":
            self._malformed.append(part.text)
        if kind != self._last or part.is_first or not blocks:
            blocks.append("")
        blocks[-1] += part.text
        self._last = kind

    def parsed(self, *, is_reasoning_closed: bool) -> ParsedResponse:
        contents, reasoning = (
            [text for block in blocks if (text := block.strip())] for blocks in (self._contents, self._reasoning)
        )
        has_answer = bool(contents) and bool(self._contents[-1].strip()) and self._last == "content"
        if len(contents) == 1 and not self._reasoning and not self._calls:
            contents = ["".join(self._contents)]  # a text alone stays as it is
        return ParsedResponse(
            reasoning="\n".join(reasoning) or None,
            content="\n".join(contents),
            answer=contents[-1] if has_answer else "",
            tool_calls=tuple(self._calls),
            malformed_calls=tuple(self._malformed),
            is_reasoning_closed=is_reasoning_closed,
        )


_SAME_FORMAT: Mapping[ToolCallParser, str] = {
    "deepseek_v31": "deepseek_v3",
    "deepseek_v4": "deepseek_v32",
    "deepseek_v41": "deepseek_v32",
    "cohere_command4": "cohere_command3",
    "glm47": "glm45",
}
"""Names of vLLM's parsers whose formats are read as another's."""


def chat_markers(template: ResponseMarkers, parser: ToolCallParser | None, *, may_call: bool) -> ResponseMarkers:
    """Return the markers of a chat's response.

    Reasoning is marked as the chat template marks it. Calls are read in the format of `parser`, and in none if no tool
    may be called. Messages, such as GPT-OSS's, are always read, since nothing else tells answers from reasoning.
    """
    if not may_call or parser is None:
        return msgspec.structs.replace(template, tool_format=None, reads_calls=may_call and bool(template.messages))
    if parser == "auto":
        return template
    if parser in MESSAGE_FORMATS:
        return ResponseMarkers(messages=MESSAGE_FORMATS[parser])
    tool_format = TOOL_FORMATS[_SAME_FORMAT.get(parser, parser)]
    if template.tool_format is not None and template.tool_format.opens == tool_format.opens:
        variants = [read for _, read in tool_format.variants]
        tool_format = template.tool_format if template.tool_format.read in variants else tool_format
    return msgspec.structs.replace(template, tool_format=tool_format, messages=None)


# --- readers ---------------------------------------------------------------------------------------------------------


def beginning(text: str, marker: str) -> int:
    """Return how many characters at the end of a text are the beginning of a marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)


def _first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of some markers is in a text, and which; the longest of several at one place."""
    places = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    return None if not places else (min(places)[0], min(places)[2])


def _split_certain(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """Return the part of a text without marker that is certain, and the part that may begin one."""
    num_held = max((beginning(text, marker) for marker in markers), default=0)
    return text[: len(text) - num_held], text[len(text) - num_held :]


class MarkedReader:
    """A reader of responses in which markers surround reasoning and calls."""

    def __init__(
        self, markers: ResponseMarkers, end_of_reasoning: str, tools: Tools, *, opens_thinking: bool = False
    ) -> None:
        """Begin a response, within reasoning if the marker that ends it is given.

        `opens_thinking` says whether the prompt ends with a tag of thinking.
        """
        self._format = markers.tool_format
        self._pairs = dict(markers.reasoning)
        self._silent = (*markers.frames, *(() if self._format is None else self._format.silent))
        self._tools = tools
        self._held = ""
        self._close = end_of_reasoning
        """The marker that ends the reasoning; empty outside reasoning."""
        self._is_blank = True
        """Whether the response has had no text or call outside reasoning."""
        self._may_think = bool(markers.tool_format) and THINKING not in markers.reasoning
        """Whether thinking that the family's template does not mark is text, in which no call is read."""
        self._thinking_end = THINKING[1] if self._may_think and opens_thinking else ""
        """The tag that ends such thinking; empty outside it."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the response is within reasoning now."""
        return bool(self._close)

    def push(self, text: str) -> Iterator[ResponsePart]:
        """Add text; yield what is certain now."""
        self._held += text
        yield from self._read(is_last=False)

    def finish(self) -> Iterator[ResponsePart]:
        """Yield the rest."""
        yield from self._read(is_last=True)
        kind: Kind = "reasoning" if self.is_reasoning else "content"
        text, self._held = self._held, ""
        if text:
            yield ResponsePart(kind, text)

    def _read(self, *, is_last: bool) -> Iterator[ResponsePart]:
        while True:
            markers = (self._close, *self._pairs) if self.is_reasoning else self._opens()
            first = _first(self._held, markers)
            at = len(self._held) if first is None else first[0]
            text, uncertain = self._held[:at], self._held[at:]
            if first is None:
                text, uncertain = _split_certain(text, markers)
            if not self.is_reasoning and self._is_blank and not text.strip() and first is None:
                return  # a call may follow that fills the response
            self._held = uncertain
            if text:
                self._is_blank &= self.is_reasoning or not text.strip()
                yield ResponsePart("reasoning" if self.is_reasoning else "content", text)
            if first is None:
                return
            if self._is_marker_of_text(first[1]):
                self._held = self._held[len(first[1]) :]
                yield from self._pass(first[1])
                continue
            part = self._read_call(is_last=is_last)
            if part is None:
                return
            yield from part

    def _opens(self) -> tuple[str, ...]:
        layout = self._format
        if layout is None:
            return (*self._pairs, *self._silent)
        if self._thinking_end:
            return (self._thinking_end,)
        begun = self._held.lstrip()
        begins = self._is_blank and any(begun.startswith(marker) or marker.startswith(begun) for marker in layout.opens)
        opens = layout.opens if begins else layout.distinct_opens
        thinks = THINKING[:1] if self._may_think and self._is_blank else ()
        return (*self._pairs, *opens, *self._silent, *thinks)

    def _is_marker_of_text(self, marker: str) -> bool:
        is_thinking = self._may_think and marker in THINKING
        return marker == self._close or marker in self._pairs or marker in self._silent or is_thinking

    def _pass(self, marker: str) -> Iterator[ResponsePart]:
        """Pass a marker around reasoning, or one that is no text; tags of thinking are text."""
        if self._may_think and marker in THINKING:
            if marker == self._thinking_end:
                self._thinking_end = ""
            elif self._is_blank:
                self._thinking_end = THINKING[1]
            self._is_blank = False
            yield ResponsePart("content", marker)
        elif marker == self._close:
            self._close = ""
        elif marker in self._pairs and not self.is_reasoning:
            self._close = self._pairs[marker]
            yield ResponsePart("reasoning", is_first=True)

    def _read_call(self, *, is_last: bool) -> list[ResponsePart] | None:
        assert self._format is not None
        span = self._format.read(self._held, is_last, self._tools)
        if span is None:
            return None
        text, self._held = self._held[: span.size], self._held[span.size :]
        self._is_blank = False
        kind: Kind = "content" if self._format.opens_after_text else "malformed"
        return [ResponsePart("call", call=call) for call in span.calls] or [ResponsePart(kind, text)]


class MessagesReader:
    """A reader of responses that are several messages: reasoning, calls of functions, and content."""

    is_reasoning = False

    def __init__(self, messages: MessageFormat, tools: Tools, *, reads_calls: bool = True) -> None:
        """Begin a response after the name of its author."""
        self._format, self._tools = messages, tools
        self._reads_calls = reads_calls
        self._held = ""
        self._kind: Kind | None = None
        """Kind of the message whose text comes; None before that."""
        self._recipient = ""
        """The recipient of the message whose text comes."""
        self._is_first = True

    def push(self, text: str) -> Iterator[ResponsePart]:
        """Add text; yield what is certain now."""
        self._held += text
        while (parts := self._message() if self._kind else self._header()) is not None:
            yield from parts
        if self._kind in ("content", "reasoning"):
            certain, self._held = _split_certain(self._held, self._format.ends)
            yield from self._text(certain)

    def finish(self) -> Iterator[ResponsePart]:
        """Yield the rest."""
        text, self._held = self._held, ""
        if self._kind == "call":
            yield from self._call(text)
        elif self._kind is not None:
            yield from self._text(text)

    def _header(self) -> list[ResponsePart] | None:
        """Read the header of a message; None if more text is needed."""
        header, marker, body = self._held.partition("<|message|>")
        begun = self._held.lstrip()
        if not any(begun.startswith(begin) or begin.startswith(begun) for begin in self._format.headers):
            self._begin("content")  # text without a header
            return []
        if not marker:
            return None
        self._held = body
        recipient = _RECIPIENT.search(header)
        self._recipient = "" if recipient is None else recipient[1]
        kind = self._format.kind_of(header, self._recipient)
        self._begin(self._format.kind_of(header, "") if kind == "call" and not self._reads_calls else kind)
        return []

    def _begin(self, kind: Kind) -> None:
        self._kind, self._is_first, self.is_reasoning = kind, True, kind == "reasoning"

    def _message(self) -> list[ResponsePart] | None:
        """Read a message to its end; None if more text is needed."""
        first = _first(self._held, self._format.ends)
        if first is None:
            return None
        at, marker = first
        text, self._held = self._held[:at], self._held[at:]
        if marker not in self._format.headers:
            self._held = self._held[len(marker) :]
        parts = [*(self._call(text) if self._kind == "call" else self._text(text))]
        self._kind, self.is_reasoning = None, False
        return parts

    def _text(self, text: str) -> Iterator[ResponsePart]:
        if text and self._kind is not None:
            yield ResponsePart(self._kind, text, is_first=self._is_first)
            self._is_first = False

    def _call(self, text: str) -> Iterator[ResponsePart]:
        calls = self._format.read_calls(self._recipient, text, self._tools)
        yield from (ResponsePart("call", call=call) for call in calls)
        if not calls:
            yield ResponsePart("malformed", text, is_first=True)


class ResponseStream:
    """A response as it comes: what is certain of its content, reasoning and calls.

    White space around reasoning and calls is left out.
    """

    def __init__(self, reader: ResponseReader) -> None:
        """Begin a response."""
        self._reader = reader
        self._blanks: dict[Kind, str] = {"content": "", "reasoning": ""}
        """White space at the end so far, by kind of text."""
        self._has_text: dict[Kind, bool] = {"content": False, "reasoning": False}
        self._has_calls = False
        self._begins: dict[Kind, bool] = {"content": False, "reasoning": True}
        """Whether leading white space is left out, by kind of text."""
        self._last: Kind | None = None
        """Kind of the part before; None at the beginning."""

    def push(self, text: str) -> ResponseDelta:
        """Add text; return what is certain now."""
        return self._delta(self._reader.push(text))

    def finish(self) -> ResponseDelta:
        """Return what was held back."""
        delta = self._delta(self._reader.finish())
        blank = "" if self._has_calls or self._begins["content"] else self._blanks["content"]
        return msgspec.structs.replace(delta, content=delta.content + blank)

    def _delta(self, parts: Iterator[ResponsePart]) -> ResponseDelta:
        texts: dict[Kind, str] = {"content": "", "reasoning": ""}
        calls = list[FunctionCall]()
        for part in parts:
            if part.call is not None:
                self._blanks["content"], self._has_calls, self._last = "", True, "call"
                calls.append(part.call)
                continue
            kind: Kind = "reasoning" if part.kind == "reasoning" else "content"
            texts[kind] += self._select_shown(kind, part)
        return ResponseDelta(content=texts["content"], reasoning=texts["reasoning"], tool_calls=tuple(calls))

    def _select_shown(self, kind: Kind, part: ResponsePart) -> str:
        """Return the text to show of a part; white space at its end waits for more.

        Blocks are joined as those of a whole response are.
        """
        if kind == "reasoning":
            self._blanks["content"] = ""
        if self._last is not None and (kind != self._last or part.is_first):
            self._blanks[kind], self._begins[kind] = "\n" if self._has_text[kind] else "", True
        self._last = kind
        text = part.text
        if self._begins[kind]:
            text = text.lstrip()
            self._begins[kind] = not text
        pending = self._blanks[kind] + text
        shown = pending.rstrip()
        self._blanks[kind] = pending[len(shown) :]
        self._has_text[kind] |= bool(shown)
        return shown
