"""What all tests on GPUs begin with."""

from __future__ import annotations

from multiprocessing import resource_tracker

from tests.harness.runs.console_server import console_server as console_server

resource_tracker.ensure_running()  # Python keeps it for as long as this process lives: no test leaves it behind
