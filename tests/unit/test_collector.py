"""The garbage collector rests while modules are imported, and when a process ends, and works in between."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tandem.common import collector

ENDING = """
import gc, sys
from tandem.common import collector
collector.retire_at_exit()
class Seen:
    def __del__(self):
        print("collected", flush=True)
seen = Seen()
seen.itself = seen
del seen
gc.disable()
"""
ASKED = ENDING.replace("gc.disable()", "gc.collect()").replace("retire_at_exit()", "{}")


def test_nothing_is_collected_inside_the_block_and_something_after_it() -> None:
    with collector.paused():
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="inside"), collector.paused():
            raise ValueError("inside")
        assert not gc.isenabled(), "an inner block leaves the outer one alone"
    assert gc.isenabled()


@pytest.mark.parametrize(("what", "prints"), [("retire_at_exit()", ""), ("paused()", "collected\n")])
def test_a_process_that_ends_collects_nothing(what: str, prints: str) -> None:
    code = ENDING.replace("retire_at_exit()", what)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == prints


@pytest.mark.parametrize(("what", "prints"), [("keep()", "collected\n"), ("retire()", "")])
def test_what_was_made_later_is_collected_until_the_end_has_begun(what: str, prints: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ASKED.format(what) + "\ngc.freeze()"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == prints
