"""The rows of a data set as text: what is trained on, or what rollouts begin with; of a run, too.

On a terminal, learned tokens are bold and green; elsewhere they stand between brackets: ``⟦Four.<end_of_turn>⟧``.

Run as a program, this module answers the page's requests for rows of one run.
"""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.text import Text

from tandem.common.errors import RunFolderError, TandemError
from tandem.common.texts import visible
from tandem.common.values import show_answer
from tandem.config import Config
from tandem.coordinator.algorithms import data_set, grpo, make_algorithm
from tandem.launch.preparing.hub_data import list_data_files
from tandem.observe.page.worker import answer_requests
from tandem.observe.run_folder.checkpoints import config_of, tokenizer_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.shown_rows import RowsAnswer, RowsRequest, RunRows, ShownRow, ShownToken

if TYPE_CHECKING:
    from tandem.common.messages import PromptGroup
    from tandem.coordinator.algorithms.running import RunningAlgorithm
    from tandem.samples.tokenizer import Tokenizer

_HEADING, _LEARNED, _SPECIAL = "bold", "bold green", "italic"
_OPEN, _CLOSE = "⟦", "⟧"
"""Brackets of learned tokens where there are no colours."""
_MOST_REPEATED = 8
"""Most equal tokens in a row that are written one by one; an image has hundreds."""
_IDLE_S = 60.0


def rows_in_text(
    config: Config, algorithm: RunningAlgorithm, tokenizer: Tokenizer, num_rows: int, *, is_coloured: bool
) -> list[Text]:
    """Return the lines that show the first `num_rows` rows that a run draws."""
    if isinstance(algorithm, data_set.DataSetAlgorithm):
        num_rows = min(num_rows, algorithm.num_conversations)
        return [*sequences_in_text(algorithm, tokenizer, 1, num_rows, is_coloured=is_coloured)]
    if not isinstance(algorithm, grpo.GrpoAlgorithm):
        return [Text("the run trains on recorded samples: `coordinator samples` of their run shows them")]
    return [*_prompts_in_text(config, algorithm, tokenizer, num_rows)]


def print_lines(lines: Sequence[Text], console: Console) -> None:
    """Print lines without folding them."""
    for line in lines:
        console.print(line, soft_wrap=True)


# --- conversations that are learned ----------------------------------------------------------------------------------


def sequences_in_text(
    algorithm: data_set.DataSetAlgorithm, tokenizer: Tokenizer, step: int, num_rows: int, *, is_coloured: bool
) -> Iterator[Text]:
    """Yield the lines that show rows from the first one of a step on."""
    for row in show_sequences(algorithm, tokenizer, step, num_rows):
        yield from lines_of(row, is_coloured=is_coloured)


def show_sequences(
    algorithm: data_set.DataSetAlgorithm, tokenizer: Tokenizer, step: int, num_rows: int
) -> Iterator[ShownRow]:
    """Yield the sequences of rows from the first one of a step on."""
    for sequences in algorithm.conversations(step, num_rows):
        kinds = ("chosen", "rejected") if len(sequences) == 2 else ("",) * len(sequences)
        for kind, sequence in zip(kinds, sequences, strict=True):
            is_judged = isinstance(algorithm, data_set.RewardModelAlgorithm)
            yield (_show_judged if is_judged else _show_learned)(kind, sequence, tokenizer)


def lines_of(row: ShownRow, *, is_coloured: bool) -> Iterator[Text]:
    """Yield the lines that show a row."""
    yield Text(f"━━ {visible(row.name)}{f', {row.kind}' if row.kind else ''}: {row.size}", _HEADING)
    text = Text()
    for is_learned, tokens in itertools.groupby(row.tokens, lambda token: token.is_learned):
        brackets = (_OPEN, _CLOSE) if is_learned and not is_coloured else ("", "")
        text.append(brackets[0])
        text.append_text(_text_of([*tokens], _LEARNED if is_learned else ""))
        text.append(brackets[1])
    yield _indent(text)
    yield from (_field(name, value) for name, value in row.facts)
    yield Text()


def _show_learned(kind: str, sequence: data_set.EncodedSequence, tokenizer: Tokenizer) -> ShownRow:
    """Return a sequence whose learned tokens are marked."""
    token_ids, loss_mask = sequence.token_ids, sequence.loss_mask
    edges = itertools.pairwise((*zip(token_ids, loss_mask, strict=True), (-1, False)))
    last_ids = _distinct([token for (token, is_learned), (_, is_next) in edges if is_learned and not is_next])
    facts = [
        _beginning(token_ids, tokenizer),
        ("turns end", ", ".join(_name_token(token, tokenizer) for token in last_ids) or "none is learned"),
    ]
    for token in last_ids:
        if token not in tokenizer.turn_ends.all_ids:
            reason = "is the last token of a learned turn, and ends none: generation would not stop there"
            facts.append(("note", f"{_name_token(token, tokenizer)} {reason}"))
    size = f"{len(token_ids)} tokens, {sum(loss_mask)} of them learned"
    return _row(sequence.name, kind, size, show_tokens(token_ids, loss_mask, tokenizer), facts)


