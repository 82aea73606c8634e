"""The common part of engines: hold one whole weight version or none, pause, refuse requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from tandem.common.errors import DataError, RefitError
from tandem.common.memory import MemoryMeter
from tandem.common.worker_shards import process_of
from tandem.refit import holder, program, transfer
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.layout import Layout
from tandem.refit.transports.meeting import GroupStore
from tandem.rollout.engine import DraftMeter, SequenceRequest, VersionNotHeld
from tandem.rollout.engines.served import ServedSampling
from tandem.rollout.engines.stopping import Detokenizer, StopStrings, load_detokenizer


class EngineWeights(holder.WeightHolder, Protocol):
    """The weights of an engine: in this process, or in those of its workers."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout that each slice wants."""
        ...

    def close(self) -> None:
        """Release the programs and leave all transfer groups."""
        ...


class RefittedEngine:
    """The part of `tandem.rollout.engine.Engine` that concerns weights and whether tokens may be made.

    A subclass generates, and updates whatever else depends on the weights in `_take_weights`.
    """

    weights_sleep = False
    """Whether the memory of the weights is also released while the engine sleeps; on a CPU it is not."""

    def __init__(self, model_folder: Path, weights: EngineWeights, max_length: int, length_key: str) -> None:
        """Hold no version yet. `max_length` is the longest sequence, prompt included, which `length_key` configures."""
        self._model_folder = model_folder
        self._weights = weights
        self._max_length = max_length
        self._length_key = length_key
        self._member = ""
        """The engine's name in the run, once a program is installed."""
        self.meter = MemoryMeter()
        self.drafts: DraftMeter | None = None
        self.version: int | None = None
        """Weight version that the engine holds; None while it holds none, or a partial one."""
        self._is_paused = False
        self._is_asleep = False
        self._detokenizer: Detokenizer | None = None

    def pause(self) -> None:
        """Keep the requests and their caches, and make no token until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    def layouts(self) -> tuple[Layout, ...]:
        """Describe the weights that each of its slices wants, read from the live parameters."""
        return self._weights.layouts

    def install(self, programs: Sequence[program.TransferProgram]) -> holder.InstalledPrograms:
        """Bind the program of each slice to its parameters, replacing the previous one.

        The engine holds no version until `apply`. Raises `RefitError`.
        """
        self.version = None
        self._member = process_of(programs[0].member)
        return self._weights.install(programs)

    def connect(self, transfer_group: transfer.TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Join a transfer group over which weights stream. Raises `RefitError`."""
        self._weights.connect(transfer_group, meeting, timeout_s)

    def apply(
        self,
        version: int,
        deadline_s: float,
        only: Collection[str] = (),
        joining_engines: Collection[str] | None = None,
    ) -> dict[str, int]:
        """Run the installed program and hold `version`; return the bytes on each link.

        Running requests go on; their tokens carry the new version from here on. If this raises `RefitError`, `version`
        is None until a later `apply` succeeds. An engine that is not among `only` only passes its weights on.
        `joining_engines` are the joining engines, which also get what never changes; None means all.
        """
        if only and self._member not in only:
            return self._weights.apply(version, deadline_s, only, joining_engines)
        self.version = None
        num_bytes = self._weights.apply(version, deadline_s, only, joining_engines)
        self._take_weights()
        self.version = version
        return num_bytes

    def distrust(self, engines: Collection[str]) -> None:
        """Do nothing: only trainers send differences."""

    def digest_task(self, sampling: ElementSampling | None) -> holder.RunningDigest:
        """Return a task that digests the weights in use."""
        return self._weights.digest_task(sampling)

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors with quantised values that do not match what was received."""
        return self._weights.misquantised()

    def _take_weights(self) -> None:
        """Update what was derived from the previous weights."""

    def _require_version(self) -> int:
        """Return the version that makes tokens now.

        Raises `RefitError` if the engine holds no whole version, `RuntimeError` if it sleeps.
        """
        if self.version is None:
            raise RefitError("the engine holds no whole weight version: it serves no token until a refit has succeeded")
        if self._is_asleep:
            raise RuntimeError("step called while the engine sleeps")
        return self.version

    def _require_room(self, request: SequenceRequest) -> None:
        """Raise `DataError` if the request cannot make a single token."""
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise DataError(f"request {request.request_id}: the prompt is empty")
        if num_prompt >= self._max_length:
            raise DataError(
                f"request {request.request_id}: a prompt of {num_prompt} tokens leaves no room to generate within "
                f"{self._length_key}={self._max_length}"
            )

    def _require_held(self, request: SequenceRequest) -> None:
        """Raise `VersionNotHeld` if the request names a version that the engine does not hold."""
        if isinstance(request.sampling, ServedSampling):
            version = request.sampling.weight_version
            if version is not None and not self._holds(version):
                raise VersionNotHeld(f"the engine does not hold weight version {version}")

    def _holds(self, version: int) -> bool:
        return version == self.version

    def _stop_strings(self, request: SequenceRequest) -> StopStrings:
        """Return the watch over the text of a request that has stop strings."""
        if self._detokenizer is None:
            self._detokenizer = load_detokenizer(self._model_folder)
        stop_strings = StopStrings(self._detokenizer, request.sampling.stop_strings)
        for token_id in request.prompt_ids[len(request.prompt_ids) - request.num_made :]:
            stop_strings.push(token_id)
        return stop_strings
