"""A real headless Chromium, and visits of the page that note all that should not happen."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tandem.observe.run_folder.journal_writer import Journal
from tests.harness.runs.running import Command

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: Debian's package is called chromium")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync"),
)
LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 380, "height": 760}
PATIENCE_S = 120.0


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium, with a profile of its own that is deleted at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield chromium
        finally:
            chromium.close()


@contextlib.contextmanager
def visit(chromium: Any, url: str, *, may_say: str = "\0", loses: str = "", **options: Any) -> Iterator[Any]:
    """Open a page; nothing may go wrong there but what is expected, and nothing be asked of another host.

    Requests that `loses` matches are never answered, until that is undone.
    """
    context = chromium.new_context(**{"viewport": LAPTOP, "color_scheme": "light", **options})
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = urlsplit(url).netloc
    page.on("request", lambda asked: None if urlsplit(asked.url).netloc in (own, "") else wrong.append(asked.url))
    if loses:
        page.route(loses, lambda route: route.abort())
    try:
        page.goto(url)
        yield page
        assert not (unexpected := [text for text in wrong if may_say not in text]), unexpected
    finally:
        context.close()


@contextlib.contextmanager
def viewing(folder: Path, *runs: str) -> Iterator[str]:
    """Serve the page of runs in a folder; give its address."""
    with contextlib.chdir(folder), Command("coordinator", "view", *runs) as view:
        yield view.wait_for(r"http://\S+")[0]
        view.signal(signal.SIGINT)
        view.wait()


def column(page: Any, metric: str, share: float) -> list[tuple[int, int, int, int]]:
    """Return the pixels of a chart from top to bottom: red, green, blue, opacity; `share` says how far to the right."""
    found = page.evaluate(
        """([metric, share]) => {
            const card = document.querySelector(`[data-metric=${metric}]`);
            const canvas = card.querySelector("canvas");
            const [box, inner] = [canvas, card.querySelector(".u-over")].map((each) => each.getBoundingClientRect());
            const pixels = canvas.width / box.width;
            const x = Math.round((inner.left - box.left + share * inner.width) * pixels);
            const [top, height] = [(inner.top - box.top) * pixels, inner.height * pixels].map(Math.round);
            const edge = 2; // a line at the bottom is half below
            return [...canvas.getContext("2d").getImageData(x, top, 1, height + edge).data];
        }""",
        [metric, share],
    )
    return [(found[i], found[i + 1], found[i + 2], found[i + 3]) for i in range(0, len(found), 4)]


def make_run(folder: Path, curves: Mapping[str, Sequence[float]], algorithm: str = "grpo") -> None:
    """Make a run that ended, with these metrics from step 1 on; in one transaction, which a run has for each step."""
    config = json.dumps({"policy": {"model_name": "model"}, algorithm: {"max_num_steps": 9}}).encode()
    with Journal.create(folder, config, algorithm) as journal:
        connection = journal._connection
        connection.execute("BEGIN")
        for step, values in enumerate(zip(*curves.values(), strict=True), 1):
            row = (step, step, 1e9 + step, step)
            connection.execute(
                "INSERT INTO steps (id, step, committed_at, version, checkpoint) VALUES (?,?,?,?,'')", row
            )
            metrics = [(step, name, value) for name, value in zip(curves, values, strict=True)]
            connection.executemany("INSERT INTO metrics VALUES (?, ?, ?)", metrics)
        connection.execute("COMMIT")


def until(page: Any, expression: str) -> None:
    """Wait until something holds in the page, which forbids what Playwright's own way to wait for it takes."""
    deadline = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_S:g} s for {expression}")
        page.wait_for_timeout(50)
