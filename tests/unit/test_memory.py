"""The memory that a process takes while it does something."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import psutil
import pytest

from tandem.common import memory
from tandem.common.memory import MemoryMeter

NUM_BYTES = 2**26
NOISE = 2**23
"""What else happens in a process."""


def take() -> mmap.mmap:
    pages = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"\1" * NUM_BYTES)
    return pages


def test_the_peak_is_of_what_was_done_since_the_beginning() -> None:
    meter = MemoryMeter()
    take().close()
    meter.begin()
    before = meter.use()
    assert before.peak - before.held < NOISE, "what was there earlier is forgotten"
    kept = take()
    take().close()
    used = meter.use()
    assert abs(used.held - before.held - NUM_BYTES) < NOISE
    assert used.peak - before.held > 2 * NUM_BYTES - NOISE
    kept.close()


def test_what_a_host_has_left_is_what_its_container_may_still_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    host = psutil.virtual_memory().available
    assert abs(memory.available_bytes() - host) < host / 5
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(memory.available_bytes() - host) < host / 5
    for name, text in {"max": "5000", "current": "4000", "stat": "anon 3000\ninactive_file 700\nfile 900"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert memory.available_bytes() == 1700


def test_where_the_peak_cannot_be_forgotten_both_ends_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no folder" / "file")
    meter = MemoryMeter()
    kept = take()
    meter.begin()
    kept.close()
    used = meter.use()
    assert abs(used.peak - used.held - NUM_BYTES) < NOISE


def test_a_process_without_a_free_descriptor_still_says_how_much_it_takes() -> None:
    meter = MemoryMeter()
    before = meter.use()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        meter.begin()
        used = meter.use()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert used.peak == used.held >= before.held - NOISE
