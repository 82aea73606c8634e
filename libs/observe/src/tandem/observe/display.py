"""The part of a terminal that changes in place, below the lines that stay.

Everything printed meanwhile, by the console or to standard output and error, appears above it, and stays in the
scroll-back. If the terminal has become narrower, wrapped lines are counted, so that the old picture is erased
completely.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.text import Text


class TerminalDisplay(RenderHook):
    """A renderable that is kept at the bottom of a terminal, until it is closed."""

    def __init__(self, console: Console) -> None:
        """Begin empty, with the cursor hidden."""
        self._console = console
        self._shown: RenderableType = Text()
        self._widths: list[int] = []
        """Widths of the lines on the terminal, in cells."""
        self._out, self._errors = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (cast(TextIO, FileProxy(console, file)) for file in (self._out, self._errors))
        console.push_render_hook(self)
        console.show_cursor(False)

    def update(self, shown: RenderableType) -> None:
        """Replace what is shown."""
        self._shown = shown
        self._console.print(Control())  # the hook does the rest

    def close(self) -> None:
        """Erase what is shown, and give the terminal back."""
        self._console.pop_render_hook()
        sys.stdout, sys.stderr = self._out, self._errors
        self._console.control(self._make_erasure())
        self._console.show_cursor(True)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put printed text above the display; rich calls this."""
        return [self._make_erasure(), *renderables, _Frame(self)]

    def _make_erasure(self) -> Control:
        """Return the control codes that erase the shown lines, from the end of the last one."""
        width = max(1, self._console.width)
        num_rows = sum(max(1, -(-cells // width)) for cells in self._widths)
        self._widths = []
        if not num_rows:
            return Control()
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * (num_rows - 1)
        return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up)

    def lines(self, console: Console) -> Iterator[Segment]:
        """Yield the shown lines, one terminal row each, and at most as many as there are rows."""
        options = console.options.update(width=console.width, no_wrap=True, overflow="ellipsis")
        lines = console.render_lines(self._shown, options, pad=False)[: max(1, console.height - 1)]
        self._widths = [Segment.get_line_length(line) for line in lines]
        for index, line in enumerate(lines):
            yield from [Segment.line()] * (index > 0)
            yield from line


class _Frame:
    """The content of a display at the time it is drawn."""

    def __init__(self, display: TerminalDisplay) -> None:
        self._display = display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        return self._display.lines(console)
