"""GRPO, PPO and related algorithms: prompt groups, rewards and advantages."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta

from tandem.config.schema.base import (
    ConfigSection,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
)
from tandem.config.schema.policy import ModelConfig

ScaleRewards = Literal["group", "batch", "none"]
"""Samples over whose rewards the standard deviation is taken that divides an advantage."""
Discount = Annotated[float, Meta(ge=0, le=1)]


class AdvEstimator(ConfigSection, frozen=True, kw_only=True):
    """The estimator that turns rewards into advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = "grpo"
    """grpo: each reward minus the baseline of its group (Shao et al. 2024, arXiv:2402.03300). gdpo: the same for
    each component of the reward, weighted, added and normalised over the batch (Liu et al. 2026, arXiv:2601.05242);
    the environment provides the components. reinforce_plus_plus: the reward minus the mean of its group, normalised
    over all tokens of the batch (Hu et al. 2025, arXiv:2501.03262). opd: the advantages of `on_policy_distillation`."""
    normalize_rewards: bool = True
    """Same as `grpo.normalize_rewards`; not for reinforce_plus_plus."""
    scale_rewards: ScaleRewards | None = None
    """New. Same as `grpo.scale_rewards`; batch only for grpo, the others for grpo and gdpo."""
    use_leave_one_out_baseline: bool = True
    """Same as `grpo.use_leave_one_out_baseline`; not for reinforce_plus_plus."""
    minus_baseline: bool = True
    """For reinforce_plus_plus: subtract the mean reward of the group."""
    reward_weights: tuple[float, ...] | None = None
    """For gdpo: weights of the components, in the alphabetical order of their names; null means 1 each."""


class RewardShaping(ConfigSection, frozen=True, kw_only=True):
    """Rewards that depend on the length of the response, after `grpo.reward_scaling`."""

    enabled: bool = False
    """Whether to shape rewards."""
    overlong_buffer_length: PositiveInt | None = None
    """Tokens before `max_response_length` over which the penalty grows from zero."""
    overlong_buffer_penalty: NonNegativeFloat | None = None
    """Penalty of a response of `max_response_length` tokens or more (soft overlong punishment, DAPO, Yu et al. 2025,
    arXiv:2503.14476, equation 13)."""
    max_response_length: PositiveInt | None = None
    """Longest intended response, in tokens."""
    stop_properly_penalty_coef: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Factor of the reward of each response cut off at a token limit; there is no length penalty then."""


class RewardScaling(ConfigSection, frozen=True, kw_only=True):
    """A linear map of rewards from one interval to another; rewards outside the first are clamped to it."""

    enabled: bool = False
    """Whether to scale rewards."""
    source_min: float = 0.0
    """The reward that becomes `target_min`."""
    source_max: float = 1.0
    """The reward that becomes `target_max`."""
    target_min: float = 0.0
    """The lowest reward afterwards, or the highest if it is above `target_max`."""
    target_max: float = 1.0
    """The reward at the other end."""


class AsyncGrpo(ConfigSection, frozen=True, kw_only=True):
    """Generation for later steps while a step trains, with slightly older weights."""

    enabled: bool = False
    """false: training and generation wait for each other. true: needs engines on devices of their own
    (`policy.generation.colocated.enabled: false`); on a CPU both may share cores."""
    max_trajectory_age_steps: PositiveInt = 1
    """Most training steps between the weights that began a sample and those that are trained on it. Engines generate
    as many steps ahead."""
    max_generation_failures: NonNegativeInt = 0
    """Accepted: failures of NeMo-RL's generation workers that end the run. Here `cluster.max_replacements` decides."""
    in_flight_weight_updates: bool = False
    """true: engines take new weights between two tokens, and their requests go on; every token carries the version
    that generated it. false: an engine finishes its current requests before it takes new weights."""
    recompute_kv_cache_after_weight_updates: bool = False
    """With `in_flight_weight_updates`: running requests recompute the keys and values of all their tokens with the
    new weights. Otherwise they keep the old ones."""


