"""Tests with the real SDK of Tinker: skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.harness.runs import consoles

if importlib.util.find_spec("tinker") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def console_server() -> Iterator[None]:
    """Start the process that commands are forked from before a test could count it among what the test left behind."""
    with consoles.fork_server():
        yield
