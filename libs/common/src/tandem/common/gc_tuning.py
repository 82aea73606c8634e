"""Keep Python's garbage collector from looking for cycles while a process imports, or ends.

While modules are imported it would look again and again and find nothing, and twice more when the process ends:
together, a third of the time that a process takes to start and to end. In between it works as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing inside the block, which imports much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep() -> None:
    """Never look again at what there is now, such as modules: it stays as long as this process."""
    gc.freeze()


def retire() -> None:
    """Collect nothing by itself from here on, and look at nothing that there is now: this process ends.

    Libraries that ask for a collection while they are closed get one over what has been made since, which is little.
    """
    gc.disable()
    gc.freeze()


def retire_at_exit() -> None:
    """Have Python collect nothing when this process ends: its memory goes back in one piece."""
    atexit.register(gc.freeze)
