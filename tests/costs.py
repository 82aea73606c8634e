"""What tests cost: seconds, processor seconds of all processes they start, and how many they start, each to a file.

``pytest -p tests.costs --costs costs.jsonl tests/unit`` writes a line for each test and each fixture that is made;
``python -m tests.costs costs*.jsonl`` adds them up by file, by fixture and by test. Processes beside each other each
write a file of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.2
_MOST = 25
"""Rows of each table."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a test, or the making of a fixture, took."""

    kind: Literal["test", "fixture"]
    name: str
    file: str
    seconds: float
    cpu_s: float
    """Of this process and of all below it, also those that have ended."""
    idle_s: float = 0.0
    """Seconds in which no thread of these processes ran, or could have run: they waited for time to pass."""
    commands: int = 0
    """Services started: `coordinator`, `trainer`, `rollout`, `refit`, as a user starts them."""
    ranks: int = 0
    """Processes that functions of tests ran in."""
    programs: int = 0
    """Other programs."""


class _Costs:
    """Writes costs while tests run."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("w")
        self._counts: Counter[str] = Counter()
        self._idle_s = 0.0
        threading.Thread(target=self._count_idle, args=(threading.get_native_id(),), daemon=True).start()
        sys.addaudithook(self._hear)

    def _count_idle(self, main: int) -> None:
        """Look several times a second whether anything runs. Seconds do not tell that where others use the machine."""
        last = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            with contextlib.suppress(OSError):  # a test has taken all descriptors
                if not _is_busy(main):
                    self._idle_s += now - last
            last = now

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            self._counts["programs"] += 1

    @contextlib.contextmanager
    def measured(self, kind: Literal["test", "fixture"], name: str, file: str) -> Iterator[None]:
        """Write what is done inside."""
        began, cpu, idle, counts = time.monotonic(), _cpu_s(), self._idle_s, self._counts.copy()
        try:
            yield
        finally:
            cost = Cost(
                kind=kind,
                name=name,
                file=file,
                seconds=time.monotonic() - began,
                cpu_s=_cpu_s() - cpu,
                idle_s=self._idle_s - idle,
                **(self._counts - counts),
            )
            self._out.write(msgspec.json.encode(cost).decode() + "\n")
            self._out.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self.measured("test", item.nodeid, item.nodeid.partition("::")[0]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        file = request.node.nodeid.partition("::")[0]
        with self.measured("fixture", f"{fixturedef.argname} ({fixturedef.scope})", file):
            return (yield)

    def count_starts(self) -> None:
        """Count what is forked, and not only what is executed."""
        from multiprocessing.process import BaseProcess

        from tandem.launch.fork_server import ServiceForkServer

        start_command, start_rank = ServiceForkServer.start, BaseProcess.start

        def start(server: ServiceForkServer, *args: Any, **kwargs: Any) -> Any:
            self._counts["commands"] += 1
            return start_command(server, *args, **kwargs)

        def start_process(process: BaseProcess) -> None:
            self._counts["ranks"] += 1
            start_rank(process)

        ServiceForkServer.start = start  # type: ignore[method-assign]
        BaseProcess.start = start_process  # type: ignore[method-assign]


def _is_busy(main: int) -> bool:
    """Tell whether a thread of these processes runs, could run or waits for a disk; of this process, only the main."""
    tasks = [Path(f"/proc/self/task/{main}")]
    for pid in [*_ticks()][1:]:
        with contextlib.suppress(OSError):  # it has ended
            tasks += Path(f"/proc/{pid}/task").iterdir()
    for task in tasks:
        with contextlib.suppress(OSError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def _cpu_s() -> float:
    """Return the processor seconds of this process and of all below it, those that have ended included."""
    return sum(_ticks().values()) / _TICKS_PER_S


def _ticks() -> dict[int, int]:
    """Return what this process, and each below it, has used of a processor, this process's first."""
    parents, ticks = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(name)] = int(words[1])
        ticks[int(name)] = sum(map(int, words[11:15]))
    children = defaultdict(list)
    for child, parent in parents.items():
        children[parent].append(child)
    found, left = {}, [os.getpid()]
    while left:
        pid = left.pop()
        found[pid] = ticks.get(pid, 0)
        left += children[pid]
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="what each test and fixture costs, a line each")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--costs")
    if path is None:
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    costs = _Costs(path.with_stem(f"{path.stem}{worker and '-'}{worker}"))
    costs.count_starts()
    config.pluginmanager.register(costs, "costs of tests")


def table(costs: list[Cost], by: str) -> str:
    """Return the most expensive, most processor time first."""
    sums: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        sums[getattr(cost, by)].append(cost)
    heads = ("cpu s", "seconds", "idle s", "number", "commands", "ranks", "programs")
    rows = [" ".join(f"{head:>8}" for head in heads) + f"  {by}"]

    def total(name: str, attribute: str) -> float:
        return sum(getattr(cost, attribute) for cost in sums[name])

    for name in sorted(sums, key=lambda name: -total(name, "cpu_s"))[:_MOST]:
        seconds = [f"{total(name, each):8.1f}" for each in ("cpu_s", "seconds", "idle_s")]
        counts = [f"{int(total(name, each)):8}" for each in ("commands", "ranks", "programs")]
        rows.append(" ".join([*seconds, f"{len(sums[name]):8}", *counts]) + f"  {name}")
    return "\n".join(rows)


def main(paths: list[str]) -> None:
    """Print the tables."""
    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    costs = [msgspec.convert(json.loads(line), Cost) for line in lines]
    tests = [cost for cost in costs if cost.kind == "test"]
    whole = [msgspec.structs.replace(cost, file="all") for cost in tests]
    for title, rows, by in (
        ("All", whole, "file"),
        ("By file", tests, "file"),
        ("Fixtures that tests share", [cost for cost in costs if cost.kind == "fixture"], "name"),
        ("By test", tests, "name"),
    ):
        print(f"\n{title}\n{table(rows, by)}")


if __name__ == "__main__":
    main(sys.argv[1:])
