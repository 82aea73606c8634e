"""Conversations to learn from: prompts with one answer for SFT, with two for DPO and reward models.

Trees of messages, as in Open Assistant: each path from prompt to leaf is a conversation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.common.values import beyond
from tandem.config import Config
from tandem.config.named import GENERATED, holds_texts
from tandem.config.schema import DataConfig
from tandem.config.schema.environments import PACKAGED
from tandem.samples.chat_templates import Messages
from tandem.samples.data_sets import sources
from tandem.samples.data_sets.listed import HeldOut, collect_held_out, load_parts, take_items
from tandem.samples.data_sets.prompts import PromptWriter, literal_text, read_message, solution_writer
from tandem.samples.data_sets.raw_texts import raw_texts
from tandem.samples.data_sets.split import ItemIdentity, hold_out, load_problems, refuse_leakage
from tandem.samples.data_sets.tools import read_tools
from tandem.samples.turns.rendering import common_length

_ROLES = {"prompter": "user", "assistant": "assistant"}


class _Node(msgspec.Struct, frozen=True):
    """A message and its replies; other fields are ignored."""

    text: str
    role: Literal["prompter", "assistant"]
    replies: list[_Node] = []


def threads(row_name: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Messages]]:
    """Yield the threads of a tree in which the assistant speaks, each with its place, for errors.

    A row is the tree's ``prompt``, or has it. A user's last message is left out, since nothing answers it. Threads that
    are then equal are yielded once. Raise `DataError` for a row without a tree.
    """
    try:
        root = msgspec.convert(row.get("prompt", row), _Node)
    except msgspec.ValidationError as error:
        raise DataError(f"{row_name} is not a tree of messages: {error}") from error
    ends: set[int] = set()
    for number, nodes in enumerate(_ways(root), 1):
        spoken = [index for index, node in enumerate(nodes) if node.role == "assistant"]
        if not spoken or id(nodes[spoken[-1]]) in ends:
            continue
        ends.add(id(nodes[spoken[-1]]))
        messages = [{"role": _ROLES[node.role], "content": node.text} for node in nodes[: spoken[-1] + 1]]
        yield f"{row_name}, thread {number}", messages


def _ways(node: _Node) -> Iterator[list[_Node]]:
    if not node.replies:
        yield [node]
    for reply in node.replies:
        for branch in _ways(reply):
            yield [node, *branch]


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its possible answers."""

    name: str
    """Place in the source, for errors."""
    prompt: Messages
    answers: tuple[Messages, ...]
    """The solution; or, for preferences, the chosen response, then the rejected one."""
    margin: float = 0.0
    """Margin by which the chosen response's score should be ahead."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the template shows, as JSON schemas."""
    is_text: bool = False
    """Whether it is text without turns, the content of its only answer: no template renders it."""

    @property
    def text_bytes(self) -> int:
        """Bytes of its messages as JSON, with the longest of its answers."""
        return len(msgspec.json.encode(self.prompt)) + max(len(msgspec.json.encode(answer)) for answer in self.answers)


