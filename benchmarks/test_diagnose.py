"""How often does `coordinator diagnose` name the cause first? Of real runs of seconds, each broken in one way.

The catalogue is in `broken_runs`. At full size 90% of the broken runs must be named right, and nothing may be found in
a healthy one; in a smoke test two broken ones run, and must be.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.broken_runs import BROKEN, HEALTHY, Case, prepare, prepare_others, run
from benchmarks.measure import keep_ratios
from benchmarks.smoke import IS_SMOKE, sized
from tandem.observe.diagnosis import diagnose

LEAST_RIGHT = 0.9
Row = tuple[Case, str, bool]


def named(cases: tuple[Case, ...]) -> list[Row]:
    """Run each case, and say what is named first, and whether that is right."""
    rows = []
    for number, case in enumerate(cases):
        findings = diagnose(run(case, f"case-{number}")).findings
        first = findings[0].name if findings else ""
        rows.append((case, first, first in case.expected if case.expected else not findings))
        print(f"{case.name:50} | {' or '.join(case.expected) or '-':45} | {first or '-':28} | {rows[-1][2]}")
    return rows


@pytest.mark.long(minutes=9)
@pytest.mark.timeout(7200)  # 35 runs, of 10 to 60 seconds each
def test_the_cause_comes_first(benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare()
    if not IS_SMOKE:
        prepare_others()
    cases = (*BROKEN[: sized(len(BROKEN), 2)], *HEALTHY[: sized(len(HEALTHY), 0)])
    rows: list[Row] = []
    print(f"\n{'case':50} | {'expected':45} | {'first':28} | right")
    benchmark.pedantic(lambda: rows.extend(named(cases)), rounds=1)
    broken = [right for case, _, right in rows if case.expected]
    benchmark.extra_info["right"] = f"{sum(broken)} of {len(broken)}"
    benchmark.extra_info["found in healthy runs"] = [first for case, first, _ in rows if not case.expected and first]
    benchmark.extra_info["first named"] = {case.name: first or "nothing" for case, first, _ in rows}
    keep_ratios(benchmark, "causes named first", {"of broken runs": sum(broken) / len(broken)}, aim=LEAST_RIGHT)
    print(f"{sum(broken)} of {len(broken)} causes named first")
    assert sum(broken) >= LEAST_RIGHT * len(broken)
    assert [case.name for case, _, right in rows if not case.expected and not right] == []
