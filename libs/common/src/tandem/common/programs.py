"""The search path for programs of the user: the interpreter's folder, then ``PATH``."""

from __future__ import annotations

import os
import sys


def search_path() -> str:
    """Return the search path, with the folder of this interpreter first, so that `python` is this one."""
    return os.pathsep.join(filter(None, [os.path.dirname(sys.executable), os.environ.get("PATH")]))
