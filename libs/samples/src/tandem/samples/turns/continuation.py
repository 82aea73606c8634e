"""The text between two turns of the assistant, as a chat template writes it.

The first turn has known tokens, so a stand-in is rendered in its place: with a call where a tool answers, since some
templates write a tool's answer only after its call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tandem.common.errors import ConfigError, TandemError
from tandem.samples.turns.rendering import Message, Render, append_mark, mark_of

_TURN, _REPLY = mark_of(0), mark_of(1)


class RenderedContinuation(NamedTuple):
    """The text that a template writes after a turn's content."""

    text: str
    call_tail: str
    """The end of a call in that turn; the text may begin with it."""
    content_end: int | None
    """Where the content of the first message ends, before which the turn has ended; None if it is not shown there."""


def render_after_turn(
    render: Render, messages: Sequence[Message], turn: Message | None, source: str
) -> RenderedContinuation:
    """Return what a template writes after a turn's content, when `messages` follow it.

    Args:
        render: the chat template, from the folder `source`.
        messages: those that follow the turn.
        turn: the turn itself, if its calls are known.
        source: the folder, for errors.

    Raises:
        ConfigError: the template refuses the messages, or drops them.

    """
    question = {"role": "user", "content": "?"}
    refusal: TandemError | None = None
    dropped: Message | None = None
    for stand_in in _stand_ins(messages, turn):
        conversation = [question, stand_in, *messages]
        try:
            text = render(conversation, True)
            if _TURN not in text:
                continue
            dropped = _find_dropped(render, conversation)
            if dropped is not None:
                continue
            tail = render(conversation[:2], False).partition(_TURN)[2] if stand_in.get("tool_calls") else ""
        except TandemError as error:
            refusal = refusal or error
            continue
        return RenderedContinuation(text.partition(_TURN)[2], tail, _find_content_end(render, conversation))
    if refusal is not None:
        raise refusal
    part = "earlier turns" if dropped is None else f"messages of the role {dropped['role']} after a turn"
    raise ConfigError(f"policy.tokenizer.chat_template: the chat template of {source} drops {part}")


def _find_dropped(render: Render, conversation: Sequence[Message]) -> Message | None:
    """Return a message that the template does not write, or, but for a tool's, writes before the turn that it follows.

    Several answers of tools may be written as one.
    """
    for number in range(2, len(conversation)):
        message = conversation[number]
        is_last = number == len(conversation) - 1
        marked = append_mark(message, _REPLY) if is_last or message["role"] != "tool" else None
        if marked is None:
            continue
        text = render([*conversation[:number], marked, *conversation[number + 1 :]], True)
        if _REPLY not in (text if message["role"] == "tool" else text.partition(_TURN)[2]):
            return message
    return None


def _find_content_end(render: Render, conversation: Sequence[Message]) -> int | None:
    """Return where the content of the first message after the turn ends, in the text after the turn's content."""
    first = append_mark(conversation[2], _REPLY)
    if first is None:
        return None
    try:
        text = render([*conversation[:2], first, *conversation[3:]], True).partition(_TURN)[2]
    except TandemError:
        return None
    place = text.find(_REPLY)
    return place if place >= 0 else None


def _stand_ins(messages: Sequence[Message], turn: Message | None) -> Iterator[dict[str, Any]]:
    """Yield turns that `messages` may follow: with calls where tools answer, else a plain one."""
    results = [message for message in messages if message["role"] == "tool"]
    known_calls = (turn or {}).get("tool_calls") or ()
    if results:
        calls = [
            {
                "id": str(result.get("tool_call_id") or f"call_{number}"),
                "type": "function",
                "function": {
                    "name": _tool_name(result, known_calls, number),
                    "arguments": {"x": _TURN if number == len(results) - 1 else "1"},
                },
            }
            for number, result in enumerate(results)
        ]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
        yield {"role": "assistant", "content": None, "tool_calls": calls}
    yield {"role": "assistant", "content": _TURN}


def _tool_name(result: Message, calls: Sequence[Message], number: int) -> str:
    """Return the name of the tool that a message answers for: its own, or that of the call that it names."""
    if result.get("name"):
        return str(result["name"])
    answered = [call for call in calls if call.get("id") == result.get("tool_call_id")] or calls[number : number + 1]
    return str(answered[0].get("function", answered[0]).get("name", "tool")) if answered else "tool"
