"""A dataset that a program has in memory, saved as a file in the run folder.

Rows stay as they are, and get two more fields: the question and the reference answer. The file is named after its
content. Resuming the run with other rows is thus noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import DataError, nearest
from tandem.common.files import replace_file
from tandem.common.returned import shown
from tandem.common.values import encode_json
from tandem.config.schema import DataConfig
from tandem.samples.data_sets import sources
from tandem.samples.data_sets.questions import read_question

FOLDER = "data"
"""Folder of the rows within the run folder."""
QUESTION, ANSWER = "_question", "_answer"
"""Fields that are added to rows."""
_PROMPTS = ("prompt", "question", "input", "problem")
_ANSWERS = ("answer", "solution", "output", "reference", "ground_truth")

Row = Mapping[str, Any]


class CheckedRows(msgspec.Struct, frozen=True):
    """Checked rows."""

    content: bytes
    """Content of the file."""
    columns: tuple[str, ...]
    """Columns of the first row."""
    num_rows: int

    def write(self, path: Path) -> None:
        """Write the file, unless it is already there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            replace_file(path, self.content)

    def path(self, folder: Path, name: str) -> Path:
        """Return the path of the file in a run folder."""
        return folder / FOLDER / f"{name}-{hashlib.sha256(self.content).hexdigest()[:12]}.jsonl"


def rows_of(dataset: object, data: DataConfig, argument: str) -> CheckedRows:
    """Check a dataset: a list of rows, a ``datasets.Dataset``, or the path of a JSON-lines file.

    Raise `DataError` if it is unusable; its text begins with `argument`, the name of what was given.
    """
    rows = _rows(dataset, argument)
    first = rows[0]
    question = _key(first, data.input_key, _PROMPTS)
    if question is None:
        raise DataError(
            f"{argument}: its rows have no field {data.input_key!r} (data.input_key), and none of "
            f"{', '.join(_PROMPTS)}; they have {', '.join(first)}{nearest(data.input_key, first)}"
        )
    answer = _key(first, data.output_key, _ANSWERS)
    lines = (_line(row, question, answer, f"{argument}[{index}]") for index, row in enumerate(rows))
    return CheckedRows(b"".join(lines), tuple(first), len(rows))


def _rows(dataset: object, argument: str) -> Sequence[Row]:
    if isinstance(dataset, str | Path):
        return [row for _, row in sources.jsonl(str(dataset), keeps_digits=True)]
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, dataset))
        raise DataError(f"{argument}: expected rows, got a mapping of {names}: choose one, such as {argument}['train']")
    if not isinstance(dataset, Iterable) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{argument}: expected a list of rows, a datasets.Dataset or a path, got {shown(dataset)[:200]}"
        )
    rows = list(dataset)
    if not rows:
        raise DataError(f"{argument}: there are no rows")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(f"{argument}[{index}]: expected a mapping of names to values, got {shown(row)[:200]}")
        for name in (QUESTION, ANSWER):
            if name in row:
                raise DataError(f"{argument}[{index}]: rows must not have a field named {name!r}: rename it")
    return rows


def _key(row: Row, configured: str, usual: Iterable[str]) -> str | None:
    return next((name for name in (configured, *usual) if name in row), None)


def _line(row: Row, question: str, answer: str | None, label: str) -> bytes:
    for name in filter(None, (question, answer)):
        if name not in row:
            raise DataError(f"{label}: it has no field {name!r}, as the first row has; it has {', '.join(row)}")
    if row[question] is None:
        raise DataError(f"{label}: {question!r} is None")
    # Only checked here: images among the parts of its messages are read with the row.
    read_question(f"{label}[{question!r}]", row[question], lambda image: "")
    reference = None if answer is None else row[answer]
    try:
        return encode_json({**row, QUESTION: row[question], ANSWER: reference}, _plain) + b"\n"
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{label}: it cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has: NumPy values as Python's, anything else as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
