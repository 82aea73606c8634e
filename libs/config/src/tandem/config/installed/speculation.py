"""Speculative decoding of vLLM: the arguments of ``vllm_kwargs.speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.common.errors import nearest

KEY = "speculative_config"
"""Name of the argument."""
BY_MODEL = ("draft_model", "eagle3")
"""Methods with a model of their own: a smaller one, or layers that read the policy's hidden states."""
METHODS = ("ngram", *BY_MODEL)
"""Methods whose drafts leave the distribution of tokens as it is, and whose weights are not the policy's."""
_POSITIVE = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size")
_KNOWN = ("method", "model", *_POSITIVE)


def find_method(arguments: Mapping[str, Any]) -> str | None:
    """Return the method that the arguments of vLLM's engine ask for; None if they ask for none."""
    settings = arguments.get(KEY)
    method = settings.get("method") if isinstance(settings, Mapping) else None
    return method if isinstance(method, str) else None


def find_draft(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the draft model; None if there is none."""
    settings = arguments.get(KEY)
    name = settings.get("model") if isinstance(settings, Mapping) else None
    return name if isinstance(name, str) and find_method(arguments) in BY_MODEL else None


def find_unbuilt_method(arguments: Mapping[str, Any]) -> str | None:
    """Return the method if refits do not support it, such as layers of the policy's own checkpoint."""
    method = find_method(arguments)
    return None if method in (None, *METHODS) else method


def find_problem(settings: Any) -> tuple[str, str] | None:
    """Return the first setting that cannot be carried out, with why; an empty name means all of them."""
    if not isinstance(settings, Mapping):
        return "", "must be a mapping"
    for name in settings:
        if name not in _KNOWN:
            return name, f"Tandem passes no such setting{nearest(name, _KNOWN)}"
    method = settings.get("method")
    if method not in METHODS:
        reason = "missing" if method is None else f"{method!r}, not supported yet"
        return "method", f"{reason}; these are: {', '.join(METHODS)}"
    for name in _POSITIVE:
        value = settings.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return name, f"{value!r} is not an integer at least 1"
    if settings.get("num_speculative_tokens") is None:
        return "num_speculative_tokens", "missing: how many tokens are drafted at once"
    model = settings.get("model")
    if method in BY_MODEL and (not isinstance(model, str) or not model):
        return "model", f"{'missing' if model is None else repr(model)}; a draft model is a folder or a name on the Hub"
    return None
