"""Environments score or answer responses; one module each, run by `scorer`.

What a user's class imports is here. It is no more than that class needs, since two processes of every run import it.
"""

from __future__ import annotations

from tandem.rollout.environments.environment import (
    ConversingEnvironment,
    Environment,
    Score,
    Turn,
)
from tandem.rollout.environments.making import make_environment

__all__ = [
    "ConversingEnvironment",
    "Environment",
    "Score",
    "Turn",
    "make_environment",
]
