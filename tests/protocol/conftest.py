"""Fixtures for links within the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.common.wire import pump


@pytest.fixture(autouse=True)
def _patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let links outlast a slow machine: one that is told to end, and does not soon, ends its process, the test's own."""
    monkeypatch.setattr(pump, "SHUTDOWN_GRACE_S", 600.0)
