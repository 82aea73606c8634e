"""Keys that are known but not supported yet: refused if they are switched on.

To build one of these, delete its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.config import engine_kinds, shapes
from tandem.config.conform import describe_unknown_key, find_setting
from tandem.config.installed import vllm_arguments
from tandem.config.nemo_eval import NOT_BUILT as NOT_BUILT_EVALUATIONS
from tandem.config.problem import shown
from tandem.config.schema import Config

Asks = Callable[[Config], bool]


def _always(config: Config) -> bool:
    return True


def _rolls_out(config: Config) -> bool:
    return config.declaration.rolls_out


def _vllm(config: Config) -> bool:
    return _rolls_out(config) and config.policy.generation.reads("vllm_cfg")


def _float8_engine(config: Config) -> bool:
    return _vllm(config) and config.policy.generation.vllm_cfg.precision == "fp8"


def _is_language_model(config: Config) -> bool:
    return config.declaration.head_of("policy") == "vocabulary"


def _distils(config: Config) -> bool:
    return "teacher" in config.holds


def _has(section: str) -> Asks:
    return lambda config: getattr(config, section) is not None


def _trains_with(section: str, *, megatron: bool) -> Asks:
    """Return a test whether a model is trained with Megatron-Core, or else with DTensor."""
    return lambda config: (model := getattr(config, section)) is not None and model.megatron_cfg.enabled == megatron


def _multiplies(section: str, name: str) -> Asks:
    """Return a test whether a model is trained with Megatron-Core and products in float8 or float4."""

    def asks(config: Config) -> bool:
        model = getattr(config, section)
        products = None if model is None else getattr(model.megatron_cfg, f"{name}_cfg")
        return products is not None and products.enabled and model.megatron_cfg.enabled

    return asks


def _adapts(config: Config) -> bool:
    return config.policy.adapters is not None


class UnsupportedKey(msgspec.Struct, frozen=True):
    """A key that is known but not built."""

    key: str
    off: tuple[Any, ...]
    """Values that leave it switched off."""
    read: Asks = _always
    """Test whether the run would read the key at all."""


_PRECISIONS = ("auto", "bfloat16", "float16", "half", "float32", "float", "fp8")
"""Element types of vLLM's weights, by its names."""

_VLLM_CFG = "policy.generation.vllm_cfg"


def _list_of_a_model(section: str) -> tuple[UnsupportedKey, ...]:
    """Return the rows for every model section."""
    has_section, megatron = _has(section), _trains_with(section, megatron=True)
    return (
        UnsupportedKey(f"{section}.draft.enabled", (False,), has_section),
        UnsupportedKey(f"{section}.quant_cfg", (None,), has_section),
        UnsupportedKey(f"{section}.tokenizer.audio", (None, {}), has_section),
        UnsupportedKey(f"{section}.tokenizer.video", (None, {}), has_section),
        UnsupportedKey(f"{section}.dequantize_base_checkpoint", (False,), megatron),
        UnsupportedKey(f"{section}.megatron_cfg.fp8_cfg.fp8_param", (None, False), _multiplies(section, "fp8")),
        UnsupportedKey(f"{section}.megatron_cfg.fp4_cfg.fp4_param", (None, False), _multiplies(section, "fp4")),
    )


def _of_the_policy_alone(section: str) -> tuple[UnsupportedKey, ...]:
    """Return the rows for features that only the policy can have."""
    return (
        UnsupportedKey(f"{section}.router_replay.enabled", (False,), _has(section)),
        UnsupportedKey(f"{section}.dtensor_cfg.lora_cfg.enabled", (False,), _trains_with(section, megatron=False)),
        UnsupportedKey(f"{section}.megatron_cfg.peft.enabled", (False,), _trains_with(section, megatron=True)),
    )


NOT_SUPPORTED_YET = (
    *_list_of_a_model("policy"),
    UnsupportedKey("policy.megatron_cfg.peft.dropout", (0.0,), _adapts),
    UnsupportedKey("policy.reward_model_cfg.enabled", (False,), _is_language_model),
    *_list_of_a_model("value"),
    *_list_of_a_model("teacher"),
    UnsupportedKey("teacher.projection_matrix_path", (None,), _distils),
    UnsupportedKey("teacher.weight", (None, 1.0), _distils),
    UnsupportedKey("teacher.gold_loss", (None, False), _distils),
    UnsupportedKey("teacher.xtoken_loss", (None, False), _distils),
    UnsupportedKey("loss_fn.kd_loss_mode", ("sum", "select_teacher"), lambda config: bool(config.joint_teachers)),
    UnsupportedKey("loss_fn.temperature", (1.0,), _distils),
    UnsupportedKey("loss_fn.gold_loss", (False,), _distils),
    UnsupportedKey("loss_fn.xtoken_loss", (False,), _distils),
    *_of_the_policy_alone("value"),
    *_of_the_policy_alone("teacher"),
    UnsupportedKey("policy.generation.backend", tuple(engine_kinds.ENGINE_KINDS), _rolls_out),
    UnsupportedKey("policy.generation.quant_cfg", (None,), _rolls_out),
    UnsupportedKey("policy.generation.real_quant", (False,), _rolls_out),
    UnsupportedKey(f"{_VLLM_CFG}.precision", _PRECISIONS, _vllm),
    UnsupportedKey(f"{_VLLM_CFG}.num_first_layers_in_bf16", (0,), _float8_engine),
    UnsupportedKey(f"{_VLLM_CFG}.num_last_layers_in_bf16", (0,), _float8_engine),
    UnsupportedKey(f"{_VLLM_CFG}.quantization_ignored_layer_kws", ((),), _float8_engine),
    UnsupportedKey(f"{_VLLM_CFG}.quantization_ignore_patterns", ((),), _float8_engine),
    UnsupportedKey(f"{_VLLM_CFG}.limit_mm_per_prompt.audio", (None, 0), _vllm),
    UnsupportedKey(f"{_VLLM_CFG}.limit_mm_per_prompt.video", (None, 0), _vllm),
    UnsupportedKey("logger.swanlab_enabled", (False,)),
)
"""Refused keys, in the order in which an error lists them."""

