"""Processes that are asked to end: those that leave it to another, and those that do so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE_S = 120.0
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def running(program: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a group of its own, from the moment on at which it prints a line."""
    words = [*before, sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{program}"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, process_group=0, preexec_fn=_ignore_nothing
    ) as process:
        try:
            assert said(process) == "ready"
            yield process
        finally:
            process.kill()


def _ignore_nothing() -> None:
    """Have a process hear what whoever started the tests ignores: `nohup` does, and a shell in the background."""
    for number in ALL:
        signal.signal(number, signal.SIG_DFL)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_leaves_signals_to_the_coordinator_goes_on_and_what_it_starts_does_not() -> None:
    program = """
from tandem.common import signals
signals.leave_to_coordinator()
child = subprocess.Popen(["sleep", "60"])
print("ready", flush=True)
child.terminate()
print(child.wait(), flush=True)
for line in sys.stdin:
    print("here", flush=True)
"""
    words = [sys.executable, "-c", f"import subprocess, sys\n{program}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert said(process) == "ready"
        assert said(process) == str(-signal.SIGTERM)
        for number in ALL:
            process.send_signal(number)
            process.stdin.write("are you there?\n")
            process.stdin.flush()
            assert said(process) == "here"
        process.kill()


INTERRUPTED = """
from tandem.common import signals
signals.interrupt_when_asked()
number = 0
while number < 2:
    try:
        os.write(1, (b"ready\\n", b"interrupted\\n")[number])
        time.sleep(2.0)
        break
    except KeyboardInterrupt:
        number += 1
print(number, flush=True)
"""


IN_A_FINALIZER = """
from tandem.common import signals
signals.interrupt_when_asked()
class Finalized:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(2.0)
sys.unraisablehook = lambda ignored: print(ignored.exc_type.__name__, flush=True)
finalized = Finalized()
del finalized
with signals.hear_signals(lambda number: print(number, flush=True)):
    print("listens", flush=True)
with signals.hear_signals(lambda number: print(number, flush=True)):
    print("listens again", flush=True)
"""


@pytest.mark.parametrize("number", ALL, ids=[each.name for each in ALL])
def test_a_request_that_comes_in_a_finalizer_is_heard_when_the_process_begins_to_listen(number: signal.Signals) -> None:
    with running(IN_A_FINALIZER) as process:
        process.send_signal(number)
        assert [said(process) for _ in range(4)] == ["KeyboardInterrupt", str(int(number)), "listens", "listens again"]


@pytest.mark.parametrize("number", ALL, ids=[each.name for each in ALL])
def test_all_ways_to_ask_are_an_interrupt_and_only_ctrl_c_is_another(number: signal.Signals) -> None:
    with running(INTERRUPTED) as process:
        process.send_signal(number)
        assert said(process) == "interrupted"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
        assert said(process) == "1"
    with running(INTERRUPTED.replace("time.sleep(2.0)", "time.sleep(20.0)")) as process:
        process.send_signal(number)
        assert said(process) == "interrupted"
        process.send_signal(signal.SIGINT)
        assert said(process) == "2"


def test_what_was_ignored_before_stays_so() -> None:
    with running(INTERRUPTED, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        assert said(process) == "0"


STUCK = """
from tandem.common import signals
signals._STUCK_S = 0.5
signals.interrupt_when_asked()
signals.end_when_stuck()
"""
DEAF = """
is_ready = False
while True:
    try:
        if not is_ready:
            is_ready = True
            print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.parametrize("number", ALL, ids=[each.name for each in ALL])
def test_what_hears_of_nothing_is_ended(number: signal.Signals) -> None:
    with running(STUCK + DEAF) as process:
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 128 + number


def test_signals_of_a_child_are_not_its_parents() -> None:
    fork = """
print("ready", flush=True)
read, write = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(write, b".")
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)
os.read(read, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
time.sleep(1.5)
print("still here", flush=True)
"""
    with running(STUCK + fork) as process:
        assert said(process) == "still here"


LEAVES = """
from tandem.common import signals
if IS_LAUNCHED:
    signals.leave_to_coordinator()
else:
    signals._STUCK_S = 0.5
    signals.interrupt_when_asked()
    watch = signals.end_when_stuck()
    watch.leave_first()
# Written past Python's buffer: the signal may come while "ready" is being flushed.
signals.leave_when_asked(lambda: os.write(1, b"leaves\\n"), is_launched=IS_LAUNCHED)
try:
    print("ready", flush=True)
    for line in iter(lambda: time.sleep(0.05), ""):
        pass
except KeyboardInterrupt:
    print("ended", flush=True)
"""


@pytest.mark.parametrize("number", ALL, ids=[each.name for each in ALL])
def test_who_leaves_is_asked_twice_at_once_and_goes_on_until_it_is_asked_again(number: signal.Signals) -> None:
    with running(LEAVES.replace("IS_LAUNCHED", "False")) as process:
        process.send_signal(number)
        assert said(process) == "leaves"
        process.send_signal(signal.SIGTERM)
        assert said(process) == "leaves", "it is one request"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)  # it is not taken for stuck
        process.send_signal(signal.SIGINT)
        assert said(process) == "ended"


def test_who_was_launched_leaves_when_it_is_asked_alone_and_not_when_all_are() -> None:
    with running(LEAVES.replace("IS_LAUNCHED", "True")) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert said(process) == "leaves"
        time.sleep(2.5)
        process.send_signal(signal.SIGTERM)
        assert said(process) == "ended"


def test_a_terminal_that_has_closed_ends_no_process_that_prints() -> None:
    """A write may fail before the signal comes that says so; here none does, as the terminal is not its own."""
    ours, theirs = os.openpty()
    program = """
import sys
from tandem.common import signals
with signals.hear_signals(lambda number: None):
    print("ready", flush=True)
    sys.stdin.readline()
    for stream in (sys.stdout, sys.stderr):
        print("more", file=stream, flush=True)
    print("and more", flush=True)
sys.exit(7)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        assert os.read(ours, 100).startswith(b"ready")
        os.close(ours)
        process.communicate(b"\n", timeout=PATIENCE_S)
    assert process.returncode == 7


TWICE_AT_ONCE = """
from tandem.common import signals
from tandem.coordinator.loop.loop import PendingInterrupts

ask, rounds = os.pipe(), 10_000
if (asking := os.fork()) == 0:
    for number in range(rounds):
        os.read(ask[0], 1)
        os.kill(os.getppid(), signal.SIGTERM)
        until = time.perf_counter() + number % 100 * 1e-6
        while time.perf_counter() < until:
            pass
        os.kill(os.getppid(), signal.SIGTERM)
        os.kill(os.getppid(), signal.SIGHUP)
    os._exit(0)
print("ready", flush=True)
numbers = []
for _ in range(rounds):
    interrupts = PendingInterrupts()
    def hear(number):
        interrupts.hear(number)
        numbers.append(number)
    numbers.clear()
    with signals.hear_signals(hear):
        os.write(ask[1], b"?")
        while signal.SIGHUP not in numbers:
            pass
    assert interrupts.take() is not None
    if (again := interrupts.take()) is not None:
        break
os.kill(asking, signal.SIGKILL)
os.waitpid(asking, 0)
print("once each" if again is None else f"asked twice: {again}", flush=True)
"""


def test_signals_that_interrupt_the_handling_of_one_another_are_one_request() -> None:
    with running(TWICE_AT_ONCE) as process:
        assert said(process) == "once each"
