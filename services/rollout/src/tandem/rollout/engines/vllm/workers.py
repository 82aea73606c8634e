"""The weights of all workers of one vLLM engine, presented as one engine's, or as ones never refitted.

Every call goes to all workers at once and returns when the last has answered: they receive and digest side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tandem.common.errors import RefitError
from tandem.common.memory import MemoryMeter
from tandem.common.messages import MemoryUse
from tandem.refit import holder, layout, program, transfer
from tandem.refit.digests.comparison import Digests, decode_digests
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.layout import Layout
from tandem.refit.transports.meeting import GroupStore
from tandem.rollout.engines.vllm.insides import InProcessLlm
from tandem.rollout.engines.vllm.landed_slices import check_all_is_held

_NO_REFITS = "the engine has loaded its weights itself, and takes no others"


_SAY_SO_S = 10.0
"""Seconds after a deadline that a worker has to report its failure."""


class WorkersInstalled(NamedTuple):
    """The copies and bytes of all workers' programs in each refit."""

    num_copies: int
    num_bytes: int


class WorkersDigest:
    """A digest to which each worker contributes its own weights."""

    def __init__(self, llm: InProcessLlm, sampling: ElementSampling | None) -> None:
        self._llm = llm
        self.expected_s = max(llm.ask("begin_digest", sampling))
        """Time of the slowest worker; they work at the same time."""

    def advance(self, seconds: float) -> bool:
        """Work for this long; return whether all workers are done."""
        return all(self._llm.ask("advance_digest", seconds))

    def results(self) -> tuple[Digests, ...]:
        """Return the digests of each worker, after doing what is left."""
        return tuple(map(decode_digests, self._llm.ask("digests")))


class WorkersMeter(MemoryMeter):
    """The memory that one worker of an engine takes: of the one that takes most."""

    def __init__(self, llm: InProcessLlm) -> None:
        self._llm = llm

    def begin(self) -> None:
        """Have each worker reset its peak."""
        self._llm.ask("begin_memory")

    def use(self) -> MemoryUse:
        """Return the largest peak since `begin`, and the most that a worker holds now."""
        peaks, bytes_held = zip(*self._llm.ask("memory"), strict=True)
        return MemoryUse(peak=max(peaks), held=max(bytes_held))


class EngineWorkers:
    """The parts of an engine. Methods raise what the parts raise; of several errors, the first."""

    def __init__(self, llm: InProcessLlm) -> None:
        self._llm = llm
        self.layouts = tuple(map(layout.decode, llm.ask("describe")))
        if any(llm.ask("is_learned")):
            check_all_is_held(self.layouts)

    def install(self, programs: Sequence[program.TransferProgram]) -> WorkersInstalled:
        """Bind the program of each worker."""
        counts = self._llm.ask("install", [program.encode(each) for each in programs])
        return WorkersInstalled(sum(copies for copies, _ in counts), sum(num_bytes for _, num_bytes in counts))

    def connect(self, transfer_group: transfer.TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Have each worker in the transfer group join it."""
        self._llm.ask("connect", transfer_group, meeting, timeout_s, timeout_s=timeout_s + _SAY_SO_S)

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Run all programs."""
        counted = self._llm.ask("apply", version, deadline_s, only, joining_engines, timeout_s=deadline_s + _SAY_SO_S)
        return {link: num_bytes for each in counted for link, num_bytes in each.items()}

    def pack(self) -> None:
        """Have kernels compute with the current weights."""
        self._llm.ask("pack")

    def distrust(self, engines: Collection[str]) -> None:
        """Do nothing: only trainers send differences."""

    def digest_task(self, sampling: ElementSampling | None) -> WorkersDigest:
        """Return a task that digests the weights held."""
        return WorkersDigest(self._llm, sampling)

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors with quantised values that do not match what was received."""
        return tuple(dict.fromkeys(name for names in self._llm.ask("misquantised") for name in names))

    def close(self) -> None:
        """Release the programs and leave all transfer groups."""
        self._llm.ask("close")


class NoRefits:
    """Weights that an engine loaded itself and never refits."""

    layouts: tuple[Layout, ...] = ()

    def install(self, programs: Sequence[program.TransferProgram]) -> holder.InstalledPrograms:
        """Refuse to install programs."""
        raise RefitError(_NO_REFITS)

    def connect(self, transfer_group: transfer.TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Refuse to connect."""
        raise RefitError(_NO_REFITS)

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Refuse to apply a version."""
        raise RefitError(_NO_REFITS)

    def distrust(self, engines: Collection[str]) -> None:
        """Do nothing: only trainers send differences."""

    def digest_task(self, sampling: ElementSampling | None) -> holder.RunningDigest:
        """Refuse to digest."""
        raise RefitError(_NO_REFITS)

    def misquantised(self) -> tuple[str, ...]:
        """Return nothing, because nothing was received."""
        return ()

    def close(self) -> None:
        """Do nothing, because there is no program."""
