"""Pictures of a conversation: a file as the content part that OpenAI's API takes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tandem.common.errors import ConfigError
from tandem.common.files import irregular
from tandem.samples.images.reading import kind_of

_MAX_BYTES = 12 * 2**20
"""Most bytes of a file: our servers take requests of a third more, which is what base64 makes of them."""


def image_part(path: Path) -> dict[str, Any]:
    """Return a file's content part. Raises `ConfigError` if it cannot be read, or is no picture."""
    try:
        if (kind := irregular(path)) is not None:
            raise ConfigError(f"the image {str(path)!r} is {kind}, not a file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot read the image {str(path)!r}: {reason}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"the image {str(path)!r} has over {_MAX_BYTES // 2**20} MiB")
    format_name = kind_of(data)
    if format_name is None:
        raise ConfigError(f"the image {str(path)!r} is no PNG, JPEG, WEBP or GIF")
    uri = f"data:image/{format_name.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}
