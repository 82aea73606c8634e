"""Write the message tables of ``docs/protocol.md``: ``python -m tandem.common.protocol_page docs/protocol.md``."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec

from tandem.common import messages

LINKS: dict[str, UnionType] = {
    "Coordinator to any process": messages.Admission,
    "Any process to the coordinator": messages.Membership,
    "Coordinator to trainer": messages.TrainerOrder,
    "Trainer to coordinator": messages.TrainerReply,
    "Coordinator to rollout": messages.RolloutOrder,
    "Rollout to coordinator": messages.RolloutReply,
    "Coordinator to refit": messages.RefitOrder,
    "Refit to coordinator": messages.RefitReply,
}
_PARTS = (
    messages.PromptGroup,
    messages.Problem,
    messages.SamplingParameters,
    messages.SampleScored,
    messages.PlannedMesh,
    messages.MemoryUse,
)
_MARKED = re.compile(r"(<!-- messages -->\n).*?(<!-- /messages -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with fresh tables between its two markers."""
    return _MARKED.sub(lambda match: f"{match[1]}{tables()}\n{match[2]}", page)


def tables() -> str:
    """Return a section a link, a table a message, then the structs that messages are made of."""
    lines = [f"Protocol version {messages.PROTOCOL_VERSION}."]
    shown: set[type] = set()
    for title, union in LINKS.items():
        lines += ["", f"### {title}"]
        for message in get_args(union):
            if message not in shown:
                shown.add(message)
                lines += ["", *_table(message)]
    lines += ["", "### Parts of messages"]
    for part in _PARTS:
        lines += ["", *_table(part)]
    return "\n".join(lines)


def _table(message: type[msgspec.Struct]) -> list[str]:
    docs = _field_docs(message)
    lines = [f"**`{message.__name__}`**: {_in_one_line(inspect.getdoc(message) or '')}"]
    fields = msgspec.structs.fields(message)
    if fields:
        lines += ["", "| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{f.encode_name}` | `{_type(message, f.name)}` | {docs.get(f.name, '')} |" for f in fields]
    return lines


def _type(message: type[Any], field: str) -> str:
    """Return a field's annotation as it is written."""
    for base in message.__mro__:
        if field in vars(base).get("__annotations__", {}):
            return str(base.__annotations__[field]).replace("|", "\\|")
    raise AssertionError(f"{message.__name__} has no field {field}")


def _field_docs(message: type[Any]) -> dict[str, str]:
    """Return the docstrings under the fields of a struct and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(message.__mro__):
        if base.__module__ != messages.__name__:
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in zip(definition.body, definition.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = _in_one_line(text)
                case _:
                    pass
    return docs


def _in_one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text()))
