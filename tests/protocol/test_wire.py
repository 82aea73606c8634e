"""The wire, on real sockets."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tandem.common import keys
from tandem.common.errors import ConfigError, TandemError, VersionMismatch, WireError
from tandem.common.messages import (
    PROTOCOL_VERSION,
    CommitVersion,
    FromRefit,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Shutdown,
    ToRefit,
    VersionCommitted,
    Welcome,
)
from tandem.common.wire import Frames, Hub, HubPeer, Link, MessageCodec, check_version, encode
from tandem.launch.run_service import run_service
from tests.harness.members import MEMBER, MEMBER_KEYS, link_to, open_hub

HELLO = Hello(protocol_version=PROTOCOL_VERSION, service="refit", host="here", pid=1)
WELCOME = Welcome(
    name="refit-0",
    index=0,
    run_id="run",
    heartbeat_interval_s=0.1,
    heartbeat_timeout_s=3.0,
    config_json=b"",
)
CODEC: MessageCodec[Any] = MessageCodec(FromRefit)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = open_hub()
    yield hub
    hub.close()


def next_from(hub: Hub, kind: type) -> tuple[HubPeer, Any, dict[str, Any]]:
    """Return the next message of a kind, its sender and its arrays."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for peer, frames in hub.receive(0.1):
            received = CODEC.decode(frames)
            if isinstance(received.message, kind):
                return peer, received.message, received.arrays
    raise AssertionError(f"no {kind.__name__} within 10 s")


def joined(hub: Hub) -> tuple[Link[Any], HubPeer]:
    """Join a link to the hub."""
    link: Link[Any] = link_to(hub.address, "refit", "me", ToRefit)
    thread = threading.Thread(target=link.join, args=(HELLO, 10.0))
    thread.start()
    peer, hello, _ = next_from(hub, Hello)
    assert hello == HELLO
    hub.send(peer, encode(WELCOME))
    thread.join(60.0)
    return link, peer


ARRAYS = {
    "floats": np.linspace(0, 1, 7, dtype=np.float32),
    "matrix": np.arange(12, dtype=np.int64).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    "booleans": np.array([True, False, True]),
    "strided": np.arange(10, dtype=np.uint8)[::-2],
    "other byte order": np.array([1.5, -2.0], dtype=">f4"),
    "one number": np.array(3.5),
    "not finite": np.array([np.nan, np.inf, -0.0], dtype=np.float32),
    "empty": np.zeros((0, 3), dtype=np.float16),
}


def test_arrays_arrive_to_the_bit_in_both_directions(hub: Hub) -> None:
    link, peer = joined(hub)
    command = CommitVersion(command_id=1, deadline_s=5.0, version=3, digests={}, has_update=False)
    hub.send(peer, encode(command, ARRAYS))
    received = link.receive(10.0)
    assert received is not None
    assert received.message == command
    link.send(encode(VersionCommitted(command_id=1, version=3, differing={}, digest=0), received.arrays))
    _, reply, arrays = next_from(hub, VersionCommitted)
    assert reply.version == 3
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == array.tobytes()
        assert not arrays[name].flags.writeable
    link.close("done")
    assert next_from(hub, Goodbye)[1].reason == "done"


def test_who_waits_for_a_message_is_woken_from_another_thread(hub: Hub) -> None:
    link, peer = joined(hub)
    threading.Timer(0.2, link.wake).start()
    assert link.receive(60.0) is None, "the test would take a minute"
    hub.send(peer, encode(Shutdown(reason="done")))
    received = link.receive(10.0)
    assert received is not None
    assert received.message == Shutdown(reason="done")
    link.close("done")
    link.wake()  # of no effect any more


def test_heartbeats_flow_while_the_process_is_busy(hub: Hub) -> None:
    link, _ = joined(hub)
    link.set_phase("thinking hard")
    until = time.monotonic() + 1.0
    beats = 0
    while time.monotonic() < until:  # this thread never touches the link
        for _, frames in hub.receive(0.05):
            message = CODEC.decode(frames).message
            beats += isinstance(message, Heartbeat) and message.phase == "thinking hard"
    assert beats >= 5
    link.close("done")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: frames[:-1],
        lambda frames: [*frames, b"more"],
        lambda frames: [frames[0], frames[1], bytes(frames[2])[:-1], *frames[3:]],
        lambda frames: [frames[0], bytes(frames[1]).replace(b"<f4", b"|O8"), *frames[2:]],
        lambda frames: [frames[0], bytes(frames[1]).replace(b"<f4", b"<zz"), *frames[2:]],
        lambda frames: [frames[0], b"junk", *frames[2:]],
    ],
    ids=["missing", "surplus", "short", "objects", "no dtype", "no manifest"],
)
def test_spoiled_arrays_are_refused(spoil: Any) -> None:
    frames: Frames = encode(VersionCommitted(command_id=1, version=3, differing={}, digest=0), ARRAYS)
    CODEC.decode(frames)
    with pytest.raises(WireError):
        CODEC.decode(spoil(frames))


