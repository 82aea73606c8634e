"""SFT's data: worked solutions as training batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

import numpy as np

from tandem.common.batch import TrainingBatch
from tandem.common.config import Config
from tandem.common.errors import DataError
from tandem.common.messages import Problem, Purpose, SamplesFinished
from tandem.common.tokenizer import Tokenizer
from tandem.common.wire import Arrays
from tandem.coordinator.data import PromptEncoder, epoch_stream, load_problems

Example = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens, and which of them count in the loss."""


class SftFeed:
    """What the loop asks of SFT (see `tandem.coordinator.feed.Feed`); it has no engines, so nothing is generated."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._encoder = PromptEncoder(config, tokenizer)
        problems = load_problems(config)
        self._train = [self._encode(problem) for problem in problems.train]
        num_validation = config.sft.val_batches * config.sft.val_global_batch_size
        self._validation = [self._encode(problem) for problem in problems.validation[:num_validation]]

    @property
    def num_validation(self) -> int:
        """Prompts to generate for validation: none."""
        return 0

    @property
    def num_steps(self) -> int:
        """Steps that a whole run takes: the fewer of ``max_num_steps`` and ``max_num_epochs``."""
        sft = self._config.sft
        per_epoch = max(1, len(self._train) // self._config.policy.train_global_batch_size)
        return min(sft.max_num_steps, sft.max_num_epochs * per_epoch)

    def sampling(self, purpose: Purpose) -> Never:
        """Fail: SFT draws no samples."""
        raise AssertionError("SFT generates nothing")

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> Never:
        """Fail: SFT draws no samples."""
        raise AssertionError("SFT generates nothing")

    def take_samples(self, finished: SamplesFinished, arrays: Arrays) -> Never:
        """Fail: SFT draws no samples."""
        raise AssertionError("SFT generates nothing")

    def discard_samples(self, step: int, purpose: Purpose, groups: Sequence[int]) -> Never:
        """Fail: SFT draws no samples."""
        raise AssertionError("SFT generates nothing")

    def batch(self, step: int, purpose: Purpose) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the training batch of `step`, or the whole validation set."""
        if purpose == "validate":
            return solutions_batch(self._validation), {}
        size = self._config.policy.train_global_batch_size
        order = epoch_stream(self._config.sft.seed, len(self._train), (step - 1) * size, size)
        return solutions_batch([self._train[i] for i in order]), {}

    def validation_examples(self, step: int, count: int) -> list[str]:
        """Return nothing: SFT validates by its loss."""
        return []

    def finish_step(self, step: int) -> dict[str, float]:
        """Return nothing: there are no samples."""
        return {}

    def _encode(self, problem: Problem) -> Example:
        """Return the tokens of prompt and solution, and which of them count."""
        prompt_ids = self._encoder.encode(problem).prompt_ids
        solution = self._encoder.encode_solution(problem)
        token_ids = prompt_ids + solution.token_ids
        limit = self._config.policy.max_total_sequence_length
        if len(token_ids) > limit:
            raise DataError(
                f"problem {problem.problem_id!r}: prompt and solution have {len(token_ids)} tokens, "
                f"policy.max_total_sequence_length is {limit}"
            )
        return token_ids, (False,) * len(prompt_ids) + solution.loss_mask


def solutions_batch(examples: Sequence[Example]) -> TrainingBatch:
    """Lay examples end to end."""
    lengths_S = np.array([len(tokens) for tokens, _ in examples], dtype=np.int32)
    masks = [np.array(mask, dtype=np.bool_) for _, mask in examples]
    token_ids_T = np.concatenate([np.array(tokens, dtype=np.int32) for tokens, _ in examples])
    return TrainingBatch(
        lengths_S=lengths_S,
        token_ids_T=token_ids_T,
        loss_mask_T=np.concatenate(masks),
        generation_logprobs_T=np.zeros(len(token_ids_T), dtype=np.float32),
        advantages_S=np.ones(len(examples), dtype=np.float32),
    )
