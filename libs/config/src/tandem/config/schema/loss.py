"""The policy-gradient loss of GRPO and its kin."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.base import NonEmptyStr, NonNegativeFloat, PositiveFloat, Section
from tandem.config.schema.columns import BUILT_IN, Column, Source
from tandem.config.schema.distillation import DistillationLoss

KlType = Literal["k1", "k2", "k3"]
"""Estimators of a KL divergence from samples (Schulman 2020, joschu.net/blog/kl-approx.html)."""

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
"""What becomes of importance weights that are out of bounds."""


OF_ANY_LOSS = ("class", "kwargs", "columns")
"""Keys of this section that are read whatever the algorithm."""


class LossColumn(Section, frozen=True, kw_only=True):
    """A number that a loss of your own reads of each token: `batch.columns[NAME]`."""

    source: Source
    """New. Where it comes from. environment: the entry NAME of a score's `components`, of all tokens of the sample.
    engine: generation_logprobs, or versions, the weight version that made the token. coordinator: advantages or
    rewards. policy, reference: its log-probability under that model, before the first optimizer step on the batch.
    value: its value then. trainer: returns. teacher: teacher_topk_logits and teacher_topk_indices, rows of
    ``topk_logits_k`` numbers."""
    fill: float = 0.0
    """New. What it is in the padding, and of a sample whose score has no such entry."""


class LossFn(DistillationLoss, frozen=True, kw_only=True):
    """The policy-gradient loss of GRPO and its kin; other algorithms read `class`, `kwargs` and `columns` alone.

    As it stands it is GRPO's. REINFORCE and RLOO: ``disable_ppo_ratio``. GSPO: ``sequence_level_importance_ratios`` and
    no ``token_level_loss``. CISPO: ``use_cispo``. DAPO: a ``ratio_clip_max`` of its own.
    """

    class_path: NonEmptyStr | None = msgspec.field(name="class", default=None)
    """New. Dotted path of a loss of your own, such as ``mine.Loss`` for the class ``Loss`` of a ``mine.py`` beside the
    configuration file; null takes the algorithm's."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of that class, beside those that every loss is made with."""
    columns: dict[str, LossColumn] = msgspec.field(default_factory=dict)
    """New. What that class reads of each token beside what the algorithm's own loss does, by name."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence to the starting model; 0 builds no reference model."""
    reference_policy_kl_type: KlType = "k3"
    """The estimator of that divergence (Schulman 2020, joschu.net/blog/kl-approx.html): k1 is minus the
    log-ratio, k2 half its square, k3 the ratio minus one minus its logarithm, with the ratio of reference to
    policy."""
    kl_input_clamp_value: PositiveFloat | None = None
    """The log-ratio of that estimate is kept within plus and minus this; null means no bound, later releases of NeMo-RL
    take 20. Beyond the bound nothing pulls the policy back."""
    kl_output_clamp_value: PositiveFloat | None = None
    """The estimate at each token is kept within plus and minus this; null means no bound, later releases of NeMo-RL
    take 10. Beyond the bound nothing pulls the policy back."""
    use_kl_in_reward: bool = False
    """Subtract the divergence from the reward of each token, before advantages are normalised, and not from the loss.
    Only with ``grpo.adv_estimator.name: reinforce_plus_plus``."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate of each token by its probability now over its probability in generation: the estimate and
    its gradient are then right for samples of a policy other than the one in training. Without it both are those for
    samples of that policy itself (Tang and Munos 2025, arXiv:2506.09477)."""
    ratio_clip_min: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """The probability ratio is clipped below at 1 minus this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 plus this."""
    ratio_clip_c: Annotated[float, Meta(gt=1)] | None = None
    """Where the advantage is negative, the loss of a token is at most this times the advantage's magnitude (dual
    clip, Ye et al. 2020, arXiv:1912.09729); null means no such bound."""
    disable_ppo_ratio: bool = False
    """Minus the advantage times the log-probability, with neither ratio nor clip: REINFORCE, and RLOO with the
    leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""
    use_cispo: bool = False
    """Minus the advantage times the log-probability, weighted by the clipped ratio without gradient: every token
    teaches, also where the ratio is clipped (CISPO, MiniMax 2025, arXiv:2506.13585)."""
    force_on_policy_ratio: bool = False
    """Take the policy in training for the one before the step: the ratio is 1, with gradient. For one optimizer step a
    rollout batch."""
    sequence_level_importance_ratios: bool = False
    """One ratio a sequence, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv:2507.18071), and one
    weight a sequence in the importance-sampling correction, the product of its tokens'."""
    use_importance_sampling_correction: bool = False
    """Weight each token by its probability in training over its probability in generation. Samples of older weights
    (``grpo.async_grpo``) need it."""
    truncated_importance_sampling_type: TruncationType | None = None
    """What becomes of such weights that are out of bounds: tis clips them (Yao et al. 2025,
    fengyao.notion.site/off-policy-rl), icepop makes them zero (Ling team 2025, arXiv:2510.18855), seq-mask-tis makes
    all of a sequence zero if the geometric mean of its weights is out of bounds, and leaves the others as they are (Liu
    et al. 2025, yingru.notion.site). Null means no bounds."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """The upper bound of such weights."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """The lower bound of such weights; null means 0, and only with tis."""
    positive_example_nll_weight: NonNegativeFloat = 0.0
    """Weight of minus the log-probability of samples whose reward, scaled and shaped, is above 0: the mean over their
    tokens in the global batch (VAPO, Yue et al. 2025, arXiv:2504.05118, equation 10). 0 leaves it out."""
    token_level_loss: bool = True
    """True: the mean over all tokens of the global batch. False: the mean over sequences of each sequence's mean."""

    @property
    def own_columns(self) -> dict[str, Column]:
        """What a loss of the user's reads of each token, by name."""
        return {
            name: BUILT_IN.get(name) or Column(name=name, source=column.source, fill=column.fill)
            for name, column in self.columns.items()
        }

    @property
    def environment_columns(self) -> dict[str, str]:
        """The dtypes of those of them that travel with the table of a batch, by their name there."""
        own = self.own_columns.values()
        return {f"{column.name}_S": column.dtype for column in own if column.source == "environment"}
