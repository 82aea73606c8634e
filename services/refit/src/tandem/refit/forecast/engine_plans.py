"""Plans of engines: where the weights of each kind lie, and in which element types, before it runs."""

from __future__ import annotations

from typing import Protocol

from tandem.common.dotted import named
from tandem.common.errors import ConfigError
from tandem.config import Config
from tandem.refit.adapters.catalogue import ModelShape
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.adapters.vllm import Vllm


class EnginePlan(Protocol):
    """Where an engine's weights lie, and in which element types."""

    def divide(self, config: Config) -> ParallelDeployment:
        """Return how the engines divide the model."""

    def shape(self, config: Config, model: ModelShape) -> ModelShape:
        """Return the model as an engine keeps it. Raises `ConfigError` for an element type that it does not have."""


def find_plan(config: Config) -> EnginePlan:
    """Return the plan of the configuration's engine."""
    plan: EnginePlan = named(config.policy.generation.kind.plan)
    return plan


class EmbeddedPlan:
    """Whole models, in the policy's element type."""

    def divide(self, config: Config) -> ParallelDeployment:
        """Return how the engines divide the model."""
        return HuggingFace(config.cluster.rollouts)

    def shape(self, config: Config, model: ModelShape) -> ModelShape:
        """Return the model as an engine keeps it."""
        return model.cast(config.policy.precision)


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

    def divide(self, config: Config) -> ParallelDeployment:
        """Return how the engines divide the model."""
        settings = config.policy.generation.vllm_cfg
        return Vllm(
            tp=settings.tensor_parallel_size,
            pp=settings.pipeline_parallel_size,
            replicas=config.cluster.rollouts,
            expert_parallel=settings.expert_parallel_size > 1,
        )

    def shape(self, config: Config, model: ModelShape) -> ModelShape:
        """Return the model as an engine keeps it. Raises `ConfigError` for an element type that vLLM does not have."""
        precision = config.policy.generation.vllm_cfg.precision
        dtype = _VLLM_DTYPES.get(precision)
        if dtype is None:
            valid = ", ".join(_VLLM_DTYPES)
            raise ConfigError(f"policy.generation.vllm_cfg.precision: {precision!r} is not one of {valid}")
        if dtype == "fp8":
            return model.cast("bfloat16").quantised()
        return model.cast(dtype or config.policy.precision)


EMBEDDED: EnginePlan = EmbeddedPlan()
VLLM: EnginePlan = VllmPlan()
