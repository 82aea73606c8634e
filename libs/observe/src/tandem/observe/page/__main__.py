"""The process of a run's page, which ends with its parent, the coordinator."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from setproctitle import setproctitle

from tandem.common import signals
from tandem.common.process_lifetime import die_with


def main() -> None:
    """Serve the page of one run on the coordinator's listening socket, until the coordinator ends this process."""
    parser = argparse.ArgumentParser(prog="page")
    parser.add_argument("run", type=Path)
    parser.add_argument("--socket", type=int, required=True, help="its descriptor")
    parser.add_argument("--launched-by", type=int, required=True, metavar="PID")
    arguments = parser.parse_args()
    die_with(arguments.launched_by)
    signals.leave_to_coordinator()
    setproctitle(f"page {arguments.run}")
    from tandem.observe.page.server import serve

    with socket.socket(fileno=arguments.socket) as listener:
        serve([arguments.run], listener, heeds_signals=False)


if __name__ == "__main__":
    main()
