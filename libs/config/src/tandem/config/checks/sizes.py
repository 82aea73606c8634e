"""Rules for sizes: batches, ranks, layers, heads, experts and sequences must divide evenly."""

from __future__ import annotations

import math

import msgspec

from tandem.config.installed.model_fields import is_cut_like_llama
from tandem.config.models import families, model_sizes
from tandem.config.problem import InvalidValue, Rule, restrict_to_data_sets, restrict_to_rollouts, shown
from tandem.config.schema import Config, DynamicBatching, ModelConfig, ProcessesOf, SequencePacking

MEGATRON = "policy.megatron_cfg"
PROCESSES_KEY = "cluster.processes_of"
_SECTION = "policy.dtensor_cfg"
_EXPERTS = f"{_SECTION}.expert_parallel_size"
_SIZE = "policy.dtensor_cfg.tensor_parallel_size"
_PLAN = "policy.dtensor_cfg.custom_parallel_plan"


def check_rollout_batch_divides_into_global_batches(config: Config) -> None:
    """Check that a rollout batch is a whole number of optimizer steps."""
    section, name = config.rollout_section, config.algorithm
    prompts, generations = section.num_prompts_per_step, section.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    if prompts * generations % batch:
        raise InvalidValue(
            "policy.train_global_batch_size",
            f"{batch} does not divide {name}.num_prompts_per_step * {name}.num_generations_per_prompt "
            f"= {prompts} * {generations} = {prompts * generations} samples",
        )


def check_global_batch_divides_into_micro_batches(config: Config) -> None:
    """Check that each trainer gets an equal shard of a global batch, in whole micro-batches, unless those go by
    tokens."""
    if _list_token_limits(config):
        return
    _check_divides(
        config,
        "policy.train_global_batch_size",
        config.policy.train_global_batch_size,
        "policy.train_micro_batch_size",
        config.policy.train_micro_batch_size,
    )


def check_validation_batch_divides_into_micro_batches(config: Config) -> None:
    """Check the same for the validation batches of algorithms over data sets."""
    if _list_token_limits(config):
        return
    section = config.data_set_section
    if not (section.val_period or section.val_at_start):
        return
    _check_divides(
        config,
        f"{config.algorithm}.val_global_batch_size",
        section.val_global_batch_size,
        f"{config.algorithm}.val_micro_batch_size",
        section.val_micro_batch_size,
    )


def check_rows_are_padded_or_packed(config: Config) -> None:
    """Check that rows are either padded or packed when micro-batches go by tokens."""
    if len(_list_token_limits(config)) > 1:
        raise InvalidValue(
            "policy.dynamic_batching.enabled",
            "true, but policy.sequence_packing.enabled is true too: rows are either padded or packed",
        )


def check_longest_sequences_fit_micro_batch(config: Config) -> None:
    """Check that micro-batches are long enough: sequences of one sample are not split over several."""
    length, words = config.policy.max_total_sequence_length, "policy.max_total_sequence_length"
    if config.sequences_per_sample > 1:
        length, words = config.sequences_per_sample * length, f"a {config.declaration.unit} of {words}"
    for section, limits in _list_token_limits(config).items():
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(limits, name)
            if tokens < length:
                raise InvalidValue(f"policy.{section}.{name}", f"{tokens} is less than {words} ({length})")


def _list_token_limits(config: Config) -> dict[str, SequencePacking | DynamicBatching]:
    """Return the enabled sections that limit micro-batches by tokens."""
    limits: dict[str, SequencePacking | DynamicBatching] = {
        "sequence_packing": config.policy.sequence_packing,
        "dynamic_batching": config.policy.dynamic_batching,
    }
    return {name: section for name, section in limits.items() if section.enabled}


def _check_divides(config: Config, total_key: str, total: int, part_key: str, part: int) -> None:
    shares = config.data_parallel_size
    if total % (part * shares):
        words = "cluster.trainers" if shares == config.cluster.trainers else "the data-parallel size"
        raise InvalidValue(
            total_key, f"{total} is not a multiple of {part_key} * {words} = {part} * {shares} = {part * shares}"
        )


