"""Digests of a process's weights: in short slices of time beside other work, of a version, or at once.

`tandem.refit.digests.terms` defines a digest and says why it reveals damage. A process digests the slices in its
`ProcessVerification`: a trainer its weights, converted to the engines' element type; an engine the weights that it
computes with. The result is one partial digest per tensor. The partial digests of all processes that hold a tensor add
up modulo 2**64, and `tandem.refit.digests.comparison` compares the sums.

For a tensor that is quantised in transit, the engine computes values and scales itself, so they cannot be compared with
the trainer's elements. Instead the engine digests the staging memory that they were computed from: give `DigestTask`
the program's quantisations, and the staging memory among the storages. It reads the engine's pieces of these tensors in
staging memory, in their element type there (``Quantisation.staging_dtype``), and leaves the scales out. The trainer's
verification must convert to the same type. `tandem.refit.installing` checks on the engine that the values and scales
are the quantisation of that memory, bit for bit.

Importing this module does not import torch.

Frozen tensors are digested once, in full, with the first version after a program is bound. The result for each version
still covers all tensors, so the comparison need not know which are frozen.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.refit.digests import terms
from tandem.refit.digests.comparison import Digests, combine
from tandem.refit.digests.slices import DigestList, ElementSampling, everything
from tandem.refit.layout import DTYPES, ITEM_SIZES, Box, Layout
from tandem.refit.program import ProcessVerification, Quantisation

if TYPE_CHECKING:
    import torch

    from tandem.refit.digests.kernels import Span

_SLAB_BYTES = {"cpu": 2**21, "cuda": 2**26}
"""Bytes digested at a time: a millisecond at most on a CPU; on a GPU a launch that hides the cost of the next."""

_GPU_BYTES_PER_S = 5e11
"""Rough bytes per second of a GPU, whose launches take longer than its work."""

_ITEM_SIZE_D = np.array([ITEM_SIZES[dtype] for dtype in DTYPES])

_ROWS_AT_ONCE = 2**10
"""Slices converted to Python numbers at a time."""


class DigestTask:
    """The digests of one process's weights, computed slab by slab.

    Memory beside the weights: one slab, and the multipliers. Weights with NaNs may seem to differ: torch rounds a
    float32 NaN to one of two bit patterns, depending on its place in memory.
    """

    def __init__(
        self,
        layout: Layout,
        storages: Mapping[str, torch.Tensor],
        verification: ProcessVerification | None = None,
        *,
        sampling: ElementSampling | None = None,
        quantisations: Sequence[Quantisation] = (),
        digest_list: DigestList | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            layout: of the process.
            storages: by storage name, a tensor of any type, its first element at byte 0, in one range without gaps;
                all on one device. They must not change until the task is done.
            verification: which pieces to digest, and the element type to convert to first; default: all, as they are.
            sampling: digest only some rows; default: all.
            quantisations: of the process's program; their staging memory must be among `storages`.
            digest_list: that of an earlier task with the same layout, verification and quantisations.

        Raises:
            RefitError: a quantised tensor is not staged.

        """
        verification = everything(layout) if verification is None else verification
        self._layout = layout
        self.digest_list = digest_list or DigestList(layout, verification, quantisations)
        """Slices to digest, for reuse by a task of another version."""
        self._slices, names = self.digest_list.slices, self.digest_list.storage_names
        if sampling is not None:
            self._slices = self.digest_list.of_version(sampling)
        self._ranges: dict[int, torch.Tensor] = {}
        """Storages as vectors of their elements, without copies."""
        for index in np.unique(self._slices.storage_P).tolist():
            storage = storages[names[index]].detach()
            self._ranges[index] = storage.as_strided((storage.numel(),), (1,))
        self._device = next(iter(self._ranges.values())).device.type if self._ranges else "cpu"
        self._typed: dict[tuple[int, int], torch.Tensor] = {}
        self._converted: torch.Tensor | None = None
        self._totals_T: torch.Tensor | None = None
        self._work = self._run()

    @property
    def expected_s(self) -> float:
        """Rough duration of the task on an idle machine, in seconds."""
        return self.seconds_for(int((self._slices.shape_PD.prod(axis=1) * _ITEM_SIZE_D[self._slices.dtype_P]).sum()))

    def seconds_for(self, num_bytes: int) -> float:
        """Return the rough time in seconds to digest this many bytes on the device of the weights."""
        from tandem.refit.digests import kernels

        return num_bytes / (kernels.cpu_bytes_per_s() if self._device == "cpu" else _GPU_BYTES_PER_S)

    def advance(self, seconds: float) -> bool:
        """Work until the time is up and the current slab is finished; return whether everything is.

        Digests at least one slab. On a GPU the time is that of the launches, not of the work.

        Raises:
            RefitError: elements are not of 1, 2 or 4 bytes.

        """
        deadline = time.perf_counter() + seconds
        return all(time.perf_counter() < deadline for _ in self._work)

    def result(self) -> NDArray[np.uint64]:
        """Finish the work, and return this process's partial digest of each of `Layout.tensors`.

        Tensors without digested elements have 0.
        """
        self.advance(math.inf)
        digests_T = np.zeros(len(self._layout.tensors), np.uint64)
        if self._totals_T is None:
            return digests_T
        digested = np.unique(self._slices.tensor_P)
        totals_T = self._totals_T.cpu().numpy().view(np.uint64)
        digests_T[digested] = totals_T[digested] * self.digest_list.salts_T[digested]
        return digests_T

    def results(self) -> tuple[NDArray[np.uint64]]:
        """Return `result` as that of the only worker of a process (`tandem.common.worker_shards`)."""
        return (self.result(),)

    def _run(self) -> Iterator[None]:
        """Digest one slice after another, yielding after each slab."""
        import torch

        columns, num_slices = msgspec.structs.astuple(self._slices), len(self._slices.tensor_P)
        if not num_slices:
            return
        device = next(iter(self._ranges.values())).device
        self._totals_T = torch.zeros(len(self._layout.tensors), dtype=torch.int64, device=device)
        for first in range(0, num_slices, _ROWS_AT_ONCE):
            rows = map(itemgetter(slice(first, first + _ROWS_AT_ONCE)), columns)
            for row in zip(*map(np.ndarray.tolist, rows), strict=True):
                yield from self._digest(*row)

    def _digest(
        self,
        tensor: int,
        storage: int,
        dtype: int,
        hashed: int,
        start: list[int],
        step: list[int],
        shape: list[int],
        offset: int,
        strides: list[int],
    ) -> Iterator[None]:
        """Add the digest of one slice to its tensor's; the arguments are a row of `DigestColumns`."""
        import torch

        from tandem.refit.digests.kernels import add_slab_sum

        assert self._totals_T is not None
        item_size = ITEM_SIZES[DTYPES[dtype]]
        flat = self._typed.get((storage, dtype))
        if flat is None:
            flat = self._typed[storage, dtype] = self._ranges[storage].view(getattr(torch, DTYPES[dtype]))
        missing = len(shape) - len(self._layout.tensors[tensor].shape)
        values = flat.as_strided(
            shape[missing:] or [1],
            [stride // item_size for stride in strides[missing:]] or [1],
            flat.storage_offset() + offset // item_size,
        )
        hashed_dtype = getattr(torch, DTYPES[hashed])
        for slab, spans in slabs_of(values, spans_of(start[missing:], shape[missing:], step[missing:])):
            words = slab if slab.dtype == hashed_dtype else self._as(slab, hashed_dtype)
            add_slab_sum(self._totals_T[tensor], words, spans)
            yield

    def _as(self, slab: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a converted slab, in memory that the next one reuses."""
        if self._converted is None or self._converted.dtype != dtype or len(self._converted) < slab.numel():
            self._converted = slab.new_empty(_slab_elements(slab), dtype=dtype)
        return self._converted[: slab.numel()].view(slab.shape).copy_(slab)


def spans_of(start: Sequence[int], shape: Sequence[int], step: Sequence[int]) -> list[Span]:
    """Return the global indices along each dimension; a scalar is a vector of one element."""
    num_dims = len(shape)
    spans = [(num_dims - dim, *span) for dim, span in enumerate(zip(start, shape, step, strict=True))]
    return spans or [(1, 0, 1, 1)]


def slabs_of(values: torch.Tensor, spans: list[Span]) -> Iterator[tuple[torch.Tensor, list[Span]]]:
    """Cut a slice into slabs, and yield each with its global indices."""
    from tandem.refit.digests.kernels import MAX_COLUMNS

    sizes = [num for _, _, num, _ in spans]
    budget = _slab_elements(values)
    steps = [0] * len(sizes)
    for dim in reversed(range(len(sizes))):
        max_size = min(budget, MAX_COLUMNS) if dim == len(sizes) - 1 else budget
        steps[dim] = max(1, min(sizes[dim], max_size))
        budget //= steps[dim]
    if steps == sizes:
        yield values, spans
        return
    for corner in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        slab, slab_spans = values, []
        for (dim, first, size, stride), at, max_size in zip(spans, corner, steps, strict=True):
            num = min(max_size, size - at)
            slab = slab.narrow(len(spans) - dim, at, num)
            slab_spans.append((dim, first + at * stride, num, stride))
        yield slab, slab_spans


def _slab_elements(values: torch.Tensor) -> int:
    return _SLAB_BYTES[values.device.type] // values.element_size()


class FrozenDigests:
    """The digests of frozen tensors, computed once."""

    def __init__(self, task: DigestTask) -> None:
        """Start from a task that computes them."""
        self._task = task
        self._known: Digests | None = None

    @property
    def expected_s(self) -> float:
        """Rough seconds until the digests are known."""
        return self._task.expected_s if self._known is None else 0.0

    def advance(self, seconds: float) -> bool:
        """Work for this long; return whether the digests are known."""
        if self._known is None and self._task.advance(seconds):
            self._known = self._task.result()
        return self._known is not None

    def result(self) -> Digests:
        """Finish the work, and return the digests, one per tensor."""
        self.advance(math.inf)
        assert self._known is not None, "the task was run to its end"
        return self._known


class VersionDigest:
    """The digests of a version: changing tensors by a `DigestTask`, frozen ones, and a check of merged weights."""

    def __init__(self, changing: DigestTask, frozen: FrozenDigests, merges: Iterator[None], merges_s: float) -> None:
        """Set the work up; `merges` checks the merged weights step by step, in about `merges_s` altogether.

        It raises `RefitError` at a difference.
        """
        self._changing = changing
        self._frozen = frozen
        self._merges = merges
        self.expected_s = changing.expected_s + frozen.expected_s + merges_s
        """Rough duration on an idle machine, in seconds."""

    def advance(self, seconds: float) -> bool:
        """Work for this long, or a little longer; return whether everything is done."""
        deadline = time.perf_counter() + seconds
        if not self._frozen.advance(seconds) or not self._changing.advance(deadline - time.perf_counter()):
            return False
        return all(time.perf_counter() < deadline for _ in self._merges)

    def result(self) -> Digests:
        """Finish the work, and return this process's partial digest of each tensor."""
        self.advance(math.inf)
        return self._changing.result() + self._frozen.result()

    def results(self) -> tuple[Digests]:
        """Return `result` as that of the only worker of a process."""
        return (self.result(),)


def digest_layout(
    layout: Layout,
    storages: Mapping[str, torch.Tensor],
    verification: ProcessVerification | None = None,
    *,
    sampling: ElementSampling | None = None,
    quantisations: Sequence[Quantisation] = (),
) -> NDArray[np.uint64]:
    """Return the digests of a process's weights, one per tensor, by running a `DigestTask` to its end."""
    return DigestTask(layout, storages, verification, sampling=sampling, quantisations=quantisations).result()


def digest_box(name: str, global_shape: tuple[int, ...], box: Box, values: torch.Tensor) -> int:
    """Return a slice's partial digest of tensor `name`.

    Args:
        name: Hugging Face name of the tensor.
        global_shape: shape of the whole tensor.
        box: the slice in `values`.
        values: of the slice's shape, any strides, elements of 1, 2 or 4 bytes.

    Returns:
        An unsigned 64-bit number; add partial digests up with `combine`.

    Raises:
        RefitError: the elements have another size.

    """
    from tandem.refit.digests.kernels import slab_sum

    if box.num_elements == 0:
        return 0
    assert tuple(values.shape) == box.shape, f"{name}: {tuple(values.shape)} is not the shape of {box}"
    spans = spans_of(box.start, box.shape, (1,) * len(box.shape))
    elements = values.detach().reshape(box.shape or (1,))
    total = sum(int(slab_sum(slab, slab_spans)) for slab, slab_spans in slabs_of(elements, spans))
    return combine(total * terms.salt(name, global_shape, str(values.dtype).removeprefix("torch.")))
