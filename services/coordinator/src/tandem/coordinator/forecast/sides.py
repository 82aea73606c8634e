"""The layouts of trainers and engines, from a model's ``config.json`` and the parallel sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models import families, lora, model_sizes
from tandem.coordinator.forecast.engine_plans import find_plan
from tandem.coordinator.forecast.measured_models import LayerCache, derive_cache, list_mtp_tensors, measure_model
from tandem.refit.adapters.catalogue import ModelShape, make_shape, read_shape
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.geometry import FAMILIES
from tandem.refit.adapters.huggingface import is_outside_language
from tandem.refit.adapters.megatron import Megatron, linear_layers
from tandem.refit.adapters.vllm import Vllm

_LINEAR = re.compile(r"^(?!.*\.experts\.).*(_proj(_with_mqa)?|\.mlp\.gate)\.weight$")
"""Weights of layers that PEFT can adapt, and of routers; the experts of a layer are fused in parameters."""
_OF_EXPERT = re.compile(r"^(.*\.experts\.)\d+\.(gate|up|down)_proj\.weight$")


class ForecastSide(msgspec.Struct, frozen=True):
    """The trainers, or the engines."""

    kind: str
    deployment: ParallelDeployment
    model: ModelShape
    """Model as this side keeps it."""


def sides(config: Config, model: ModelShape) -> tuple[ForecastSide, ForecastSide]:
    """Return trainers and engines as the configuration describes them.

    Raise `ConfigError` for an element type that no engine supports.
    """
    policy = config.policy
    trains_all_in_float32 = not policy.megatron_cfg.enabled and policy.adapters is None
    trained_model = model.cast("float32" if trains_all_in_float32 else policy.precision)
    if policy.mtp.num_layers:
        trained_model = _add_mtp_layers(config, trained_model)
    return ForecastSide("trainer", training(config), _add_adapters(config, trained_model)), ForecastSide(
        "engine", deploy_engines(config, model), find_plan(config).shape(config, model)
    )


def _add_mtp_layers(config: Config, model: ModelShape) -> ModelShape:
    """Return the trainers' model with its layers of multi-token prediction. Raise `ModelError` for a family without."""
    config_json = find_config_json(config)
    assert not isinstance(config_json, str), "the model's shape comes from it"
    added = list_mtp_tensors(msgspec.json.encode(config_json), config.policy.mtp.num_kept)
    return msgspec.structs.replace(model, tensors=(*model.tensors, *added))


def deploy_engines(config: Config, model: ModelShape) -> ParallelDeployment:
    """Return how the engines divide the model: as evenly as can be where only vLLM's own loader knows (`is_asked`)."""
    deployment = generation(config)
    if not is_asked(deployment, model):
        return deployment
    assert isinstance(deployment, Vllm), "no other deployment is asked"
    return DTensor(replicate=deployment.dp * deployment.replicas, shard=deployment.tp * deployment.pp)


def measure_largest_rank(side: ForecastSide, prefix: str = "") -> int:
    """Return the bytes of the rank that holds most of what has a name with this beginning."""
    deployment = side.deployment
    places = {deployment.place(rank): rank for rank in reversed(range(deployment.num_ranks))}
    layouts = (deployment.look_up_parameters(side.model, rank) for rank in places.values())
    return max(
        sum(storage.num_bytes for storage in layout.storages if storage.name.startswith(prefix)) for layout in layouts
    )


def is_asked(deployment: ParallelDeployment, model: ModelShape) -> bool:
    """Return whether vLLM's loader is asked for its layout when engines start, since no table here has it."""
    geometry = model.as_text.geometry
    return isinstance(deployment, Vllm) and (geometry is None or geometry.model_type not in families.VLLM_PLANNED)


def _add_adapters(config: Config, model: ModelShape) -> ModelShape:
    """Return the trainers' model with its trained adapters; all else is frozen.

    Raise `ConfigError` if no layer is chosen for one.
    """
    policy = config.policy
    if policy.adapters is None:
        return model
    dim = policy.adapters.dim
    if policy.megatron_cfg.enabled:
        parts = linear_layers(model)
        names = lora.choose_layers(list(parts), policy.adapters, "policy.megatron_cfg.peft")
        adapted = model.add_adapters([layer for name in names for layer in parts[name]], dim, policy.precision)
    else:
        names = [tensor.name for tensor in model.tensors if not is_outside_language(tensor.name)]
        linear = [name.removesuffix(".weight") for name in names if _LINEAR.search(name)]
        fused: dict[str, list[str]] = {}
        for name in names:
            if (match := _OF_EXPERT.match(name)) is not None:
                last = "down_proj" if match[2] == "down" else "gate_up_proj"
                fused.setdefault(f"{match[1]}{last}", []).append(name.removesuffix(".weight"))
        adapted_layers = lora.choose_layers(linear, policy.adapters, "policy.dtensor_cfg.lora_cfg", list(fused))
        adapted = model.add_adapters([name for name in adapted_layers if name not in fused], dim, "float32")
        for name in adapted_layers:
            if name in fused:
                rank = dim * lora.count_projections(name, policy.adapters)
                adapted = adapted.add_adapters(fused[name], rank, "float32")
    tensors = (
        msgspec.structs.replace(tensor, product_scale=policy.adapters.scale if tensor.name.endswith(lora.B) else 0.0)
        if lora.is_adapter(tensor.name)
        else msgspec.structs.replace(tensor, is_frozen=True)
        for tensor in adapted.tensors
    )
    return msgspec.structs.replace(model, tensors=tuple(tensors))


