"""The configuration of a run that a program begins: base, arguments, overrides; its data as a file.

Rows of a dataset in memory stay as they are, and get two more fields: the question and the reference answer. The file
is named after its content. Resuming the run with other rows is thus noticed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.common.errors import ConfigError, DataError, nearest
from tandem.common.files import replace_file
from tandem.common.user_code import shown
from tandem.common.values import encode_json
from tandem.config import Config, named, schema
from tandem.config.checks.data import PYTHON_REWARDS
from tandem.config.layers import ConfigLayers
from tandem.config.load import build, lay_over, make_layers
from tandem.coordinator.api.rewards import RewardFunction
from tandem.samples.data_sets import sources
from tandem.samples.data_sets.prompts import read_question

SOLVED_AT = "solved_at"
"""Key of the first function's lowest value for a response that counts as solved."""
_SOURCE = "tandem.train"
_NO_FILE_YET = "-"
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


def rows_of(dataset: object, data: schema.DataConfig, argument: str) -> CheckedRows:
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
    read_question(f"{label}[{question!r}]", row[question], lambda _: "")
    reference = None if answer is None else row[answer]
    try:
        return encode_json({**row, QUESTION: row[question], ANSWER: reference}, _plain) + b"\n"
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{label}: it cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has: NumPy values as Python's, anything else as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)


class ConfigurationBuilder(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that is still being put together."""

    layers: ConfigLayers
    overrides: Mapping[str, Any]

    def apply_argument(self, argument: Mapping[str, Any]) -> ConfigurationBuilder:
        """Return the settings with an argument of `tandem.train` laid over the configuration."""
        layers = lay_over(self.layers, dict(argument), _SOURCE)
        return ConfigurationBuilder(layers=layers, overrides=self.overrides)

    def built(self, *arguments: Mapping[str, Any]) -> Config:
        """Return the configuration with arguments laid over it, and overrides over those. Raise `ConfigError`."""
        return build(self._layers(*arguments))

    @property
    def says_what_is_held_out(self) -> bool:
        """Whether the user sets how many rows are held out."""
        data = self._layers().merged.get("data")
        keys = ("num_validation", "split_validation_size")
        return isinstance(data, Mapping) and any(data.get(key) is not None for key in keys)

    def _layers(self, *arguments: Mapping[str, Any]) -> ConfigLayers:
        layers = self.layers
        for argument in arguments:
            layers = lay_over(layers, dict(argument), _SOURCE)
        for key, value in self.overrides.items():
            nested: Any = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            layers = lay_over(layers, nested, "overrides")
        return layers


def settings_of(config: object, overrides: object) -> ConfigurationBuilder:
    """Read the user's configuration and overrides. Raise `ConfigError` if they have the wrong type."""
    if not isinstance(config, str | Path | Mapping | Config):
        raise ConfigError(f"config: expected a path, a dict or a Config, got {shown(config)[:200]}")
    settings = {} if overrides is None else overrides
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) and key for key in settings):
        raise ConfigError(
            f"overrides: expected a dict such as {{'grpo.max_num_steps': 10}}, got {shown(overrides)[:200]}"
        )
    return ConfigurationBuilder(layers=make_layers(config), overrides=settings)


def of_rewards(functions: Sequence[RewardFunction], solved_at: object) -> dict[str, Any]:
    """Return the settings by which functions score the samples; a resumed run needs functions with equal settings."""
    if isinstance(solved_at, bool) or not isinstance(solved_at, int | float) or not math.isfinite(solved_at):
        raise ConfigError(f"solved_at: expected a finite number, got {shown(solved_at)[:200]}")
    described = {
        "functions": [function.name for function in functions],
        "weights": [function.weight for function in functions],
        SOLVED_AT: float(solved_at),
    }
    return {"data": {"environment": PYTHON_REWARDS}, "env": {PYTHON_REWARDS: {"kwargs": described}}}


def of_rows(train: str | None, validation: str | None, num_held_out: int | None = None) -> dict[str, Any]:
    """Return the settings by which a run learns from files of rows (`tandem.coordinator.api.configuration`).

    `num_held_out` training rows are held out, unless another setting says how many.
    """
    held_out = {} if num_held_out is None else {"num_validation": num_held_out}
    return {
        "data": {
            **held_out,
            "dataset_name": "jsonl",
            "task": None,
            "train_data_path": train or _NO_FILE_YET,
            "val_data_path": validation,
            "input_key": QUESTION,
            "output_key": ANSWER,
        }
    }


def make_placeholder_rows() -> dict[str, Any]:
    """Return the settings of `of_rows` without the names of fields, so that the user's own names can be read."""
    data = of_rows(None, None)["data"]
    return {"data": {key: value for key, value in data.items() if not key.endswith("_key")}}


def row_keys(config: Config) -> tuple[str, str] | None:
    """Return the names under which functions get a problem's question and its reference answer.

    None if the row has both by itself.
    """
    if config.data.dataset_name in named.GENERATED:
        return "question", "answer"
    return None if config.data.input_key == QUESTION else (config.data.input_key, config.data.output_key)
