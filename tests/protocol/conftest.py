"""Fixtures for links within the test's own process."""

from __future__ import annotations

import pytest

from tandem.common.wire import link


@pytest.fixture(autouse=True)
def _patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let links outlast a slow machine: one that is told to end, and does not soon, ends the test's own process."""
    monkeypatch.setattr(link, "SHUTDOWN_GRACE_S", 600.0)
