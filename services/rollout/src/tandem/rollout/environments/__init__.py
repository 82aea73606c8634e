"""Environments: what a response is worth. One module each; `scorer` runs them beside generation."""

from __future__ import annotations

from tandem.rollout.environments.environment import Environment, Score, make_environment
from tandem.rollout.environments.scorer import Scorer

__all__ = ["Environment", "Score", "Scorer", "make_environment"]
