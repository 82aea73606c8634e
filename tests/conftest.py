"""Every test leaves the machine as it found it: no process, socket, shared memory or thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.threads import sum_reproducibly
from tests.harness import leaks

_SEGMENT_NAMES = ("torch_", "psm_", "sem.", "mp-", "tandem")
"""What libraries of ours would leave in shared memory: torch, multiprocessing, or Tandem itself."""
_LONG_FILES = (
    "test_planned_memory.py",
    "test_explain.py",
    "test_scheduler_fuzz.py",
    "test_ages.py",
    "test_scheduler_ages.py",
    "test_reward_model_environment.py",
    "test_doctor.py",
    "test_supervision.py",
    "test_workers.py",
    "test_init.py",
    "test_config_nemo_rl_07_keys.py",
    "test_reward_workers.py",
    "test_same_numbers_dtensor.py",
    "test_deaths.py",
    "test_checkpoints.py",
    "test_same_numbers_megatron.py",
    "test_chaos.py",
    "test_models.py",
    "test_ppo.py",
    "test_lora.py",
    "test_survival.py",
    "test_losses.py",
    "test_python_api.py",
    "test_agents.py",
    "test_roles.py",
    "test_asynchronous_deaths.py",
    "test_dtensor_weights.py",
    "test_pages_typed.py",
    "test_dtensor.py",
    "test_two_hosts.py",
    "test_readme.py",
    "test_lora_algorithms.py",
    "test_replay.py",
    "test_bisect.py",
    "test_run.py",
    "test_front_end.py",
    "test_check.py",
    "test_bad_input.py",
    "test_diagnose.py",
    "test_turns.py",
    "test_docs.py",
    "test_live_run.py",
    "test_packed_rows.py",
    "test_kept_copy.py",
    "test_join.py",
    "test_transports_stream.py",
)
"""The longest first: they begin in this order where files run side by side, and those of seconds come last, so that no
process is left alone with a long one at the end."""
_UNTIL = float(os.environ.get("TANDEM_TESTS_UNTIL", "inf"))
"""When no more tests begin, in seconds of the epoch: CI has an end, and its machine may be slow."""
_LOOKS: dict[str, Callable[[], set[Any]]] = {
    "listening socket": leaks.listeners,
    "thread": leaks.threads,
}

sum_reproducibly()  # as services do, whose bits tests compare
leaks.mark_processes()
pytest.register_assert_rewrite("async_rollouts_cases")  # tests, in a module that is no test module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; `tox.ini` has pytest-xdist keep the order."""
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left, and say so; before its fixtures begin."""
    if time.time() > _UNTIL:
        pytest.skip(f"no time was left for {item.path.name}")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks; what is still on its way out gets a few seconds."""
    before, segments, pids = {what: look() for what, look in _LOOKS.items()}, leaks.segments(), leaks.pids()
    yield
    deadline = time.monotonic() + leaks.SETTLE_S
    while leaked := _leaked(before, segments, pids):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {leaked}")
        time.sleep(0.05)


def _leaked(before: dict[str, set[Hashable]], segments: set[str], pids: frozenset[int]) -> dict[str, set[Hashable]]:
    """Return what there is now and was not before, by kind."""
    found: dict[str, set[Hashable]] = {what: look() - before[what] for what, look in _LOOKS.items()}
    found["process"] = {*leaks.new_processes(pids)}
    found["segment"] = {name for name in leaks.new_segments(segments) if name.startswith(_SEGMENT_NAMES)}
    return {what: left for what, left in found.items() if left}


@pytest.fixture(autouse=True)
def own_working_directory(tmp_path: Path) -> Iterator[None]:
    """Run each test in its own folder: configurations name results relative to the working directory."""
    previous = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(previous)
