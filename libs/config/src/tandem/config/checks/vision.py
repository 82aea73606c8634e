"""Rules for vision models, and for the functions that score responses about images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.common.errors import listed, nearest
from tandem.config.models.families import MEGATRON_VISION, VLLM_SEEING
from tandem.config.models.model_sizes import read_model_config, read_model_sizes
from tandem.config.models.vision_families import family_of
from tandem.config.problem import InvalidValue, ProblemCollector, Rule, restrict_to_rollouts, shown
from tandem.config.schema import Config, ModelConfig
from tandem.config.schema.environments import ARGUMENTS, FUNCTION_ENVIRONMENTS, RewardFunctionConfig
from tandem.config.schema.megatron import MegatronCfg
from tandem.config.schema.policy import DtensorCfg

FREEZE = "policy.dtensor_cfg.automodel_kwargs.freeze_config"
FROZEN_PARTS = ("freeze_vision_tower", "freeze_language_model")
_ABSENT_PARTS = ("freeze_audio_tower",)
"""Accepted: no family has one."""
_LEVELS = (8, 16, 24)
"""The tower's layers with features for the first layers of Qwen3-VL's language model, unless its files name them."""


def check_functions_score(config: Config) -> None:
    """Check the functions of the environments for images that the run uses."""
    for name in config.environments:
        entry = config.env.get(name)
        if entry is not None and name in FUNCTION_ENVIRONMENTS and not entry.is_custom and entry.judge is None:
            read_reward_functions(name, entry.reward_functions)


def read_reward_functions(environment: str, entries: tuple[dict[str, object], ...]) -> tuple[RewardFunctionConfig, ...]:
    """Return the functions of an environment. Raises `InvalidValue`."""
    key = f"env.{environment}.reward_functions"
    if not entries:
        raise InvalidValue(key, "required, such as [{name: format, weight: 0.2}, {name: exact_alnum, weight: 0.8}]")
    functions = tuple(_read_function(f"{key}[{index}]", entry) for index, entry in enumerate(entries))
    if not sum(each.weight for each in functions) > 0.0:
        raise InvalidValue(key, "no weight is greater than 0")
    names = [each.name for each in functions]
    if len({*names}) < len(names):
        raise InvalidValue(key, f"{shown(names)} has a function twice")
    return functions


def _read_function(key: str, entry: dict[str, object]) -> RewardFunctionConfig:
    name = entry.get("name")
    if name not in ARGUMENTS:
        raise InvalidValue(
            f"{key}.name", f"{shown(name)} is not built{nearest(str(name), ARGUMENTS)}: {listed([*ARGUMENTS])}"
        )
    parameters, kwargs = ARGUMENTS[str(name)], entry.get("kwargs")
    arguments: dict[str, object] = kwargs if isinstance(kwargs, dict) else {}
    for argument in arguments:
        if argument not in parameters:
            raise InvalidValue(f"{key}.kwargs.{argument}", f"{name} has no such argument, but {listed([*parameters])}")
        if argument.endswith("tag") and not re.fullmatch(r"[\w-]+", str(arguments[argument])):
            raise InvalidValue(
                f"{key}.kwargs.{argument}", f"{shown(arguments[argument])} is not a tag: use letters, digits and '_'"
            )
    try:
        return msgspec.convert(entry, RewardFunctionConfig)
    except msgspec.ValidationError as error:
        raise InvalidValue(key, str(error)[0].lower() + str(error)[1:]) from None


IMAGE_REWARD_RULES: tuple[Rule, ...] = restrict_to_rollouts(check_functions_score)


def check_no_ranks_share_images(config: Config) -> None:
    """Check that no ranks share the sequences of a vision model, nor rows by a plan that may not know how."""
    problems, of_images = ProblemCollector(), "which with images is not built"
    for key, section in _list_models(config):
        if family_of(section) is None:
            continue
        is_megatron = section.megatron_cfg.enabled
        backend: MegatronCfg | DtensorCfg = section.megatron_cfg if is_megatron else section.dtensor_cfg
        name = f"{key.removesuffix('.model_name')}.{'megatron' if is_megatron else 'dtensor'}_cfg"
        if backend.context_parallel_size > 1:
            text = f"{backend.context_parallel_size}, {of_images}"
            problems.found.append(InvalidValue(f"{name}.context_parallel_size", text))
        plan = section.dtensor_cfg.custom_parallel_plan
        if not is_megatron and section.dtensor_cfg.sequence_parallel and plan is not None:
            text = f"true, which with a plan for a vision model ({plan}) is not built"
            problems.found.append(InvalidValue(f"{name}.sequence_parallel", text))
    problems.complain()


def check_megatron_trains_it_with_images(config: Config) -> None:
    """Check that Megatron-Core, where it trains, has the architecture of a vision model."""
    family = family_of(config.policy)
    if config.policy.megatron_cfg.enabled and family is not None and family.model_type not in MEGATRON_VISION:
        supported = ", ".join(MEGATRON_VISION)
        text = f"true, but Megatron-Core trains {supported} with images here, not {family.model_type}"
        raise InvalidValue("policy.megatron_cfg.enabled", text)


def check_first_stage_has_layers_of_images(config: Config) -> None:
    """Check that Megatron-Core's first stage has the layers to whose outputs features of images are added."""
    megatron, family = config.policy.megatron_cfg, family_of(config.policy)
    if family is None or not megatron.enabled or family.model_type != "qwen3_vl":
        return
    levels = len(
        (read_model_config(config.policy) or {}).get("vision_config", {}).get("deepstack_visual_indexes", _LEVELS)
    )
    stage_layers, layers = megatron.num_layers_in_first_pipeline_stage, read_model_sizes(config.policy).num_layers
    virtual = megatron.virtual_pipeline_model_parallel_size or 1
    if stage_layers is None and layers is not None:
        stage_layers = layers // megatron.pipeline_model_parallel_size
    if stage_layers is not None and stage_layers // virtual < levels:
        key = "policy.megatron_cfg.pipeline_model_parallel_size"
        text = (
            f"images reach the first {levels} layers of a qwen3_vl, and the first stage has {stage_layers // virtual}"
        )
        raise InvalidValue(key, f"{text}; num_layers_in_first_pipeline_stage may give it more")


