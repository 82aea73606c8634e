"""Keep Python's garbage collector from looking for cycles while a process imports or exits.

It would run again and again during imports and find nothing, and twice more at exit. Together that is a third of the
time that a process takes to start and to end. In between, it works as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Disable collection inside the block, which imports much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep() -> None:
    """Exempt all current objects, such as modules, from collection: they live as long as this process."""
    gc.freeze()


def retire() -> None:
    """Stop automatic collection and exempt all current objects: this process is ending.

    Libraries that collect while they are closed then look only at the few objects made since.
    """
    gc.disable()
    gc.freeze()


def retire_at_exit() -> None:
    """Skip the collection at interpreter exit: the process's memory is freed in one piece anyway."""
    atexit.register(gc.freeze)
