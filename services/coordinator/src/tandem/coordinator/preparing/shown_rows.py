"""The rows of a data set as text: what a model is trained on, or what rollouts begin with.

On a terminal, learned tokens are bold and green; elsewhere they stand between brackets: ``⟦Four.<end_of_turn>⟧``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tandem.common.texts import visible
from tandem.common.values.answer_texts import shown_answer
from tandem.config import Config
from tandem.coordinator.algorithms.data_set import DataSetAlgorithm, EncodedSequence, RewardModelAlgorithm
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm

if TYPE_CHECKING:
    from tandem.common.messages import PromptGroup
    from tandem.coordinator.algorithms.running import RunningAlgorithm
    from tandem.samples.tokenizer import Tokenizer

_HEADING, _LEARNED, _SPECIAL = "bold", "bold green", "italic"
_OPEN, _CLOSE = "⟦", "⟧"
"""Brackets of learned tokens where there are no colours."""
_MOST_REPEATED = 8
"""Most equal tokens in a row that are written one by one; an image has hundreds."""


def rows_in_text(
    config: Config, algorithm: RunningAlgorithm, tokenizer: Tokenizer, num_rows: int, *, is_coloured: bool
) -> list[Text]:
    """Return the lines that show the first `num_rows` rows that a run draws."""
    if isinstance(algorithm, DataSetAlgorithm):
        num_rows = min(num_rows, algorithm.num_conversations)
        return [*sequences_in_text(algorithm, tokenizer, 1, num_rows, is_coloured=is_coloured)]
    if not isinstance(algorithm, GrpoAlgorithm):
        return [Text("the run trains on recorded samples: `coordinator samples` of their run shows them")]
    return [*_prompts_in_text(config, algorithm, tokenizer, num_rows)]


def print_lines(lines: Sequence[Text], console: Console) -> None:
    """Print lines without folding them."""
    for line in lines:
        console.print(line, soft_wrap=True)


# --- conversations that are learned ----------------------------------------------------------------------------------


def sequences_in_text(
    algorithm: DataSetAlgorithm, tokenizer: Tokenizer, step: int, num_rows: int, *, is_coloured: bool
) -> Iterator[Text]:
    """Yield the lines that show rows from the first one of a step on."""
    for sequences in algorithm.conversations(step, num_rows):
        kinds = ("chosen", "rejected") if len(sequences) == 2 else ("",) * len(sequences)
        for kind, sequence in zip(kinds, sequences, strict=True):
            if isinstance(algorithm, RewardModelAlgorithm):
                yield from _judged(kind, sequence, tokenizer)
            else:
                yield from _learned(kind, sequence, tokenizer, is_coloured=is_coloured)


def _learned(kind: str, sequence: EncodedSequence, tokenizer: Tokenizer, *, is_coloured: bool) -> Iterator[Text]:
    """Yield the lines of a sequence whose learned tokens are marked."""
    yield _head(sequence.name, kind, f"{len(sequence.token_ids)} tokens, {sum(sequence.loss_mask)} of them learned")
    text, last_ids = Text(), []
    for is_learned, part in itertools.groupby(zip(sequence.token_ids, sequence.loss_mask, strict=True), lambda p: p[1]):
        token_ids = [token for token, _ in part]
        brackets = (_OPEN, _CLOSE) if is_learned and not is_coloured else ("", "")
        text.append(brackets[0])
        text.append_text(text_of_tokens(token_ids, tokenizer, _LEARNED if is_learned else ""))
        text.append(brackets[1])
        last_ids += token_ids[-1:] if is_learned else []
    yield _indented(text)
    yield _beginning(sequence.token_ids, tokenizer)
    ends = tokenizer.turn_ends.all_ids
    yield _field("turns end", ", ".join(_named(token, tokenizer) for token in _distinct(last_ids)) or "none is learned")
    for token in _distinct(last_ids):
        if token not in ends:
            why = "is the last token of a learned turn, and ends none: generation would not stop there"
            yield _field("note", f"{_named(token, tokenizer)} {why}")
    yield Text()


def _judged(kind: str, sequence: EncodedSequence, tokenizer: Tokenizer) -> Iterator[Text]:
    """Yield the lines of a sequence that a reward model judges; its last token is padding."""
    token_ids = sequence.token_ids[:-1]
    yield _head(sequence.name, kind, f"{len(token_ids)} tokens")
    yield _indented(text_of_tokens(token_ids, tokenizer))
    yield _beginning(token_ids, tokenizer)
    yield _field("judged at", _named(token_ids[-1], tokenizer))
    yield Text()


# --- prompts of rollouts ---------------------------------------------------------------------------------------------


def first_prompts(config: Config, algorithm: GrpoAlgorithm, num_rows: int) -> list[PromptGroup]:
    """Return the first prompts that a run generates for; where it only validates, those that it validates on."""
    if config.evaluates:
        return [*algorithm.prompt_groups(0, "validate", range(min(num_rows, algorithm.num_validation)))]
    section = config.rollout_section
    size = section.num_prompts_per_batch
    if section.use_dynamic_sampling:  # what a later step draws depends on the rewards of this one
        num_rows = min(num_rows, size)
    places = (divmod(place, size) for place in range(num_rows))
    return [group for step, place in places for group in algorithm.prompt_groups(1 + step, "train", [place])]


def _prompts_in_text(config: Config, algorithm: GrpoAlgorithm, tokenizer: Tokenizer, num_rows: int) -> Iterator[Text]:
    """Yield the lines that show prompts, each with what is known of it, and then what ends a response."""
    for group in first_prompts(config, algorithm, num_rows):
        problem = group.problem
        yield _head(problem.problem_id, "", f"{len(group.prompt_ids)} tokens of prompt")
        yield _indented(text_of_tokens(group.prompt_ids, tokenizer))
        yield _beginning(group.prompt_ids, tokenizer)
        if problem.answer is not None:
            yield _field("reference", shown_answer(problem.answer))
        yield Text()
    if config.agent is not None:
        yield Text("An agent writes its own requests: these are the questions that it is given.")
    sampling = algorithm.sampling("validate" if config.evaluates else "train")
    stops = [*(_named(token, tokenizer) for token in sampling.stop_token_ids), *map(repr, sampling.stop_strings)]
    yield _field("stops", f"a response ends at {', '.join(stops)}, or after {sampling.max_new_tokens} tokens")
    yield Text()


# --- parts of lines --------------------------------------------------------------------------------------------------


def text_of_tokens(token_ids: Sequence[int], tokenizer: Tokenizer, style: str = "") -> Text:
    """Return the text of tokens, special ones included; of many equal ones in a row, one and their number."""
    text = Text()
    plain: list[bytes] = []
    added = tokenizer.hugging_face.added_tokens_decoder
    special_ids = {token for token, known in added.items() if known.special}

    def write_plain() -> None:
        text.append(visible(b"".join(plain).decode(errors="replace")), style)
        plain.clear()

    for token, repeats in itertools.groupby(token_ids):
        num_repeats = len([*repeats])
        is_special = token in special_ids
        if is_special or num_repeats > _MOST_REPEATED:
            write_plain()
        if num_repeats > _MOST_REPEATED:
            text.append(f"{visible(tokenizer.token_text(token))}(×{num_repeats})", f"{style} {_SPECIAL}".strip())
        elif is_special:
            text.append(visible(tokenizer.token_text(token) * num_repeats), f"{style} {_SPECIAL}".strip())
        else:
            plain += [tokenizer.token_bytes(token)] * num_repeats
    write_plain()
    return text


def _beginning(token_ids: Sequence[int], tokenizer: Tokenizer) -> Text:
    """Return the line that names the token that begins a sequence, where the tokenizer has one."""
    bos_id = tokenizer.bos_id
    if bos_id is None:
        return _field("begins", "without BOS: the tokenizer has none")
    count = next((n for n, token in enumerate(token_ids) if token != bos_id), len(token_ids))
    if not count:
        return _field("begins", f"without BOS, {_named(bos_id, tokenizer)}")
    twice = "" if count == 1 else f", {count} times: the template and the tokenizer each write one"
    return _field("begins", f"with BOS, {_named(bos_id, tokenizer)}{twice}")


def _named(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text and its id."""
    return f"{tokenizer.token_text(token)!r} ({token})"


def _distinct(token_ids: Sequence[int]) -> list[int]:
    return [*dict.fromkeys(token_ids)]


def _head(name: str, kind: str, size: str) -> Text:
    return Text(f"━━ {visible(name)}{f', {kind}' if kind else ''}: {size}", _HEADING)


def _field(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<10} ", _HEADING), visible(text))


def _indented(text: Text) -> Text:
    """Return a text with indented lines."""
    return Text("\n").join(Text("  ").append_text(line) for line in text.split("\n", allow_blank=True))
