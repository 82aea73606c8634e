"""The ends of turns: one fact of a model, read once from template, tokenizer and generation config.

Training, rollouts, evaluation and serving all ask this object, so no two of them can disagree.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import TandemError
from tandem.samples.turns.rendering import Render, find_end, mark_of

_USER, _ASSISTANT = mark_of(0), mark_of(1)
"""Contents of messages that are found again in what the template writes."""
_FILES = ("generation_config.json", "config.json")


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
