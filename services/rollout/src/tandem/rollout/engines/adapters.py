"""Engines that hold the adapters of several versions over one base.

Each request names the version that makes it. An engine receives base and adapters as in any refit, and does not merge
them: it keeps a copy of each version's adapters, as many as it is told (`tandem.rollout.engines.adapter_sets`). So
sequences of several models are made together, and one version's numbers do not depend on another's.

The digest of a version is that of its copy. With it the engine digests one of the earlier copies again, in turns, and
drops it if it has changed. Requests that name a version which is not held are refused (`VersionNotHeld`).

`SeveralVersions` is the part of it that all engines have, and `AdaptersEngine` the embedded engine with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.errors import ModelError, RefitError
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.holder import RunningDigest
from tandem.refit.program import TransferProgram
from tandem.refit.weights import BoundProgram, Weights
from tandem.rollout.engine import EngineCompletion, SequenceRequest, VersionNotHeld
from tandem.rollout.engines import adapter_sets, attention, refitted, served, slots, states
from tandem.rollout.engines.transformers import TransformersEngine


def version_of(request: SequenceRequest) -> int:
    """Return the version that makes a request which an engine of several versions has taken."""
    assert isinstance(request.sampling, served.ServedSampling), "as it was taken"
    assert request.sampling.weight_version is not None, "as it was taken"
    return request.sampling.weight_version


class SeveralVersions(refitted.RefittedEngine, ABC):
    """The part of an engine that concerns the versions that it holds; one without a version is made by the newest."""

    def __init__(self, *args: Any, num_sets: int, **kwargs: Any) -> None:
        """Take what the engine takes. `num_sets` versions are held, or more while requests need them."""
        self._uses = adapter_sets.VersionUses(num_sets)
        super().__init__(*args, **kwargs)

    def apply(
        self,
        version: int,
        deadline_s: float,
        only: Collection[str] = (),
        joining_engines: Collection[str] | None = None,
    ) -> dict[str, int]:
        """Receive a version, and keep a copy of its adapters; running requests go on with those of theirs."""
        counted = super().apply(version, deadline_s, only, joining_engines)
        if self.version == version:
            self._uses.begin(version)
            needed = {version_of(request) for request in self._requests()}
            self._keep(version, self._uses.surplus({*self._list_versions(), version}, {*needed, version}))
        return counted

    def _named(self, request: SequenceRequest) -> SequenceRequest:
        """Return a request that names its version. Raises `VersionNotHeld` if there is none yet."""
        sampling = request.sampling
        if not isinstance(sampling, served.ServedSampling):
            sampling = served.ServedSampling(**msgspec.structs.asdict(sampling))
        if sampling.weight_version is None:
            if self.version is None:
                raise VersionNotHeld("the engine holds no weight version yet")
            sampling = msgspec.structs.replace(sampling, weight_version=self.version)
        return msgspec.structs.replace(request, sampling=sampling)

    def _note(self, request: SequenceRequest) -> None:
        """Note the versions that a request names which was taken."""
        assert isinstance(request.sampling, served.ServedSampling), "as it was taken"
        self._uses.name([version_of(request), *request.sampling.kept_versions])

    def _holds(self, version: int) -> bool:
        return version in self._list_versions()

    @abstractmethod
    def _list_versions(self) -> Collection[int]:
        """Return the versions that are held."""

    @abstractmethod
    def _keep(self, version: int, dropped: Iterable[int]) -> None:
        """Copy the adapters of the version that has just come, and drop others."""

    @abstractmethod
    def _requests(self) -> Iterable[SequenceRequest]:
        """Return the requests that run or wait."""


class AdapterSlots(slots.EngineSlots):
    """Slots of sequences that different versions make."""

    def __init__(self, num_slots: int, *args: Any) -> None:
        """Take what `EngineSlots` takes."""
        super().__init__(num_slots, *args)
        self.wanted_S = np.zeros(num_slots, np.int64)
        """Version that makes the slot's sequence."""

    def join(self, sequence: slots.EngineSequence) -> None:
        """Give the sequence the next slot."""
        self.wanted_S[self.num_running] = version_of(sequence.request)
        super().join(sequence)

    def record(
        self, token_R: NDArray[np.int64], logprob_R: NDArray[np.float32], version: int | NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Append a token to every running slot, made by its own version."""
        return super().record(token_R, logprob_R, self.wanted_S[: self.num_running])


class AdaptersEngine(SeveralVersions, TransformersEngine):
    """The embedded engine with the adapters of several versions."""

    _slots_kind = AdapterSlots

    def __init__(self, *args: Any, num_sets: int, **kwargs: Any) -> None:
        """Take what `TransformersEngine` takes. `num_sets` versions are held."""
        self._sets = adapter_sets.AdapterSets(adapter_sets.attach_to_linear, takes_parameters=True)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parts of the parameters of experts, each with the base that is received for it."""
        self._staging: Mapping[str, torch.Tensor] = {}
        self._broken: list[int] = []
        """Requests whose weights have just given something that is no number."""
        super().__init__(*args, num_sets=num_sets, **kwargs)
        if type(self._cache) is not attention.KeyValueCache:  # layers see the tokens of a step in parts
            reason = "layers with a state" if isinstance(self._cache, states.StatefulCache) else "a cache of its own"
            model_type = self._model.config.model_type
            raise ModelError(f"{model_type} has {reason}: engines hold one version of adapters at a time")

    def install(self, programs: Sequence[TransferProgram]) -> BoundProgram:
        """Bind the program without its merge, and point the adapted layers at the received base. Raises
        `RefitError`."""
        (program,) = programs
        self._sets.clear()
        apart = msgspec.structs.replace(program, merging=None)
        installed = super().install([apart])
        assert isinstance(installed, BoundProgram), "of the only slice"
        self._staging = installed.staging
        products = adapter_sets.products_of(program)
        self._sets.install(self._model, products)
        if self._routing is not None and any(
            each.weight.endswith((".gate.weight", ".router.weight")) for each in products
        ):
            raise RefitError("a router with the adapters of several models: the experts that it chose are not recorded")
        parameters = dict(self._model.named_parameters())
        self._parts = []
        for product in products:
            weight = parameters[product.weight]
            if weight.dim() > len(product.shape):  # experts are received one by one
                rows = weight.data.view(-1, weight.shape[-1]).narrow(0, product.first, product.shape[0])
                self._parts.append((rows, installed.staging[product.base].view(product.shape)))
                continue
            if tuple(weight.shape) != product.shape:
                raise RefitError(f"{product.weight}: it is received in parts, and has the adapters of several models")
            weight.data = installed.staging[product.base].view(product.shape)
        return installed

    def digest_task(self, sampling: ElementSampling | None) -> RunningDigest:
        """Return a task that digests the adapters in use, and those of another version."""
        assert isinstance(self._weights, Weights), "of this process"
        if self.version is None or self.version not in self._sets:
            return super().digest_task(sampling)
        return self._sets.digest_task(self.version, self._weights, sampling)

    def add_request(self, request: SequenceRequest) -> None:
        """Queue a request. Raises `VersionNotHeld` without its version, and `DataError` if it can make no token."""
        request = self._named(request)
        super().add_request(request)
        self._note(request)

    def step(self) -> list[EngineCompletion]:
        """Make one token for every running request; those whose weights give no numbers end as aborted."""
        completions = super().step()
        broken, self._broken = {*self._broken}, []
        if broken:
            ended = {completion.request_id for completion in completions}
            completions = [
                msgspec.structs.replace(completion, finish_reason="abort")
                if completion.request_id in broken
                else completion
                for completion in completions
            ]
            completions += [
                completion for number in sorted(broken - ended) if (completion := self.abort(number)) is not None
            ]
        return completions

    def close(self) -> None:
        """Release everything."""
        self._sets.clear()
        super().close()

    def _list_versions(self) -> list[int]:
        return self._sets.versions

    def _keep(self, version: int, dropped: Iterable[int]) -> None:
        for rows, base in self._parts:  # the base never changes after the first version
            rows.copy_(base)
        self._parts = []
        self._sets.keep(version, self._staging, dropped)

    def _requests(self) -> list[SequenceRequest]:
        return [sequence.request for sequence in (*self._queue, *self._slots.sequences)]

    def _shared_by(self, request: SequenceRequest) -> tuple[object, ...]:
        """Return what requests have in common that share keys and values of their prompts."""
        return (*super()._shared_by(request), version_of(request))

    def _forward(self) -> torch.Tensor:
        """Run the model; note the sequences whose logits are no numbers, and give these others, that can be drawn."""
        logits_RV = super()._forward()
        is_broken_R = ~logits_RV.amax(dim=-1).isfinite()
        if bool(is_broken_R.any()):
            self._broken = [
                self._slots.sequences[row].request.request_id for row in is_broken_R.nonzero()[:, 0].tolist()
            ]
            with torch.inference_mode():
                logits_RV = logits_RV.masked_fill(is_broken_R[:, None], 0.0)
        return logits_RV

    def _run(
        self,
        token_parts: list[NDArray[np.int64]],
        position_parts: list[NDArray[np.int64]],
        step: attention.AttentionStep,
        kept_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the model over the tokens of a step, each with the adapters of its version."""
        wanted_S = self._slots.wanted_S  # type: ignore[attr-defined]  # `AdapterSlots`
        parts = [wanted_S[: step.num_running]]
        parts += [np.full(prompt.length, wanted_S[prompt.first_slot]) for prompt in step.prompts]
        self._sets.take(np.concatenate(parts), self._model.device)
        return super()._run(token_parts, position_parts, step, kept_K)
