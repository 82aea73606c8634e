"""GRPO and PPO and their kin: prompt groups, rewards and advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tandem.config.schema.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Seed


class AdvEstimator(Section, frozen=True, kw_only=True):
    """How rewards become advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = "grpo"
    """grpo: each reward minus the baseline of its group (Shao et al. 2024, arXiv:2402.03300). gdpo: the same for each
    component of the reward, weighted, added and normalised over the batch (Liu et al. 2026, arXiv:2601.05242); the
    environment gives the components. reinforce_plus_plus: the reward minus the mean of its group, normalised over all
    tokens of the batch (Hu et al. 2025, arXiv:2501.03262). opd: those of `on_policy_distillation`."""
    normalize_rewards: bool = True
    """As `grpo.normalize_rewards`; not for reinforce_plus_plus."""
    use_leave_one_out_baseline: bool = True
    """As `grpo.use_leave_one_out_baseline`; not for reinforce_plus_plus."""
    minus_baseline: bool = True
    """For reinforce_plus_plus: subtract the mean reward of the group."""
    reward_weights: tuple[float, ...] | None = None
    """For gdpo: the weight of each component, in the alphabetical order of their names; null means 1 each."""


class RewardShaping(Section, frozen=True, kw_only=True):
    """Rewards that depend on the length of the response, after `grpo.reward_scaling`."""

    enabled: bool = False
    """Whether to shape rewards."""
    overlong_buffer_length: PositiveInt | None = None
    """Tokens before `max_response_length` over which the penalty grows from nothing."""
    overlong_buffer_penalty: NonNegativeFloat | None = None
    """What a response of `max_response_length` tokens or more loses (soft overlong punishment, DAPO, Yu et al. 2025,
    arXiv:2503.14476, equation 13)."""
    max_response_length: PositiveInt | None = None
    """Tokens that a response should have at most."""
    stop_properly_penalty_coef: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Multiply the reward of each response that a limit of tokens cut off by this, and penalise no length."""


class RewardScaling(Section, frozen=True, kw_only=True):
    """A linear map of rewards from one interval to another; rewards outside the first are clamped to it."""

    enabled: bool = False
    """Whether to scale rewards."""
    source_min: float = 0.0
    """The reward that becomes `target_min`."""
    source_max: float = 1.0
    """The reward that becomes `target_max`."""
    target_min: float = 0.0
    """The least reward afterwards, or the greatest if it is above `target_max`."""
    target_max: float = 1.0
    """The reward at the other end."""


class AsyncGrpo(Section, frozen=True, kw_only=True):
    """Generate for the steps that follow while a step trains, with weights that are a little older."""

    enabled: bool = False
    """false: training and generation wait for each other. true: needs engines on devices of their own
    (`policy.generation.colocated.enabled: false`); on a CPU both may share cores."""
    max_trajectory_age_steps: PositiveInt = 1
    """Training steps that the weights a sample was begun with may be behind those it is trained on. Engines generate
    for as many steps ahead."""
    in_flight_weight_updates: bool = False
    """true: engines take new weights between two tokens, and their requests go on; every token carries the version
    that made it. false: an engine begins nothing more until it has finished what it has, and then takes them."""
    recompute_kv_cache_after_weight_updates: bool = False
    """With `in_flight_weight_updates`: requests that go on compute the keys and values of all their tokens anew with
    the new weights. Otherwise they keep those that they have."""


class Rollouts(Section, frozen=True, kw_only=True):
    """What every algorithm that rolls out has: how much is generated, how rewards are shaped, when it is validated."""

    num_prompts_per_step: PositiveInt = 32
    """Prompt groups in one rollout batch."""
    num_generations_per_prompt: PositiveInt = 16
    """Samples drawn for each prompt: the size of a group."""
    max_rollout_turns: PositiveInt = 1
    """Responses a rollout may give: after each but the last the environment may answer, and the policy goes on."""
    max_num_epochs: PositiveInt | None = None
    """Passes over the training problems; the run ends at this or at `max_num_steps`, whichever comes first. Null means
    any number."""
    max_num_steps: NonNegativeInt = 1_000_000
    """Rollout batches to train on before the run ends; 0 trains on none: the model is validated, and that is all."""
    overlong_filtering: bool = False
    """Samples that a limit of tokens cut off count in their group's baseline, but not in the loss (DAPO,
    arXiv:2503.14476, section 3.4)."""
    reward_scaling: RewardScaling = RewardScaling()
    reward_shaping: RewardShaping = RewardShaping()
    use_dynamic_sampling: bool = False
    """Throw away groups whose rewards do not differ, which teach nothing, and generate more until there are
    `num_prompts_per_step` others (DAPO, arXiv:2503.14476, section 3.2)."""
    batch_multiplier: Annotated[float, Meta(ge=1)] = 1.0
    """With `use_dynamic_sampling`: generate for this times `num_prompts_per_step` prompts at once. It has no effect
    without."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """With `use_dynamic_sampling`: end with an error if so many of these batches do not make a step."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0, and -1, mean never."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step, whatever `val_period` says."""
    max_val_samples: PositiveInt = 256
    """Validation problems used each time, from the front of the validation set; null means every one."""
    val_batch_size: PositiveInt = 256
    """Validation problems sent to the rollouts at once; null as if it were not given."""
    num_val_generations_per_prompt: PositiveInt = 1
    """Samples drawn for each validation problem; metrics are of all of them."""
    val_temperature: NonNegativeFloat | None = None
    """New. Like `policy.generation.temperature`, for validation; 0 takes the likeliest token each time. Null means the
    same as in training."""
    val_seed: Seed | None = None
    """New. Decides the samples of validation, and nothing else; null means the `seed` beside it."""
    seed: Seed = 42
    """Decides the problems, their order and every sample."""

    @property
    def asynchronous(self) -> AsyncGrpo:
        """Whether it generates while it trains, and how far ahead; an algorithm without a section for it does not."""
        return AsyncGrpo()

    @property
    def group_estimator(self) -> AdvEstimator | None:
        """How the rewards of a group become advantages, if the samples of a prompt are compared."""
        return None

    @property
    def advantage_bounds(self) -> tuple[float | None, float | None] | None:
        """What advantages are not below, and not above, where one of these is given."""
        return None

    @property
    def largest_logprob_error(self) -> float | None:
        """The multiplicative error above which a sequence is left out of the loss, if any is."""
        return None

    @property
    def num_passes(self) -> int:
        """Times that a step trains on its rollout batch."""
        return 1

    @property
    def num_steps_without_policy(self) -> int:
        """Steps at the beginning that do not train the policy."""
        return 0

    @property
    def num_prompts_per_batch(self) -> int:
        """Prompt groups that engines generate for at once."""
        return round(self.num_prompts_per_step * (self.batch_multiplier if self.use_dynamic_sampling else 1))

    @property
    def max_prompts_per_step(self) -> int:
        """Prompt groups that a step generates for, at most."""
        return self.num_prompts_per_batch * (self.dynamic_sampling_max_gen_batches if self.use_dynamic_sampling else 1)


class Grpo(Rollouts, frozen=True, kw_only=True):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    normalize_rewards: bool = True
    """Divide each advantage by the standard deviation of the rewards in its group."""
    use_leave_one_out_baseline: bool = True
    """Subtract the mean reward of the group's *other* samples, not of the whole group (Ahmadian et al. 2024,
    arXiv:2402.14740)."""
    adv_estimator: AdvEstimator = AdvEstimator()
    advantage_clip_low: float | None = None
    """What is below becomes this, once advantages are normalised; null means no bound."""
    advantage_clip_high: float | None = None
    """What is above becomes this, likewise."""
    invalid_tool_call_advantage: float | None = None
    """The advantage of an agent's response that calls a tool wrongly, as NeMo Gym tells; null means what its reward
    gives."""
    malformed_thinking_advantage: float | None = None
    """The advantage of an agent's response whose thinking is out of shape, as NeMo Gym tells; null means what its
    reward gives."""
    penalize_invalid_tool_call: bool | None = None
    """Accepted: an earlier switch of `invalid_tool_call_advantage`, which decides."""
    penalize_malformed_thinking: bool | None = None
    """Accepted: an earlier switch of `malformed_thinking_advantage`, which decides."""
    invalid_tool_call_strategy: str | None = None
    """Accepted: what an earlier release did about such calls."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Accepted where ``loss_fn.reference_policy_kl_penalty`` is 0: then no reference model is built anyway."""
    seq_logprob_error_threshold: PositiveFloat | None = None
    """Leave sequences out of the loss whose multiplicative error of probabilities is above this: the mean over their
    tokens of exp |log-probability in training - in generation|, which `token_mult_prob_error` is of all tokens. They
    count in their group's baseline. Null keeps all; else a pass of its own computes the log-probabilities."""
    async_grpo: AsyncGrpo = AsyncGrpo()

    @property
    def asynchronous(self) -> AsyncGrpo:
        """Whether it generates while it trains, and how far ahead."""
        return self.async_grpo

    @property
    def advantage_bounds(self) -> tuple[float | None, float | None] | None:
        """What advantages are not below, and not above."""
        bounds = self.advantage_clip_low, self.advantage_clip_high
        return None if bounds == (None, None) else bounds

    @property
    def largest_logprob_error(self) -> float | None:
        """The multiplicative error above which a sequence is left out of the loss."""
        return self.seq_logprob_error_threshold

    @property
    def group_estimator(self) -> AdvEstimator:
        """How the rewards of a group become advantages."""
        return self.adv_estimator
