"""A complaint about one key, before anyone knows which file to blame."""

from __future__ import annotations

import json

MAX_SHOWN = 80
"""Characters of a value that an error shows."""


class Invalid(Exception):
    """The value at a key cannot be used; `load` adds the file and makes it a `ConfigError`."""

    def __init__(self, key: str, text: str) -> None:
        self.key = key
        self.text = text
        super().__init__(f"{key}: {text}")


def shown(value: object) -> str:
    """Show a value as YAML would write it, on one line, shortened if it is long."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.splitlines())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
