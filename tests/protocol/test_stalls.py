"""Who was kept from listening, as a stopped process or machine is, does not take others for silent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tandem.common import keys
from tandem.common.messages import PROTOCOL_VERSION, FromRollout, Heartbeat, Hello, Shutdown, Welcome
from tandem.common.wire import Hub, HubPeer, MessageCodec, ThreadStalls, encode
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.coordinator.scheduler.events import Event, ProcessJoined, ProcessLost
from tandem.launch.admission import HeartbeatSettings
from tests.harness.disk_waits import wait_as_for_disk
from tests.harness.members import MEMBER, MEMBER_KEYS, dealer_to, open_hub, open_listening

PULSE = HeartbeatSettings(interval_s=0.1, timeout_s=3.0)
STALL_S = 6.0
WAIT_S = 120.0
CHILD = f"""
import sys, time
from tandem.common.messages import *
from tandem.common.keys import decode_process_keys
from tandem.common.wire import Link
link = Link(sys.argv[1], "rollout", "child", ToRollout, decode_process_keys(sys.argv[2].encode()))
link.join(Hello(protocol_version=PROTOCOL_VERSION, service="rollout", host="h", pid=1), {WAIT_S})
while not isinstance(link.receive({WAIT_S}).message, Shutdown):
    pass
link.close("told to")
"""


def test_what_is_taken_off_is_what_is_beyond_the_usual() -> None:
    stalls = ThreadStalls()
    begun = time.monotonic()
    stalls.until(begun, 1.0)
    assert stalls.until(begun + 0.5, 1.0) == 0.0
    assert stalls.until(begun + 7.5, 1.0) == 6.0


def test_a_coordinator_that_was_stopped_loses_nobody_for_it_and_then_who_is_silent() -> None:
    listening = open_listening()
    limits = SampleLimits(vocabulary=50, max_tokens=12, max_turns=2)
    registry = ProcessRegistry(listening, {"rollout": 1}, b"{}", "run", PULSE, Replies(limits))
    registry.names.register(MEMBER.public)
    context, socket = dealer_to(registry.address, MEMBER)
    try:
        socket.send_multipart(encode(Hello(protocol_version=PROTOCOL_VERSION, service="rollout", host="h", pid=1)))
        until = time.monotonic() + WAIT_S
        found = []
        while not found and time.monotonic() < until:
            found = [*registry.receive(0.1)]
        assert [type(event) for event in found] == [ProcessJoined]
        time.sleep(STALL_S)
        assert [*registry.receive(0.0)] == []
        lost = []
        while not lost and time.monotonic() < until:
            lost = [*registry.receive(0.1)]
        assert [type(event) for event in lost] == [ProcessLost]
    finally:
        socket.close()
        context.term()
        listening.hub.close()


@pytest.mark.parametrize("waits_for", ["disk", "something else"])
def test_only_who_waits_for_a_disk_sends_heartbeats_meanwhile(waits_for: str) -> None:
    listening = open_listening()
    limits = SampleLimits(vocabulary=50, max_tokens=12, max_turns=2)
    registry = ProcessRegistry(listening, {"rollout": 1}, b"{}", "run", PULSE, Replies(limits))
    registry.names.register(MEMBER.public)
    words = [sys.executable, "-c", CHILD, registry.address, keys.encode(MEMBER_KEYS)]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        with registry.beat_in_disk_waits():
            until = time.monotonic() + WAIT_S
            events: list[Event] = []
            while not events and time.monotonic() < until:
                events = [*registry.receive(0.1)]
            assert [type(event) for event in events] == [ProcessJoined]
            if waits_for == "disk":
                wait_as_for_disk(STALL_S)
                assert child.poll() is None
                assert [*registry.receive(0.1)] == []
                registry.broadcast(Shutdown(reason="done"))
            else:
                time.sleep(STALL_S)
            _, printed = child.communicate(timeout=WAIT_S)
        if waits_for == "disk":
            assert child.returncode == 0, printed
        else:
            assert child.returncode == 70, printed
            assert "the coordinator was silent" in printed
    finally:
        child.kill()
        child.wait()
        listening.hub.close()


def test_a_process_that_was_stopped_does_not_end_for_it() -> None:
    hub = open_hub()
    words = [sys.executable, "-c", CHILD, hub.address, keys.encode(MEMBER_KEYS)]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        peer = _first(hub, Hello)
        welcome = Welcome(
            name="rollout-0",
            index=0,
            run_id="run",
            heartbeat_interval_s=PULSE.interval_s,
            heartbeat_timeout_s=PULSE.timeout_s,
            config_json=b"{}",
        )
        hub.send(peer, encode(welcome))
        _first(hub, Heartbeat)
        child.send_signal(signal.SIGSTOP)
        time.sleep(STALL_S)
        assert {type(_codec.decode(frames).message) for _, frames in hub.receive(0.0)} <= {Heartbeat}
        child.send_signal(signal.SIGCONT)
        _first(hub, Heartbeat)
        hub.send(peer, encode(Shutdown(reason="done")))
        _, said = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, said
    finally:
        child.kill()
        child.wait()
        hub.close()


_codec: MessageCodec[FromRollout] = MessageCodec(FromRollout)


def _first(hub: Hub, wanted: type[Hello] | type[Heartbeat]) -> HubPeer:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for peer, frames in hub.receive(0.1):
            if isinstance(_codec.decode(frames).message, wanted):
                return peer
    raise AssertionError(f"no {wanted.__name__} within {WAIT_S:g} s")
