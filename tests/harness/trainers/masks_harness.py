"""Sampling masks for tests: made at random, read by loops, and by an engine with the samples that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.messages import SamplingParameters
from tandem.rollout.engine import EngineCompletion, SequenceRequest
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.samples.batch import MASKS, SampleBatch
from tandem.samples.sampling_masks import MaskFormat, SamplingMasks, mask_columns


def words_of(kept: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return a mask, as the format's page has it: ids of what is kept or left out, or a bitmap where that takes no more
    words."""
    num_words, ids, left_out = -(-len(kept) // 32), np.flatnonzero(kept), np.flatnonzero(~kept)
    named = ids if len(ids) <= len(left_out) else -1 - left_out
    if len(named) < num_words:
        return named.astype(np.int32)
    bitmap = [sum(int(bit) << place for place, bit in enumerate(kept[32 * i : 32 * i + 32])) for i in range(num_words)]
    return np.array(bitmap, dtype=np.uint32).view(np.int32)


def masked(batch: SampleBatch, vocabulary: int, *, seed: int = 0) -> SampleBatch:
    """Return a batch in which each counted token has a random mask: of itself alone, of few, of many, of all tokens."""
    random = np.random.default_rng(seed)
    parts = []
    for end, length in zip(np.cumsum(batch.lengths_S), batch.lengths_S, strict=True):
        drawn = []
        for place in np.flatnonzero(batch.loss_mask_T[end - length : end]).tolist():
            kept = random.random(vocabulary) < random.choice([0.0, 1 / vocabulary, 0.4, 0.9, 1.0])
            kept[batch.token_ids_T[end - length + place]] = True
            drawn.append((place, SamplingMasks.join([words_of(kept)])))
        parts.append(mask_columns(int(length), drawn))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return batch.replace(**joined)


def kept_in(batch: SampleBatch, vocabulary: int) -> list[torch.Tensor | None]:
    """Return for each sequence the tokens, ``[T, V]``, that each of its tokens was drawn from, read word by word."""
    if MASKS[0] not in batch.columns:
        return [None] * len(batch)
    is_kept_TV, first = torch.ones((len(batch.token_ids_T), vocabulary), dtype=torch.bool), 0
    for place, length in enumerate(batch.mask_lengths_T.tolist()):
        words = batch.mask_words_W[first : first + length].tolist()
        first += length
        if length == -(-vocabulary // 32):
            is_kept_TV[place] = torch.tensor([words[token // 32] >> (token % 32) & 1 for token in range(vocabulary)])
        elif length:
            ids = torch.tensor([word if word >= 0 else -1 - word for word in words])
            is_kept_TV[place] = torch.isin(torch.arange(vocabulary), ids) == (words[0] >= 0)
    return list(torch.split(is_kept_TV, batch.lengths_S.tolist()))


def drawn(
    folder: Path, vocabulary: int, requests: Sequence[Mapping[str, Any]], *, num_tokens: int = 16, num_samples: int = 8
) -> SampleBatch:
    """Return samples that the embedded engine draws with the weights in a folder, some by each of these changes of the
    sampling parameters."""
    mask_format = MaskFormat(vocabulary=vocabulary)
    sizes: dict[str, Any] = {"num_slots": 4, "max_total_sequence_length": 64, "dtype": "float32"}
    engine = TransformersEngine(folder, **sizes, with_weights=True, mask_format=mask_format)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": (), "stop_strings": ()}
    prompts = [tuple(range(3, 8 + sample % 4)) for sample in range(num_samples)]
    for sample, prompt in enumerate(prompts):
        changes = requests[sample % len(requests)]
        sampling = SamplingParameters(**{**plain, "max_new_tokens": num_tokens, **changes})
        engine.add_request(SequenceRequest(request_id=sample, prompt_ids=prompt, sampling=sampling, seed=sample))
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
    engine.close()
    completions.sort(key=lambda completion: completion.request_id)
    return SampleBatch.concatenate([as_sample(*pair) for pair in zip(prompts, completions, strict=True)])


def as_sample(prompt: tuple[int, ...], completion: EngineCompletion) -> SampleBatch:
    """Return a response as a rollout keeps it, with a reward and an advantage."""
    token_ids_T = np.array([*prompt, *completion.token_ids_T.tolist()], dtype=np.int32)
    is_made_T = np.arange(len(token_ids_T)) >= len(prompt)
    return SampleBatch(
        lengths_S=np.array([len(token_ids_T)], dtype=np.int32),
        token_ids_T=token_ids_T,
        loss_mask_T=is_made_T,
        generation_logprobs_T=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs_T]),
        advantages_S=np.array([(-1.0) ** completion.request_id], dtype=np.float32),
        rewards_S=np.ones(1, dtype=np.float32),
        **mask_columns(len(token_ids_T), [(len(prompt), completion.masks)]),
    )
