"""What integration tests share beyond one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hub_server import HubServer
from tests.harness.runs import consoles
from tests.harness.runs.of_hub import own_hub, served_hub
from tests.harness.trainers import trainer_harness


@pytest.fixture(scope="session", autouse=True)
def converted_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have Megatron-Core's checkpoints converted to a folder of the tests, in processes that they start as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path_factory.mktemp("converted")))
        yield


@pytest.fixture(scope="session", autouse=True)
def console_server(converted_checkpoints: None) -> Iterator[None]:
    """Start the process that commands are forked from before a test could count it among what the test left behind."""
    with consoles.fork_server():
        yield


@pytest.fixture(scope="session")
def rank_server(converted_checkpoints: None) -> None:
    """Start the process that ranks are forked from, likewise."""
    trainer_harness.start_server()


@pytest.fixture(scope="session")
def hub_of_all(tmp_path_factory: pytest.TempPathFactory, console_server: None) -> Iterator[HubServer]:
    """Serve a Hub at one address, and start the process that commands are forked from which ask it."""
    with served_hub(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture
def hub(hub_of_all: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """Serve a Hub that has nothing yet, and let what is started ask it, with an empty cache."""
    with own_hub(monkeypatch, hub_of_all, tmp_path / "hf") as server:
        yield server
