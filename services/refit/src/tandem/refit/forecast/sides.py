"""The layouts of trainers and engines, from a model's ``config.json`` and the parallel sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ModelError
from tandem.config import Config
from tandem.config.models import lora
from tandem.config.models.model_sizes import find_config_file
from tandem.config.models.vision_families import VISION, family_of
from tandem.refit.adapters.catalogue import ModelShape, make_shape, read_shape
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.geometry import FAMILIES
from tandem.refit.adapters.huggingface import is_of_tower
from tandem.refit.adapters.megatron import Megatron, linear_layers
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.forecast.engine_plans import find_plan

_LINEAR = re.compile(r"^(?!.*\.experts\.).*_proj(_with_mqa)?\.weight$")
"""Weights of layers that PEFT can adapt; routed experts are one parameter for each layer, so not among them."""


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
    return ForecastSide("trainer", training(config), _add_adapters(config, trained_model)), ForecastSide(
        "engine", generation(config), find_plan(config).shape(config, model)
    )


def _add_adapters(config: Config, model: ModelShape) -> ModelShape:
    """Return the trainers' model with its trained adapters; all else is frozen.

    Raise `ConfigError` if no layer is chosen for one.
    """
    policy = config.policy
    if policy.adapters is None:
        return model
    if policy.megatron_cfg.enabled:
        parts = linear_layers(model)
        names = lora.choose_layers(list(parts), policy.adapters, "policy.megatron_cfg.peft")
        layers, dtype = [layer for name in names for layer in parts[name]], policy.precision
    else:
        names = [tensor.name for tensor in model.tensors if not is_of_tower(tensor.name)]
        linear = [name.removesuffix(".weight") for name in names if _LINEAR.search(name)]
        layers, dtype = lora.choose_layers(linear, policy.adapters, "policy.dtensor_cfg.lora_cfg"), "float32"
    tensors = (
        msgspec.structs.replace(tensor, product_scale=policy.adapters.scale if tensor.name.endswith(lora.B) else 0.0)
        if lora.is_adapter(tensor.name)
        else msgspec.structs.replace(tensor, is_frozen=True)
        for tensor in model.add_adapters(layers, policy.adapters.dim, dtype).tensors
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

    Raise `ModelError` if the model's files are unusable.
    """
    folder, new, path = Path(config.policy.model_name), config.policy.new_model, find_config_file(config.policy)
    has_weights = any(folder.glob("*.safetensors"))
    if has_weights and family_of(config.policy) is None:
        return read_shape(folder)
    if path is not None:
        config_json = {**_read_json(path), **(config.policy.hf_config_overrides or {})}
    elif new is not None:
        config_json = {"vocab_size": len(new.characters) + 2, **new.config}
    elif folder.is_dir():
        raise ModelError(f"policy.model_name: {str(folder)!r} holds no config.json")
    else:
        return "no config.json of it is here"
    if config_json.get("model_type") in VISION:
        try:
            return make_shape(config_json)
        except ModelError as error:  # files of such models leave out what their library assumes
            return read_shape(folder) if has_weights else str(error)
    if config_json.get("model_type") not in FAMILIES:
        return f"only its weight files have the shapes of a {config_json.get('model_type')}"
    return make_shape(config_json)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
