"""Problems and conversations: their sources, the held-out part, and their tokens."""

from __future__ import annotations

from tandem.samples.data_sets.conversations import ConversationRow, ConversationWriter, load_conversations
from tandem.samples.data_sets.item_checks import (
    check_answers,
    describe_capped_steps,
    describe_left_out,
    describe_repeats,
    describe_set_aside,
)
from tandem.samples.data_sets.order import ItemLengths, LazyDataset, encode_now, epoch_stream, sample_seed
from tandem.samples.data_sets.prompts import ChatEncoder, EncodedProblem, PromptedProblem, PromptEncoder
from tandem.samples.data_sets.split import ProblemSets, load_problems

__all__ = [
    "ChatEncoder",
    "ConversationRow",
    "ConversationWriter",
    "EncodedProblem",
    "ItemLengths",
    "LazyDataset",
    "ProblemSets",
    "PromptEncoder",
    "PromptedProblem",
    "check_answers",
    "describe_capped_steps",
    "describe_left_out",
    "describe_repeats",
    "describe_set_aside",
    "encode_now",
    "epoch_stream",
    "load_conversations",
    "load_problems",
    "sample_seed",
]
