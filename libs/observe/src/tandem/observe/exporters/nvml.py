"""State and links of GPUs, as NVIDIA's driver reports them through NVML; a thread that monitors.

Without a GPU or a driver, or if the driver does not answer, there is nothing to report, which is not an error.

The thread is not part of the run: values that the driver does not give are left out, and a driver that hangs blocks
only this thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tandem.config.schema import LoggerConfig

_KILOBYTE = 1e3
_KIBIBYTE = 1024.0
_GB = 1e9
_ALL_LINKS = 0xFFFFFFFF
_ENDED_S = 5.0


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one GPU; None for values that its driver does not report."""

    index: int
    name: str
    memory_gb: float | None = None
    """Total memory; 10^9 bytes, as everywhere."""
    used_gb: float | None = None
    """Memory used by all processes."""
    utilisation: float | None = None
    """Share of the most recent moments in which it computed."""
    power_w: float | None = None
    temperature_c: float | None = None
    pcie_gb_per_s: float | None = None
    """Rate of sending and receiving over PCIe in the most recent moments."""
    nvlink_gb_per_s: float | None = None
    """Rate of sending and receiving over all NVLinks since the last call."""


MEASURED = tuple(name for name in GpuUse.__struct_fields__ if name not in ("index", "name", "memory_gb"))
"""Names of the values that change, and are measured repeatedly."""


class GpuLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The connections of one GPU."""

    index: int
    name: str
    memory_gb: float | None
    num_nvlinks: int
    """Number of active NVLinks."""
    pcie: str
    """Such as ``PCIe 5 x16``; empty if the driver does not report it."""
    peers: dict[int, str]
    """Link to each other GPU: ``NVLink``, or the closest common part of their PCIe routes."""


class Nvml:
    """The driver, open until it is closed."""

    def __init__(self, library: Any) -> None:
        """Use the initialised module ``pynvml`` as `library`."""
        self._library = library
        self._error: type[Exception] = library.NVMLError
        self._moved: dict[int, tuple[float, float]] = {}
        """Time and NVLink traffic of each GPU at the last call."""

    def driver(self) -> str:
        """Return the driver's version; empty if it does not report one."""
        return str(self._ask(self._library.nvmlSystemGetDriverVersion) or "")

    def num_gpus(self) -> int:
        """Return the number of GPUs."""
        return int(self._ask(self._library.nvmlDeviceGetCount) or 0)

    def uses(self, indices: Sequence[int] | None = None) -> list[GpuUse]:
        """Return the current state of all or some GPUs, without missing ones."""
        gpu_indices = range(self.num_gpus()) if indices is None else indices
        handles = ((index, self._ask(self._library.nvmlDeviceGetHandleByIndex, index)) for index in gpu_indices)
        return [self._use(index, handle) for index, handle in handles if handle is not None]

    def links(self) -> list[GpuLinks]:
        """Return the connections of each GPU."""
        library = self._library
        handles = [self._ask(library.nvmlDeviceGetHandleByIndex, index) for index in range(self.num_gpus())]
        links = []
        for index, handle in enumerate(handles):
            if handle is None:
                continue
            memory = self._ask(library.nvmlDeviceGetMemoryInfo, handle)
            states = [self._ask(library.nvmlDeviceGetNvLinkState, handle, link) for link in _nvlinks(library)]
            generation = self._ask(library.nvmlDeviceGetMaxPcieLinkGeneration, handle)
            width = self._ask(library.nvmlDeviceGetMaxPcieLinkWidth, handle)
            peers = {i: self._way(handle, peer) for i, peer in enumerate(handles) if i != index and peer is not None}
            links.append(
                GpuLinks(
                    index=index,
                    name=_text(self._ask(library.nvmlDeviceGetName, handle)),
                    memory_gb=None if memory is None else memory.total / _GB,
                    num_nvlinks=sum(bool(state) for state in states),
                    pcie=f"PCIe {generation} x{width}" if generation and width else "",
                    peers=peers,
                )
            )
        return links

    def close(self) -> None:
        """Release the driver."""
        with contextlib.suppress(self._error):
            self._library.nvmlShutdown()

    def _use(self, index: int, handle: Any) -> GpuUse:
        library = self._library
        memory = self._ask(library.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(library.nvmlDeviceGetPowerUsage, handle)
        sides = (library.NVML_PCIE_UTIL_TX_BYTES, library.NVML_PCIE_UTIL_RX_BYTES)
        pcie = [self._ask(library.nvmlDeviceGetPcieThroughput, handle, side) for side in sides]
        return GpuUse(
            index=index,
            name=_text(self._ask(library.nvmlDeviceGetName, handle)),
            memory_gb=None if memory is None else memory.total / _GB,
            used_gb=None if memory is None else memory.used / _GB,
            utilisation=None if rates is None else rates.gpu / 100,
            power_w=None if power is None else power / 1e3,
            temperature_c=self._ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
            pcie_gb_per_s=None if None in pcie else sum(pcie) * _KILOBYTE / _GB,
            nvlink_gb_per_s=self._nvlink_rate(index, handle),
        )

    def _nvlink_rate(self, index: int, handle: Any) -> float | None:
        """Return the traffic since the last call; None for the first call, and if it is not counted."""
        library = self._library
        fields = (library.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, library.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        counted = self._ask(library.nvmlDeviceGetFieldValues, handle, [(field, _ALL_LINKS) for field in fields])
        if counted is None or any(field.nvmlReturn != library.NVML_SUCCESS for field in counted):
            return None
        now = time.monotonic()
        moved: float = sum(field.value.ullVal for field in counted) * _KIBIBYTE
        before = self._moved.get(index)
        self._moved[index] = now, moved
        if before is None or now <= before[0]:
            return None
        return max(0.0, moved - before[1]) / (now - before[0]) / _GB

    def _way(self, handle: Any, peer: Any) -> str:
        library = self._library
        status = self._ask(library.nvmlDeviceGetP2PStatus, handle, peer, library.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == library.NVML_P2P_STATUS_OK:
            return "NVLink"
        ways = {
            library.NVML_TOPOLOGY_INTERNAL: "one board",
            library.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
            library.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
            library.NVML_TOPOLOGY_HOSTBRIDGE: "one PCIe host bridge",
            library.NVML_TOPOLOGY_NODE: "one NUMA node",
            library.NVML_TOPOLOGY_SYSTEM: "the link between processors",
        }
        return ways.get(self._ask(library.nvmlDeviceGetTopologyCommonAncestor, handle, peer), "unknown")

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer; None if the driver has none."""
        try:
            return question(*arguments)
        except self._error:
            return None


@contextlib.contextmanager
def use_nvml() -> Iterator[Nvml | None]:
    """Open the driver for the block; None if there is none."""
    nvml = open_nvml()
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.close()


def open_nvml() -> Nvml | None:
    """Open the driver, which the caller closes; None if there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return Nvml(pynvml)


def list_visible_gpus(num_gpus: int, visible: str | None = None) -> list[int]:
    """Return the numbers of the GPUs that this process may use, from ``CUDA_VISIBLE_DEVICES``; all without it.

    It also returns all of them if GPUs are named by anything but numbers.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if visible is None:
        return [*range(num_gpus)]
    words = [word.strip() for word in visible.split(",") if word.strip()]
    if not all(word.lstrip("-").isdecimal() for word in words):
        return [*range(num_gpus)]
    return [index for index in map(int, words) if 0 <= index < num_gpus]


def _nvlinks(library: Any) -> range:
    return range(int(library.NVML_NVLINK_MAX_LINKS))


def _text(name: str | bytes | None) -> str:
    """Return a name, which older releases of the library give as bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name or "GPU"


class GpuMonitor:
    """Monitor of GPUs: it reads them at intervals, and returns means since the last call."""

    def __init__(self, logger: LoggerConfig, opened: Callable[[], Nvml | None] = open_nvml) -> None:
        self._is_on = logger.monitor_gpus
        self._interval_s = logger.gpu_monitoring.collection_interval
        self._opened = opened
        self._lock = threading.Lock()
        self._read: dict[str, list[float]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, first: int, count: int) -> None:
        """Monitor `count` GPUs from `first`, among those that this process may use; none if there are none."""
        if not self._is_on or not count or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._watch, args=(first, count), name="gpu monitor", daemon=True)
        self._thread.start()

    def means(self) -> dict[str, float]:
        """Return the mean of each measurement since the last call, without those that were not read."""
        with self._lock:
            read, self._read = self._read, {}
        return {name: sum(values) / len(values) for name, values in read.items()}

    def close(self) -> None:
        """Stop monitoring."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_ENDED_S)

    def _watch(self, first: int, count: int) -> None:
        nvml = self._opened()
        if nvml is None:
            return
        visible = list_visible_gpus(nvml.num_gpus())
        if visible:
            gpus = [visible[(first + number) % len(visible)] for number in range(count)]
            while not self._ended.is_set():
                self._note(nvml.uses(gpus))
                self._ended.wait(self._interval_s)
        nvml.close()

    def _note(self, uses: Sequence[GpuUse]) -> None:
        with self._lock:
            for use in uses:
                for name in MEASURED:
                    value = getattr(use, name)
                    if value is not None:
                        self._read.setdefault(name, []).append(value)
