"""Rules for low-rank adapters, whose settings both backends have under names of their own."""

from __future__ import annotations

from pathlib import Path

from tandem.common.config.checks.rule import Rule
from tandem.common.config.problem import Invalid, shown
from tandem.common.config.schema import Config
from tandem.common.lora import CONFIG

DTENSOR, MEGATRON = "policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"


def restored_adapters_exist(config: Config) -> None:
    """A folder to begin with is in PEFT's format."""
    adapters = config.policy.adapters
    if adapters is None or adapters.restore_from is None:
        return
    key = f"{MEGATRON if config.policy.megatron_cfg.enabled else DTENSOR}.restore_from"
    if not Path(adapters.restore_from, CONFIG).is_file():
        raise Invalid(key, f"{shown(adapters.restore_from)} is no folder of adapters: it has no {CONFIG}")


def adapters_have_the_type_of_the_weights(config: Config) -> None:
    """Megatron-Core's optimizer keeps what it steps in float32 beside parameters of another type."""
    policy, dtype = config.policy, config.policy.megatron_cfg.peft.lora_dtype
    if policy.megatron_cfg.enabled and policy.adapters and dtype not in (None, "None", policy.precision):
        raise Invalid(f"{MEGATRON}.lora_dtype", f"{shown(dtype)} is not policy.precision ({policy.precision})")


def adapters_are_of_a_language_model(config: Config) -> None:
    """A head that gives a number is new, and has to be trained whole."""
    policy = config.policy
    if policy.adapters and config.declaration.head_of("policy") != "vocabulary":
        key = f"{MEGATRON if policy.megatron_cfg.enabled else DTENSOR}.enabled"
        raise Invalid(key, f"true, but {config.algorithm} trains a head: adapters leave it as it is")


def engines_can_merge_adapters(config: Config) -> None:
    """Weights in float8 with block scales are made from those that come; there are none to add a product to."""
    policy = config.policy
    if policy.adapters and policy.generation.backend == "vllm" and policy.generation.vllm_cfg.precision == "fp8":
        what = "'fp8', where adapters are trained: engines merge them into bfloat16, float16 or float32"
        raise Invalid("policy.generation.vllm_cfg.precision", what)


RULES: tuple[Rule, ...] = (
    restored_adapters_exist,
    adapters_have_the_type_of_the_weights,
    adapters_are_of_a_language_model,
    engines_can_merge_adapters,
)
