"""Requests to end a run: from signals, and from observers that may ask as Ctrl-C does."""

from __future__ import annotations

import math
import signal
import time
from collections import deque

from tandem.common.signals import ASKED_ONCE_S

_HEARD = "interrupted: finishing or abandoning the step; press Ctrl-C again to stop at once"


class Interrupts:
    """Pending requests to end the run. The first ends it after the step, the second at once."""

    def __init__(self) -> None:
        self._pending: deque[str] = deque()
        self._heard_at = -math.inf
        self.is_goal_reached = False
        """Whether the end was asked for because the run has reached its goal."""

    def hear(self, number: int) -> None:
        """Take a signal; called where signals are handled."""
        # `timeout` and systemd ask twice at once; only the user's second Ctrl-C means it.
        now = time.monotonic()
        if number == signal.SIGINT or now - self._heard_at > ASKED_ONCE_S:
            self._pending.append(_HEARD)
        self._heard_at = now

    def ask(self, why: str) -> None:
        """Ask for the end of the run in place of a signal, and say why; a run that is ending is left alone."""
        if not self.were_heard:
            self._pending.append(why)

    def reach(self, why: str) -> None:
        """Ask for the end of the run because it has reached its goal, and say why."""
        self.is_goal_reached = True
        self.ask(why)

    @property
    def were_heard(self) -> bool:
        """Whether a signal has asked for the end."""
        return self._heard_at > -math.inf

    @property
    def are_there(self) -> bool:
        """Whether a request is pending."""
        return bool(self._pending)

    def take(self) -> str | None:
        """Take one request and return its reason; return None if there is none."""
        return self._pending.popleft() if self._pending else None
