"""PPO: rollouts with a value model beside the policy."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta

from tandem.config.schema.base import ConfigSection, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from tandem.config.schema.grpo import AsyncGrpo, RolloutsConfig
from tandem.config.schema.policy import ModelConfig

Discount = Annotated[float, Meta(ge=0, le=1)]


class GaeEstimator(ConfigSection, frozen=True, kw_only=True):
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438), over the tokens of a response."""

    name: Literal["gae"] = "gae"
    """The estimator."""
    gae_gamma: Discount = 1.0
    """Discount gamma of each token's reward."""
    gae_lambda: Discount = 0.95
    """The estimator's lambda: 0 looks one token ahead, 1 to the end of the response."""
    gae_lambda_value: Discount | None = None
    """Lambda of the returns that the value model learns; null means `gae_lambda` (decoupled GAE: VAPO, Yue et al.
    2025, arXiv:2504.05118, section 4.1)."""
    gae_lambda_policy: Discount | None = None
    """Lambda of the policy's advantages; null means `gae_lambda`, or the result of `length_adaptive_alpha`."""
    length_adaptive_alpha: NonNegativeFloat = 0.0
    """Lambda of the policy's advantages becomes 1 - 1 / (this times the tokens of the response); 0 disables it
    (VAPO, arXiv:2504.05118, section 4.2)."""
    normalize_advantages: bool = True
    """Normalise the advantages of a rollout batch's tokens to mean 0 and variance 1."""


class AsyncPpo(AsyncGrpo, frozen=True, kw_only=True):
    """The same as `grpo.async_grpo`, for PPO: the value model scores old samples with its newest weights."""

    warmup_max_trajectory_age_steps: PositiveInt | None = None
    """Accepted: how far ahead NeMo-RL generates while `policy_training_start_step` keeps the policy as it is. Here
    `max_trajectory_age_steps` always decides."""
    warmup_generation_lead_steps: PositiveInt | None = None
    """Accepted: an earlier name of `warmup_max_trajectory_age_steps`."""
    drop_incomplete_targets_on_restore: bool = False
    """Accepted: whether a resumed run of NeMo-RL discards groups of steps that are not complete. Here it generates
    what its rollout log lacks."""


class PpoConfig(RolloutsConfig, frozen=True, kw_only=True):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) with a value model (section `value`)."""

    ppo_epochs: PositiveInt = 4
    """Passes over each rollout batch."""
    policy_training_start_step: NonNegativeInt = 0
    """Initial steps in which only the value model is trained (VC-PPO, Yuan et al. 2025, arXiv:2503.01491)."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Whether to skip the reference model's log-probabilities. They are computed only if the loss reads them; true
    is refused if it does (`loss_fn.reference_policy_kl_penalty` above 0)."""
    adv_estimator: GaeEstimator = GaeEstimator()
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Same as `grpo.seq_logprob_error_threshold`. Excluded sequences teach the value model nothing either, which must
    not have processes of its own."""
    async_ppo: AsyncPpo = AsyncPpo()

    @cached_property
    def asynchronous(self) -> AsyncPpo:
        """Settings of asynchronous generation."""
        return self.async_ppo

    @cached_property
    def largest_logprob_error(self) -> float | None:
        """Multiplicative error above which a sequence is excluded from both losses."""
        return self.seq_logprob_error_threshold

    @cached_property
    def num_passes(self) -> int:
        """Passes of a step over its rollout batch."""
        return self.ppo_epochs

    @cached_property
    def num_steps_without_policy(self) -> int:
        """Initial steps that do not train the policy."""
        return self.policy_training_start_step


class ValueConfig(ModelConfig, frozen=True, kw_only=True):
    """The value model of PPO: a language model with a head that gives one number per token, the expected return of
    the rest of the response. It has the keys of `policy`, except those of generation."""


class ValueLossFn(ConfigSection, frozen=True, kw_only=True):
    """The value model's loss: half the squared distance to the return. If it is larger, the same distance of the
    value clipped to within `cliprange` of its former value is used (Schulman et al. 2017)."""

    scale: PositiveFloat = 1.0
    """Factor of the loss."""
    cliprange: PositiveFloat | None = 0.2
    """Largest change of a value from its former value that the loss sees; null disables clipping."""
