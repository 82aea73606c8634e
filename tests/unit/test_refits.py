"""``coordinator refits``: what it prints of a journal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tandem.common.errors import RunFolderError
from tandem.coordinator.cli import main
from tandem.observe.lines import print_refits
from tandem.observe.run_folder.journal import RefitRecord
from tandem.observe.run_folder.journal_writer import Journal

COPIED = RefitRecord(
    version=0,
    engines=("rollout-0", "rollout-1"),
    num_bytes={"trainer-0>rollout-0": 3_000_000, "trainer-0>rollout-1": 1_000_000},
    seconds={"transfer": 0.004, "verify": 0.02, "commit": 0.001, "copy": 0.002, "digest": 0.01},
    predicted_s=0.0015,
    bound_s=0.001,
    digest=0x00FF,
    quarantined={},
)
ALIASED = RefitRecord(
    version=1,
    engines=("rollout-2",),
    num_bytes={"trainer-0>rollout-2": 0},
    seconds={"transfer": 0.0005, "copy": 0.00005},
    predicted_s=0.0,
    bound_s=0.0,
    digest=0,
    quarantined={"rollout-2": "it does not hold version 1: model.norm.weight"},
)


def printed(*records: RefitRecord) -> list[str]:
    with Journal.create(Path("run"), b"{}", "grpo") as journal:
        for record in records:
            journal.record_refit(record)
    written = io.StringIO()
    print_refits(Path("run"), Console(file=written))
    return written.getvalue().splitlines()


def test_a_row_a_refit_and_a_line_a_link() -> None:
    header, first, second, *rest = printed(COPIED, ALIASED)
    assert header.split()[:3] == ["version", "engines", "MB"]
    assert first.split() == ["0", "2", "4.0", "2.00", "1.50", "0.50", "4.00", "20.00", "00000000000000ff"]
    # Nothing was copied, so there is no bound to have a share of; nothing was verified.
    assert second.split() == ["1", "1", "in", "place", "0.05", "0.00", "0.50", "not", "verified"]
    assert [line[2:13].strip() for line in rest[:9]] == re.split(r" {2,}", header.strip()), "a legend of every column"
    assert rest[-4:] == [
        "trainer-0>rollout-0  3.0 MB in all",
        "trainer-0>rollout-1  1.0 MB in all",
        "trainer-0>rollout-2  read in place",
        "version 1: rollout-2 was quarantined and refitted: it does not hold version 1: model.norm.weight",
    ]
    assert all(len(line) <= 100 for line in rest)


def test_a_run_without_refits_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFolderError, match="run holds a run without refits"):
        printed()
    assert main(["refits", "run"]) == 1
    assert main(["refits", "elsewhere"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("error: ") for line in errors)
