"""Columns: what a loss reads of each token beside its log-probability, each declared once.

A declaration says which source fills the column, and everything else follows: it travels, is padded, packed and sharded
like any other. A number of a sequence is that of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from tandem.config.schema import Config

Model = Literal["policy", "reference", "value", "teacher"]
"""Models that a trainer can hold and score tokens with: the policy in training, the policy before any training, a model
that says what each token's state is worth, and one that the policy learns from."""

MODELS: tuple[Model, ...] = get_args(Model)

SCORING_SECONDS: dict[Model, str] = {
    "policy": "logprobs",
    "reference": "reference_logprobs",
    "value": "values",
    "teacher": "teacher_logprobs",
}
"""Names of the time that each model takes to score a batch."""

ALWAYS_TIMED = (SCORING_SECONDS["policy"], SCORING_SECONDS["reference"])
"""Names of times that every training step reports, zero where the model does not score."""

Head = Literal["vocabulary", "value", "score"]
"""Head on top of a model's layers. vocabulary: a language model's output layer. value: one number for each token, as
in Transformers' token classifiers. score: one number for a sequence, as in its sequence classifiers."""

Source = Literal["engine", "environment", "coordinator", "trainer", "policy", "reference", "value", "teacher"]
"""Sources that fill a column. engine: an array of samples (`tandem.samples.batch.SAMPLES`), of tokens. environment: a
score's component of that name. coordinator: an array of a table (`tandem.samples.batch.TABLE`), of sequences.
trainer: made by the ranks of the others (`tandem.config.schema.declarations.Algorithm.advantage_estimator`). policy,
reference: log-probabilities of tokens under that model, before the first optimizer step on the batch. value, teacher:
that model's scores, then."""


class ColumnDeclaration(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Declaration of a column."""

    name: str
    source: Source
    dtype: Literal["float32", "int32"] = "float32"
    fill: float = 0.0
    """Value in the padding, and where the source says nothing."""
    number: int = 0
    """Place among the numbers that its model says of a token (`tandem.trainer.scores.Scores`)."""
    num_each: Callable[[Config], int] | None = None
    """Numbers of each token, by the configuration; None where it is one."""
    is_read: Callable[[Config, int], bool] = lambda config, num_steps: True
    """Whether the loss reads it, by the configuration, in a step of so many optimizer steps."""

    @cached_property
    def model(self) -> Model | None:
        """The model that fills it with scores; None if it comes with the batch, or is made of other columns."""
        return next((model for model in MODELS if model == self.source), None)


GENERATION_LOGPROBS = ColumnDeclaration(name="generation_logprobs", source="engine")
"""Log-probability of each token under the sampling distribution; zero for tokens the policy did not generate."""
VERSIONS = ColumnDeclaration(name="versions", source="engine", dtype="int32", fill=-1)
"""Weight version that generated each token; -1 for tokens the policy did not generate."""
ADVANTAGES = ColumnDeclaration(name="advantages", source="coordinator")
REWARDS = ColumnDeclaration(name="rewards", source="coordinator")
"""Rewards behind the advantages; for preferences, the margin of the chosen response."""
PREVIOUS_LOGPROBS = ColumnDeclaration(name="previous_logprobs", source="policy")
REFERENCE_LOGPROBS = ColumnDeclaration(name="reference_logprobs", source="reference")
VALUES = ColumnDeclaration(name="values", source="value")
"""Expected return of the rest of the response, before each token."""
RETURNS = ColumnDeclaration(name="returns", source="trainer")
"""Returns that were observed: the value model's targets."""
TEACHER_LOGPROBS = ColumnDeclaration(name="teacher_logprobs", source="teacher")
TEACHER_TOPK_LOGITS = ColumnDeclaration(
    name="teacher_topk_logits",
    source="teacher",
    num_each=lambda config: config.topk_logits_k * max(1, len(config.joint_teachers)),
)
"""Logits of the teacher's likeliest tokens in the place of each; of joint teachers, those of one after the other."""
TEACHER_TOPK_INDICES = msgspec.structs.replace(
    TEACHER_TOPK_LOGITS, name="teacher_topk_indices", dtype="int32", number=1
)
"""Ids of these tokens."""
TEACHER_CONFIDENCE = ColumnDeclaration(
    name="teacher_confidence",
    source="teacher",
    number=2,
    num_each=lambda config: len(config.joint_teachers),
    is_read=lambda config, num_steps: bool(config.weighs_teachers_by),
)
"""How far each joint teacher is to be trusted in the place of each token."""
TEACHER_WEIGHTS = ColumnDeclaration(
    name="teacher_weights",
    source="trainer",
    num_each=lambda config: len(config.joint_teachers),
    is_read=lambda config, num_steps: bool(config.joint_teachers),
)
"""Weights of the divergences from joint teachers."""

BUILT_IN = {
    column.name: column
    for column in (
        GENERATION_LOGPROBS,
        VERSIONS,
        ADVANTAGES,
        REWARDS,
        PREVIOUS_LOGPROBS,
        REFERENCE_LOGPROBS,
        VALUES,
        RETURNS,
        TEACHER_LOGPROBS,
        TEACHER_TOPK_LOGITS,
        TEACHER_TOPK_INDICES,
        TEACHER_CONFIDENCE,
        TEACHER_WEIGHTS,
    )
}
"""Columns by name. ``loss_fn.columns`` may ask for these, and for others of environments and models."""


TEACHER = "teacher"
"""Name, in a batch, of the number of each sequence's teacher, where there are several."""

TAKEN = frozenset(
    {
        TEACHER,
        "lengths",
        "num_valid",
        "prompt",
        "prompt_lengths",
        "rank",
        "source",
        "command",
        "group",
        "sample",
        "branch",
    }
)
"""Other arrays of a batch's table: no column can have such a name."""


def read_where(column: ColumnDeclaration, is_read: Callable[[Config, int], bool]) -> ColumnDeclaration:
    """Return the column with another condition for reading it."""
    return msgspec.structs.replace(column, is_read=is_read)
