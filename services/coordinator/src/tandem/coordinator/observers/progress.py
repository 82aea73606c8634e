"""The display of a run's progress: a line a step, and on a terminal a display that changes.

Everything printed meanwhile, by the console or to standard output and error, appears above the display, and stays in
the scroll-back. If the terminal has become narrower, wrapped lines are counted, so that the old picture is erased
completely. Elsewhere, a line every half minute says what a long step waits for. Of a run that generates nothing, steps
are so quick that not each has a line.

First come the functions that draw the state of a run, and that say what it waits for.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from tandem.config import Config
from tandem.config.models import hub
from tandem.coordinator.observers.observer import Observer
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.groups.table import GroupState
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.observe.lines import (
    NUM_RECENT,
    SPARKLINE_WIDTH,
    clock,
    curves_of,
    seconds_left,
    shares,
    sparkline,
    step_line,
)
from tandem.observe.run_folder.journal import StepRecord

_MOST_NAMED = 4
"""Most processes that a line names; the rest are counted."""
_PHASE_COLOURS = {
    "generation": "cyan",
    "policy_training": "magenta",
    "value_training": "red",
    "value_inference": "blue",
    "teacher_logprob_inference": "blue",
    "get_logprobs": "blue",
    "refit": "yellow",
    "validation": "green",
    "checkpointing": "white",
}


def waiting_line(scheduler: Scheduler, registry: ProcessRegistry, last_step: int) -> str:
    """Describe what a run is doing, and the processes that it waits for."""
    tables = scheduler.tables
    waits: dict[str, list[str]] = {}
    for name in tables.requests.processes():
        process = registry.processes.get(name)
        waits.setdefault(process.phase if process is not None else "gone", []).append(name)
    parts = []
    for phase, names in waits.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        parts.append(f"{', '.join(names[:_MOST_NAMED])}{more} ({phase})")
    if missing := tables.processes.missing():
        parts.insert(0, f"{missing} to join")
    if absent := tables.engines.having(EngineStatus.ABSENT):
        parts.append(f"a replacement of {', '.join(absent)}")
    waiting = "; ".join(parts) or "nothing"
    return f"step {tables.step}/{last_step}: {tables.phase.value}, waiting for {waiting}"


def ahead_line(scheduler: Scheduler) -> str:
    """Describe the groups that are generated beside training, and the versions that engines generate with."""
    tables = scheduler.tables
    states = Counter(group.state for group in tables.groups if group.purpose == "train")
    engines, newest = tables.engines, tables.weights.version
    num_holding = Counter(engines[name].version for name in engines.having(EngineStatus.HOLDING))
    on = ", ".join(f"version {version} on {num_holding[version]}" for version in sorted(num_holding, reverse=True))
    return (
        f"groups: {states[GroupState.READY]} ready, {states[GroupState.IN_FLIGHT]} being generated, "
        f"{states[GroupState.WAITING]} waiting; newest weights: version {newest}; engines: {on or 'none holds any'}"
    )


def picture(
    title: str,
    times: str,
    curves: Mapping[str, Sequence[float]],
    newest: StepRecord | None,
    spec: RunSpec,
    scheduler: Scheduler,
    registry: ProcessRegistry,
    now: float,
) -> RenderableType:
    """Draw the current state of a run: `curves` have the metrics of all steps by name, and `newest` is the last one."""
    tables = scheduler.tables
    return Group(
        Text(title, style="bold"),
        Text(f"{f'step {tables.step}/{spec.last_step}':>18} {tables.phase.value}  {times}"),
        *([] if spec.is_synchronous else [Text(f"{'ahead':>18} {ahead_line(scheduler)}")]),
        *_curves(curves, newest),
        *([] if newest is None else _last_step(newest)),
        _health(registry, now),
    )


def _curves(curves: Mapping[str, Sequence[float]], newest: StepRecord | None) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for name, label in curves_of({} if newest is None else newest.metrics):
        if values := curves.get(name):
            lines.append(Text(f"{label:>18} {values[-1]:7.3f}  {sparkline(values)}"))
    return lines


def _last_step(record: StepRecord) -> list[RenderableType]:
    total = record.seconds.get("total", 0.0) or 1.0
    bar = Text(f"{'last step':>18} {total:6.2f}s  ")
    speed = record.metrics.get("tokens_per_s")
    for name, colour in _PHASE_COLOURS.items():
        bar.append("█" * round(SPARKLINE_WIDTH * record.seconds.get(name, 0.0) / total), style=colour)
    rate = "" if speed is None else f"  {speed:,.0f} tokens/s"
    return [bar, Text(f"{'':>27}{shares(record.seconds)}{rate}", style="dim")]


def _health(registry: ProcessRegistry, now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("process", "host", "pid", "last seen", "doing"):
        table.add_column(heading, style="dim" if heading != "process" else "")
    for name, process in sorted(registry.processes.items()):
        age = f"{now - process.last_seen:.0f} s ago"
        table.add_row(name, process.hello.host, str(process.hello.pid), age, process.phase)
    return table


_REFRESH_S = 0.25
_LINE_EVERY_S = 30.0


class ProgressDisplay(Observer):
    """The display of one run."""

    def __init__(
        self,
        config: Config,
        spec: RunSpec,
        history: Sequence[StepRecord],
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        line_every_s: float = _LINE_EVERY_S,
        began_at: float | None = None,
        again: Sequence[StepRecord] = (),
        is_due: Callable[[StepRecord, float], bool] | None = None,
    ) -> None:
        """`now` returns the seconds of a clock; without a terminal, a line is printed every `line_every_s`.

        `began_at` is the beginning of the run by that clock; default: now. `again` are steps that may be done again.
        `is_due` says whether a step has a line, by its record and the clock; by default each has one.
        """
        self._is_due = is_due
        self._again = again
        self._title = f"{config.algorithm} · {hub.show_reference(config.policy.model_name)} · {config.logger.log_dir}"
        self._spec = spec
        self._recent = deque(history, NUM_RECENT)
        self._curves: dict[str, array[float]] = {}
        """Values of the metrics that a terminal shows, of all steps: of the rest, a long run has too many."""
        self._console = console or Console()
        self._now = now
        self._line_every_s = line_every_s
        self._printed_at = self._committed_at = now()
        self._began_at = self._printed_at if began_at is None else began_at
        self._shown_at = -_REFRESH_S
        self._display: TerminalDisplay | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._display = TerminalDisplay(self._console)
            for record in history:
                self._keep(record)

    def noted(self, text: str) -> None:
        """Print a line above the display."""
        self._print(text)

    def committed(self, record: StepRecord) -> None:
        """Show a step that is done."""
        self._recent.append(record)
        if self._display is not None:
            self._keep(record)
        self._committed_at = self._now()
        if self._is_due is None or self._is_due(record, self._committed_at):
            self._print(step_line(record, self._spec.last_step, self._times()))

    def show(self, scheduler: Scheduler, registry: ProcessRegistry) -> None:
        """Bring the display up to date, a few times a second; without one, print what the run waits for."""
        now = self._now()
        if self._display is None:
            if now - self._printed_at >= self._line_every_s:
                self._print(f"{waiting_line(scheduler, registry, self._spec.last_step)}  {self._times()}")
        elif now - self._shown_at >= _REFRESH_S:
            self._shown_at = now
            self._display.update(self.render(scheduler, registry, now))

    def close(self) -> None:
        """Give the terminal back, with the lines that were printed."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def render(self, scheduler: Scheduler, registry: ProcessRegistry, now: float) -> RenderableType:
        """Draw the current state of the run."""
        return picture(
            self._title,
            self._times(),
            self._curves,
            self._recent[-1] if self._recent else None,
            self._spec,
            scheduler,
            registry,
            now,
        )

    def _times(self) -> str:
        """Return the time since the run was started or resumed, and the time left."""
        now = self._now()
        remaining_s = seconds_left([*self._recent], self._spec.last_step, now - self._committed_at, self._again)
        elapsed = f"{clock(now - self._began_at)} elapsed"
        return elapsed if remaining_s is None else f"{elapsed}, {clock(remaining_s)} left"

    def _keep(self, record: StepRecord) -> None:
        """Add a step to the curves."""
        for name, _ in curves_of(record.metrics):
            if name in record.metrics:
                self._curves.setdefault(name, array("d")).append(record.metrics[name])

    def _print(self, text: str) -> None:
        self._printed_at = self._now()
        self._console.print(Text(text), soft_wrap=True)
        sys.stdout.flush()


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
