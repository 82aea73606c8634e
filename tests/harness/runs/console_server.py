"""A fixture for test folders whose tests start console commands: their `conftest.py` imports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.runs import consoles


@pytest.fixture(scope="session", autouse=True)
def console_server() -> Iterator[None]:
    """Start the process that commands are forked from before a test could count it among what the test left behind."""
    with consoles.fork_server():
        yield
