"""Trees of messages, as in Open Assistant: each path from prompt to leaf is a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from tandem.common.errors import DataError
from tandem.samples.chat_templates import Messages

_ROLES = {"prompter": "user", "assistant": "assistant"}


class _Node(msgspec.Struct, frozen=True):
    """A message and its replies; other fields are ignored."""

    text: str
    role: Literal["prompter", "assistant"]
    replies: list[_Node] = []


def threads(row_name: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Messages]]:
    """Yield the threads of a tree in which the assistant speaks, each with its place, for errors.

    A row is the tree's ``prompt``, or has it. A user's last message is left out, since nothing answers it. Threads that
    are then equal are yielded once. Raise `DataError` for a row without a tree.
    """
    try:
        root = msgspec.convert(row.get("prompt", row), _Node)
    except msgspec.ValidationError as error:
        raise DataError(f"{row_name} is not a tree of messages: {error}") from error
    ends: set[int] = set()
    for number, nodes in enumerate(_ways(root), 1):
        spoken = [index for index, node in enumerate(nodes) if node.role == "assistant"]
        if not spoken or id(nodes[spoken[-1]]) in ends:
            continue
        ends.add(id(nodes[spoken[-1]]))
        messages = [{"role": _ROLES[node.role], "content": node.text} for node in nodes[: spoken[-1] + 1]]
        yield f"{row_name}, thread {number}", messages


def _ways(node: _Node) -> Iterator[list[_Node]]:
    if not node.replies:
        yield [node]
    for reply in node.replies:
        for branch in _ways(reply):
            yield [node, *branch]
