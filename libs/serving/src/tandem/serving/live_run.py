"""Live runs that answer requests with their own rollouts."""

from __future__ import annotations

import random
from pathlib import Path

from tandem.common.errors import ServiceError
from tandem.observe.run_folder.checkpoints import config_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.live import read_engine_servers
from tandem.serving.client import ChatServer

_SWITCH = "policy.generation.expose_http_server"


def answers_itself(run: Path) -> bool:
    """Return whether the run in a folder is live and its rollouts answer; print a note if they only could.

    Raises the errors of `read_journal`.
    """
    servers = read_engine_servers(run)
    if servers is None:
        return False
    if servers:
        return True
    with read_journal(run) as journal:
        config = config_of(journal)
    if config.generates and config.policy.generation.takes_external_requests:
        return True  # the servers are starting
    statement = f"the run in {run} is live, but its newest checkpoint is served"
    advice = f"; {_SWITCH}=true lets the rollouts of a run answer themselves" if config.generates else ""
    print(f"note: {statement}{advice}", flush=True)
    return False


class LiveRun:
    """The rollouts of a run as servers of a conversation: each question goes to one of them."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def server(self) -> ChatServer:
        """Return a rollout that answers. Raises `ServiceError` if there is none."""
        servers = read_engine_servers(self.run)
        if not servers:
            reason = "the run has ended" if servers is None else "none of its rollouts answers now: ask again later"
            raise ServiceError(str(self.run), "answering", reason)
        server = random.choice([*servers.values()])
        return ChatServer(server.url, server.token or None)
