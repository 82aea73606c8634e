"""Services that use a GPU, forked from a process above which one was used, or counted, before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_RUNNING, reason="of simulated GPUs: python tests/simulated_gpu/run.py"),
]
SERVICE = """
import torch

def main(arguments):
    print(int(torch.ones(3, device="cuda").sum()), "elements on the device", flush=True)
    return 0
"""
OWNER = """
import sys
import torch
from tandem.launch.fork_server import ServiceForkServer

{touches}
with open("log", "wb") as log, ServiceForkServer(lambda: None, 60.0) as server:
    sys.exit(server.start("own.service", [], log).wait(60.0))
"""


@pytest.mark.parametrize("touches", ["torch.ones(1, device='cuda')", "torch._C._cuda_getDeviceCount()"])
def test_services_use_a_gpu_that_their_owner_has_used(touches: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "service.py").write_text(SERVICE)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)])
    ended = subprocess.run(
        [sys.executable, "-c", OWNER.format(touches=touches)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    said = (tmp_path / "log").read_text()
    assert ended.returncode == 0, said + ended.stderr
    assert "3 elements on the device" in said
