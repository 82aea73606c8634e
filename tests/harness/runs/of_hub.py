"""Commands and programs that ask a Hub: forked from what has imported the Hub's packages with its address and cache.

These packages read the environment as they are imported. So all tests of a process have one address and one folder for
the cache, behind which each has a Hub and a cache of its own. What wants other settings is a new interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.launch.child import ForkedChild
from tests.harness.hub_server import HubServer, hub_server
from tests.harness.runs import consoles
from tests.harness.runs.running import BIN, TIMEOUT_S

_SETTINGS = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
"""What is read once; a token is read whenever it is used."""
_COMMAND = "tandem.coordinator.cli"
_PROGRAM = f"{__package__.rpartition('.')[0]}.processes.program"
_served: dict[str, str] = {}
"""The settings of what commands are forked from."""


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


@contextmanager
def served_hub(folder: Path) -> Iterator[HubServer]:
    """Serve a Hub at one address for many tests, and start what is forked to ask it."""
    with hub_server() as server:
        with pytest.MonkeyPatch.context() as patch:
            set_environment(patch, server, folder / "hf")
            _served.update(_settings())
            started = consoles.fork_server_of_hub()
        with started:
            yield server


def set_environment(patch: pytest.MonkeyPatch, server: HubServer, home: Path) -> None:
    """Name a Hub and a cache."""
    for name in (*_SETTINGS, "HF_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setenv("HF_ENDPOINT", server.url)
    patch.setenv("HF_HOME", str(home))
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")


@contextmanager
def own_hub(patch: pytest.MonkeyPatch, server: HubServer, cache: Path) -> Iterator[HubServer]:
    """Make a Hub that serves many tests that of one, with an empty cache."""
    home = Path(_served["HF_HOME"])
    cache.mkdir()
    home.symlink_to(cache)
    server.begin_anew()
    set_environment(patch, server, home)
    try:
        yield server
    finally:
        if server.hold is not None:
            server.hold.set()
        home.unlink()


def coordinator_of_hub(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; it asks the Hub that the environment names, with the cache that it names."""
    return _ended(_COMMAND, [BIN / "coordinator"], [str(word) for word in arguments])


def program_of_hub(text: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, likewise."""
    return _ended(_PROGRAM, [sys.executable, "-c"], [text])


def start_of_hub(*arguments: str | Path) -> ForkedChild:
    """Start the command, to be killed while it asks the Hub of the test; what it prints is nobody's concern."""
    return _started(_COMMAND, [str(word) for word in arguments])


def start_program(text: str) -> ForkedChild:
    """Start a program, likewise."""
    return _started(_PROGRAM, [text])


def _started(module: str, arguments: Sequence[str]) -> ForkedChild:
    assert _settings() == _served
    with Path(os.devnull).open("wb") as nowhere:
        return consoles.fork_server_of_hub().start(module, arguments, nowhere)


def _ended(module: str, words: Sequence[str | Path], arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if _settings() != _served:
        return subprocess.run([*words, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = consoles.fork_server_of_hub().start(module, arguments, out, errors)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, errors)]
    return subprocess.CompletedProcess([module, *arguments], code, *texts)
