"""A library that stands in for pynvml, with two GPUs: machines that test have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pynvml = pytest.importorskip("pynvml")


class Library:
    """Two GPUs; the second does not answer everything."""

    NVMLError = pynvml.NVMLError

    def __init__(self) -> None:
        self.moved_kib = 0
        self.num_opened = 0

    def nvmlInit(self) -> None:
        self.num_opened += 1

    def nvmlShutdown(self) -> None:
        pass

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
