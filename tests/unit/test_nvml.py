"""What NVIDIA's driver is asked, by a library that stands in for it: machines that test have no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.observe.exporters.nvml import Nvml, opened_nvml, own_gpus

pynvml = pytest.importorskip("pynvml")


class Library:
    """Two GPUs; the second does not answer everything."""

    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.moved_kib = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # its constants, above all; a call would find no driver

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return "H200" if handle else b"H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=150_000_000_000, used=50_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPcieThroughput(self, handle: int, side: int) -> int:
        return 1_000_000 if side == pynvml.NVML_PCIE_UTIL_TX_BYTES else 500_000

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        value = SimpleNamespace(ullVal=self.moved_kib)
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value) for _ in fields]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetP2PStatus(self, handle: int, peer: int, index: int) -> int:
        return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED if handle else pynvml.NVML_P2P_STATUS_OK)

    def nvmlDeviceGetTopologyCommonAncestor(self, handle: int, peer: int) -> int:
        return int(pynvml.NVML_TOPOLOGY_SYSTEM)


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
    with opened_nvml() as nvml:
        assert nvml is None or nvml.num_gpus() >= 0


@pytest.mark.parametrize(
    ("visible", "expected"), [("", []), ("1", [1]), ("1, 0", [1, 0]), ("0,9", [0]), ("-1", []), ("GPU-8f", [0, 1])]
)
def test_which_gpus_a_process_has(visible: str, expected: list[int]) -> None:
    assert own_gpus(2, visible) == expected
