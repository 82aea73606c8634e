"""The adapters of several versions over one base: copies, the layers that add them, and digests.

The layers of a model hold the base. Of each version there is a copy of the adapters. In a step, a layer adds to its
output ``scale * B @ A @ x``, for the tokens of each version with that version's matrices. A module whose parameters are
adapted otherwise, such as experts or a router, runs once for each version, with that version's parameters.

One worker of an engine has `AdapterSets`. Which versions it keeps is decided for all workers at once, by `VersionUses`.

Shapes: ``N`` tokens of a step, ``I`` and ``O`` inputs and outputs of a layer; ``M`` tokens of one version, ``R`` rank.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tandem.common.errors import ModelError, RefitError
from tandem.refit.digests.comparison import Digests, encode_digests
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.holder import RunningDigest
from tandem.refit.layout import ITEM_SIZE_OF_CODE
from tandem.refit.program import TransferProgram
from tandem.refit.weights import Weights

Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of a layer's inputs and output that returns the output with adapters added."""
Attach = Callable[[torch.nn.Module, Add], Callable[[], None] | None]
"""A way to have a linear layer add adapters; it returns how to undo it, or None if the layer is not linear."""
_ITEM = 4
"""Bytes of an element of adapters, which are in float32."""


class AdapterProduct(NamedTuple):
    """A product of two adapter matrices that a layer adds to some of its outputs."""

    weight: str
    """Storage of the layer's weight."""
    base: str
    """Staging memory of the rows of the base to which the product belongs."""
    first: int
    """Number of the first output."""
    shape: tuple[int, int]
    """Outputs and inputs."""
    rank: int
    scale: float
    a: str
    """Staging memory of ``A``; likewise `b`."""
    a_at: int
    """Number of its first element; likewise `b_at`."""
    a_stride: int
    """Elements from one row of ``A`` to the next."""
    b: str
    b_at: int


