"""What NVIDIA's driver is asked, by a library that stands in for it."""

from __future__ import annotations

import pytest
from nvml_library import Library

from tandem.observe.exporters.nvml import Nvml, list_visible_gpus, use_nvml


def test_how_gpus_are_used() -> None:
    library = Library()
    nvml = Nvml(library)
    first, second = nvml.uses()
    assert (first.name, first.memory_gb, first.used_gb, first.utilisation) == ("H200", 150.0, 50.0, 0.75)
    assert (first.power_w, first.temperature_c, first.pcie_gb_per_s) == (650.5, 61, 1.5)
    assert first.nvlink_gb_per_s is None, "it is counted from now on"
    assert second.utilisation is None, "the driver does not say"
    library.moved_kib = 1 << 30
    assert (nvml.uses([0, 7])[0].nvlink_gb_per_s or 0) > 0
    assert len(nvml.uses([0, 7])) == 1


def test_how_gpus_are_linked() -> None:
    first, second = Nvml(Library()).links()
    assert (first.num_nvlinks, first.pcie, first.peers) == (18, "PCIe 5 x16", {1: "NVLink"})
    assert second.peers == {0: "the link between processors"}


def test_there_may_be_no_driver() -> None:
    with use_nvml() as nvml:
        assert nvml is None or nvml.num_gpus() >= 0


@pytest.mark.parametrize(
    ("visible", "expected"), [("", []), ("1", [1]), ("1, 0", [1, 0]), ("0,9", [0]), ("-1", []), ("GPU-8f", [0, 1])]
)
def test_which_gpus_a_process_has(visible: str, expected: list[int]) -> None:
    assert list_visible_gpus(2, visible) == expected
