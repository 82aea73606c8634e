"""Micro-batches: a rank's sequences of a batch, divided by sequences or tokens, laid out for models.

`Shard` divides them, as a pure function of the batch's table and the configuration, so that every rank knows the number
of micro-batches of the others. `pad` lays them out. Beside the padded rows that losses read, a micro-batch may have one
row of tokens for the model, with nothing padded:

* packed: its sequences end to end. Attention, the only layer where tokens meet, knows where each sequence ends.
* shared prompts: each prompt once, followed by its responses. The samples of a prompt group begin with the same tokens,
and only attention sees every sample in full. Positions count within a sample, so a long row needs no more positions
than its longest sample. Log-probabilities and gradients are the same as for the samples one by one.

Shapes: ``S`` sequences of the whole batch, in ``U`` units of ``R`` each; ``T`` tokens of the shard. Within a
micro-batch ``B`` rows and ``T`` padded positions, ``V`` of them tokens; ``N`` tokens of the model's row; ``W`` <= ``T``
predicting positions; ``K`` valid tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tandem.common.errors import DataError, ModelError, WireError
from tandem.config.schema import DynamicBatching, Model, SequencePacking
from tandem.config.schema.columns import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    REWARDS,
    TEACHER_TOPK_INDICES,
    TEACHER_TOPK_LOGITS,
    VALUES,
    Column,
)
from tandem.samples.assignment import EMPTY_ROW, NO_PROMPT, Ints, by_prompt
from tandem.samples.batch import Batch
from tandem.samples.images.families import Grid, ImageSettings, grid_size, num_tokens, positions
from tandem.samples.routed_experts import COLUMN, FILL, RoutedExperts
from tandem.trainer import bins

Columns = Mapping[Column, NDArray[Any]]
"""Loss inputs for each token of a shard, ``[T]`` or ``[T, N]``."""
Groups = list[tuple[int, ...]]
"""The sequences of each micro-batch; `EMPTY_ROW` for none."""


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
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


class ImageBlock(NamedTuple):
    """The tokens of an image that attend to each other in both directions."""

    row: int
    """Row that they are in."""
    size: int
    """Number of them."""
    source_M: torch.Tensor
    """int64; the tokens of the row that their sequence consists of, in order, up to the image's last one."""


