"""Plans of engines: where the weights of each kind lie, and in which element types, before it runs."""

from __future__ import annotations

from typing import Protocol

from tandem.common.errors import ConfigError
from tandem.common.user_code import named
from tandem.config import Config
from tandem.coordinator.forecast.measured_models import LayerCache
from tandem.refit.adapters import catalogue, deployment, huggingface, vllm


class EnginePlan(Protocol):
    """Where an engine's weights lie, and in which element types."""

    def divide(self, config: Config) -> deployment.ParallelDeployment:
        """Return how the engines divide the model."""

    def shape(self, config: Config, model: catalogue.ModelShape) -> catalogue.ModelShape:
        """Return the model as an engine keeps it. Raises `ConfigError` for an element type that it does not have."""

    def measure_cache(self, config: Config, layer: LayerCache) -> float:
        """Return the bytes that one layer takes of a sequence of the longest length."""


def find_plan(config: Config) -> EnginePlan:
    """Return the plan of the configuration's engine."""
    plan: EnginePlan = named(config.policy.generation.kind.plan)
    return plan


class EmbeddedPlan:
    """Whole models, in the policy's element type."""

    def divide(self, config: Config) -> deployment.ParallelDeployment:
        """Return how the engines divide the model."""
        return huggingface.HuggingFace(config.cluster.rollouts)

    def shape(self, config: Config, model: catalogue.ModelShape) -> catalogue.ModelShape:
        """Return the model as an engine keeps it."""
        return model.cast(config.policy.precision)

    def measure_cache(self, config: Config, layer: LayerCache) -> float:
        """Return the bytes that one layer takes of a sequence: slots have room for the longest, with any window."""
        cast = layer.cast(_item_size(config.policy.precision))
        return cast.heads_per_token * config.policy.max_total_sequence_length + cast.bytes_of_state


_VLLM_DTYPES = {
    "auto": "",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
    "fp8": "fp8",
}
"""Element types by vLLM's names for them, and NeMo-RL's ``fp8``; ``auto`` is the policy's own."""


class VllmPlan:
    """vLLM's workers, each with its share of layers, heads and experts."""

    def divide(self, config: Config) -> deployment.ParallelDeployment:
        """Return how the engines divide the model."""
        settings = config.policy.generation.vllm_cfg
        return vllm.Vllm(
            tp=settings.tensor_parallel_size,
            pp=settings.pipeline_parallel_size,
            replicas=config.cluster.rollouts,
            expert_parallel=settings.expert_parallel_size > 1,
        )

    def shape(self, config: Config, model: catalogue.ModelShape) -> catalogue.ModelShape:
        """Return the model as an engine keeps it. Raises `ConfigError` for an element type that vLLM does not have."""
        dtype = self._find_dtype(config)
        return model.cast("bfloat16").quantised() if dtype == "fp8" else model.cast(dtype)

    def measure_cache(self, config: Config, layer: LayerCache) -> float:
        """Return the bytes that one layer takes of a sequence, over all workers that share its heads."""
        return layer.cast(_item_size(self._find_dtype(config))).num_bytes

    def _find_dtype(self, config: Config) -> str:
        precision = config.policy.generation.vllm_cfg.precision
        dtype = _VLLM_DTYPES.get(precision)
        if dtype is None:
            valid = ", ".join(_VLLM_DTYPES)
            raise ConfigError(f"policy.generation.vllm_cfg.precision: {precision!r} is not one of {valid}")
        return dtype or config.policy.precision


def _item_size(dtype: str) -> int:
    """Return the bytes of a number in a cache; float8 is for weights alone."""
    return 4 if dtype == "float32" else 2


EMBEDDED: EnginePlan = EmbeddedPlan()
VLLM: EnginePlan = VllmPlan()
