"""Layers of multi-token prediction that draft, refitted with the policy that they are trained with.

vLLM builds a second model of them, with the policy's own embedding and output layer. Where its loader puts their
tensors is learned as it is of the policy (`tandem.rollout.engines.vllm.learned`), and a worker's layout has both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from tandem.common.errors import ModelError
from tandem.config.installed.vllm_arguments import SPECULATION
from tandem.config.models import mtp_layers
from tandem.config.models.hf_config import load_config
from tandem.config.schema.generation import VllmCfg
from tandem.refit import layout
from tandem.refit.layout import LayoutBuilder
from tandem.refit.weights import Weights
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.rollout.engines.vllm.insides import DRAFTS
from tandem.rollout.engines.vllm.learned import LearnedParameters, LoaderProbe, cache_path, learn_by, learn_map
from tandem.rollout.engines.vllm.part import WorkerPart

_STORAGES = "drafter."
"""Beginning of the names of its storages, since the policy's parameters have the same names."""
_SHARED = "shared."
"""Beginning of the names of the policy's tensors among what is loaded to learn; after `mtp_layers.PREFIX` in order."""
_OF_POLICY = {mtp_layers.EMBEDDING: "model.embed_tokens.weight", mtp_layers.HEAD: "lm_head.weight"}


class DraftingVllmEngine(VllmEngine):
    """`VllmEngine` whose drafts are made by layers that each refit brings."""

    def __init__(self, *args: Any, num_layers: int, **kwargs: Any) -> None:
        """Start vLLM; `num_layers` are trained, and the other arguments are those of `VllmEngine`."""
        self._num_layers = num_layers
        super().__init__(*args, **kwargs)

    def _arguments(self, model_folder: Path, settings: VllmCfg, extra: Mapping[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(model_folder, settings, extra)
        without_weights = {**arguments[SPECULATION], "draft_load_config": None}
        worker_config = {**arguments.get("additional_config", {}), DRAFTS: self._num_layers}
        return {**arguments, SPECULATION: without_weights, "additional_config": worker_config}


class DraftingPart(WorkerPart):
    """A worker's slice of the policy, and of the layers that draft."""

    def __init__(self, runner: Any, packed: Any, rank: int, *args: Any, drafter: Any, **kwargs: Any) -> None:
        """Take what `WorkerPart` takes, and what `learn_drafter` gave."""
        super().__init__(runner, packed, rank, *args, **kwargs)
        holder = SimpleNamespace(get_model=lambda: runner.drafter.model, vllm_config=runner.vllm_config)
        self._drafter = WorkerPart(holder, packed, rank, drafter)

    def describe(self) -> bytes:
        """Return the encoded layout of both; the weights are zero from here on. Raises `ModelError`, `RefitError`."""
        super().describe()
        self._drafter.describe()
        self._weights = _join(self._described(), self._drafter._described())
        return layout.encode(self._weights.layout)

    def is_learned(self) -> bool:
        """Return whether its layout was learned from vLLM's loader; the layers' always is."""
        return True

    def pack(self) -> None:
        """Have kernels compute with the current weights."""
        super().pack()
        self._drafter.pack()


def learn_drafter(
    vllm_config: Any, rank: int
) -> contextlib.AbstractContextManager[Sequence[LearnedParameters | ModelError]]:
    """Return a block that learns the layout of the layers that draft while they are loaded in it."""
    learn = functools.partial(_learn, vllm_config=vllm_config, rank=rank)
    return learn_by(vllm_config.speculative_config.draft_model_config, learn)


def _learn(model: Any, vllm_config: Any, rank: int) -> LearnedParameters:
    """Return what a worker's parameters of these layers hold. Raises `ModelError`."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    settings, num_layers = vllm_config.model_config, vllm_config.additional_config[DRAFTS]
    overrides = {} if callable(settings.hf_overrides) else dict(settings.hf_overrides)
    config = load_config(settings.model, overrides).get_text_config()
    tensors = mtp_layers.list_shapes(mtp_layers.build_skeleton(config, num_layers))
    of_policy = dict.fromkeys((f"{_SHARED}{module}" for module in _OF_POLICY), (config.vocab_size, config.hidden_size))
    probe = LoaderProbe(model, {**tensors, **of_policy}, _make_converter(config, num_layers))
    with disable_mtp_completeness_check():  # not all is loaded at once
        learned_map, proof = learn_map(probe, cache_path(vllm_config, config, rank, f"{num_layers} layers"))
    slices_of_layers = {
        name: slices
        for name, slices in learned_map.slices.items()
        if all(landed.tensor <= len(tensors) for landed in slices)
    }
    learned = LearnedParameters(tensors, msgspec.structs.replace(learned_map, slices=slices_of_layers))
    learned.keep_proof(model, *proof)
    return learned


def _make_converter(config: Any, num_layers: int) -> Any:
    """Return a function that names a trainer's tensors of these layers, and the shared ones, as checkpoints do."""
    from transformers.core_model_loading import revert_weight_conversion

    revert = functools.partial(revert_weight_conversion, mtp_layers.build_skeleton(config, num_layers))

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        checkpoint = {
            name: tensors[f"{_SHARED}{module}"]
            for module, name in _OF_POLICY.items()
            if f"{_SHARED}{module}" in tensors
        }
        for number in range(num_layers):
            names, prefix = mtp_layers.name_layer(number, config), f"{mtp_layers.PREFIX}layers.{number}."
            if names is None:
                raise ModelError(f"a {config.model_type} has no layer {number} of multi-token prediction")
            for copy, module in names.shared.items():
                if f"{_SHARED}{module}" in tensors:
                    checkpoint[copy] = tensors[f"{_SHARED}{module}"]
            of_layer = {
                name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
            }
            checkpoint |= names.rename(of_layer, revert) if of_layer else {}
        return checkpoint

    return convert


def _join(policy: Weights, drafter: Weights) -> Weights:
    """Return the weights of both."""
    builder = LayoutBuilder(policy.layout.host, policy.layout.device)
    num_storages = len(policy.layout.storages)
    for weights, prefix, first_storage in ((policy, "", 0), (drafter, _STORAGES, num_storages)):
        first, pieces = builder.add_tensors(weights.layout.tensors), weights.layout.pieces
        for storage in weights.layout.storages:
            builder.storage(f"{prefix}{storage.name}", storage.num_bytes, storage.address)
        builder.add_many(
            pieces.tensor_P + first,
            pieces.start_PD,
            pieces.shape_PD,
            pieces.storage_P + first_storage,
            pieces.offset_P,
            pieces.strides_PD,
        )
    storages = {f"{_STORAGES}{name}": storage for name, storage in drafter.storages.items()}
    return Weights(builder.build(), {**policy.storages, **storages})