BATCH_RULES: tuple[Rule, ...] = (
    *restrict_to_rollouts(check_rollout_batch_divides_into_global_batches),
    check_global_batch_divides_into_micro_batches,
    *restrict_to_data_sets(check_validation_batch_divides_into_micro_batches),
    check_rows_are_padded_or_packed,
    check_longest_sequences_fit_micro_batch,
)


def check_ranks_share_heads(config: Config) -> None:
    """Check that the architecture has a plan, and that each rank gets the same number of whole heads."""
    settings = config.policy.dtensor_cfg
    ranks = settings.tensor_parallel_size
    if config.policy.megatron_cfg.enabled or ranks == 1 or settings.custom_parallel_plan is not None:
        return
    model_type = (model_sizes.read_model_config(config.policy) or {}).get("model_type")
    is_planned = model_type in (None, *families.TENSOR_PLANS) or bool(families.find_language_prefix(model_type))
    if not is_planned and settings.sequence_parallel and is_cut_like_llama(model_type):
        text = f"true, but the norms of {model_type} are not known to be those of {', '.join(families.TENSOR_PLANS)}"
        raise InvalidValue(f"{_SECTION}.sequence_parallel", text)
    if not is_planned and not is_cut_like_llama(model_type):
        supported = ", ".join(families.TENSOR_PLANS)
        raise InvalidValue(
            _SIZE,
            f"{ranks}, but there is no plan for {model_type}, only for {supported}, and those that Transformers "
            f"cuts like Llama; {_PLAN} may name one",
        )
    if model_type in families.FUSED_HEADS:
        return
    sizes = model_sizes.read_model_sizes(config.policy)
    for heads, kind in ((sizes.num_heads, "attention heads"), (sizes.num_key_value_heads, "key-value heads")):
        if heads is not None and heads % ranks:
            raise InvalidValue(_SIZE, f"{ranks} does not divide {heads} {kind}")


def check_plan_has_ranks(config: Config) -> None:
    """Check that a tensor-parallel plan has more than one rank to follow it."""
    settings = config.policy.dtensor_cfg
    plan = settings.custom_parallel_plan
    if config.policy.megatron_cfg.enabled or plan is None:
        return
    if "." not in plan.strip("."):
        raise InvalidValue(_PLAN, f"{shown(plan)} is not a dotted path, such as package.plan")
    if settings.tensor_parallel_size == 1:
        raise InvalidValue(_PLAN, f"there is a plan, but {_SIZE} is 1")


def check_ranks_share_experts(config: Config) -> None:
    """Check that the model has experts, and that ranks which share them get equally many."""
    ranks, experts = (
        config.policy.dtensor_cfg.expert_parallel_size,
        model_sizes.read_model_sizes(config.policy).num_experts,
    )
    if config.policy.megatron_cfg.enabled or ranks == 1:
        return
    if experts is None and model_sizes.read_model_config(config.policy) is not None:
        raise InvalidValue(_EXPERTS, f"{ranks}, but the model has no experts")
    if experts is not None and experts % ranks:
        raise InvalidValue(_EXPERTS, f"{ranks} does not divide {experts} experts")


def check_groups_are_whole(config: Config) -> None:
    """Check that the trainers form whole groups of ranks that share experts, in whole replicas."""
    check_groups(config.policy, config.cluster.trainers, _SECTION)


def check_groups(model: ModelConfig, num_ranks: int, section: str) -> None:
    """Raise `InvalidValue` if these ranks cannot hold a model's replicas and share its experts.

    `section` is the path of its ``dtensor_cfg``. The ranks form whole model replicas of tensor and context parallelism.
    """
    sizes = {key: getattr(model.dtensor_cfg, key) for key in ("expert_parallel_size", "dp_replicate_size")}
    active_sizes = {key: size for key, size in sizes.items() if size > 1}
    shards = num_ranks // model.dtensor_cfg.tensor_parallel_size
    if model.megatron_cfg.enabled or shards % math.prod(sizes.values()) == 0:
        return
    (key, size), *more_factors = active_sizes.items()
    times = "".join(f" * {factor_key} ({value})" for factor_key, value in more_factors)
    raise InvalidValue(
        f"{section}.{key}", f"{size}{times} does not divide {shards}, the data-parallel and context ranks"
    )


