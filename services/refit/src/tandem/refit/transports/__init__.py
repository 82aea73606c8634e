"""How bytes move from one process to another: one module a transport, both ends in it.

`bind` ties a `tandem.refit.program.TransferProgram` to live memory; the result runs it again and again, with nothing
looked up and nothing decided. Every process of a refit binds its own program: engines pull through `shm` and
`cuda_ipc`, and the two ends of a `stream` meet in `BoundProgram.run`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tandem.refit.program import TransferProgram
    from tandem.refit.transports.stream import Group


class BoundProgram(Protocol):
    """A transfer program tied to memory: its sources are open, its destinations are the process's live tensors."""

    num_copies: int
    num_bytes: int
    """Bytes that one run moves over the links that this process has a part in."""
    staging: Mapping[str, torch.Tensor]
    """Memory beside the parameters, as uint8, by its name in the program: what is quantised from here."""

    def run(self, deadline_s: float, only: Collection[str] | None = None) -> dict[str, int]:
        """Do this process's part of one refit, and return when all of it is done.

        Args:
            deadline_s: seconds until it fails.
            only: processes to serve, this one among them if it is to receive; None for all.

        Returns:
            bytes counted on each link, by ``source>destination``.

        Raises:
            RefitError: names this process, what it was doing, the peer and the tensor. What is held here may be torn.
                Links that have nothing to do with the failure have been served.

        """
        ...

    def misquantised(self) -> tuple[str, ...]:
        """Quantise once more, and return the tensors of which this process holds something else."""
        ...

    def close(self) -> None:
        """Let go of all memory. The groups that were given to `bind` stay as they are."""
        ...


def bind(
    program: TransferProgram, storages: Mapping[str, torch.Tensor], meshes: Mapping[str, Group] | None = None
) -> BoundProgram:
    """Tie a program to memory.

    Args:
        program: made by `tandem.refit.planner`, for this process.
        storages: this process's live memory by storage name. Byte 0 of a storage is the first element of its tensor.
            A tensor of ``uint8`` stands for memory of any type. Parameters that are aliased are re-pointed at the
            source's memory here and now: each optimizer step shows through at once, and a write to them faults.
        meshes: the group of each mesh of the program (`stream.connect`), by name. They are looked up at each run, so
            they can be connected, and after a failure connected anew, when the program is bound already.

    Raises:
        RefitError: a source cannot be opened, or memory is not what was planned for. Nothing here was touched.

    """
    from tandem.refit.transports.bound import bind_memory  # which needs torch; the protocol above does not

    return bind_memory(program, storages, {} if meshes is None else meshes)
