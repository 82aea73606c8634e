"""The policy-gradient loss of GRPO and related algorithms."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.config.schema.algorithms import DistillationLossConfig
from tandem.config.schema.base import ConfigSection, NonEmptyStr, NonNegativeFloat, PositiveFloat, PositiveInt
from tandem.config.schema.columns import BUILT_IN, ColumnDeclaration, Source

KlType = Literal["k1", "k2", "k3"]
"""Estimators of a KL divergence from samples (Schulman 2020, joschu.net/blog/kl-approx.html)."""

LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo"]
"""Means of a loss over tokens, by TRL's names."""
MEAN_OF_SEQUENCES: LossType = "grpo"
"""The `loss_type` whose loss is a mean of the sequences' means; that of all others is a mean over tokens."""

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
"""Treatment of importance weights that are out of bounds."""


OF_ANY_LOSS = ("class", "kwargs", "columns")
"""Keys of this section that are read for every algorithm."""


class LossColumn(ConfigSection, frozen=True, kw_only=True):
    """An input of a custom loss for each token: `batch.columns[NAME]`."""

    source: Source
    """New. Source of the input. environment: the entry NAME of a score's `components`, for all tokens of the sample.
    engine: generation_logprobs, or versions (the weight version of each token). coordinator: advantages or rewards.
    policy, reference: log-probabilities under that model, before the first optimizer step on the batch. value:
    values at the same time. trainer: returns. teacher: teacher_topk_logits and teacher_topk_indices, rows of
    ``topk_logits_k`` numbers."""
    fill: float = 0.0
    """New. Value in the padding, and where a sample's score has no such entry."""


class LossFn(DistillationLossConfig, frozen=True, kw_only=True):
    """The policy-gradient loss of GRPO and related algorithms; others read only `class`, `kwargs` and `columns`.

    The defaults are GRPO's. REINFORCE and RLOO: ``disable_ppo_ratio``. GSPO: ``sequence_level_importance_ratios``
    and no ``token_level_loss``. CISPO: ``use_cispo``. DAPO: a different ``ratio_clip_max``.
    """

    class_path: NonEmptyStr | None = msgspec.field(name="class", default=None)
    """New. Dotted path of a custom loss, such as ``mine.Loss`` for the class ``Loss`` of a ``mine.py`` beside the
    configuration file; null means the algorithm's own."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """New. Arguments of that class, beside those that every loss gets."""
    columns: dict[str, LossColumn] = msgspec.field(default_factory=dict)
    """New. Inputs of that class beside those of the algorithm's own loss, by name."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence to the starting model; 0 builds no reference model."""
    reference_policy_kl_type: KlType = "k3"
    """Estimator of that divergence (Schulman 2020, joschu.net/blog/kl-approx.html): k1 is minus the log-ratio, k2
    half its square, k3 the ratio minus one minus its logarithm, with the ratio of reference to policy."""
    kl_input_clamp_value: PositiveFloat | None = None
    """Bound on the magnitude of that estimate's log-ratio; null means none, and later releases of NeMo-RL use 20.
    Beyond the bound nothing pulls the policy back."""
    kl_output_clamp_value: PositiveFloat | None = None
    """Bound on the magnitude of the estimate at each token; null means none, and later releases of NeMo-RL use 10.
    Beyond the bound nothing pulls the policy back."""
    use_kl_in_reward: bool = False
    """Subtract the divergence from the reward of each token, before advantages are normalised, instead of adding it
    to the loss. Only with ``grpo.adv_estimator.name: reinforce_plus_plus``."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate of each token by its probability now over its probability in generation. The estimate
    and its gradient are then correct for samples of another policy than the one in training; otherwise they are
    correct only for samples of that policy itself (Tang and Munos 2025, arXiv:2506.09477)."""
    ratio_clip_min: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Lower clipping of the probability ratio: 1 minus this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """Upper clipping of the probability ratio: 1 plus this."""
    ratio_clip_c: Annotated[float, Meta(gt=1)] | None = None
    """Bound on the loss of a token with a negative advantage, as a multiple of the advantage's magnitude (dual clip,
    Ye et al. 2020, arXiv:1912.09729); null means none."""
    disable_ppo_ratio: bool = False
    """Use minus the advantage times the log-probability, with neither ratio nor clipping: REINFORCE, and RLOO with
    the leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""
    use_cispo: bool = False
    """Use minus the advantage times the log-probability, weighted by the clipped ratio without gradient: every token
    teaches, even where the ratio is clipped (CISPO, MiniMax 2025, arXiv:2506.13585)."""
    force_on_policy_ratio: bool = False
    """Treat the policy in training as the one before the step: the ratio is 1, with gradient. For one optimizer step
    per rollout batch."""
    sequence_level_importance_ratios: bool = False
    """Use one ratio per sequence, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv:2507.18071). The
    importance-sampling correction then has one weight per sequence, the product of its tokens'."""
    use_importance_sampling_correction: bool = False
    """Weight each token by its probability in training over its probability in generation. Samples of older weights
    (``grpo.async_grpo``, ``ppo.async_ppo``) need it."""
    truncated_importance_sampling_type: TruncationType | None = None
    """Treatment of such weights that are out of bounds. tis clips them (Yao et al. 2025,
    fengyao.notion.site/off-policy-rl). icepop makes them zero (Ling team 2025, arXiv:2510.18855). seq-mask-tis makes
    all weights of a sequence zero if their geometric mean is out of bounds, and keeps the others (Liu et al. 2025,
    yingru.notion.site). Null means no bounds."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of such weights."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound of such weights; null means 0, and is allowed only with tis."""
    positive_example_nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of samples with a reward, scaled and shaped, above 0: the mean over
    their tokens in the global batch (VAPO, Yue et al. 2025, arXiv:2504.05118, equation 10). 0 disables it."""
    entropy_coef: NonNegativeFloat = 0.0
    """New. Weight of an entropy bonus: the loss minus this times the mean entropy of the policy over the tokens of the
    global batch (Williams and Peng 1991; Schulman et al. 2017, arXiv:1707.06347, equation 9). 0 disables it."""
    token_level_loss: bool = True
    """true: the mean over all tokens of the global batch. false: the mean over sequences of each sequence's mean."""
    loss_type: LossType | None = None
    """New. TRL's name of the mean. dapo is `token_level_loss`, grpo is its absence. bnpo: the mean over the tokens of
    each micro-batch, then over micro-batches by their sequences; it depends on ``policy.train_micro_batch_size``.
    dr_grpo: the sum over tokens, divided by the sequences of the global batch and by `loss_scale_factor` (Liu et al.
    2025, arXiv:2503.20783, section 3.2). Null means as `token_level_loss` says."""
    loss_scale_factor: PositiveInt | None = None
    """New. With `loss_type` dr_grpo: tokens that each sequence counts as, however long it is."""

    @cached_property
    def custom_columns(self) -> dict[str, ColumnDeclaration]:
        """Inputs of a custom loss, by name."""
        return {
            name: BUILT_IN.get(name) or ColumnDeclaration(name=name, source=column.source, fill=column.fill)
            for name, column in self.columns.items()
        }

    @cached_property
    def is_mean_of_sequences(self) -> bool:
        """Whether the loss of a batch is divided by its sequences, rather than by its tokens."""
        return not self.token_level_loss or self.loss_type == "dr_grpo"

    @cached_property
    def environment_columns(self) -> dict[str, str]:
        """Dtypes of its inputs that travel with the batch table, by their name there."""
        custom_columns = self.custom_columns.values()
        return {f"{column.name}_S": column.dtype for column in custom_columns if column.source == "environment"}
