"""The table of a batch that was not generated: its sequences come from a data set."""

from __future__ import annotations

import numpy as np

from tandem.samples.batch import SampleBatch


def build_given_table(batch: SampleBatch) -> SampleBatch:
    """Return the table (`TABLE`) of a batch that was not generated, all assigned to rank 0.

    Sequences with the same tokens before the first valid one share them as their prompt, if they have the same
    images.
    """
    prompts: dict[tuple[bytes, bytes], int] = {}
    firsts, lengths = [], []
    start = 0
    for row, length in enumerate(batch.lengths_S.tolist()):
        mask_T = batch.loss_mask_T[start : start + length]
        # Nothing predicts the very first token, so it belongs to the prompt whatever the mask says.
        prompt = max(1, int(mask_T.argmax()) if mask_T.any() else length)
        key = batch.token_ids_T[start : start + prompt].tobytes(), images_of(batch, row)
        firsts.append(prompts.setdefault(key, row))
        lengths.append(prompt)
        start += length
    nothing_S = np.zeros(len(firsts), dtype=np.int32)
    return SampleBatch(
        lengths_S=batch.lengths_S,
        num_valid_S=batch.num_valid().astype(np.int32),
        prompt_S=np.array(firsts, dtype=np.int32),
        prompt_lengths_S=np.array(lengths, dtype=np.int32),
        rank_S=nothing_S,
        advantages_S=batch.advantages_S,
        rewards_S=batch.rewards_S,
        source_S=nothing_S - 1,
        command_S=nothing_S.astype(np.int64),
        group_S=nothing_S,
        sample_S=nothing_S,
        branch_S=nothing_S,
    )


def images_of(batch: SampleBatch, row: int) -> bytes:
    """Return the digests of a sequence's images, one after the other; empty where the model does not see."""
    if "num_images_S" not in batch.columns:
        return b""
    offsets = batch.offsets("I")
    return batch.image_digests_IX[offsets[row] : offsets[row + 1]].tobytes()
