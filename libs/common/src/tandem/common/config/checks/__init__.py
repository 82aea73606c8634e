"""Rules that no single key can break: one small function a rule, each naming the key to change; a module a topic."""

from __future__ import annotations

from tandem.common.config.checks import (
    batches,
    cluster,
    data,
    dtensor,
    generation,
    loss,
    megatron,
    model,
    parallelism,
    run,
)
from tandem.common.config.checks.rule import Rule
from tandem.common.config.schema import Config
from tandem.common.dotted import named

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *megatron.RULES,
    *parallelism.RULES,
    *dtensor.RULES,
    *batches.RULES,
    *loss.RULES,
    *data.RULES,
    *run.RULES,
    *cluster.RULES,
    *generation.RULES,
)
"""Of all algorithms. Checked in this order, and those that the algorithm's declaration lists last."""


def first_problem(config: Config) -> None:
    """Raise `Invalid` for the first rule that the configuration breaks."""
    own: list[Rule] = [rule for path in config.declaration.rules for rule in named(path)]
    for rule in (*RULES, *own):
        rule(config)
