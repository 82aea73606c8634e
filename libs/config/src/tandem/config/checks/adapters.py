"""Rules for low-rank adapters, with different names of the settings in the two backends."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.config.checks.rule import Rule
from tandem.config.models.families import MEGATRON_ADAPTERS
from tandem.config.models.lora import CONFIG, explain_no_model, matches
from tandem.config.models.model_sizes import read_expert_sizes, read_model_config
from tandem.config.models.vision_families import family_of
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config

_LATENT = "deepseek_v3"
_ROUTED = re.compile("(?<!shared_)experts")
DTENSOR, MEGATRON = "policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"


def check_restored_adapters_exist(config: Config) -> None:
    """Check that a folder of initial adapters is in PEFT's format."""
    adapters = config.policy.adapters
    if adapters is None or adapters.restore_from is None:
        return
    key = f"{MEGATRON if config.policy.megatron_cfg.enabled else DTENSOR}.restore_from"
    if not Path(adapters.restore_from, CONFIG).is_file():
        raise InvalidValue(key, f"{shown(adapters.restore_from)} is not a folder of adapters: it has no {CONFIG}")


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
    if family_of(policy) is not None:
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


def check_routed_experts_have_no_adapters(config: Config) -> None:
    """Check that no adapters of routed experts are configured, since they would be left out.

    Trainers know which layers have experts, and refuse patterns that match only some of them.
    """
    policy, lora = config.policy, config.policy.dtensor_cfg.lora_cfg
    adapters, model = policy.adapters, read_model_config(policy)
    if adapters is None:
        return
    if not policy.megatron_cfg.enabled:
        named = [linear for linear in lora.target_modules if _ROUTED.search(linear) and not lora.match_all_linear]
        if named:
            text = f"{shown(named[0])} names routed experts, and adapters of them are not built"
            raise InvalidValue(f"{DTENSOR}.target_modules", f"{text}: a layer's experts are one parameter")
        return
    experts = None if model is None else read_expert_sizes(model)
    layers = range(experts.num_layers) if experts is not None else ()
    for linear in ("linear_fc1", "linear_fc2"):
        names = [f"decoder.layers.{layer}.mlp.experts.{linear}" for layer in layers]
        has_some = [matches(name, adapters.patterns) and not matches(name, adapters.exclude_modules) for name in names]
        if names and all(has_some):
            text = f"{shown(list(adapters.exclude_modules))}, but adapters of routed experts are not built"
            raise InvalidValue(f"{MEGATRON}.exclude_modules", f'{text}: leave them out with ["*.mlp.experts.*"]')


def check_all_linear_is_no_name(config: Config) -> None:
    """Check that target modules do not include PEFT's ``all-linear``, which neither backend accepts."""
    policy, adapters = config.policy, config.policy.adapters
    if adapters is None or "all-linear" not in adapters.target_modules:
        return
    if policy.megatron_cfg.enabled:
        text = "'all-linear' is no layer: an empty list chooses linear_qkv, linear_proj, linear_fc1 and linear_fc2"
        raise InvalidValue(f"{MEGATRON}.target_modules", text)
    if not policy.dtensor_cfg.lora_cfg.match_all_linear:
        raise InvalidValue(
            f"{DTENSOR}.target_modules", "'all-linear' is no layer: match_all_linear: true chooses them all"
        )


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
    check_routed_experts_have_no_adapters,
    check_all_linear_is_no_name,
    check_other_models_are_whole,
)
