"""Rollouts whose episodes a program plays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents_harness import write_agent
from rollout_harness import WAIT_S, Rollout


@contextlib.contextmanager
def rollout_of(folder: Path, source: str = "", *, command: Any = (), **settings: Any) -> Iterator[Rollout]:
    """A rollout whose episodes a program plays; in its folder."""
    agent = {} if "url" in settings else {"command": [*(command or write_agent(source))]}
    rollout = Rollout(folder, None, **{"timeout_s": WAIT_S, **agent, **settings})
    try:
        yield rollout
    finally:
        rollout.service.close()
