"""A live run, to all of whose sockets strangers and members gone wrong send what they should not.

The run goes on, nobody unknown is obeyed, no member is lost, and memory stays bounded.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common import keys
from tandem.common.keys import KeyPair, ProcessKeys, RunKeys, read_run_keys
from tandem.common.messages import Listener
from tests.fuzz.frames import FRAMES, Frames
from tests.harness.members import dealer_with
from tests.harness.processes.relay import registered
from tests.harness.runs.by_hand import in_folder
from tests.harness.runs.running import Command, processes_of, wait_until, write_config
from tests.harness.strangers import KINDS, Stranger

ENDLESS: dict[str, Any] = {
    "grpo": {"max_num_steps": 1_000_000, "val_period": 0},
    "cluster": {"launch": {"refit": True, "rollouts": 1}, "max_replacements": 0},
    "checkpointing": {"enabled": False},
    "logger": {"samples": "off"},
}
MOST_GROWTH = 300 << 20
"""Bytes by which a process of the run may grow: what libzmq and Python keep for the next message of such a size."""
STEPS_AFTERWARDS = 5
STRANGERS = tuple(f"stranger, {kind}" for kind in KINDS)
MEMBERS = ("who has the key file", "who has no place", "a trainer's second connection")
"""Who proves a key that the coordinator hears: the joining key; one that it enrolled; that of a member."""


class Attack:
    """A live run, and who can reach it."""

    def __init__(
        self, run: Command, address: str, run_keys: RunKeys, own: dict[str, KeyPair], stack: contextlib.ExitStack
    ) -> None:
        """`own` are the keys that members gone wrong prove."""
        self.run = run
        self._folder = Path.cwd()
        self._stack = stack
        self.ports = _ports(run)
        coordinator = Listener(address=address, public_key=run_keys.coordinator.public)
        self._members = {who: self._dealer(coordinator, pair) for who, pair in own.items()}
        self._strangers: dict[tuple[str, int], Stranger] = {}
        for port in self.ports:
            at = Listener(address=f"tcp://127.0.0.1:{port}", public_key=run_keys.coordinator.public)
            for kind, who in zip(KINDS, STRANGERS, strict=True):
                self._strangers[who, port] = stranger = Stranger(kind, at)
                stack.callback(stranger.close)
        self.sizes = {process: process.memory_info().rss for process in self.processes()}

    def send(self, who: str, port: int, frames: Frames) -> None:
        """Send a message, if it goes out at all; what comes back is thrown away."""
        if who in self._members:
            dealer = self._members[who]
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(frames, zmq.NOBLOCK)
            while dealer.poll(0):
                dealer.recv_multipart()
            return
        stranger = self._strangers[who, port]
        stranger.say(frames)
        assert not stranger.heard(), f"{who} was answered at port {port}"

    def send_bytes(self, port: int, sent: bytes) -> bytes:
        """Send bytes that are no message of ZeroMQ's; return what comes back before the connection ends."""
        came = b""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5.0) as plain:
            plain.settimeout(0.05)
            plain.sendall(sent)
            while more := plain.recv(4096):
                came += more
        return came

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run."""
        return [psutil.Process(self.run.process.pid), *self.run.children()]

    def output(self) -> str:
        """Return what the run has printed."""
        with in_folder(self._folder):
            return self.run.output()

    def step(self) -> int:
        """Return the newest step."""
        return int(re.findall(r"step (\d+)/", self.output())[-1])

    def _dealer(self, at: Listener, own: KeyPair) -> zmq.Socket[bytes]:
        context, dealer = dealer_with(at, own)
        dealer.setsockopt(zmq.SNDTIMEO, 0)
        self._stack.callback(context.term)
        self._stack.callback(dealer.close)
        return dealer


def _ports(run: Command) -> list[int]:
    """Return where the run listens: the coordinator, and the rollout's samples."""
    of_run = [psutil.Process(run.process.pid), *processes_of(run, "rollout")]
    found = {
        connection.laddr.port
        for process in of_run
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(found) >= 2, found
    return sorted(found)


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    """Start a run whose trainer's key is known, and look at the end whether it has taken harm."""
    with in_folder(tmp_path_factory.mktemp("fuzz")), contextlib.ExitStack() as stack:
        run = stack.enter_context(Command("coordinator", "up", write_config(ENDLESS)))
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        run_keys = read_run_keys(Path("run"))
        assert run_keys is not None
        # Before there is a trainer: later there is no place for another.
        trainer, placeless = (registered(address, "trainer", run_keys) for _ in range(2))
        file = Path("trainer.json")
        file.touch(mode=0o600)
        mine = ProcessKeys(coordinator=run_keys.coordinator.public, own=trainer, is_joining=False)
        file.write_bytes(keys.encode(mine))
        words = ["--coordinator", address, "--key-file", str(file.absolute())]
        service = stack.enter_context(Command("trainer", *words))
        run.wait_for("step 3/")
        own = dict(zip(MEMBERS, (run_keys.joining, placeless, trainer), strict=True))
        attacked = Attack(run, address, run_keys, own, stack)
        yield attacked
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
        assert service.wait() == 0, service.output()


@given(who=st.sampled_from((*STRANGERS, *MEMBERS, *MEMBERS)), port=st.integers(0, 100), frames=FRAMES)
def _send(attack: Attack, who: str, port: int, frames: Frames) -> None:
    attack.send(who, attack.ports[port % len(attack.ports)], frames)


@given(port=st.integers(0, 100), sent=st.binary(max_size=4096) | st.builds(lambda b: b"\xff" + b, st.binary()))
def _send_bytes(attack: Attack, port: int, sent: bytes) -> None:
    came = attack.send_bytes(attack.ports[port % len(attack.ports)], sent)
    assert len(came) <= 64, "no more than ZMTP's greeting"


@pytest.mark.parametrize("send", [_send, _send_bytes], ids=["messages", "bytes"])
def test_the_run_goes_on_and_takes_no_harm(attack: Attack, fuzz: settings, send: Any) -> None:
    before = {process.pid for process in attack.processes()}
    fuzz(send)(attack)
    seen = attack.step()
    wait_until(lambda: attack.step() >= seen + STEPS_AFTERWARDS, lambda: f"steps after {seen}: {attack.output()}")
    assert {process.pid for process in attack.processes()} == before
    assert " is lost" not in attack.output()
    assert "Traceback" not in attack.output()
    for process, size in attack.sizes.items():
        grown = process.memory_info().rss - size
        assert grown < MOST_GROWTH, f"{' '.join(process.cmdline())[:60]} has grown by {grown >> 20} MB"