def check_compiled_layers_are_whole(config: Config) -> None:
    """Check that layers to be compiled are not cut over tensor-parallel ranks."""
    if config.policy.megatron_cfg.enabled or not config.policy.compile:
        return
    ranks = config.policy.dtensor_cfg.tensor_parallel_size
    if ranks > 1:
        raise InvalidValue("policy.compile", f"true, but {_SIZE} is {ranks}: layers that ranks share are not compiled")


DTENSOR_RULES: tuple[Rule, ...] = (
    check_ranks_share_heads,
    check_plan_has_ranks,
    check_ranks_share_experts,
    check_groups_are_whole,
    check_compiled_layers_are_whole,
)


def check_trainers_make_whole_replicas(config: Config) -> None:
    """Check that the trainers form a whole number of model replicas."""
    trainers, replica_size = config.cluster.trainers, config.policy.model_parallel_size
    if trainers % replica_size:
        raise InvalidValue(
            "cluster.trainers",
            f"{trainers} is not a multiple of {replica_size}, the product of {describe_factors(config.policy)}",
        )


def describe_factors(model: ModelConfig, name: str = "policy") -> str:
    """Return the sizes in a model's section, named `name`, that multiply to the number of trainers per replica."""
    if model.megatron_cfg.enabled:
        section: msgspec.Struct = model.megatron_cfg
        keys = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
        prefix = f"{name}.megatron_cfg."
    else:
        section, prefix = model.dtensor_cfg, f"{name}.dtensor_cfg."
        keys = ["tensor_parallel_size", "context_parallel_size"]
    sizes = {key: getattr(section, key) for key in keys}
    return prefix + ", ".join(f"{key} ({size})" for key, size in sizes.items() if size > 1)


def check_layers_make_even_stages(config: Config) -> None:
    """Check that all pipeline stages and virtual stages have equally many layers, except a given first and last."""
    megatron, layers = config.policy.megatron_cfg, model_sizes.read_model_sizes(config.policy).num_layers
    if not megatron.enabled or layers is None:
        return
    ends = (megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage)
    end_sizes = [size for size in ends if size is not None]
    stages, virtual = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    between, num_layers_left = stages - len(end_sizes), layers - sum(end_sizes)
    is_even = num_layers_left % (between * virtual) == 0 and num_layers_left > 0 if between else num_layers_left == 0
    if between < 0 or not is_even or any(size % virtual for size in end_sizes):
        note = f" with {end_sizes} in the first or last" if end_sizes else ""
        times = f" of {virtual} virtual stages each" if virtual > 1 else ""
        raise InvalidValue(
            f"{MEGATRON}.pipeline_model_parallel_size",
            f"{layers} layers do not make {stages} even stages{times}{note}; num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage make the ends different",
        )


def check_heads_are_shared_out(config: Config) -> None:
    """Check that a tensor-parallel rank gets whole heads; key and value heads may be replicated."""
    megatron, sizes = config.policy.megatron_cfg, model_sizes.read_model_sizes(config.policy)
    if not megatron.enabled:
        return
    ranks, heads, groups = megatron.tensor_model_parallel_size, sizes.num_heads, sizes.num_key_value_heads
    if heads is not None and heads % ranks:
        raise InvalidValue(f"{MEGATRON}.tensor_model_parallel_size", f"{ranks} does not divide {heads} attention heads")
    if groups is not None and groups % ranks and ranks % groups:
        raise InvalidValue(
            f"{MEGATRON}.tensor_model_parallel_size",
            f"{ranks} is neither a divisor nor a multiple of {groups} key-value heads",
        )


def check_experts_are_shared_out(config: Config) -> None:
    """Check that experts are spread evenly over the ranks of one pipeline stage."""
    megatron, experts = config.policy.megatron_cfg, model_sizes.read_model_sizes(config.policy).num_experts
    if not megatron.enabled:
        return
    ranks, key = megatron.expert_model_parallel_size, f"{MEGATRON}.expert_model_parallel_size"
    if experts is None and ranks > 1 and model_sizes.read_model_config(config.policy) is not None:
        raise InvalidValue(key, f"{ranks}, but the model has no experts")
    if experts is not None and experts % ranks:
        raise InvalidValue(key, f"{ranks} does not divide {experts} experts")
    a_stage = config.cluster.trainers // megatron.pipeline_model_parallel_size
    group_size = ranks * megatron.expert_tensor_parallel_size
    if a_stage % group_size:
        raise InvalidValue(
            key,
            f"{ranks} * expert_tensor_parallel_size ({megatron.expert_tensor_parallel_size}) does not divide the "
            f"{a_stage} trainers of a pipeline stage",
        )


