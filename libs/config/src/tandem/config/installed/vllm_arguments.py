"""The arguments of vLLM's engine, read from source without importing it, and of its speculation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.common.errors import ConfigError, nearest
from tandem.config.installed.sources import find_annotated_fields, find_class_and_bases, find_package

if TYPE_CHECKING:
    from tandem.config.schema.policy import PolicyConfig

SPECULATION = "speculative_config"
"""Name of the argument."""
DRAFTED_BY_MODEL = ("draft_model", "eagle3")
"""Methods with a model of their own: a smaller one, or layers that read the policy's hidden states."""
MTP_METHODS = ("mtp", "deepseek_mtp")
"""Names of the method that drafts by the layers of multi-token prediction in the policy's own checkpoint."""
DRAFT_METHODS = ("ngram", *DRAFTED_BY_MODEL, *MTP_METHODS)
"""Methods whose drafts leave the distribution of tokens as it is."""
_POSITIVE = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size")
_KNOWN = ("method", "model", *_POSITIVE)


def find_draft_method(arguments: Mapping[str, Any]) -> str | None:
    """Return the method that the arguments of vLLM's engine ask for; None if they ask for none."""
    settings = arguments.get(SPECULATION)
    method = settings.get("method") if isinstance(settings, Mapping) else None
    return method if isinstance(method, str) else None


def find_draft_model(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the draft model; None if there is none."""
    settings = arguments.get(SPECULATION)
    name = settings.get("model") if isinstance(settings, Mapping) else None
    return name if isinstance(name, str) and find_draft_method(arguments) in DRAFTED_BY_MODEL else None


def refits_drafter(policy: PolicyConfig) -> bool:
    """Return whether engines draft by layers of multi-token prediction that are trained, so that refits bring them."""
    generation = policy.generation
    return (
        policy.mtp.num_layers > 0
        and generation.kind.drafts
        and find_draft_method(generation.vllm_kwargs) in MTP_METHODS
    )


def find_unbuilt_draft_method(arguments: Mapping[str, Any]) -> str | None:
    """Return the method if it is not built."""
    method = find_draft_method(arguments)
    return None if method in (None, *DRAFT_METHODS) else method


def find_draft_problem(settings: Any) -> tuple[str, str] | None:
    """Return the first setting that cannot be carried out, with why; an empty name means all of them."""
    if not isinstance(settings, Mapping):
        return "", "must be a mapping"
    for name in settings:
        if name not in _KNOWN:
            return name, f"Tandem passes no such setting{nearest(name, _KNOWN)}"
    method = settings.get("method")
    if method not in DRAFT_METHODS:
        reason = "missing" if method is None else f"{method!r}, not supported yet"
        return "method", f"{reason}; these are: {', '.join(DRAFT_METHODS)}"
    for name in _POSITIVE:
        value = settings.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return name, f"{value!r} is not an integer at least 1"
    if settings.get("num_speculative_tokens") is None:
        return "num_speculative_tokens", "missing: how many tokens are drafted at once"
    model = settings.get("model")
    if method in DRAFTED_BY_MODEL and (not isinstance(model, str) or not model):
        return "model", f"{'missing' if model is None else repr(model)}; a draft model is a folder or a name on the Hub"
    return None


RESERVED = {
    "model": "policy.model_name",
    "dtype": "policy.generation.vllm_cfg.precision",
    "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "kv_cache_dtype": "policy.generation.vllm_cfg.kv_cache_dtype",
    "enforce_eager": "policy.generation.vllm_cfg.enforce_eager",
    "load_format": "policy.generation.vllm_cfg.load_format",
    "tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    "data_parallel_size": "cluster.rollouts",
    "distributed_executor_backend": "",
    "worker_cls": "",
    "seed": "",
    "logprobs_mode": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "async_scheduling": "",
    "quantization": "",
    "enable_lora": "",
    "enable_return_routed_experts": "policy.router_replay.enabled",
}
"""Arguments not allowed in `vllm_kwargs`, with the key that sets each; empty if Tandem sets it."""

UNSCORED = {"logits_processors": "trainers cannot score the distribution that it makes"}
"""Arguments not allowed in `vllm_kwargs`, since they change what tokens are drawn from, with the reason."""

WITHOUT_EFFECT = {
    "enable_chunked_prefill": "prompts are computed whole",
    "tokenizer": "engines are given tokens",
    "override_generation_config": "each request has all of its parameters",
    "mm_processor_cache_gb": "engines are given pixels",
    "mm_processor_kwargs": "preprocessor_config.json says how images become pixels",
    "mm_device_do_normalize": "engines are given pixels",
    "mm_encoder_tp_mode": "each worker has the tower whole",
}
"""Arguments that are accepted, as NeMo-RL's files contain some, but that vLLM does not get, with the reason."""


@functools.cache
def list_engine_arguments() -> frozenset[str]:
    """Return the names of all arguments of vLLM's `EngineArgs`; none if vLLM is not installed."""
    root = find_package("vllm")
    if root is None:
        return frozenset()
    classes = find_class_and_bases(root / "engine" / "arg_utils.py", "EngineArgs", root)
    return frozenset(field for defined in classes for field in find_annotated_fields(defined))


def find_problem(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first argument that vLLM cannot get, and why; names are not checked if vLLM is not installed."""
    known_names = list_engine_arguments()
    for name in arguments:
        if name in WITHOUT_EFFECT:
            continue
        if name == SPECULATION and arguments[name] is not None:
            problem = find_draft_problem(arguments[name])
            if problem is not None:
                return ".".join(filter(None, (name, problem[0]))), problem[1]
        if name in RESERVED:
            return name, f"set {RESERVED[name]} instead" if RESERVED[name] else "Tandem sets it itself"
        if name in UNSCORED and arguments[name]:
            return name, UNSCORED[name]
        if known_names and name not in known_names:
            return name, f"vLLM's engine has no such argument{nearest(name, known_names)}"
    return None


def select_forwarded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to pass to vLLM. Raises `ConfigError` for one that cannot be passed."""
    check_arguments(arguments)
    return {name: value for name, value in arguments.items() if name not in WITHOUT_EFFECT}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first argument that cannot be passed to vLLM."""
    problem = find_problem(arguments)
    if problem is not None:
        raise ConfigError(f"policy.generation.vllm_kwargs.{problem[0]}: {problem[1]}")
