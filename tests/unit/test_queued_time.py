"""The time for which a trainer's thread could have run, but no processor was free."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import _functional_collectives

from tandem.trainer.rank_time import measured

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it"
)
BURN = "while True: pass"
S = 1.0


def busy_for(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@contextmanager
def busy_machine() -> Iterator[None]:
    processors = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(4 * processors)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def test_a_busy_machine_lets_a_thread_wait_and_sleeping_is_its_own() -> None:
    cpu = torch.device("cpu")
    with busy_machine(), measured(cpu) as crowded:
        busy_for(S)
    assert crowded.compute_s >= S
    assert 0.3 * crowded.compute_s < crowded.queued_s <= crowded.compute_s
    with measured(cpu) as asleep:
        time.sleep(S)
    assert asleep.queued_s < 0.5 * asleep.compute_s, "the work of a thread that sleeps became slower itself"


def test_a_processor_that_is_waited_for_while_other_ranks_are_is_not_taken_from_a_ranks_own_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_functional_collectives, "wait_tensor", busy_for)
    with busy_machine(), measured(torch.device("cpu")) as found:
        _functional_collectives.wait_tensor(2 * S)  # type: ignore[arg-type]  # a wait that ends after so long
        time.sleep(S / 2)
    assert found.waited_s >= 2 * S
    assert found.compute_s - found.queued_s >= S / 2
