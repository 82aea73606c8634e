"""How many processes that were lost a run may still have replaced, of whatever kind."""

from __future__ import annotations

from tandem.common.errors import ServiceLost


class Replacements:
    """Counts them."""

    def __init__(self, most: int, num_before: int = 0) -> None:
        """`num_before` were replaced already."""
        self._most = most
        self._num_losses = num_before

    @property
    def are_left(self) -> bool:
        """Whether one more may be replaced."""
        return self._num_losses < self._most

    def count(self, member: str, doing: str, why: str) -> None:
        """Count the loss of a process that is to be replaced. Raises `ServiceLost` if it must not be any more."""
        self._num_losses += 1
        if self._num_losses > self._most:
            times = f"; processes were replaced {self._most} times before" if self._most else ""
            raise ServiceLost(member, doing, why + times)
