"""A run whose processes have few descriptors, among strangers who open connections and say nothing."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.runs.by_hand import assert_same_results, in_folder
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import BIN, Command, coordinator, steps_of, write_config

LIMIT = 256
"""Descriptors of each process, as its hard limit: about three times what the coordinator has open in this run."""
NUM = 300
"""Connections to each port, which are held until the run has ended."""
STEPS = 60
CONFIG: dict[str, Any] = {
    "grpo": {"max_num_steps": STEPS, "val_period": STEPS},
    "checkpointing": {"save_period": STEPS},
    "logger": {"page": "auto"},
}


@contextlib.contextmanager
def held(ports: set[int]) -> Iterator[None]:
    """Hold idle connections to ports of loopback; those that are cut off are made again, once."""
    made: list[socket.socket] = []
    try:
        for port in ports:
            for _ in range(NUM):
                made.append(connection := socket.socket())
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", port))
        yield
    finally:
        for connection in made:
            connection.close()


def listening(run: Command) -> set[int]:
    """Return the ports on which processes of a run listen."""
    found = set()
    for process in (psutil.Process(run.process.pid), *run.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections("tcp")
            found |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def limited(*words: str | Path) -> list[str | Path]:
    program = shutil.which("prlimit")
    if program is None:
        pytest.skip("prlimit is not installed")
    return [program, f"--nofile={LIMIT // 2}:{LIMIT}", *words]


def test_idle_connections_to_every_port_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with in_folder(tmp_path / "alone"):
        alone = coordinator("up", write_config(CONFIG))
        assert alone.returncode == 0, alone.stderr
    (tmp_path / "flooded").mkdir()
    with in_folder(tmp_path / "flooded"):
        hold(at=33)
        with Command(*limited(BIN / "coordinator", "up", write_config(CONFIG))) as run:
            await_hold(run, r"step 2/")
            ports = listening(run)
            assert len(ports) >= 3, "the coordinator, samples, the page"
            with held(ports):
                go_on()
                assert run.wait() == 0, run.output()
        assert "given up" not in run.output()
        assert " is lost" not in run.output(), "no process is"
        assert steps_of()[-1].step == STEPS
        assert_same_results("run", tmp_path / "alone" / "run", same_batches=True)