def check_images_of_other_models(config: Config) -> None:
    """Check that no model of numbers sees, that a teacher sees what the policy sees, and that all share processes."""
    family = family_of(config.policy)
    for key, teacher in config.teacher_sections.items():
        teacher_family = family_of(teacher)
        if (
            teacher_family != family
            and read_model_config(teacher) is not None
            and read_model_config(config.policy) is not None
        ):
            teacher_type, policy_type = (
                each.model_type if each else "a model of text" for each in (teacher_family, family)
            )
            raise InvalidValue(
                key, f"{teacher_type}, but policy.model_name is {policy_type}: both must see, and in the same way"
            )
    if family is None:
        return
    for model in config.holds:
        head = config.declaration.head_of(model)
        if head != "vocabulary":
            raise InvalidValue(f"{model}.model_name", f"{family.model_type}: a {head} head is not built with images")
    separate_models = [model for model in config.processes_of if model != "policy"]
    if separate_models:
        raise InvalidValue(
            f"cluster.processes_of.{separate_models[0]}", "its images would stay with the policy: not built"
        )
    if config.policy.router_replay.enabled:
        raise InvalidValue("policy.router_replay.enabled", "true, which with images is not built")


def check_frozen_parts_are_known(config: Config) -> None:
    """Check which parts of a vision model are to stay as they are."""
    if family_of(config.policy) is None:
        return
    frozen: Any = config.policy.dtensor_cfg.automodel_kwargs.get("freeze_config") or {}
    if not isinstance(frozen, Mapping):
        raise InvalidValue(FREEZE, f"{shown(frozen)} is not a section")
    for name, value in frozen.items():
        known_parts = (*FROZEN_PARTS, *_ABSENT_PARTS)
        if name not in known_parts:
            raise InvalidValue(f"{FREEZE}.{name}", f"unknown key{nearest(str(name), known_parts)}")
        if not isinstance(value, bool):
            raise InvalidValue(f"{FREEZE}.{name}", f"{shown(value)} is not true or false")
    if frozen and frozen.get("freeze_vision_tower", True) and frozen.get("freeze_language_model", False):
        raise InvalidValue(f"{FREEZE}.freeze_language_model", "true, but the tower is frozen too")


def check_vllm_can_be_refitted_with_images(config: Config) -> None:
    """Check that refits can write a vision model's parameters in vLLM."""
    family = family_of(config.policy)
    if family is not None and family.model_type not in VLLM_SEEING:
        raise InvalidValue(
            "policy.generation.backend",
            f"vllm, but refits write vLLM's {', '.join(VLLM_SEEING)}, not its {family.model_type}; transformers is the "
            "other engine",
        )


def check_vllm_sees_with_whole_models(config: Config) -> None:
    """Check that vLLM has a vision model in one pipeline stage, and in no float8."""
    family, generation = family_of(config.policy), config.policy.generation
    if family is None:
        return
    key, settings = "policy.generation.vllm_cfg", generation.vllm_cfg
    if settings.pipeline_parallel_size > 1:
        text = f"{settings.pipeline_parallel_size}, which with images is not built"
        raise InvalidValue(f"{key}.pipeline_parallel_size", text)
    if settings.precision == "fp8":
        raise InvalidValue(f"{key}.precision", "fp8, which with images is not built")


def _list_models(config: Config) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the models that take the tokens of the run, by the key of each one's name."""
    yield "policy.model_name", config.policy
    yield from config.teacher_sections.items()


RULES: tuple[Rule, ...] = (
    check_megatron_trains_it_with_images,
    check_no_ranks_share_images,
    check_first_stage_has_layers_of_images,
    check_images_of_other_models,
    check_frozen_parts_are_known,
)
VLLM_RULES: tuple[Rule, ...] = (check_vllm_can_be_refitted_with_images, check_vllm_sees_with_whole_models)
"""Rules for configurations that generate with vLLM."""
