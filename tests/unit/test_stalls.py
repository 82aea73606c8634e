"""The script that stalls the processes of a suite: they pause without notice, and go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.scripts import ROOT, load_script

SCRIPT = ROOT / "scripts" / "stalls.py"
PAUSES = """
import sys, time
until = time.monotonic() + 120
while time.monotonic() < until:
    before = time.monotonic()
    time.sleep(0.01)
    if time.monotonic() - before > 0.2:
        sys.exit(7)
"""


def test_a_process_pauses_and_goes_on_and_nothing_stays() -> None:
    root = load_script("stalls").root_of_cgroups()
    if root is None:
        pytest.skip("cgroup v2 cannot be changed here")
    before = {*root.glob("stalls-*")}  # this suite may run under the script itself
    done = subprocess.run([sys.executable, SCRIPT, sys.executable, "-c", PAUSES], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout.endswith(" stalls of 0.2 to 0.8 s\n")
    assert {*root.glob("stalls-*")} == before
