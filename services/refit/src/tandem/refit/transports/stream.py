"""Streams between processes that share no memory, over gloo on CPUs and NCCL on GPUs.

The ends meet in `tandem.refit.transports.exchange`, over groups from `tandem.refit.transports.process_group`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tandem.refit.layout import Address
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports.sizes import DEPTH, bucket_bytes
from tandem.refit.transports.transport import BoundTransfers, Route, TransferEnd, Transport, Wire

if TYPE_CHECKING:  # needs torch
    from tandem.refit.transports.exchange import ChannelExchange


class StreamTransport(Transport):
    """The source sends messages; it reaches everything, and is used where no other transport does."""

    name = "stream"
    is_sent = True
    needs_mesh = True

    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Return True: both ends pack what cannot be sent in place."""
        return True

    def wire(self, route: Route) -> Wire | None:
        """Return the network between hosts; within one, memory if an end is on the CPU."""
        if not route.same_host:
            return "network"
        return "peer_gpu" if route.from_gpu and route.to_gpu else "memory"

    def explain(self, route: Route) -> str:
        """Return the reason as a phrase."""
        return "same host, but the source's memory is not within reach" if route.same_host else "different hosts"

    def buffer_bytes(self, num_members: int, num_bytes: int) -> int:
        """Return the bytes of the messages in transit at once."""
        return DEPTH * bucket_bytes(num_members, num_bytes)

    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        """Cut the transfers into messages, one transfer group after another."""
        from tandem.refit.transports.exchange import ChannelExchange, MeshEnd

        by_mesh: dict[str, list[LinkTransfer]] = {}
        for transfer in transfers:
            by_mesh.setdefault(transfer.transfer_group, []).append(transfer)
        return RoundStreams(
            [
                ChannelExchange(
                    of_mesh, MeshEnd(end.member, end.transfer_groups[name], end.memory, end.device), end.groups
                )
                for name, of_mesh in by_mesh.items()
            ]
        )


class RoundStreams:
    """The streams of one round at one process: an exchange per transfer group."""

    def __init__(self, exchanges: Sequence[ChannelExchange]) -> None:
        self._exchanges = exchanges
        channels = [channel for exchange in exchanges for channel in exchange.channels]
        self.num_copies = sum(channel.num_copies for channel in channels)
        self.num_bytes = sum(channel.transfer.num_bytes for channel in channels)

    def install(self) -> None:
        """Change nothing before the first message."""

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Send and receive."""
        from tandem.refit.transports.exchange import run_all

        run_all(self._exchanges, deadline, only, counted)