class ConversationSets(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations to train on and conversations held out."""

    train: list[ConversationRow]
    held_out: dict[str, list[ConversationRow]]
    """Keys are the names of ``data.val_data_paths``; a single set has the name ``""``."""
    sizes: tuple[int, ...] = ()
    """Sizes of the sets that `train` concatenates; empty if there is one."""
    num_ties: int = 0
    """Pairs in which neither response is better; they are left out."""
    num_set_aside: int = 0
    """Conversations that are left out because they are too similar to held-out ones."""

    @property
    def validation(self) -> list[ConversationRow]:
        """All held-out conversations."""
        return [conversation for conversations in self.held_out.values() for conversation in conversations]


_THREAD = "thread"

Read = Callable[[str, sources.Row, DataConfig], ConversationRow | None]
"""A function from a row's place, the row, and the section ``data`` to a conversation; None for a tie."""


def load_conversations(config: Config, reader: sources.RowReader | None = None) -> ConversationSets:
    """Load or generate a run's conversations; `reader` reads rows, by default of text alone.

    Raise `DataError` and `ConfigError` as `load_problems` does.
    """
    data, reader = config.data, reader or sources.RowReader()
    if data.train:
        return _load_listed(config, reader)
    if holds_texts(data.dataset_name):
        return _of_texts(data)
    read = _reader(config)
    if read is None:
        problems = load_problems(config, reader)
        write = ConversationWriter(config)
        return ConversationSets(
            train=write(problems.train),
            held_out={name: write(part) for name, part in problems.held_out.items()},
            num_set_aside=problems.num_set_aside,
        )
    writer = PromptWriter(data)
    num_ties = 0

    def conversations(rows: sources.Rows) -> list[ConversationRow]:
        nonlocal num_ties
        if data.dataset_name == "open_assistant":
            rows = [
                (thread, {_THREAD: messages}) for row_name, row in rows for thread, messages in threads(row_name, row)
            ]
        parsed = [read(row_name, row, data) for row_name, row in rows]
        untied = [conversation for conversation in parsed if conversation is not None]
        num_ties += len(parsed) - len(untied)
        return [msgspec.structs.replace(c, prompt=writer.prepend_system_message(c.prompt)) for c in untied]

    train, apart = reader.read(data, text_key=data.prompt_key if config.declaration.learns_preferences else None)
    sides = hold_out(
        data,
        conversations(train),
        {name: conversations(rows) for name, rows in apart.items()},
        _IDENTITY,
        keep_prompts_together=True,
    )
    return ConversationSets(
        train=sides.train, held_out=sides.held_out, num_ties=num_ties, num_set_aside=sides.num_set_aside
    )


def _load_listed(config: Config, reader: sources.RowReader) -> ConversationSets:
    """Load the conversations of several datasets."""
    training, validation = load_parts(config, functools.partial(load_conversations, reader=reader), with_train=True)
    conversation_lists: list[list[ConversationRow]] = [take_items(part) for part in training]
    train = [conversation for conversations in conversation_lists for conversation in conversations]
    apart: dict[str, HeldOut[ConversationRow]] = collect_held_out(training, validation)
    held_items = {name: items for name, (items, _) in apart.items()}
    refuse_leakage(train, held_items, _IDENTITY)
    parts = (*training, *validation)
    return ConversationSets(
        train=train,
        held_out=held_items,
        sizes=tuple(map(len, conversation_lists)),
        num_ties=sum(part.sets.num_ties for part in parts),
        num_set_aside=sum(part.sets.num_set_aside for part in parts),
    )


def _of_texts(data: DataConfig) -> ConversationSets:
    """Load raw texts, each as the only answer to nothing."""
    texts = [
        ConversationRow(name=name, prompt=[], answers=(_answer(text),), is_text=True) for name, text in raw_texts(data)
    ]
    sides = hold_out(data, texts, {}, _IDENTITY, keep_prompts_together=False)
    return ConversationSets(train=sides.train, held_out=sides.held_out, num_set_aside=sides.num_set_aside)


class ConversationWriter:
    """A writer of conversations for problems, by the templates of ``data``."""

    def __init__(self, config: Config) -> None:
        self._prompts = PromptWriter(config.data)
        keys = ["solution_template", *(["rejected_template"] if config.declaration.learns_preferences else [])]
        self._solutions = [solution_writer(f"data.{key}", getattr(config.data, key)) for key in keys]

    @staticmethod
    def literals(config: Config) -> dict[str, str]:
        """Return the literal texts of the templates of prompts and solutions, by the key to change."""
        keys = ("solution_template", "rejected_template")
        texts = {f"data.{key}": literal_text(getattr(config.data, key) or "") for key in keys}
        return PromptWriter(config.data).literals() | {key: text for key, text in texts.items() if text}

    def __call__(self, problems: Iterable[Problem]) -> list[ConversationRow]:
        """Return the problems' prompts with their solutions, for DPO each with a worse answer after it.

        Several solutions, or worse answers, make a conversation each. Raise `DataError` and `ConfigError` if that
        fails.
        """
        return [
            ConversationRow(
                name=problem.problem_id,
                prompt=self._prompts.messages(problem),
                answers=answers,
                tools=self._prompts.tools(problem),
            )
            for problem in problems
            for answers in itertools.product(*(write(problem) for write in self._solutions))
        ]


def _reader(config: Config) -> Read | None:
    """Return the function that reads the rows of a dataset; None if they are problems."""
    name = config.data.dataset_name
    if name in (*GENERATED, *PACKAGED):
        return None
    if config.declaration.learns_preferences:
        pair = _help_steer if name == "HelpSteer3" else _preference
        return functools.partial(_read_with_margin, pair)
    if name == "squad":
        return _squad
    if name == "open_assistant":
        return functools.partial(_chat, _THREAD)
    return None if config.data.chat_key is None else functools.partial(_chat, config.data.chat_key)


# --- SFT -------------------------------------------------------------------------------------------------------------


def _chat(chat_key: str, row_name: str, row: sources.Row, data: DataConfig) -> ConversationRow:
    messages = _messages(row_name, chat_key, sources.field(row_name, row, "chat_key", chat_key))
    if data.system_key is not None and messages[0]["role"] != "system":
        system = sources.field(row_name, row, "system_key", data.system_key)
        if not isinstance(system, str):
            raise DataError(f"{row_name}: {data.system_key!r} is not text (data.system_key)")
        messages = [{"role": "system", "content": system}, *messages]
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not spoken or spoken[0] == 0:
        raise DataError(f"{row_name}: {chat_key!r} has no turn of the assistant that follows another message")
    return ConversationRow(
        name=row_name,
        prompt=messages[: spoken[0]],
        answers=(messages[spoken[0] :],),
        tools=read_tools(row_name, row, data),
    )


class _Answers(msgspec.Struct, frozen=True):
    """Correct answers; the first is learned."""

    text: Annotated[list[str], msgspec.Meta(min_length=1)]


class _SquadRow(msgspec.Struct, frozen=True):
    """A row of SQuAD; other fields are ignored."""

    context: str
    question: str
    answers: _Answers


def _squad(row_name: str, row: sources.Row, data: DataConfig) -> ConversationRow:
    """Read a question as NeMo-RL does: the passage is the system message."""
    question_row = _convert(row_name, row, _SquadRow, "question about a passage")
    return ConversationRow(
        name=row_name,
        prompt=[
            {"role": "system", "content": question_row.context},
            {"role": "user", "content": question_row.question},
        ],
        answers=(_answer(question_row.answers.text[0]),),
    )


# --- preferences -----------------------------------------------------------------------------------------------------


def _read_with_margin(read: Read, row_name: str, row: sources.Row, data: DataConfig) -> ConversationRow | None:
    """Read a pair, and the margin of the better response if the dataset has one."""
    pair, key = read(row_name, row, data), data.margin_key
    if pair is None or key is None:
        return pair
    value = sources.field(row_name, row, "margin_key", key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row_name}: {key!r} is not a number (data.margin_key)")
    if wrong := beyond(value):
        raise DataError(f"{row_name}: {key!r} is {wrong} (data.margin_key)")
    return msgspec.structs.replace(pair, margin=abs(float(value)))


def _preference(row_name: str, row: sources.Row, data: DataConfig) -> ConversationRow:
    """Read a row of prompt, better and worse response, or one of ranked completions."""
    if "context" in row and "completions" in row:
        return _read_ranked(row_name, row)
    pair = [
        _messages(row_name, key, sources.field(row_name, row, setting, key), role="assistant")
        for setting, key in (("chosen_key", data.chosen_key), ("rejected_key", data.rejected_key))
    ]
    tools = read_tools(row_name, row, data)
    # A table has null where other rows have a prompt.
    if row.get(data.prompt_key) is not None or all(len(messages) == 1 for messages in pair):
        prompt = _messages(
            row_name, data.prompt_key, sources.field(row_name, row, "prompt_key", data.prompt_key), role="user"
        )
        keys = data.chosen_key, data.rejected_key
        pair = [
            _prepend_prompt(f"{row_name}: {data.prompt_key!r}", key, messages, prompt)
            for key, messages in zip(keys, pair, strict=True)
        ]
    better, worse = pair
    shared = min(common_length(better, worse), len(better) - 1, len(worse) - 1)  # a response for each
    if shared == 0:
        raise DataError(f"{row_name}: {data.chosen_key!r} and {data.rejected_key!r} do not begin with the same prompt")
    return ConversationRow(
        name=row_name,
        prompt=better[:shared],
        answers=(better[shared:], worse[shared:]),
        tools=tools,
    )


def _prepend_prompt(prompt_name: str, key: str, messages: Messages, prompt: Messages) -> Messages:
    """Return a response with its prompt in front; some data sets repeat the prompt in each response.

    Raises `DataError` for a conversation that has begun by itself, and with other messages than the prompt's.
    """
    is_whole = len(messages) > 1 and messages[0]["role"] != "assistant"
    if not is_whole:
        return [*prompt, *messages]
    first = 0 if prompt[0]["role"] == "system" else int(messages[0]["role"] == "system")
    is_repeated = len(messages) - first > len(prompt) and all(map(_is_same_message, prompt, messages[first:]))
    if not is_repeated:
        raise DataError(
            f"{prompt_name} is not what the conversation in {key!r} begins with: leave one of the two out, or set "
            "data.prompt_key to a field that the rows lack, so that the conversation counts alone"
        )
    return messages


def _is_same_message(message: Mapping[str, Any], repeated: Mapping[str, Any]) -> bool:
    contents = [each.get("content") for each in (message, repeated)]
    contents = [content.strip() if isinstance(content, str) else content for content in contents]
    return message["role"] == repeated["role"] and contents[0] == contents[1]


class _Completion(msgspec.Struct, frozen=True):
    """A completion in NeMo-RL's format: the lower rank is better."""

    rank: int
    completion: list[dict[str, Any]]


def _read_ranked(row_name: str, row: sources.Row) -> ConversationRow:
    try:
        completions = msgspec.convert(row["completions"], list[_Completion])
    except msgspec.ValidationError as error:
        raise DataError(f"{row_name}: 'completions' is not a list of ranked completions: {error}") from error
    if len(completions) != 2 or completions[0].rank == completions[1].rank:
        ranks = ", ".join(str(completion.rank) for completion in completions)
        raise DataError(
            f"{row_name}: preferences are two completions of different rank, got ranks {ranks or 'of none'}"
        )
    return ConversationRow(
        name=row_name,
        prompt=_messages(row_name, "context", row["context"], role="user"),
        answers=tuple(
            _messages(row_name, "completions", completion.completion)
            for completion in sorted(completions, key=lambda completion: completion.rank)
        ),
    )


class _HelpSteerRow(msgspec.Struct, frozen=True):
    """A row of HelpSteer; other fields are ignored."""

    context: Any
    response1: str
    response2: str
    overall_preference: float


def _help_steer(row_name: str, row: sources.Row, data: DataConfig) -> ConversationRow | None:
    """Read a pair of HelpSteer: a negative preference is for the first response."""
    pair = _convert(row_name, row, _HelpSteerRow, "pair of responses")
    if pair.overall_preference == 0:
        return None
    first, second = _answer(pair.response1), _answer(pair.response2)
    answers = (first, second) if pair.overall_preference < 0 else (second, first)
    return ConversationRow(
        name=row_name, prompt=_messages(row_name, "context", pair.context, role="user"), answers=answers
    )


Parsed = TypeVar("Parsed")


def _convert(row_name: str, row: sources.Row, kind: type[Parsed], kind_name: str) -> Parsed:
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{row_name} is not a {kind_name}: {error}") from error


# --- messages --------------------------------------------------------------------------------------------------------


def _messages(row_name: str, key: str, value: object, *, role: str | None = None) -> Messages:
    """Read a list of messages with all of their fields; with `role`, a text is one message of it.

    Raise `DataError` for anything else.
    """
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    try:
        value = msgspec.convert(value, list[Any])
    except msgspec.ValidationError as error:
        text = "neither a text nor" if role is not None else "not"
        raise DataError(f"{row_name}: {key!r} is {text} a list of messages: {error}") from error
    if not value:
        raise DataError(f"{row_name}: {key!r} holds no message")
    messages = [read_message(f"{row_name}: {key}[{number}]", message) for number, message in enumerate(value)]
    for number, message in enumerate(messages):
        if message.get("weight", 1) not in (0, 1):
            raise DataError(f"{row_name}: {key}[{number}].weight is {message['weight']!r}, must be 0 or 1")
    return messages


def _answer(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]


def _text(*parts: Messages) -> str:
    return msgspec.json.encode(parts).decode()


_IDENTITY: ItemIdentity[ConversationRow] = ItemIdentity(
    place=lambda conversation: conversation.name,
    prompt=lambda conversation: _text(conversation.prompt or conversation.answers[0]),
    content=lambda conversation: _text(conversation.prompt, *conversation.answers),
)
