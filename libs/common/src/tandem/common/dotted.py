"""What a dotted path names: ``package.module.Class``."""

from __future__ import annotations

import importlib
from typing import Any

from tandem.common.errors import ConfigError


def named(path: str, key: str = "") -> Any:
    """Import what a path names. Raises `ConfigError` that begins with `key`, which holds the path, if it cannot be."""
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the module may be anyone's
        reason = str(error)
        if not isinstance(error, ImportError | AttributeError | ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: cannot import {path!r}: {reason}") from error
