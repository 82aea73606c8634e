"""Advantages that need models or all tokens of a batch: Reinforce++ and generalised advantages.

The coordinator has every sample's reward but no model. It sends each sample's reward, minus its baseline if there is
one. The rest happens here, where the tokens and the models are. Each rank handles its own sequences, and a few sums
over the ranks normalise over the whole rollout batch. So no round trip between coordinator and trainers is needed.

Shapes: ``T`` tokens of a ragged batch in ``S`` sequences; ``K`` valid tokens of the longest response, from the last one
    backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.numeric import ROUNDING
from tandem.config import Config
from tandem.config.schema import GaeEstimator, LossFn
from tandem.config.schema.columns import ADVANTAGES, RETURNS, ColumnDeclaration, Source
from tandem.samples.batch import Float32s, SampleBatch
from tandem.trainer.losses import kl_penalty

_MIN_VARIANCE = 1e-8
"""Least variance to divide by, as in NeMo-RL. `tandem.common.numeric` says what is no spread."""

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


def token_rewards(rewards_S: Float32s, valid_T: Bools, lengths_S: NDArray[np.int32]) -> Float32s:
    """Return the reward of each sequence at its last valid token, and zero at all others."""
    rewards_T = np.zeros(len(valid_T), dtype=np.float32)
    response = _Responses(valid_T, lengths_S)
    rewards_T[response.token_C[response.back_C == 0]] = rewards_S[response.num_S > 0]
    return rewards_T


def advantages_and_returns(
    rewards_T: Float32s, values_T: Float32s, valid_T: Bools, lengths_S: NDArray[np.int32], settings: GaeEstimator
) -> tuple[Float32s, Float32s]:
    """Return the advantage and the return of each valid token, zeros elsewhere.

    The valid tokens of a sequence are its steps, without the environment's tokens between them. Let ``r_t`` be the
    reward of a step and ``V_t`` the value before it, with zero after the last step. Then ``delta_t = r_t + gamma
    V_{t+1} - V_t`` and ``A_t = sum over l of (gamma lambda)^l delta_{t+l}`` (Schulman et al. 2015, arXiv:1506.02438,
    equations 10 and 16). The return is ``A_t + V_t``. Each may have its own lambda (VAPO, Yue et al. 2025,
    arXiv:2504.05118, equations 6 and 7).
    """
    responses = _Responses(valid_T, lengths_S)
    of_policy = _policy_lambdas(responses.num_S, settings)
    of_value = settings.gae_lambda if settings.gae_lambda_value is None else settings.gae_lambda_value
    lambdas_S = np.full(len(lengths_S), of_value, dtype=np.float64)
    target_T = responses.estimate(rewards_T, values_T, settings.gae_gamma, lambdas_S)
    returns_T = np.where(valid_T, target_T + values_T, 0.0).astype(np.float32)
    same = np.array_equal(of_policy, lambdas_S)
    advantages_T = target_T if same else responses.estimate(rewards_T, values_T, settings.gae_gamma, of_policy)
    return advantages_T.astype(np.float32), returns_T


def _policy_lambdas(num_S: NDArray[np.int64], settings: GaeEstimator) -> Float64s:
    """Return each sequence's lambda for the policy's advantages. VAPO's grows with the response (equation 8)."""
    if settings.length_adaptive_alpha > 0:
        return np.asarray(1.0 - 1.0 / np.maximum(1.0, settings.length_adaptive_alpha * num_S))
    policy_lambda = settings.gae_lambda_policy
    return np.full(len(num_S), settings.gae_lambda if policy_lambda is None else policy_lambda, dtype=np.float64)


