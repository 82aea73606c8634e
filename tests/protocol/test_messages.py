"""The messages: every one decodes from its golden bytes, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.protocol_page import with_tables
from tandem.common.errors import WireError
from tandem.common.messages import Message
from tandem.common.wire import MessageCodec, encode
from tests.protocol.examples import GOLDEN, UNIONS, every_message, example, golden_path, messages_of

ROOT = Path(__file__).resolve().parents[2]


def links_of(message: type[Message]) -> list[Any]:
    return [union for union in UNIONS if message in messages_of(union)]


@pytest.mark.parametrize("message", every_message(), ids=lambda m: m.__name__)
def test_golden_bytes_decode_on_every_link(message: type[Message]) -> None:
    golden = golden_path(message).read_bytes()
    for link in links_of(message):
        assert MessageCodec[Message](link).decode([golden]).message == example(message)


def test_every_golden_file_is_of_a_message() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden_path(message).name for message in every_message()}


@pytest.mark.parametrize("message", every_message(), ids=lambda m: m.__name__)
def test_a_message_survives_the_wire(message: type[Message]) -> None:
    sent = example(message)
    (frame,) = encode(sent)
    assert MessageCodec[Message](links_of(message)[0]).decode([frame]).message == sent


@pytest.mark.parametrize("link", UNIONS, ids=range(len(UNIONS)))
def test_what_is_no_message_of_the_link_is_refused(link: Any) -> None:
    codec = MessageCodec[Message](link)
    good = msgspec.msgpack.decode(encode(example(messages_of(link)[0]))[0])
    wrong: list[bytes] = [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({**good, "surprise": 1}),
        msgspec.msgpack.encode({**good, "type": "NoSuchMessage"}),
        msgspec.msgpack.encode(good)[:-1],
        msgspec.msgpack.encode([1, 2, 3]),
    ]
    for frame in wrong:
        with pytest.raises(WireError):
            codec.decode([frame])
    with pytest.raises(WireError):
        codec.decode([])


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert with_tables(page) == page, "run: python scripts/protocol_page.py docs/protocol.md"
    for message in every_message():
        assert f"**`{message.__name__}`**" in page
