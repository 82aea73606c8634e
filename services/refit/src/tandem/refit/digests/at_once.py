"""Digests that are computed at once, of a whole layout or of one box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.refit.digests import terms
from tandem.refit.digests.comparison import combine
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.layout import Box, Layout
from tandem.refit.program import ProcessVerification, Quantisation

if TYPE_CHECKING:  # comparing digests needs no torch
    import torch

from tandem.refit.digests.task import DigestTask, slabs_of, spans_of


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
