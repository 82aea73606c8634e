"""Memory of the drafter in an engine: its weights on each rank, and what it keeps of a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tandem.config import Config
from tandem.config.installed import vllm_arguments
from tandem.config.models import mtp_layers
from tandem.config.models.model_sizes import local_folder
from tandem.coordinator.forecast.engine_plans import find_plan
from tandem.coordinator.forecast.measured_models import list_mtp_tensors
from tandem.coordinator.forecast.sides import (
    CachedLayers,
    ForecastSide,
    SequenceCache,
    deploy_engines,
    describe_cache,
    find_config_json,
    measure_largest_rank,
    model_shape,
)
from tandem.refit.adapters.catalogue import ModelShape, read_headers
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.layout import Tensor

_EAGLE3 = "eagle3"
"""Method whose draft has the policy's embedding, and a configuration that does not name all of its own tensors."""


class DrafterForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The model or the layers that draft an engine's tokens, beside the policy."""

    method: str
    """Method, by vLLM's name."""
    num_parameters: int = 0
    """Parameters of the whole drafter, without those that it shares with the policy."""
    weights: float = 0.0
    """Bytes of their weights on the engine's rank that holds most."""
    cache: SequenceCache | None = None
    """Memory that an engine needs for a sequence, beside the policy's; None if it is unknown."""
    unknown: str = ""
    """Why its weights are unknown; empty if they are known."""


def forecast_drafter(config: Config, model: ModelShape) -> DrafterForecast | None:
    """Return the drafter of the policy, which has this shape; None if there is none, or it is n-grams, without weights.

    Raise `ConfigError`, `ModelError`, or `RefitError` if sizes do not fit the drafter.
    """
    generation = config.policy.generation
    method = vllm_arguments.find_draft_method(generation.vllm_kwargs) if generation.kind.drafts else None
    if not config.generates or method is None or method == "ngram":
        return None
    if method in vllm_arguments.MTP_METHODS:
        return _forecast_layers(config, model, method)
    name = vllm_arguments.find_draft_model(generation.vllm_kwargs)
    assert name is not None, "the configuration names a model for each other method"
    draft_config = config.replace_policy(config.policy, model_name=name, new_model=None, hf_config_overrides=None)
    shape = _read_files(name) if method == _EAGLE3 else model_shape(draft_config)
    cache = describe_cache(draft_config)
    if isinstance(shape, str):
        return DrafterForecast(method=method, cache=cache, unknown=shape)
    # By the names of Llama's layers, as vLLM cuts an Eagle3 draft.
    deployment = _cut_by_names(config) if method == _EAGLE3 else deploy_engines(draft_config, shape)
    side = ForecastSide("engine", deployment, find_plan(config).shape(config, shape))
    return DrafterForecast(
        method=method, num_parameters=shape.num_parameters, weights=float(measure_largest_rank(side)), cache=cache
    )


def add_refitted_drafter(config: Config, engines: ForecastSide) -> ForecastSide:
    """Return the engines with the layers of multi-token prediction that each refit brings, if it brings any."""
    if not vllm_arguments.refits_drafter(config.policy):
        return engines
    return _add_layers(config, engines, config.policy.mtp.num_kept)


def _forecast_layers(config: Config, model: ModelShape, method: str) -> DrafterForecast:
    """Describe layers of the policy's own checkpoint. vLLM has all of them, though it may apply only the first."""
    config_json = find_config_json(config)
    assert not isinstance(config_json, str), "the model's shape comes from it"
    num_layers = mtp_layers.count_layers(config_json)
    if not num_layers:
        return DrafterForecast(method=method, unknown="the model's config.json names no such layers")
    engines = ForecastSide("engine", deploy_engines(config, model), find_plan(config).shape(config, model))
    drafting = _add_layers(config, engines, num_layers)
    return DrafterForecast(
        method=method,
        num_parameters=drafting.model.num_parameters - engines.model.num_parameters,
        weights=float(measure_largest_rank(drafting, mtp_layers.PREFIX)),
        cache=_find_cache_of_layers(config, num_layers),
    )


def _add_layers(config: Config, engines: ForecastSide, num_layers: int) -> ForecastSide:
    """Return the engines with so many layers of multi-token prediction. Raise `ModelError` for a family without."""
    config_json = find_config_json(config)
    assert not isinstance(config_json, str), "the model's shape comes from it"
    tensors = list_mtp_tensors(msgspec.json.encode(config_json), num_layers)
    added = find_plan(config).shape(config, ModelShape(tensors, None))
    model = msgspec.structs.replace(engines.model, tensors=(*engines.model.tensors, *added.tensors))
    return msgspec.structs.replace(engines, model=model)


def _find_cache_of_layers(config: Config, num_layers: int) -> SequenceCache | None:
    """Return what these layers keep: each as much as one of the policy's layers of full attention, which it is like."""
    cache = describe_cache(config)
    kinds = {layers.kind: layers for layers in cache.layers} if cache else {}
    if cache is None or mtp_layers.ATTENTION not in kinds:
        return None
    layers = CachedLayers(mtp_layers.ATTENTION, num_layers, kinds[mtp_layers.ATTENTION].num_bytes)
    return SequenceCache(cache.num_tokens, (layers,))


def _cut_by_names(config: Config) -> ParallelDeployment:
    """Return engines whose tensor-parallel ranks cut the layers that have the names of Llama's, and no others."""
    return DTensor(replicate=config.cluster.rollouts, tensor=config.policy.generation.vllm_cfg.tensor_parallel_size)


def _read_files(name: str) -> ModelShape | str:
    """Return the shape of a drafter by its files, or why it is unknown. Raise `ModelError` if they are unusable."""
    folder = local_folder(name)
    if folder is None or not any(Path(folder).glob("*.safetensors")):
        return f"no files of {name} are here"
    entries: dict[str, Any] = read_headers(folder)
    return ModelShape(tuple(Tensor(tensor, shape, dtype) for tensor, (shape, dtype) in entries.items()), None)
