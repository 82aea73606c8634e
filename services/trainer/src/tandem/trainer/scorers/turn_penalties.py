"""Advantages of agents' turns with a flaw, in the place of those of their samples: NeMo-RL's penalties.

Shapes: ``T`` tokens of the rank's shard of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.dotted import named
from tandem.config import Config
from tandem.config.schema.columns import ADVANTAGES
from tandem.config.schema.declarations import token_estimator
from tandem.samples.batch import SampleBatch
from tandem.samples.model_files import load_tokenizer
from tandem.samples.turns.flaws import FlawFinder
from tandem.trainer.advantages import AdvantageEstimator, EstimatedAdvantages, ScoredShard

_FINDERS: dict[tuple[str, str | None], FlawFinder] = {}
"""Finders by the tokenizer's name and the format of calls: reading a tokenizer takes a second."""


def penalise(config: Config, scored: ScoredShard) -> EstimatedAdvantages:
    """Return the advantages of the run's estimator, replaced in each turn that has a flaw.

    A turn is what the policy generated without a token of others in between. Of two flaws the call counts, as in
    NeMo-RL.
    """
    path, settings = token_estimator(config), config.grpo
    if path:
        estimate: AdvantageEstimator = named(path)
        columns, metrics = estimate(config, scored)
    else:
        columns, metrics = {ADVANTAGES: np.asarray(scored.batch.of_tokens(ADVANTAGES.name), dtype=np.float32)}, {}
    advantages_T, finder = columns[ADVANTAGES].copy(), _finder(config)
    counts = np.zeros(3)
    for begin, start, end in turns_in(scored.batch):
        token_ids = scored.batch.token_ids_T
        is_invalid_call, is_malformed = finder.find(token_ids[begin:start].tolist(), token_ids[start:end].tolist())
        counts[0] += 1
        if is_invalid_call and settings.invalid_tool_call_advantage is not None:
            advantages_T[start:end] = settings.invalid_tool_call_advantage
            counts[1] += 1
        elif is_malformed and settings.malformed_thinking_advantage is not None:
            advantages_T[start:end] = settings.malformed_thinking_advantage
            counts[2] += 1
    num_turns, num_invalid, num_malformed = scored.sum_over_ranks(torch.from_numpy(counts)).tolist()
    rates = {
        "num_assistant_messages": num_turns,
        "num_invalid_tool_calls": num_invalid,
        "num_malformed_thinking": num_malformed,
        "invalid_tool_call_rate": num_invalid / max(1.0, num_turns),
        "malformed_thinking_rate": num_malformed / max(1.0, num_turns),
    }
    return EstimatedAdvantages({**columns, ADVANTAGES: advantages_T}, {**metrics, **rates})


def turns_in(batch: SampleBatch) -> Iterator[tuple[int, int, int]]:
    """Yield the first token of each turn's sequence, of the turn, and the end of the turn."""
    offsets: NDArray[np.int64] = batch.offsets()
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        counted = np.concatenate([[False], batch.loss_mask_T[first:end], [False]]).astype(np.int8)
        changes = np.flatnonzero(np.diff(counted)) + first
        yield from ((first, int(start), int(stop)) for start, stop in changes.reshape(-1, 2))


def _finder(config: Config) -> FlawFinder:
    key = str(config.policy.tokenizer), config.policy.generation.tool_call_parser
    if key not in _FINDERS:
        _FINDERS[key] = FlawFinder(load_tokenizer(config), config.policy.generation.tool_call_parser)
    return _FINDERS[key]
