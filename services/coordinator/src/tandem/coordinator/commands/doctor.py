"""``coordinator doctor``: report what a node has, what works there, and how fast bytes move."""

from __future__ import annotations

import argparse
import sys

from tandem.common.errors import FAILED, OK
from tandem.coordinator.commands.arguments import SETTINGS, Commands, number

_DESCRIPTION = """Check this machine, on which services of a run are to run: a line for each check, and the
rates that coordinator plan predicts with. Checks that may hang run in processes of their own. With a
configuration, the exit code is 1 if something is missing that it needs."""
_DEADLINE_S = 60.0


def add(commands: Commands) -> None:
    """Declare the command."""
    doctor = commands.add_parser(
        "doctor", help="check this machine: what it has, what works, how fast bytes move", description=_DESCRIPTION
    )
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of a run that this machine is for")
    doctor.add_argument("overrides", nargs="*", default=[], metavar=SETTINGS, help="settings that replace the file's")
    network = doctor.add_mutually_exclusive_group()
    network.add_argument("--peer", metavar="HOST:PORT", help="measure the network to a machine that listens")
    network.add_argument(
        "--listen", metavar="HOST:PORT", help="only answer doctors that measure, until Ctrl-C; port 0 is any"
    )
    doctor.add_argument("--json", action="store_true", help="print a report as JSON, for machines")
    doctor.add_argument(
        "--deadline",
        type=number("above 0", lambda number: number > 0),
        default=_DEADLINE_S,
        metavar="SECONDS",
        help=f"for each check that may hang (default: {_DEADLINE_S:g})",
    )
    doctor.set_defaults(carry_out=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.listen is not None:
        return _listen(arguments.listen)
    import socket

    import msgspec

    from tandem.config import load_config
    from tandem.coordinator import doctor_steps
    from tandem.launch.doctor.look import list_needed, look
    from tandem.launch.doctor.network import parse_address
    from tandem.launch.doctor.steps import format_line, format_links, report_of

    if arguments.peer is not None:
        parse_address(arguments.peer)  # before anything takes time
    config = None if arguments.config is None else load_config(arguments.config, arguments.overrides, to_run=False)
    outcomes = []
    program = (sys.executable, "-m", doctor_steps.__name__)
    for outcome in look(config, arguments.peer, arguments.deadline, doctor_steps.STEPS, program):
        outcomes.append(outcome)
        if not arguments.json:
            for finding in outcome.findings:
                print(format_line(finding), flush=True)
    report = report_of(socket.gethostname(), outcomes, list_needed(config))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print(f"\n{format_links(report.links)}")
    if report.needed_but_missing:
        print(f"error: {arguments.config} cannot run here: {', '.join(report.needed_but_missing)}", file=sys.stderr)
        return FAILED
    return OK


def _listen(address: str) -> int:
    from tandem.launch.doctor.network import ProbeServer, parse_address

    host, port = parse_address(address)
    listener = ProbeServer(host, port)
    try:
        print(f"listening: coordinator doctor --peer {host}:{listener.port}", flush=True)
        while True:
            print(f"measured by {listener.answer_next()}", flush=True)
    finally:
        listener.close()
