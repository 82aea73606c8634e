"""Where the assistant's turns lie in a conversation that a chat template has rendered as a whole.

A template is a program: it may drop, move, trim or quote what it is given, so no turn can be rendered by itself. It
renders the whole conversation once more with a mark at the end of each message, and the marks say where each message
ends. What the template writes before a turn is what it writes as a generation prompt; a turn ends with the first token
that ends one. Where the template itself marks what is generated (``{% generation %}``, as in TRL's training templates),
its marks count.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.common.errors import ConfigError, TandemError

Message = Mapping[str, Any]
"""A message: ``role``, ``content``, and whatever else it came with."""
Render = Callable[[Sequence[Message], bool], str]
"""A function from messages, and whether a generation prompt follows, to text."""
_ANY_MARK = re.compile(r"q7zq(\d+)x")
_BOUNDARY = re.compile(r"[>\]\n:]\s?")
"""Pattern of where a header may end, if only its beginning is written."""
_MARKER_BEGIN = re.compile(r"[<\[]")
"""Pattern of where a marker of a header may begin."""


class TurnSpan(NamedTuple):
    """A turn of the assistant in a rendered conversation, as positions of characters."""

    message: int
    """Number of the message."""
    header: int
    """Where the template begins the turn: its generation prompt, for example ``<|im_start|>assistant``."""
    begin: int
    """Where the assistant begins to write."""
    end: int
    """Where the turn ends, after the token that ends it, if there is one."""
    is_closed: bool
    """Whether it ends with a token that ends a turn, or before other messages where the template's own mark ends."""
    is_as_prompted: bool = True
    """Whether it begins as the generation prompt does, at least: a response would follow what stands before it."""


class RenderedConversation(NamedTuple):
    """A rendered conversation."""

    text: str
    turns: tuple[TurnSpan, ...]
    """The assistant's turns that it shows, in order. A message of which a text follows its calls' results has two."""


def mark_of(number: int) -> str:
    """Return a text that stands for a message, and is found again: letters and digits, which no template changes."""
    return f"q7zq{number}x"


def join_texts(messages: Sequence[Message]) -> RenderedConversation:
    """Return a conversation without a template: the plain text of its messages."""
    text, turns = "", []
    for number, message in enumerate(messages):
        begin = len(text)
        text += message["content"] or ""  # a message of calls alone has none
        if message["role"] == "assistant":
            turns.append(TurnSpan(number, begin, begin, len(text), is_closed=False))
    return RenderedConversation(text, tuple(turns))


def locate_turns(
    render: Render,
    messages: Sequence[Message],
    ends: Sequence[str],
    generated: Sequence[tuple[int, int]] = (),
    markers: Sequence[str] = (),
) -> RenderedConversation:
    """Return a conversation as text, and where the assistant's turns are.

    Args:
        render: the chat template.
        messages: the conversation.
        ends: texts of the tokens that end a turn.
        generated: the parts of the text that the template marks as generated, if it does.
        markers: where the marker of the next message ends a turn, such as GLM's ``<|user|>``: all markers.

    Raises:
        ConfigError: the template refuses the conversation, or shows a turn in a way that cannot be followed.

    """
    text = render(messages, False)
    content_ends = _find_content_ends(render, messages, text)
    turns = list[TurnSpan]()
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number not in content_ends:
            continue
        turn = _locate_turn(render, messages, number, text, content_ends, ends, generated, markers)
        if turns and turn.begin <= turns[-1].begin:
            turns.pop()  # a text after results with which the template begins this turn
        elif turns:
            turn = turn._replace(header=max(turn.header, turns[-1].end))
        turns.append(turn)
        late = _find_text_after_results(render, messages, number, text, turn.end, ends)
        turns += [] if late is None else [late]
    return RenderedConversation(text, tuple(turns))


def _find_text_after_results(
    render: Render, messages: Sequence[Message], number: int, text: str, turn_end: int, ends: Sequence[str]
) -> TurnSpan | None:
    """Return where a message's text is that the template writes after the results of its calls; None if elsewhere.

    Gemma 4's and DiffusionGemma's templates do so, and TRL's for training marks it as learned.
    """
    message, mark = messages[number], mark_of(number)
    content = message.get("content")
    if not message.get("tool_calls") or not isinstance(content, str) or not content.strip():
        return None
    marked = append_mark({"role": message["role"], "content": content}, mark) or {}
    rendered = render([*messages[:number], {**message, **marked}, *messages[number + 1 :]], False)
    place = rendered.find(mark)
    begin = place - len(content.strip())
    if begin < turn_end or rendered.replace(mark, "", 1) != text or text[begin:place] != content.strip():
        return None
    end = find_end(text, ends, place)
    return TurnSpan(number, begin, begin, end[1] if end is not None and end[0] == place else place, is_closed=True)


