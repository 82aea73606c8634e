"""One worker's part of a vLLM model whose layers add the adapters of several versions.

The base is received in the place of the weights themselves, and the adapters in memory beside them, of which each
version gets a copy. A layer adds them where it multiplies by its weight: before workers that share the layer sum what
each has, so that each adds its own part. The runner knows each request's version by the request's parameters.

vLLM's own adapters (``enable_lora``) are not used: on a CPU they copy the matrices of a token's adapter for each token,
they round adapters to the type of the weights, and they keep a fixed number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from tandem.common.errors import RefitError
from tandem.refit import program
from tandem.refit.digests.comparison import encode_digests
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.holder import RunningDigest
from tandem.rollout.engines.adapter_sets import AdapterProduct, AdapterSets, Add, products_of
from tandem.rollout.engines.vllm.insides import VERSION
from tandem.rollout.engines.vllm.part import WorkerPart


class AdapterPart(WorkerPart):
    """A worker's layers, or its slices of them, with the adapters of several versions."""

    def __init__(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Take what `WorkerPart` takes."""
        super().__init__(runner, *args, **kwargs)
        self._sets = AdapterSets(_attach_to_linear)
        self._homes: dict[str, torch.Tensor] = {}
        """Where the base lies in the weights, by its name in the program."""
        self._own: dict[str, torch.Tensor] = {}
        """Parameters, by name."""
        self._staging: Mapping[str, torch.Tensor] = {}
        self._newest: int | None = None
        self._task: RunningDigest | None = None
        _follow(runner, self._sets)

    def install(self, programs: Sequence[bytes]) -> tuple[int, int]:
        """Bind its program without the merge, and have layers add adapters. Raises `RefitError`."""
        self._digest = self._task = self._newest = None
        self._sets.clear()
        weights, merging_program = self._described(), program.decode(programs[self._rank])
        self._own = self._own or dict(weights.storages)
        products = products_of(merging_program)
        self._homes = {each.base: self._home(each) for each in products}
        weights.storages = {**self._own, **{name: home.detach() for name, home in self._homes.items()}}
        staging = tuple(each for each in merging_program.staging if each.name not in self._homes)
        bound = weights.install([msgspec.structs.replace(merging_program, merging=None, staging=staging)])
        self._staging = bound.staging
        self._sets.install(self._runner.get_model(), products)
        return bound.num_copies, bound.num_bytes

    def keep(self, version: int, dropped: Sequence[int]) -> list[int]:
        """Copy the adapters of the version that has just come, and drop others; return those that are held."""
        weights = self._described()
        for name, home in self._homes.items():
            if (
                weights.storages[name].data_ptr() != home.data_ptr()
            ):  # it lies in the trainer's memory, to be read there
                home.copy_(weights.storages[name])
                weights.storages = {**weights.storages, name: home.detach()}
        self._sets.keep(version, self._staging, dropped)
        self._newest = version
        return self.list_versions()

    def list_versions(self) -> list[int]:
        """Return the versions that are held."""
        return self._sets.versions

    def wipe(self) -> None:
        """Have zeros in the place of what is cached and is no number."""
        for cache in self._runner.kv_caches:
            if cache.is_floating_point() and cache.element_size() > 1:
                torch.nan_to_num_(cache, nan=0.0, posinf=0.0, neginf=0.0)

    def begin_digest(self, sampling: ElementSampling | None) -> float:
        """Begin to digest the newest version, and another one again; return roughly how many seconds that takes."""
        if self._newest is None or self._newest not in self._sets:
            return super().begin_digest(sampling)
        self._task = self._sets.digest_task(self._newest, self._described(), sampling)
        return self._task.expected_s

    def advance_digest(self, seconds: float) -> bool:
        """Continue the digest for this long; return whether it is done."""
        return super().advance_digest(seconds) if self._task is None else self._task.advance(seconds)

    def digests(self) -> bytes:
        """Return its contribution to the digest of each tensor."""
        if self._task is None:
            return super().digests()
        (digests,) = self._task.results()
        return encode_digests(digests)

    def close(self) -> None:
        """Release the program and all versions, and leave all transfer groups."""
        self._sets.clear()
        super().close()

    def _home(self, product: AdapterProduct) -> torch.Tensor:
        """Return where a product's rows of the base lie in the weights, as a vector."""
        weight = self._own.get(product.weight)
        if weight is None or weight.ndim != 2 or weight.shape[1] != product.shape[1]:
            raise RefitError(f"{product.weight}: vLLM has no such matrix, to which adapters of several models belong")
        return weight.detach().narrow(0, product.first, product.shape[0]).view(-1)


def _attach_to_linear(layer: torch.nn.Module, add: Add) -> Callable[[], None] | None:
    """Have one of vLLM's linear layers add adapters; see `tandem.rollout.engines.adapter_sets.Attach`."""
    from vllm.model_executor.layers.linear import LinearBase

    if not isinstance(layer, LinearBase):
        return None
    method: Any = layer.quant_method
    apply = method.apply

    def applied(of: torch.nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = apply(of, inputs, bias)
        return add(inputs, output) if of is layer else output

    def undo() -> None:
        method.apply = apply

    method.apply = applied
    return undo


def _follow(runner: Any, sets: AdapterSets) -> None:
    """Have a model runner tell the version of each token of a step, once it knows the order of requests."""
    prepare = runner._prepare_inputs

    def prepare_inputs(scheduled: Any, num_tokens: Any, *args: Any, **kwargs: Any) -> Any:
        request_arguments = (runner.requests[name].sampling_params.extra_args for name in runner.input_batch.req_ids)
        versions = np.array([arguments[VERSION] for arguments in request_arguments], np.int64)
        sets.take(versions.repeat(num_tokens), runner.device)
        return prepare(scheduled, num_tokens, *args, **kwargs)

    runner._prepare_inputs = prepare_inputs
