"""Rules for Megatron-Core: combinations that it would refuse late, or compute wrongly."""

from __future__ import annotations

import re

from tandem.config.low_precision import DELAYED, list_products
from tandem.config.models import families, model_sizes
from tandem.config.problem import InvalidValue, ProblemCollector, Rule, shown
from tandem.config.schema import Config

KEY = "policy.megatron_cfg"

OPTIMIZERS = ("adam", "sgd")

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
                raise InvalidValue(
                    f"{KEY}.{key}",
                    f"{value}, but {KEY}.{name}_cfg is enabled: set it there",
                )
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
    megatron, layers = config.policy.megatron_cfg, model_sizes.read_model_sizes(config.policy).num_layers
    arguments = megatron.forwarded
    in_float8 = any(products.name == "fp8" for products in list_products(megatron))
    if layers is None or not in_float8 or not arguments.get("first_last_layers_bf16"):
        return
    max_layers = layers // megatron.pipeline_model_parallel_size
    for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if not 0 <= arguments.get(key, 1) <= max_layers:
            raise InvalidValue(
                f"{KEY}.{key}",
                f"{arguments[key]} is not between 0 and {max_layers}, the layers of a pipeline stage",
            )


def check_weights_keep_their_precision(config: Config) -> None:
    """Check that no argument is for weights in float8: refits, checkpoints and optimizers read `policy.precision`."""
    for section, name in _OF_WEIGHTS:
        value = getattr(config.policy.megatron_cfg, section).get(name)
        if value:
            raise InvalidValue(
                f"{KEY}.{section}.{name}",
                f"{shown(value)} is for weights in float8, which is not supported",
            )


def check_routers_pad_for_products(config: Config) -> None:
    """Check that routers pad only where products of fewer bits need it."""
    megatron = config.policy.megatron_cfg
    for name in _PADDING:
        if megatron.forwarded.get(name) and not list_products(megatron):
            raise InvalidValue(
                f"{KEY}.{name}",
                f"true, but neither {KEY}.fp8_cfg nor {KEY}.fp4_cfg is enabled",
            )


LOW_PRECISION_RULES: tuple[Rule, ...] = (
    check_products_are_requested_once,
    check_scales_are_of_pass_itself,
    check_recipes_of_users_have_factory,
    check_four_bits_are_made_of_bfloat16,
    check_layers_at_ends_are_of_one_stage,
    check_weights_keep_their_precision,
    check_routers_pad_for_products,
)
"""Rules for Megatron-Core, where it trains."""


def check_architecture_is_megatrons(config: Config) -> None:
    """Check that Megatron-Core has the model's architecture, if a local ``config.json`` names it."""
    model_type = (model_sizes.read_model_config(config.policy) or {}).get("model_type")
    if model_type not in (None, *families.MEGATRON) and families.is_text_only(config.policy):
        text = f"true, but Megatron-Core trains {', '.join(families.MEGATRON)} here, not {model_type}"
        raise InvalidValue(f"{KEY}.enabled", text)


def check_rates_are_in_order(config: Config) -> None:
    """Check that the learning rate neither starts nor ends above its maximum."""
    megatron = config.policy.megatron_cfg
    highest = megatron.optimizer.get("lr")
    if highest is None:
        raise InvalidValue(f"{KEY}.optimizer.lr", "required: the highest learning rate")
    lower_rates = (
        ("optimizer.min_lr", megatron.optimizer.get("min_lr") or 0.0),
        ("scheduler.lr_warmup_init", megatron.scheduler.lr_warmup_init),
    )
    for key, rate in lower_rates:
        if rate > highest:
            raise InvalidValue(f"{KEY}.{key}", f"{rate:g} is greater than {KEY}.optimizer.lr ({highest:g})")


def check_decay_outlasts_warmup(config: Config) -> None:
    """Check that the decay ends after the warm-up; both are counted from the first step."""
    scheduler = config.policy.megatron_cfg.scheduler
    if scheduler.lr_decay_iters is not None and scheduler.lr_decay_iters <= scheduler.lr_warmup_iters:
        raise InvalidValue(
            f"{KEY}.scheduler.lr_decay_iters",
            f"{scheduler.lr_decay_iters} is no more than {KEY}.scheduler.lr_warmup_iters ({scheduler.lr_warmup_iters})",
        )
    if scheduler.lr_decay_style == "WSD" and scheduler.lr_wsd_decay_iters is None:
        raise InvalidValue(f"{KEY}.scheduler.lr_wsd_decay_iters", "required where lr_decay_style is WSD")


def check_constant_weight_decay_is_constant(config: Config) -> None:
    """Check that a constant weight decay has equal ends, which Megatron-Core's schedule asserts."""
    scheduler = config.policy.megatron_cfg.scheduler
    decay = config.policy.megatron_cfg.optimizer.get("weight_decay", 0.01)
    start = decay if scheduler.start_weight_decay is None else scheduler.start_weight_decay
    end = decay if scheduler.end_weight_decay is None else scheduler.end_weight_decay
    if scheduler.weight_decay_incr_style == "constant" and start != end:
        raise InvalidValue(
            f"{KEY}.scheduler.end_weight_decay",
            f"{end:g} differs from the start ({start:g}), but weight_decay_incr_style is constant",
        )


def check_stages_are_interleaved_over_several_ranks(config: Config) -> None:
    """Check that virtual stages come with several pipeline ranks: they interleave the layers of these."""
    megatron = config.policy.megatron_cfg
    virtual = megatron.virtual_pipeline_model_parallel_size
    if virtual is not None and virtual > 1 and megatron.pipeline_model_parallel_size == 1:
        raise InvalidValue(
            f"{KEY}.virtual_pipeline_model_parallel_size",
            f"{virtual}, but {KEY}.pipeline_model_parallel_size is 1: there are no stages to interleave",
        )


