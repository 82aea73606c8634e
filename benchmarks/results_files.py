"""Files of results: one for each file of benchmarks, as pytest-benchmark writes them, with each one's commit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.utils import safe_dumps


def write(config: pytest.Config, measured: Sequence[Any], folder: Path) -> None:
    """Write what was measured in this session; what else the files have of other benchmarks stays there."""
    hook = config.hook
    machine = hook.pytest_benchmark_generate_machine_info(config=config)
    hook.pytest_benchmark_update_machine_info(config=config, machine_info=machine)
    commit = hook.pytest_benchmark_generate_commit_info(config=config)
    hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit)
    of_file: dict[str, list[Any]] = {}
    for each in measured:
        name = Path(each.fullname.partition("::")[0]).stem.removeprefix("test_")
        of_file.setdefault(name, []).append(each)
    for name, its in of_file.items():
        made = hook.pytest_benchmark_generate_json(
            config=config, benchmarks=its, include_data=True, machine_info=machine, commit_info=commit
        )
        merge(folder / f"{name}.json", made)


def merge(path: Path, made: dict[str, Any]) -> None:
    """Put results in a file, each with its commit and machine, in the place of older ones of the same benchmarks."""
    before = json.loads(path.read_bytes()) if path.exists() else {"benchmarks": []}
    for each in before["benchmarks"]:
        each.setdefault("measured", _measured(before))
    results = {each["name"]: each for each in before["benchmarks"]}
    now = _measured(made) | {"load average of the machine, at the end": os.getloadavg()}
    results |= {each["name"]: each | {"measured": now} for each in made["benchmarks"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".aside")
    aside.write_text(safe_dumps(made | {"benchmarks": list(results.values())}, indent=4) + "\n")
    os.replace(aside, path)


def _measured(file: dict[str, Any]) -> dict[str, Any]:
    """Return when and where the results of a file were measured."""
    commit, machine = file["commit_info"], file["machine_info"]
    return {
        "commit": commit.get("id"),
        "dirty": commit.get("dirty"),
        "datetime": file["datetime"],
        "machine": machine.get("node"),
        "cpu": machine.get("cpu", {}).get("brand_raw"),
    }
