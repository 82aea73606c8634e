"""The ends of turns, one fact of a model from template, tokenizer and generation config; what follows.

Training, rollouts, evaluation and serving all ask this object, so no two of them can disagree.

Of the text between two turns: the first turn has known tokens, so a stand-in is rendered in its place: with a call
where a tool answers, since some templates write a tool's answer only after its call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tandem.common.errors import ConfigError, TandemError
from tandem.samples.turns.rendering import Message, Render, append_mark, find_end, mark_of

_USER, _ASSISTANT = mark_of(0), mark_of(1)
"""Contents of messages that are found again in what the template writes."""
_FILES = ("generation_config.json", "config.json")
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


class TurnEnds(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that end a turn of the assistant."""

    stop_ids: tuple[int, ...]
    """Tokens that end generation: the tokenizer's, the model's files' and the one that the template ends with."""
    closing_ids: tuple[int, ...]
    """Tokens with which the template itself closes a turn, in the middle of a conversation and at its end."""
    missing_id: int
    """Token that a turn gets which the template does not close."""

    @property
    def all_ids(self) -> tuple[int, ...]:
        """All tokens that end a turn, in what is generated or in what the template writes."""
        return tuple(dict.fromkeys((*self.stop_ids, *self.closing_ids)))


def read_turn_ends(render: Render | None, tokens: Mapping[str, int], eos_id: int, folders: Iterable[Path]) -> TurnEnds:
    """Return what ends a turn.

    Args:
        render: the chat template; None if there is none.
        tokens: the tokens that the tokenizer never divides, by their texts.
        eos_id: the tokenizer's end-of-sequence token.
        folders: those that may hold `generation_config.json` and `config.json` of the model.

    """
    stop_ids = [eos_id, *(token for folder in folders for token in _file_ends(folder))]
    if render is None:
        return TurnEnds(stop_ids=tuple(dict.fromkeys(stop_ids)), closing_ids=(), missing_id=eos_id)
    user, assistant = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}
    ending_ids = frozenset(stop_ids)
    last = _closing_token(render, [user, assistant], tokens, ending_ids)
    inner = _closing_token(render, [user, assistant, user], tokens, ending_ids)
    closing = [] if last is None else [last]
    if inner is not None and inner not in _headers(render, tokens):
        before_prompt = _closing_token(render, [user, assistant], tokens, ending_ids, add_generation_prompt=True)
        if before_prompt in (inner, None):
            closing.append(inner)
    stop_ids += [] if last is None else [last]
    missing = inner if last is None and inner in ending_ids else None
    return TurnEnds(
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        closing_ids=tuple(dict.fromkeys(closing)),
        missing_id=eos_id if missing is None else missing,
    )


def _file_ends(folder: Path) -> list[int]:
    """Return the tokens that end a response by the model's own files.

    As in Transformers and vLLM, `config.json` only counts where `generation_config.json` does not say: Transformers
    writes the default of a model's class there, which may be any token of another vocabulary.
    """
    for name in _FILES:
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue  # what is wrong with a model's files is said where they are checked
        ids = value if isinstance(value, list) else [value]
        ends = [token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
        if ends:
            return ends
    return []


def _closing_token(
    render: Render,
    messages: Sequence[Mapping[str, str]],
    tokens: Mapping[str, int],
    ending_ids: Collection[int],
    *,
    add_generation_prompt: bool = False,
) -> int | None:
    """Return the token with which the template closes the assistant's turn in `messages`; None if with none.

    Of the undivided tokens that follow the content at once, it is the first that is known to end a turn (Cohere's
    template ends the response before the turn), or else the first.
    """
    try:
        text = render(messages, add_generation_prompt)
    except TandemError:
        return None
    following: list[int] = []
    _, content, tail = text.partition(_ASSISTANT)
    while content and (place := find_end(tail, tokens)) is not None and not tail[: place[0]].strip():
        following.append(tokens[tail[slice(*place)]])
        tail = tail[place[1] :]
    return next((token for token in following if token in ending_ids), following[0] if following else None)


def _headers(render: Render, tokens: Mapping[str, int]) -> set[int]:
    """Return the first token of the generation prompt: it begins a turn, and so ends none."""
    user = {"role": "user", "content": _USER}
    try:
        plain, prompted = render([user], False), render([user], True)
    except TandemError:
        return set()
    prompt = prompted[len(plain) :] if prompted.startswith(plain) else ""
    place = find_end(prompt, tokens)
    return set() if place is None else {tokens[prompt[slice(*place)]]}