def products_of(program: TransferProgram) -> list[AdapterProduct]:
    """Return the products that a program would merge into weights.

    Raises `RefitError` if one belongs to something other than whole rows of a matrix.
    """
    merging = program.merging
    if merging is None:
        return []
    at, names, products = merging.products, merging.storages, []
    for row, tensor in enumerate(at.tensor_M.tolist()):
        outputs, inputs = at.shape_MD[row].tolist()
        row_bytes = inputs * int(ITEM_SIZE_OF_CODE[at.dtype_M[row]])
        if at.live_strides_MD[row].tolist() != [row_bytes, row_bytes // inputs] or at.live_offset_M[row] % row_bytes:
            raise _refused(merging.tensors[tensor])
        products.append(
            AdapterProduct(
                weight=names[int(at.live_M[row])],
                base=names[int(at.base_M[row])],
                first=int(at.live_offset_M[row]) // row_bytes,
                shape=(outputs, inputs),
                rank=int(at.rank_M[row]),
                scale=merging.scales[tensor],
                a=names[int(at.a_M[row])],
                a_at=int(at.a_offset_M[row]) // _ITEM,
                a_stride=int(at.a_stride_M[row]) // _ITEM,
                b=names[int(at.b_M[row])],
                b_at=int(at.b_offset_M[row]) // _ITEM,
            )
        )
    return products


class VersionUses:
    """The order in which the versions of an engine were last needed."""

    def __init__(self, max_versions: int) -> None:
        """Have room for `max_versions` versions, or more while requests need them."""
        self._max_versions = max_versions
        self._used: dict[int, tuple[int, bool]] = {}
        """Time at which a request named the version last, or its own, in requests, and whether one has named it."""
        self._num_requests = 0

    def begin(self, version: int) -> None:
        """Note a version that has come."""
        self._used[version] = self._num_requests, False

    def name(self, versions: Iterable[int]) -> None:
        """Note that a request has named these versions."""
        self._num_requests += 1
        for version in versions:
            if version in self._used:
                self._used[version] = self._num_requests, True

    def surplus(self, versions_held: Collection[int], needed: Collection[int]) -> list[int]:
        """Return the versions to drop of those that are held: named longest ago, and none that are needed."""
        self._used = {version: self._used[version] for version in versions_held}
        spare = sorted((used, version) for version, used in self._used.items() if version not in needed)
        return [version for _, version in spare[: max(0, len(versions_held) - self._max_versions)]]


class _Set:
    """The adapters of a version: copies of staging memory, and the matrices of each product in them."""

    def __init__(self, storages: dict[str, torch.Tensor], products: Sequence[AdapterProduct]) -> None:
        self.storages = storages
        self.matrices: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        """Matrices of each product; None where it is zero, as it is in a new model."""
        self.checked = 0
        """Time of its last digest, in versions."""
        self.digests: tuple[bytes, ...] = ()
        """Digests that were compared with the trainers'; empty until they are known."""
        self.sampling: ElementSampling | None = None
        for product in products:
            outputs, inputs = product.shape
            a = storages[product.a].as_strided((product.rank, inputs), (product.a_stride, 1), product.a_at)
            b = storages[product.b].as_strided((outputs, product.rank), (product.rank, 1), product.b_at)
            self.matrices.append((a, b) if bool(b.any()) else None)


class AdapterSets:
    """The versions that a worker of an engine holds, and the layers of its model that add them."""

    def __init__(self, attach: Attach, *, takes_parameters: bool = False) -> None:
        """Hold nothing; `attach` has a layer of this engine's kind add adapters.

        `takes_parameters`: whether other modules than layers are those of Transformers, and can have adapters.
        """
        self._attach = attach
        self._takes_parameters = takes_parameters
        self._products: list[AdapterProduct] = []
        self._detach: list[Callable[[], None]] = []
        self._held: dict[int, _Set] = {}
        self._num_digests = 0
        self._step: list[tuple[_Set, torch.Tensor | None]] = []
        """Versions of the step's tokens, each with the indices of its tokens; None for all."""
        self._num_tokens = 0

    def __contains__(self, version: int) -> bool:
        return version in self._held

    @property
    def versions(self) -> list[int]:
        """Versions that are held."""
        return [*self._held]

    def install(self, model: torch.nn.Module, products: Sequence[AdapterProduct]) -> None:
        """Hold nothing yet, and have the layers of products add them.

        Raises `RefitError` if a product does not belong to a linear layer, or to a parameter of another module that
        this engine can adapt.
        """
        self.clear()
        modules = dict(model.named_modules())
        numbers: dict[str, list[int]] = {}
        for number, product in enumerate(products):
            numbers.setdefault(product.weight, []).append(number)
        self._products = [*products]
        of_modules: dict[str, dict[str, list[int]]] = {}
        for weight, product_numbers in numbers.items():
            layer = modules.get(weight.removesuffix(".weight"))
            undo = None if layer is None else self._attach(layer, functools.partial(self._added, product_numbers))
            if undo is not None:
                self._detach.append(undo)
                continue
            owner, _, name = weight.rpartition(".")
            if not self._takes_parameters or name not in dict(modules[owner].named_parameters(recurse=False)):
                raise _refused(weight)
            of_modules.setdefault(owner, {})[name] = product_numbers
        for owner, of_parameters in of_modules.items():
            self._detach.append(self._follow(modules[owner], of_parameters))

    def clear(self) -> None:
        """Drop all versions, and let layers be as they were."""
        for undo in reversed(self._detach):
            undo()
        self._detach.clear()
        self._products.clear()
        self._held.clear()
        self._step.clear()

    def keep(self, version: int, staging: Mapping[str, torch.Tensor], dropped: Iterable[int] = ()) -> None:
        """Copy the adapters of a version, and drop others."""
        for dropped_version in dropped:
            self._held.pop(dropped_version, None)
        names = {name for product in self._products for name in (product.a, product.b)}
        self._held[version] = _Set({name: staging[name].clone() for name in sorted(names)}, self._products)

    def take(self, version_N: NDArray[np.int64], device: torch.device) -> None:
        """Note which version each token of the next step belongs to."""
        versions = np.unique(version_N).tolist()
        if lost := [version for version in versions if version not in self._held]:
            raise ModelError(f"requests are being made by version {lost[0]}, whose adapters are not held any more")
        self._num_tokens = len(version_N)
        rows = [None] if len(versions) == 1 else [np.flatnonzero(version_N == version) for version in versions]
        self._step = [
            (self._held[version], None if row_M is None else torch.from_numpy(row_M).to(device))
            for version, row_M in zip(versions, rows, strict=True)
        ]

    def _added(self, numbers: Sequence[int], layer_input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return a layer's output with what the adapters of each token's version add. Tokens of no version come
        last."""
        inputs_NI, output_NO = layer_input.reshape(-1, layer_input.shape[-1]), output.reshape(-1, output.shape[-1])
        if len(inputs_NI) < self._num_tokens:
            raise ModelError("a layer with the adapters of several models is not given all tokens of a step")
        for adapter_set, row_M in self._step:
            its_MI: torch.Tensor | None = None
            for number in numbers:
                matrices, product = adapter_set.matrices[number], self._products[number]
                if matrices is None:
                    continue
                a, b = matrices
                if its_MI is None:
                    its_MI = (inputs_NI if row_M is None else inputs_NI.index_select(0, row_M)).to(a.dtype)
                outputs, is_whole = product.shape[0], product.shape[0] == output_NO.shape[1]
                own_NO = output_NO if is_whole else output_NO.narrow(1, product.first, outputs)
                own_MO = own_NO if row_M is None else own_NO.index_select(0, row_M)
                inner_MR = functional.linear(its_MI, a)
                sum_MO = torch.addmm(own_MO.to(a.dtype), inner_MR, b.t(), alpha=product.scale).to(output.dtype)
                if row_M is not None:
                    own_NO.index_copy_(0, row_M, sum_MO)
                elif is_whole:
                    output_NO = sum_MO
                else:
                    own_NO.copy_(sum_MO)
        return output_NO.view(output.shape)

    # --- digests -----------------------------------------------------------------------------------------------------

    def digest_task(self, version: int, weights: Weights, sampling: ElementSampling | None) -> RunningDigest:
        """Return a task that digests a version's copy, and one of the others again."""
        adapter_set = self._held[version]
        self._num_digests += 1
        adapter_set.checked, adapter_set.sampling = self._num_digests, sampling
        digested = [(each.checked, number) for number, each in self._held.items() if each.digests and number != version]
        task = weights.digest_task(sampling, adapter_set.storages)
        if not digested:
            return _SetsDigest(task, adapter_set, None, lambda _: None)
        _, version_again = min(digested)
        again = self._held[version_again]
        again.checked = self._num_digests

        def compare(digests: tuple[bytes, ...]) -> None:
            if digests != again.digests and self._held.get(version_again) is again:
                del self._held[version_again]
                print(f"the adapters of version {version_again} have changed in memory: they are dropped", flush=True)

        return _SetsDigest(task, adapter_set, weights.digest_task(again.sampling, again.storages), compare)

    def _follow(self, module: Any, of_parameters: Mapping[str, Sequence[int]]) -> Callable[[], None]:
        """Have a module run with each version's parameters for the tokens of that version; return how to undo it."""
        forward = module.forward
        module.forward = functools.partial(self._run_versions, module, forward, of_parameters)

        def undo() -> None:
            module.forward = forward

        return undo

    def _run_versions(
        self, module: Any, forward: Callable[..., Any], of_parameters: Mapping[str, Sequence[int]], *args: torch.Tensor
    ) -> Any:
        """Return what a module makes of the tokens of a step, each with its version's parameters."""
        num_tokens = args[0].numel() // args[0].shape[-1]
        if num_tokens < self._num_tokens:
            raise ModelError("a module with the adapters of several models is not given all tokens of a step")
        results: Any = None
        for adapter_set, row_M in self._step:
            its_args = args if row_M is None else tuple(_rows(arg, row_M, num_tokens) for arg in args)
            adapted = {
                name: self._adapted(adapter_set, getattr(module, name), numbers)
                for name, numbers in of_parameters.items()
                if any(adapter_set.matrices[number] is not None for number in numbers)
            }
            vars(module).update(adapted)  # they hide the parameters
            try:
                its_results = forward(*its_args)
            finally:
                for name in adapted:
                    del vars(module)[name]
            if row_M is None:
                return its_results
            results = _put(results, its_results, row_M, num_tokens)
        return results

    def _adapted(self, adapter_set: _Set, parameter: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Return a parameter with a version's adapters merged into it, as `tandem.refit.installing` merges them."""
        merged = parameter.clone()
        rows = merged.view(-1, merged.shape[-1])
        for number in numbers:
            matrices, product = adapter_set.matrices[number], self._products[number]
            if matrices is not None:
                a, b = matrices
                its_rows = rows.narrow(0, product.first, product.shape[0])
                its_rows.copy_(torch.add(its_rows, (b @ a).mul_(product.scale)))
        return merged


def _rows(arg: torch.Tensor, row_M: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the rows of some tokens; all dimensions but the last count tokens."""
    rows = arg.reshape(num_tokens, -1).index_select(0, row_M)
    return rows if arg.dim() <= 2 else rows[None]


def _put(results: Any, its_results: Any, row_M: torch.Tensor, num_tokens: int) -> Any:
    """Return results for all tokens, with those of some put in their places; zeros where there are none yet."""
    if isinstance(its_results, tuple):
        before = results or (None,) * len(its_results)
        return tuple(_put(*pair, row_M, num_tokens) for pair in zip(before, its_results, strict=True))
    dim = its_results.shape.index(len(row_M))
    if results is None:
        shape = (*its_results.shape[:dim], num_tokens, *its_results.shape[dim + 1 :])
        results = its_results.new_zeros(shape)
    return results.index_copy_(dim, row_M, its_results)


class _SetsDigest:
    """The digests of a version, and then those of another to compare with what they were."""

    def __init__(
        self,
        task: RunningDigest,
        adapter_set: _Set,
        again: RunningDigest | None,
        compare: Callable[[tuple[bytes, ...]], None],
    ) -> None:
        self._task = task
        self._own = adapter_set
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
        self._own.digests = tuple(map(encode_digests, results))
        if self._again is not None:
            self._compare(tuple(map(encode_digests, self._again.results())))
        return results


def attach_to_linear(layer: torch.nn.Module, add: Add) -> Callable[[], None] | None:
    """Have one of torch's linear layers add adapters; see `Attach`."""
    if not isinstance(layer, torch.nn.Linear):
        return None

    def hook(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return add(inputs[0], output)

    return layer.register_forward_hook(hook).remove


def _refused(name: str) -> RefitError:
    return RefitError(
        f"{name}: only linear layers, or whole rows of them, can have the adapters of several models here; experts can "
        "in the embedded engine"
    )
