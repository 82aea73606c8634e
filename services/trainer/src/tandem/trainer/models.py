"""Hugging Face models as the trainer uses them: loaded whole and checked, or made from a configuration and a seed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.common.config import Config
from tandem.common.errors import ModelError
from tandem.trainer.packing import MicroBatch

_ENTROPY_ROWS = 1024
"""Positions whose entropy is computed at once, so that a large vocabulary needs little extra memory."""


def load_model(source: str, config: Config, dtype: torch.dtype) -> Any:
    """Return the causal language model in folder `source` (or of that Hub name), on the CPU, in `dtype`.

    A folder with a configuration and no weights is what ``policy.new_model`` leaves behind: its weights are drawn with
    that section's seed, the same on every rank. Dropout is off. Raises `ModelError`.
    """
    transformers.utils.logging.disable_progress_bar()
    folder = Path(source)
    if folder.is_dir() and not _has_weights(folder):
        model = _new_model(folder, config, dtype)
    else:
        model = _pretrained(source, dtype)
    if model.get_output_embeddings() is None:
        raise ModelError(f"{source}: {type(model).__name__} has no output embeddings to predict tokens with")
    return model.eval()


def without_weights(source: str, dtype: torch.dtype) -> Any:
    """Return the model of a checkpoint as its configurations describe it, without memory for weights.

    Raises `ModelError`.
    """
    try:
        settings = transformers.AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(f"cannot read the configuration of {source!r}: {error}".split("\n")[0]) from error
    with suppress(OSError):  # many checkpoints have none
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model.eval()


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that repeat: each is sharded, and recomputed, as a unit."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Recompute each layer's activations in the backward pass. Before sharding, whose hooks must stay outside."""
    for layer in decoder_layers(model):
        # Nothing in a layer is random, because dropout is off.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class TokenScorer:
    """Log-probabilities and entropies of a model, computed only where they count.

    The output layer, with a large vocabulary the most expensive of all, sees only the positions that predict a counted
    token: a hook in front of it picks them, whatever model it belongs to.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model
        self._temperature = temperature
        self._predictor_K: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._pick)

    def __call__(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``logprobs_BT`` with gradient and ``entropy_BT`` without, float32, zero where nothing counts.

        Position ``t`` holds the log-probability of token ``t`` given those before it, and the entropy of the
        distribution it was drawn from, both at the sampling temperature.
        """
        # No attention mask: what follows a token cannot reach it, and a mask would rule out the fast kernels.
        inputs: dict[str, Any] = {"input_ids": batch.token_ids_BT}
        counted_BT, shared = batch.loss_mask_BT, batch.shared_prompts
        if shared is None:
            predictor_K = counted_BT.flatten().nonzero()[:, 0] - 1
        else:
            predictor_K = shared.predictor_K
            inputs = {"input_ids": shared.token_ids_1N, "position_ids": shared.position_ids_1N}
            inputs["shared_prompts"] = shared
        with self._predicting(predictor_K):
            logits_KV = self.model(**inputs, use_cache=False).logits.float()
        if self._temperature != 1.0:
            logits_KV = logits_KV / self._temperature
        logprobs_KV = logits_KV.log_softmax(dim=-1)
        logprobs_K = logprobs_KV.gather(1, batch.token_ids_BT[counted_BT][:, None])[:, 0]
        zeros_BT = torch.zeros(counted_BT.shape, dtype=torch.float32, device=counted_BT.device)
        entropy_BT = zeros_BT.masked_scatter(counted_BT, _entropy(logprobs_KV.detach()))
        return zeros_BT.masked_scatter(counted_BT, logprobs_K), entropy_BT

    @contextmanager
    def _predicting(self, predictor_K: torch.Tensor) -> Iterator[None]:
        """Make the output layer see these positions, each as often as it is named."""
        self._predictor_K = predictor_K
        try:
            yield
        finally:
            self._predictor_K = None

    def _pick(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return None if self._predictor_K is None else (inputs[0].flatten(0, 1).index_select(0, self._predictor_K),)


@torch.no_grad()
def _entropy(logprobs_KV: torch.Tensor) -> torch.Tensor:
    parts = []
    for logprobs_RV in torch.split(logprobs_KV, _ENTROPY_ROWS):
        # A token ruled out has logit -inf and adds nothing.
        parts.append(-torch.where(logprobs_RV.isinf(), 0.0, logprobs_RV.exp() * logprobs_RV).sum(dim=-1))
    return torch.cat(parts) if parts else logprobs_KV.new_zeros(0)


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))


def _pretrained(source: str, dtype: torch.dtype) -> Any:
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(f"cannot load a model from {source!r}: {error}".split("\n")[0]) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"the checkpoint in {source!r} lacks {len(missing)} tensors, the first is {missing[0]}")
    return model


def _new_model(folder: Path, config: Config, dtype: torch.dtype) -> Any:
    if config.policy.new_model is None:
        raise ModelError(f"there are no weights in {str(folder)!r}, and policy.new_model does not say how to make them")
    try:
        settings = transformers.AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.policy.new_model.seed)
            return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
    except Exception as error:  # the library raises whatever its readers raise
        raise ModelError(f"policy.new_model.config: cannot make a model: {error}".split("\n")[0]) from error
