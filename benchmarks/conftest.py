"""What a result says about the machine, enough to judge it by and nothing that names it; smoke tests are one round.

With ``TANDEM_BENCHMARK_SMOKE=1`` each benchmark runs once, by the first of its parameters, with the sizes of `smoke`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the first parameters of each benchmark in a smoke test."""
    if not IS_SMOKE:
        return
    seen, kept, left_out = set(), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left_out if name in seen else kept).append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True)
def _one_round(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure one round in a smoke test, and do not warm up."""
    if not IS_SMOKE:
        return
    pedantic = BenchmarkFixture.pedantic

    def once(self: BenchmarkFixture, target: Any, *arguments: Any, **options: Any) -> Any:
        return pedantic(self, target, *arguments, **options | {"rounds": 1, "warmup_rounds": 0, "iterations": 1})

    monkeypatch.setattr(BenchmarkFixture, "pedantic", once)
