"""What all tests of the simulated GPU begin with."""

from __future__ import annotations

from multiprocessing import resource_tracker

resource_tracker.ensure_running()  # Python keeps it for as long as this process lives: no test leaves it behind
