"""docs/evidence.md has the numbers of benchmarks/results, and other pages have no others."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest

from tests.harness.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("evidence")


@pytest.fixture(scope="module")
def page(script: ModuleType) -> str:
    text: str = script.PAGE.read_text()
    return text


def test_its_tables_are_those_of_the_results(script: ModuleType, page: str) -> None:
    assert script.with_tables(page) == page, "run: python scripts/evidence.py --write"
    assert sorted(script.names_of_tables(page)) == sorted(script.TABLES)


def test_the_largest_claims_are_measured(script: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    seconds = script.figures("refit_cuda", "test_refit_on_one_gpu")["median seconds"]
    assert f"**{1e3 * seconds['tandem, cuda_ipc, not verified']:.1f} ms**" in readme
    assert f"the usual way takes {1e3 * seconds['buckets, loaded by name']:.1f} ms" in readme
    assert f"**{script.figures('async')['times as fast']:.2f} ×**" in readme


def test_harms_are_those_of_the_suites(page: str) -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| .* \| [\d, to]+ \|$", page, re.MULTILINE)
    num_harms, num_runs = (sum(int(row[column]) for row in rows) for column in range(2))
    assert (
        f"| **{num_harms}** | [kills and stops](docs/evidence.md#kills-and-stops) of processes in {num_runs} runs: "
        in (ROOT / "README.md").read_text()
    )
    kinds = re.findall(r"^\| (?!while)([a-z ,]+) \| (\d+) \| \d+ \| \d+ \| 0 \|", page, re.MULTILINE)
    phases = re.findall(r"^\| while [a-z ]+ \| (\d+) \|", page, re.MULTILINE)
    (said,) = re.findall(r"With seed 202, (\d+) harms", page)
    assert sum(int(times) for _, times in kinds) == sum(map(int, phases)) == int(said)


def test_the_readme_counts_the_types_of_models_that_were_measured() -> None:
    table = (ROOT / "docs" / "models.md").read_text()
    (counts,) = re.findall(
        r"^Transformers ([\d.]+)\.\d+: (\d+) types\. .*trains (\d+),.*embedded engine (\d+),", table, re.M
    )
    release, num_types, num_trained, num_generating = counts
    assert (
        f"of the {num_types} types of text models in Transformers {release}, {num_trained} train and {num_generating} "
        "generate without vLLM" in (ROOT / "README.md").read_text()
    )


def test_pages_have_the_numbers_of_the_results(script: ModuleType) -> None:
    figures = script.figures
    saving = figures("saving")["median seconds"]
    check = figures("checkpoint_check")["median seconds of processors"]
    rollouts = figures("async_rollouts")["median seconds"]
    curve = figures("curve")
    tinker = [
        figures("tinker")[call]["all else, share of the model's, median"] for call in ("forward_backward", "sample")
    ]
    times = f"{figures('async')['times as fast']:.2f} times"
    phrases = {
        "asynchronous.md": [times],
        "performance.md": [times],
        "training.md": [
            f"{figures('packing')['speed-up over padded']['packed']:.2f} times as fast",
            f"for [{saving['written aside']:.2f} s]",
            f"for {saving['written at once']:.2f} s",
            f"adds [{check['checked'] / check['believed'] - 1:.0%}".replace("%", " % to the time]"),
        ],
        "environments.md": [f"{rollouts['async_engine']:.1f} s instead of {rollouts['waits']:.1f}"],
        "security.md": [f"{curve['encrypted: GB/s']:.1f} GB/s"],
        "tinker.md": [f"{share:.1%}".replace("%", " %") for share in tinker],
        "diagnose.md": [figures("diagnose")["right"] + " broken runs"],
        "evidence.md": [
            f"{median(figures('tinker_loop')['tokens a second'][loop]):.0f}" for loop in ("rl_loop", "coordinator up")
        ],
    }
    for name, expected in phrases.items():
        text = " ".join(Path(ROOT / "docs" / name).read_text().split())
        assert [phrase for phrase in expected if phrase not in text] == [], name
