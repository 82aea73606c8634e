"""The adapters of several versions over one base, in the embedded engine.

Each request names the version that makes it. The engine receives base and adapters as in any refit, and does not merge
them. Its layers hold the base. Of each version it keeps a copy of the adapters, as many versions as it is told. In a
step, a layer adds to its output ``scale * B @ A @ x``, for the tokens of each version with that version's matrices. So
sequences of several models are made together, and one version's numbers do not depend on another's.

The digest of a version is that of its copy. With it the engine digests one of the earlier copies again, in turns, and
drops it if it has changed. Requests that name a version which is not held are refused (`NotHeld`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tandem.common.errors import ModelError, RefitError
from tandem.refit.bound import BoundProgram
from tandem.refit.digests.comparison import Digests, to_bytes
from tandem.refit.digests.task import Sampling
from tandem.refit.holder import Digesting
from tandem.refit.program import TransferProgram
from tandem.refit.weights import Weights
from tandem.rollout.engine import Completion, NotHeld, Request
from tandem.rollout.engines.attention import Step
from tandem.rollout.engines.served import ServedSampling
from tandem.rollout.engines.slots import Sequence as Running
from tandem.rollout.engines.slots import Slots
from tandem.rollout.engines.transformers import TransformersEngine


def version_of(request: Request) -> int:
    """Return the version that makes a request which an `AdaptersEngine` has taken."""
    assert isinstance(request.sampling, ServedSampling), "as it was taken"
    assert request.sampling.weight_version is not None, "as it was taken"
    return request.sampling.weight_version


class AdapterSlots(Slots):
    """Slots of sequences that different versions make."""

    def __init__(self, num_slots: int, *given: Any) -> None:
        """Take what `Slots` takes."""
        super().__init__(num_slots, *given)
        self.wanted_S = np.zeros(num_slots, np.int64)
        """Version that makes the slot's sequence."""

    def join(self, sequence: Running) -> None:
        """Give the sequence the next slot."""
        self.wanted_S[self.num_running] = version_of(sequence.request)
        super().join(sequence)

    def record(
        self, token_R: NDArray[np.int64], logprob_R: NDArray[np.float32], version: int | NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Append a token to every running slot, made by its own version."""
        return super().record(token_R, logprob_R, self.wanted_S[: self.num_running])


class _Layer(NamedTuple):
    """Where the adapters of a layer are staged."""

    a: str
    b: str
    rank: int
    scale: float


class _Set:
    """The adapters of a version: copies of staging memory, and each layer's matrices in them."""

    def __init__(self, storages: dict[str, torch.Tensor], layers: Sequence[_Layer]) -> None:
        self.storages = storages
        self.matrices: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        """Matrices of each layer; None where their product is zero, as it is in a new model."""
        self.used = 0, False
        """Time of the last request that named it, or of its own, in requests, and whether one has named it."""
        self.checked = 0
        """Time of its last digest, in versions."""
        self.digests: tuple[bytes, ...] = ()
        """Digests that were compared with the trainers'; empty until they are known."""
        self.sampling: Sampling | None = None
        for layer in layers:
            a, b = storages[layer.a].view(layer.rank, -1), storages[layer.b].view(-1, layer.rank)
            self.matrices.append((a, b) if bool(b.any()) else None)


class AdapterSets:
    """The versions that an engine holds, and the layers of the model to which they belong."""

    def __init__(self, most: int) -> None:
        """Hold at most `most` versions, or more while requests need them."""
        self._most = most
        self._layers: list[_Layer] = []
        self._hooks: list[Any] = []
        self._held: dict[int, _Set] = {}
        self._num_requests = self._num_digests = 0
        self._step: list[tuple[_Set, torch.Tensor | None]] = []
        """Versions of the step's tokens, each with the indices of its tokens; None for all."""
        self._num_tokens = 0

    def __contains__(self, version: int) -> bool:
        return version in self._held

    def install(self, model: torch.nn.Module, program: TransferProgram, staging: Mapping[str, torch.Tensor]) -> None:
        """Hold nothing yet, point the adapted layers at the received base, and have them add adapters.

        Raises `RefitError` if an adapted weight is not that of a linear layer.
        """
        self.clear()
        merging = program.merging
        if merging is None:
            return
        at, names = merging.products, merging.storages
        modules = dict(model.named_modules())
        for row, tensor in enumerate(at.tensor_M.tolist()):
            name, rank = names[int(at.live_M[row])], int(at.rank_M[row])
            layer = modules.get(name.removesuffix(".weight"))
            offsets = at.live_offset_M[row], at.a_offset_M[row], at.b_offset_M[row]
            shape = tuple(at.shape_MD[row].tolist())
            if not isinstance(layer, torch.nn.Linear) or any(offsets) or tuple(layer.weight.shape) != shape:
                raise RefitError(f"{name}: only whole linear layers can have the adapters of several models")
            layer.weight.data = staging[names[int(at.base_M[row])]].view(shape)
            number = len(self._layers)
            self._layers.append(_Layer(names[int(at.a_M[row])], names[int(at.b_M[row])], rank, merging.scales[tensor]))
            self._hooks.append(
                layer.register_forward_hook(
                    lambda _, given, output, number=number: self._added(number, given[0], output)
                )
            )

    def clear(self) -> None:
        """Drop all versions, and let layers be as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._layers.clear()
        self._held.clear()
        self._step.clear()

    def keep(self, version: int, staging: Mapping[str, torch.Tensor], needed: Collection[int]) -> None:
        """Copy the adapters of a version; drop those that were not named for longest, but none that are needed."""
        names = {name for layer in self._layers for name in (layer.a, layer.b)}
        self._held[version] = held = _Set({name: staging[name].clone() for name in sorted(names)}, self._layers)
        held.used = self._num_requests, False
        spare = sorted((each.used, number) for number, each in self._held.items() if number not in {*needed, version})
        for _, number in spare[: max(0, len(self._held) - self._most)]:
            del self._held[number]

    def name(self, versions: Collection[int]) -> None:
        """Note that a request has named these versions."""
        self._num_requests += 1
        for version in versions:
            if version in self._held:
                self._held[version].used = self._num_requests, True

    def take(self, version_N: NDArray[np.int64], device: torch.device) -> None:
        """Note which version each token of the next step belongs to."""
        versions = np.unique(version_N).tolist()
        self._num_tokens = len(version_N)
        rows = [None] if len(versions) == 1 else [np.flatnonzero(version_N == version) for version in versions]
        self._step = [
            (self._held[version], None if its is None else torch.from_numpy(its).to(device))
            for version, its in zip(versions, rows, strict=True)
        ]

    def _added(self, number: int, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return a layer's output with what the adapters of each token's version add."""
        inputs_NI, output_NO = given.reshape(-1, given.shape[-1]), output.reshape(-1, output.shape[-1])
        if len(inputs_NI) != self._num_tokens:
            raise ModelError("a layer with the adapters of several models is not given all tokens of a step")
        scale = self._layers[number].scale
        for held, row_M in self._step:
            matrices = held.matrices[number]
            if matrices is None:
                continue
            a, b = matrices
            its_MI = inputs_NI if row_M is None else inputs_NI.index_select(0, row_M)
            own_MO = output_NO if row_M is None else output_NO.index_select(0, row_M)
            inner_MR = functional.linear(its_MI.to(a.dtype), a)
            sum_MO = torch.addmm(own_MO.to(a.dtype), inner_MR, b.t(), alpha=scale).to(output.dtype)
            output_NO = sum_MO if row_M is None else output_NO.index_copy(0, row_M, sum_MO)
        return output_NO.view(output.shape)

    # --- digests -----------------------------------------------------------------------------------------------------

    def digest_task(self, version: int, weights: Weights, sampling: Sampling | None) -> Digesting:
        """Return a task that digests a version's copy, and one of the others again."""
        own = self._held[version]
        self._num_digests += 1
        own.checked, own.sampling = self._num_digests, sampling
        known = [(each.checked, number) for number, each in self._held.items() if each.digests and number != version]
        task = weights.digest_task(sampling, own.storages)
        if not known:
            return _SetsDigest(task, own, None, lambda _: None)
        _, other = min(known)
        again = self._held[other]
        again.checked = self._num_digests

        def compare(digests: tuple[bytes, ...]) -> None:
            if digests != again.digests and self._held.get(other) is again:
                del self._held[other]
                print(f"the adapters of version {other} have changed in memory: they are dropped", flush=True)

        return _SetsDigest(task, own, weights.digest_task(again.sampling, again.storages), compare)


class _SetsDigest:
    """The digests of a version, and then those of another to compare with what they were."""

    def __init__(
        self, task: Digesting, own: _Set, again: Digesting | None, compare: Callable[[tuple[bytes, ...]], None]
    ) -> None:
        self._task = task
        self._own = own
        self._again = again
        self._compare = compare
        self.expected_s = task.expected_s + (0.0 if again is None else again.expected_s)
        """Rough duration on an idle machine, in seconds."""

    def advance(self, seconds: float) -> bool:
        """Work for this long, or a little longer; return whether everything is done."""
        deadline = time.perf_counter() + seconds
        if not self._task.advance(seconds):
            return False
        return self._again is None or self._again.advance(deadline - time.perf_counter())

    def results(self) -> tuple[Digests, ...]:
        """Return the digests of the version."""
        results = self._task.results()
        self._own.digests = tuple(map(to_bytes, results))
        if self._again is not None:
            self._compare(tuple(map(to_bytes, self._again.results())))
        return results


class AdaptersEngine(TransformersEngine):
    """The embedded engine with the adapters of several versions; a request without a version is made by the newest."""

    _slots_kind = AdapterSlots

    def __init__(self, *given: Any, num_sets: int, **named: Any) -> None:
        """Take what `TransformersEngine` takes. `num_sets` versions are held."""
        self._sets = AdapterSets(num_sets)
        self._staging: Mapping[str, torch.Tensor] = {}
        self._broken: list[int] = []
        """Requests whose weights have just given something that is no number."""
        super().__init__(*given, **named)

    def install(self, programs: Sequence[TransferProgram]) -> BoundProgram:
        """Bind the program without its merge. Raises `RefitError`."""
        (program,) = programs
        self._sets.clear()
        apart = msgspec.structs.replace(program, merging=None)
        installed = super().install([apart])
        assert isinstance(installed, BoundProgram), "of the only slice"
        self._staging = installed.staging
        self._sets.install(self._model, program, installed.staging)
        return installed

    def apply(
        self,
        version: int,
        deadline_s: float,
        only: Collection[str] = (),
        joining_engines: Collection[str] | None = None,
    ) -> dict[str, int]:
        """Receive a version, and keep a copy of its adapters; running requests go on with those of theirs."""
        counted = super().apply(version, deadline_s, only, joining_engines)
        if self._version == version:
            self._sets.keep(version, self._staging, {version_of(request) for request in self._requests()})
        return counted

    def digest_task(self, sampling: Sampling | None) -> Digesting:
        """Return a task that digests the adapters in use, and those of another version."""
        assert isinstance(self._weights, Weights), "of this process"
        if self._version is None or self._version not in self._sets:
            return super().digest_task(sampling)
        return self._sets.digest_task(self._version, self._weights, sampling)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `NotHeld` without its version, and `DataError` if it can make no token."""
        sampling = request.sampling
        if not isinstance(sampling, ServedSampling):
            sampling = ServedSampling(**msgspec.structs.asdict(sampling))
        if sampling.weight_version is None:
            if self._version is None:
                raise NotHeld("the engine holds no weight version yet")
            sampling = msgspec.structs.replace(sampling, weight_version=self._version)
        request = msgspec.structs.replace(request, sampling=sampling)
        super().add_request(request)
        self._sets.name([version_of(request), *sampling.kept_versions])

    def step(self) -> list[Completion]:
        """Make one token for every running request; those whose weights give no numbers end as aborted."""
        completions = super().step()
        broken, self._broken = {*self._broken}, []
        if broken:
            ended = {each.request_id for each in completions}
            completions = [
                msgspec.structs.replace(each, finish_reason="abort") if each.request_id in broken else each
                for each in completions
            ]
            completions += [each for number in sorted(broken - ended) if (each := self.abort(number)) is not None]
        return completions

    def close(self) -> None:
        """Release everything."""
        self._sets.clear()
        super().close()

    def _holds(self, version: int) -> bool:
        return version in self._sets

    def _requests(self) -> list[Request]:
        return [sequence.request for sequence in (*self._queue, *self._slots.sequences)]

    def _shared_by(self, request: Request) -> tuple[object, ...]:
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
        step: Step,
        kept_K: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the model over the tokens of a step, each with the adapters of its version."""
        wanted_S = self._slots.wanted_S  # type: ignore[attr-defined]  # `AdapterSlots`
        parts = [wanted_S[: step.num_running]]
        parts += [np.full(prompt.length, wanted_S[prompt.first_slot]) for prompt in step.prompts]
        self._sets.take(np.concatenate(parts), self._model.device)
        return super()._run(token_parts, position_parts, step, kept_K)
