"""Speculative decoding: drafts by n-grams, a model or the policy's own layers, verified.

A draft is accepted or redrawn so that tokens have the distribution they have without (Leviathan et al. 2023,
arXiv:2211.17192), and their log-probabilities are of that distribution. Which tokens a seed gives depends on drafts.
A draft model's weights are read once, from its folder. Refits do not write them, so fewer drafts are accepted as the
policy moves away. Layers of multi-token prediction that are trained are refitted (`drafter`).

Everything here works around vLLM: it gives a draft model dummy weights if the policy has them, and on a CPU its kernel
that repeats each request's temperature for its drafts leaves them uninitialised, and top-k fails without a draft.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import get_num_threads, set_num_threads  # vLLM's worker replaces the latter by one that does nothing

from tandem.common.errors import ModelError
from tandem.config.installed.vllm_arguments import DRAFT_METHODS, DRAFTED_BY_MODEL, MTP_METHODS, SPECULATION
from tandem.config.models.hf_config import load_config
from tandem.config.models.mtp_layers import name_layer
from tandem.config.schema.generation import VllmCfg
from tandem.refit.adapters import catalogue

_UNSEARCHABLE = "llvmlite.binding.ffi"
"""A module with an object that has every attribute, so that it seems to have a dictionary of them."""


def engine_argument(settings: Mapping[str, Any], vllm: VllmCfg, model_folder: Path) -> dict[str, Any]:
    """Return the value of vLLM's argument. Raises `ModelError` if what the method needs is missing."""
    arguments = {name: value for name, value in settings.items() if value is not None}
    assert arguments["method"] in DRAFT_METHODS, "others are refused by the configuration"
    of_model = {
        "draft_tensor_parallel_size": vllm.tensor_parallel_size,
        "draft_load_config": {"load_format": "safetensors", "use_tqdm_on_load": False},
    }
    if arguments["method"] in MTP_METHODS:
        names = name_layer(0, load_config(str(model_folder), None).get_text_config())
        if names is None or names.parts["eh_proj.weight"] not in catalogue.read_places(model_folder):
            raise ModelError(f"{model_folder} has no layers of multi-token prediction, with which to draft")
        return {**arguments, "method": MTP_METHODS[0], **of_model}
    if arguments["method"] in DRAFTED_BY_MODEL:
        if not Path(arguments["model"]).is_dir():
            raise ModelError(f"policy.generation.vllm_kwargs.{SPECULATION}.model: {arguments['model']} is not a folder")
        return {**arguments, **of_model}
    if importlib.util.find_spec("numba") is None:
        raise ModelError(
            f"policy.generation.vllm_kwargs.{SPECULATION}: vLLM finds n-grams by numba, which is not installed"
        )
    return arguments


class ScheduledDrafts:
    """The tokens that an engine drafts, and those of them that it accepts."""

    def __init__(self, engine: Any) -> None:
        """Listen to the scheduler of an `LLMEngine`."""
        self._num_drafted = self._num_accepted = 0
        scheduler = engine.engine_core.engine_core.scheduler
        note = scheduler.make_spec_decoding_stats

        def note_and_count(*args: Any, num_draft_tokens: int, num_accepted_tokens: int, **kwargs: Any) -> Any:
            self._num_drafted += num_draft_tokens
            self._num_accepted += num_accepted_tokens
            return note(*args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **kwargs)

        scheduler.make_spec_decoding_stats = note_and_count

    def take(self) -> tuple[int, int]:
        """Return the numbers since the last call."""
        counts = self._num_drafted, self._num_accepted
        self._num_drafted = self._num_accepted = 0
        return counts


@contextlib.contextmanager
def draft_with_weights(config: Any) -> Iterator[None]:
    """Have a draft model that is loaded in this block read its own weights, by a configuration of vLLM's."""
    speculative = config.speculative_config
    if speculative is None or speculative.draft_load_config is None:
        yield
        return
    from vllm.v1.spec_decode import draft_model

    get_model = draft_model.get_model

    def get_whole(**arguments: Any) -> torch.nn.Module:
        model: torch.nn.Module = get_model(**arguments, load_config=speculative.draft_load_config)
        return model

    draft_model.get_model = get_whole
    try:
        yield
    finally:
        draft_model.get_model = get_model


@functools.cache
def mend_for_cpus() -> None:
    """Have vLLM's rejection sampler repeat the parameters of requests by torch, and take steps without any draft."""
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_some(logits_NV: torch.Tensor, *arguments: Any) -> torch.Tensor:
        constrained_NV: torch.Tensor = constrain(logits_NV, *arguments) if len(logits_NV) else logits_NV
        return constrained_NV

    rejection_sampler.apply_sampling_constraints = constrain_some
    rejection_sampler.expand_batch_to_tokens = _repeated


@functools.cache
def start_numba() -> None:
    """Start the threads of numba, which finds n-grams, and leave torch as many as it has.

    Both have OpenMP's, and numba sets their number to that of the cores. So from the first n-gram on, torch would add
    in another order, and a worker forked from this process would wait for ever for threads that it does not have.
    """
    import numba

    num_threads = get_num_threads()
    numba.get_num_threads()
    set_num_threads(num_threads)


@functools.cache
def spare_llvmlite() -> None:
    """Have vLLM, which looks for its kernels in all modules, leave out the one of llvmlite's where that fails.

    A process that has imported numba could start no engine otherwise.
    """
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def rebind_elsewhere(overrides: Any) -> None:
        hidden = sys.modules.pop(_UNSEARCHABLE, None)
        try:
            rebind(overrides)
        finally:
            if hidden is not None:
                sys.modules[_UNSEARCHABLE] = hidden

    dispatcher._rebind_kernels = rebind_elsewhere


def _repeated(
    values_B: torch.Tensor, ends_B: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each request's value for each of its drafts, which end at `ends_B`, one value replaced."""
    counts_B = torch.diff(ends_B, prepend=ends_B.new_zeros(1))
    repeated_N = values_B.repeat_interleave(counts_B.to(torch.int64))
    assert len(repeated_N) == num_tokens
    return torch.where(repeated_N == replace_from, torch.full_like(repeated_N, replace_to), repeated_N)
