"""Rules for low-rank adapters, with different names of the settings in the two backends."""

from __future__ import annotations

from pathlib import Path

from tandem.common.errors import ConfigError
from tandem.config.models.families import MEGATRON_ADAPTERS, is_text_only
from tandem.config.models.lora import (
    ALL_LINEAR,
    CONFIG,
    choose_layers,
    explain_no_model,
    explain_other_adapters,
    matches,
)
from tandem.config.models.model_sizes import read_expert_sizes, read_model_config
from tandem.config.problem import InvalidValue, Rule, shown
from tandem.config.schema import Config

_LATENT = "deepseek_v3"
_NEVER_LINEAR = ("gpt_oss", "llama4", "llama4_text")
"""Families whose experts are no linear layers in a checkpoint either: PEFT's ``all-linear`` does not take them."""
DTENSOR, MEGATRON = "policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"


def check_restored_adapters_exist(config: Config) -> None:
    """Check that a folder of initial adapters is in PEFT's format, and that they have the configured rank and scale."""
    adapters = config.policy.adapters
    if adapters is None or adapters.restore_from is None:
        return
    key = f"{MEGATRON if config.policy.megatron_cfg.enabled else DTENSOR}.restore_from"
    if not Path(adapters.restore_from, CONFIG).is_file():
        raise InvalidValue(key, f"{shown(adapters.restore_from)} is not a folder of adapters: it has no {CONFIG}")
    if (problem := explain_other_adapters(Path(adapters.restore_from), adapters)) is not None:
        raise InvalidValue(key, problem)


def check_adapters_have_type_of_weights(config: Config) -> None:
    """Check that adapters have the weights' type: Megatron-Core's optimizer keeps float32 copies beside them."""
    policy, dtype = config.policy, config.policy.megatron_cfg.peft.lora_dtype
    if policy.megatron_cfg.enabled and policy.adapters and dtype not in (None, "None", policy.precision):
        raise InvalidValue(f"{MEGATRON}.lora_dtype", f"{shown(dtype)} is not policy.precision ({policy.precision})")


def check_adapters_are_of_language_model(config: Config) -> None:
    """Check that adapters belong to a language model: a scalar head is new and has to be trained in full."""
    policy = config.policy
    if policy.adapters and config.declaration.head_of("policy") != "vocabulary":
        key = f"{MEGATRON if policy.megatron_cfg.enabled else DTENSOR}.enabled"
        raise InvalidValue(key, f"true, but {config.algorithm} trains a head, which adapters leave unchanged")


def check_engines_can_hold_several_sets_of_adapters(config: Config) -> None:
    """Check that an engine which is to hold several versions of adapters can."""
    policy, key = config.policy, "policy.generation.adapter_sets"
    num_sets = policy.generation.num_adapter_sets
    if num_sets == 1:
        return
    if policy.adapters is None:
        raise InvalidValue(key, f"{num_sets}, but no adapters are trained ({DTENSOR}.enabled)")
    if not is_text_only(policy):
        raise InvalidValue(
            key, f"{num_sets}, but the model sees: only text models have the adapters of several versions"
        )


def check_megatron_has_adapters_of_family(config: Config) -> None:
    """Check that Megatron-Core has adapters for the model: none are built for layers of latent attention."""
    policy, model = config.policy, read_model_config(config.policy) or {}
    if policy.megatron_cfg.enabled and policy.adapters and model.get("model_type") == _LATENT:
        families = ", ".join(MEGATRON_ADAPTERS)
        text = f"true, but Megatron-Core trains adapters of {families} here, not of {_LATENT} with its latent attention"
        raise InvalidValue(f"{MEGATRON}.enabled", text)


def list_adapted_experts(config: Config) -> list[str]:
    """Return the fused parameters of routed experts that the DTensor backend adapts, by the names that they have in
    most models; empty if the model is not known yet."""
    policy, lora = config.policy, config.policy.dtensor_cfg.lora_cfg
    model = read_model_config(policy)
    experts = None if model is None else read_expert_sizes(model)
    if experts is None or policy.megatron_cfg.enabled or policy.adapters is None:
        return []
    if lora.patterns == ("*",) and model is not None and model.get("model_type") in _NEVER_LINEAR:
        return []
    names = [
        f"model.layers.{layer}.mlp.experts.{last}"
        for layer in range(experts.num_layers)
        for last in ("gate_up_proj", "down_proj")
    ]
    try:
        return choose_layers((), lora, DTENSOR, names)
    except ConfigError:  # the trainer knows all layers, and says what is wrong
        return []


def check_adapters_of_experts_can_be_trained(config: Config) -> None:
    """Check that adapters of routed experts are configured only where they are built.

    Trainers know which layers have experts, and refuse patterns that match only some of them.
    """
    policy = config.policy
    adapters = policy.adapters
    if adapters is None:
        return
    if not policy.megatron_cfg.enabled:
        adapted = list_adapted_experts(config)
        if adapted and adapters.dropout:
            text = f"{adapters.dropout:g}, but adapters of routed experts drop nothing: leave them out with"
            raise InvalidValue(f"{DTENSOR}.dropout", f'{text} exclude_modules: ["*.mlp.experts.*", "gate"]')
        if adapted and policy.generation.num_adapter_sets > 1 and policy.generation.backend == "vllm":
            text = f"{policy.generation.num_adapter_sets}, but vLLM has the adapters of several versions only of linear"
            raise InvalidValue("policy.generation.adapter_sets", f"{text} layers, not of routed experts ({adapted[0]})")
        return
    model = read_model_config(policy)
    experts = None if model is None else read_expert_sizes(model)
    layers = range(experts.num_layers) if experts is not None else ()
    for linear in ("linear_fc1", "linear_fc2"):
        names = [f"decoder.layers.{layer}.mlp.experts.{linear}" for layer in layers]
        has_some = [matches(name, adapters.patterns) and not matches(name, adapters.exclude_modules) for name in names]
        if names and all(has_some):
            text = f"{shown(list(adapters.exclude_modules))}, but adapters of routed experts are not built"
            raise InvalidValue(f"{MEGATRON}.exclude_modules", f'{text}: leave them out with ["*.mlp.experts.*"]')


def check_all_linear_is_no_name(config: Config) -> None:
    """Check that target modules of Megatron-Core do not include PEFT's ``all-linear``, which it does not accept."""
    policy, adapters = config.policy, config.policy.adapters
    if adapters is not None and policy.megatron_cfg.enabled and ALL_LINEAR in adapters.target_modules:
        text = "'all-linear' is no layer: an empty list chooses linear_qkv, linear_proj, linear_fc1 and linear_fc2"
        raise InvalidValue(f"{MEGATRON}.target_modules", text)


def check_other_models_are_whole(config: Config) -> None:
    """Check that teachers and the initial value model are whole models, not adapters."""
    sections = dict(config.teacher_sections)
    if config.value is not None and "value" in config.holds:
        sections["value.model_name"] = config.value
    for key, section in sections.items():
        if (problem := explain_no_model(Path(section.model_name))) is not None:
            raise InvalidValue(key, problem)


RULES: tuple[Rule, ...] = (
    check_restored_adapters_exist,
    check_adapters_have_type_of_weights,
    check_adapters_are_of_language_model,
    check_engines_can_hold_several_sets_of_adapters,
    check_megatron_has_adapters_of_family,
    check_adapters_of_experts_can_be_trained,
    check_all_linear_is_no_name,
    check_other_models_are_whole,
)
