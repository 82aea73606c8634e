"""What a fetch leaves in the cache of the Hub when it is killed: the library never finds it again, so it is removed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tandem.launch.child import ForkedChild
from tests.harness.hub_server import HubServer, files_in
from tests.harness.runs.of_hub import program_of_hub, start_program
from tests.harness.runs.running import TIMEOUT_S, TINY, wait_until
from tests.harness.trainers.trainer_harness import make_model

NAME = "tiny/digits"
WEIGHTS = "model.safetensors"
BLOBS = Path("hf/hub/models--tiny--digits/blobs")
FETCH = f"from tandem.config.models import hub; print(hub.fetch_whole({NAME!r}, print))"
REMOVE = f"from tandem.config.models import hub; hub.remove_unfinished(hub.HubReference({NAME!r}))"


@pytest.fixture(autouse=True)
def digits(hub: HubServer) -> None:
    """Have one model on the Hub."""
    characters = TINY["policy"]["new_model"]["characters"]
    hub.add(NAME, files_in(make_model(Path("digits"), "llama", characters=characters)))


def unfinished() -> list[Path]:
    return sorted(BLOBS.glob("*.incomplete"))


def aged(path: Path) -> None:
    """Let a file be as old as if its process had been killed an hour ago."""
    then = path.stat().st_mtime - 3600
    os.utime(path, (then, then))


def run(program: str) -> None:
    done = program_of_hub(program)
    assert done.returncode == 0, done.stderr


def held_fetch(hub: HubServer) -> ForkedChild:
    """Return a process that has fetched half of the weights, and gets no more of them."""
    hub.hold = threading.Event()
    process = start_program(FETCH)
    wait_until(lambda: bool(hub.bodies and unfinished()), lambda: "half of the weights to be sent")
    return process


def let_go(hub: HubServer) -> None:
    assert hub.hold is not None
    hub.hold.set()
    hub.hold = None
    wait_until(lambda: not hub.connections, lambda: "the server to see that the process is gone")


def test_what_a_killed_fetch_leaves_is_not_gone_on_with_and_is_removed_by_the_next(hub: HubServer) -> None:
    process = held_fetch(hub)
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
    let_go(hub)
    (left,) = unfinished()
    aged(left)
    hub.bodies.clear()
    run(FETCH)
    ((name, first, last),) = hub.bodies
    assert (name, first) == (WEIGHTS, 0), "the library begins the file again"
    assert last == len(hub.repositories["models", NAME].commits.popitem()[1][WEIGHTS])
    assert unfinished() == []


def test_what_a_killed_fetch_left_of_a_whole_model_is_removed_too(hub: HubServer) -> None:
    run(FETCH)
    left = BLOBS / f"{'0' * 64}.1a2b3c4d.incomplete"
    left.write_bytes(b"half")
    run(FETCH)
    assert unfinished() == [left], "it may be of a process that has just begun"
    aged(left)
    run(REMOVE)
    assert unfinished() == []


def test_what_is_being_fetched_is_left_alone_however_slow_it_is(hub: HubServer) -> None:
    process = held_fetch(hub)
    try:
        (partial,) = unfinished()
        aged(partial)
        run(REMOVE)
        assert unfinished() == [partial], "its process holds the lock"
    finally:
        let_go(hub)
        assert process.wait(TIMEOUT_S) == 0
    assert unfinished() == []
