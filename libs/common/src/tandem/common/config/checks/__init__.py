"""Rules that no single key can break: one small function a rule, each naming the key to change; a module a topic."""

from __future__ import annotations

from tandem.common.config.checks import (
    batches,
    cluster,
    data,
    dtensor,
    generation,
    learning,
    loss,
    megatron,
    model,
    parallelism,
    run,
)
from tandem.common.config.checks.rule import Rule
from tandem.common.config.schema import Config

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *megatron.RULES,
    *parallelism.RULES,
    *dtensor.RULES,
    *batches.RULES,
    *learning.RULES,
    *loss.RULES,
    *data.RULES,
    *run.RULES,
    *cluster.RULES,
    *generation.RULES,
)
"""Checked in this order."""


def first_problem(config: Config) -> None:
    """Raise `Invalid` for the first rule that the configuration breaks."""
    for rule in RULES:
        rule(config)
