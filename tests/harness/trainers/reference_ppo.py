"""A plain PPO loop of Hugging Face models, which knows nothing of ranks, micro-batches or padding.

Its advantages are sums over all the tokens that follow, as the papers write them, with no recursion.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tandem.samples.batch import SampleBatch
from tests.harness.trainers.reference import logprobs_of, sequences_of
from tests.harness.trainers.trainer_harness import ADAMW

# Megatron-Core does not decay vectors, torch does.
OPTIMIZER = ADAMW | {"weight_decay": 0.0}
GAMMA, LAMBDA = 0.9, 0.8
CLIP, VALUE_CLIP, SCALE = 0.2, 0.05, 0.4


class PlainPpo(NamedTuple):
    """What training on some batches comes to: losses and gradient norms of each optimizer step, and the models."""

    policy_steps: list[tuple[float, float]]
    value_steps: list[tuple[float, float]]
    policy: Any
    value: Any


def plain_models(folder: Path) -> tuple[Any, Any]:
    """Return the language model of a folder, and a value model with its layers and a head of zeros."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    value = transformers.AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).eval()
    with torch.no_grad():
        value.score.weight.zero_()
        value.score.bias.zero_()
    return policy, value


def values_of(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Values of tokens 1 to the last of one unpadded sequence: of the states that they were made in."""
    logits: torch.Tensor = model(input_ids=token_ids[None]).logits
    return logits[0, :-1, 0]


def advantages_of(rewards: torch.Tensor, values: torch.Tensor, discount: float = LAMBDA) -> torch.Tensor:
    """Generalised advantages of one response, by the sum of equation 16 of Schulman et al. 2015."""
    after = torch.cat([values[1:], torch.zeros(1)])
    deltas = rewards + GAMMA * after - values
    steps = range(len(deltas))
    return torch.stack(
        [sum(((GAMMA * discount) ** (k - t) * deltas[k] for k in steps[t:]), torch.zeros(())) for t in steps]
    )


def plain_ppo(
    folder: Path,
    batches: Sequence[SampleBatch],
    *,
    size: int,
    epochs: int,
    kl: float = 0.0,
    skipped: int = 0,
    policy: Any = None,
) -> PlainPpo:
    """PPO clipped at 0.2, k1 divergences in the rewards; the policy sits the first `skipped` batches out.

    `policy`: another than the model in the folder. The reference is a copy of the policy before any training.
    """
    own, value = plain_models(folder)
    policy = own if policy is None else policy
    reference = copy.deepcopy(policy)
    optimizers = {model: torch.optim.AdamW(model.parameters(), **OPTIMIZER) for model in (policy, value)}
    steps: dict[Any, list[tuple[float, float]]] = {policy: [], value: []}

    def optimized(model: Any, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers[model].step()
        optimizers[model].zero_grad()
        steps[model].append((loss.item(), norm.item()))

    for number, batch in enumerate(batches):
        samples = sequences_of(batch)
        with torch.no_grad():
            for sample in samples:
                ids, mask = sample["token_ids"], sample["mask"]
                sample["old_values"] = values_of(value, ids)[mask]
                sample["old"] = logprobs_of(policy, ids)[mask]
                rewards = -kl * (sample["old"] - logprobs_of(reference, ids)[mask])
                rewards[-1] += sample["reward"]
                sample["advantages"] = advantages_of(rewards, sample["old_values"])
                sample["returns"] = sample["advantages"] + sample["old_values"]
        everything = torch.cat([sample["advantages"] for sample in samples])
        for sample in samples:
            sample["advantages"] = (sample["advantages"] - everything.mean()) / everything.std(correction=0)
        for _ in range(epochs):
            global_batches = [samples[first : first + size] for first in range(0, len(samples), size)]
            for chosen in global_batches:
                total = torch.zeros(())
                for sample in chosen:
                    values = values_of(value, sample["token_ids"])[sample["mask"]]
                    within = sample["old_values"] + (values - sample["old_values"]).clamp(-VALUE_CLIP, VALUE_CLIP)
                    worse = torch.maximum((values - sample["returns"]) ** 2, (within - sample["returns"]) ** 2)
                    total = total + 0.5 * SCALE * worse.sum() / sum(int(each["mask"].sum()) for each in chosen)
                optimized(value, total)
            for chosen in global_batches if number >= skipped else []:
                total = torch.zeros(())
                for sample in chosen:
                    ratio = (logprobs_of(policy, sample["token_ids"])[sample["mask"]] - sample["old"]).exp()
                    gain = torch.minimum(
                        ratio * sample["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * sample["advantages"]
                    )
                    total = total - gain.sum() / sum(int(each["mask"].sum()) for each in chosen)
                optimized(policy, total)
    return PlainPpo(steps[policy], steps[value], policy, value)
