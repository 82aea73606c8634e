"""What integration tests share beyond one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.runs import consoles
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
def hub_console_server(converted_checkpoints: None) -> Iterator[None]:
    """Start the process that commands are forked from which ask a Hub."""
    with consoles.fork_server_without_hub():
        yield


@pytest.fixture(scope="session")
def rank_server(converted_checkpoints: None) -> None:
    """Start the process that ranks are forked from, likewise."""
    trainer_harness.start_server()