class _Responses:
    """The ``C`` valid tokens of a batch, by sequence and by the number of valid tokens after them."""

    def __init__(self, valid_T: Bools, lengths_S: NDArray[np.int32]) -> None:
        self._valid_T = valid_T
        self.token_C = np.flatnonzero(valid_T)
        self._sequence_C = np.repeat(np.arange(len(lengths_S)), lengths_S)[self.token_C]
        self.num_S = np.bincount(self._sequence_C, minlength=len(lengths_S))
        self.back_C = (np.cumsum(self.num_S) - 1)[self._sequence_C] - np.arange(len(self.token_C))

    def estimate(self, rewards_T: Float32s, values_T: Float32s, gamma: float, lambdas_S: Float64s) -> Float64s:
        """Return ``A_t`` of each valid token, zeros elsewhere, for all sequences at once from their ends."""
        rewards_KS, values_KS = self._backward(rewards_T), self._backward(values_T)
        advantages_KS = np.zeros_like(values_KS)
        next_advantage_S = next_value_S = np.zeros(len(self.num_S))
        for back in range(len(values_KS)):
            delta_S = rewards_KS[back] + gamma * next_value_S - values_KS[back]
            next_advantage_S = advantages_KS[back] = delta_S + gamma * lambdas_S * next_advantage_S
            next_value_S = values_KS[back]
        found_T = np.zeros(len(self._valid_T))
        found_T[self.token_C] = advantages_KS[self.back_C, self._sequence_C]
        return found_T

    def _backward(self, numbers_T: Float32s) -> Float64s:
        numbers_KS = np.zeros((self.num_S.max(initial=0), len(self.num_S)))
        numbers_KS[self.back_C, self._sequence_C] = numbers_T[self.token_C]
        return numbers_KS


