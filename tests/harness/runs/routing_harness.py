"""Batches that say where their tokens went, and a plain model that sends them there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tandem.common.messages import SamplingParameters
from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.samples.batch import SampleBatch
from tandem.samples.routed_experts import COLUMN, RoutedExperts
from tests.harness.trainers.trainer_harness import make_model

EXPERTS = RoutedExperts(num_layers=2, num_experts=4, top_k=2)
"""Those of the tiny model."""
SHARP = RoutedExperts(num_layers=4, num_experts=16, top_k=2)
"""Those of `make_sharp_model`."""
REPLAY: dict[str, Any] = {"router_replay": {"enabled": True}}

Given = dict[bytes, NDArray[np.int16]]
"""Of each sequence, by its tokens, where they went: ``[T, L, K]``."""


def routed(batch: SampleBatch, *, seed: int = 0, num_alike: int = 0, experts: RoutedExperts = EXPERTS) -> SampleBatch:
    """Return a batch whose tokens went anywhere.

    The last of each sequence went to nobody knows where. The first `num_alike` tokens of all sequences went to the same
    experts: those of a prompt may be computed once.
    """
    random = np.random.default_rng(seed)
    size = len(batch.token_ids_T), experts.num_layers, experts.num_experts
    experts_TLK = np.argsort(random.random(size), axis=2)[:, :, : experts.top_k].astype(np.int16)
    ends_S = np.cumsum(batch.lengths_S)
    for end, length in zip(ends_S, batch.lengths_S, strict=True):
        alike = min(num_alike, length)
        experts_TLK[end - length : end - length + alike] = experts_TLK[:alike]
    experts_TLK[ends_S - 1] = -1
    return batch.replace(**{COLUMN: experts.encode(experts_TLK)})


def make_sharp_model(folder: Path, scale: float = 2.0) -> Path:
    """Write a model of 16 experts a layer which say so much that it matters which of them a token sees."""
    make_model(folder, "qwen3_moe", norm_topk_prob=True, num_experts=SHARP.num_experts, num_hidden_layers=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "lm_head" in name:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return folder


def given_of(batches: Iterable[SampleBatch], experts: RoutedExperts = EXPERTS) -> Given:
    given = {}
    for batch in batches:
        experts_TLK = experts.decode(batch.columns[COLUMN])
        for end, length in zip(np.cumsum(batch.lengths_S), batch.lengths_S, strict=True):
            given[batch.token_ids_T[end - length : end].astype(np.int64).tobytes()] = experts_TLK[end - length : end]
    return given


def plain_model(folder: Path, given: Given) -> Any:
    """Return the model in a folder, whose gates come of its scores of the experts given, and of no others (R3)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    now: list[NDArray[np.int16]] = []

    def look_up(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        now[:] = [given[kwargs["input_ids"].numpy().tobytes()]]

    def route(layer: int, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_NV = hidden.flatten(0, -2) @ router.weight.T
        experts_NK = torch.from_numpy(now[0][:, layer].astype(np.int64))
        experts_NK = torch.where(experts_NK < 0, logits_NV.topk(router.top_k).indices, experts_NK)
        return logits_NV, _gates(model.config, logits_NV, experts_NK), experts_NK

    model.register_forward_pre_hook(look_up, with_kwargs=True)
    for layer, block in enumerate(model.model.layers):
        router = getattr(block.mlp, "gate", None)
        if router is None:  # a dense layer
            continue
        router.forward = lambda hidden, layer=layer, router=router: route(layer, router, hidden)
    return model


def _gates(config: Any, logits_NV: torch.Tensor, experts_NK: torch.Tensor) -> torch.Tensor:
    """Return the gates of these experts; with a softmax it masks the others, as the paper's equation 8 does."""
    if config.model_type == "deepseek_v3":
        scores_NK = logits_NV.sigmoid().gather(1, experts_NK)
        return scores_NK / scores_NK.sum(dim=1, keepdim=True) * config.routed_scaling_factor
    assert config.model_type == "qwen3_moe"
    if config.norm_topk_prob:
        is_given_NV = torch.zeros_like(logits_NV, dtype=torch.bool).scatter(1, experts_NK, value=True)
        logits_NV = logits_NV.masked_fill(~is_given_NV, -torch.inf)
    return logits_NV.softmax(dim=-1).gather(1, experts_NK)


def generated(
    folder: Path,
    *,
    dtype: str = "float32",
    num_samples: int = 8,
    num_tokens: int = 16,
    experts: RoutedExperts = EXPERTS,
) -> SampleBatch:
    """Return samples that the embedded engine has made with the weights in a folder, two of each prompt."""
    engine = TransformersEngine(
        folder, num_slots=4, max_total_sequence_length=64, dtype=dtype, with_weights=True, experts=experts
    )
    sampling = SamplingParameters(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=num_tokens, stop_token_ids=(), stop_strings=()
    )
    prompts = [tuple(range(3, 8 + sample // 2 % 4)) for sample in range(num_samples)]
    for sample, prompt in enumerate(prompts):
        engine.add_request(SequenceRequest(request_id=sample, prompt_ids=prompt, sampling=sampling, seed=sample))
    found = []
    while engine.num_unfinished:
        found += engine.step()
    engine.close()
    found.sort(key=lambda completion: completion.request_id)
    token_ids, masks, logprobs, columns = [], [], [], []
    for prompt, completion in zip(prompts, found, strict=True):
        assert completion.routed_experts_TX is not None
        before = np.zeros(len(prompt))
        token_ids.append(np.concatenate([np.array(prompt), completion.token_ids_T]))
        masks.append(np.arange(len(token_ids[-1])) >= len(prompt))
        logprobs.append(np.concatenate([before, completion.logprobs_T]))
        columns.append(experts.of_sequence([completion.routed_experts_TX], len(token_ids[-1])))
    random = np.random.default_rng(0)
    return SampleBatch(
        lengths_S=np.array([len(tokens) for tokens in token_ids], dtype=np.int32),
        token_ids_T=np.concatenate(token_ids).astype(np.int32),
        loss_mask_T=np.concatenate(masks),
        generation_logprobs_T=np.concatenate(logprobs).astype(np.float32),
        advantages_S=random.normal(0.0, 1.0, num_samples).astype(np.float32),
        rewards_S=np.zeros(num_samples, dtype=np.float32),
        **{COLUMN: np.concatenate(columns)},
    )
