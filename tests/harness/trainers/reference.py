"""Plain Hugging Face loops, which know nothing of ranks, micro-batches or padding, and what backends are compared in.

Any backend, however its ranks share the work, must come to the numbers of `plain_numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tandem.config import Config
from tandem.config.models.hf_config import find_model_class
from tandem.samples.batch import SampleBatch
from tandem.trainer.backend import TrainerBackend
from tests.harness.trainers.masks_harness import kept_in
from tests.harness.trainers.trainer_harness import (
    ADAMW,
    run_ranks,
    said_by,
    share_of,
    train_on,
)

TOLERANCE = 1e-6


def trained_weights(folder: Path, name: str = "policy") -> dict[str, torch.Tensor]:
    kind = find_model_class(transformers.AutoConfig.from_pretrained(folder / name))
    model = kind.from_pretrained(folder / name)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sequences_of(batch: SampleBatch) -> list[dict[str, torch.Tensor]]:
    """The batch's arrays, a dict a sequence."""
    ends = np.cumsum(batch.lengths_S)
    return [
        {
            "token_ids": torch.from_numpy(batch.token_ids_T[end - length : end].astype(np.int64)),
            "mask": torch.from_numpy(batch.loss_mask_T[end - length : end])[1:],
            "generation": torch.from_numpy(batch.generation_logprobs_T[end - length : end])[1:],
            "advantage": torch.tensor(batch.advantages_S[row]),
            "reward": torch.tensor(batch.rewards_S[row]),
        }
        for row, (length, end) in enumerate(zip(batch.lengths_S, ends, strict=True))
    ]


