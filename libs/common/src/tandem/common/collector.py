"""Python's garbage collector, kept from looking where it finds nothing: through all that importing torch makes.

It would do so again and again while modules are imported, and twice when a process ends: together, a third of the time
that a process takes to start and to end.
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
    """Collect nothing from here on, whoever asks: this process ends, and its memory goes back in one piece."""
    gc.disable()
    gc.collect = lambda generation=2: 0


def retire_at_exit() -> None:
    """Have Python collect nothing when this process ends: its memory goes back in one piece."""
    atexit.register(gc.freeze)