class RowImages(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The images whose tokens are in a micro-batch, as its model takes them: an image of a shared prompt once."""

    digests: tuple[str, ...]
    """In the order of their tokens: the rows one after the other, and the images in each."""
    grids: tuple[Grid, ...]
    """How they are divided, as the prompts' tokens say (`tandem.common.messages.ImageRef.grid`)."""
    position_ids: torch.Tensor | None
    """int64, ``[3, B, T]``, or ``[3, 1, N]`` for a row: time, height and width of each token; None for a model whose
    tokens are only counted.
    """
    blocks: tuple[ImageBlock, ...] = ()
    """The images in the rows that the model takes, for a family whose images attend in both directions."""


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
    row: Row | None = None
    """The same sequences as one row for the model; None if it takes the padded rows."""
    routed_experts_BTLK: torch.Tensor | None = None
    """int16; experts that the engine sent each token to, by layer, -1 where unknown; None without routing replay
    (`tandem.samples.routed_experts`).
    """
    images: RowImages | None = None
    """None for a model that does not see."""

    @property
    def generation_logprobs_BT(self) -> torch.Tensor:
        """Log-probabilities that the engine reported."""
        return self._read(GENERATION_LOGPROBS)

    @property
    def advantages_BT(self) -> torch.Tensor:
        """Advantages of the tokens' samples, or of the tokens themselves."""
        return self._read(ADVANTAGES)

    @property
    def previous_logprobs_BT(self) -> torch.Tensor | None:
        """Log-probabilities under the policy before the first optimizer step on this rollout batch.

        None if that is the policy in training itself.
        """
        return self.columns.get(PREVIOUS_LOGPROBS.name)

    @property
    def reference_logprobs_BT(self) -> torch.Tensor | None:
        """Log-probabilities under the reference model; None if the loss does not read them."""
        return self.columns.get(REFERENCE_LOGPROBS.name)

    @property
    def rewards_BT(self) -> torch.Tensor:
        """Rewards of the tokens' sequences, from samples or from a data set."""
        return self._read(REWARDS)

    @property
    def is_positive_BT(self) -> torch.Tensor | None:
        """True for samples with a reward above zero; None if the loss does not read rewards."""
        rewards_BT = self.columns.get(REWARDS.name)
        return None if rewards_BT is None else rewards_BT > 0

    @property
    def values_BT(self) -> torch.Tensor:
        """Values before the first optimizer step on this rollout batch."""
        return self._read(VALUES)

    @property
    def returns_BT(self) -> torch.Tensor:
        """Returns: the value model's targets."""
        return self._read(RETURNS)

    @property
    def teacher_topk_logits_BTN(self) -> torch.Tensor:
        """Logits of the teacher's likeliest tokens at each position."""
        return self._read(TEACHER_TOPK_LOGITS)

    @property
    def others_BTN(self) -> torch.Tensor | None:
        """The teacher's likeliest tokens at each position, which the policy scores too; None if none are read."""
        return self.columns.get(TEACHER_TOPK_INDICES.name)

    def _read(self, column: Column) -> torch.Tensor:
        if column.name not in self.columns:
            listed = ", ".join(self.columns) or "none"
            raise LookupError(f"no column {column.name} is declared of the loss of this algorithm, but {listed}")
        return self.columns[column.name]


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the ranks by one model: each replica sees its own sequences."""

    sizes: tuple[int, ...]
    """Parallel sizes. Models with equal sizes divide the ranks in the same way."""
    rank: int
    """This rank's replica."""
    size: int
    """The number of replicas."""
    sequence_divisor: int
    """The width of padded rows, and the length of every segment of a packed one, must be a multiple of this."""
    sum: Callable[[torch.Tensor], torch.Tensor]
    """Adds a float64 tensor over the replicas."""


class Shard:
    """The data-parallel shard of a batch for one replica of a model, divided into micro-batches.

    Args:
        settings: section of the model, with the sequences or tokens of a micro-batch.
        whole: table of the batch, with the length and the rank of each sequence.
        own: sequences that `whole` assigns to this replica, with their tokens.
        replicas: replicas of the model.
        shares_prompts: whether the model computes shared prompts once. Micro-batches of a number of sequences then keep
            sequences with the same prompt together.
        unit: consecutive sequences of the batch that must stay together. With 2, sequences ``2 i`` and ``2 i + 1`` are
            rows ``2 j`` and ``2 j + 1`` of one micro-batch, and empty rows also come in pairs. Batches and global
            batches must be whole numbers of units. Sizes of micro-batches that are not in tokens are in units.
        experts: description of the experts to replay for each token; None without replay.
        image_settings: the model's settings for images; None if it does not see.
    """

    def __init__(
        self,
        settings: Model,
        whole: Batch,
        own: Batch,
        replicas: Replicas,
        *,
        shares_prompts: bool = False,
        unit: int = 1,
        experts: RoutedExperts | None = None,
        image_settings: ImageSettings | None = None,
    ) -> None:
        self.whole, self.own, self.replicas = whole, own, replicas
        self.rows = rows = whole.rows_of(replicas.rank)
        """The shard's sequences, as rows of the whole batch."""
        assert whole.lengths_S[rows].tolist() == own.lengths_S.tolist(), "the shard is what the table says"
        self._place_of = {EMPTY_ROW: EMPTY_ROW} | {row: place for place, row in enumerate(rows.tolist())}
        self._settings, self._experts, self._image_settings = settings, experts, image_settings
        self._unit = unit
        # Units are assigned and divided. Rows only come in and go out.
        self._lengths_UR = whole.lengths_S.astype(np.int64).reshape(-1, unit)
        self._lengths_U = self._lengths_UR.sum(axis=1)
        self._rank_U = whole.rank_S[::unit]
        self._limits: SequencePacking | DynamicBatching | None = None
        self.divisible_by = math.lcm(settings.make_sequence_length_divisible_by, replicas.sequence_divisor)
        """Divisor of the width of padded rows, and of the segments of packed ones."""
        self.row_divisible_by: int | None = None
        """Divisor of the length of packed rows; None if rows are padded."""
        if settings.sequence_packing.enabled:
            self._limits = settings.sequence_packing
            self.row_divisible_by = settings.sequence_packing.sequence_length_round
        elif settings.dynamic_batching.enabled:
            self._limits = settings.dynamic_batching
            self.divisible_by = math.lcm(self.divisible_by, settings.dynamic_batching.sequence_length_round)
        self._shares_prompts = shares_prompts and self._limits is None
        self._prompt_S = whole.prompt_S if self._shares_prompts and unit == 1 else None

    def laid_out(self, groups: Groups, device: torch.device, columns: Columns | None = None) -> list[MicroBatch]:
        """Return the micro-batches of these groups of sequences, with the loss inputs of the shard's tokens."""
        return [
            pad(
                self.own,
                [self._place_of[row] for row in group],
                divisible_by=self.divisible_by,
                row_divisible_by=self.row_divisible_by,
                device=device,
                shares_prompts=self._shares_prompts,
                columns=columns,
                experts=self._experts,
                image_settings=self._image_settings,
            )
            for group in groups
        ]

    def training(self, rows: Sequence[int]) -> Groups:
        """Return this rank's micro-batches of a global batch, as many as on every other rank."""
        if self._limits is None:
            return self._cut_by_sequences(self._own_filled_up(rows), self._settings.train_micro_batch_size)
        return self._cut_by_tokens([rows], self._limits.train_mb_tokens)

    def scoring(self, global_batches: Sequence[Sequence[int]], size: int | None = None) -> Groups:
        """Return micro-batches for forward passes over all sequences that `training` gives this rank.

        `size` replaces ``policy.logprob_batch_size`` if micro-batches are counted in sequences.
        """
        if self._limits is None:
            units = [unit for rows in global_batches for unit in self._own_filled_up(rows)]
            return self._cut_by_sequences(units, size or self._settings.logprob_batch_size)
        return self._cut_by_tokens(global_batches, self._limits.logprob_mb_tokens)

    def _units_of(self, rows: Sequence[int], rank: int) -> list[int]:
        """Return the units of these sequences that are assigned to a rank."""
        units = np.array(rows[:: self._unit], dtype=np.int64) // self._unit
        return [int(unit) for unit in units[self._rank_U[units] == rank]]

    def _own_filled_up(self, rows: Sequence[int]) -> list[int]:
        """Return this rank's units, filled up with empty ones to the number of every rank."""
        units = self._units_of(rows, self.replicas.rank)
        # The sequences of one teacher are not evenly assigned.
        size = max(len(self._units_of(rows, rank)) for rank in range(self.replicas.size))
        return units + [EMPTY_ROW] * (size - len(units))

    def _cut_by_sequences(self, units: Sequence[int], size: int) -> Groups:
        return self._rows(micro_batches_of(units, self._lengths_U, size, self._prompt_S))

    def _cut_by_tokens(self, global_batches: Sequence[Sequence[int]], num_tokens: int) -> Groups:
        """Divide the units of all ranks, since each takes as many micro-batches as the one that needs the most."""
        cut = self._packed if self.row_divisible_by is not None else self._padded
        ranks = range(self.replicas.size)
        units = [[unit for rows in global_batches for unit in self._units_of(rows, rank)] for rank in ranks]
        groups = [cut(each, num_tokens) for each in units]
        missing = max(len(group) for group in groups) - len(groups[self.replicas.rank])
        return self._rows(groups[self.replicas.rank] + [(EMPTY_ROW,)] * missing)

    def _packed(self, units: list[int], num_tokens: int) -> Groups:
        assert isinstance(self._limits, SequencePacking)
        segments_UR = -(-self._lengths_UR[units] // self.divisible_by) * self.divisible_by
        lengths = segments_UR.sum(axis=1).tolist()
        # The longest must still fit after rounding up.
        packed = bins.pack(lengths, max(num_tokens, *lengths, 0), self._limits.algorithm)
        return [tuple(units[index] for index in group) for group in packed]

    def _padded(self, units: Sequence[int], num_tokens: int) -> Groups:
        """Put similar lengths together, the longest first: as many units as fit at the width of the first."""
        widest_U = self._lengths_UR.max(axis=1)
        ordered = sorted(units, key=lambda unit: (-int(widest_U[unit]), unit))
        groups: Groups = []
        while ordered:
            width = -(-int(widest_U[ordered[0]]) // self.divisible_by) * self.divisible_by
            size = max(1, num_tokens // (max(1, width) * self._unit))
            groups.append(tuple(ordered[:size]))
            ordered = ordered[size:]
        return groups

    def _rows(self, groups: Groups) -> Groups:
        """Return the sequences of the units."""
        if self._unit == 1:
            return groups
        return [tuple(row for unit in group for row in self._rows_of(unit)) for group in groups]

    def _rows_of(self, unit: int) -> Sequence[int]:
        if unit == EMPTY_ROW:
            return [EMPTY_ROW] * self._unit
        return range(unit * self._unit, (unit + 1) * self._unit)


def micro_batches_of(
    rows: Sequence[int],
    lengths_S: Sequence[int] | Ints,
    size: int,
    prompt_S: Ints | None = None,
) -> list[tuple[int, ...]]:
    """Group a rank's sequences into micro-batches of at most `size`, with similar lengths together to pad little.

    Sequences of equal `prompt_S` are adjacent, so a `size` that is a multiple of the samples of a prompt splits no
    group. The number of micro-batches depends only on the number of rows, so that equal shards take equal numbers of
    passes.
    """
    ordered = [row for run in by_prompt([row for row in rows if row != EMPTY_ROW], lengths_S, prompt_S) for row in run]
    ordered += [EMPTY_ROW] * (len(rows) - len(ordered))
    return [tuple(ordered[first : first + size]) for first in range(0, len(ordered), size)]


def pad(
    batch: Batch,
    rows: Sequence[int],
    *,
    divisible_by: int,
    device: torch.device,
    shares_prompts: bool = False,
    row_divisible_by: int | None = None,
    columns: Columns | None = None,
    experts: RoutedExperts | None = None,
    image_settings: ImageSettings | None = None,
) -> MicroBatch:
    """Lay the given sequences out as a micro-batch, with a width that is a multiple of `divisible_by`.

    Args:
        batch: batch with the sequences.
        rows: rows of the batch; `EMPTY_ROW` for none.
        divisible_by: divisor of the width, and of the segments of a packed row.
        device: device of the result.
        shares_prompts: whether to add the row that holds each prompt once, if any two sequences share one.
        row_divisible_by: divisor of the length of the packed row, which is added if this is given.
        columns: loss inputs for each of the batch's tokens; None for scoring only.
        experts: description of the experts that the batch's tokens went to; None without replay.
        image_settings: the model's settings for images; None if it does not see.

    """
    lengths_B = np.array([0 if row == EMPTY_ROW else batch.lengths_S[row] for row in rows], dtype=np.int64)
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    firsts_B = np.array([0 if row == EMPTY_ROW else ends_S[row] - batch.lengths_S[row] for row in rows], dtype=np.int64)
    width = -(-max(1, int(lengths_B.max())) // divisible_by) * divisible_by
    filled_BT = np.arange(width)[None, :] < lengths_B[:, None]
    sources = (firsts_B[:, None] + np.arange(width)[None, :])[filled_BT]

    def padded(values_T: NDArray[Any], dtype: DTypeLike, fill: float = 0) -> NDArray[Any]:
        values_BT = np.full((*filled_BT.shape, *values_T.shape[1:]), fill, dtype=dtype)
        values_BT[filled_BT] = values_T[sources]
        return values_BT

    def moved(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    token_ids_BT = padded(batch.token_ids_T, np.int64)
    valid_BT = padded(batch.valid(), np.bool_)
    routed_BTX = None
    if experts is not None and COLUMN in batch.columns:  # an empty shard has no columns
        routed_BTX = padded(batch.columns[COLUMN], np.uint8, fill=FILL)
    row = None
    if row_divisible_by is not None:
        divisors = {"divisible_by": divisible_by, "row_divisible_by": row_divisible_by}
        row = pack_row(token_ids_BT, lengths_B, valid_BT, **divisors, device=device)
    elif shares_prompts:
        row = _shared(batch, rows, token_ids_BT, valid_BT, routed_BTX, divisible_by=divisible_by, device=device)
    return MicroBatch(
        rows=tuple(rows),
        lengths_B=moved(lengths_B),
        token_ids_BT=moved(token_ids_BT),
        attention_mask_BT=moved(filled_BT),
        loss_mask_BT=moved(valid_BT),
        columns={
            column.name: moved(padded(values_T, column.dtype, column.fill))
            for column, values_T in (columns or {}).items()
        },
        row=row,
        routed_experts_BTLK=None
        if routed_BTX is None or experts is None
        else moved(
            experts.decode(routed_BTX.reshape(-1, experts.num_bytes)).reshape(*filled_BT.shape, -1, experts.top_k)
        ),
        images=None
        if image_settings is None
        else _images(batch, rows, token_ids_BT, lengths_B, row, image_settings, device),
    )


def _images(
    batch: Batch,
    rows: Sequence[int],
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    row: Row | None,
    settings: ImageSettings,
    device: torch.device,
) -> RowImages:
    """Return the images of a micro-batch. Raises `ModelError` if a sequence has other image tokens than its images."""
    position_XBT = np.zeros((3 if settings.family.has_mrope else 1, *token_ids_BT.shape), dtype=np.int64)
    found: list[tuple[int, str, Grid]] = []
    """Place of the first token among the ``B * T`` positions, digest and grid of each image."""
    for place, (sequence, length) in enumerate(zip(rows, lengths_B.tolist(), strict=True)):
        if sequence == EMPTY_ROW:
            continue
        digests, grids = images_in(batch, sequence, settings)
        token_ids_L = token_ids_BT[place, :length]
        try:
            position_XBT[:, place, :length], _ = positions(settings, token_ids_L.tolist(), grids)
        except DataError as error:
            raise ModelError(f"sequence {sequence} of the shard: {error}") from error
        starts = np.flatnonzero(token_ids_L == settings.image_token_id)
        used = 0
        for digest, grid in zip(digests, grids, strict=True):
            found.append((place * token_ids_BT.shape[1] + int(starts[used]), digest, grid))
            used += num_tokens(settings, grid)
    if row is not None:
        source_N = row.source_N.cpu().numpy()
        position_XBT = np.where(source_N >= 0, position_XBT.reshape(len(position_XBT), 1, -1)[..., source_N], 0)
        taken = set(source_N.tolist())
        found = [each for each in found if each[0] in taken]
    return RowImages(
        digests=tuple(digest for _, digest, _ in found),
        grids=tuple(grid for _, _, grid in found),
        position_ids=torch.from_numpy(position_XBT).to(device) if settings.family.has_mrope else None,
        blocks=_blocks(found, settings, token_ids_BT.shape, row, device) if settings.family.has_image_blocks else (),
    )


def _blocks(
    images: Sequence[tuple[int, str, Grid]],
    settings: ImageSettings,
    shape: tuple[int, ...],
    row: Row | None,
    device: torch.device,
) -> tuple[ImageBlock, ...]:
    """Return the blocks of images that begin at these places among the ``B * T`` positions of this shape."""
    num_rows, width = shape
    place_BT = np.tile(np.arange(width), (num_rows, 1))
    if row is not None:
        place_BT = np.full(num_rows * width, -1)
        source_N = row.source_N.cpu().numpy()
        place_BT[source_N[source_N >= 0]] = np.flatnonzero(source_N >= 0)
        place_BT = place_BT.reshape(num_rows, width)
        if row.source_BW is not None:  # a sample's prompt may be in the row as another's
            source_BW = row.source_BW.cpu().numpy()
            used = min(width, source_BW.shape[1])
            place_BT[:, :used] = source_BW[:, :used]
    blocks = []
    for source, _, grid in images:
        sample, start = divmod(source, width)
        size = num_tokens(settings, grid)
        source_M = torch.from_numpy(place_BT[sample, : start + size].copy()).to(device)
        blocks.append(ImageBlock(sample if row is None else 0, size, source_M))
    return tuple(blocks)


def images_in(batch: Batch, row: int, settings: ImageSettings) -> tuple[list[str], list[Grid]]:
    """Return the digests and the grids of a sequence's images."""
    size = grid_size(settings.family)
    first, last = batch.offsets("I")[row : row + 2]
    digests = [digest.tobytes().hex() for digest in batch.image_digests_IX[first:last]]
    return digests, [tuple(grid[:size]) for grid in batch.image_grids_IX[first:last].tolist()]


def check_image_tokens(batch: Batch, settings: ImageSettings) -> None:
    """Raise `WireError` unless each sequence has the image tokens of its images, as many as their grids need."""
    ends_S = batch.offsets()
    for row in range(len(batch)):
        _, grids = images_in(batch, row, settings)
        tokens_T = batch.token_ids_T[ends_S[row] : ends_S[row + 1]]
        found = int((tokens_T == settings.image_token_id).sum())
        try:
            needed = sum(num_tokens(settings, grid) for grid in grids)
        except ValueError as error:
            raise WireError(f"image_grids_IX: sequence {row} has an impossible grid: {error}") from error
        if found != needed:
            raise WireError(
                f"token_ids_T: sequence {row} has {found} image tokens, and its {len(grids)} images need {needed}"
            )


def _shared(
    batch: Batch,
    rows: Sequence[int],
    token_ids_BT: NDArray[np.int64],
    valid_BT: NDArray[np.bool_],
    routed_BTX: NDArray[np.uint8] | None,
    *,
    divisible_by: int,
    device: torch.device,
) -> Row | None:
    """Return the row that holds each prompt once; None if there are as many prompts as sequences.

    `routed_BTX` has the experts of each token. A prompt with tokens at other experts is a different prompt.
    """
    # Sequences that share theirs with no other have numbers that no prompt has. Nothing predicts the very first token,
    # so it belongs to the prompt whatever the response is.
    prompt_B, lengths_B = prompts_of(batch, rows)
    if routed_BTX is not None:
        prompt_B = _told_apart(prompt_B, lengths_B, routed_BTX)
    held = prompt_B[prompt_B != EMPTY_ROW]
    if len(np.unique(held)) == len(held):
        return None
    return share_prompts(token_ids_BT, valid_BT, prompt_B, lengths_B, divisible_by=divisible_by, device=device)


def prompts_of(batch: Batch, rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a number for the prompt of each of these sequences, equal for equal prompts, and the prompt's length."""
    prompt_S, lengths_S = batch.prompt_S, batch.prompt_lengths_S
    alone = int(prompt_S.max(initial=0)) + 1  # numbers from here on belong to no prompt
    numbers = [
        row if row == EMPTY_ROW else prompt_S[row] if prompt_S[row] != NO_PROMPT else alone + row for row in rows
    ]
    # Nothing predicts the very first token, so it belongs to the prompt whatever the response is.
    lengths = [0 if row == EMPTY_ROW else max(1, lengths_S[row]) for row in rows]
    return np.array(numbers, dtype=np.int64), np.array(lengths, dtype=np.int64)


def _told_apart(
    prompt_B: NDArray[np.int64], lengths_B: NDArray[np.int64], routed_BTX: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Return new numbers of prompts, equal for equal prompts with tokens at the same experts."""
    firsts: dict[tuple[int, bytes], int] = {}
    return np.array(
        [
            EMPTY_ROW if prompt == EMPTY_ROW else firsts.setdefault((prompt, routed_BTX[row, :length].tobytes()), row)
            for row, (prompt, length) in enumerate(zip(prompt_B.tolist(), lengths_B.tolist(), strict=True))
        ],
        dtype=np.int64,
    )


def unpad_into(values_T: NDArray[Any], values_BT: torch.Tensor, batch: Batch, rows: Sequence[int]) -> None:
    """Write a micro-batch's padded values back to the positions of their tokens in the ragged batch."""
    ends_S = np.cumsum(batch.lengths_S, dtype=np.int64)
    padded = values_BT.detach().cpu().numpy()
    for values, row in zip(padded, rows, strict=True):
        if row != EMPTY_ROW:
            length = int(batch.lengths_S[row])
            values_T[ends_S[row] - length : ends_S[row]] = values[:length]


def pack_row(
    token_ids_BT: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
    valid_BT: NDArray[np.bool_],
    *,
    divisible_by: int,
    row_divisible_by: int,
    device: torch.device,
) -> Row:
    """Lay the sequences end to end. The length of each segment, and of the row, is a multiple of its divisor.

    Sequences of length zero have no segment. An empty row is one segment of padding.
    """
    segments_B = -(-lengths_B // divisible_by) * divisible_by
    firsts_B = np.cumsum(segments_B) - segments_B
    used = int(segments_B.sum())
    whole = np.lcm(divisible_by, row_divisible_by)
    num_tokens = int(max(1, -(-used // whole)) * whole)
    lengths = [int(length) for length in segments_B if length]
    if num_tokens > used:
        lengths.append(num_tokens - used)

    row_K, position_K = np.nonzero(valid_BT)
    token_ids_N = np.zeros(num_tokens, dtype=np.int64)
    filled_BT = np.arange(token_ids_BT.shape[1]) < lengths_B[:, None]
    place_V = (firsts_B[:, None] + np.arange(token_ids_BT.shape[1]))[filled_BT]
    token_ids_N[place_V] = token_ids_BT[filled_BT]
    source_N = np.full(num_tokens, -1, dtype=np.int64)
    source_N[place_V] = np.flatnonzero(filled_BT)

    def moved(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Row(
        token_ids_1N=moved(token_ids_N[None]),
        position_ids_1N=moved(np.concatenate([np.arange(length) for length in lengths])[None]),
        lengths=tuple(lengths),
        predictor_K=moved(firsts_B[row_K] + position_K - 1),
        source_N=moved(source_N),
    )


def share_prompts(
    token_ids_BT: NDArray[np.int64],
    valid_BT: NDArray[np.bool_],
    prompt_B: NDArray[np.int64],
    prompt_lengths_B: NDArray[np.int64],
    *,
    divisible_by: int,
    device: torch.device,
) -> Row:
    """Lay padded samples out as one row, with a length that is a multiple of `divisible_by`.

    Rows of equal `prompt_B` begin with the same `prompt_lengths_B` tokens. Tokens after the last one that predicts a
    valid token are left out, and so are samples without valid tokens.
    """
    num_samples, width = valid_BT.shape
    last_B = np.where(valid_BT.any(axis=1), width - 1 - valid_BT[:, ::-1].argmax(axis=1), 0)
    position_W = np.arange(max(1, int(last_B.max())))
    is_used_BW = position_W < last_B[:, None]
    owner_B = _owners(prompt_B, last_B > 0)
    is_prompt_BW = position_W < prompt_lengths_B[:, None]
    is_own_BW = is_used_BW & (~is_prompt_BW | (owner_B == np.arange(num_samples))[:, None])

    taken_N = np.flatnonzero(is_own_BW)
    number_BW = (np.cumsum(is_own_BW) - 1).reshape(is_own_BW.shape)
    row_BW = np.where(is_prompt_BW, owner_B[:, None], np.arange(num_samples)[:, None])
    source_BW = np.where(is_used_BW, number_BW[row_BW, position_W], 0)
    position_N = taken_N % len(position_W)
    padding = (0, max(1, -(-len(taken_N) // divisible_by)) * divisible_by - len(taken_N))

    def moved(values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Row(
        token_ids_1N=moved(np.pad(token_ids_BT[:, : len(position_W)].reshape(-1)[taken_N], padding)[None]),
        position_ids_1N=moved(np.pad(position_N, padding)[None]),
        source_BW=moved(source_BW),
        taken_N=moved(np.pad(taken_N, padding)),
        predictor_K=moved(source_BW[:, : width - 1][valid_BT[:, 1 : len(position_W) + 1]]),
        source_N=moved(np.pad(taken_N // len(position_W) * width + position_N, padding, constant_values=-1)),
    )


def _owners(prompt_B: NDArray[np.int64], counts_B: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each sample the first one of the same prompt with valid tokens; itself if there is none."""
    owners: dict[int, int] = {}
    for row, (prompt, counts) in enumerate(zip(prompt_B.tolist(), counts_B.tolist(), strict=True)):
        if counts:
            owners.setdefault(prompt, row)
    return np.array([owners.get(prompt, row) for row, prompt in enumerate(prompt_B.tolist())], dtype=np.int64)
