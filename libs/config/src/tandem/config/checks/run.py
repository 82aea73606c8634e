"""Rules for checkpoints, and for the prerequisite of a run."""

from __future__ import annotations

from pathlib import Path

from tandem.common.errors import nearest
from tandem.config.checks.rule import Rule, restrict_to_rollouts
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config

NOTHING_TO_VALIDATE_ON = "there is nothing to validate on (data.num_validation is 0, or data.validation null)"


def check_checkpoints_can_be_ranked(config: Config) -> None:
    """Check that the algorithm has the metric that ranks checkpoints."""
    if not config.checkpointing.enabled or config.checkpointing.keep_top_k is None:
        return
    metric = config.checkpointing.metric_name
    of_sets = _list_metrics_of_sets(config)
    metrics = [*config.declaration.metrics, *of_sets]
    if metric not in metrics:
        only = f"{config.algorithm} has no {metric}, only {', '.join(metrics)}{nearest(metric, of_sets)}"
        raise InvalidValue("checkpointing.metric_name", only)


def explain_never_validated(config: Config) -> str | None:
    """Return why the run measures no metric of validation; None if it does."""
    section = config.algorithm_section
    if not config.has_validation:
        return NOTHING_TO_VALIDATE_ON
    is_validated = section.val_period or section.val_at_start or section.val_at_end or config.evaluates
    return None if is_validated else f"{config.algorithm}.val_period is 0"


def check_run_can_be_stopped(config: Config) -> None:
    """Check that the metric whose value ends the run is measured, and that the value is given."""
    section, name = config.rollout_section, config.algorithm
    key, metric = f"{name}.stop_at_validation_metric", section.stop_at_validation_metric
    if metric is None:
        return
    of_several = ["val_pass_k"] if section.num_val_generations_per_prompt > 1 else []
    metrics = [*(each for each in config.declaration.metrics if each.startswith("val_")), *of_several]
    metrics += _list_metrics_of_sets(config)
    if metric not in metrics:
        more = f"; {name}.num_val_generations_per_prompt is 1" if metric == "val_pass_k" else nearest(metric, metrics)
        raise InvalidValue(key, f"validation has no {metric}, only {', '.join(metrics)}{more}")
    if section.stop_at_validation_threshold is None:
        raise InvalidValue(f"{name}.stop_at_validation_threshold", f"null, but {key} is {metric}")
    if not config.has_validation:
        raise InvalidValue(key, f"{metric} is never measured: {NOTHING_TO_VALIDATE_ON}")
    if not (section.val_period or section.val_at_start):
        raise InvalidValue(key, f"{metric} is never measured before the end: {name}.val_period is 0")


def _list_metrics_of_sets(config: Config) -> list[str]:
    """Return the metrics of each single validation set, if there are several."""
    of_validation = [name.removeprefix("val_") for name in config.declaration.metrics if name.startswith("val_")]
    return [f"val_{each}/{name}" for each in config.data.validation_names for name in of_validation]


def check_validation_data(config: Config) -> None:
    """Check that a run that only validates has something to validate on, and that validation data is used."""
    data, key = config.data, "data.num_validation"
    if data.num_validation != 0:
        return
    if config.evaluates:
        raise InvalidValue(key, f"0, but {config.algorithm}.max_num_steps is 0: the run only validates")
    keys = [name for name in ("validation", "val_data_path", "val_data_paths", "val_split") if getattr(data, name)]
    if keys:
        raise InvalidValue(key, f"0, but data.{keys[0]} is given")


def check_prerequisite_exists(config: Config) -> None:
    """Check that the configuration of the earlier run exists."""
    if config.prerequisite is not None and not Path(config.prerequisite).is_file():
        raise InvalidValue("prerequisite", f"there is no file {config.prerequisite}")


RULES: tuple[Rule, ...] = (
    check_checkpoints_can_be_ranked,
    *restrict_to_rollouts(check_run_can_be_stopped),
    check_validation_data,
    check_prerequisite_exists,
)
