"""What a result says about the machine it was measured on: enough to judge it by, and nothing that names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

_KEPT = ("processor", "machine", "python_compiler", "python_implementation", "python_version", "system")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


@pytest.hookimpl(trylast=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Describe the machine."""
    import torch

    cpu = machine_info.get("cpu", {})
    kept = {key: machine_info[key] for key in _KEPT if key in machine_info}
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine_info.clear()
    machine_info.update(
        {
            "node": f"{os.cpu_count()}-core CPU machine",
            **kept,
            "cpu": {key: cpu[key] for key in ("brand_raw", "count", "arch") if key in cpu},
            "memory GiB": round(gigabytes, 1),
            "torch": torch.__version__,
            "huge pages": {name: _chosen(_HUGE_PAGES / name) for name in ("enabled", "shmem_enabled")},
        }
    )


def _chosen(path: Path) -> str:
    """Return the setting in brackets."""
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else ""
