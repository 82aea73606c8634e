"""The weights of an engine that has loaded them itself, and takes no others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tandem.common.errors import RefitError
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.holder import InstalledPrograms, RunningDigest
from tandem.refit.layout import Layout
from tandem.refit.program import TransferProgram
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports.meeting import GroupStore

_NO_REFITS = "the engine has loaded its weights itself, and takes no others"


class NoRefits:
    """Weights that an engine loaded itself and never refits."""

    layouts: tuple[Layout, ...] = ()

    def install(self, programs: Sequence[TransferProgram]) -> InstalledPrograms:
        """Refuse to install programs."""
        raise RefitError(_NO_REFITS)

    def connect(self, transfer_group: TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Refuse to connect."""
        raise RefitError(_NO_REFITS)

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Refuse to apply a version."""
        raise RefitError(_NO_REFITS)

    def distrust(self, engines: Collection[str]) -> None:
        """Do nothing: only trainers send differences."""

    def digest_task(self, sampling: ElementSampling | None) -> RunningDigest:
        """Refuse to digest."""
        raise RefitError(_NO_REFITS)

    def misquantised(self) -> tuple[str, ...]:
        """Return nothing, because nothing was received."""
        return ()

    def close(self) -> None:
        """Do nothing, because there is no program."""
