"""What all benchmarks share: rounds in which every way takes its turn, and a table of medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from pytest_benchmark.fixture import BenchmarkFixture

Seconds = dict[str, list[float]]


def seconds_of(way: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


class Turns:
    """Runs ways in turns, round after round; nobody always comes first."""

    def __init__(self, ways: Mapping[str, Callable[[], float]]) -> None:
        """Take ways by name; each returns its own seconds, so that it can prepare and check beside the clock."""
        self._ways = list(ways.items())
        self.seconds: Seconds = {name: [] for name in ways}

    def round(self) -> None:
        """Let every way have a turn."""
        self._ways.append(self._ways.pop(0))
        for name, way in self._ways:
            self.seconds[name].append(way())

    def last(self, num_rounds: int) -> Seconds:
        """Return the seconds of the last rounds: those before them warmed up."""
        return {name: times[-num_rounds:] for name, times in self.seconds.items()}


def keep_ratios(
    benchmark: BenchmarkFixture, what: str, ratios: Mapping[str, float], *, aim: float | None = None
) -> None:
    """Keep ratios by way for the table that is printed at the end: `what` says of what they are."""
    kept = {"ratios": dict(ratios)} if aim is None else {"ratios": dict(ratios), "aim": aim}
    benchmark.extra_info.setdefault("table", {})[what] = kept


def report(
    benchmark: BenchmarkFixture,
    seconds: Mapping[str, Sequence[float]],
    *,
    title: str,
    num_bytes: int,
    against: str,
    **facts: object,
) -> dict[str, float]:
    """Print and keep what was measured; return how many times as fast as `against` each way was, by medians."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    best = {way: min(times) for way, times in seconds.items()}
    rates = {way: num_bytes / median / 1e9 for way, median in medians.items()}
    shares = {way: medians[against] / median for way, median in medians.items()}
    benchmark.extra_info.update(
        {
            "num_bytes": num_bytes,
            **facts,
            "seconds": {way: [round(s, 6) for s in times] for way, times in seconds.items()},
            "median seconds": medians,
            "median GB/s": rates,
            f"times as fast as {against}, medians": shares,
            f"times as fast as {against}, best rounds": {way: best[against] / s for way, s in best.items()},
        }
    )
    keep_ratios(benchmark, f"rate, share of {against}", {way: share for way, share in shares.items() if way != against})
    print(f"\n{title}")
    print(f"{'way':34}{'median ms':>11}{'best ms':>11}{'GB/s':>8}{'share':>8}   share: of the rate of {against}")
    for way, median in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{way:34}{1e3 * median:11.2f}{1e3 * best[way]:11.2f}{rates[way]:8.2f}{shares[way]:8.3f}")
    return shares
