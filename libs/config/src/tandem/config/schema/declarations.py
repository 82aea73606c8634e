"""The algorithms, each declared once: what each of them needs of everyone else.

There are two kinds. One rolls out: engines generate samples of the policy, environments score them, and weights move
back after every step. The other learns over a data set, and the run is the coordinator and its trainers.

A new algorithm is a section of the configuration (`tandem.config.schema`), a class that makes its batches, a
loss, and a declaration here. Code elsewhere asks the declaration (`Config.declaration`), never for a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from tandem.config.schema.columns import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    MODELS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    REWARDS,
    TEACHER_LOGPROBS,
    TEACHER_TOPK_INDICES,
    TEACHER_TOPK_LOGITS,
    VALUES,
    Column,
    Head,
    Model,
    read_where,
)

if TYPE_CHECKING:
    from tandem.config.named import Holds
    from tandem.config.schema import Config


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is trained: by a loss and an optimizer of its own."""

    model: Model
    loss: str
    """The class of its loss: `tandem.trainer.losses`."""
    loss_section: str
    """The section of the configuration that the loss is made with."""
    columns: tuple[Column, ...]
    """What the loss reads of each token."""


class Algorithm(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm's declaration.

    What lives in a service is named by a dotted path, which only that service imports.
    """

    name: str
    """In the configuration: of its section, and of the key ``algorithm``."""
    rolls_out: bool
    """Whether engines generate what it learns from; otherwise it learns over a data set."""
    learns_from: tuple[Holds, ...]
    """What the data sets hold that it can learn from."""
    unit: str = "sequence"
    """What batch sizes count."""
    sequences_per_unit: int = 1
    """Sequences of the model in one of these."""
    train_global_batch_size: int
    """The default of ``policy.train_global_batch_size``."""
    shares_prompts: bool
    """Whether sequences of a batch may begin with the same prompt, which then is computed once."""
    metrics: tuple[str, ...]
    """What can rank checkpoints; the first does so unless the configuration names another."""
    curves: tuple[str, str]
    """The metrics that a report draws: in training, and on what is held out."""
    columns: tuple[Column, ...]
    """What its loss reads of each token."""
    head: Head = "vocabulary"
    """What is on top of the policy's layers."""
    finisher: Callable[[Config], str] = lambda config: ""
    """What ends the making of advantages in the trainers, where they need scores, or all tokens of the batch: a
    function of `tandem.trainer.advantages`; empty where the coordinator's are final."""
    running: str
    """The class that asks for samples and makes batches in a run: `tandem.coordinator.algorithms`."""
    loss: str
    """The class of its loss, unless ``loss_fn.class`` names another: `tandem.trainer.losses`."""
    loss_section: str
    """The section of the configuration that the loss is made with."""
    beside: tuple[Training, ...] = ()
    """Models that are trained beside the policy, each before it."""
    rules: tuple[str, ...] = ()
    """Rules that the configuration must keep, beside those of all algorithms: tuples of them."""

    called: str = ""
    """What people call it, if that is not its name in capitals."""

    @property
    def title(self) -> str:
        """What people call it."""
        return self.called or self.name.upper()

    @property
    def learns_preferences(self) -> bool:
        """Whether it learns from prompts with a better and a worse response."""
        return "preferences" in self.learns_from

    @property
    def trainings(self) -> tuple[Training, ...]:
        """How each model is trained that is, the policy last."""
        own = Training(model="policy", loss=self.loss, loss_section=self.loss_section, columns=self.columns)
        return (*self.beside, own)

    @property
    def trains(self) -> tuple[Model, ...]:
        """The models that are trained, the policy last."""
        return tuple(training.model for training in self.trainings)

    def head_of(self, model: Model) -> Head:
        """Return what is on top of a model's layers."""
        if model == "value":
            return "value"
        return self.head if model == "policy" else "vocabulary"

    def columns_of(self, config: Config, num_steps: int, model: Model = "policy") -> tuple[Column, ...]:
        """Return what a model's loss reads of each token in a step of so many optimizer steps.

        Last, of the policy's, comes what the user's loss reads.
        """
        (training,) = (each for each in self.trainings if each.model == model)
        read = {column.name: column for column in training.columns if column.is_read(config, num_steps)}
        if model == "policy":
            read |= config.loss_fn.own_columns
        return tuple(read.values())

    def all_columns(self, config: Config, num_steps: int) -> tuple[Column, ...]:
        """Return what the losses of all models read."""
        read = (column for each in self.trainings for column in self.columns_of(config, num_steps, each.model))
        return tuple(dict.fromkeys(read))

    def scored_by(self, config: Config, num_steps: int) -> tuple[Model, ...]:
        """Return the models that score a batch before it is trained on with so many optimizer steps."""
        read = {column.model for column in self.all_columns(config, num_steps)}
        return tuple(model for model in MODELS if model in read)

    def holds(self, config: Config) -> tuple[Model, ...]:
        """Return the models that a trainer holds: where nothing is trained, the policy alone."""
        if config.evaluates:
            return ("policy",)
        return tuple(dict.fromkeys(("policy", *self.scored_by(config, 1), *self.trains)))


_POLICY_GRADIENT = (
    GENERATION_LOGPROBS,
    ADVANTAGES,
    read_where(REWARDS, lambda config, num_steps: config.loss_fn.positive_example_nll_weight > 0),
    # In the first optimizer step on a rollout batch the policy before it is the one in training.
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
"""What the loss of policy gradients reads."""

_FINISHERS = {
    "reinforce_plus_plus": "tandem.trainer.advantages.reinforce_plus_plus",
    "opd": "tandem.trainer.advantages.on_policy_distillation",
}
"""Of GRPO's estimators that have advantages of tokens."""

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
    finisher=lambda config: _FINISHERS.get(config.grpo.adv_estimator.name, ""),
    running="tandem.coordinator.algorithms.grpo.GrpoAlgorithm",
    loss="tandem.trainer.losses.policy_gradient.PolicyGradientLoss",
    loss_section="loss_fn",
    rules=(
        "tandem.config.checks.learning.RULES",
        "tandem.config.checks.loss.POLICY_GRADIENT_RULES",
        "tandem.config.checks.teacher.GRPO_RULES",
    ),
)
"""Group relative policy optimisation and its kin: what differs between them are options."""

PPO = Algorithm(
    name="ppo",
    rolls_out=True,
    learns_from=("problems",),
    train_global_batch_size=512,
    shares_prompts=True,
    metrics=GRPO.metrics,
    curves=GRPO.curves,
    columns=_POLICY_GRADIENT,
    finisher=lambda config: "tandem.trainer.advantages.generalised",
    running="tandem.coordinator.algorithms.grpo.GrpoAlgorithm",
    loss="tandem.trainer.losses.policy_gradient.PolicyGradientLoss",
    loss_section="loss_fn",
    beside=(
        Training(
            model="value",
            loss="tandem.trainer.losses.value.ValueLoss",
            loss_section="value_loss_fn",
            columns=(VALUES, RETURNS),
        ),
    ),
    rules=(
        "tandem.config.checks.learning.ROLLOUT_RULES",
        "tandem.config.checks.loss.POLICY_GRADIENT_RULES",
        "tandem.config.checks.value.RULES",
    ),
)
"""Proximal policy optimisation: a model of values beside the policy, and generalised advantages."""

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
"""Direct preference optimisation: of each pair the chosen response is first."""

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
    rules=("tandem.config.checks.reward_training.RULES",),
)
"""Training of a reward model: of each pair the chosen response is first."""

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
"""On-policy distillation: a teacher says of the policy's own samples what it would rather have drawn."""

