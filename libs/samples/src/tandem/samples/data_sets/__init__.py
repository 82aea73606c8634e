"""Problems and conversations: their sources, the held-out part, and their tokens."""

from __future__ import annotations

from tandem.samples.data_sets.chat import ChatEncoder
from tandem.samples.data_sets.conversations import ConversationRow, ConversationWriter, load_conversations
from tandem.samples.data_sets.notices import left_out, repeated_in_a_step, set_aside, steps_capped
from tandem.samples.data_sets.order import LazyDataset, encode_now, epoch_stream, sample_seed
from tandem.samples.data_sets.prompts import EncodedProblem, PromptedProblem, PromptEncoder
from tandem.samples.data_sets.reference_answers import check_answers
from tandem.samples.data_sets.split import ProblemSets, load_problems

__all__ = [
    "ChatEncoder",
    "ConversationRow",
    "ConversationWriter",
    "EncodedProblem",
    "LazyDataset",
    "ProblemSets",
    "PromptEncoder",
    "PromptedProblem",
    "check_answers",
    "encode_now",
    "epoch_stream",
    "left_out",
    "load_conversations",
    "load_problems",
    "repeated_in_a_step",
    "sample_seed",
    "set_aside",
    "steps_capped",
]
