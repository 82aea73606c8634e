"""Micro-batches: sequences of a batch as models and losses take them.

Besides the padded rows that losses read, a micro-batch may have one row of tokens for the model, with nothing padded:

* packed: its sequences end to end. Attention, the only layer where tokens meet, knows where each sequence ends.
* shared prompts: each prompt once, followed by its responses. The samples of a prompt group begin with the same tokens,
and only attention sees every sample in full. Positions count within a sample, so a long row needs no more positions
than its longest sample. Log-probabilities and gradients are the same as for the samples one by one.

`tandem.trainer.batching` makes them.

Shapes: ``B`` rows and ``T`` padded positions; ``N`` tokens of the model's row; ``W`` <= ``T`` predicting positions;
``K`` valid tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from numpy.typing import NDArray

from tandem.config.schema import columns as declared
from tandem.samples.batch import SampleBatch

if TYPE_CHECKING:
    from tandem.trainer.batching.masks import TokenMasks

Columns = Mapping[declared.ColumnDeclaration, NDArray[Any]]
"""Loss inputs for each token of a shard, ``[T]`` or ``[T, N]``."""
Groups = list[tuple[int, ...]]
"""The sequences of each micro-batch; `EMPTY_ROW` for none."""


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A micro-batch as the one row of tokens that its model takes."""

    token_ids_1N: torch.Tensor
    """int64; zero in the padding of a packed row."""
    position_ids_1N: torch.Tensor
    """int64; counted within each token's own sequence."""
    predictor_K: torch.Tensor
    """int64; the row's token that predicts each valid token, in the order of the loss mask."""
    source_N: torch.Tensor
    """int64; index of each token of the row among the ``B * T`` positions; -1 in the padding."""
    lengths: tuple[int, ...] = ()
    """Lengths of the segments of a packed row, each a sequence with its padding. They sum to ``N``. The last may be
    only padding. Empty for shared prompts.
    """
    source_BW: torch.Tensor | None = None
    """int64; for shared prompts, the row's token at each position of each sample; 0 in the padding, where causal
    attention hides it. None in a packed row.
    """
    taken_N: torch.Tensor | None = None
    """int64; index, among the ``B * W`` positions, of the attention output for each token of the row. None in a packed
    row.
    """


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some sequences of a batch, padded on the right to one width, for one forward and backward pass.

    Because the padding comes last, a causal model needs no attention mask for the positions before it.
    """

    rows: tuple[int, ...]
    """Place in the shard of each row's sequence; `EMPTY_ROW` for none."""
    lengths_B: torch.Tensor
    """int64."""
    token_ids_BT: torch.Tensor
    """int64; zero in the padding."""
    attention_mask_BT: torch.Tensor
    """True where there is a token."""
    loss_mask_BT: torch.Tensor
    """True for valid tokens, which count in the loss; never at position 0, which nothing predicts."""
    columns: Mapping[str, torch.Tensor] = {}
    """Loss inputs for each token, by the name of their declaration (`tandem.config.schema.columns`): ``[B, T]``, or
    ``[B, T, N]`` for several numbers.
    """
    row: TokenRow | None = None
    """The same sequences as one row for the model; None if it takes the padded rows."""
    routed_experts_BTLK: torch.Tensor | None = None
    """int16; experts that the engine sent each token to, by layer, -1 where unknown; None without routing replay
    (`tandem.samples.routed_experts`).
    """
    media: Any = None
    """The model's inputs besides tokens, as `MediaFormat` lays them out; None for text alone."""
    masks: TokenMasks | None = None
    """Sampling masks of the valid tokens, in the order of the loss mask; None to score over the whole vocabulary."""

    @property
    def generation_logprobs_BT(self) -> torch.Tensor:
        """Log-probabilities that the engine reported."""
        return self._read(declared.GENERATION_LOGPROBS)

    @property
    def advantages_BT(self) -> torch.Tensor:
        """Advantages of the tokens' samples, or of the tokens themselves."""
        return self._read(declared.ADVANTAGES)

    @property
    def previous_logprobs_BT(self) -> torch.Tensor | None:
        """Log-probabilities under the policy before the first optimizer step on this rollout batch.

        None if that is the policy in training itself.
        """
        return self.columns.get(declared.PREVIOUS_LOGPROBS.name)

    @property
    def reference_logprobs_BT(self) -> torch.Tensor | None:
        """Log-probabilities under the reference model; None if the loss does not read them."""
        return self.columns.get(declared.REFERENCE_LOGPROBS.name)

    @property
    def rewards_BT(self) -> torch.Tensor:
        """Rewards of the tokens' sequences, from samples or from a data set."""
        return self._read(declared.REWARDS)

    @property
    def is_positive_BT(self) -> torch.Tensor | None:
        """True for samples with a reward above zero; None if the loss does not read rewards."""
        rewards_BT = self.columns.get(declared.REWARDS.name)
        return None if rewards_BT is None else rewards_BT > 0

    @property
    def values_BT(self) -> torch.Tensor:
        """Values before the first optimizer step on this rollout batch."""
        return self._read(declared.VALUES)

    @property
    def returns_BT(self) -> torch.Tensor:
        """Returns: the value model's targets."""
        return self._read(declared.RETURNS)

    @property
    def teacher_topk_logits_BTN(self) -> torch.Tensor:
        """Logits of the teacher's likeliest tokens at each position."""
        return self._read(declared.TEACHER_TOPK_LOGITS)

    @property
    def teacher_topk_ids_BTN(self) -> torch.Tensor | None:
        """The teacher's likeliest tokens at each position, which the policy scores too; None if none are read."""
        return self.columns.get(declared.TEACHER_TOPK_INDICES.name)

    def _read(self, column: declared.ColumnDeclaration) -> torch.Tensor:
        if column.name not in self.columns:
            listed = ", ".join(self.columns) or "none"
            raise LookupError(f"no column {column.name} is declared of the loss of this algorithm, but {listed}")
        return self.columns[column.name]


MediaInputs = Callable[[MicroBatch], dict[str, Any]]
"""The inputs of a model's forward pass that come from the media of a micro-batch."""


class MediaFormat(Protocol):
    """The media of samples as columns of a batch, and as parts of micro-batches."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        ...

    def make_empty(self) -> dict[str, NDArray[Any]]:
        """Return the columns of no sample."""
        ...

    def check(self, batch: SampleBatch) -> None:
        """Raise `WireError` unless the columns are possible, and those of the tokens."""
        ...

    def lay_out(
        self,
        batch: SampleBatch,
        rows: Sequence[int],
        token_ids_BT: NDArray[Any],
        lengths_B: NDArray[Any],
        row: TokenRow | None,
        device: torch.device,
    ) -> Any:
        """Return the media of a micro-batch as `MediaInputs` takes them. Raises `ModelError`."""
        ...


def move_to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device."""
    return torch.from_numpy(values).to(device)
