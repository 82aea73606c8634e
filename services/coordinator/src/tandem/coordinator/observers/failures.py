"""Exceptions of observers: counted, and said, while the run goes on."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ObserverFailures:
    """The exceptions of a run's observers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Exceptions, by observer and method."""
        self.lines: list[str] = []
        """Lines about exceptions that were not taken yet."""

    def note(self, method: Callable[..., Any], error: Exception) -> None:
        """Count an exception, and keep a line about it: of the first, the tenth, the hundredth, ... of a method."""
        name = method.__qualname__
        self.counts[name] += 1
        count = self.counts[name]
        if str(count).strip("0") == "1":
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            text = " ".join(f"{type(error).__name__}: {error}".split())
            times = "" if count == 1 else f", {count} times so far"
            self.lines.append(
                f"warning: the observer {name} has failed ({text}, at {place}){times}: the run goes on without what it "
                "would have shown; please report this"
            )
