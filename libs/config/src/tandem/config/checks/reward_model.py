"""Rules for reward models: for environments that score with one, and for its training."""

from __future__ import annotations

from tandem.config.checks.rule import Rule, restrict_to_rollouts
from tandem.config.placement import count_gpus_of_reward_models
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config, EnvironmentConfig


def check_gives_scores(config: Config) -> None:
    """Check that a reward model gives one score per response, by which pairs are compared."""
    kind = config.policy.reward_model_cfg.reward_model_type
    if kind != "bradley_terry":
        raise InvalidValue(
            "policy.reward_model_cfg.reward_model_type",
            f"{kind}, but training on pairs needs bradley_terry",
        )


TRAINING_RULES: tuple[Rule, ...] = (check_gives_scores,)


def check_reward_model(name: str, entry: EnvironmentConfig) -> None:
    """Raise `InvalidValue` if the settings of a reward model lack the model or ask for something that is not built."""
    key = f"env.{name}"
    if entry.model_name is None:
        raise InvalidValue(f"{key}.model_name", "required: the folder of a sequence classifier")
    if not entry.reward_model_cfg.enabled:
        raise InvalidValue(f"{key}.reward_model_cfg.enabled", "false, but the environment is a reward model")
    if entry.checkpoint_path is not None:
        raise InvalidValue(
            f"{key}.checkpoint_path", f"not supported: save a Hugging Face folder, and name it in {key}.model_name"
        )
    for size in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "dp_replicate_size"):
        if (ranks := getattr(entry.dtensor_cfg, size)) != 1:
            raise InvalidValue(f"{key}.dtensor_cfg.{size}", f"{ranks}, but a reward model is on one device")
    for switch in ("cpu_offload", "custom_parallel_plan"):
        if getattr(entry.dtensor_cfg, switch):
            raise InvalidValue(f"{key}.dtensor_cfg.{switch}", "not supported: a reward model is whole on one device")


def check_reward_model_is_enabled(config: Config) -> None:
    """Check that a reward model that scores samples is enabled."""
    for name, entry in config.reward_models.items():
        if not entry.enabled:
            raise InvalidValue(f"env.{name}.enabled", "false, but the environment scores samples")


def check_reward_models_leave_gpus(config: Config) -> None:
    """Check that the GPUs reserved for reward models exist, and that they leave one for training."""
    aside, num_gpus = count_gpus_of_reward_models(config), config.cluster.gpus_per_node
    if aside >= max(1, num_gpus):
        name = next(iter(config.reward_models))
        raise InvalidValue(
            f"env.{name}.resources.gpus_per_node",
            f"{aside} of cluster.gpus_per_node ({num_gpus}) leaves none to training",
        )


RULES: tuple[Rule, ...] = restrict_to_rollouts(check_reward_model_is_enabled, check_reward_models_leave_gpus)
