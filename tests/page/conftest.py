"""Tests of the page in a real browser share the browser, and the runs that they look at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import leaks
from tests.harness.runs.console_server import console_server as console_server
from tests.page.browser_harness import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(console_server: None) -> Iterator[None]:
    """Look once, when the browser is gone: it starts and ends processes as it likes."""
    before, segments = leaks.processes(), leaks.segments()
    yield
    deadline = time.monotonic() + leaks.SETTLE_S
    while (left := leaks.processes() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not leaks.segments_left(segments)
