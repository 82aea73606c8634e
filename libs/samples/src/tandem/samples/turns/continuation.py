"""The text between two turns of the assistant, as a chat template writes it.

The first turn has known tokens, so a stand-in is rendered in its place: with a call where a tool answers, since some
templates write a tool's answer only after its call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tandem.common.errors import ConfigError, TandemError
from tandem.samples.turns.rendering import Message, Render, append_mark, mark_of

_TURN, _REPLY = mark_of(0), mark_of(1)


def render_after_turn(
    render: Render, messages: Sequence[Message], turn: Message | None, source: str
) -> tuple[str, str]:
    """Return what a template writes after a turn's content, and how much of it belongs to a call in that turn.

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
    is_turn_dropped = True
    for stand_in in _stand_ins(messages, turn):
        conversation = [question, stand_in, *messages]
        try:
            text = render(conversation, True)
            if _TURN not in text:
                continue
            is_turn_dropped = False
            if not _shows_last(render, conversation):
                continue
            tail = render(conversation[:2], False).partition(_TURN)[2] if stand_in.get("tool_calls") else ""
        except TandemError as error:
            refusal = refusal or error
            continue
        return text.partition(_TURN)[2], tail
    if refusal is not None:
        raise refusal
    part = "earlier turns" if is_turn_dropped else f"messages of the role {messages[-1]['role']}"
    raise ConfigError(f"policy.tokenizer.chat_template: the chat template of {source} drops {part}")


def _shows_last(render: Render, messages: Sequence[Message]) -> bool:
    """Tell whether the template writes the last message."""
    last = append_mark(messages[-1], _REPLY)
    return last is None or _REPLY in render([*messages[:-1], last], True)


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
