"""NeMo-RL's penalties: advantages of agents' turns with a flaw, in the place of those of their samples.

Flaws are calls left in the text of a turn, and malformed thinking.

Shapes: ``T`` tokens of the rank's shard of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.common.user_code import named
from tandem.config import Config
from tandem.config.schema.columns import ADVANTAGES
from tandem.config.schema.declarations import token_estimator
from tandem.samples.batch import SampleBatch
from tandem.samples.model_files import load_tokenizer
from tandem.samples.responses import ResponseParser, chat_markers
from tandem.trainer.advantages import AdvantageEstimator, EstimatedAdvantages, ScoredShard

if TYPE_CHECKING:
    from tandem.config.schema.generation import ToolCallParser
    from tandem.samples.tokenizer import Tokenizer

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


CALL_PATTERNS = ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>")
"""Texts of which each shows a call that no parser has read, in NeMo-RL's order."""
THINKING_TAGS = ("<think>", "</think>")
"""Tags around thinking, unless the model's family has others."""
NUM_BEFORE = 32
"""Tokens before a turn in which a tag may open its thinking."""


class TurnFlaws(NamedTuple):
    """The flaws of one turn."""

    is_invalid_call: bool
    """Whether a call was left in the text that it ends with."""
    is_malformed_thinking: bool
    """Whether its answer has tags of thinking or, if it is nothing but thinking, a tag is repeated."""


class DividedTurn(NamedTuple):
    """A turn without calls: its thinking and its answer, each None if there is none."""

    thinking: str | None
    answer: str | None


def divide_turn(text: str, begin: str, end: str, *, is_opened: bool) -> DividedTurn:
    """Divide a turn as vLLM's parsers of reasoning and NeMo Gym do together.

    Thinking ends at the first `end`, and further whole pairs of tags leave the answer. What never ends is thinking to
    the last, if the prompt has opened it (`is_opened`) or the turn begins with it.
    """
    before, closed, after = text.partition(end)
    if not closed:
        if not is_opened and not text.lstrip().startswith(begin):
            return DividedTurn(None, text or None)
        return DividedTurn(text.partition(begin)[2] if begin in text else text, None)
    thinking = before.partition(begin)[2] if begin in before else before
    answer = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", "", after, flags=re.DOTALL)
    return DividedTurn(thinking or None, answer or None)


def flaws_of(turn: DividedTurn, patterns: Sequence[str], tags: Sequence[str]) -> TurnFlaws:
    """Return the flaws of a turn that called no tool: those of its answer or, without one, of its thinking."""
    text = turn.answer if turn.answer is not None else turn.thinking or ""
    allowed = 0 if turn.answer is not None else 1
    return TurnFlaws(any(pattern in text for pattern in patterns), any(text.count(tag) > allowed for tag in tags))


class FlawFinder:
    """Finds the flaws of turns by their tokens."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: ToolCallParser | None) -> None:
        """Read calls in the format that agents get them by, whether or not a request offered tools."""
        self._tokenizer = tokenizer
        parser = ResponseParser.of(tokenizer)
        markers = chat_markers(parser.markers, tool_call_parser, may_call=True)
        self._parser = parser.replace_markers(markers)
        begin, end = (*markers.reasoning, THINKING_TAGS)[0]
        opens = () if markers.tool_format is None else markers.tool_format.distinct_opens
        self._tags = (begin, end)
        self._patterns = tuple(dict.fromkeys((*CALL_PATTERNS, *opens)))

    def find(self, before: Sequence[int], token_ids: Sequence[int]) -> TurnFlaws:
        """Return the flaws of a turn, by the tokens before it and its own. A turn that calls a tool has none."""
        prompt = self._tokenizer.decode(before[-NUM_BEFORE:], skip_special_tokens=False)
        generated = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        parsed = self._parser.parse(generated, prompt=prompt)
        if parsed.tool_calls:
            return TurnFlaws(is_invalid_call=False, is_malformed_thinking=False)
        if self._parser.markers.messages is not None:  # a message says what it is
            turn = DividedTurn(parsed.reasoning, parsed.content or None)
        else:
            begin, end = self._tags
            is_opened = prompt.rstrip().endswith(begin)
            turn = divide_turn(self._parser.visible(generated), begin, end, is_opened=is_opened)
        return flaws_of(turn, self._patterns, self._tags)
