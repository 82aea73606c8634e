"""Configurations as YAML for people and JSON for the wire, and their comparison on resume."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.common.errors import ConfigError
from tandem.config.model_names import write_folders, write_names
from tandem.config.schema import MODELS, Config
from tandem.config.schema.declarations import ALGORITHMS, SECTIONS
from tandem.config.schema.loss import OF_ANY_LOSS

_OF_MODEL = (
    "activation_checkpointing_enabled",
    "dtensor_cfg.activation_checkpointing",
    "dtensor_cfg.context_parallel_size",
    "dtensor_cfg.cpu_offload",
    "dtensor_cfg.dp_replicate_size",
    "dtensor_cfg.expert_parallel_size",
    "dtensor_cfg.sequence_parallel",
    "dtensor_cfg.tensor_parallel_size",
    "megatron_cfg.activation_checkpointing",
    "megatron_cfg.context_parallel_size",
    "megatron_cfg.empty_unused_memory_level",
    "megatron_cfg.env_vars",
    "megatron_cfg.expert_model_parallel_size",
    "megatron_cfg.expert_tensor_parallel_size",
    "megatron_cfg.force_reconvert_from_hf",
    "megatron_cfg.num_layers_in_first_pipeline_stage",
    "megatron_cfg.num_layers_in_last_pipeline_stage",
    "megatron_cfg.pipeline_model_parallel_size",
    "megatron_cfg.sequence_parallel",
    "megatron_cfg.tensor_model_parallel_size",
    "megatron_cfg.virtual_pipeline_model_parallel_size",
)
"""Keys of a model section that only affect how trainers hold the model."""

_OF_SCHEDULE = ("train_iters", "scheduler.override_opt_param_scheduler")
"""Keys that say where schedules end in a run that becomes longer or shorter."""

_VALIDATION = ("val_period", "val_at_start", "val_at_end")
_OF_GENERATION = (
    "max_val_samples",
    "val_batch_size",
    "num_val_generations_per_prompt",
    "val_start_at",
    "stop_at_validation_metric",
    "stop_at_validation_threshold",
    "val_temperature",
    "val_seed",
)
_OF_DATA_SET = ("val_batches", "val_global_batch_size", "val_micro_batch_size")


def list_length_and_validation(algorithm: str) -> tuple[str, ...]:
    """Return the keys of an algorithm's section that say how long a run trains, and what it validates when."""
    period_keys = _OF_GENERATION if ALGORITHMS[algorithm].rolls_out else _OF_DATA_SET
    return tuple(f"{algorithm}.{key}" for key in ("max_num_steps", "max_num_epochs", *_VALIDATION, *period_keys))


FREE_ON_RESUME = (
    "eval",
    "nemo_rl_version",
    "ignored",
    "prerequisite",
    *(key for algorithm in ALGORITHMS for key in list_length_and_validation(algorithm)),
    *(f"{model}.{key}" for model in ("policy", "value", "teacher") for key in _OF_MODEL),
    *(f"{model}.megatron_cfg.{key}" for model in ("policy", "value") for key in _OF_SCHEDULE),
    "policy.generation.val_top_p",
    "policy.generation.val_top_k",
    "policy.generation.expose_http_server",
    "policy.generation.vllm_cfg.expose_http_server",
    "checkpointing",
    "logger",
    "cluster",
    "refit",
)
"""Keys, or whole sections, that a resumed run may change, since learning does not depend on them. A change of
`cluster.trainers`, or of parallel sizes, only reorders floating-point sums."""


def make_plain(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries with the user's keys.

    The sections of other algorithms are left out.
    """
    plain: dict[str, Any] = msgspec.to_builtins(write_names(config))
    for section in {each for names in SECTIONS.values() for each in names} - {*SECTIONS[config.algorithm]}:
        del plain[section]
    if config.declaration.loss_section != "loss_fn":
        shared_loss = {key: plain["loss_fn"][key] for key in OF_ANY_LOSS}
        del plain["loss_fn"]
        if shared_loss["class"] is not None:
            plain["loss_fn"] = shared_loss
    for name in MODELS:
        if plain.get(name) is not None:
            megatron = plain[name]["megatron_cfg"]
            megatron.update(megatron.pop("forwarded"))
    return plain


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back."""
    from omegaconf import OmegaConf  # imported late, since services import this module and read no YAML

    return OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(make_plain(config))), resolve=False)


def escape_interpolations(node: Any) -> Any:
    """Escape text that only looks like an interpolation."""
    match node:
        case dict():
            return {key: escape_interpolations(value) for key, value in node.items()}
        case list() | tuple():
            return [escape_interpolations(value) for value in node]
        case str():
            # OmegaConf halves the backslashes before an escaped interpolation, and only those.
            return re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", node)
        case _:
            return node


_EARLIER_TEMPLATE = (b'"chat_template":null', b'"chat_template":"default"')
"""The tokenizer's own template as earlier releases wrote it, and as it is written now."""


def config_to_json(config: Config) -> bytes:
    """Encode a configuration for the wire; `config_from_json` restores it."""
    return msgspec.json.encode(write_names(config))


def config_from_json(encoded: bytes) -> Config:
    """Decode a configuration from `config_to_json`. Raises `ConfigError` for anything else."""
    try:
        return write_folders(msgspec.json.decode(encoded.replace(*_EARLIER_TEMPLATE), type=Config))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"configuration received from the coordinator: {error}") from None


def resume_differences(old: Config, new: Config) -> list[str]:
    """Return the paths of differing keys that a resumed run may not change, in the schema's order."""
    return differences(old, new, besides=FREE_ON_RESUME)


def differences(old: Config, new: Config, *, besides: Iterable[str]) -> list[str]:
    """Return the paths of differing keys, except some keys or whole sections, in the schema's order."""
    return differing(_remove_keys(old, besides), _remove_keys(new, besides))


def differing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the paths of differing keys of plain configurations, in the schema's order."""
    before, after = flatten(old), flatten(new)
    return [key for key in dict.fromkeys([*before, *after]) if before.get(key, ...) != after.get(key, ...)]


def fingerprint(config: Config) -> str:
    """Return a hash that is equal for two configurations if and only if `resume_differences` finds none."""
    return hashlib.sha256(msgspec.json.encode(_remove_keys(config, FREE_ON_RESUME), order="deterministic")).hexdigest()


def _remove_keys(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    plain = make_plain(config)
    for key in keys:
        *parents, last = key.split(".")
        node = plain
        for part in parents:
            node = node.get(part) or {}  # a section may be null, such as `teacher` where each environment has its own
        node.pop(last, None)
    return plain


def flatten(node: Any, key: str = "") -> dict[str, Any]:
    """Return the values of a plain configuration by dotted key; an empty section is a value."""
    if not isinstance(node, dict) or not node:
        return {key: node}
    leaves: dict[str, Any] = {}
    for name, value in node.items():
        leaves |= flatten(value, f"{key}.{name}" if key else name)
    return leaves
