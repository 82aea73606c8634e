"""Environments: they score or answer responses; one module each, run by `scorer`."""

from __future__ import annotations

from tandem.rollout.environments.environment import (
    ConversingEnvironment,
    Environment,
    Score,
    Turn,
)
from tandem.rollout.environments.making import make_environment
from tandem.rollout.environments.scorer import FaultPolicy, Scorer, Unscored

__all__ = [
    "ConversingEnvironment",
    "Environment",
    "FaultPolicy",
    "Score",
    "Scorer",
    "Turn",
    "Unscored",
    "make_environment",
]
