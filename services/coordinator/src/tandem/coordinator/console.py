"""The ``coordinator`` command as it is installed: Ctrl-C during its imports is one line, too."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Import the command line and run it; return the exit code.

    Signals wait until it handles them: many imports run finalizers, in which Python ignores `KeyboardInterrupt`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        from tandem.coordinator.cli import main as run_command_line
    except KeyboardInterrupt:
        from tandem.common.errors import INTERRUPTED

        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return run_command_line()