class ScoredShard(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The policy's shard of a rollout batch, with the models' scores of its tokens."""

    batch: SampleBatch
    scores: Mapping[Source, Float32s]
    """Score of each token, by the model that gives it, without sampling masks; zero for tokens that are not valid."""
    columns: Mapping[ColumnDeclaration, NDArray[Any]] = {}
    """All columns of models' scores."""
    sum_over_ranks: SumOverRanks
    """Adds a float64 tensor over the ranks."""


class EstimatedAdvantages(NamedTuple):
    """The result of an advantage estimator."""

    columns: dict[ColumnDeclaration, Float32s]
    """Columns for each token: advantages, and others that the trainers are the source of."""
    metrics: dict[str, float]
    """Metrics of the whole batch, equal on every rank."""


class AdvantageEstimator(Protocol):
    """The last stage of an advantage estimator, named by an algorithm's declaration."""

    def __call__(self, config: Config, scored: ScoredShard) -> EstimatedAdvantages:
        """Return the loss inputs. Collective."""
        ...


def reinforce_plus_plus(config: Config, scored: ScoredShard) -> EstimatedAdvantages:
    """Normalise over the tokens of the batch, after subtracting the divergence from each token's advantage."""
    settings = config.loss_fn
    advantages_T = np.asarray(scored.batch.of_tokens(ADVANTAGES.name), dtype=np.float32)
    if settings.use_kl_in_reward:
        advantages_T = minus_kl(advantages_T, scored.scores["policy"], scored.scores["reference"], settings)
    advantages_T = whitened(advantages_T, scored.batch.valid(), scored.sum_over_ranks)
    if (bounds := config.grpo.advantage_bounds) is not None:
        advantages_T = np.clip(advantages_T, *bounds)
    return EstimatedAdvantages({ADVANTAGES: advantages_T}, {})


def compare_with_teacher(config: Config, scored: ScoredShard) -> EstimatedAdvantages:
    """Return as advantages each token's log-probability under its teacher, minus that under the policy.

    Their mean over samples of the policy is minus the reverse divergence between the two, and the same holds for the
    gradients (Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation). No reward is read.
    """
    valid_T = scored.batch.valid()
    apart_T = scored.scores["teacher"] - scored.scores["policy"]
    advantages_T = np.where(valid_T, apart_T, np.float32(0.0)).astype(np.float32)
    advantages = advantages_T.astype(np.float64)
    count, total = scored.sum_over_ranks(
        torch.tensor([int(valid_T.sum()), advantages.sum()], dtype=torch.float64)
    ).tolist()
    return EstimatedAdvantages({ADVANTAGES: advantages_T}, {"teacher_kl": -total / max(1.0, count)})


def generalised(config: Config, scored: ScoredShard) -> EstimatedAdvantages:
    """Estimate advantages and returns from rewards and the values of tokens, by `tandem.trainer.advantages`.

    A sequence's reward belongs to its last valid token. ``use_kl_in_reward`` subtracts the divergence at each token
    from its reward.
    """
    batch, settings, estimator = scored.batch, config.loss_fn, config.ppo.adv_estimator
    valid_T, values_T = batch.valid(), scored.scores["value"]
    rewards_T = token_rewards(batch.rewards_S, valid_T, batch.lengths_S)
    if settings.use_kl_in_reward:
        rewards_T = minus_kl(rewards_T, scored.scores["policy"], scored.scores["reference"], settings)
    advantages_T, returns_T = advantages_and_returns(rewards_T, values_T, valid_T, batch.lengths_S, estimator)
    explained = explained_variance(values_T[valid_T], returns_T[valid_T], scored.sum_over_ranks)
    if estimator.normalize_advantages:
        advantages_T = np.where(valid_T, whitened(advantages_T, valid_T, scored.sum_over_ranks), np.float32(0.0))
    return EstimatedAdvantages({ADVANTAGES: advantages_T, RETURNS: returns_T}, {"value/explained_variance": explained})


def explained_variance(values_C: Float32s, returns_C: Float32s, sum_over_ranks: SumOverRanks) -> float:
    """Return 1 - Var(return - value) / Var(return) over the valid tokens of all ranks; 0 if returns are equal."""
    returns, errors = returns_C.astype(np.float64), returns_C.astype(np.float64) - values_C
    sums = [len(returns), returns.sum(), np.square(returns).sum(), errors.sum(), np.square(errors).sum()]
    count, *totals = sum_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
    mean, square, error, squared_error = (total / max(1.0, count) for total in totals)
    variance = square - mean**2
    return 1.0 - (squared_error - error**2) / variance if variance > ROUNDING**2 * square else 0.0


def minus_kl(advantages_T: Float32s, previous_T: Float32s, reference_T: Float32s, settings: LossFn) -> Float32s:
    """Return A_t - beta KL_t, with the divergence at each token estimated under the policy before training.

    This is Reinforce++ (Hu et al. 2025, arXiv:2501.03262, section 3), but each token has only its own penalty, as in
    NeMo-RL. The paper adds the penalties of the tokens after it. `settings` has beta, the estimator and its clamps.
    """
    kl = kl_penalty(torch.from_numpy(previous_T), torch.from_numpy(reference_T), settings).numpy()
    return np.asarray(advantages_T - np.float32(settings.reference_policy_kl_penalty) * kl, dtype=np.float32)


def whitened(advantages_T: Float32s, valid_T: NDArray[np.bool_], sum_over_ranks: SumOverRanks) -> Float32s:
    """Return (A_t - mean) / deviation, both over all valid tokens of the batch (arXiv:2501.03262, section 3).

    Zero if the advantages are equal but for rounding.

    Args:
        advantages_T: advantages of this rank's tokens.
        valid_T: True for valid tokens. Over all ranks, every valid token of the batch is there once.
        sum_over_ranks: adds a float64 tensor over the ranks.
    """
    valid_advantages = advantages_T[valid_T].astype(np.float64)
    sums = [len(valid_advantages), valid_advantages.sum(), np.square(valid_advantages).sum()]
    count, total, square = sum_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
    mean = total / max(1.0, count)
    (squares,) = sum_over_ranks(torch.tensor([np.square(valid_advantages - mean).sum()], dtype=torch.float64)).tolist()
    if squares <= ROUNDING**2 * square:
        return np.zeros_like(advantages_T)
    deviation = np.sqrt(max(squares / count, _MIN_VARIANCE))
    return np.asarray((advantages_T - mean) / deviation, dtype=np.float32)
