"""Rows of a data set as they are shown: tokens, which of them are learned, and what is known of a row.

`MODULE` makes them of a run, for the page, which does not read data itself.
"""

from __future__ import annotations

import msgspec

MODULE = "tandem.coordinator.preparing.shown_rows"
"""Module that answers `RowsRequest`, as ``python -m MODULE RUN``, by `tandem.observe.page.worker.answer_requests`."""


class ShownToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token, or many equal ones in a row."""

    id: int
    text: str
    """Text that the token completes; a character of several tokens belongs to the last one."""
    is_special: bool
    is_learned: bool
    """Whether it counts in the loss."""
    count: int = 1
    """Equal tokens in a row that this one stands for."""


class ShownRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that a model is trained on, or a prompt."""

    name: str
    """Place in the source."""
    kind: str
    """``chosen`` or ``rejected`` of a pair, otherwise empty."""
    size: str
    """Its length in words."""
    tokens: tuple[ShownToken, ...]
    facts: tuple[tuple[str, str], ...]
    """Names and texts: the token that begins it, those that end its turns, and a note where one is wrong."""


class RowsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the first rows of a step."""

    step: int | None
    """Step; None for the newest."""
    limit: int
    """Most rows."""


class RunRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a step of a run trained on."""

    step: int
    last_step: int
    num_rows: int
    """Rows of the step."""
    rows: tuple[ShownRow, ...]
    """A sequence of each of the first rows, or both of a pair."""
    notes: tuple[str, ...]


class RowsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The rows, or the reason why there are none."""

    rows: RunRows | None = None
    error: str = ""
