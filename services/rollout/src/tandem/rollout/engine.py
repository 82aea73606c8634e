"""The protocol of generation engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.messages import SamplingParameters
from tandem.refit.digests.task import Sampling
from tandem.refit.endpoint import Digesting, Installed
from tandem.refit.layout import Layout
from tandem.refit.program import TransferProgram
from tandem.refit.transfer import Mesh
from tandem.refit.transports.process_group import Meeting


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters
    seed: int
    """Unsigned 64-bit. Token ``i`` of the response is a function of the weights, the prefix, the seed and ``i``."""
    num_made: int = 0
    """Tokens at the end of the prompt that are of the response: it was taken out of the engine, and goes on. An engine
    that cannot draw its next token as if it had stayed draws it in another way."""
    is_guest: bool = False
    """Asked for from outside the run: it goes before requests that wait, and none of these may find its keys cached."""


Alternatives: TypeAlias = list[tuple[int, float]]
"""Tokens that could have been drawn at a place, the likeliest first, and their log-probabilities."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sequence; ``T`` counts the tokens the engine made, the stop token included."""

    request_id: int
    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Log-probability of each token under the distribution it was drawn from: temperature, top-k and top-p applied."""
    versions_T: NDArray[np.int32]
    """Weight version that made each token."""
    finish_reason: Literal["stop", "length", "abort"]
    routed_experts_TX: NDArray[np.uint8] | None = None
    """Where tokens went (`tandem.samples.routed_experts`), those of the prompt first, all but the last: what the engine
    has computed. None unless it was asked to say so, and of guests."""
    alternatives: list[Alternatives] | None = None
    """To each token; None unless the request asked for them."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Some tokens of one sequence, in order; the fields are those of `Completion`."""

    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    alternatives: list[Alternatives] | None = None


class Engine(Protocol):
    """Tokens in, tokens out; weights come in place by refit.

    An engine is driven by one thread. It starts without weights and refuses to step until `apply` has given it a whole
    version.
    """

    @property
    def version(self) -> int | None:
        """The weight version it holds; None while it holds none, or a torn one."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests added and neither finished nor aborted."""
        ...

    def add_request(self, request: Request) -> None:
        """Queue a request; it joins at the next `step` that has room."""
        ...

    def step(self) -> list[Completion]:
        """Make one token for every running request; return those that finished, in request order.

        Raises `RefitError` if the engine holds no whole version.
        """
        ...

    def made(self, starts: Mapping[int, int]) -> dict[int, Tokens]:
        """Return what running requests, given by id, have made from these tokens on; those that are not known are not.

        It is for who shows responses while they grow; `step` returns them whole.
        """
        ...

    def abort(self, request_id: int) -> Completion | None:
        """Stop a request and return what it has made; None if it is not known."""
        ...

    def pause(self) -> None:
        """Keep the requests and their caches, make no token until `resume`."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def layouts(self) -> tuple[Layout, ...]:
        """Describe the weights that each of its parts wants, read from the live parameters."""
        ...

    def install(self, programs: Sequence[TransferProgram]) -> Installed:
        """Bind the program of each part to its parameters, in place of the one before it.

        The engine holds no version until `apply`. Raises `RefitError`.
        """
        ...

    def connect(self, mesh: Mesh, meeting: Meeting, timeout_s: float) -> None:
        """Join a mesh over which the programs installed have weights stream. Raises `RefitError`."""
        ...

    def apply(
        self, version: int, deadline_s: float, only: Collection[str] = (), newcomers: Collection[str] | None = None
    ) -> dict[str, int]:
        """Run the installed program and hold `version`; return the bytes on each link.

        `only` are the engines to bring to `version`, all if there are none; if it is not one of them, it does no more
        than pass its weights on. Otherwise it is torn from the first byte to the last: if this raises, `version` is
        None until a later `apply` succeeds. `newcomers` get what never changes, too; None means all. Raises
        `RefitError`.
        """
        ...

    def recompute_caches(self) -> None:
        """Have requests that run compute all their keys and values anew, before their next token.

        Without it they go on after `apply` with those that they have. Requests that are added after `apply` use none of
        the weights before in either case.
        """
        ...

    def digest_task(self, sampling: Sampling | None) -> Digesting:
        """Return a task that digests the weights it computes with (`tandem.refit.digests.task`), beside other work."""
        ...

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors held that are not the quantisation of what was received."""
        ...

    @property
    def weights_sleep(self) -> bool:
        """Whether the memory of its weights is given back as well while it sleeps."""
        ...

    def sleep(self) -> None:
        """Release the key-value cache while the device is used for training. Refuses while requests run.

        It still holds its version, but no weights may be received meanwhile.
        """
        ...

    def wake(self) -> None:
        """Take the key-value cache back; an engine that is awake stays so."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