@pytest.mark.parametrize(
    "header",
    [
        b"\x82\xa4type\xb0VersionCommitted\xa9differing\x81\xa1a\xa2\x00\x80",
        b"\x82\xa4type\xa8Problem\xff",
        b"\x82\xa4type\xa6Failed\xa5error" + b"\x91" * 100_000,
    ],
    ids=["text that is none", "tag that is none", "bottomless"],
)
def test_bytes_that_are_no_message_are_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        CODEC.decode([header])
    with pytest.raises(WireError):
        check_version(header)


def with_manifest(headers: list[tuple[str, str, tuple[int, ...]]], *array_frames: bytes) -> Frames:
    """Return a message whose manifest says what a dishonest or broken sender might say."""
    (header,) = encode(VersionCommitted(command_id=1, version=3, differing={}, digest=0))
    return [header, msgspec.msgpack.encode(headers), *array_frames]


@pytest.mark.parametrize(
    "frames",
    [
        with_manifest([("a", "<f4", (2**62, 4))], b""),
        with_manifest([("a", "<f4", (2**40, 2**40))], b""),
        with_manifest([("a", "<f4", (0, 2**62, 8))], b""),
        with_manifest([("a", "<f4", (0, 2**63))], b""),
        with_manifest([("a", "<f4", (-1, -1))], b"1234"),
        with_manifest([("a", "<f4", (1,) * 65)], b"1234"),
        with_manifest([("a", "(2,)f4", ())], b"12345678"),
        with_manifest([("a", "f4,(", ())], b"1234"),
        with_manifest([("a", "<c8", (1,))], b"12345678"),
        with_manifest([("a", "<U2", (1,))], b"12345678"),
        with_manifest([("a", "<f4", (1,)), ("a", "<f4", (1,))], b"1234", b"5678"),
    ],
    ids=[
        "size wraps to zero",
        "size wraps",
        "zero of too many",
        "beyond 64 bits",
        "negative",
        "too many dimensions",
        "nested dtype",
        "dtype that is code",
        "complex",
        "text",
        "same name twice",
    ],
)
def test_impossible_manifests_are_refused(frames: Frames) -> None:
    with pytest.raises(WireError):
        CODEC.decode(frames)


def test_messages_of_absurd_sizes_are_refused_unread() -> None:
    (header,) = encode(VersionCommitted(command_id=1, version=3, differing={}, digest=0))
    manifest = msgspec.msgpack.encode([("a", "<f4", (0,))] * 66)
    with pytest.raises(WireError, match="1002 frames, but a message has at most 64 arrays"):
        CODEC.decode([header, manifest, *[b""] * 1000])
    with pytest.raises(WireError, match=r"a list of arrays of 70000 bytes, but the limit is 65536"):
        CODEC.decode([header, bytes(70_000)])
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), ((1 << 30) + 1,), (0,))
    with pytest.raises(WireError, match="a header of 1073741825 bytes"):
        CODEC.decode([huge])  # type: ignore[list-item]


@pytest.mark.parametrize("change", [{"version": -1}, {"digest": 1.5}, {"differing": {"": "a"}}, {"more": 1}])
def test_an_error_names_the_message_the_field_and_the_command(change: dict[str, Any]) -> None:
    plain = msgspec.msgpack.decode(encode(VersionCommitted(command_id=17, version=3, differing={}, digest=0))[0])
    with pytest.raises(WireError, match=r"^VersionCommitted(\.(version|digest|differing))?: ") as caught:
        CODEC.decode([msgspec.msgpack.encode(plain | change)])
    assert caught.value.command_id == 17
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), np.array(["a"]), np.array([1j])])
def test_arrays_that_may_not_travel_are_not_sent(array: Any) -> None:
    with pytest.raises(WireError, match=r"'bad' of dtype .* may not travel"):
        encode(VersionCommitted(command_id=1, version=3, differing={}, digest=0), {"bad": array})


def test_another_version_is_told_both() -> None:
    (frame,) = encode(Hello(protocol_version=999, service="trainer", host="far", pid=7))
    with pytest.raises(
        VersionMismatch, match=rf"trainer \(pid 7 on far\) speaks protocol version 999.*{PROTOCOL_VERSION}"
    ):
        check_version(frame)
    future = {"type": "Hello", "protocol_version": 999, "new": "field", "pid": ["no", "number"], "service": {}}
    with pytest.raises(VersionMismatch, match="speaks protocol version 999"):
        check_version(msgspec.msgpack.encode(future))
    with pytest.raises(WireError):
        check_version(b"junk")


