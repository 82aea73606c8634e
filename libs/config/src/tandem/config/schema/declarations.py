"""The algorithms, each declared once with all that the rest of the system needs to know.

There are two kinds. In the first, engines generate samples of the policy, environments score them, and weights move
back after every step. The second learns over a data set, with only the coordinator and its trainers.

A new algorithm is a section of the configuration (`tandem.config.schema`), a class that makes its batches, a loss,
and a declaration here. Other code reads the declaration (`Config.declaration`) and never compares names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec

from tandem.config.schema.columns import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    REWARDS,
    TEACHER_CONFIDENCE,
    TEACHER_LOGPROBS,
    TEACHER_TOPK_INDICES,
    TEACHER_TOPK_LOGITS,
    TEACHER_WEIGHTS,
    VALUES,
    ColumnDeclaration,
    Head,
    Model,
    read_where,
)

if TYPE_CHECKING:
    from tandem.config.named import Holds
    from tandem.config.schema import Config


class TrainingDeclaration(msgspec.Struct, frozen=True, kw_only=True):
    """The training of one model, with a loss and an optimizer of its own."""

    model: Model
    loss: str
    """Class of its loss: `tandem.trainer.losses`."""
    loss_section: str
    """Section of the configuration with the loss's arguments."""
    columns: tuple[ColumnDeclaration, ...]
    """Columns that the loss reads."""


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The declaration of an algorithm.

    Code of a service is given as a dotted path, which only that service imports.
    """

    name: str
    """Name in the configuration: of its section, and as a value of ``algorithm``."""
    rolls_out: bool
    """Whether engines generate its data; otherwise it learns over a data set."""
    learns_from: tuple[Holds, ...]
    """Contents of data sets that it can learn from."""
    unit: str = "sequence"
    """Unit of batch sizes."""
    sequences_per_unit: int = 1
    """Sequences of the model per unit."""
    train_global_batch_size: int
    """Default of ``policy.train_global_batch_size``."""
    shares_prompts: bool
    """Whether sequences of a batch may begin with the same prompt, which is then computed once."""
    metrics: tuple[str, ...]
    """Metrics that can rank checkpoints; the first is the default."""
    curves: tuple[str, str]
    """Metrics that a report plots: one of training, one of validation."""
    columns: tuple[ColumnDeclaration, ...]
    """Columns that its loss reads."""
    head: Head = "vocabulary"
    """Head on top of the policy's layers."""
    advantage_estimator: Callable[[Config], str] = lambda config: ""
    """Function of `tandem.trainer.advantages` that completes advantages in the trainers, if they need scores or all
    tokens of the batch; empty if the coordinator's are final."""
    running: str
    """Class that requests samples and makes batches in a run: `tandem.coordinator.algorithms`."""
    loss: str
    """Class of its loss, unless ``loss_fn.class`` names another: `tandem.trainer.losses`."""
    loss_section: str
    """Section of the configuration with the loss's arguments."""
    beside: tuple[TrainingDeclaration, ...] = ()
    """Models trained beside the policy, each before it."""
    rules: tuple[str, ...] = ()
    """Paths of tuples of rules for this algorithm's configurations, beside those for all algorithms."""

    called: str = ""
    """Title, if it is not the name in capitals."""

    @cached_property
    def title(self) -> str:
        """Title for people."""
        return self.called or self.name.upper()

    @cached_property
    def learns_preferences(self) -> bool:
        """Whether it learns from prompts with a better and a worse response."""
        return "preferences" in self.learns_from

    @cached_property
    def trainings(self) -> tuple[TrainingDeclaration, ...]:
        """Trainings of all trained models, the policy's last."""
        policy_training = TrainingDeclaration(
            model="policy", loss=self.loss, loss_section=self.loss_section, columns=self.columns
        )
        return (*self.beside, policy_training)

    @cached_property
    def training_of(self) -> dict[Model, TrainingDeclaration]:
        """Training of each trained model."""
        return {training.model: training for training in self.trainings}

    @cached_property
    def trains(self) -> tuple[Model, ...]:
        """Trained models, the policy last."""
        return tuple(self.training_of)

    def head_of(self, model: Model) -> Head:
        """Return the head on top of a model's layers."""
        if model == "value":
            return "value"
        return self.head if model == "policy" else "vocabulary"


