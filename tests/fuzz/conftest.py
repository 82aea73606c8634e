"""How long the fuzzing takes: `--fuzz-messages`, 10,000 in the long form."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

_MESSAGES = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-messages", type=int, default=_MESSAGES, metavar="N", help=f"messages to send (default: {_MESSAGES})"
    )
    parser.addoption("--fuzz-anew", action="store_true", help="other messages each time, not those of a fixed seed")


def pytest_configure(config: pytest.Config) -> None:
    """Have hypothesis make as many messages, of a fixed seed unless it is to be another each time."""
    settings.register_profile(
        "fuzz",
        max_examples=config.getoption("--fuzz-messages", _MESSAGES),
        derandomize=not config.getoption("--fuzz-anew", False),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("fuzz")
