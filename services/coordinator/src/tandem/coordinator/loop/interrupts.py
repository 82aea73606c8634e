"""Requests to end a run: from signals, and from observers that may ask as Ctrl-C does."""

from __future__ import annotations

import math
import signal
import time
from collections import deque

from tandem.common.signals import ASKED_ONCE_S

_HEARD = "interrupted: finishing or abandoning the step; press Ctrl-C again to stop at once"


class PendingInterrupts:
    """Pending requests to end the run. The first ends it after the step, the second at once."""

    def __init__(self) -> None:
        self._signals: deque[tuple[int, float]] = deque()
        """Signals not yet looked at, with the times they came."""
        self._pending: deque[str] = deque()
        self._heard_at = -math.inf
        self.is_goal_reached = False
        """Whether the end was asked for because the run has reached its goal."""

    def hear(self, number: int) -> None:
        """Take a signal; called where signals are handled."""
        # Nothing is decided here: the next signal may interrupt this call.
        self._signals.append((number, time.monotonic()))

    def ask(self, reason: str) -> None:
        """Ask for the end of the run in place of a signal, and say why; a run that is ending is left alone."""
        if not self.were_heard:
            self._pending.append(reason)

    def reach(self, reason: str) -> None:
        """Ask for the end of the run because it has reached its goal, and say why."""
        self.is_goal_reached = True
        self.ask(reason)

    @property
    def were_heard(self) -> bool:
        """Whether a signal has asked for the end."""
        return bool(self._signals) or self._heard_at > -math.inf

    @property
    def are_there(self) -> bool:
        """Whether a request is pending."""
        self._look_at_signals()
        return bool(self._pending)

    def take(self) -> str | None:
        """Take one request and return its reason; return None if there is none."""
        self._look_at_signals()
        return self._pending.popleft() if self._pending else None

    def _look_at_signals(self) -> None:
        while self._signals:
            number, at = self._signals.popleft()
            # `timeout` and systemd ask twice at once; only the user's second Ctrl-C means it.
            if number == signal.SIGINT or at - self._heard_at > ASKED_ONCE_S:
                self._pending.append(_HEARD)
            self._heard_at = at
