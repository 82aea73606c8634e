"""What benchmarks take from pytest: which of them run, their table of ratios at the end, and the files of results.

With ``TANDEM_BENCHMARK_SMOKE=1`` each benchmark runs once, by the first of its parameters, with the sizes of `smoke`.
Otherwise those that are marked ``long`` are skipped unless ``--long`` is given, and what was measured goes to
``results/NAME.json`` for ``test_NAME.py``, with the commit: benchmarks that did not run keep what the file has of them.
Sizes that are set by hand (``BENCHMARK_...``) leave these files alone, unless ``--results`` says where to write.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

try:
    from pytest_benchmark.fixture import BenchmarkFixture
except ModuleNotFoundError:
    raise SystemExit("pytest-benchmark is not installed: benchmarks need pip install -e '.[dev]'") from None

import results_files
from smoke import IS_SMOKE, LONG, is_long

_KEPT = ("processor", "machine", "python_compiler", "python_implementation", "python_version", "system")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
RESULTS = Path(__file__).parent / "results"
_FAILED: set[str] = set()
"""Node ids of this session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of benchmarks."""
    group = parser.getgroup("benchmarks of Tandem")
    group.addoption("--long", action="store_true", help="run the benchmarks that take minutes too, and more rounds")
    group.addoption("--half", type=int, choices=(0, 1), help="smoke every other file, from the first or the second on")
    group.addoption("--results", type=Path, metavar="FOLDER", help="where files of results go, here by default")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and tell benchmarks and their processes whether time is of no concern."""
    config.addinivalue_line("markers", "long(minutes): takes so many minutes, so it runs only with --long")
    if config.getoption("--long"):
        os.environ[LONG] = "1"


@pytest.hookimpl(trylast=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Describe the machine."""
    import torch

    cpu = machine_info.get("cpu", {})
    kept = {key: machine_info[key] for key in _KEPT if key in machine_info}
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine_info.clear()
    machine_info.update(
        {
            "node": f"{os.cpu_count()}-core CPU machine",
            **kept,
            "cpu": {key: cpu[key] for key in ("brand_raw", "count", "arch") if key in cpu},
            "memory GiB": round(gigabytes, 1),
            "torch": torch.__version__,
            "huge pages": {name: _chosen(_HUGE_PAGES / name) for name in ("enabled", "shmem_enabled")},
        }
    )


def _chosen(path: Path) -> str:
    """Return the setting in brackets."""
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the first parameters of each benchmark in a smoke test; skip what is long in others."""
    if not IS_SMOKE:
        _skip_long(items)
        return
    half = config.getoption("--half")
    files = sorted({item.path for item in items})
    others = set[Path]() if half is None else {*files[1 - half :: 2]}
    seen, kept, left_out = set(), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left_out if name in seen or item.path in others else kept).append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _skip_long(items: list[pytest.Item]) -> None:
    if is_long():
        return
    for item in items:
        for mark in item.iter_markers("long"):
            minutes = mark.kwargs["minutes"]
            item.add_marker(pytest.mark.skip(reason=f"takes about {minutes} min: pytest benchmarks --long"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a benchmark for which CI has no time left, as it does a test."""
    if time.time() > float(os.environ.get("TANDEM_TESTS_UNTIL", "inf")):
        pytest.skip(f"no time was left for {item.path.name}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what failed, if only after it was measured."""
    if report.failed:
        _FAILED.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was measured."""
    benchmarks = _session_of(session.config).benchmarks
    measured = [each for each in benchmarks if each and not each.has_error and each.fullname not in _FAILED]
    folder = session.config.getoption("--results") or (None if _is_quick() else RESULTS)
    if folder is not None and measured:
        results_files.write(session.config, measured, folder)


def _is_quick() -> bool:
    """Return whether sizes are others than a result is of: of a smoke test, or set in the environment by hand."""
    return IS_SMOKE or any(name.startswith("BENCHMARK_") for name in os.environ)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the ratios of every benchmark in one table."""
    rows = [row for each in _session_of(config).benchmarks if each for row in _rows(each.name, each.extra_info)]
    if not rows:
        return
    terminalreporter.section("ratios")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for *words, ratio, aim in rows:
        left = "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True))
        terminalreporter.write_line(f"{left}  {ratio:9.3f}{f'  aim {aim:g}' if aim is not None else ''}")


def _rows(name: str, facts: dict[str, Any]) -> list[tuple[str, str, str, float, float | None]]:
    """Return what `measure.keep_ratios` kept."""
    return [
        (name, what, way, ratio, of.get("aim"))
        for what, of in facts.get("table", {}).items()
        for way, ratio in of["ratios"].items()
    ]


def _session_of(config: pytest.Config) -> Any:
    """Return pytest-benchmark's session."""
    return config._benchmarksession  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _one_round(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure one round in a smoke test, and do not warm up."""
    if not IS_SMOKE:
        return
    pedantic = BenchmarkFixture.pedantic

    def once(self: BenchmarkFixture, target: Any, *arguments: Any, **options: Any) -> Any:
        return pedantic(self, target, *arguments, **options | {"rounds": 1, "warmup_rounds": 0, "iterations": 1})

    monkeypatch.setattr(BenchmarkFixture, "pedantic", once)
