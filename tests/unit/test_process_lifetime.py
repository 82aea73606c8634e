"""What a guardian ends when its owner is killed, also where the owner takes a while to exit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from tests.harness.leaks import gone, is_alive

OWNER = """
import ctypes, os, socket, subprocess, sys, threading, time
from pathlib import Path
from tandem.common import process_lifetime

process_lifetime._LOOK_S = 0.01
list_descendants, looks = process_lifetime.list_descendants, Path("looks")

def look(pid):
    found = list_descendants(pid)
    with looks.open("a") as file:
        file.write(".")
    return found

def await_looks():
    before = len(looks.read_text())
    while len(looks.read_text()) < before + 3:
        time.sleep(0.01)

process_lifetime.list_descendants = look
looks.touch()
ours, theirs = socket.socketpair()
owner = os.getpid()
if os.fork() == 0:
    ours.close()
    process_lifetime.fork_guarded(theirs.fileno(), owner)
    time.sleep(600)
theirs.close()
ours.sendall(process_lifetime.WATCH)
between = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; read line"], stdin=subprocess.PIPE)
await_looks()  # the guardian has seen both

def go_on():
    while ") Z " not in open(f"/proc/{owner}/stat").read():  # its first thread has exited
        time.sleep(0.01)
    between.stdin.close()  # which orphans the one that sleeps
    between.wait()
    await_looks()
    print("exiting", flush=True)
    time.sleep(600)

threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_what_an_exiting_owner_has_lost_already_ends_with_it() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout, owner:
        lost = int(owner.stdout.readline())
        try:
            assert owner.stdout.readline() == "exiting\n"
            assert is_alive(lost)
            owner.kill()
            assert gone([lost])
        finally:
            owner.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(lost, signal.SIGKILL)
