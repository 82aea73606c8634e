"""The protocol of transports: which bytes one can bring, by which wire, why, and both its ends.

The planner asks the questions of `Transport`'s first half, about kinds of places (`Route`): that half needs no torch.
A process that ties its program to memory (`tandem.refit.bound`) calls `Transport.bind`, at the receiver and, where the
source takes part, at the sender. To add a transport, write a module with a subclass and name it in
`tandem.refit.transports.registry`; the planner stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.worker_shards import process_of
from tandem.refit.columns import Ints
from tandem.refit.layout import Address, Layout, Storage
from tandem.refit.transfer import Copies, Mesh, Transfer

if TYPE_CHECKING:  # the planner runs in processes without torch
    import torch

    from tandem.refit.transports.memory import Memory
    from tandem.refit.transports.process_group import Group

Wire = Literal["memory", "same_gpu", "peer_gpu", "network"]
"""What bytes pass through: a key of ``cluster.links``, which has its rate."""


class Route(msgspec.Struct, frozen=True):
    """From which kind of place bytes go to which."""

    same_host: bool
    same_device: bool
    """Of one host: whether both lie on the same GPU, or both on the CPU."""
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


class End(NamedTuple):
    """One process's end of its transfers: what a transport ties them to."""

    member: str
    memory: Memory
    device: torch.device
    """Of the parameters."""
    meshes: Mapping[str, Mesh]
    """Of the program, by name."""
    groups: Mapping[str, Group]
    """Connected meshes by name, to be looked up at each run."""
    opened: dict[tuple[str, str], torch.Tensor]
    """The bytes of other processes' storages that are open, by process and storage: each is opened once."""

    def open_once(self, source: str, storage: Storage, open_storage: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the bytes of a storage of another process; `open_storage` opens it if nothing has yet."""
        key = source, storage.name
        if key not in self.opened:
            self.opened[key] = open_storage()
        return self.opened[key]

    def takes_part(self, only: Collection[str] | None) -> bool:
        """Say whether this process is among those that receive; `only` is that of `BoundTransfers.run`."""
        return only is None or process_of(self.member) in only


class BoundTransfers(Protocol):
    """The transfers of one round that go by one transport, tied to memory at one of their ends."""

    num_copies: int
    num_bytes: int
    """Bytes that one run moves over the links that this process has a part in."""

    def install(self) -> None:
        """Make the one change to parameters that comes before any run. Called when nothing can fail any more."""
        ...

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Do this process's part of one round.

        Args:
            deadline: when it fails, on the monotonic clock.
            only: processes to serve, this one among them if it is to receive; None for all.
            counted: grows by the bytes that went over each link, by ``source>destination``.

        Raises:
            RefitError: names this process, what it was doing and the peer.

        """
        ...


class Transport(ABC):
    """A way for bytes to get from one process to another."""

    name: ClassVar[str]
    """What plans, programs and reports call it."""
    is_sent: ClassVar[bool]
    """Whether the source sends; otherwise it does nothing, and the receiver copies out of its memory."""
    needs_mesh: ClassVar[bool] = False
    """Whether the processes have to be connected first, in a `Mesh`."""
    in_place_of: ClassVar[str] = ""
    """The transport that this one spares copies of: the destination then reads the source's memory in place."""

    @abstractmethod
    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Say whether it can bring bytes out of a kind of memory over a route."""

    @abstractmethod
    def wire(self, route: Route) -> Wire | None:
        """Return what the bytes pass through, whose rate ``cluster.links`` has; None if nothing moves."""

    @abstractmethod
    def why(self, route: Route) -> str:
        """Return a phrase that says why it was chosen for a route, for people who read a plan."""

    def preference(self, route: Route) -> int:
        """Return how much it is preferred: of all replicas of a tensor, only those with the highest number serve."""
        return 0

    def buffer_bytes(self, num_members: int, num_bytes: int) -> int:
        """Return the memory that a transfer of so many bytes takes at each end, in a mesh of so many processes."""
        return 0

    def reads_in_place(self, copies: Copies, num_bytes_D: Ints) -> NDArray[np.bool_]:
        """Say which of the copies of `in_place_of` need not be made, because the destination can read in place.

        Args:
            copies: as few as possible.
            num_bytes_D: of each destination storage; 0 where it must not be read in place.

        """
        return np.zeros(len(copies), np.bool_)

    @abstractmethod
    def bind(self, transfers: Sequence[Transfer], end: End) -> BoundTransfers:
        """Tie the transfers of one round, received and sent, to memory.

        Raises:
            RefitError: a source cannot be opened, or memory is not what was planned for. Nothing was touched.

        """