def check_stages_speak_one_type(config: Config) -> None:
    """Check that `pipeline_dtype` is the policy's precision: a stage reads what it receives as that type."""
    dtype = config.policy.megatron_cfg.pipeline_dtype
    if dtype not in (None, config.policy.precision):
        raise InvalidValue(
            f"{KEY}.pipeline_dtype", f"{dtype} is not policy.precision ({config.policy.precision}), nor null"
        )


def check_optimizer_keeps_precision(config: Config) -> None:
    """Check that the optimizer follows the policy's precision: float16 would need a loss scale, which is not built."""
    if config.policy.megatron_cfg.optimizer.get("fp16"):
        raise InvalidValue(f"{KEY}.optimizer.fp16", f"true, but policy.precision is {config.policy.precision}")


def check_optimizer_is_megatrons(config: Config) -> None:
    """Check the optimizer's name, whether its state can be saved, and options that only the precision-aware one has."""
    optimizer, key = config.policy.megatron_cfg.optimizer, f"{KEY}.optimizer"
    name = optimizer.get("optimizer", "adam")
    if name not in OPTIMIZERS:
        raise InvalidValue(f"{key}.optimizer", f"{shown(name)} is not one of {', '.join(OPTIMIZERS)}")
    if optimizer.get("optimizer_cpu_offload") and config.checkpointing.enabled:
        raise InvalidValue(
            f"{key}.optimizer_cpu_offload", "true, but its state cannot be saved (checkpointing.enabled)"
        )
    if (
        optimizer.get("optimizer_cpu_offload")
        and optimizer["use_distributed_optimizer"]
        and config.policy.precision == "float32"
    ):
        # Megatron-Core would give it views of the parameters, which no optimizer of torch takes.
        raise InvalidValue(
            f"{key}.optimizer_cpu_offload", f"true, but in float32 it needs {key}.use_distributed_optimizer off"
        )
    aware = "use_precision_aware_optimizer"
    if optimizer.get(aware) and (name != "adam" or not optimizer["use_distributed_optimizer"]):
        raise InvalidValue(f"{key}.{aware}", f"true, but it needs {key}.optimizer adam and use_distributed_optimizer")
    for state in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if optimizer.get(state, "float32") != "float32" and not optimizer.get(aware):
            raise InvalidValue(f"{key}.{state}", f"{optimizer[state]} needs {key}.{aware}")


def check_optimizer_shards(config: Config) -> None:
    """Check that Megatron's FSDP is off: the weight plane does not know its layout of parameters."""
    ddp_config = config.policy.megatron_cfg.distributed_data_parallel_config
    for name in ("use_custom_fsdp", "use_megatron_fsdp"):
        if ddp_config.get(name):
            raise InvalidValue(
                f"{KEY}.distributed_data_parallel_config.{name}",
                f"true is not supported: {KEY}.optimizer.use_distributed_optimizer shards, and so does dtensor_cfg",
            )


def check_recomputation_is_whole(config: Config) -> None:
    """Check that `recompute_granularity` has the options that Megatron-Core requires with it."""
    arguments = config.policy.megatron_cfg.forwarded
    granularity, layers = arguments.get("recompute_granularity"), arguments.get("recompute_num_layers")
    if granularity is None:
        extra = next(
            (name for name in arguments if name.startswith("recompute_") and arguments[name] is not None), None
        )
        if extra is not None:
            raise InvalidValue(f"{KEY}.{extra}", f"needs {KEY}.recompute_granularity")
    elif granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if arguments.get(name) is None:
                raise InvalidValue(f"{KEY}.{name}", f"required where {KEY}.recompute_granularity is full")
    elif layers is not None:
        raise InvalidValue(f"{KEY}.recompute_num_layers", f"{layers}, but {KEY}.recompute_granularity is selective")


def check_environment_variables_are_texts(config: Config) -> None:
    """Check that environment variables have valid names, and text or numbers as values."""
    problems = ProblemCollector()
    for name, value in (config.policy.megatron_cfg.env_vars or {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.found.append(InvalidValue(f"{KEY}.env_vars", f"{shown(name)} is not a valid name of a variable"))
        elif isinstance(value, bool) or not isinstance(value, str | int | float):
            problems.found.append(
                InvalidValue(f"{KEY}.env_vars.{name}", f"expected text or a number, got {shown(value)}")
            )
        elif "\0" in str(value):
            problems.found.append(InvalidValue(f"{KEY}.env_vars.{name}", "holds a null byte"))
    problems.complain()


def _enabled(rule: Rule) -> Rule:
    """Return a rule that applies only if Megatron-Core trains."""

    def checked(config: Config) -> None:
        if config.policy.megatron_cfg.enabled:
            rule(config)

    return checked


RULES: tuple[Rule, ...] = tuple(
    _enabled(rule)
    for rule in (
        check_architecture_is_megatrons,
        check_rates_are_in_order,
        check_decay_outlasts_warmup,
        check_constant_weight_decay_is_constant,
        check_stages_are_interleaved_over_several_ranks,
        check_stages_speak_one_type,
        check_optimizer_keeps_precision,
        check_optimizer_is_megatrons,
        check_optimizer_shards,
        check_recomputation_is_whole,
        check_environment_variables_are_texts,
        *LOW_PRECISION_RULES,
    )
)
