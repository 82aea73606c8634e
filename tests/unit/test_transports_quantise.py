"""Block scales, against the definition in float64 a block at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit.installing import BoundQuantisation, quantise
from tandem.refit.program import Quantisation, QuantisedRegions, QuantizedDestinations
from tandem.refit.transports.memory import NamedStorages

FP8 = torch.float8_e4m3fn


def check_blocks(x: torch.Tensor, block: tuple[int, ...], values: torch.Tensor, scales: torch.Tensor) -> None:
    """Compare with the definition: every scale exactly, every value to half a step of the type."""
    sizes = (1,) * (x.dim() - len(block)) + block
    assert scales.shape == tuple(-(-n // size) for n, size in zip(x.shape, sizes, strict=True))
    assert values.shape == x.shape
    for index in itertools.product(*(range(n) for n in scales.shape)):
        box = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
        elements = x[box].double()
        largest = elements.abs().max().item()
        scale = np.float32(largest) / np.float32(448) if largest else np.float32(1)
        assert scales[index].item() == scale
        held = values[box].double() * float(scale)
        # e4m3 has three bits of mantissa; below 2**-6 its step is 2**-9.
        step = torch.maximum(elements.abs() / 16, torch.tensor(2.0**-10 * float(scale), dtype=torch.float64))
        assert ((held - elements).abs() <= step * (1 + 1e-6)).all()
        if largest:
            assert values[box].double().abs().max().item() == 448, "the largest element fills the range"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_blocks_are_scaled_by_the_definition(
    shape: list[int], block: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[..., -1:] = 0
    values, scales = quantise(x, block, FP8)
    check_blocks(x, block, values, scales)


def test_a_block_of_zeros_has_scale_one_and_an_outlier_stays_in_its_block() -> None:
    x = torch.zeros(4, 4)
    x[0, 0], x[2:, 2:] = 448e6, 1.0
    values, scales = quantise(x, (2, 2), FP8)
    assert scales.tolist() == [[1e6, 1], [1, float(np.float32(1) / np.float32(448))]]
    assert values[2:, 2:].float().unique().tolist() == [448]
    with pytest.raises(RefitError, match="do not fit"):
        quantise(torch.zeros(4), (2, 2), FP8)


def make() -> tuple[Quantisation, dict[str, torch.Tensor], torch.Tensor]:
    """Return one region (6, 4) of blocks (2, 2), whose values go to two places of one storage and scales to another."""
    column = np.array
    regions = QuantisedRegions(column([0]), column([[0, 0]]), column([[6, 4]]), column([64]))
    values = QuantizedDestinations(
        column([0, 0]), column([[0, 0], [2, 0]]), column([[2, 4], [4, 4]]), column([0, 0]), column([0, 40]),
        column([[4, 1], [1, 4]]),
    )  # fmt: skip
    scales = QuantizedDestinations(
        column([0]), column([[1, 0]]), column([[2, 2]]), column([1]), column([8]), column([[8, 4]])
    )
    quantisation = Quantisation(
        dtype="float8_e4m3fn",
        block=(2, 2),
        scales_dtype="float32",
        staging="staging",
        staging_dtype="bfloat16",
        tensors=("w",),
        storages=("values", "scales"),
        regions=regions,
        values=values,
        scales=scales,
    )
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    storages = {
        "staging": torch.zeros(64 + 48, dtype=torch.uint8),
        "values": torch.zeros(56, dtype=torch.uint8),
        "scales": torch.zeros(8),
    }
    storages["staging"][64:].view(torch.bfloat16).copy_(x.flatten())
    return quantisation, storages, x


def test_results_go_to_their_places() -> None:
    quantisation, storages, x = make()
    BoundQuantisation(quantisation, NamedStorages("rollout-0", storages)).run()
    values, scales = quantise(x, (2, 2), FP8)
    held = storages["values"].view(FP8)
    assert torch.equal(held[:8].view(2, 4).float(), values[:2].float())
    assert torch.equal(held[40:56].view(4, 4).T.float(), values[2:].float())
    assert torch.equal(storages["scales"][2:6].view(2, 2), scales[1:])
    assert (storages["values"][8:40] == 0).all()


@pytest.mark.parametrize(("storage", "byte"), [("values", 3), ("values", 55), ("scales", 9), ("staging", 64)])
def test_one_bit_that_differs_is_found(storage: str, byte: int) -> None:
    quantisation, storages, _ = make()
    quantiser = BoundQuantisation(quantisation, NamedStorages("rollout-0", storages))
    assert quantiser.wrong() == ("w",), "nothing has been written"
    quantiser.run()
    assert quantiser.wrong() == ()
    storages[storage].view(torch.uint8)[byte] ^= 1 if storage != "staging" else 0x40
    assert quantiser.wrong() == ("w",)
