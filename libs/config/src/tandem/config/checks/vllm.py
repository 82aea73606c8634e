"""Rules and notices for configurations that generate with vLLM; its declaration names them."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.installed import vllm_arguments
from tandem.config.installed.vllm_arguments import WITHOUT_EFFECT, find_problem
from tandem.config.models import mtp_layers
from tandem.config.models.families import MTP_DRAFTS, VLLM, VLLM_PLANNED, VLLM_READS, VLLM_TABLES, is_text_only
from tandem.config.models.model_sizes import read_model_config
from tandem.config.problem import InvalidValue, Rule, describe_without_effect
from tandem.config.schema import Config


def check_vllm_takes_its_arguments(config: Config) -> None:
    """Check vLLM's arguments by name if vLLM is installed: its engine would refuse them only after everything has
    started."""
    generation = config.policy.generation
    arguments = dict(generation.vllm_kwargs)
    if vllm_arguments.find_unbuilt_draft_method(arguments) is not None:  # which is reported elsewhere
        del arguments[vllm_arguments.SPECULATION]
    problem = find_problem(arguments)
    if problem is not None:
        raise InvalidValue(f"policy.generation.vllm_kwargs.{problem[0]}", problem[1])
    longest = config.policy.max_total_sequence_length
    if generation.vllm_cfg.max_model_len < longest:
        raise InvalidValue(
            "policy.generation.vllm_cfg.max_model_len",
            f"{generation.vllm_cfg.max_model_len} is less than policy.max_total_sequence_length ({longest})",
        )


def check_drafts_combine(config: Config) -> None:
    """Check that speculative decoding is not combined with what changes vLLM's steps in other ways."""
    generation = config.policy.generation
    if vllm_arguments.find_draft_method(generation.vllm_kwargs) is None:
        return
    vllm = generation.vllm_cfg
    features = {
        "a vision model": not is_text_only(config.policy),
        "policy.router_replay.enabled": config.policy.router_replay.enabled,
        "policy.generation.top_p, top_k, min_p or bad_words, whose sampling masks drafts would need": (
            config.replays_sampling_masks
        ),
        "policy.generation.vllm_cfg.precision: fp8": vllm.precision == "fp8",
        "policy.generation.vllm_cfg.pipeline_parallel_size": vllm.pipeline_parallel_size > 1,
    }
    for key, is_on in features.items():
        if is_on:
            raise InvalidValue(
                f"policy.generation.vllm_kwargs.{vllm_arguments.SPECULATION}", f"cannot be combined with {key}"
            )
    draft_ranks = generation.vllm_kwargs[vllm_arguments.SPECULATION].get("draft_tensor_parallel_size")
    if draft_ranks not in (None, vllm.tensor_parallel_size):
        raise InvalidValue(
            f"policy.generation.vllm_kwargs.{vllm_arguments.SPECULATION}.draft_tensor_parallel_size",
            f"{draft_ranks}, but vLLM shares a draft as the policy: tensor_parallel_size is "
            f"{vllm.tensor_parallel_size}",
        )


def check_layers_can_draft(config: Config) -> None:
    """Check that layers of multi-token prediction draft where vLLM has them, and as many as are trained."""
    policy = config.policy
    if vllm_arguments.find_draft_method(policy.generation.vllm_kwargs) not in vllm_arguments.MTP_METHODS:
        return
    key = f"policy.generation.vllm_kwargs.{vllm_arguments.SPECULATION}"
    model = read_model_config(policy) or {}
    model_type, num_trained = model.get("model_type"), policy.mtp.num_kept
    if policy.new_model is not None:
        raise InvalidValue(key, "mtp, but policy.new_model has no layers of multi-token prediction")
    if model_type is None:
        return
    if model_type not in MTP_DRAFTS:
        raise InvalidValue(key, f"mtp, but such layers draft in {', '.join(MTP_DRAFTS)}, not in {model_type}")
    num_layers = mtp_layers.count_layers(model)
    if not num_layers:
        raise InvalidValue(key, f"mtp, but the model's config.json has no {mtp_layers.COUNT}")
    if num_trained not in (0, num_layers):
        text = f"mtp drafts with {num_layers} layers, but policy.mtp trains {num_trained}: refits would not bring all"
        raise InvalidValue(key, text)
    num_tokens = policy.generation.vllm_kwargs[vllm_arguments.SPECULATION]["num_speculative_tokens"]
    if num_tokens > num_layers and num_tokens % num_layers:
        text = f"{num_tokens} is not a multiple of {num_layers}, the model's {mtp_layers.COUNT}, as vLLM wants of more"
        raise InvalidValue(f"{key}.num_speculative_tokens", text)


def check_vllm_can_be_refitted(config: Config) -> None:
    """Check that refits can write the model family's parameters in vLLM, if the family is known here.

    Of other families of text vLLM's own loader says how, once it runs.
    """
    model = read_model_config(config.policy) or {}
    model_type = model.get("model_type")
    if model_type is None or model_type in VLLM_TABLES or not is_text_only(config.policy):
        return
    if config.policy.generation.vllm_cfg.precision == "fp8" and model_type not in VLLM_PLANNED:
        text = f"fp8, but blocks with scales are known of {', '.join(VLLM)}, not of {model_type}"
        raise InvalidValue("policy.generation.vllm_cfg.precision", text)


def check_vllm_finds_what_it_reads(config: Config) -> None:
    """Check that the model's configuration has what vLLM reads, and Transformers' own classes leave out."""
    model = read_model_config(config.policy) or {}
    for name in VLLM_READS.get(str(model.get("model_type")), ()):
        if name not in model:
            key = "policy.hf_config_overrides" if config.policy.new_model is None else "policy.new_model.config"
            raise InvalidValue(
                f"{key}.{name}", f"missing, but vLLM reads it of a {model['model_type']}: the model's files have it"
            )


def check_engines_can_merge_adapters(config: Config) -> None:
    """Check the engine's precision: block-scaled float8 weights are quantised on arrival, so adapters cannot be
    added."""
    policy = config.policy
    if policy.adapters and policy.generation.vllm_cfg.precision == "fp8":
        text = "'fp8', but adapters are trained: engines merge them into bfloat16, float16 or float32"
        raise InvalidValue("policy.generation.vllm_cfg.precision", text)


def list_arguments_without_effect(config: Config) -> Iterator[str]:
    """Yield the arguments of vLLM that are accepted but not passed to it."""
    generation = config.policy.generation
    for name, reason in WITHOUT_EFFECT.items():
        if name in generation.vllm_kwargs:
            yield describe_without_effect(f"policy.generation.vllm_kwargs.{name}", generation.vllm_kwargs[name], reason)


RULES: tuple[Rule, ...] = (
    check_vllm_takes_its_arguments,
    check_drafts_combine,
    check_layers_can_draft,
    check_vllm_can_be_refitted,
    check_vllm_finds_what_it_reads,
    check_engines_can_merge_adapters,
)
