"""Where programs of the user's are found: beside the interpreter that Tandem runs on, and on the path."""

from __future__ import annotations

import os
import sys


def search_path() -> str:
    """Return the path on which they are looked for, so that `python` is that interpreter."""
    return os.pathsep.join(filter(None, [os.path.dirname(sys.executable), os.environ.get("PATH")]))
