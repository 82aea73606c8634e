"""A terminal as far as the display of a run needs one: it scrolls, wraps, and is resized, as real ones do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


@dataclass
class _Row:
    text: list[str] = field(default_factory=list)
    goes_on: bool = False
    """Whether the next row is the rest of the same line."""


class Terminal:
    """What is on a terminal, and what it has scrolled away."""

    def __init__(self, columns: int, rows: int, *, reflows: bool) -> None:
        """`reflows`: whether a line that no longer fits is wrapped when the terminal gets narrower, or cut off."""
        self.columns, self.rows = columns, rows
        self._reflows = reflows
        self._rows = [_Row()]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        """All lines, from the first that was ever there; what is wrapped is one."""
        lines, line = [], ""
        for row in self._rows:
            line += "".join(row.text)
            if not row.goes_on:
                lines.append(line.rstrip())
                line = ""
        return lines

    def feed(self, text: str) -> None:
        """Write to the terminal. A sequence that it does not know is an error."""
        place = 0
        while place < len(text):
            found = _SEQUENCE.match(text, place)
            assert found is not None, f"unknown: {text[place : place + 20]!r}"
            place = found.end()
            arguments, command, control, character = found.groups()
            if command:
                self._command(arguments, command)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down()
            else:
                self._write(character)

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        self.columns, self.rows = columns, rows
        if not self._reflows:
            for row in self._rows:
                del row.text[columns:]
            self._column = min(self._column, columns)
            return
        wrapped: list[_Row] = []
        line: list[str] = []
        cursor: int | None = None
        for number, row in enumerate(self._rows):
            if number == self._row:
                cursor = len(line) + self._column
            line += row.text
            if row.goes_on:
                continue
            parts = [line[first : first + columns] for first in range(0, max(1, len(line)), columns)]
            if cursor is not None:
                place = min(cursor // columns, len(parts) - 1)
                self._row, self._column, cursor = len(wrapped) + place, cursor - place * columns, -1
            wrapped += [_Row(part, goes_on=part is not parts[-1]) for part in parts]
            line, cursor = [], None
        self._rows = wrapped

    def _command(self, arguments: str, command: str) -> None:
        if command == "A":
            self._row = max(self._row - int(arguments or 1), len(self._rows) - self.rows, 0)
        elif (command, arguments) == ("K", "2"):
            self._rows[self._row].text.clear()
            self._rows[self._row].goes_on = False
        else:
            assert command in "mhl", f"unknown: {arguments}{command}"

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._rows):
            self._rows.append(_Row())

    def _write(self, character: str) -> None:
        if self._column == self.columns:
            self._rows[self._row].goes_on = True
            self._down()
        text = self._rows[self._row].text
        text += [" "] * (self._column + 1 - len(text))
        text[self._column] = character
        self._column += 1