class RolloutsConfig(ConfigSection, frozen=True, kw_only=True):
    """Settings of all algorithms that roll out: amount of generation, reward shaping, validation."""

    num_prompts_per_step: PositiveInt = 32
    """Prompt groups in one rollout batch."""
    num_generations_per_prompt: PositiveInt = 16
    """Samples per prompt: the size of a group."""
    max_rollout_turns: PositiveInt = 1
    """Most responses in a rollout: after each but the last, the environment may reply and the policy continue."""
    max_num_epochs: PositiveInt | None = None
    """Passes over the training problems; the run ends at this or at `max_num_steps`, whichever comes first. Null
    means no limit."""
    max_num_steps: NonNegativeInt = 1_000_000
    """Rollout batches to train on before the run ends; 0 only validates the model."""
    overlong_filtering: bool = False
    """Exclude samples cut off at a token limit from the loss, but not from their group's baseline (DAPO,
    arXiv:2503.14476, section 3.4)."""
    set_aside_outliers: bool = False
    """New. Exclude groups whose advantage, loss or gradient is out of all proportion to its neighbours from the loss:
    100 times the usual advantage of the step, or the usual loss or gradient norm of the last optimizer steps. The run
    names such samples in any case."""
    reward_scaling: RewardScaling = RewardScaling()
    reward_shaping: RewardShaping = RewardShaping()
    use_dynamic_sampling: bool = False
    """Discard groups with equal rewards, which teach nothing, and generate more until
    `num_prompts_per_step` others exist (DAPO, arXiv:2503.14476, section 3.2)."""
    batch_multiplier: Annotated[float, Meta(ge=1)] = 1.0
    """With `use_dynamic_sampling`: generate for this multiple of `num_prompts_per_step` at once; otherwise without
    effect."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """With `use_dynamic_sampling`: most such batches per step before the run ends with an error."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 and -1 mean never."""
    val_start_at: NonNegativeInt = 0
    """First step that `val_period` makes validate; 0 and -1 mean no delay. `val_at_start` and `val_at_end` are
    independent of it."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, regardless of `val_period`."""
    max_val_samples: PositiveInt = 256
    """Validation problems used each time, from the front of the validation set; null means all."""
    val_batch_size: PositiveInt = 256
    """Accepted: validation problems that NeMo-RL generates for at once; null means the default. Here engines take them
    as they have room."""
    num_val_generations_per_prompt: PositiveInt = 1
    """Samples per validation problem; metrics cover all of them."""
    val_num_generations_per_prompt: PositiveInt | None = None
    """NeMo-RL 0.8's name of `num_val_generations_per_prompt`. If that is above 1, validation also measures
    `val_pass_k`: the share of problems that any of these samples solves."""
    stop_at_validation_metric: NonEmptyStr | None = None
    """Metric of validation, such as accuracy or pass_k, that ends the run when it reaches
    `stop_at_validation_threshold`; null means that none does. The run saves a checkpoint and has then finished."""
    stop_at_validation_threshold: float | None = None
    """Value of that metric, or a higher one, at which the run ends."""
    val_temperature: NonNegativeFloat | None = None
    """New. Like `policy.generation.temperature`, for validation; 0 takes the likeliest token each time. Null means
    the same as in training."""
    val_seed: Seed | None = None
    """New. Seed of the validation samples only; null means the `seed` beside it."""
    calculate_advantages_on_gpu: bool = False
    """Accepted: where NeMo-RL computes advantages. Here the coordinator does, or the trainers on their devices."""
    seed: Seed = 42
    """Seed of the problems, their order and every sample."""

    @cached_property
    def asynchronous(self) -> AsyncGrpo:
        """Settings of asynchronous generation; disabled for an algorithm without a section for it."""
        return AsyncGrpo()

    @cached_property
    def group_estimator(self) -> AdvEstimator | None:
        """Estimator that turns a group's rewards into advantages, if the samples of a prompt are compared."""
        return None

    @cached_property
    def advantage_bounds(self) -> tuple[float | None, float | None] | None:
        """Lower and upper bound of advantages, if there are any."""
        return None

    @cached_property
    def largest_logprob_error(self) -> float | None:
        """Multiplicative error above which a sequence is excluded from the loss, if there is a limit."""
        return None

    @cached_property
    def leaves_out_equal_rewards(self) -> bool:
        """Whether groups with equal rewards are excluded from the loss, without others in their place."""
        return False

    @cached_property
    def streams_groups(self) -> bool:
        """Whether trainers begin a step with the groups that are there."""
        return False

    @cached_property
    def num_passes(self) -> int:
        """Passes of a step over its rollout batch."""
        return 1

    @cached_property
    def num_steps_without_policy(self) -> int:
        """Initial steps that do not train the policy."""
        return 0

    @cached_property
    def num_prompts_per_batch(self) -> int:
        """Prompt groups generated at once."""
        return round(self.num_prompts_per_step * (self.batch_multiplier if self.use_dynamic_sampling else 1))


PENALTIES = ("invalid_tool_call_advantage", "malformed_thinking_advantage")
"""Keys of the advantages of turns with a flaw."""


