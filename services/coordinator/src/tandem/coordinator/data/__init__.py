"""Problems: where they come from, which are held out, in which order they are used, and how they become tokens."""

from __future__ import annotations

from tandem.coordinator.data.order import epoch_stream, sample_seed
from tandem.coordinator.data.prompts import EncodedProblem, PromptEncoder
from tandem.coordinator.data.split import ProblemSets, load_problems

__all__ = ["EncodedProblem", "ProblemSets", "PromptEncoder", "epoch_stream", "load_problems", "sample_seed"]
