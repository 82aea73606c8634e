"""Rules for the model, and for the backend that trains it."""

from __future__ import annotations

import itertools

from tandem.common.errors import nearest
from tandem.config.derive import compute_warmup_length, make_linear_warmup
from tandem.config.installed.model_fields import list_model_fields
from tandem.config.installed.torch_arguments import find_torch_problems
from tandem.config.models.families import MTP, VLLM_READS, is_text_only
from tandem.config.models.model_sizes import read_max_positions, read_model_config
from tandem.config.problem import InvalidValue, ProblemCollector, Rule, shown
from tandem.config.schema import Config, SchedulerEntry


def check_backend_is_enabled(config: Config) -> None:
    """Check that a backend is enabled; if both are, Megatron-Core takes precedence over FSDP2."""
    if not config.policy.dtensor_cfg.enabled and not config.policy.megatron_cfg.enabled:
        raise InvalidValue(
            "policy.dtensor_cfg.enabled", "false, and policy.megatron_cfg.enabled is false too: nothing can train"
        )


def check_optimizer_is_named(config: Config) -> None:
    """Check that an optimizer is named, unless Megatron-Core brings its own."""
    if config.policy.optimizer is None and not config.policy.megatron_cfg.enabled:
        raise InvalidValue("policy.optimizer", "null, but policy.dtensor_cfg needs an optimizer")


def check_optimizer_is_torchs(config: Config) -> None:
    """Check the names and arguments of optimizer and schedules, as far as they are torch classes."""
    policy, problems = config.policy, ProblemCollector()
    if policy.megatron_cfg.enabled:
        return
    if policy.optimizer is not None:
        optimizer = policy.optimizer
        problems.found += find_torch_problems("Optimizer", optimizer.name, optimizer.kwargs, "policy.optimizer")
    for index, entry in enumerate(policy.scheduler):
        if entry.name is not None:
            key = f"policy.scheduler[{index}]"
            problems.found += find_torch_problems("LRScheduler", entry.name, entry.kwargs, key)
    problems.complain()


def check_warmup_is_one(config: Config) -> None:
    """Check that a warm-up by its own key has a length, and that no schedule says something else."""
    policy, key = config.policy, "policy.warmup_steps"
    if not policy.warmup_steps:
        return
    if policy.warmup_steps > 1 and not policy.warmup_steps.is_integer():
        raise InvalidValue(key, f"{policy.warmup_steps:g} is neither a whole number of steps nor a share below 1")
    if policy.warmup_steps < 1 and config.algorithm_section.max_num_steps < 1:
        raise InvalidValue(
            key, f"{policy.warmup_steps:g} is a share of {config.algorithm}.max_num_steps, which is not set"
        )
    steps = compute_warmup_length(policy.warmup_steps, config.algorithm_section.max_num_steps, config.num_passes)
    schedule = policy.megatron_cfg.scheduler.lr_warmup_iters if policy.megatron_cfg.enabled else policy.scheduler
    if policy.warmup_steps < 1:  # a run that its epochs end is shorter, and has written how long its warm-up is
        lengths = [schedule] if isinstance(schedule, int) else [entry.kwargs.get("total_iters") for entry in schedule]
        steps = next((length for length in lengths if isinstance(length, int) and 0 < length < steps), steps)
    expected = steps if policy.megatron_cfg.enabled else (SchedulerEntry(**make_linear_warmup(steps)),)
    if schedule != expected:
        schedule_key = "megatron_cfg.scheduler.lr_warmup_iters" if policy.megatron_cfg.enabled else "scheduler"
        raise InvalidValue(
            key, f"{policy.warmup_steps:g}, but policy.{schedule_key} says another warm-up: set one of them"
        )


def check_schedules_have_milestones_between(config: Config) -> None:
    """Check the milestones between consecutive schedules, as in `torch.optim.lr_scheduler.SequentialLR`."""
    entries = config.policy.scheduler
    for index, entry in enumerate(entries):
        if (entry.name is None) == (entry.milestones is None):
            raise InvalidValue(f"policy.scheduler[{index}]", "expected either a name or milestones")
    num_schedules = sum(entry.name is not None for entry in entries)
    milestones = [entry.milestones for entry in entries if entry.milestones is not None]
    if len(milestones) > 1:
        raise InvalidValue("policy.scheduler", "milestones are given more than once")
    times = milestones[0] if milestones else ()
    if len(times) != max(0, num_schedules - 1):
        raise InvalidValue(
            "policy.scheduler",
            f"{num_schedules} schedules need {max(0, num_schedules - 1)} milestones between them, got {len(times)}",
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(times)):
        raise InvalidValue("policy.scheduler", f"milestones must rise, got {shown(times)}")


