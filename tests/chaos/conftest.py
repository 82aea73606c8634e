"""How much chaos: `--chaos-kills`, 300 in the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.console_server import console_server as console_server

_KILLS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-kills", type=int, default=_KILLS, metavar="N", help=f"(default: {_KILLS})")
    parser.addoption("--chaos-seed", type=int, default=1, metavar="SEED")
    parser.addoption("--chaos-report", type=Path, metavar="FILE", help="add the table to a file")


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> tuple[int, int, Path | None]:
    """Return how many processes are to be killed, the seed, and where the table is wanted."""
    option = request.config.getoption
    return option("--chaos-kills", _KILLS), option("--chaos-seed", 1), option("--chaos-report", None)
