"""The exit codes of commands, which a supervisor and batch scripts tell apart."""

from __future__ import annotations

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