def logprobs_of(
    model: Any, token_ids: torch.Tensor, temperature: float = 1.0, is_kept_TV: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities of tokens 1 to the last of one unpadded sequence, among the tokens kept for each."""
    logits_TV = model(input_ids=token_ids[None]).logits[0, :-1].float() / temperature
    if is_kept_TV is not None:
        logits_TV = logits_TV.masked_fill(~is_kept_TV[1:], -torch.inf)
    return logits_TV.log_softmax(dim=-1).gather(1, token_ids[1:, None])[:, 0]


def adamw(model: Any, *, decays_vectors: bool = True) -> torch.optim.Optimizer:
    """The optimizer of all parameters; `decays_vectors` as `plain_grpo` has it."""
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors} | ({} if decays_vectors else {"weight_decay": 0.0})]
    return torch.optim.AdamW(groups, **ADAMW)


def plain_grpo(
    model: Any,
    batches: Sequence[SampleBatch],
    *,
    size: int,
    temperature: float = 1.0,
    kl: float = 0.0,
    decays_vectors: bool = True,
    num_passes: int = 1,
) -> list[tuple[float, float]]:
    """Token-level GRPO with a k3 penalty, clipped at 0.2: the loss and gradient norm of each optimizer step.

    It goes over each batch `num_passes` times, with ratios to the policy before the first.
    `decays_vectors`: whether norms and biases have weight decay too, which Megatron-Core leaves out.
    """
    reference = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = adamw(model, decays_vectors=decays_vectors)
    history = []
    for batch in batches:
        samples, kept = sequences_of(batch), kept_in(batch, model.config.get_text_config().vocab_size)
        with torch.no_grad():
            previous = [
                logprobs_of(model, sample["token_ids"], temperature, its_TV)
                for sample, its_TV in zip(samples, kept, strict=True)
            ]
            now = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            model.load_state_dict(reference, strict=False)
            references = [logprobs_of(model, sample["token_ids"], temperature) for sample in samples]
            model.load_state_dict(now, strict=False)
        for first in [*range(0, len(samples), size)] * num_passes:
            chosen = range(first, first + size)
            num_tokens = sum(int(samples[i]["mask"].sum()) for i in chosen)
            total = torch.zeros(())
            for i in chosen:
                logprobs = logprobs_of(model, samples[i]["token_ids"], temperature, kept[i])
                ratio = (logprobs - previous[i]).exp()
                advantage = samples[i]["advantage"]
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                whole = logprobs_of(model, samples[i]["token_ids"], temperature) if kept[i] is not None else logprobs
                difference = references[i] - whole
                weight = (whole - whole.detach()).exp()  # its gradient is that of where samples are drawn
                loss = loss + kl * weight * (difference.exp() - 1 - difference)
                total = total + loss[samples[i]["mask"]].sum() / num_tokens
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append((total.item(), norm.item()))
    return history


def assert_same_steps(
    found: Sequence[dict[str, float]], expected: Sequence[tuple[float, float]], tolerance: float = TOLERANCE
) -> None:
    """Compare the metrics of batches with what `plain_grpo` found of as many optimizer steps each."""
    num_steps, rest = divmod(len(expected), len(found))
    assert rest == 0
    for index, metrics in enumerate(found):
        losses, norms = zip(*expected[num_steps * index : num_steps * (index + 1)], strict=True)
        assert metrics["loss"] == pytest.approx(np.mean(losses), abs=tolerance)
        assert metrics["grad_norm"] == pytest.approx(np.mean(norms), rel=tolerance)


def assert_same_weights(found: dict[str, torch.Tensor], model: Any, tolerance: float = TOLERANCE) -> None:
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name].detach(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


class Numbers(NamedTuple):
    """What training on some batches comes to."""

    logprobs_T: NDArray[np.float32]
    """Of the counted tokens of the first batch, before training; zero elsewhere."""
    steps: list[tuple[float, float]]
    """Loss and gradient norm of each optimizer step."""
    weights: dict[str, torch.Tensor]
    """After the last step, by the names of transformers."""


def plain_numbers(
    source: Any,
    batches: Sequence[SampleBatch],
    *,
    temperature: float,
    kl: float,
    decays_vectors: bool = True,
) -> Numbers:
    """Train a model, or the one in a folder, in this process, one optimizer step a batch."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source) if isinstance(source, Path) else source
    values = []
    with torch.no_grad():
        kept = kept_in(batches[0], model.config.get_text_config().vocab_size)
        for sample, its_TV in zip(sequences_of(batches[0]), kept, strict=True):
            logprobs = logprobs_of(model, sample["token_ids"], temperature, its_TV).where(sample["mask"], 0.0)
            values += [np.zeros(1, dtype=np.float32), logprobs.numpy()]
    size = len(batches[0].lengths_S)
    steps = plain_grpo(model, batches, size=size, temperature=temperature, kl=kl, decays_vectors=decays_vectors)
    return Numbers(np.concatenate(values), steps, {name: p.detach() for name, p in model.named_parameters()})


def numbers_of(
    world_size: int,
    make: Callable[[Config], TrainerBackend],
    config: Config,
    batches: Sequence[SampleBatch],
    folder: Path,
) -> Numbers:
    """Train a backend on ranks of their own, one optimizer step a batch; the policy is saved to `folder`."""
    return gathered_numbers(run_ranks(world_size, train_one_rank, make, config, batches, folder), folder)


def gathered_numbers(ranks: Sequence[tuple[int, NDArray[np.float32], list[dict[str, float]]]], folder: Path) -> Numbers:
    """Put together what ranks found, whose policy is saved in `folder`."""
    assert all(metrics == ranks[0][2] for _, _, metrics in ranks), "every rank reports the same"
    shares: dict[int, NDArray[np.float32]] = {}
    for replica, logprobs_T, _ in ranks:
        other_T = shares.setdefault(replica, logprobs_T)
        assert np.array_equal(other_T, logprobs_T), "ranks of a replica have the same log-probabilities"
    steps = [(metrics["loss"], metrics["grad_norm"]) for metrics in ranks[0][2]]
    return Numbers(np.sum(list(shares.values()), axis=0), steps, trained_weights(folder))


def assert_same_numbers(found: Numbers, expected: Numbers, tolerance: float) -> None:
    """Compare log-probabilities, losses and weights absolutely, gradient norms relatively."""
    np.testing.assert_allclose(found.logprobs_T, expected.logprobs_T, rtol=0, atol=tolerance)
    for (loss, norm), (expected_loss, expected_norm) in zip(found.steps, expected.steps, strict=True):
        assert loss == pytest.approx(expected_loss, abs=tolerance)
        assert norm == pytest.approx(expected_norm, rel=tolerance)
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def train_one_rank(
    rank: int, make: Callable[[Config], TrainerBackend], config: Config, batches: Sequence[SampleBatch], folder: Path
) -> tuple[int, NDArray[np.float32], list[dict[str, float]]]:
    backend = make(config)
    table, _ = share_of(backend, batches[0], config)
    own_T = said_by(backend, batches[0], config, "policy")
    logprobs_T = np.zeros(len(batches[0].token_ids_T), dtype=np.float32)
    is_own_S = table.rank_S == backend.data_parallel_rank
    logprobs_T[np.repeat(is_own_S, table.lengths_S)] = own_T
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    return backend.data_parallel_rank, logprobs_T, metrics