class GrpoConfig(RolloutsConfig, frozen=True, kw_only=True):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    num_iterations: PositiveInt = 1
    """New. Passes over each rollout batch, ``mu`` in algorithm 1 of the paper. The policy of the loss's ratio is the
    one before the first of them."""
    normalize_rewards: bool = True
    """Divide each advantage by the standard deviation of the rewards in its group."""
    scale_rewards: ScaleRewards | None = None
    """New. TRL's name of the divisor. group is `normalize_rewards`, none its absence. batch: the (unbiased) standard
    deviation of the rewards of the whole rollout batch, with the baseline of each group (Liu et al. 2025,
    arXiv:2508.08221). Null means as `normalize_rewards` says."""
    use_leave_one_out_baseline: bool = True
    """Subtract the mean reward of the group's *other* samples, not of the whole group (Ahmadian et al. 2024,
    arXiv:2402.14740)."""
    adv_estimator: AdvEstimator = AdvEstimator()
    zero_variance_prompt_filtering: bool = False
    """Exclude groups with equal rewards from the loss. Their advantages are zero, but their tokens would count in
    the means of the loss and in its KL term. Nothing is generated in their place, as `use_dynamic_sampling` does."""
    advantage_clip_low: float | None = None
    """Lower bound of normalised advantages; null means none."""
    advantage_clip_high: float | None = None
    """Upper bound of normalised advantages; null means none."""
    invalid_tool_call_advantage: float | None = None
    """Advantage of the tokens of an agent's turn whose text has a tool call left in it, such as ``<tool_call>`` that
    `policy.generation.tool_call_parser` does not read; null means that of the sample's reward. Only for agents, as
    NeMo-RL's is only for NeMo Gym's."""
    malformed_thinking_advantage: float | None = None
    """Advantage of the tokens of an agent's turn whose answer has tags of thinking, or whose thinking, without an
    answer, has a tag twice; null means that of the sample's reward."""
    penalize_invalid_tool_call: bool | None = None
    """Accepted: an earlier switch, replaced by `invalid_tool_call_advantage`."""
    penalize_malformed_thinking: bool | None = None
    """Accepted: an earlier switch, replaced by `malformed_thinking_advantage`."""
    invalid_tool_call_strategy: str | None = None
    """Accepted: an earlier release's treatment of such calls."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Accepted where ``loss_fn.reference_policy_kl_penalty`` is 0, which builds no reference model anyway."""
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Multiplicative error of probabilities above which a sequence is excluded from the loss: the mean over its
    tokens of exp |log-probability in training - in generation|. The metric `token_mult_prob_error` is the same over
    all tokens. Excluded sequences count in their group's baseline. Null keeps all; otherwise a separate pass
    computes the log-probabilities."""
    async_grpo: AsyncGrpo = AsyncGrpo()
    streaming_training: bool = False
    """New. true: while the last groups of a step are generated, trainers compute the gradient of those that are there.
    The optimizer step is the same but for rounding. It needs engines on devices of their own, as `async_grpo` does, the
    DTensor backend, one optimizer step a step, and a loss to which each group contributes by itself."""

    @cached_property
    def penalises_turns(self) -> bool:
        """Whether turns with a flaw have advantages of their own."""
        return any(getattr(self, name) is not None for name in PENALTIES)

    @cached_property
    def asynchronous(self) -> AsyncGrpo:
        """Settings of asynchronous generation."""
        return self.async_grpo

    @cached_property
    def advantage_bounds(self) -> tuple[float | None, float | None] | None:
        """Lower and upper bound of advantages."""
        bounds = self.advantage_clip_low, self.advantage_clip_high
        return None if bounds == (None, None) else bounds

    @cached_property
    def largest_logprob_error(self) -> float | None:
        """Multiplicative error above which a sequence is excluded from the loss."""
        return self.seq_logprob_error_threshold

    @cached_property
    def leaves_out_equal_rewards(self) -> bool:
        """Whether groups with equal rewards are excluded from the loss, without others in their place."""
        is_learned_from = self.adv_estimator.name != "opd"
        return self.zero_variance_prompt_filtering and is_learned_from and not self.use_dynamic_sampling

    @cached_property
    def group_estimator(self) -> AdvEstimator:
        """Estimator that turns a group's rewards into advantages."""
        return self.adv_estimator

    @cached_property
    def streams_groups(self) -> bool:
        """Whether trainers begin a step with the groups that are there."""
        return self.streaming_training

    @cached_property
    def num_passes(self) -> int:
        """Passes of a step over its rollout batch."""
        return self.num_iterations


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
