"""The rows of a run that generates no samples, in a real Chromium, as ``coordinator samples`` prints them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import coordinator, pairs_of_sums, write_config, write_rows
from tests.page.browser_harness import NEEDS_CHROMIUM, make_run, until, viewing, visit

pytestmark = NEEDS_CHROMIUM

NUM_STEPS = 3
DPO = {
    "algorithm": "dpo",
    "dpo": {"max_num_steps": NUM_STEPS, "val_period": 0, "val_at_start": False},
    "policy": {"train_micro_batch_size": 4},
    "data": {"train_data_path": "pairs.jsonl", "val_data_path": "held_out.jsonl", "num_validation": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of DPO, and of one that generates samples."""
    folder = tmp_path_factory.mktemp("rows")
    with contextlib.chdir(folder):
        pairs = pairs_of_sums()
        write_rows("pairs", pairs[8:])
        write_rows("held_out", pairs[:8])
        result = coordinator("up", write_config(DPO))
        assert result.returncode == 0, result.stdout + result.stderr
    make_run(folder / "rollouts", {"reward": [1.0]})
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Their page."""
    with viewing(folder, "run", "rollouts") as url:
        yield url


def rows_on(page: Any) -> list[str]:
    """Return the rows of the page, with what is learned in brackets."""
    rows = []
    for row in page.locator(".row").all():
        tokens = row.locator(".token").evaluate_all(
            "(tokens) => tokens.map((token) => [token.classList.contains('learned'), token.textContent])"
        )
        parts = [
            "".join(text for _, text in part) if not is_learned else f"⟦{''.join(text for _, text in part)}⟧"
            for is_learned, part in itertools.groupby(tokens, lambda token: token[0])
        ]
        rows.append("".join(parts))
    return rows


def rows_of(step: int, count: int) -> list[str]:
    """Return the rows that the command prints."""
    result = coordinator("samples", "run", "--step", str(step), "--limit", str(count))
    assert result.returncode == 0, result.stderr
    return [line.removeprefix("  ") for line in result.stdout.splitlines() if line.startswith("  ")]


def test_the_rows_of_a_step_are_those_that_the_command_shows(folder: Path, url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#samples", may_say="404") as page:
        page.wait_for_selector(".row")
        newest = rows_on(page)
        assert page.locator(".row .tag").all_inner_texts()[:2] == ["chosen", "rejected"]
        facts = page.locator(".row").first.locator("dd").all_inner_texts()
        assert facts == ["with BOS, '<bos>' (1)", "'<eos>' (2)"]
        token = page.locator(".row").first.locator(".token.learned").last
        token.hover()
        page.wait_for_selector("#tip:has-text('learned')")
        assert '"<eos>"' in page.locator("#tip").inner_text()
        page.click("[aria-label='Step before']")
        until(page, f"document.querySelector('[aria-label=\"Step number\"]').value === '{NUM_STEPS - 1}'")
        before = rows_on(page)
        link = page.evaluate("location.href")
        page.click("text=More")
        until(page, f"document.querySelectorAll('.row').length > {len(before)}")
        page.fill("[aria-label='Step number']", "99")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"text=has trained no step 99, only those up to {NUM_STEPS}")
    with visit(chromium, link) as page:
        page.wait_for_selector(".row")
        assert rows_on(page) == before, "a link opens them again"
    with contextlib.chdir(folder):
        assert newest == rows_of(NUM_STEPS, 8)
        assert before == rows_of(NUM_STEPS - 1, 8)
    assert newest != before


def test_the_panel_says_that_it_loads(url: str, chromium: Any) -> None:
    for run, what in ((0, "rows"), (1, "samples")):
        lost = f"**/api/runs/{run}/{what}*"
        with visit(chromium, f"{url}#samples?run={run}", may_say="ERR_FAILED", loses=lost) as page:
            page.wait_for_selector(f"text=Loading the {what}…")
