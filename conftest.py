"""What every test and benchmark needs besides the project: where it is missing, one line says how to install it."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("pytest_timeout") is None:
    # Before pytest refuses the option `timeout` of pyproject.toml, which it does not know without the plugin.
    raise SystemExit("pytest-timeout is not installed: tests and benchmarks need pip install -e '.[dev]'")