def _locate_turn(
    render: Render,
    messages: Sequence[Message],
    number: int,
    text: str,
    content_ends: Mapping[int, int],
    ends: Sequence[str],
    generated: Sequence[tuple[int, int]],
    markers: Sequence[str],
) -> TurnSpan:
    """Return where one turn is in the rendered text."""
    content_end = content_ends[number]
    before = max((end for index, end in content_ends.items() if index < number), default=0)
    # A later message may stand before this one: some templates move all system messages to the beginning.
    later = [index for index, end in content_ends.items() if index > number and end >= content_end]
    after = min((content_ends[index] for index in later), default=len(text))
    if content_end < before:
        raise ConfigError(f"the chat template writes message {number + 1} before the one that it answers")
    # A system message before this one may stand at the beginning, too: the one that is shown last counts.
    earlier = [index for index in content_ends if index < number]
    previous = max(earlier, key=lambda index: (content_ends[index], index), default=None)
    (prompt_length, is_whole_prompt), (header_length, _) = (
        _measure_header(render, messages[:number], previous, text[before:], add_generation_prompt=is_prompt)
        for is_prompt in (True, False)
    )
    is_after_turn = number > 0 and messages[number - 1]["role"] == "assistant"
    begin = min(before + prompt_length, content_end)
    answered_begin = _find_begin_after_tool(render, messages[: number + 1], text, begin, content_end)
    if answered_begin is not None:
        begin = answered_begin
    end, is_closed = _find_turn_end(render, messages[: number + 1], text, content_end, after, ends)
    marker = find_end(text, markers, end, after) if later and not is_closed else None
    if marker is not None and not text[end : marker[0]].strip():
        end, is_closed = marker[1], True  # a later system message's, for example, as TRL's template marks it
    # What the template drops does not stand between two turns.
    is_before_turn = bool(later) and messages[min(later)]["role"] == "assistant"
    limit = content_end if is_before_turn else max(after, content_end + 1)
    parts = [
        (first, last)
        for first, last in generated
        if before <= first < min(limit, last) or (first == content_end and text[first:last].startswith(tuple(ends)))
    ]
    if parts:
        first, end, is_closed = _span_of_parts(parts, text, ends)
        begin = max(begin, first)  # a generation prompt's part of a turn is never generated
        following = find_end(text, ends, end)
        if not is_closed and following is not None and not text[end : following[0]].strip():
            # The marks leave out what ends the turn, and nothing else may end it a second time.
            end, is_closed = following[1], True
        is_closed |= number + 1 < len(messages)
    return TurnSpan(
        message=number,
        header=min(before + header_length, begin),
        begin=begin,
        end=end,
        is_closed=is_closed,
        is_as_prompted=is_whole_prompt or prompt_length > header_length or is_after_turn or answered_begin is not None,
    )


