"""Problems and conversations: their sources, the held-out part, and their tokens."""

from __future__ import annotations

from tandem.config import Config
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
from tandem.samples.data_sets.sources import RowReader
from tandem.samples.data_sets.split import ProblemSets, load_problems
from tandem.samples.tokenizer import Tokenizer

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
    "RowReader",
    "check_answers",
    "describe_capped_steps",
    "describe_left_out",
    "describe_repeats",
    "describe_set_aside",
    "encode_now",
    "epoch_stream",
    "load_conversations",
    "load_problems",
    "make_row_reader",
    "sample_seed",
]


def make_row_reader(config: Config, tokenizer: Tokenizer) -> RowReader:
    """Return the reader of a run's rows, by what its model takes."""
    if not tokenizer.takes_media:
        return RowReader()
    from tandem.samples.data_sets.pictured import PicturedRows

    return PicturedRows(config)
