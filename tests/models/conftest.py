"""What tests of types of models share: the process that they are forked from has imported what all of them need."""

from __future__ import annotations

import pytest

from tests.harness.model_types.table import start_server


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Start the process that ranks are forked from."""
    start_server()
