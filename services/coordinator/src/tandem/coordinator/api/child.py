"""The process of a run that a Python program began.

``python -m tandem.coordinator.api.child LIFELINE ORDER REPORTS OWNER``: descriptors, and the program's process id.

    program -- guardian -- coordinator -- services

The guardian ends everything below it when the program closes the lifeline or ends in any way. After a notebook's kernel
is killed, no process is left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tandem.common.network import forget_empty_endpoint
from tandem.common.process_lifetime import fork_guarded


def main(argv: Sequence[str]) -> int:
    """Run as the guardian, or as its child that carries out the request, to the end."""
    lifeline, order, reports, owner = map(int, argv)
    fork_guarded(lifeline, owner)
    for descriptor in (order, reports):
        os.set_inheritable(descriptor, False)
    return _run(order, reports)


def _run(order_fd: int, reports_fd: int) -> int:
    import msgspec

    from tandem.common import gc_tuning
    from tandem.common.errors import FAILED, INTERRUPTED, OK, TandemError
    from tandem.config import config_from_json
    from tandem.coordinator.api.process import Report, RunChecked, RunEnded, RunOrder, failure
    from tandem.coordinator.commands.running import run_to_outcome

    gc_tuning.retire_at_exit()
    forget_empty_endpoint()
    with os.fdopen(order_fd, "rb") as file:
        order = msgspec.json.decode(file.read(), type=RunOrder)

    def report(message: Report) -> None:
        os.write(reports_fd, msgspec.json.encode(message) + b"\n")

    try:
        config = config_from_json(order.config_json)
        finish = run_to_outcome(
            order.source, config, order.mode, order.from_step, order.reward_server, lambda: report(RunChecked())
        )
    except KeyboardInterrupt:  # while it was reported on
        report(RunEnded(outcome="interrupted"))
        return INTERRUPTED
    except Exception as error:
        report(failure(error))
        if not isinstance(error, TandemError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if finish.error is not None:
        report(failure(finish.error))
        print(f"error: {finish.error}", file=sys.stderr)
        return FAILED
    report(RunEnded(outcome=finish.outcome))
    return OK if finish.outcome == "finished" else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