_DATA_SETS = {
    "avqa": "avqa: audio",
    "audiomcq": "audiomcq: audio",
    "mmau": "mmau: audio",
    "daily-omni": "daily-omni: video and audio",
    "mmpr-tiny": "mmpr-tiny: an archive of images",
}
"""NeMo-RL's data sets with video and audio, with what is not built."""

_ATTRIBUTES = {"_v2": "version_2"}
"""Names of fields in Python, where they differ from the key."""

_NOT_OF_THE_SCHEMA = ("asft", "data.energon")
"""Parts of NeMo-RL's main branch that no section here resembles: an algorithm whose name nearly is another's, and data
sets of Megatron Energon. A file with one asks for another run than the rest of it says."""
_LENGTHS = {"max_num_steps", "max_num_epochs"}
"""Keys that only the section of an algorithm has."""

NO_EFFECT_YET = (UnsupportedKey("data.add_system_prompt", (False,)),)
"""Keys accepted with a notice, since a run without them gives the same result. NeMo-RL's base files switch them on."""


def describe_foreign_parts(tree: dict[str, Any]) -> str | None:
    """Return the line that lists sections of settings that make it another run than any here; None without any.

    They are NeMo-RL's algorithms that are not built, and `_NOT_OF_THE_SCHEMA`. To ignore one would train the model in
    the way of an algorithm that the file inherits.
    """
    siblings = {field.encode_name: None for field in msgspec.structs.fields(Config)}
    algorithms = [
        name
        for name, section in tree.items()
        if name not in siblings and isinstance(section, dict) and _LENGTHS & {*section}
        if not describe_unknown_key(name, section, siblings).near
    ]
    parts = [part for part in _NOT_OF_THE_SCHEMA if part not in algorithms and find_setting(tree, part.split("."))]
    return f"not supported yet: {', '.join([*algorithms, *parts])}" if algorithms or parts else None


def describe_refusal(config: Config) -> str | None:
    """Return the line that lists all enabled features that are not built; None if there are none."""
    features = [
        row.key
        if isinstance(value := find_value(config, row.key), msgspec.Struct)
        else f"{row.key} ({_show_plain(value)})"
        for row in _switched_on(config, NOT_SUPPORTED_YET)
    ]
    features += [*_list_of_teachers(config), *_list_not_built(config)]
    return f"not supported yet: {', '.join(features)}" if features else None


def _list_of_teachers(config: Config) -> Iterator[str]:
    """Yield settings of joint teachers that the run needs and that are not built."""
    for index, teacher in enumerate(config.joint_teachers):
        for name in ("projection_matrix_path", "gold_loss", "xtoken_loss"):
            if value := getattr(teacher, name):
                yield f"teachers[{index}].{name} ({_show_plain(value)})"


def _list_of_engines(config: Config) -> Iterator[str]:
    """Yield vLLM settings that add ranks or models unknown to refits."""
    if not _vllm(config):
        return
    vllm = config.policy.generation.vllm_cfg
    if vllm.expert_parallel_size not in (1, vllm.tensor_parallel_size):
        yield (
            f"{_VLLM_CFG}.expert_parallel_size ({vllm.expert_parallel_size}: neither 1 nor tensor_parallel_size, "
            f"which is {vllm.tensor_parallel_size})"
        )
    method = vllm_arguments.find_unbuilt_draft_method(config.policy.generation.vllm_kwargs)
    if method is not None:
        yield f"policy.generation.vllm_kwargs.{vllm_arguments.SPECULATION} ({method})"


def _list_not_built(config: Config) -> Iterator[str]:
    """Yield environments and data sets of NeMo-RL that the run needs and that are not built."""
    yield from _list_of_engines(config)
    for environment in config.environments:
        entry = config.env.get(environment)
        if entry is None or entry.is_custom:
            continue
        if environment in shapes.ELSEWHERE:
            yield f"env.{environment}"
    is_of_evaluations = config.evaluates and config.data.dataset_name.lower() in NOT_BUILT_EVALUATIONS
    if config.data.dataset_name in _DATA_SETS or is_of_evaluations:
        yield f"data.dataset_name ({_DATA_SETS.get(config.data.dataset_name, config.data.dataset_name)})"
    for side in ("train", "validation"):
        for index, data_set in enumerate(getattr(config.data, side)):
            key = f"data.{side}[{index}]"
            if data_set.dataset_name in _DATA_SETS and data_set.dataset_name != config.data.dataset_name:
                yield f"{key}.dataset_name ({_DATA_SETS[data_set.dataset_name]})"


def list_without_effect(config: Config) -> list[str]:
    """Return a line for each key that is accepted but has no effect yet."""
    return [
        f"{row.key} ({_show_plain(find_value(config, row.key))}) has no effect yet"
        for row in _switched_on(config, NO_EFFECT_YET)
    ]


def _switched_on(config: Config, rows: tuple[UnsupportedKey, ...]) -> list[UnsupportedKey]:
    return [row for row in rows if row.read(config) and find_value(config, row.key) not in row.off]


def find_value(config: Config, key: str) -> Any:
    """Return the value at a key; None if a section on the way is null."""
    node: Any = config
    for part in key.split("."):
        if node is None:
            return None
        node = node.get(part) if isinstance(node, dict) else getattr(node, _ATTRIBUTES.get(part, part))
    return node


def _show_plain(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