RULES: tuple[Rule, ...] = (
    check_trainers_make_whole_replicas,
    check_layers_make_even_stages,
    check_heads_are_shared_out,
    check_experts_are_shared_out,
)


def check_models_are_held(config: Config) -> None:
    """Check that processes are given only to models of the run; a run without steps has the policy alone."""
    models = config.holds
    for model in ProcessesOf.__struct_fields__:
        num = getattr(config.cluster.processes_of, model)
        if num and model not in models and not config.evaluates:
            reads_kl = model == "reference" and config.declaration.loss_section == "loss_fn"
            reason = f": loss_fn.reference_policy_kl_penalty is {config.loss_fn.reference_policy_kl_penalty:g}"
            raise InvalidValue(
                f"{PROCESSES_KEY}.{model}", f"{num}, but {config.declaration.title} holds no {model}{reason * reads_kl}"
            )


def check_reference_stands_alone(config: Config) -> None:
    """Check that the reference does not depend on the policy's processes."""
    num = config.processes_of.get("reference")
    if num is None:
        return
    if config.policy.adapters is not None:
        raise InvalidValue(
            f"{PROCESSES_KEY}.reference", f"{num}, but policy trains adapters: without them it is its own reference"
        )
    if config.policy.router_replay.enabled:
        raise InvalidValue(
            f"{PROCESSES_KEY}.reference",
            f"{num}, but policy.router_replay.enabled is true: the policy has the recorded experts",
        )


def check_processes_make_whole_replicas(config: Config) -> None:
    """Check that the processes of each model form a whole number of replicas."""
    for model, num in config.processes_of.items():
        if model == "policy" or (model == "value" and config.value is None):
            continue
        section, settings = "policy" if model == "reference" else model, config.settings_of(model)
        if num % settings.model_parallel_size:
            replica_size, product = settings.model_parallel_size, describe_factors(settings, section)
            raise InvalidValue(
                f"{PROCESSES_KEY}.{model}", f"{num} is not a multiple of {replica_size}, the product of {product}"
            )
        if model == "reference":  # others are checked with their sections
            check_groups(settings, num, f"with {PROCESSES_KEY}.{model} ({num}), policy.dtensor_cfg")


def check_teachers_have_stages_on_megatron_core(config: Config) -> None:
    """Check that teachers with pipeline stages use Megatron-Core, since FSDP2 has no pipeline."""
    routes = config.routes
    if routes is None or not routes.non_colocated_teachers.enabled or config.teacher is not None:
        return
    stages = routes.non_colocated_teachers.default_teacher_cfg.pipeline_model_parallel_size
    if stages > 1 and not config.policy.megatron_cfg.enabled:
        raise InvalidValue(
            "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.pipeline_model_parallel_size",
            f"{stages}, but policy.megatron_cfg.enabled is false, and teachers use the policy's backend",
        )


def check_gpus_suffice(config: Config) -> None:
    """Check that no two trainers share a GPU."""
    cluster = config.cluster
    num_gpus, beside = cluster.num_nodes * cluster.gpus_per_node, config.num_trainers - cluster.trainers
    if beside and 1 < num_gpus < config.num_trainers:
        named = next(model for model in config.processes_of if model != "policy")
        raise InvalidValue(
            f"{PROCESSES_KEY}.{named}",
            f"{beside} processes beside cluster.trainers ({cluster.trainers}) need {config.num_trainers} GPUs, and the "
            f"cluster has {num_gpus}",
        )


PROCESS_RULES: tuple[Rule, ...] = (
    check_models_are_held,
    check_reference_stands_alone,
    check_processes_make_whole_replicas,
    check_teachers_have_stages_on_megatron_core,
    check_gpus_suffice,
)
