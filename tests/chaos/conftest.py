"""How much chaos: `--chaos-kills`, or `TANDEM_CHAOS_KILLS`, 300 in the long form; by a seed of the day."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from tests.harness.runs.console_server import console_server as console_server

_KILLS = int(os.environ.get("TANDEM_CHAOS_KILLS", "2"))
"""Few, and others every day: what an error says has the seed to repeat them by."""
_SEED = datetime.date.today().toordinal()
_LEAST_S, _KILL_S = 600.0, 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-kills", type=int, default=_KILLS, metavar="N", help=f"(default: {_KILLS})")
    parser.addoption("--chaos-seed", type=int, default=_SEED, metavar="SEED", help="(default: the day's)")
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
    return option("--chaos-kills", _KILLS), option("--chaos-seed", _SEED), option("--chaos-report", None)
