"""The protocol of generation engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import DataError
from tandem.common.memory import MemoryMeter
from tandem.common.messages import Media, SamplingParameters
from tandem.refit import holder, program, transfer
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.layout import Layout
from tandem.refit.transports.meeting import GroupStore
from tandem.samples.sampling_masks import SamplingMasks


class VersionNotHeld(DataError):
    """A request names a weight version that the engine does not hold."""


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters
    seed: int
    """Unsigned 64-bit seed. Token ``i`` of the response is a function of the weights, the prefix, the seed and
    ``i``."""
    num_made: int = 0
    """Tokens at the end of the prompt that belong to the response, of a request that left the engine and continues.
    An engine that cannot draw its next token as if the request had stayed draws it in another way."""
    media: Media = ()
    """Images whose features stand in the prompt, in order."""
    is_external: bool = False
    """Whether the request is external. It goes before waiting requests, and none of these may find its keys cached."""


Alternatives: TypeAlias = list[tuple[int, float]]
"""Tokens that could have been drawn at a position, the likeliest first, with their log-probabilities."""


class PromptScores(msgspec.Struct, frozen=True, kw_only=True):
    """The model's own probabilities of a prompt's tokens; ``P`` counts those that have one, all but the first."""

    logprobs_P: NDArray[np.float32]
    """Log-probability of each token after those before it: at temperature 1, nothing cut off."""
    alternatives: list[Alternatives]
    """The likeliest tokens in the place of each, as many as the request asked for."""


class EngineCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sequence; ``T`` counts the tokens the engine made, the stop token included."""

    request_id: int
    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Log-probability of each token under the distribution it was drawn from: temperature, min-p, top-k and top-p
    applied."""
    versions_T: NDArray[np.int32]
    """Weight version that made each token."""
    finish_reason: Literal["stop", "length", "abort"]
    routed_experts_TX: NDArray[np.uint8] | None = None
    """Expert routing of each token the engine computed (`tandem.samples.routed_experts`): the prompt and all but the
    last token. None unless the engine was asked for it, and for external requests."""
    alternatives: list[Alternatives] | None = None
    """Alternatives to each token; None unless the request asked for them."""
    masks: SamplingMasks | None = None
    """Sampling mask of each token; None where nothing was cut off, or the engine was not asked for masks."""
    prompt_scores: PromptScores | None = None
    """Probabilities of the prompt's tokens; None unless the request asked for them."""


class NewTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Some tokens of one sequence, in order; the fields are those of `EngineCompletion`."""

    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    alternatives: list[Alternatives] | None = None
    masks: SamplingMasks | None = None
    prompt_scores: PromptScores | None = None


class DraftMeter(Protocol):
    """Meter of the tokens that an engine drafts."""

    def take(self) -> tuple[int, int]:
        """Return the tokens drafted since the last call, and those of them that were accepted."""
        ...


class Engine(Protocol):
    """Tokens in, tokens out; weights arrive in place by refit.

    One thread drives an engine. It starts without weights and refuses to step until `apply` has given it a whole
    version.
    """

    meter: MemoryMeter
    """Meter of the memory that the engine takes; of its workers, that of the one that takes most."""
    drafts: DraftMeter | None
    """None where nothing is drafted."""

    @property
    def version(self) -> int | None:
        """Weight version that the engine holds; None while it holds none, or a partial one."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        ...

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request; it joins at the next `step` that has room. Raises `DataError` if it cannot make a token."""
        ...

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; return those that finished, in request order.

        Raises `RefitError` if the engine holds no whole version.
        """
        ...

    def made(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """Return what running requests have made from these tokens on, by id; unknown ids are left out.

        Used to show responses while they grow; `step` returns them whole.
        """
        ...

    def abort(self, request_id: int) -> EngineCompletion | None:
        """Stop a request and return what it has made; None if it is unknown."""
        ...

    def pause(self) -> None:
        """Keep the requests and their caches, and make no token until `resume`."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def layouts(self) -> tuple[Layout, ...]:
        """Describe the weights that each of its slices wants, read from the live parameters."""
        ...

    def install(self, programs: Sequence[program.TransferProgram]) -> holder.InstalledPrograms:
        """Bind the program of each slice to its parameters, replacing the previous one.

        The engine holds no version until `apply`. Raises `RefitError`.
        """
        ...

    def connect(self, transfer_group: transfer.TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Join a transfer group over which the installed programs stream weights. Raises `RefitError`."""
        ...

    def apply(
        self,
        version: int,
        deadline_s: float,
        only: Collection[str] = (),
        joining_engines: Collection[str] | None = None,
    ) -> dict[str, int]:
        """Run the installed program and hold `version`; return the bytes on each link.

        `only` names the engines to bring to `version`; empty means all. An engine that is not named only passes its
        weights on. A named one is partial from the first byte to the last: if this raises, `version` is None until a
        later `apply` succeeds. `joining_engines` also get what never changes; None means all.
        Raises `RefitError`.
        """
        ...

    def recompute_caches(self) -> None:
        """Have running requests compute all their keys and values anew before their next token.

        Without it they keep their keys and values after `apply`. Requests added after `apply` never use those of
        earlier weights.
        """
        ...

    def distrust(self, engines: Collection[str]) -> None:
        """Do nothing: only trainers send differences."""
        ...

    def digest_task(self, sampling: ElementSampling | None) -> holder.RunningDigest:
        """Return a task that digests the weights in use (`tandem.refit.digests.task`), beside other work."""
        ...

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors with quantised values that do not match what was received."""
        ...

    @property
    def weights_sleep(self) -> bool:
        """Whether the memory of the weights is also released while the engine sleeps."""
        ...

    def sleep(self) -> None:
        """Release the key-value cache while training uses the device. Refuses while requests run.

        The engine still holds its version, but may receive no weights meanwhile.
        """
        ...

    def wake(self) -> None:
        """Take the key-value cache back; does nothing if the engine is awake."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