def test_a_refusal_is_the_error(hub: Hub) -> None:
    link: Link[Any] = link_to(hub.address, "refit", "me", ToRefit)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            link.join(HELLO, 10.0)
        except TandemError as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    peer, _, _ = next_from(hub, Hello)
    hub.send(peer, encode(Refused(reason="the run is full")))
    thread.join(60.0)
    assert "refused this refit: the run is full" in str(errors[0])


def test_nobody_answers() -> None:
    link: Link[Any] = link_to("tcp://127.0.0.1:9", "refit", "me", ToRefit)
    with pytest.raises(TandemError, match=r"refit could not join: no answer from tcp://127.0.0.1:9 within 0.2 s"):
        link.join(HELLO, 0.2)


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"cluster.address"):
        open_hub("tcp://nonsense")
    link: Link[Any] = link_to("nonsense", "refit", "me", ToRefit)
    with pytest.raises(ConfigError, match="--coordinator 'nonsense'"):
        link.join(HELLO, 1.0)


def test_a_peer_that_is_gone_is_reported(hub: Hub) -> None:
    assert hub.send(HubPeer(b"nobody", MEMBER.public), encode(Heartbeat())) is False


def test_any_thread_may_send_while_another_receives(hub: Hub) -> None:
    link: Link[Any] = link_to(hub.address, "refit", "me", ToRefit)
    joining = threading.Thread(target=link.join, args=(HELLO, 10.0))
    joining.start()
    peer, _, _ = next_from(hub, Hello)
    hub.send(peer, encode(WELCOME))
    joining.join()
    senders = [threading.Thread(target=say_often, args=(link, str(number))) for number in range(4)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert link.receive(0.01) is None
    heard: Counter[str] = Counter()
    while heard.total() < 4 * NUM_WORDS:
        heard[next_from(hub, Goodbye)[1].reason] += 1
    assert heard == {str(number): NUM_WORDS for number in range(4)}
    link.close("over")


NUM_WORDS = 200


def say_often(link: Link[Any], word: str) -> None:
    for _ in range(NUM_WORDS):
        link.send(encode(Goodbye(reason=word)))


CHILD = """
import sys, time
from tandem.common.messages import *
from tandem.common.keys import decode_process_keys
from tandem.common.wire import Link
link = Link(sys.argv[1], "refit", "child", ToRefit, decode_process_keys(sys.argv[2].encode()))
link.join(Hello(protocol_version=PROTOCOL_VERSION, service="refit", host="h", pid=1), 10.0)
link.set_phase("sleeping")
time.sleep(60)
"""


@pytest.mark.parametrize(("end", "code"), [("silence", 70), ("shutdown", 0)])
def test_a_busy_process_ends_with_its_coordinator(hub: Hub, end: str, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, hub.address, keys.encode(MEMBER_KEYS)], stderr=subprocess.PIPE, text=True
    )
    try:
        peer, _, _ = next_from(hub, Hello)
        hub.send(peer, encode(WELCOME))
        if end == "shutdown":
            hub.send(peer, encode(Shutdown(reason="over")))
            for _ in range(100):  # alive, but it wants the process gone
                hub.send(peer, encode(Heartbeat()))
                if child.poll() is not None:
                    break
                time.sleep(0.1)
        _, said = child.communicate(timeout=120)
        assert child.returncode == code
        assert "sleeping" in said
    finally:
        child.kill()
        child.wait()


BUSY = """
import sys, time
from tandem.common.messages import *
from tandem.common.keys import decode_process_keys
from tandem.common.wire import Link
link = Link(sys.argv[1], "refit", "busy", ToRefit, decode_process_keys(sys.argv[2].encode()))
link.join(Hello(protocol_version=PROTOCOL_VERSION, service="refit", host="h", pid=1), 10.0)
link.set_phase("counting")
until = time.monotonic() + 9.0
while time.monotonic() < until:
    sum(range(1000))
link.close("done")
"""


def test_heartbeats_flow_both_ways_while_python_computes(hub: Hub) -> None:
    """The child holds the interpreter's lock for three times its own patience, and lives."""
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY, hub.address, keys.encode(MEMBER_KEYS)], stderr=subprocess.PIPE, text=True
    )
    try:
        peer, _, _ = next_from(hub, Hello)
        hub.send(peer, encode(WELCOME))
        beats, last, longest, goodbye = 0, time.monotonic(), 0.0, False
        until = last + 40.0
        while not goodbye and time.monotonic() < until:
            for _, frames in hub.receive(0.1):
                message = CODEC.decode(frames).message
                goodbye = goodbye or isinstance(message, Goodbye)
                beats += isinstance(message, Heartbeat) and message.phase == "counting"
                longest = max(longest, time.monotonic() - last)
                last = time.monotonic()
            hub.send(peer, encode(Heartbeat()))
        _, said = child.communicate(timeout=120)
        assert goodbye, said
        assert child.returncode == 0, said
        assert beats >= 10
        assert longest < WELCOME.heartbeat_timeout_s
    finally:
        child.kill()
        child.wait()