def _show_judged(kind: str, sequence: data_set.EncodedSequence, tokenizer: Tokenizer) -> ShownRow:
    """Return a sequence that a reward model judges; its last token is padding."""
    token_ids = sequence.token_ids[:-1]
    facts = [_beginning(token_ids, tokenizer), ("judged at", _name_token(token_ids[-1], tokenizer))]
    tokens = show_tokens(token_ids, [False] * len(token_ids), tokenizer)
    return _row(sequence.name, kind, f"{len(token_ids)} tokens", tokens, facts)


# --- prompts of rollouts ---------------------------------------------------------------------------------------------


def draw_first_prompts(config: Config, algorithm: grpo.GrpoAlgorithm, num_rows: int) -> list[PromptGroup]:
    """Return the first prompts that a run generates for; where it only validates, those that it validates on."""
    if config.evaluates:
        return [*algorithm.prompt_groups(0, "validate", range(min(num_rows, algorithm.num_validation)))]
    section = config.rollout_section
    size = section.num_prompts_per_batch
    # What a later step draws may depend on the rewards of this one.
    if section.use_dynamic_sampling or algorithm.curriculum is not None:
        num_rows = min(num_rows, size)
    places = (divmod(place, size) for place in range(num_rows))
    return [group for step, place in places for group in algorithm.prompt_groups(1 + step, "train", [place])]


def _prompts_in_text(
    config: Config, algorithm: grpo.GrpoAlgorithm, tokenizer: Tokenizer, num_rows: int
) -> Iterator[Text]:
    """Yield the lines that show prompts, each with what is known of it, and then what ends a response."""
    for group in draw_first_prompts(config, algorithm, num_rows):
        problem, token_ids = group.problem, group.prompt_ids
        facts = [_beginning(token_ids, tokenizer)]
        if problem.answer is not None:
            facts.append(("reference", show_answer(problem.answer)))
        tokens = show_tokens(token_ids, [False] * len(token_ids), tokenizer)
        row = _row(problem.problem_id, "", f"{len(token_ids)} tokens of prompt", tokens, facts)
        yield from lines_of(row, is_coloured=True)
    if config.agent is not None:
        yield Text("An agent writes its own requests: these are the questions that it is given.")
    sampling = algorithm.sampling("validate" if config.evaluates else "train")
    stops = [*(_name_token(token, tokenizer) for token in sampling.stop_token_ids), *map(repr, sampling.stop_strings)]
    yield _field("stops", f"a response ends at {', '.join(stops)}, or after {sampling.max_new_tokens} tokens")
    yield Text()


# --- parts of lines --------------------------------------------------------------------------------------------------


def show_tokens(token_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: Tokenizer) -> list[ShownToken]:
    """Return tokens with their texts; a character of several tokens is given to its last one."""
    shown: list[ShownToken] = []
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    added = tokenizer.hugging_face.added_tokens_decoder
    special_ids = {token for token, added_token in added.items() if added_token.special}
    for is_learned, part in itertools.groupby(zip(token_ids, loss_mask, strict=True), lambda pair: pair[1]):
        for token, repeats in itertools.groupby(token for token, _ in part):
            num_repeats = len([*repeats])
            is_special, is_many = token in special_ids, num_repeats > _MOST_REPEATED
            if is_special or is_many:
                _end_character(shown, decoder)
                texts = [tokenizer.token_text(token)] * (1 if is_many else num_repeats)
            else:
                texts = [decoder.decode(tokenizer.token_bytes(token)) for _ in range(num_repeats)]
            count = num_repeats if is_many else 1
            shown += [
                ShownToken(id=token, text=text, is_special=is_special, is_learned=is_learned, count=count)
                for text in texts
            ]
        _end_character(shown, decoder)
    return shown


def _end_character(shown: list[ShownToken], decoder: codecs.IncrementalDecoder) -> None:
    """Give the bytes of an incomplete character to the last token."""
    if character := decoder.decode(b"", final=True):
        shown[-1] = msgspec.structs.replace(shown[-1], text=shown[-1].text + character)


def text_of_tokens(token_ids: Sequence[int], tokenizer: Tokenizer, style: str = "") -> Text:
    """Return the text of tokens, special ones included; of many equal ones in a row, one and their number."""
    return _text_of(show_tokens(token_ids, [False] * len(token_ids), tokenizer), style)


