"""The drawing of a run's state on a terminal, and the lines that say what it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.groups.table import GroupState
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.observe.lines import SPARKLINE_WIDTH, curves_of, shares, sparkline
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
