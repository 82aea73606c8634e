"""Tests on the real vLLM: skipped where it is not installed, and never part of the other tests' environment."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tandem.rollout.engines.vllm import insides
from tests.harness.runs import consoles

HAS_VLLM = importlib.util.find_spec("vllm") is not None and "torch" not in sys.modules
"""vLLM reads its environment once, so nothing may have imported torch before: these tests run on their own."""

if HAS_VLLM:
    insides.prepare_environment(num_threads=1)
    resource_tracker.ensure_running()  # Python keeps it for as long as this process lives: no test leaves it behind
    sys.path.append(str(Path(__file__).parents[1] / "unit"))  # tiny models, and ways to refit an engine from them
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _layout_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep learned layouts apart from those of the machine's user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def console_server() -> Iterator[None]:
    """Start the process that commands are forked from before a test could count it among what the test left behind."""
    with consoles.fork_server():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and of what it imports are not ours to mend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
