"""The garbage collector rests while modules are imported, and when a process ends, and works in between."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tandem.common import gc_tuning

ENDING = """
import gc, sys
from tandem.common import gc_tuning
gc_tuning.retire_at_exit()
class Seen:
    def __del__(self):
        print("collected", flush=True)
seen = Seen()
seen.itself = seen
del seen
gc.disable()
"""
ASKED = ENDING.replace("gc_tuning.retire_at_exit()", "{before}").replace(
    "gc.disable()", "{after}\ngc.collect()\ngc.freeze()"
)


def test_nothing_is_collected_inside_the_block_and_something_after_it() -> None:
    with gc_tuning.pause_collection():
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="inside"), gc_tuning.pause_collection():
            raise ValueError("inside")
        assert not gc.isenabled(), "an inner block leaves the outer one alone"
    assert gc.isenabled()


@pytest.mark.parametrize(("what", "prints"), [("retire_at_exit()", ""), ("pause_collection()", "collected\n")])
def test_a_process_that_ends_collects_nothing(what: str, prints: str) -> None:
    code = ENDING.replace("retire_at_exit()", what)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == prints


@pytest.mark.parametrize(
    ("before", "after", "prints"),
    [
        ("", "gc_tuning.keep()", ""),
        ("gc_tuning.keep()", "", "collected\n"),
        ("", "gc_tuning.retire()", ""),
    ],
)
def test_what_there_was_is_not_looked_at_whoever_asks(before: str, after: str, prints: str) -> None:
    code = ASKED.format(before=before, after=after)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == prints


def test_a_process_that_ends_collects_nothing_by_itself_and_keeps_the_interpreters_own_functions() -> None:
    code = "import gc; from tandem.common import gc_tuning\ncollect = gc.collect\ngc_tuning.retire()\n"
    code += "print(gc.collect is collect, gc.isenabled())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "True False\n"
