"""Import by dotted path: ``package.module.Class``."""

from __future__ import annotations

import importlib
from typing import Any

from tandem.common.errors import ConfigError


def named(path: str, key: str = "") -> Any:
    """Import the object at a path. Raises `ConfigError`, prefixed with the key that holds the path, if that fails."""
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        reason = str(error)
        if not isinstance(error, ImportError | AttributeError | ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: cannot import {path!r}: {reason}") from error
