"""Thumbnails of what a model was shown: made apart, within limits, and served so that nothing in them runs."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_harness import a_sample, client, get, make_run, record
from PIL import Image

from tandem.common.errors import DataError
from tandem.common.process_lifetime import is_stopped
from tandem.observe.page import worker as module
from tandem.observe.page.thumbnails import RunThumbnails
from tandem.observe.report.report import frozen_page
from tandem.observe.report.side_by_side import load_runs
from tandem.samples.batch import media_columns
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marker
from tests.harness import leaks
from tests.harness.vision_models import encoded, picture

RUN = Path("run")


@pytest.fixture
def thumbnails() -> Iterator[RunThumbnails]:
    made = RunThumbnails()
    yield made
    made.close()


def keep(data: bytes) -> str:
    """Keep an image in the run's folder; return its digest."""
    digest = hashlib.sha256(data).hexdigest()
    ImageFolder(RUN / "images").put(digest, data)
    return digest


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_a_thumbnail_is_a_png_of_at_most_96_pixels(thumbnails: RunThumbnails) -> None:
    for kind, size, expected in (("PNG", (480, 400), (96, 80)), ("JPEG", (48, 40), (48, 40)), ("WEBP", (9, 900), None)):
        made = Image.open(io.BytesIO(thumbnails.of(RUN, keep(encoded(picture(*size), kind)))))
        assert made.format == "PNG"
        assert made.size == (expected or (1, 96))
    small = picture(48, 40, 2)
    assert (pixels(thumbnails.of(RUN, keep(encoded(small)))) == np.asarray(small)).all()


def test_what_is_no_picture_of_the_run_is_refused_and_the_next_one_is_shown(thumbnails: RunThumbnails) -> None:
    whole = encoded(picture())
    page_of_text = b"<svg xmlns='http://www.w3.org/2000/svg'><script>window.ran='it'</script></svg>"
    for data in (whole[:100], b"", page_of_text, encoded(Image.new("L", (1, 8_000)).resize((8_000, 8_000)))):
        digest = keep(data)
        for _ in range(2):  # the second time it is known
            with pytest.raises(DataError, match=f"image {digest[:12]} cannot be shown"):
                thumbnails.of(RUN, digest)
    for name in ("../journal.sqlite", "0" * 63, "0" * 64, "A" * 64, "⟦"):
        with pytest.raises(DataError, match=r"SHA-256|has no image"):
            thumbnails.of(RUN, name)
    changed = keep(encoded(picture(48, 40, 1)))
    ImageFolder(RUN / "images").path(changed).write_bytes(whole)
    with pytest.raises(DataError, match="it was changed"):
        thumbnails.of(RUN, changed)
    assert thumbnails.of(RUN, keep(whole))


def test_a_picture_is_asked_of_another_process_where_one_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RunThumbnails(deadline_s=60.0)
    made.of(RUN, keep(encoded(picture())))
    worker = made._worker._process
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30.0
    while not is_stopped(worker.pid):  # a busy machine takes a while
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def has_time(pid: int) -> bool:
        made._deadline_s = 60.0
        return is_stopped(pid)

    made._deadline_s = 0.2
    monkeypatch.setattr(module, "is_stopped", has_time)
    assert made.of(RUN, keep(encoded(picture(60, 50))))
    assert worker.poll() == -signal.SIGKILL
    made.close()


def test_a_picture_that_hangs_is_given_up_and_its_process_ended(thumbnails: RunThumbnails) -> None:
    decoder = thumbnails._worker._arguments
    thumbnails._worker._arguments = ["timeit", "-n", "1", "-r", "1", "import time; time.sleep(600)"]  # it never answers
    thumbnails._deadline_s = 0.2
    before, began = leaks.pids(), time.monotonic()
    with pytest.raises(DataError, match="takes too long"):
        thumbnails.of(RUN, keep(encoded(picture(50, 50))))
    assert time.monotonic() - began < 30.0
    assert not leaks.new_processes(before), "its process has ended"
    thumbnails._worker._arguments, thumbnails._deadline_s = decoder, 60.0
    assert thumbnails.of(RUN, keep(encoded(picture(51, 50)))), "by another process"


def test_a_process_that_has_ended_is_replaced(thumbnails: RunThumbnails) -> None:
    thumbnails.of(RUN, keep(encoded(picture())))
    worker = thumbnails._worker._process
    assert worker is not None
    worker.kill()
    assert thumbnails.of(RUN, keep(encoded(picture(50, 50))))
    assert thumbnails._worker._process is not worker


def test_the_page_serves_thumbnails_so_that_nothing_in_them_runs() -> None:
    with make_run("run"):
        digest = keep(encoded(picture(480, 400)))
        page = client("run")
        path = f"/api/runs/0/images/{digest}"
        answer = page.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert Image.open(io.BytesIO(answer.content)).size == (96, 80)
        assert page.get(path, headers={"host": "evil.example"}).status_code == 403
        assert page.get(path, headers={"origin": "http://evil.example"}).status_code == 403
        assert page.post(path).status_code == 405
        for wrong in (f"/api/runs/1/images/{digest}", f"/api/runs/0/images/{'0' * 64}", "/api/runs/0/images/x"):
            refused = page.get(wrong)
            assert refused.status_code == 404
            assert "\n" not in refused.json()["error"]
        assert client("run", token="secret").get(path).status_code == 401
        page.app.state.thumbnails.close()  # type: ignore[attr-defined]


def test_a_sample_names_the_pictures_after_its_prompt_and_the_report_has_them_all() -> None:
    digests = [keep(encoded(picture(48, 40, seed))) for seed in range(2)]
    refs = [reference(digest) for digest in digests]
    sample = a_sample(3, 0, 0, prompt=f"user:{marker(digests[0], 48, 40)}How many?")
    arrays = sample.arrays.replace(**media_columns([refs]))
    with make_run("run"):
        record("run", [type(sample)(**{**fields(sample), "arrays": arrays})])
        assert get(client("run"), "/api/runs/0/samples/3/0/0")["later_images"] == [digests[1]]
    html = frozen_page(load_runs([RUN]))
    assert html.count("data:image/png;base64,") == 2
    assert all(f'"{digest}":"data:image/png' in html for digest in digests)


def test_the_report_of_a_text_model_has_no_samples() -> None:
    with make_run("run"):
        record("run", [a_sample(3, 0, 0)])
    assert '"samples":' not in frozen_page(load_runs([RUN]))


def reference(digest: str) -> Any:
    from tandem.common.messages import ImageRef

    return ImageRef(digest=digest, width=48, height=40, grid=(1, 8, 8), num_tokens=16)


def fields(sample: Any) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in sample.__struct_fields__}


def test_the_page_and_a_chat_import_nothing_that_reads_pictures() -> None:
    code = (
        "import sys, tandem.observe.page.server, tandem.observe.samples_text, tandem.observe.report.report, "
        "tandem.serving.conversation, tandem.coordinator.commands.chat, tandem.coordinator.commands.samples\n"
        "print([name for name in ('torch', 'PIL', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.strip() == "[]"
