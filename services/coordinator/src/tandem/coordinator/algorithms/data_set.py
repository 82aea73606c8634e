"""The common part of SFT, DPO and reward models: conversations as training batches, without generation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.common.messages import Media, Purpose
from tandem.config import Config
from tandem.coordinator.algorithms.running import WithoutGeneration
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples import data_sets
from tandem.samples.batch import SampleBatch, build_given_table, media_columns
from tandem.samples.data_sets.item_checks import check_step_size
from tandem.samples.tokenizer import EncodedConversation, Tokenizer


class EncodedSequence(NamedTuple):
    """A prompt with one answer."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """Whether each token counts in the loss."""
    reward: float = 0.0
    """The margin or reward that the data set gives it."""
    media: Media | None = None
    """All that it has besides tokens; None if the model takes text alone."""
    name: str = ""
    """Place in the source."""


Sequences = tuple[EncodedSequence, ...]
"""One conversation: a sequence for each of its answers."""


class DataSetAlgorithm(WithoutGeneration):
    """An algorithm over a data set, as the loop uses it (`tandem.coordinator.algorithms.running.RunningAlgorithm`).

    A conversation with too many tokens is left out if it was read from a file or a hub. If it was generated, all others
    would be too long as well, and that is an error. Held-out conversations are tokenised at once, the others when they
    are drawn.
    """

    _learns_turns = True
    """Whether the assistant's turns are what is learned."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._section = section = config.data_set_section
        self._chat = data_sets.ChatEncoder(config, tokenizer, learns_turns=self._learns_turns)
        self._only_last = bool(getattr(section, "only_unmask_final", False))
        self._reader = data_sets.make_row_reader(config, tokenizer)
        sets = data_sets.load_conversations(config, self._reader)
        check_step_size(config, len(sets.train))
        num_validation = section.val_batches * section.val_global_batch_size
        max_rows = num_validation if num_validation > 0 else None
        held_out = {name: part[:max_rows] for name, part in sets.held_out.items()}
        conversations = (each for each in itertools.chain(sets.train, *held_out.values()) if not each.is_text)
        self._chat.check_characters(
            ((c.name, (c.prompt, *c.answers)) for c in conversations), data_sets.ConversationWriter.literals(config)
        )
        self._train = data_sets.LazyDataset(config, sets.train, self._encode, sets.sizes, self._lengths())
        self._validation = {name: data_sets.encode_now(part, self._encode) for name, part in held_out.items()}
        num_held_out, num_kept = (sum(map(len, parts.values())) for parts in (held_out, self._validation))
        num_too_long = self._train.num_too_long + num_held_out - num_kept
        num_items = len(sets.train) + num_held_out
        too_long = data_sets.describe_left_out(num_too_long, self._train.num_checked + num_held_out, num_items)
        ties = f"data: {sets.num_ties} of {num_items + sets.num_ties} left out: ties" if sets.num_ties else None
        num_rows = len(sets.train) + len(sets.validation) + sets.num_set_aside
        aside = data_sets.describe_set_aside(sets.num_set_aside, num_rows)
        capped = data_sets.describe_capped_steps(
            config, self.num_steps, len(self._train), config.policy.train_global_batch_size
        )
        self.notices = (*filter(None, (too_long, ties, aside, capped)), *self._chat.notices)

    def keep_media(self) -> None:
        """Keep in the run's folder what the data has besides texts. Raises `RunFolderError`."""
        self._reader.keep()

    @property
    def validation_parts(self) -> dict[str, int]:
        """Sequences of each named validation set, in the order of the batch."""
        return {name: sum(map(len, part)) for name, part in self._validation.items() if name}

    @property
    def num_steps(self) -> int:
        """Steps of a whole run: the smaller of ``max_num_steps``, unless that is -1, and ``max_num_epochs``."""
        per_epoch = max(1, len(self._train) // self._config.policy.train_global_batch_size)
        of_epochs, max_steps = self._section.max_num_epochs * per_epoch, self._section.max_num_steps
        return of_epochs if max_steps < 0 else min(max_steps, of_epochs)

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the training batch of `step`, or the whole validation set."""
        if purpose == "validate":
            batch = batch_of_conversations([sequences for part in self._validation.values() for sequences in part])
        else:
            size = self._config.policy.train_global_batch_size
            batch = batch_of_conversations(self.conversations(step, size))
        return batch.replace(**build_given_table(batch).columns), {}

    @property
    def num_conversations(self) -> int:
        """Conversations to train on, with those that do not fit."""
        return len(self._train)

    def conversations(self, step: int, count: int) -> list[Sequences]:
        """Return this many conversations in the order of training, from the first one of `step` on."""
        return self._train.draw((step - 1) * self._config.policy.train_global_batch_size, count)

    def _lengths(self) -> data_sets.ItemLengths[data_sets.ConversationRow, Sequences] | None:
        """Return how conversations are measured; None where some tokens are of no text."""
        if not self._reader.is_text_only:
            return None
        return data_sets.ItemLengths(
            text_bytes=lambda conversation: conversation.text_bytes,
            num_tokens=lambda sequences: max(len(sequence.token_ids) for sequence in sequences),
            limit=self._chat.prompt_limit,
        )

    def _encode(self, conversation: data_sets.ConversationRow) -> Sequences | None:
        """Return the conversation's sequences; None if one of them is too long."""
        name, prompt = conversation.name, conversation.prompt
        if conversation.is_text:
            token_ids = self._chat.text(name, str(conversation.answers[0][0]["content"]))
            mask = (False, *(True,) * (len(token_ids) - 1))
            return (EncodedSequence(token_ids, mask, name=name),) if len(token_ids) > 1 else None
        complaint: str | None = None
        sequences = []
        for place, answer in enumerate(conversation.answers):
            encoded = self._chat.conversation(name, prompt, answer, conversation.tools)
            complaint = complaint or self._chat.complaint(encoded.token_ids[: encoded.prompt_length])
            sequence = self._sequence(encoded, conversation.margin if place == 0 else 0.0)
            sequence = sequence._replace(media=self._chat.media([*prompt, *answer]), name=name)
            limit, length = self._config.policy.max_total_sequence_length, len(sequence.token_ids)
            if complaint is None and length > limit:
                complaint = f"prompt and solution have {length} tokens, policy.max_total_sequence_length is {limit}"
            sequences.append(sequence)
        return None if self._chat.leaves_out(name, complaint) else tuple(sequences)

    def _sequence(self, encoded: EncodedConversation, margin: float) -> EncodedSequence:
        """Return a prompt with one solution. The assistant's tokens count."""
        mask = last_turn(encoded.loss_mask) if self._only_last else encoded.loss_mask
        return EncodedSequence(encoded.token_ids, mask)


class RewardModelAlgorithm(DataSetAlgorithm):
    """The data of a reward model, which gives each sequence one number, and compares pairs by it.

    Transformers' sequence classifiers read the number at the last token that is not padding. A trainer reads a model's
    output one place before the token that counts. So one token of padding follows each sequence, and only that token
    counts.
    """

    _learns_turns = False

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._pad_id = tokenizer.pad_id
        super().__init__(config, tokenizer)

    def _sequence(self, encoded: EncodedConversation, margin: float) -> EncodedSequence:
        token_ids = encoded.token_ids
        while token_ids[-1:] == (self._pad_id,):  # the token that ends a sequence is the padding of some models
            token_ids = token_ids[:-1]
        return EncodedSequence((*token_ids, self._pad_id), (False,) * len(token_ids) + (True,), margin)


def last_turn(loss_mask: Sequence[bool]) -> tuple[bool, ...]:
    """Return the mask without the turns before the last one."""
    end = len(loss_mask) - loss_mask[::-1].index(True) if any(loss_mask) else 0
    begin = end
    while begin and loss_mask[begin - 1]:
        begin -= 1
    return tuple(begin <= place < end for place in range(len(loss_mask)))


def batch_of_conversations(conversations: Sequence[Sequences]) -> SampleBatch:
    """Lay the sequences of conversations end to end, those of one conversation side by side."""
    sequences = [sequence for conversation in conversations for sequence in conversation]
    token_ids_T = np.concatenate([np.array(each.token_ids, dtype=np.int32) for each in sequences])
    media = [each.media for each in sequences if each.media is not None]
    return SampleBatch(
        lengths_S=np.array([len(each.token_ids) for each in sequences], dtype=np.int32),
        token_ids_T=token_ids_T,
        loss_mask_T=np.concatenate([np.array(each.loss_mask, dtype=np.bool_) for each in sequences]),
        generation_logprobs_T=np.zeros(len(token_ids_T), dtype=np.float32),
        advantages_S=np.ones(len(sequences), dtype=np.float32),
        rewards_S=np.array([each.reward for each in sequences], dtype=np.float32),
        **(media_columns(media) if media else {}),
    )
