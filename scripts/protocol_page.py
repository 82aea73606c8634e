"""The message tables of ``docs/protocol.md``; this module's argument is the path of the page."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from tandem.common import keys, messages
from tandem.coordinator.processes.replies import describe_checks
from tandem.samples import batch

LINKS: dict[str, UnionType | type[messages.Message]] = {
    "Coordinator to any process": messages.Admission,
    "Any process to the coordinator": messages.Presence,
    "Coordinator to trainer": messages.TrainerCommand,
    "Trainer to coordinator": messages.TrainerReply,
    "Coordinator to rollout": messages.TrainerKeys | messages.RolloutCommand,
    "Rollout to coordinator": messages.Leaving | messages.RolloutReply,
    "Coordinator to refit": messages.RefitCommand,
    "Refit to coordinator": messages.RefitReply,
    "Trainer to rollout": messages.ToSampleStore,
    "Rollout to trainer": messages.FromSampleStore,
    "Rollout to the program that began the run": messages.ToRewardServer,
    "The program that began the run to rollout": messages.FromRewardServer,
}
_PARTS = (
    messages.PromptGroup,
    messages.Problem,
    messages.SamplingParameters,
    messages.EngineServer,
    messages.SampleScored,
    messages.RecordedGroup,
    messages.PlannedTransferGroup,
    messages.MemoryUse,
    messages.RewardServer,
    messages.Listener,
    messages.ResponseToScore,
    messages.ScoredResponse,
)
_ARRAYS = {
    "TABLE": batch.SampleBatch.check_table,
    "TOKENS": batch.SampleBatch.check_tokens,
    "SAMPLES": batch.SampleBatch.check_samples,
}
"""Checks of the arrays of a message, by the name of their list."""
_LIMITS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "min_length": "of length at least",
    "max_length": "of length at most",
}
"""Limits of `msgspec.Meta`, in words."""
_MARKED = re.compile(r"(<!-- messages -->\n).*?(<!-- /messages -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with fresh tables between its two markers."""
    return _MARKED.sub(lambda match: f"{match[1]}{tables()}\n{match[2]}", page)


def tables() -> str:
    """Return a section for each link, a table for each message, then the structs inside messages."""
    lines = [f"Protocol version {messages.PROTOCOL_VERSION}."]
    shown: set[type] = set()
    for title, union in LINKS.items():
        lines += ["", f"### {title}"]
        for message in get_args(union) or (union,):
            if message not in shown:
                shown.add(message)
                lines += ["", *_table(message)]
    lines += ["", "### Parts of messages"]
    for part in _PARTS:
        lines += ["", *_table(part)]
    lines += ["", *_table(keys.KeyPair, keys)]
    lines += ["", "### Arrays"]
    for name, check in _ARRAYS.items():
        lines += ["", *_array_table(name), "", _in_one_line(inspect.getdoc(check) or "")]
    return "\n".join([*lines, "", "### Types of fields", "", *_types()])


def _table(message: type[msgspec.Struct], module: ModuleType = messages) -> list[str]:
    docs, hints = _field_docs(message, module), get_type_hints(message, include_extras=True)
    lines = [f"**`{message.__name__}`**: {_in_one_line(inspect.getdoc(message) or '')}"]
    fields = msgspec.structs.fields(message)
    if fields:
        lines += ["", "| field | type | meaning |", "|---|---|---|"]
    for field in fields:
        kind = _type(message, field.name)
        meaning = docs.get(field.name, "")
        if kind.startswith("Annotated["):  # its limits are told here, not in the table of types
            kind = _plain(ast.parse(kind, mode="eval").body)
            meaning = f"{meaning} Must be {_limits(hints[field.name])}.".strip()
        lines.append(f"| `{field.encode_name}` | `{kind}` | {meaning} |")
    checks = _in_one_line(describe_checks(message)) if issubclass(message, messages.Message) else ""
    return [*lines, "", checks] if checks else lines


def _array_table(name: str) -> list[str]:
    """Return the table of the arrays in a list of `tandem.samples.batch`."""
    docs = _field_docs(batch.SampleBatch, batch)
    (about,) = (text for each, _, text in _documented(ast.parse(inspect.getsource(batch))) if each == name)
    lines = [f"**`{name}`**: {about}", "", "| array | type | meaning |", "|---|---|---|"]
    return lines + [f"| `{each}` | {batch.DECLARED[each]} | {docs.get(each, '')} |" for each in vars(batch)[name]]


def _type(message: type[Any], field: str) -> str:
    """Return a field's annotation as it is written."""
    for base in message.__mro__:
        if field in vars(base).get("__annotations__", {}):
            return str(base.__annotations__[field]).replace("|", "\\|")
    raise AssertionError(f"{message.__name__} has no field {field}")


def _types() -> list[str]:
    """Return a table of the types that limit a field's values."""
    lines = ["| type | is | must be | meaning |", "|---|---|---|---|"]
    declared = _documented(ast.parse(inspect.getsource(messages))), _documented(ast.parse(inspect.getsource(keys)))
    for name, value, meaning in chain(*declared):
        kind = getattr(messages, name, getattr(keys, name, None))
        if get_origin(kind) is Annotated:
            plain = _plain(value)
            lines.append(f"| `{name}` | `{plain}` | {_limits(kind)} | {meaning} |")
    return lines


def _plain(annotated: ast.expr | None) -> str:
    """Return the inner type of ``Annotated[...]`` as it is written."""
    assert isinstance(annotated, ast.Subscript)
    assert isinstance(annotated.slice, ast.Tuple)
    return ast.unparse(annotated.slice.elts[0])


def _limits(kind: Any) -> str:
    """Return the limits of an annotated type, in words."""
    said = []
    for meta in kind.__metadata__:
        for limit, words in _LIMITS.items():
            if (value := getattr(meta, limit)) is not None:
                said.append(f"{words} {value}")
    return ", ".join(said)


def _field_docs(message: type[Any], module: ModuleType) -> dict[str, str]:
    """Return the docstrings under the fields of a struct and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(message.__mro__):
        if base.__module__ != module.__name__:
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        docs.update({name: text for name, _, text in _documented(definition)})
    return docs


def _documented(definition: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.expr | None, str]]:
    """Yield each name that has a docstring under it, with its assigned value and the docstring."""
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, value, _in_one_line(text)
            case _:
                pass


def _in_one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text()))
