"""Rules for matrix products of fewer bits: what Megatron-Core refuses late, or would compute wrongly."""

from __future__ import annotations

from tandem.config.checks.rule import Rule
from tandem.config.low_precision import DELAYED, list_products
from tandem.config.models.model_sizes import read_model_sizes
from tandem.config.problem import InvalidValue, shown
from tandem.config.schema import Config

KEY = "policy.megatron_cfg"

_OF_WEIGHTS = (
    ("distributed_data_parallel_config", "fp8_param_gather"),
    ("distributed_data_parallel_config", "reuse_grad_buf_for_mxfp8_param_ag"),
    ("optimizer", "reuse_grad_buf_for_mxfp8_param_ag"),
    ("optimizer", "fp8_recipe"),
)
"""Arguments for weights that are kept in float8."""
_PADDING = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")


def check_products_are_requested_once(config: Config) -> None:
    """Check that either a section or Megatron-Core's arguments request products, of one kind."""
    megatron = config.policy.megatron_cfg
    for name in ("fp8", "fp4"):
        section = getattr(megatron, f"{name}_cfg")
        if section is None or not section.enabled:
            continue
        for key in (name, f"{name}_recipe"):
            if megatron.forwarded.get(key) is not None:
                value = megatron.forwarded[key]
                raise InvalidValue(f"{KEY}.{key}", f"{value}, but {KEY}.{name}_cfg is enabled: set it there")
    products = list_products(megatron)
    if len(products) > 1:
        first, second = products
        raise InvalidValue(f"{KEY}.{second.key}", f"{second.value}, but {KEY}.{first.key} is {first.value}")


def check_scales_are_of_pass_itself(config: Config) -> None:
    """Check that scales do not come from earlier passes.

    Transformer Engine updates those only where there are gradients. A pass that scores would use what training has
    left, and a reference model would never have any.
    """
    for products in list_products(config.policy.megatron_cfg):
        if products.recipe == DELAYED:
            raise InvalidValue(
                f"{KEY}.{products.recipe_key}",
                "delayed takes scales from earlier passes in training, of which a pass that scores has none: choose "
                "blockwise, tensorwise or mxfp8",
            )


def check_recipes_of_users_have_factory(config: Config) -> None:
    """Check that a custom recipe names what makes its quantisers."""
    for products in list_products(config.policy.megatron_cfg):
        factory = f"{products.name}_quantizer_factory"
        if products.recipe == "custom" and not config.policy.megatron_cfg.forwarded.get(factory):
            raise InvalidValue(f"{KEY}.{factory}", f"required where {KEY}.{products.recipe_key} is custom")


def check_four_bits_are_made_of_bfloat16(config: Config) -> None:
    """Check that products in float4 have inputs in bfloat16: their Hadamard transform takes no other type."""
    for products in list_products(config.policy.megatron_cfg):
        if products.recipe == "nvfp4" and config.policy.precision != "bfloat16":
            raise InvalidValue(
                f"{KEY}.{products.key}",
                f"{products.value} needs policy.precision bfloat16, not {config.policy.precision}",
            )


def check_layers_at_ends_are_of_one_stage(config: Config) -> None:
    """Check that no more layers at an end stay in bfloat16 than a stage has: Megatron-Core wants that of float8."""
    megatron, layers = config.policy.megatron_cfg, read_model_sizes(config.policy).num_layers
    arguments = megatron.forwarded
    in_float8 = any(products.name == "fp8" for products in list_products(megatron))
    if layers is None or not in_float8 or not arguments.get("first_last_layers_bf16"):
        return
    max_layers = layers // megatron.pipeline_model_parallel_size
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if not 0 <= arguments.get(key, 1) <= max_layers:
            raise InvalidValue(
                f"{KEY}.{key}", f"{arguments[key]} is not between 0 and {max_layers}, the layers of a pipeline stage"
            )


def check_weights_keep_their_precision(config: Config) -> None:
    """Check that no argument is for weights in float8: refits, checkpoints and optimizers read `policy.precision`."""
    for section, name in _OF_WEIGHTS:
        value = getattr(config.policy.megatron_cfg, section).get(name)
        if value:
            raise InvalidValue(
                f"{KEY}.{section}.{name}", f"{shown(value)} is for weights in float8, which is not supported"
            )


def check_routers_pad_for_products(config: Config) -> None:
    """Check that routers pad only where products of fewer bits need it."""
    megatron = config.policy.megatron_cfg
    for name in _PADDING:
        if megatron.forwarded.get(name) and not list_products(megatron):
            raise InvalidValue(f"{KEY}.{name}", f"true, but neither {KEY}.fp8_cfg nor {KEY}.fp4_cfg is enabled")


RULES: tuple[Rule, ...] = (
    check_products_are_requested_once,
    check_scales_are_of_pass_itself,
    check_recipes_of_users_have_factory,
    check_four_bits_are_made_of_bfloat16,
    check_layers_at_ends_are_of_one_stage,
    check_weights_keep_their_precision,
    check_routers_pad_for_products,
)
"""Rules for Megatron-Core, where it trains."""
