"""The tools that a row of a dataset comes with, which chat templates show."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tandem.common.errors import DataError
from tandem.common.messages import Problem
from tandem.config.named import GENERATED
from tandem.config.schema import DataConfig
from tandem.config.schema.environments import PACKAGED

_TOOLS = "tools"


def tools_of(problem: Problem, data: DataConfig) -> tuple[dict[str, Any], ...]:
    """Return the tools of the row that a problem was read from; none of a generated one. Raise `DataError`.

    `data` is the section of the problem's own set.
    """
    if data.dataset_name in (*GENERATED, *PACKAGED):
        return ()
    return read_tools(problem.problem_id, problem.metadata, data)


def tools_field(data: DataConfig) -> str:
    """Return the field of a set's rows that holds their tools, if they have any."""
    return data.tool_key or _TOOLS


def read_tools(row_name: str, row: Mapping[str, Any], data: DataConfig) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row, as JSON schemas, which may stand in it as JSON text.

    Without ``data.tool_key``, a field ``tools`` that holds something else is no field of tools. Raise `DataError`.
    """
    tools = tools_in(row, tools_field(data))
    if tools is not None:
        return tools
    if data.tool_key is None:
        return ()
    raise DataError(f"{row_name}: {data.tool_key!r} is not a list of tools as JSON schemas (data.tool_key)")


def tools_in(row: Mapping[str, Any], field: str) -> tuple[dict[str, Any], ...] | None:
    """Return the tools in a field of a row; None if it holds something else."""
    value = row.get(field)
    if isinstance(value, str):
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(value)
    if not value:
        return ()
    if isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value):
        return tuple(_drop_nulls(tool) for tool in value)
    return None


def _drop_nulls(value: Any) -> Any:
    """Return a value without fields that are null: Parquet gives each object the fields of all others."""
    if isinstance(value, Mapping):
        return {name: _drop_nulls(part) for name, part in value.items() if part is not None}
    return [_drop_nulls(part) for part in value] if isinstance(value, list) else value