_POLICY_GRADIENT = (
    GENERATION_LOGPROBS,
    ADVANTAGES,
    read_where(REWARDS, lambda config, num_steps: config.loss_fn.positive_example_nll_weight > 0),
    # In the first optimizer step on a rollout batch, the policy in training is still the one before it.
    read_where(
        PREVIOUS_LOGPROBS,
        lambda config, num_steps: (
            num_steps > 1
            or config.loss_fn.use_kl_in_reward
            or config.learns_from_logprobs
            or config.largest_logprob_error is not None
        ),
    ),
    read_where(REFERENCE_LOGPROBS, lambda config, num_steps: config.loss_fn.reference_policy_kl_penalty > 0),
)
"""Columns that the policy-gradient loss reads."""

_ADVANTAGE_ESTIMATORS = {
    "reinforce_plus_plus": "tandem.trainer.advantages.reinforce_plus_plus",
    "opd": "tandem.trainer.advantages.compare_with_teacher",
}
"""Finishers of GRPO's advantage estimators with token advantages."""

_PENALTIES = "tandem.trainer.scorers.turn_penalties.penalise"


def token_estimator(config: Config) -> str:
    """Return the finisher of GRPO's advantages of tokens, before penalties of turns; empty if there is none."""
    return _ADVANTAGE_ESTIMATORS.get(config.grpo.adv_estimator.name, "")


GRPO = Algorithm(
    name="grpo",
    rolls_out=True,
    learns_from=("problems",),
    train_global_batch_size=512,
    shares_prompts=True,
    metrics=("val_reward", "val_accuracy", "reward", "accuracy", "loss"),
    curves=("reward", "val_accuracy"),
    columns=(
        *_POLICY_GRADIENT,
        read_where(TEACHER_LOGPROBS, lambda config, num_steps: config.learns_from_logprobs),
    ),
    advantage_estimator=lambda config: _PENALTIES if config.grpo.penalises_turns else token_estimator(config),
    running="tandem.coordinator.algorithms.grpo.GrpoAlgorithm",
    loss="tandem.trainer.losses.policy_gradient.PolicyGradientLoss",
    loss_section="loss_fn",
    rules=(
        "tandem.config.checks.learning.RULES",
        "tandem.config.checks.loss.POLICY_GRADIENT_RULES",
        "tandem.config.checks.teacher.GRPO_RULES",
    ),
)
"""Group relative policy optimisation and its variants, which differ in options."""

PPO = Algorithm(
    name="ppo",
    rolls_out=True,
    learns_from=("problems",),
    train_global_batch_size=512,
    shares_prompts=True,
    metrics=GRPO.metrics,
    curves=GRPO.curves,
    columns=_POLICY_GRADIENT,
    advantage_estimator=lambda config: "tandem.trainer.advantages.generalised",
    running="tandem.coordinator.algorithms.grpo.GrpoAlgorithm",
    loss="tandem.trainer.losses.policy_gradient.PolicyGradientLoss",
    loss_section="loss_fn",
    beside=(
        TrainingDeclaration(
            model="value",
            loss="tandem.trainer.losses.value.ValueLoss",
            loss_section="value_loss_fn",
            columns=(VALUES, RETURNS),
        ),
    ),
    rules=(
        "tandem.config.checks.learning.ROLLOUT_RULES",
        "tandem.config.checks.loss.POLICY_GRADIENT_RULES",
        "tandem.config.checks.teacher.VALUE_RULES",
    ),
)
"""Proximal policy optimisation: a value model beside the policy, and generalised advantage estimation."""

