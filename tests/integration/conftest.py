"""What integration tests share beyond one test."""

from __future__ import annotations

import pytest

from tests.integration import trainer_harness


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Start the process that ranks are forked from before a test could count it among what the test left behind."""
    trainer_harness.start_server()
