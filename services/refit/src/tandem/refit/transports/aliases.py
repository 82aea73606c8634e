"""The zero-copy transfers of one round at their receiver."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tandem.common.worker_shards import process_of
from tandem.refit.transports.end import TransferEnd

if TYPE_CHECKING:
    import torch


class AliasTransfers:
    """The zero-copy transfers of one round at their receiver."""

    def __init__(
        self, links: Sequence[str], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], end: TransferEnd
    ) -> None:
        """Hold each parameter with the range that it is to point at."""
        self.num_copies = self.num_bytes = 0
        self._links, self._pairs, self._end = links, pairs, end

    def install(self) -> None:
        """Point the parameters at the sources' memory; from now on each optimizer step is visible immediately."""
        for parameter, range_ in self._pairs:
            parameter.data = range_

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Count the links; there is nothing to move."""
        if only is None or process_of(self._end.member) in only:
            for link in self._links:
                counted.setdefault(link, 0)
