"""The protocol of transports: which bytes each can move, over which wire, why, and its two ends.

The planner uses only the first half of `Transport`, which asks about kinds of places (`Route`) and needs no torch. A
process that binds its program to memory (`tandem.refit.weights`) calls `Transport.bind`, at the receiver and, if the
source takes part, at the sender. To add a transport, write a module with a subclass and list it in
`tandem.refit.transports.registry`; the planner stays unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.columns import Ints
from tandem.refit.layout import Address, Layout, Storage
from tandem.refit.transfer import CopyColumns, LinkTransfer, TransferGroup

if TYPE_CHECKING:
    import torch

    from tandem.refit.transports.memory import NamedStorages
    from tandem.refit.transports.process_group import ConnectedGroup

Wire = Literal["memory", "same_gpu", "peer_gpu", "network"]
"""The medium that bytes pass through: a key of ``cluster.links``, which has its rate."""


class TransferEnd(NamedTuple):
    """One process's end of its transfers, to which a transport binds them."""

    member: str
    memory: NamedStorages
    device: torch.device
    """Device of the parameters."""
    transfer_groups: Mapping[str, TransferGroup]
    """The program's transfer groups, by name."""
    groups: Mapping[str, ConnectedGroup]
    """Connected transfer groups by name, looked up at each run."""
    opened: dict[tuple[str, str], torch.Tensor]
    """Opened storages of other processes, by process and storage: each is opened once."""

    def open_once(self, source: str, storage: Storage, open_storage: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the bytes of another process's storage; `open_storage` opens it the first time."""
        key = source, storage.name
        if key not in self.opened:
            self.opened[key] = open_storage()
        return self.opened[key]


class Route(msgspec.Struct, frozen=True):
    """The kinds of places between which bytes move."""

    same_host: bool
    same_device: bool
    """Whether both are on the same GPU, or both on the CPU, of one host."""
    from_gpu: bool
    to_gpu: bool

    @classmethod
    def between(cls, source: Layout, destination: Layout) -> Route:
        """Return the route from one process to another."""
        same_host = source.host == destination.host
        same_device = same_host and source.device == destination.device
        return cls(same_host, same_device, source.device != "cpu", destination.device != "cpu")

    def __str__(self) -> str:
        source, destination = ("a GPU" if is_gpu else "a CPU" for is_gpu in (self.from_gpu, self.to_gpu))
        return f"from {'the same' if self.same_host else 'another'} host, from {source} to {destination}"


class BoundTransfers(Protocol):
    """The transfers of one round and one transport, bound to memory at one of their ends."""

    num_copies: int
    num_bytes: int
    """Bytes that one run moves over this process's links."""

    def install(self) -> None:
        """Change the parameters once before any run. Called when nothing can fail any more."""
        ...

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Do this process's part of one round.

        Args:
            deadline: on the monotonic clock; when it passes, the run fails.
            only: processes to serve, including this one if it is to receive; None for all.
            counted: the bytes that go over each link are added here, by ``source>destination``.

        Raises:
            RefitError: names this process, its operation and the peer.

        """
        ...


class Transport(ABC):
    """A way to move bytes from one process to another."""

    name: ClassVar[str]
    """Name in plans, programs and reports."""
    is_sent: ClassVar[bool]
    """Whether the source sends; otherwise it does nothing, and the receiver copies out of its memory."""
    needs_mesh: ClassVar[bool] = False
    """Whether the processes must first be connected in a transfer group."""
    in_place_of: ClassVar[str] = ""
    """Transport that this one replaces where the destination can read the source's memory in place."""

    @abstractmethod
    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Return whether it can move bytes out of a kind of memory over a route."""

    @abstractmethod
    def wire(self, route: Route) -> Wire | None:
        """Return the medium that the bytes pass through, with its rate in ``cluster.links``; None if nothing moves."""

    @abstractmethod
    def explain(self, route: Route) -> str:
        """Return the reason for choosing it for a route, as a phrase for readers of a plan."""

    def preference(self, route: Route) -> int:
        """Return its preference: of a tensor's replicas, only those with the highest number serve."""
        return 0

    def buffer_bytes(self, num_members: int, num_bytes: int) -> int:
        """Return the memory that a transfer of `num_bytes` takes at each end, in a group of `num_members`."""
        return 0

    def reads_in_place(self, copies: CopyColumns, num_bytes_D: Ints) -> NDArray[np.bool_]:
        """Return which copies of `in_place_of` can be replaced, because the destination can read in place.

        Args:
            copies: merged as far as possible.
            num_bytes_D: of each destination storage; 0 if it must not be read in place.

        """
        return np.zeros(len(copies), np.bool_)

    @abstractmethod
    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        """Bind the transfers of one round, received and sent, to memory.

        Raises:
            RefitError: a source cannot be opened, or memory differs from the plan. Nothing was changed.

        """
