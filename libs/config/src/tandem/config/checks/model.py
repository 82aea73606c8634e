"""Rules for the model, and for the backend that trains it."""

from __future__ import annotations

import itertools

from tandem.common.errors import nearest
from tandem.config.checks.rule import Rule
from tandem.config.installed.model_fields import model_fields
from tandem.config.installed.torch_arguments import torch_problems
from tandem.config.models.model_sizes import max_positions, model_config
from tandem.config.problem import Invalid, Problems, shown
from tandem.config.schema import Config


def a_backend_is_enabled(config: Config) -> None:
    """Megatron-Core wins over FSDP2, but one of them must train."""
    if not config.policy.dtensor_cfg.enabled and not config.policy.megatron_cfg.enabled:
        raise Invalid(
            "policy.dtensor_cfg.enabled", "false, and policy.megatron_cfg.enabled is false too: nothing can train"
        )


def an_optimizer_is_named(config: Config) -> None:
    """Only Megatron-Core brings an optimizer of its own."""
    if config.policy.optimizer is None and not config.policy.megatron_cfg.enabled:
        raise Invalid("policy.optimizer", "null, but policy.dtensor_cfg needs an optimizer")


def the_optimizer_and_its_schedules_are_torchs(config: Config) -> None:
    """Their names and arguments, where they are classes of torch."""
    policy, problems = config.policy, Problems()
    if policy.megatron_cfg.enabled:
        return
    if policy.optimizer is not None:
        optimizer = policy.optimizer
        problems.found += torch_problems("Optimizer", optimizer.name, optimizer.kwargs, "policy.optimizer")
    for index, entry in enumerate(policy.scheduler):
        if entry.name is not None:
            key = f"policy.scheduler[{index}]"
            problems.found += torch_problems("LRScheduler", entry.name, entry.kwargs, key)
    problems.complain()


def schedules_have_milestones_between(config: Config) -> None:
    """Schedules follow each other at the milestones, as in `torch.optim.lr_scheduler.SequentialLR`."""
    entries = config.policy.scheduler
    for index, entry in enumerate(entries):
        if (entry.name is None) == (entry.milestones is None):
            raise Invalid(f"policy.scheduler[{index}]", "expected either a name or milestones")
    num_schedules = sum(entry.name is not None for entry in entries)
    milestones = [entry.milestones for entry in entries if entry.milestones is not None]
    if len(milestones) > 1:
        raise Invalid("policy.scheduler", "milestones are given more than once")
    times = milestones[0] if milestones else ()
    if len(times) != max(0, num_schedules - 1):
        raise Invalid(
            "policy.scheduler",
            f"{num_schedules} schedules need {max(0, num_schedules - 1)} milestones between them, got {len(times)}",
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(times)):
        raise Invalid("policy.scheduler", f"milestones must rise, got {shown(times)}")


def the_new_model_is_described(config: Config) -> None:
    """A new model needs an architecture, and each character one token."""
    new = config.policy.new_model
    if new is None:
        return
    if not isinstance(new.config.get("model_type"), str):
        raise Invalid("policy.new_model.config.model_type", "required: the Hugging Face model type, such as qwen3")
    doubled = sorted({character for character in new.characters if new.characters.count(character) > 1})
    if doubled:
        raise Invalid("policy.new_model.characters", f"{shown(doubled[0])} is there more than once")


def the_new_model_has_fields_of_its_type(config: Config) -> None:
    """transformers takes any field, and makes nothing of one that is misspelt."""
    new = config.policy.new_model
    if new is None:
        return
    model_type = new.config["model_type"]
    fields = model_fields(model_type)  # none of a type that does not exist: making the model says so
    unknown = next((field for field in new.config if fields and field not in fields), None)
    if unknown is not None:
        raise Invalid(
            f"policy.new_model.config.{unknown}",
            f"a {model_type} configuration has no such field{nearest(unknown, fields)}",
        )


def overrides_are_fields_of_the_model(config: Config) -> None:
    """transformers takes any field, and makes nothing of one that is misspelt; another type is another model."""
    held = config.declaration.holds(config)
    for name in ("policy", "value", "teacher"):
        settings, key = getattr(config, name), f"{name}.hf_config_overrides"
        if settings is None or name not in held:
            continue
        model_type = (model_config(settings) or {}).get("model_type")
        for field in settings.hf_config_overrides or {}:
            if field == "model_type":
                raise Invalid(f"{key}.{field}", "the kind of model is that of its weights")
            fields = model_fields(str(model_type))  # none where the type is not known here
            if fields and field not in fields:
                raise Invalid(f"{key}.{field}", f"a {model_type} has no such field{nearest(field, fields)}")


def sequences_fit_the_model(config: Config) -> None:
    """Beyond the positions that it was made for a model knows nothing, and some have no more."""
    longest, positions = config.policy.max_total_sequence_length, max_positions(config.policy)
    if positions is not None and longest > positions:
        raise Invalid(
            "policy.max_total_sequence_length", f"{longest} is more than the {positions} positions of the model"
        )


RULES: tuple[Rule, ...] = (
    a_backend_is_enabled,
    an_optimizer_is_named,
    the_optimizer_and_its_schedules_are_torchs,
    schedules_have_milestones_between,
    the_new_model_is_described,
    the_new_model_has_fields_of_its_type,
    overrides_are_fields_of_the_model,
    sequences_fit_the_model,
)
