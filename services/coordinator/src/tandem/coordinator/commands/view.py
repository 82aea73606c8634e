"""``coordinator view``: serve the page of runs, finished ones included."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import Commands
from tandem.serving.access_token import add_token, token_of


def add(commands: Commands) -> None:
    """Declare the command."""
    view = commands.add_parser("view", help="look at runs in a browser: curves, timeline, samples")
    view.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder; several are compared")
    view.add_argument("--port", type=int, metavar="PORT", help="(default: the first free one from 8700 on)")
    view.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1, this machine only)"
    )
    add_token(view, "token for the page on an address other than loopback (default: a new one)")
    view.set_defaults(carry_out=_view)


def _view(arguments: argparse.Namespace) -> int:
    from tandem.common.network import is_loopback
    from tandem.observe.page.address import listen, url_of
    from tandem.observe.page.reader import RunReader
    from tandem.observe.page.security import new_token
    from tandem.observe.page.server import serve

    for run in arguments.runs:
        RunReader(run)
    token = token_of(arguments)
    if token is None and not is_loopback(arguments.host):
        token = new_token()
    with listen(arguments.host, arguments.port) as listener:
        print(f"page: {url_of(listener, token)}", flush=True)
        serve(arguments.runs, listener, token)
    return OK