def _text_of(tokens: Sequence[ShownToken], style: str) -> Text:
    text = Text()
    for (is_special, count), alike in itertools.groupby(tokens, lambda token: (token.is_special, token.count)):
        is_apart = is_special or count > 1
        words = visible("".join(token.text if count == 1 else f"{token.text}(×{count})" for token in alike))
        text.append(words, f"{style} {_SPECIAL}".strip() if is_apart else style)
    return text


def _row(name: str, kind: str, size: str, tokens: Sequence[ShownToken], facts: Sequence[tuple[str, str]]) -> ShownRow:
    return ShownRow(name=name, kind=kind, size=size, tokens=tuple(tokens), facts=tuple(facts))


def _beginning(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the fact that names the token that begins a sequence, where the tokenizer has one."""
    bos_id = tokenizer.bos_id
    if bos_id is None:
        return ("begins", "without BOS: the tokenizer has none")
    count = next((n for n, token in enumerate(token_ids) if token != bos_id), len(token_ids))
    if not count:
        return ("begins", f"without BOS, {_name_token(bos_id, tokenizer)}")
    twice = "" if count == 1 else f", {count} times: the template and the tokenizer each write one"
    return ("begins", f"with BOS, {_name_token(bos_id, tokenizer)}{twice}")


def _name_token(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text and its id."""
    return f"{tokenizer.token_text(token)!r} ({token})"


def _distinct(token_ids: Sequence[int]) -> list[int]:
    return [*dict.fromkeys(token_ids)]


def _field(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<10} ", _HEADING), visible(text))


def _indent(text: Text) -> Text:
    """Return a text with indented lines."""
    return Text("\n").join(Text("  ").append_text(line) for line in text.split("\n", allow_blank=True))


class RecordedRows:
    """The rows of one run, in the order of training."""

    def __init__(self, run: Path) -> None:
        """Read the run's data. Raises `RunFolderError` if that, or its tokenizer, is not there."""
        self._run = run
        with read_journal(run) as journal:
            config = config_of(journal)
            began = journal.run.created_at
        if config.replay is not None or config.declaration.rolls_out:
            raise RunFolderError(f"{run} is a run of samples, not of rows")
        self.size = config.policy.train_global_batch_size
        """Rows of a step."""
        tokenizer = tokenizer_of(run, config)
        if tokenizer is None:
            name = config.policy.tokenizer.name
            raise RunFolderError(f"the tokenizer is neither in {name} nor in a checkpoint of {run}")
        self.tokenizer = tokenizer
        try:
            algorithm = make_algorithm(config, tokenizer)
        except TandemError as error:
            raise RunFolderError(
                f"the rows of {run} are read from its data again, which cannot be read: {error}"
            ) from error
        assert isinstance(algorithm, data_set.DataSetAlgorithm), "nothing is generated, and it is no replay"
        self.algorithm = algorithm
        paths = [Path(path) for key, path in list_data_files(config) if key.startswith("data.train")]
        changed = [path for path in dict.fromkeys(paths) if path.is_file() and path.stat().st_mtime > began]
        self.notes = (
            *(
                f"{path} has changed since the run began: its rows may not be those that it trained on"
                for path in changed
            ),
            *algorithm.notices,
        )

    def last_step(self) -> int:
        """Return the newest step of the run, 1 before it is done."""
        with read_journal(self._run) as journal:
            return max(1, journal.last_step() or 0)

    def check_step(self, step: int | None) -> int:
        """Return a step, the newest for None. Raises `RunFolderError` if the run has not trained it."""
        last = self.last_step()
        if step is None:
            return last
        if not 1 <= step <= last:
            raise RunFolderError(f"{self._run} has trained no step {step}, only those up to {last}")
        return step

    def rows(self, request: RowsRequest) -> RunRows:
        """Return the first rows of a step."""
        step = self.check_step(request.step)
        rows = show_sequences(self.algorithm, self.tokenizer, step, min(request.limit, self.size))
        return RunRows(step=step, last_step=self.last_step(), num_rows=self.size, rows=tuple(rows), notes=self.notes)


def main(run: Path) -> None:
    """Answer requests for the run's rows until the input ends, or nothing is asked for a while."""
    recorded: RecordedRows | None = None

    def answer(data: bytes) -> bytes:
        nonlocal recorded
        try:
            recorded = recorded or RecordedRows(run)
            rows = recorded.rows(msgspec.json.decode(data, type=RowsRequest))
        except TandemError as error:
            return msgspec.json.encode(RowsAnswer(error=str(error)))
        return msgspec.json.encode(RowsAnswer(rows=rows))

    answer_requests(answer, _IDLE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
