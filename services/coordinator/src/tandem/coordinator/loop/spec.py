"""The scheduler's run spec, made from a configuration."""

from __future__ import annotations

import math

from tandem.common.messages import RewardServer
from tandem.config import Config
from tandem.coordinator.scheduler.spec import (
    CommandDeadlines,
    DynamicSampling,
    EngineBalance,
    RunSpec,
    StreamingTraining,
)
from tandem.launch.nodes import expected_processes


def run_spec(
    config: Config,
    *,
    first_step: int,
    last_step: int,
    num_validation: int,
    resume_from: str,
    checkpoint_folder: str,
    samples_folder: str = "",
    reward_server: RewardServer | None = None,
) -> RunSpec:
    """Describe the run for the scheduler."""
    section = config.algorithm_section
    validates = config.has_validation and config.replay is None  # else there is no engine to generate for it
    deadlines, generation = config.cluster.deadlines, config.policy.generation
    return RunSpec(
        has_engines=config.generates,
        expected=expected_processes(config),
        without_policy=frozenset(f"trainer-{index}" for index in range(config.cluster.trainers, config.num_trainers)),
        first_step=first_step,
        last_step=last_step,
        num_groups=config.rollout_section.num_prompts_per_step if config.generates else 0,
        num_validation_groups=num_validation,
        validate_every=section.val_period if validates else 0,
        validate_from=config.rollout_section.val_start_at if config.declaration.rolls_out else 0,
        validate_at_start=(section.val_at_start or config.evaluates) and validates,
        validate_at_end=section.val_at_end and validates,
        save_every=config.checkpointing.save_period if config.checkpointing.enabled else 0,
        resume_from=resume_from,
        checkpoint_folder=checkpoint_folder,
        samples_folder=samples_folder if config.generates and config.logger.samples != "off" else "",
        reward_server=reward_server,
        engines_first=config.is_colocated and generation.kind.must_start_first and config.cluster.gpus_per_node > 0,
        # If the two are colocated, no engine generates while a trainer steps.
        allow_alias=config.is_colocated and config.refit.alias == "auto",
        alias_frozen=config.refit.alias == "auto",
        streams_over_tcp=config.refit.stream == "tcp",
        sends_differences=config.refit.differences == "auto",
        is_verified=config.refit.verify != "off",
        max_trajectory_age_steps=config.max_trajectory_age_steps if config.generates else 0,
        updates_in_flight=config.generates and config.updates_in_flight,
        keeps_copy=config.keeps_copy,
        max_stored_tokens=generation.max_stored_tokens,
        max_replacements=config.cluster.max_replacements,
        replacement_window_s=config.cluster.replacement_window_s,
        balance=_balance(config),
        dynamic_sampling=_dynamic_sampling(config),
        streaming=_streaming(config),
        deadlines=CommandDeadlines(
            join=deadlines.join_s,
            build=deadlines.build_s,
            generate=deadlines.generate_s,
            train=deadlines.train_s,
            evaluate=deadlines.evaluate_s,
            refit=deadlines.refit_s,
            save=deadlines.save_s,
            leave=deadlines.leave_s,
        ),
    )


def _balance(config: Config) -> EngineBalance | None:
    generation = config.policy.generation
    if not generation.is_async:
        return None
    return EngineBalance(width=generation.width, timeout_s=generation.generation_timeout)


def _streaming(config: Config) -> StreamingTraining | None:
    """Return the fewest groups with which each data-parallel rank has a micro-batch, or a sequence to pack."""
    if not config.streams_training:
        return None
    policy = config.policy
    is_by_tokens = policy.sequence_packing.enabled or policy.dynamic_batching.enabled
    num_samples = config.data_parallel_size * (1 if is_by_tokens else policy.train_micro_batch_size)
    num_groups = math.ceil(num_samples / config.rollout_section.num_generations_per_prompt)
    return StreamingTraining(min_groups=min(num_groups, config.rollout_section.num_prompts_per_step))


def _dynamic_sampling(config: Config) -> DynamicSampling | None:
    if not config.generates or not config.rollout_section.use_dynamic_sampling:
        return None
    section = config.rollout_section
    return DynamicSampling(
        num_groups=section.num_prompts_per_batch, max_batches=section.dynamic_sampling_max_gen_batches
    )
