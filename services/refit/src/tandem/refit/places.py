"""The names of hosts and devices in layouts."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from tandem.refit.transports import cuda_ipc

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the host name used in layouts; two machines never share it, even with equal configured names."""
    return f"{socket.gethostname()}/{_BOOT_ID.read_text()[:8]}"


def device_name(device: torch.device) -> str:
    """Return the device name used in layouts."""
    return "cpu" if device.type == "cpu" else cuda_ipc.device_uuid(device)