def _find_begin_after_tool(
    render: Render, messages: Sequence[Message], text: str, begin: int, content_end: int
) -> int | None:
    """Return where the last message begins if it answers a tool and more than its prompt stands before it.

    Between a tool's answer and the next turn, Gemma 4's template writes the text that came with the call, and
    DiffusionGemma's a header, which its generation prompt has only after a user's message. None if there is neither.
    """
    message = messages[-1]
    content = message.get("content")
    if len(messages) < 2 or messages[-2]["role"] != "tool":
        return None
    if any(message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking")):
        return _find_begin_after_header(render, messages, text, begin, content_end)
    if not isinstance(content, str) or not content.strip():
        return None
    content_begin = content_end - len(content.strip())
    between = text[begin:content_begin]
    if text[content_begin:content_end] != content.strip() or not between:
        return None
    header = between.removeprefix(_words_with_call(messages))
    if not header:
        return begin  # only the assistant's own words
    mark = mark_of(len(messages))
    try:
        prompt = render([{"role": "user", "content": mark}], True).partition(mark)[2]
    except TandemError:
        return None
    return content_begin if header.strip() and prompt.endswith(header) else None


def _words_with_call(messages: Sequence[Message]) -> str:
    """Return the text that came with the call which the last message follows."""
    caller = next((earlier for earlier in reversed(messages[:-1]) if earlier["role"] == "assistant"), {})
    content = caller.get("content")
    return content.strip() if isinstance(content, str) else ""


def _find_begin_after_header(
    render: Render, messages: Sequence[Message], text: str, begin: int, content_end: int
) -> int | None:
    """Return where the last message begins if the end of a user's generation prompt stands before it, too."""
    words = _words_with_call(messages)
    if text.startswith(words, begin, content_end):
        begin += len(words)
    mark = mark_of(len(messages))
    try:
        prompt = render([{"role": "user", "content": mark}], True).partition(mark)[2]
    except TandemError:
        return None
    headers = (prompt[match.start() :] for match in _MARKER_BEGIN.finditer(prompt))
    header = next((header for header in headers if text.startswith(header, begin, content_end)), "")
    return begin + len(header) if header else None


def _span_of_parts(parts: Sequence[tuple[int, int]], text: str, ends: Sequence[str]) -> tuple[int, int, bool]:
    """Return where a turn begins and ends by the template's own marks, without what follows the token that ends it."""
    begin, end = parts[0][0], max(last for _, last in parts)
    closing = [text.rfind(close, begin, end) + len(close) for close in ends if close in text[begin:end]]
    closed = [
        place for place in closing if not (following := text[place:end].strip()) or following.startswith(tuple(ends))
    ]
    return (begin, min(closed), True) if closed else (begin, end, False)


def append_mark(message: Message, mark: str) -> Message | None:
    """Return a message with a mark at the end of what a template writes of it; None if it has nothing to mark."""
    calls = message.get("tool_calls")
    if calls:
        changed = copy.deepcopy(dict(message))
        call = changed["tool_calls"][-1]
        function = call.get("function", call)
        function["name"] = f"{function.get('name', '')}{mark}"
        return changed
    content = message.get("content")
    if isinstance(content, str):
        written = content.rstrip()
        return {**message, "content": written + mark + content[len(written) :]}
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        return {**message, "content": [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{mark}"}]}
    return None


def _find_content_ends(render: Render, messages: Sequence[Message], text: str) -> dict[int, int]:
    """Return where the content of each message ends in the rendered text, of those that it shows."""
    with_marks = [append_mark(message, mark_of(number)) for number, message in enumerate(messages)]
    together = render([new or old for new, old in zip(with_marks, messages, strict=True)], False)
    if _ANY_MARK.sub("", together) == text:
        return _find_marks(together)
    ends: dict[int, int] = {}
    for number, new in enumerate(with_marks):  # a message with a mark may be written otherwise than without one
        if new is None:
            continue
        alone = render([*messages[:number], new, *messages[number + 1 :]], False)
        positions = _find_marks(alone)
        if number in positions:
            ends[number] = common_length(text, alone[: positions[number]])
    return ends


def _find_marks(text: str) -> dict[int, int]:
    """Return where each mark first stands in a text, counted without the marks.

    The name of a tool that was called may stand before its answer again.
    """
    positions: dict[int, int] = {}
    removed = 0
    for match in _ANY_MARK.finditer(text):
        positions.setdefault(int(match[1]), match.start() - removed)
        removed += len(match[0])
    return positions


def _measure_header(
    render: Render, before: Sequence[Message], previous: int | None, text: str, *, add_generation_prompt: bool
) -> tuple[int, bool]:
    """Return how much of the text after the last message that is shown precedes the next turn, and if all is there."""
    if previous is None:
        return 0, True
    mark = mark_of(len(before))
    last = append_mark(before[previous], mark)
    try:
        rendered = render(
            [*before[:previous], last or before[previous], *before[previous + 1 :]], add_generation_prompt
        )
    except TandemError:
        return 0, True
    if mark not in rendered:
        return 0, True
    header = rendered.partition(mark)[2]
    if text.startswith(header):
        return len(header), True
    shared = common_length(text, header)
    boundaries = [match.end() for match in _BOUNDARY.finditer(header[:shared])]
    return boundaries[-1] if boundaries else 0, False


def _find_turn_end(
    render: Render, messages: Sequence[Message], text: str, content_end: int, limit: int, ends: Sequence[str]
) -> tuple[int, bool]:
    """Return where the turn of the last message ends, and whether a token ends it."""
    place = find_end(text, ends, content_end, limit)
    if place is not None:
        return place[1], True
    if not messages[-1].get("tool_calls"):
        return content_end, False
    mark = mark_of(len(messages))  # it stands within the call
    last = append_mark(messages[-1], mark)
    tail = "" if last is None else render([*messages[:-1], last], False).rpartition(mark)[2]
    return content_end + common_length(text[content_end:], tail), False


def find_end(text: str, ends: Iterable[str], begin: int = 0, limit: int | None = None) -> tuple[int, int] | None:
    """Return where the first token that ends a turn begins and ends; None if there is none before `limit`."""
    places = [(place, place + len(end)) for end in ends if (place := text.find(end, begin, limit)) >= 0]
    return min(places, key=lambda place: (place[0], -place[1]), default=None)


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of what two sequences, such as texts, begin with alike."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)