def training(config: Config) -> Megatron | DTensor:
    """Return how the trainers divide the model."""
    megatron, dtensor = config.policy.megatron_cfg, config.policy.dtensor_cfg
    if not megatron.enabled:
        copies, tensor = dtensor.dp_replicate_size, dtensor.tensor_parallel_size
        shards = config.cluster.trainers // (copies * tensor)
        return DTensor(replicate=copies, shard=shards, tensor=tensor, expert=dtensor.expert_parallel_size)
    return Megatron(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        dp=config.data_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        num_layers_in_first_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_stage=megatron.num_layers_in_last_pipeline_stage,
    )


def generation(config: Config) -> ParallelDeployment:
    """Return how the engines divide the model."""
    return find_plan(config).divide(config)


def words(config: Config, deployment: ParallelDeployment) -> str:
    """Return the library of a deployment's ranks, and the parallel sizes that are not one."""
    match deployment:
        case Megatron():
            sizes = {"TP": deployment.tp, "PP": deployment.pp, "VPP": deployment.vpp, "CP": deployment.cp}
            sizes |= {"EP": deployment.ep, "ETP": deployment.etp or 1, "DP": deployment.dp}
            return f"Megatron-Core {_format_sizes(sizes)}"
        case DTensor():
            sizes = {"TP": deployment.tensor, "CP": config.policy.dtensor_cfg.context_parallel_size}
            sizes |= {"EP": deployment.expert}
            copies = f"{deployment.replicate} × " if deployment.replicate > 1 else ""
            cut = "".join(f" × {name}{size}" for name, size in sizes.items() if size > 1)
            return f"DTensor, {copies}FSDP{deployment.shard}{cut}"
        case Vllm():
            sizes = {"TP": deployment.tp, "PP": deployment.pp}
            engines = f", {deployment.replicas} engines" if deployment.replicas > 1 else ""
            return f"vLLM {_format_sizes(sizes)}{engines}"
        case _:
            return "transformers, whole models"


def _format_sizes(sizes: dict[str, int]) -> str:
    return " × ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "on one GPU"


def model_shape(config: Config) -> ModelShape | str:
    """Return the shape of ``policy.model_name`` or ``policy.new_model``, or why it is unknown here.

    What no table here knows is measured on a model without elements (`measure_model`). Raise `ModelError` if the
    model's files are unusable.
    """
    folder = Path(config.policy.model_name)
    has_weights = any(folder.glob("*.safetensors"))
    config_json = find_config_json(config)
    if isinstance(config_json, str):
        return config_json
    if config_json.get("model_type") in FAMILIES:
        return read_shape(folder) if has_weights else make_shape(config_json)
    try:
        if families.find_language_prefix(str(config_json.get("model_type"))):
            return make_shape(config_json)
        return measure_model(config_json, config.policy.max_total_sequence_length).shape
    except ModelError as error:  # files of vision models leave out what their library assumes
        return read_shape(folder) if has_weights else str(error)


def find_config_json(config: Config) -> dict[str, Any] | str:
    """Return what the policy's ``config.json`` says or will say, or why that is unknown here.

    Raise `ModelError` if the model's files are unusable.
    """
    folder, new, path = (
        Path(config.policy.model_name),
        config.policy.new_model,
        model_sizes.find_config_file(config.policy),
    )
    if path is not None:
        return {**_read_json(path), **(config.policy.hf_config_overrides or {})}
    if new is not None:
        return {"vocab_size": len(new.characters) + 2, **new.config}
    if folder.is_dir():
        raise ModelError(f"policy.model_name: {str(folder)!r} holds no config.json")
    return "no config.json of it is here"


class CachedLayers(msgspec.Struct, frozen=True):
    """Layers that keep as much of a sequence as each other."""

    kind: str
    """Their kind, by Transformers' name."""
    num_layers: int
    num_bytes: float
    """An engine's memory of a sequence of the longest length in each."""


class SequenceCache(msgspec.Struct, frozen=True):
    """An engine's memory of one sequence between two tokens."""

    num_tokens: int
    """The longest length of a sequence."""
    layers: tuple[CachedLayers, ...]

    @property
    def num_bytes(self) -> float:
        """All of it."""
        return sum(layers.num_layers * layers.num_bytes for layers in self.layers)


def describe_cache(config: Config) -> SequenceCache | None:
    """Return what an engine keeps of a sequence; None where that is unknown."""
    plan, length, config_json = find_plan(config), config.policy.max_total_sequence_length, find_config_json(config)
    if isinstance(config_json, str):
        return None
    if config_json.get("model_type") in FAMILIES and not _has_windows(config_json):
        geometry = make_shape(config_json).required_geometry
        caches: Mapping[LayerCache, int] = {derive_cache(geometry.attention, length): geometry.num_layers}
    else:
        try:
            caches = measure_model(config_json, length).caches or {}
        except ModelError:
            return None
    counts: Counter[tuple[str, float]] = Counter()
    for layer, num_layers in caches.items():
        counts[layer.kind, plan.measure_cache(config, layer)] += num_layers
    layers = tuple(CachedLayers(kind, number, size) for (kind, size), number in counts.items())
    return SequenceCache(length, layers) if layers else None


def _has_windows(config_json: Mapping[str, Any]) -> bool:
    """Return whether a known family's layers may have sliding windows."""
    window = config_json.get("sliding_window") if config_json.get("use_sliding_window", True) else None
    return window is not None or config_json["model_type"] in ("gemma3_text", "gpt_oss", "mistral")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
