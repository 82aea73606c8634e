"""How long the fuzzing takes: `--fuzz-messages`, 10,000 in the long form."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.runs.console_server import console_server as console_server

_MESSAGES = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-messages", type=int, default=_MESSAGES, metavar="N", help=f"messages to send (default: {_MESSAGES})"
    )
    parser.addoption("--fuzz-anew", action="store_true", help="other messages each time, not those of a fixed seed")


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> settings:
    """Return how many messages hypothesis makes, and from which seed."""
    return settings(
        max_examples=request.config.getoption("--fuzz-messages", _MESSAGES),
        derandomize=not request.config.getoption("--fuzz-anew", False),
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