SFT = Algorithm(
    name="sft",
    rolls_out=False,
    learns_from=("problems", "conversations"),
    train_global_batch_size=32,
    shares_prompts=False,
    metrics=("val_loss", "loss"),
    curves=("loss", "val_loss"),
    columns=(),
    running="tandem.coordinator.algorithms.data_set.DataSetAlgorithm",
    loss="tandem.trainer.losses.supervised.NegativeLogLikelihood",
    loss_section="sft",
)
"""Supervised fine-tuning."""

DPO = Algorithm(
    name="dpo",
    rolls_out=False,
    learns_from=("preferences",),
    unit="pair",
    sequences_per_unit=2,
    train_global_batch_size=128,
    shares_prompts=True,
    metrics=("val_loss", "val_accuracy", "loss", "accuracy"),
    curves=("loss", "val_accuracy"),
    columns=(REFERENCE_LOGPROBS,),
    running="tandem.coordinator.algorithms.data_set.DataSetAlgorithm",
    loss="tandem.trainer.losses.preference.PreferenceLoss",
    loss_section="dpo",
)
"""Direct preference optimisation; the chosen response comes first in each pair."""

RM = Algorithm(
    name="rm",
    rolls_out=False,
    learns_from=("preferences",),
    unit="pair",
    sequences_per_unit=2,
    train_global_batch_size=128,
    shares_prompts=False,
    metrics=("val_loss", "val_accuracy", "loss", "accuracy"),
    curves=("loss", "val_accuracy"),
    columns=(REWARDS,),
    head="score",
    running="tandem.coordinator.algorithms.data_set.RewardModelAlgorithm",
    loss="tandem.trainer.losses.preference.BradleyTerryLoss",
    loss_section="rm",
    rules=("tandem.config.checks.data.REWARD_TRAINING_RULES",),
)
"""Training of a reward model; the chosen response comes first in each pair."""

DISTILLATION = Algorithm(
    name="distillation",
    called="distillation",
    rolls_out=True,
    learns_from=("problems",),
    train_global_batch_size=64,
    shares_prompts=True,
    metrics=GRPO.metrics,
    curves=("loss", "val_accuracy"),
    columns=(TEACHER_TOPK_LOGITS, TEACHER_TOPK_INDICES),
    running="tandem.coordinator.algorithms.grpo.GrpoAlgorithm",
    loss="tandem.trainer.losses.distillation.DistillationLoss",
    loss_section="loss_fn",
    rules=("tandem.config.checks.teacher.RULES",),
)
"""On-policy distillation: a teacher provides its likeliest tokens at each position of the policy's own samples."""

OFF_POLICY_DISTILLATION = Algorithm(
    name="off_policy_distillation",
    called="off-policy distillation",
    rolls_out=False,
    learns_from=("problems", "conversations", "texts"),
    train_global_batch_size=32,
    shares_prompts=False,
    metrics=SFT.metrics,
    curves=SFT.curves,
    columns=(*DISTILLATION.columns, TEACHER_CONFIDENCE, TEACHER_WEIGHTS),
    advantage_estimator=lambda config: "tandem.trainer.scorers.teacher_weights.weigh" if config.joint_teachers else "",
    running="tandem.coordinator.algorithms.data_set.DataSetAlgorithm",
    loss=DISTILLATION.loss,
    loss_section="loss_fn",
    rules=DISTILLATION.rules,
)
"""Distillation over recorded text."""

ALGORITHMS = {
    algorithm.name: algorithm for algorithm in (GRPO, PPO, SFT, DPO, RM, DISTILLATION, OFF_POLICY_DISTILLATION)
}
"""Algorithms by name, in the order of errors and documentation."""

SECTIONS = {
    "grpo": ("grpo",),
    "ppo": ("ppo", "value", "value_loss_fn"),
    "sft": ("sft",),
    "dpo": ("dpo",),
    "rm": ("rm",),
    "distillation": ("distillation", "teacher", "teachers"),
    "off_policy_distillation": ("off_policy_distillation", "teacher", "teachers"),
}
"""Sections of the configuration that only this algorithm reads, its own first."""

if TYPE_CHECKING:
    AlgorithmName = str
else:  # so that the schema, its errors and its page list the declared names
    AlgorithmName = Literal[tuple(ALGORITHMS)]
