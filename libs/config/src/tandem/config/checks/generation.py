"""Rules for generation engines."""

from __future__ import annotations

from tandem.config.checks.rule import Rule, where_it_rolls_out
from tandem.config.installed import speculation
from tandem.config.installed.vllm_arguments import complaint
from tandem.config.models.families import VLLM, VLLM_PLANNED, VLLM_SEEING
from tandem.config.models.model_sizes import model_config
from tandem.config.models.vision_families import family_of
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config


def vllm_takes_its_arguments(config: Config) -> None:
    """Check vLLM's arguments by name if vLLM is installed: its engine would refuse them only after everything has
    started."""
    generation = config.policy.generation
    if generation.backend != "vllm":
        return
    arguments = dict(generation.vllm_kwargs)
    if speculation.unbuilt_method(arguments) is not None:  # which is reported elsewhere
        del arguments[speculation.KEY]
    problem = complaint(arguments)
    if problem is not None:
        raise InvalidValue(f"policy.generation.vllm_kwargs.{problem[0]}", problem[1])
    longest = config.policy.max_total_sequence_length
    if generation.vllm_cfg.max_model_len < longest:
        raise InvalidValue(
            "policy.generation.vllm_cfg.max_model_len",
            f"{generation.vllm_cfg.max_model_len} is less than policy.max_total_sequence_length ({longest})",
        )


def drafts_are_verified_where_that_was_tried(config: Config) -> None:
    """Check that speculative decoding is not combined with what changes vLLM's steps in other ways."""
    generation = config.policy.generation
    if generation.backend != "vllm" or speculation.method_of(generation.vllm_kwargs) is None:
        return
    vllm = generation.vllm_cfg
    features = {
        "a model that sees": family_of(config.policy) is not None,
        "policy.router_replay.enabled": config.policy.router_replay.enabled,
        "policy.generation.top_p, top_k, min_p or bad_words, whose sampling masks drafts would need": (
            config.replays_sampling_masks
        ),
        "policy.generation.vllm_cfg.precision: fp8": vllm.precision == "fp8",
        "policy.generation.vllm_cfg.pipeline_parallel_size": vllm.pipeline_parallel_size > 1,
    }
    for key, is_on in features.items():
        if is_on:
            raise InvalidValue(f"policy.generation.vllm_kwargs.{speculation.KEY}", f"cannot be combined with {key}")
    draft_ranks = generation.vllm_kwargs[speculation.KEY].get("draft_tensor_parallel_size")
    if draft_ranks not in (None, vllm.tensor_parallel_size):
        raise InvalidValue(
            f"policy.generation.vllm_kwargs.{speculation.KEY}.draft_tensor_parallel_size",
            f"{draft_ranks}, but vLLM shares a draft as the policy: tensor_parallel_size is "
            f"{vllm.tensor_parallel_size}",
        )


def vllm_can_be_refitted(config: Config) -> None:
    """Check that refits can write the model family's parameters in vLLM, if the family is known here."""
    model_type = (model_config(config.policy) or {}).get("model_type")
    if config.policy.generation.backend == "vllm" and model_type not in (None, *VLLM_PLANNED, *VLLM_SEEING):
        supported = ", ".join(VLLM if family_of(config.policy) is None else VLLM_SEEING)
        raise InvalidValue(
            "policy.generation.backend",
            f"vllm, but refits write vLLM's {supported}, not its {model_type}; transformers is the other engine",
        )


def prompts_move_where_engines_are_async(config: Config) -> None:
    """Check that prompts move between engines only if these are asynchronous: moves change the last bits of a run."""
    generation = config.policy.generation
    if generation.generation_timeout is not None and not generation.is_async:
        raise InvalidValue("policy.generation.generation_timeout", "needs policy.generation.async_engine")


def a_prompt_group_fits_the_engine_that_makes_it(config: Config) -> None:
    """Check that an engine can store all samples of a group, which it keeps until they are trained on."""
    max_tokens, num_samples = (
        config.policy.generation.max_stored_tokens,
        config.rollout_section.num_generations_per_prompt,
    )
    longest = config.policy.max_total_sequence_length
    if max_tokens < num_samples * longest:
        raise InvalidValue(
            "policy.generation.max_stored_tokens",
            f"{max_tokens} is less than {config.algorithm}.num_generations_per_prompt * "
            f"policy.max_total_sequence_length = {num_samples} * {longest} = {num_samples * longest}, "
            "which the samples of one prompt may have",
        )


def engines_beside_training_have_devices_of_their_own(config: Config) -> None:
    """Check that asynchronous training has engines on devices of their own: colocated engines cannot run beside it."""
    if config.max_trajectory_age_steps and config.is_colocated:
        raise InvalidValue(
            f"{config.asynchronous_key}.enabled",
            "true needs policy.generation.colocated.enabled: false: engines generate while trainers train",
        )


RULES: tuple[Rule, ...] = where_it_rolls_out(
    vllm_takes_its_arguments,
    drafts_are_verified_where_that_was_tried,
    vllm_can_be_refitted,
    prompts_move_where_engines_are_async,
    a_prompt_group_fits_the_engine_that_makes_it,
    engines_beside_training_have_devices_of_their_own,
)
