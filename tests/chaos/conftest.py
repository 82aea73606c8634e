"""How much chaos: `--chaos-kills`, 300 in the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.console_server import console_server as console_server

_KILLS = 4
_LEAST_S, _KILL_S = 600.0, 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-kills", type=int, default=_KILLS, metavar="N", help=f"(default: {_KILLS})")
    parser.addoption("--chaos-seed", type=int, default=1, metavar="SEED")
    parser.addoption("--chaos-report", type=Path, metavar="FILE", help="tables, in two files of such names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests as long as their kills may take."""
    most = pytest.mark.timeout(max(_LEAST_S, _KILL_S * config.getoption("--chaos-kills", _KILLS)))
    for item in items:
        if "chaos" in getattr(item, "fixturenames", ()):
            item.add_marker(most)


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> tuple[int, int, Path | None]:
    """Return how many processes are to be killed, the seed, and where the table is wanted."""
    option = request.config.getoption
    return option("--chaos-kills", _KILLS), option("--chaos-seed", 1), option("--chaos-report", None)
