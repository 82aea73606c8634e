"""Rules for parallel sizes, which divide evenly, and for models with processes of their own."""

from __future__ import annotations

import msgspec

from tandem.config.checks.dtensor import check_groups
from tandem.config.checks.rule import Rule
from tandem.config.models.model_sizes import read_model_config, read_model_sizes
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config, ModelConfig, ProcessesOf

MEGATRON = "policy.megatron_cfg"
PROCESSES_KEY = "cluster.processes_of"


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
    megatron, layers = config.policy.megatron_cfg, read_model_sizes(config.policy).num_layers
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
    megatron, sizes = config.policy.megatron_cfg, read_model_sizes(config.policy)
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
    megatron, experts = config.policy.megatron_cfg, read_model_sizes(config.policy).num_experts
    if not megatron.enabled:
        return
    ranks, key = megatron.expert_model_parallel_size, f"{MEGATRON}.expert_model_parallel_size"
    if experts is None and ranks > 1 and read_model_config(config.policy) is not None:
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