def check_new_model_is_described(config: Config) -> None:
    """Check that a new model has an architecture, and that its characters are distinct."""
    new = config.policy.new_model
    if new is None:
        return
    if not isinstance(new.config.get("model_type"), str):
        raise InvalidValue("policy.new_model.config.model_type", "required: the Hugging Face model type, such as qwen3")
    doubled = sorted({character for character in new.characters if new.characters.count(character) > 1})
    if doubled:
        raise InvalidValue("policy.new_model.characters", f"{shown(doubled[0])} appears more than once")


def check_new_model_has_fields_of_its_type(config: Config) -> None:
    """Check the fields of a new model: Transformers accepts any name and ignores a misspelt one."""
    new = config.policy.new_model
    if new is None:
        return
    model_type = new.config["model_type"]
    fields = list_model_fields(model_type)  # empty for an unknown type, which is reported when the model is made
    if fields:
        fields |= set(VLLM_READS.get(model_type, ()))
    unknown = next((field for field in new.config if fields and field not in fields), None)
    if unknown is not None:
        raise InvalidValue(
            f"policy.new_model.config.{unknown}",
            f"a {model_type} configuration has no such field{nearest(unknown, fields)}",
        )


def check_overrides_are_fields_of_model(config: Config) -> None:
    """Check overridden fields: Transformers accepts any name and ignores a misspelt one; the type cannot change."""
    models = config.holds
    for name in ("policy", "value", "teacher"):
        settings, key = getattr(config, name), f"{name}.hf_config_overrides"
        if settings is None or name not in models:
            continue
        model_type = (read_model_config(settings) or {}).get("model_type")
        for field in settings.hf_config_overrides or {}:
            if field == "model_type":
                raise InvalidValue(f"{key}.{field}", "the model type cannot be overridden: it comes with the weights")
            fields = list_model_fields(str(model_type))  # empty where the type is not known here
            if fields and field not in fields and field not in VLLM_READS.get(str(model_type), ()):
                raise InvalidValue(f"{key}.{field}", f"a {model_type} has no such field{nearest(field, fields)}")


def check_sequences_fit_model(config: Config) -> None:
    """Check that sequences fit into the positions that the model was made for."""
    longest, positions = config.policy.max_total_sequence_length, read_max_positions(config.policy)
    if positions is not None and longest > positions:
        raise InvalidValue(
            "policy.max_total_sequence_length", f"{longest} is more than the {positions} positions of the model"
        )


_MTP = "policy.mtp.num_layers"


def check_mtp_can_be_trained(config: Config) -> None:
    """Check that layers of multi-token prediction are trained where their module is known."""
    policy, num = config.policy, config.policy.mtp.num_layers
    if not num:
        return
    settings = policy.dtensor_cfg
    features = {
        "policy.megatron_cfg.enabled": policy.megatron_cfg.enabled,
        "policy.new_model, which has no such layers": policy.new_model is not None,
        "adapters": policy.adapters is not None,
        "policy.dequantize_base_checkpoint": policy.dequantize_base_checkpoint,
        "policy.compile": policy.compile,
        "policy.router_replay.enabled": policy.router_replay.enabled,
        "policy.dtensor_cfg.tensor_parallel_size above 1": settings.tensor_parallel_size > 1,
        "policy.dtensor_cfg.context_parallel_size above 1": settings.context_parallel_size > 1,
        "a vision model": not is_text_only(policy),
        f"{config.declaration.title}": config.declaration.learns_preferences or not config.declaration.loss,
    }
    for feature, is_on in features.items():
        if is_on:
            raise InvalidValue(_MTP, f"{num}, which cannot be combined with {feature}")
    model = read_model_config(policy) or {}
    model_type = model.get("text_config", model).get("model_type")
    if model_type is not None and model_type not in MTP:
        raise InvalidValue(_MTP, f"{num}, but these layers are known of {', '.join(MTP)}, not of {model_type}")


RULES: tuple[Rule, ...] = (
    check_mtp_can_be_trained,
    check_backend_is_enabled,
    check_optimizer_is_named,
    check_optimizer_is_torchs,
    check_warmup_is_one,
    check_schedules_have_milestones_between,
    check_new_model_is_described,
    check_new_model_has_fields_of_its_type,
    check_overrides_are_fields_of_model,
    check_sequences_fit_model,
)
