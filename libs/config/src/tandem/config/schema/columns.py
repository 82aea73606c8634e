"""Loss inputs beside the log-probabilities: columns, each declared once.

A declaration names the source of a column. Everything else follows: every column is sent, padded, packed and sharded
alike. The number of a sequence applies to each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from tandem.config.schema import Config

Model = Literal["policy", "reference", "value", "teacher"]
"""Models that a trainer can hold and score tokens with: the policy in training, the policy before any training, a
model of each state's value, and a model that the policy learns from."""

MODELS: tuple[Model, ...] = get_args(Model)

Head = Literal["vocabulary", "value", "score"]
"""Head on top of a model's layers. vocabulary: a language model's output layer. value: one number for each token, as
in Transformers' token classifiers. score: one number for a sequence, as in its sequence classifiers."""

Source = Literal["engine", "environment", "coordinator", "trainer", "policy", "reference", "value", "teacher"]
"""Source of a column. engine: an array of `tandem.samples.batch.SampleArrays`, by token. environment: an entry of a
score's `components`, by sample. coordinator: an array of `tandem.samples.batch.BatchTable`, by sequence. trainer:
computed by the ranks from the others (`tandem.config.schema.declarations.Algorithm.finisher`). policy, reference:
log-probabilities under that model, before the first optimizer step on the batch. value, teacher: outputs of that
model at the same time."""


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A per-token or per-sequence input of a loss."""

    name: str
    source: Source
    dtype: Literal["float32", "int32"] = "float32"
    fill: float = 0.0
    """Value in the padding, and where the source has none."""
    number: int = 0
    """Index among the outputs of its model (`tandem.trainer.scoring.Scores`)."""
    num_each: Callable[[Config], int] | None = None
    """Number of values per token, for a column with more than one."""
    is_read: Callable[[Config, int], bool] = lambda config, num_steps: True
    """Whether the loss reads it, given the configuration and the number of optimizer steps in a step."""

    @property
    def model(self) -> Model | None:
        """The model that provides its scores; None if it comes with the batch or is computed from other columns."""
        return next((model for model in MODELS if model == self.source), None)


GENERATION_LOGPROBS = Column(name="generation_logprobs", source="engine")
"""Log-probability of each token under the sampling distribution; zero for tokens the policy did not generate."""
VERSIONS = Column(name="versions", source="engine", dtype="int32", fill=-1)
"""Weight version that generated each token; -1 for other tokens."""
ADVANTAGES = Column(name="advantages", source="coordinator")
REWARDS = Column(name="rewards", source="coordinator")
"""Rewards behind the advantages; for preferences, the margin of the chosen response."""
PREVIOUS_LOGPROBS = Column(name="previous_logprobs", source="policy")
REFERENCE_LOGPROBS = Column(name="reference_logprobs", source="reference")
VALUES = Column(name="values", source="value")
"""Expected return of the rest of the response, before each token."""
RETURNS = Column(name="returns", source="trainer")
"""Targets of the value model: the actual returns."""
TEACHER_LOGPROBS = Column(name="teacher_logprobs", source="teacher")
TEACHER_TOPK_LOGITS = Column(name="teacher_topk_logits", source="teacher", num_each=lambda config: config.topk_logits_k)
"""Logits of the teacher's likeliest tokens at each position."""
TEACHER_TOPK_INDICES = msgspec.structs.replace(
    TEACHER_TOPK_LOGITS, name="teacher_topk_indices", dtype="int32", number=1
)
"""Ids of the teacher's likeliest tokens at each position."""

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
    )
}
"""Built-in columns, by name. ``loss_fn.columns`` may name these, and others of environments and models."""


TEACHER = "teacher"
"""Name of the batch table's array with the teacher of each sequence, if there are several."""

TAKEN = frozenset(
    {
        TEACHER,
        "lengths",
        "num_counted",
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
"""Names of the batch table's other arrays, which no column may have."""


def read_where(column: Column, is_read: Callable[[Config, int], bool]) -> Column:
    """Return the column with another condition for reading it."""
    return msgspec.structs.replace(column, is_read=is_read)
