"""Pictures of prompts in a real Chromium: on the page, loaded once they are in view, and in the report."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.common.messages import ImageRef, SampleScored
from tandem.observe.report.report import write_report
from tandem.observe.run_folder.journal import StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.batch import SampleBatch, media_columns
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marker
from tandem.samples.sample_files import FOLDER, shard_path
from tandem.samples.sample_record import RecordedSample
from tandem.samples.sample_writing import table_of, write_shard
from tests.harness.runs.running import Command
from tests.harness.vision_models import encoded, picture
from tests.page.browser_harness import NEEDS_CHROMIUM, until, visit

pytestmark = NEEDS_CHROMIUM

NUM_SAMPLES = 40
PICTURES = [encoded(picture(480, 400, seed)) for seed in range(NUM_SAMPLES + 1)]
DIGESTS = [hashlib.sha256(data).hexdigest() for data in PICTURES]
DAMAGED = b"\x89PNG\r\n\x1a\n<script>window.ran='it'</script>"


def label(digest: str) -> str:
    return f"[image 480×400 {digest[:6]}]"


def a_sample(number: int, later: bool) -> RecordedSample:
    """Return a sample about a picture of its own; one with a later one, too."""
    import numpy as np

    digests = [DIGESTS[number], *([DIGESTS[-1]] if later else [])]
    refs = [ImageRef(digest=digest, width=480, height=400, grid=(1, 8, 8), num_tokens=16) for digest in digests]
    arrays = SampleBatch(
        lengths_S=np.array([6], dtype=np.int32),
        token_ids_T=np.array([1, 7, 8, 7, 7, 7], dtype=np.int32),
        loss_mask_T=np.array([0, 0, 1, 0, 0, 0], dtype=np.bool_),
        generation_logprobs_T=np.zeros(6, dtype=np.float32),
        versions_T=np.full(6, -1, dtype=np.int32),
        **media_columns([refs]),
    )
    text = f"{marker(DIGESTS[number], 480, 400)}How many?"
    scored = SampleScored(
        group=number,
        sample=0,
        prompt_length=2,
        response_length=1,
        num_tokens=6,
        oldest_version=0,
        newest_version=0,
        tokens_by_version=(1,),
        num_turns=1,
        finish_reason="stop",
        reward=1.0,
        correct=True,
        response=f"three{marker(DIGESTS[-1], 480, 400)}" if later else "two",
    )
    return RecordedSample(
        step=1,
        rollout="rollout-0",
        command_id=1,
        scored=scored,
        arrays=arrays,
        problem_id=f"problem-{number}",
        question=text,
        answer="3",
        prompt=f"<|im_start|>user {text}<|im_end|>",
        started_at=1e9,
        finished_at=1e9 + 1,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended, of a vision model; the last sample's picture is damaged."""
    folder = tmp_path_factory.mktemp("sees") / "run"
    config = msgspec.json.encode({"policy": {"model_name": "sees"}, "grpo": {"max_num_steps": 1}})
    with Journal.create(folder, config, "grpo") as journal:
        journal.commit_step(StepRecord(step=1, version=1, metrics={"reward": 0.5}, seconds={"total": 1.0}))
        samples = [a_sample(number, later=not number) for number in range(NUM_SAMPLES)]
        write_shard(shard_path(folder / FOLDER, 1, "rollout-0"), journal.run_id, table_of(samples))
    images = ImageFolder(folder / "images")
    for digest, data in zip(DIGESTS, PICTURES, strict=True):
        images.put(digest, data)
    images.path(DIGESTS[1]).write_bytes(DAMAGED)
    return folder


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with contextlib.chdir(run.parent), Command("coordinator", "view", "run") as view:
        yield view.wait_for(r"http://\S+")[0]


LOADED = "[...document.querySelectorAll('.samples img')].filter((each) => each.naturalWidth === 96).length"


def test_thumbnails_are_loaded_when_they_are_in_view(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#samples?step=1", may_say="404") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/images/" in request.url else None)
        page.wait_for_selector(".sample")
        until(page, f"{LOADED} >= 3")
        assert page.locator(".sample .question").first.text_content() == f"{label(DIGESTS[0])}How many?"
        until(page, f"document.querySelectorAll('.samples img').length === {NUM_SAMPLES - 1}")  # one is damaged
        page.locator(".sample").last.scroll_into_view_if_needed()
        until(page, "[...document.querySelectorAll('.samples img')].at(-1).naturalWidth === 96")
        assert page.evaluate("window.ran") is None


def test_a_sample_shows_its_picture_in_its_prompt_and_those_given_later(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#samples?at=1.0.0", may_say="404") as page:
        until(page, "document.querySelector('.prompt img')?.naturalWidth === 96")
        words = page.locator(".prompt").text_content()
        assert words == f"<|im_start|>user {label(DIGESTS[0])}How many?<|im_end|>"
        assert page.locator(".prompt img").get_attribute("alt") == label(DIGESTS[0])
        until(page, "document.querySelector('p.pictures img')?.naturalWidth === 96")


def test_a_picture_that_cannot_be_shown_leaves_its_label(url: str, chromium: Any) -> None:
    with visit(chromium, f"{url}#samples?at=1.1.0", may_say="404") as page:
        page.wait_for_selector(".prompt .picture")
        until(page, "!document.querySelector('.prompt img')")
        assert label(DIGESTS[1]) in page.locator(".prompt").text_content()
    with visit(chromium, f"{url}/api/runs/0/images/{DIGESTS[1]}", may_say="404") as page:
        assert "it was changed" in page.content()
        assert page.evaluate("window.ran") is None


def test_the_report_has_samples_with_their_pictures_and_asks_nobody(run: Path, chromium: Any) -> None:
    write_report([run], run.parent / "report", is_brief=True)
    address = (run.parent / "report" / "report.html").as_uri()
    asked: list[str] = []
    with visit(chromium, f"{address}#samples") as page:
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_selector(".sample")
        assert page.locator(".sample").count() == 12
        page.locator(".sample").first.click()
        until(page, "document.querySelector('.prompt img')?.naturalWidth === 96")
        until(page, "document.querySelector('p.pictures img')?.naturalWidth === 96")
        page.fill("[aria-label=Group]", "1")
        until(page, "document.querySelectorAll('.sample').length === 1")
        page.locator(".sample").click()
        until(page, f"document.querySelector('.prompt').textContent.includes({label(DIGESTS[1])!r})")
        assert page.locator(".prompt img").count() == 0
    assert not [each for each in asked if not each.startswith("data:")]
