"""A process that imports what a trainer, or an engine, does, says so, and waits to be killed; see `test_start`."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Import what the service named first does."""
    importlib.import_module(f"tandem.{arguments[0]}.cli").preload()
    print("ready", flush=True)
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
