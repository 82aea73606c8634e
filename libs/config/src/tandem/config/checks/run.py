"""Rules for the run itself: names of files, processes and hosts, checkpoints, the prerequisite."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.common.errors import nearest
from tandem.config.placement import count_gpus_of_reward_models, count_gpus_per_engine
from tandem.config.problem import InvalidValue, ProblemCollector, Rule, restrict_to_rollouts, shown
from tandem.config.schema import Config

NOTHING_TO_VALIDATE_ON = "there is nothing to validate on (data.num_validation is 0, or data.validation null)"


def check_has_rollouts(config: Config) -> None:
    """Check that there is at least one rollout."""
    if config.cluster.rollouts == 0:
        raise InvalidValue("cluster.rollouts", f"0, but {config.declaration.title} needs at least 1")


def check_generation_fits_its_gpus(config: Config) -> None:
    """Check that the GPUs reserved for generation exist, suffice, and leave some for training."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.colocated.enabled:
        return
    gpus, nodes = generation.colocated.resources.gpus_per_node, generation.colocated.resources.num_nodes
    prefix = "policy.generation.colocated.resources."
    if cluster.num_nodes == 1:
        key, set_aside, gpus_each = "gpus_per_node", gpus, 1
        num_available = cluster.gpus_per_node - count_gpus_of_reward_models(config)
        fixed_key, fixed_size, fitting = "num_nodes", nodes, 1
    else:
        key, set_aside, num_available, gpus_each = "num_nodes", nodes, cluster.num_nodes, cluster.gpus_per_node
        fixed_key, fixed_size, fitting = "gpus_per_node", gpus, cluster.gpus_per_node
    if fixed_size not in (None, fitting):
        rule = f"with cluster.num_nodes {cluster.num_nodes} it must be {fitting} or null"
        raise InvalidValue(prefix + fixed_key, f"{fixed_size}, but {rule}")
    if set_aside is None:
        return
    if set_aside >= num_available:
        raise InvalidValue(prefix + key, f"{set_aside} of cluster.{key} ({num_available}) leaves none to training")
    sides = (
        ("cluster.rollouts", cluster.rollouts * count_gpus_per_engine(config), set_aside * gpus_each),
        ("cluster.trainers", config.num_trainers, (num_available - set_aside) * gpus_each),
    )
    for process_key, needed, num_gpus in sides:
        if needed > num_gpus:
            raise InvalidValue(
                process_key, f"needs {needed} GPUs, and {prefix}{key} ({set_aside}) leaves it {num_gpus}"
            )


def check_launch_fits_cluster(config: Config) -> None:
    """Check that the coordinator does not launch more processes than it expects."""
    launch = config.cluster.launch
    if isinstance(launch, str):
        return
    cluster = config.cluster
    counts = (("trainers", launch.trainers, config.num_trainers), ("rollouts", launch.rollouts, cluster.rollouts))
    for kind, launched, expected in counts:
        if launched > expected:
            beside = " and cluster.processes_of" if expected > getattr(cluster, kind) else ""
            raise InvalidValue(f"cluster.launch.{kind}", f"{launched} is more than cluster.{kind}{beside} ({expected})")


def check_rollouts_have_room(config: Config) -> None:
    """Check that all expected rollouts may join."""
    max_rollouts, rollouts = config.cluster.max_rollouts, config.cluster.rollouts
    if max_rollouts is not None and max_rollouts < rollouts:
        raise InvalidValue("cluster.max_rollouts", f"{max_rollouts} is fewer than cluster.rollouts ({rollouts})")


def check_address_can_be_bound(config: Config) -> None:
    """Check that the address is ``tcp://host:port``, or has ``*`` for any free port."""
    match = re.fullmatch(r"tcp://[^/\s]+:(\*|\d+)", config.cluster.address)
    if not match or (match[1] != "*" and not 0 < int(match[1]) < 65536):
        raise InvalidValue("cluster.address", f"{shown(config.cluster.address)} is not tcp://host:port or tcp://host:*")


def silence_outlasts_a_heartbeat(config: Config) -> None:
    """Check that one late heartbeat does not count as a lost process."""
    interval, timeout = config.cluster.heartbeat_interval_s, config.cluster.heartbeat_timeout_s
    if timeout < 2 * interval:
        raise InvalidValue(
            "cluster.heartbeat_timeout_s", f"{timeout:g} is less than twice cluster.heartbeat_interval_s ({interval:g})"
        )


def check_store_has_a_client(config: Config) -> None:
    """Check that `refit.store` is a URL, of a protocol whose client is installed."""
    url = config.refit.store
    if url is None:
        return
    protocol, mark, place = url.partition("://")
    if not (mark and protocol and place.strip("/")):
        raise InvalidValue("refit.store", f"{shown(url)} is neither s3://BUCKET/FOLDER nor file:///FOLDER")
    if protocol == "file" and not place.startswith("/"):
        raise InvalidValue("refit.store", f"{shown(url)} is not an absolute path: file:///FOLDER has three slashes")
    from fsspec.registry import get_filesystem_class  # type: ignore[import-untyped]  # only runs with a store need it

    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        extra = "pip install 'tandem-rl[s3]'" if protocol == "s3" else error
        raise InvalidValue("refit.store", f"{shown(url)} needs a client that is not installed: {extra}") from error


CLUSTER_RULES: tuple[Rule, ...] = (
    *restrict_to_rollouts(check_has_rollouts, check_generation_fits_its_gpus, check_store_has_a_client),
    check_launch_fits_cluster,
    check_rollouts_have_room,
    check_address_can_be_bound,
    silence_outlasts_a_heartbeat,
)


def explain_no_path(path: str | Path) -> str | None:
    """Return why no file or folder can have this name; None if one can."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a null byte
        return str(error)
    return None


def check_paths_are_valid(config: Config) -> None:
    """Check that paths are valid, and not too long for the file system, for example."""
    data, template, problems = config.data, config.policy.tokenizer.chat_template, ProblemCollector()
    paths = {
        "policy.model_name": config.policy.model_name,
        "policy.tokenizer.name": config.policy.tokenizer.name,
        "policy.tokenizer.chat_template": template if (template or "").endswith(".jinja") else None,
        "prerequisite": config.prerequisite,
        "logger.log_dir": config.logger.log_dir,
        "checkpointing.checkpoint_dir": config.checkpointing.checkpoint_dir,
        "data.train_data_path": data.train_data_path,
        "data.val_data_path": data.val_data_path,
        "data.prompt_file": data.prompt_file,
        "data.system_prompt_file": data.system_prompt_file,
        **{f"env.{name}.model_name": entry.model_name for name, entry in config.env.items()},
    }
    for key, path in paths.items():
        if path is not None and (problem := explain_no_path(path)) is not None:
            problems.found.append(InvalidValue(key, f"{shown(path)} cannot be a path: {problem}"))
    problems.complain()


PATH_RULES: tuple[Rule, ...] = (check_paths_are_valid,)


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
    return None if is_validated or config.eval.during_training else f"{config.algorithm}.val_period is 0"


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
    """Check that the configuration of the earlier run exists.

    It is none of the rules: a run that has begun does without the file.
    """
    if config.prerequisite is not None and not Path(config.prerequisite).is_file():
        raise InvalidValue("prerequisite", f"there is no file {config.prerequisite}")


RULES: tuple[Rule, ...] = (
    check_checkpoints_can_be_ranked,
    *restrict_to_rollouts(check_run_can_be_stopped),
    check_validation_data,
)
