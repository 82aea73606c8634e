"""How bytes move from one process to another: one module a transport, both ends in it."""

from __future__ import annotations

from typing import Protocol


class BoundProgram(Protocol):
    """A transfer program whose sources are open and whose destinations are the engine's live tensors."""

    num_copies: int
    num_bytes: int
    """Bytes one run moves."""

    def run(self) -> int:
        """Copy everything once; return the bytes moved. Raises `RefitError`."""
        ...

    def close(self) -> None:
        """Unmap the sources."""
        ...
