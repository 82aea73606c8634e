"""Rules for models with processes of their own: the run uses them, and they form whole replicas."""

from __future__ import annotations

from tandem.config.checks.dtensor import check_groups
from tandem.config.checks.parallelism import describe_factors
from tandem.config.checks.rule import Rule
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config, ProcessesOf

KEY = "cluster.processes_of"


def check_models_are_held(config: Config) -> None:
    """Check that processes are given only to models of the run; a run without steps has the policy alone."""
    models = config.holds
    for model in ProcessesOf.__struct_fields__:
        num = getattr(config.cluster.processes_of, model)
        if num and model not in models and not config.evaluates:
            reads_kl = model == "reference" and config.declaration.loss_section == "loss_fn"
            reason = f": loss_fn.reference_policy_kl_penalty is {config.loss_fn.reference_policy_kl_penalty:g}"
            raise InvalidValue(
                f"{KEY}.{model}", f"{num}, but {config.declaration.title} holds no {model}{reason * reads_kl}"
            )


def check_reference_stands_alone(config: Config) -> None:
    """Check that the reference does not depend on the policy's processes."""
    num = config.processes_of.get("reference")
    if num is None:
        return
    if config.policy.adapters is not None:
        raise InvalidValue(
            f"{KEY}.reference", f"{num}, but policy trains adapters: without them it is its own reference"
        )
    if config.policy.router_replay.enabled:
        raise InvalidValue(
            f"{KEY}.reference", f"{num}, but policy.router_replay.enabled is true: the policy has the recorded experts"
        )


def check_processes_make_whole_replicas(config: Config) -> None:
    """Check that the processes of each model form a whole number of replicas."""
    for model, num in config.processes_of.items():
        if model == "policy" or (model == "value" and config.value is None):
            continue
        section, settings = "policy" if model == "reference" else model, config.settings_of(model)
        if num % settings.model_parallel_size:
            replica_size, product = settings.model_parallel_size, describe_factors(settings, section)
            raise InvalidValue(f"{KEY}.{model}", f"{num} is not a multiple of {replica_size}, the product of {product}")
        if model == "reference":  # others are checked with their sections
            check_groups(settings, num, f"with {KEY}.{model} ({num}), policy.dtensor_cfg")


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
            f"{KEY}.{named}",
            f"{beside} processes beside cluster.trainers ({cluster.trainers}) need {config.num_trainers} GPUs, and the "
            f"cluster has {num_gpus}",
        )


RULES: tuple[Rule, ...] = (
    check_models_are_held,
    check_reference_stands_alone,
    check_processes_make_whole_replicas,
    check_teachers_have_stages_on_megatron_core,
    check_gpus_suffice,
)
