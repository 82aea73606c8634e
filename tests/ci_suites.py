"""The suites that CI runs today after `tox`: ``python -m tests.ci_suites`` prints them in their order.

Each day a third of the types of models comes first (`models`). A third of the other suites has its turn each day
(`TURNS`), so that each runs at least every third. The others follow if their test files import what has changed since
the last tag, or in the last 40 commits where that is less. The largest share of files that import it themselves comes
first, and last come those that reach it by way of other modules or start services. So where time allows, all that a
change touches run whole, and where it does not, the turns say what does.
Without a history (no git, a clone of few commits) all count as changed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tests import suites
from tests.harness.scripts import ROOT, load_script

DAILY = ("models",)
"""What runs each day, a third of it (`TANDEM_TYPES_DAY`)."""
TURNS = (
    ("runs", "weights", "vllm"),
    ("numbers", "benchmarks", "gpu-simulated"),
    ("survival", "tinker", "families"),
)
"""What has its turn on one day of three: about as long as what has it on another."""
SUITES = (*DAILY, *(suite for turn in TURNS for suite in turn))
NUM_COMMITS = 40
_SECONDS_PER_DAY = 86400


class Shares(NamedTuple):
    """Shares of a suite's test files."""

    direct: float
    """Those that import what has changed, themselves or through helpers, or name it."""
    indirect: float
    """Those with the ones that import it by way of other modules, or start services while one of these has changed."""


def order_suites(day: int, shares: Mapping[str, Shares]) -> list[str]:
    """Return the suites of a day: the daily ones, its turn's, then what a change touches, the largest share first."""
    turn = TURNS[day % len(TURNS)]
    first = day // len(TURNS) % len(turn)
    changed = sorted((suite for suite in SUITES if shares[suite].indirect), key=shares.__getitem__, reverse=True)
    return [*DAILY, *turn[first:], *turn[:first], *(suite for suite in changed if suite not in (*DAILY, *turn))]


def find_base(root: Path = ROOT) -> str | None:
    """Return the last tag's commit before this one, or that of 40 commits ago if it is later; None without either.

    Raises:
        OSError, subprocess.CalledProcessError: there is no git, or no history.
    """
    commits = _call_git(root, "rev-list", "--first-parent", f"--max-count={NUM_COMMITS + 1}", "HEAD")
    lines = _call_git(root, "for-each-ref", "--format=%(objectname) %(*objectname)", "refs/tags")
    tagged = {commit for line in lines for commit in line.split()}
    return next(
        (commit for place, commit in enumerate(commits) if place == NUM_COMMITS or (place and commit in tagged)), None
    )


def list_changes(root: Path = ROOT) -> set[str] | None:
    """Return the files that have changed since the base, or None where history does not say."""
    try:
        base = find_base(root)
        changes: set[str] | None = base and _load_graph().differing(base, root)
    except (OSError, subprocess.CalledProcessError):
        return None
    return changes


def _call_git(root: Path, *words: str) -> list[str]:
    """Return the lines that git prints."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def count_shares(changed: Iterable[str]) -> dict[str, Shares]:
    """Return what shares of each suite's test files these changed files touch."""
    files = {name: suite for name in _load_graph().ci_files() if (suite := _suite_of(name)) in SUITES}
    totals = Counter(files.values())
    direct, indirect = (
        Counter(files[name] for name in _load_graph().importers(changed, files, is_direct=is_direct))
        for is_direct in (True, False)
    )
    return {suite: Shares(direct[suite] / totals[suite], indirect[suite] / totals[suite]) for suite in SUITES}


@cache
def _load_graph() -> ModuleType:
    """Return the script that knows which test file imports what; it reads each file once."""
    return load_script("changed_tests")


def _suite_of(file: str) -> str:
    """Return the suite of a test file or benchmark, by its path from the root."""
    return "benchmarks" if file.startswith("benchmarks/") else suites.suite_of(file)


def main() -> None:
    """Print the suites, and to standard error why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = int(time.time() // _SECONDS_PER_DAY)
    parser.add_argument("--day", type=int, default=today, metavar="N", help="days since 1970 (default: today)")
    day = parser.parse_args().day
    changes = list_changes()
    shares = dict.fromkeys(SUITES, Shares(1.0, 1.0)) if changes is None else count_shares(changes)
    ordered = order_suites(day, shares)
    print("\n".join(ordered))
    files = "unknown, so all count" if changes is None else f"{len(changes)} files"
    percents = ", ".join(f"{suite} {100 * share.direct:.0f} %" for suite, share in shares.items())
    later = ", ".join(suite for suite in SUITES if suite not in ordered)
    print(
        f"changed: {files}; test files that import it themselves: {percents}; on another day: {later or 'none'}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
