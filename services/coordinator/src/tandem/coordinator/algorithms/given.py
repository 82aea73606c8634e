"""What SFT and DPO have in common: conversations as training batches, and nothing generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never

import numpy as np

from tandem.common.batch import TrainingBatch
from tandem.common.config import Config
from tandem.common.config.derive import GENERATED
from tandem.common.config.schema import Dpo, Sft
from tandem.common.errors import DataError
from tandem.common.messages import Purpose, SamplesFinished
from tandem.common.tokenizer import Tokenizer
from tandem.common.wire import Arrays
from tandem.coordinator.data import ChatEncoder, Conversation, epoch_stream, load_conversations

Sequences = tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
"""One conversation: for each of its answers the tokens of prompt and answer, and which of them count in the loss."""


class GivenFeed:
    """What the loop asks of an algorithm without engines (see `tandem.coordinator.feed.Feed`).

    A conversation whose tokens are too many is left out where it was read from somewhere; where it was made, so is
    every other, and that is an error.
    """

    def __init__(self, config: Config, section: Sft | Dpo, tokenizer: Tokenizer) -> None:
        self._config = config
        self._section = section
        self._chat = ChatEncoder(config, tokenizer)
        sets = load_conversations(config)
        self._num_too_long = 0
        self._train = self._encode_all(sets.train)
        num_validation = section.val_batches * section.val_global_batch_size
        self._validation = self._encode_all(sets.validation)[: num_validation if num_validation > 0 else None]
        if not self._train:
            raise DataError("data: every conversation is longer than policy.max_total_sequence_length allows")
        num_read = len(sets.train) + len(sets.validation) + sets.num_ties
        reasons = {
            "longer than data.max_input_seq_length and policy.max_total_sequence_length allow": self._num_too_long,
            "ties": sets.num_ties,
        }
        self.notices = tuple(f"data: {count} of {num_read} left out: {why}" for why, count in reasons.items() if count)

    @property
    def num_validation(self) -> int:
        """Prompts to generate for validation: none."""
        return 0

    @property
    def num_steps(self) -> int:
        """Steps that a whole run takes: the fewer of ``max_num_steps`` and ``max_num_epochs``."""
        per_epoch = max(1, len(self._train) // self._config.policy.train_global_batch_size)
        return min(self._section.max_num_steps, self._section.max_num_epochs * per_epoch)

    def sampling(self, purpose: Purpose) -> Never:
        """Fail: no samples are drawn."""
        raise AssertionError("nothing is generated")

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> Never:
        """Fail: no samples are drawn."""
        raise AssertionError("nothing is generated")

    def take_samples(self, finished: SamplesFinished, arrays: Arrays) -> Never:
        """Fail: no samples are drawn."""
        raise AssertionError("nothing is generated")

    def discard_samples(self, step: int, purpose: Purpose, groups: Sequence[int]) -> Never:
        """Fail: no samples are drawn."""
        raise AssertionError("nothing is generated")

    def batch(self, step: int, purpose: Purpose) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the training batch of `step`, or the whole validation set."""
        if purpose == "validate":
            return batch_of(self._validation), {}
        size = self._config.policy.train_global_batch_size
        order = epoch_stream(self._section.seed, len(self._train), (step - 1) * size, size)
        return batch_of([self._train[i] for i in order]), {}

    def validation_examples(self, step: int, count: int) -> list[str]:
        """Return nothing: validation is by the loss."""
        return []

    def finish_step(self, step: int) -> dict[str, float]:
        """Return nothing: there are no samples."""
        return {}

    def _encode_all(self, conversations: Sequence[Conversation]) -> list[Sequences]:
        found = [self._encode(conversation) for conversation in conversations]
        kept = [sequences for sequences in found if sequences is not None]
        self._num_too_long += len(found) - len(kept)
        return kept

    def _encode(self, conversation: Conversation) -> Sequences | None:
        """Return the conversation's sequences; None if one of them is too long."""
        name, prompt = conversation.name, conversation.prompt
        prompt_ids = self._chat.prompt(name, prompt)
        complaint = self._chat.complaint(prompt_ids)
        sequences = []
        for answer in conversation.answers:
            solution = self._chat.solution(name, prompt, answer)
            token_ids = prompt_ids + solution.token_ids
            limit = self._config.policy.max_total_sequence_length
            if complaint is None and len(token_ids) > limit:
                complaint = (
                    f"prompt and solution have {len(token_ids)} tokens, policy.max_total_sequence_length is {limit}"
                )
            sequences.append((token_ids, (False,) * len(prompt_ids) + solution.loss_mask))
        if complaint is None:
            return tuple(sequences)
        if self._config.data.dataset_name in GENERATED:
            raise DataError(f"problem {name!r}: {complaint}")
        return None


def batch_of(conversations: Sequence[Sequences]) -> TrainingBatch:
    """Lay the sequences of conversations end to end, those of one side by side."""
    sequences = [sequence for conversation in conversations for sequence in conversation]
    token_ids_T = np.concatenate([np.array(tokens, dtype=np.int32) for tokens, _ in sequences])
    return TrainingBatch(
        lengths_S=np.array([len(tokens) for tokens, _ in sequences], dtype=np.int32),
        token_ids_T=token_ids_T,
        loss_mask_T=np.concatenate([np.array(mask, dtype=np.bool_) for _, mask in sequences]),
        generation_logprobs_T=np.zeros(len(token_ids_T), dtype=np.float32),
        advantages_S=np.ones(len(sequences), dtype=np.float32),
    )
