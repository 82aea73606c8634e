"""Rules for checkpoints, and for the prerequisite of a run."""

from __future__ import annotations

from pathlib import Path

from tandem.common.config.checks.rule import Rule
from tandem.common.config.problem import Invalid
from tandem.common.config.schema import Config


def checkpoints_can_be_ranked(config: Config) -> None:
    """The metric that ranks checkpoints must be measured."""
    if not config.checkpointing.enabled or config.checkpointing.keep_top_k is None:
        return
    metric = config.checkpointing.metric_name
    known = config.declaration.metrics
    if metric not in known:
        raise Invalid("checkpointing.metric_name", f"{config.algorithm} has no {metric}, only {', '.join(known)}")
    section = config.algorithm_section
    is_validated = section.val_period or section.val_at_start or section.val_at_end or config.evaluates
    if metric.startswith("val_") and not is_validated:
        raise Invalid("checkpointing.metric_name", f"{metric} is never measured: {config.algorithm}.val_period is 0")


def the_prerequisite_exists(config: Config) -> None:
    """The configuration of the earlier run must be there before anything starts."""
    if config.prerequisite is not None and not Path(config.prerequisite).is_file():
        raise Invalid("prerequisite", f"there is no file {config.prerequisite}")


RULES: tuple[Rule, ...] = (
    checkpoints_can_be_ranked,
    the_prerequisite_exists,
)