def test_bytes_that_are_no_message_reach_the_process_as_an_error(hub: Hub) -> None:
    link, peer = joined(hub)
    for junk in (b"", b"junk", msgspec.msgpack.encode({"type": "NoSuchMessage"})):
        hub.send(peer, [junk])
        with pytest.raises(WireError, match="not a message of this link"):
            link.receive(10.0)
    command = CommitVersion(command_id=1, deadline_s=5.0, version=3, digests={}, has_update=False)
    hub.send(peer, encode(command))  # the link itself is as good as before
    received = link.receive(10.0)
    assert received is not None
    assert received.message == command
    link.close("done")


class Counting:
    """A service that counts how often it carries a command out."""

    def __init__(self, member: Any) -> None:
        self.member = member
        self.count = 0

    def handle(self, command: CommitVersion, arrays: Any) -> None:
        self.count += 1
        if command.version == 999:
            raise ValueError("a bug")
        reply = VersionCommitted(command_id=command.command_id, version=self.count, differing={}, digest=0)
        self.member.reply(command.command_id, reply)

    def work(self) -> bool:
        return False

    def close(self) -> None:
        pass


def own_key_file(folder: Path) -> str:
    """Return a key file as those have that were launched."""
    file = folder / "own.json"
    file.touch(mode=0o600)
    file.write_bytes(keys.encode(MEMBER_KEYS))
    return str(file)


@pytest.mark.parametrize("config_json", [b"", b"junk", b"{}", b"[]", b'{"grpo": 5}', b"\xff", b"[" * 100_000])
def test_a_configuration_that_is_none_is_one_line(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], config_json: bytes
) -> None:
    codes: list[int] = []
    arguments = ["--coordinator", hub.address, "--key-file", own_key_file(tmp_path)]
    thread = threading.Thread(target=lambda: codes.append(run_service("refit", ToRefit, Counting, arguments)))
    thread.start()
    peer, _, _ = next_from(hub, Hello)
    hub.send(peer, encode(msgspec.structs.replace(WELCOME, config_json=config_json)))
    next_from(hub, Goodbye)
    thread.join(60.0)
    assert codes == [1]
    said = capsys.readouterr()
    assert said.err == ""
    (line,) = (line for line in said.out.splitlines() if "leaves" in line)
    assert line.startswith("refit-0 leaves: the coordinator has sent Welcome.config_json: ")


def test_a_command_that_comes_twice_is_carried_out_once(hub: Hub, tmp_path: Path) -> None:
    from tandem.common.messages import Failed
    from tandem.config import build_config, config_to_json

    config = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "m", "train_global_batch_size": 512},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )
    codes: list[int] = []
    arguments = ["--coordinator", hub.address, "--key-file", own_key_file(tmp_path)]
    thread = threading.Thread(target=lambda: codes.append(run_service("refit", ToRefit, Counting, arguments)))
    thread.start()
    peer, _, _ = next_from(hub, Hello)
    welcome = {name: getattr(WELCOME, name) for name in WELCOME.__struct_fields__}
    hub.send(peer, encode(Welcome(**welcome | {"config_json": config_to_json(config)})))
    for command_id, version in ((1, 5), (1, 5), (2, 5), (1, 5)):
        command = CommitVersion(command_id=command_id, deadline_s=5.0, version=version, digests={}, has_update=False)
        hub.send(peer, encode(command))
        _, reply, _ = next_from(hub, VersionCommitted)
        assert (reply.command_id, reply.version) == (command_id, command_id)
    bad = CommitVersion(command_id=3, deadline_s=5.0, version=999, digests={}, has_update=False)
    hub.send(peer, encode(bad))
    _, failed, _ = next_from(hub, Failed)
    assert failed.error == "ValueError: a bug"
    assert not failed.expected
    assert "a bug" in failed.traceback
    wrong = msgspec.msgpack.decode(encode(bad)[0]) | {"command_id": 4, "version": -1}
    hub.send(peer, [msgspec.msgpack.encode(wrong)])
    _, failed, _ = next_from(hub, Failed)
    assert (failed.command_id, failed.expected) == (4, True)
    assert failed.error == "CommitVersion.version: Expected `int` >= 0"
    hub.send(peer, encode(Shutdown(reason="over")))
    thread.join(60.0)
    assert codes == [0]
