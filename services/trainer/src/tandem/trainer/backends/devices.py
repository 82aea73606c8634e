"""The device that a trainer computes on."""

from __future__ import annotations

import torch


def device_of(index: int) -> torch.device:
    """Return the device of a trainer. Trainers take a node's GPUs from the first on (`tandem.config.placement`)."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