OFF_POLICY_DISTILLATION = Algorithm(
    name="off_policy_distillation",
    called="off-policy distillation",
    rolls_out=False,
    learns_from=("problems", "conversations"),
    train_global_batch_size=32,
    shares_prompts=False,
    metrics=SFT.metrics,
    curves=SFT.curves,
    columns=DISTILLATION.columns,
    running="tandem.coordinator.algorithms.data_set.DataSetAlgorithm",
    loss=DISTILLATION.loss,
    loss_section="loss_fn",
    rules=DISTILLATION.rules,
)
"""The same over recorded text."""

ALGORITHMS = {
    algorithm.name: algorithm for algorithm in (GRPO, PPO, SFT, DPO, RM, DISTILLATION, OFF_POLICY_DISTILLATION)
}
"""By name, in the order in which errors and the documentation list them."""

SECTIONS = {
    "grpo": ("grpo",),
    "ppo": ("ppo", "value", "value_loss_fn"),
    "sft": ("sft",),
    "dpo": ("dpo",),
    "rm": ("rm",),
    "distillation": ("distillation", "teacher", "teachers"),
    "off_policy_distillation": ("off_policy_distillation", "teacher", "teachers"),
}
"""Sections of the configuration that an algorithm reads and no other does, its own first."""

if TYPE_CHECKING:
    AlgorithmName = str
else:  # so that the schema, its errors and its page list what is declared
    AlgorithmName = Literal[tuple(ALGORITHMS)]
