"""One example of every message, for golden files and round trips.

``python -m tests.protocol.examples`` writes the golden files: when a message is new, or with a new PROTOCOL_VERSION.
"""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tandem.common import messages
from tandem.common.keys import Key

GOLDEN = Path(__file__).parent / "golden"
UNIONS = (
    messages.ToTrainer,
    messages.FromTrainer,
    messages.ToRollout,
    messages.FromRollout,
    messages.ToRefit,
    messages.FromRefit,
    messages.ToSampleStore,
    messages.FromSampleStore,
    messages.ToRewardServer,
    messages.FromRewardServer,
)
_VALUES: dict[Any, Any] = {str: "text", int: 7, float: 0.25, bool: True, bytes: b"\x00\xff"}


def messages_of(union: Any) -> tuple[type[messages.Message], ...]:
    """Return the message classes of one direction of a link."""
    return get_args(union) or (union,)


def every_message() -> list[type[messages.Message]]:
    """Return every message class of every link, once."""
    return sorted({message for union in UNIONS for message in messages_of(union)}, key=lambda m: m.__name__)


def example(kind: Any) -> Any:
    """Return a value of a type: of a struct, one with every field set."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{name: example(hint) for name, hint in hints.items() if not name.startswith("__")})
    if kind == Key:
        return "0" * 40
    if kind == messages.Sha256:
        return "0" * 64
    if get_origin(kind) is Annotated:
        return example(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    if get_origin(kind) is tuple:
        *kinds, last = get_args(kind)
        return tuple(map(example, kinds * 2 if last is ... else [*kinds, last]))
    if get_origin(kind) in (Union, UnionType):
        return example(get_args(kind)[0])
    if get_origin(kind) is dict:
        return {"key": example(get_args(kind)[1])}
    return _VALUES.get(kind, "anything")


def golden_path(message: type[messages.Message]) -> Path:
    """Return where a message's golden file is."""
    return GOLDEN / f"{message.__name__}.msgpack"


if __name__ == "__main__":
    for each in every_message():
        golden_path(each).write_bytes(msgspec.msgpack.encode(example(each)))
