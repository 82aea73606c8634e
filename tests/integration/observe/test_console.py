"""A run on a terminal of its own, which is resized while it goes on."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import termios
import time
from pathlib import Path

import pytest

from tests.harness.runs import consoles
from tests.harness.runs.held_runs import go_on, hold
from tests.harness.runs.record_harness import TWO
from tests.harness.runs.running import TIMEOUT_S, merged, write_config
from tests.harness.runs.terminal import Terminal

STEPS = 6
SIZES = {1: (60, 30), 3: (150, 40)}
"""Columns and rows after a step."""


def set_size(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_step_lines_stay_on_a_terminal_and_resizing_it_leaves_no_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    config = write_config(merged(TWO, {"grpo": {"max_num_steps": STEPS}}))
    for step in SIZES:
        hold(16 * step + 1)
    ours, theirs = pty.openpty()
    terminal = Terminal(110, 40, reflows=True)
    set_size(theirs, 110, 40)
    decode = codecs.getincrementaldecoder("utf-8")().decode
    pending, deadline = dict(SIZES), time.monotonic() + TIMEOUT_S
    seen_display = False
    with os.fdopen(theirs, "wb") as out:
        process = consoles.start("coordinator", ["up", str(config)], out)
    try:
        while time.monotonic() < deadline:
            try:
                terminal.feed(decode(os.read(ours, 1 << 16)))
            except OSError:  # nobody has the other end any more
                break
            text = "\n".join(terminal.lines)
            seen_display |= "last seen" in text
            for step, size in [*pending.items()]:
                if f"step {step}/{STEPS}  reward" in text and "last seen" in text and Path("hold").exists():
                    process.send_signal(signal.SIGSTOP)  # between two pictures
                    terminal.resize(*size)
                    set_size(ours, *size)
                    process.send_signal(signal.SIGCONT)
                    go_on()
                    del pending[step]
        assert process.wait(TIMEOUT_S) == 0, terminal.lines
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        os.close(ours)
    text = "\n".join(terminal.lines)
    assert not pending
    assert seen_display
    lines = re.findall(rf"^step (\d)/{STEPS}  reward .* elapsed(?:, \d+:\d\d:\d\d left)?  \d", text, re.MULTILINE)
    assert lines == [str(step) for step in range(1, STEPS + 1)], text
    for part in ("last seen", "last step", "grpo · model"):
        assert part not in text, f"a ghost of the display:\n{text}"
