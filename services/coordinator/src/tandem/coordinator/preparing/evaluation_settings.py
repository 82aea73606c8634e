"""The settings of an evaluation, and the configuration of the run that evaluates a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError
from tandem.config import Config, change_config
from tandem.launch.nodes import expected_processes, launched_processes

_MOST_BATCHES = 1000
"""Longest evaluation timeout, as a multiple of the step's generation timeout."""


def check_settings(config: Config, source: str) -> None:
    """Raise `ConfigError` for settings that no evaluation can be made with."""
    if not config.declaration.rolls_out:
        raise ConfigError(
            f"{source}: algorithm: {config.algorithm} generates nothing to evaluate: it validates by its loss; "
            "algorithm=grpo evaluates by generating, with problems (data) and an environment (env) that scores"
        )
    settings, section = config.eval, config.rollout_section
    num = settings.num_tests_per_prompt or section.num_val_generations_per_prompt
    if settings.k_value > num:
        raise ConfigError(
            f"{source}: eval.k_value: {settings.k_value} is more than the {num} samples of each problem "
            "(eval.num_tests_per_prompt)"
        )
    sampling = read_sampling(config)
    if num > 1 and (sampling["temperature"] == 0 or sampling["top_k"] == 1):
        key = "eval.temperature: 0" if sampling["temperature"] == 0 else "eval.top_k: 1"
        raise ConfigError(f"{source}: {key} draws the same sample {num} times (eval.num_tests_per_prompt)")


def evaluation_config(base: Config, model: Path, run_folder: Path) -> Config:
    """Return the configuration of the run that evaluates a model. Raise `ConfigError` if it is invalid."""
    settings, section, sampling = base.eval, base.rollout_section, read_sampling(base)
    num = settings.num_tests_per_prompt or section.num_val_generations_per_prompt
    num_batches = -(-section.max_val_samples * num // base.units_per_step)
    generation: dict[str, Any] = {key: sampling[key] for key in ("top_p", "top_k", "max_new_tokens")}
    generation |= {"val_top_p": None, "val_top_k": None}
    if base.policy.tokenizer.name != base.policy.model_name:
        tokenizer: str | None = base.policy.tokenizer.name
    else:
        tokenizer = None  # the model's own
    deadline_s = base.cluster.deadlines.generate_s * max(1, min(num_batches, _MOST_BATCHES))
    return change_config(
        base,
        {
            "prerequisite": None,
            "replay": None,
            base.algorithm: {
                "max_num_steps": 0,
                "num_val_generations_per_prompt": num,
                "val_temperature": sampling["temperature"],
                "val_seed": choose_seed(base),
                **({f"async_{base.algorithm}": {"enabled": False}} if section.asynchronous.enabled else {}),
            },
            "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_kl_in_reward": False},
            "policy": {
                "model_name": str(model),
                "new_model": None,
                "tokenizer": {"name": tokenizer},
                "generation": generation,
            },
            "checkpointing": {"enabled": False, "checkpoint_dir": None},
            "eval": {"during_training": False},
            "logger": {
                "log_dir": str(run_folder),
                "samples": "off",
                "tensorboard_enabled": False,
                "wandb_enabled": False,
                "mlflow_enabled": False,
                "prometheus": {"port": None},
                "opentelemetry": {"endpoint": None},
                "page": "off",
                "num_val_samples_to_print": 0,
            },
            "cluster": {"deadlines": {"generate_s": deadline_s}},
        },
        (),
        str(model),
    ).config


def read_sampling(config: Config) -> dict[str, Any]:
    """Return the sampling parameters: those of ``eval``, and else those of validation."""
    settings, generation, validation = config.eval, config.policy.generation, config.rollout_section.val_temperature
    temperature = generation.temperature if validation is None else validation
    return {
        "temperature": temperature if settings.temperature is None else settings.temperature,
        "top_p": generation.validation_top_p if settings.top_p is None else settings.top_p,
        "top_k": generation.validation_top_k if settings.top_k is None else settings.top_k,
        "max_new_tokens": settings.max_new_tokens or generation.max_new_tokens,
    }


def choose_seed(config: Config) -> int:
    """Return the seed of the samples: that of ``eval``, and else that of validation."""
    section = config.rollout_section
    seeds = (config.eval.seed, section.val_seed, section.seed)
    return next(seed for seed in seeds if seed is not None)


def check_during_training(config: Config) -> None:
    """Raise `ConfigError` if a run's checkpoints cannot be evaluated during training."""
    key = "eval.during_training"
    if not config.checkpointing.enabled:
        raise ConfigError(f"{key}: true, but checkpointing.enabled is false: there is nothing to evaluate")
    if not config.has_validation:
        raise ConfigError(f"{key}: true, but there are no held-out problems (data.num_validation, data.validation)")
    check_settings(config, key)
    its_own = make_follower_config(config, Path(config.policy.model_name), Path(config.logger.log_dir))
    if launched_processes(its_own) != expected_processes(its_own):
        raise ConfigError(
            f"{key}: true, but cluster.launch leaves processes to be started by hand, which those of an evaluation "
            "cannot be: evaluate checkpoints by coordinator eval"
        )


def make_follower_config(config: Config, model: Path, run_folder: Path) -> Config:
    """Return the configuration of the run that evaluates a model on this host, at an address of its own."""
    cluster = msgspec.structs.replace(config.cluster, address="tcp://127.0.0.1:*")
    return evaluation_config(msgspec.structs.replace(config, cluster=cluster), model, run_folder)


def compute_evaluation_limit(config: Config) -> float:
    """Return the seconds that the evaluation of a checkpoint may take, by the deadlines of its run, twice."""
    its_own = make_follower_config(config, Path(config.policy.model_name), Path(config.logger.log_dir))
    deadlines = msgspec.structs.asdict(its_own.cluster.deadlines)
    return 2 * sum(seconds for seconds in deadlines.values() if isinstance(seconds, int | float))
