"""The time for which a trainer's thread could have run, but no processor was free."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tandem.trainer.waiting import measured

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it"
)
BURN = "while True: pass"
S = 1.0


def busy_for(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_a_busy_machine_lets_a_thread_wait_and_sleeping_is_its_own() -> None:
    cpu = torch.device("cpu")
    processors = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(4 * processors)]
    try:
        with measured(cpu) as crowded:
            busy_for(S)
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert crowded.compute_s >= S
    assert 0.3 * crowded.compute_s < crowded.queued_s <= crowded.compute_s
    with measured(cpu) as asleep:
        time.sleep(S)
    assert asleep.queued_s < 0.5 * asleep.compute_s, "the work of a thread that sleeps became slower itself"
