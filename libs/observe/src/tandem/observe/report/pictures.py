"""Samples of a run of a vision model, with thumbnails of their pictures, for the report's file."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import msgspec

from tandem.common.errors import DataError, SamplesError
from tandem.observe.page.reader import RunReader
from tandem.observe.page.samples import PURPOSES, read_sample
from tandem.observe.page.thumbnails import ImageThumbnails
from tandem.samples.images.markers import marked_in

_NUM_SAMPLES = 12
"""Most samples of the newest step, and of the newest validation."""


def samples_with_pictures(reader: RunReader) -> dict[str, Any]:
    """Return the first samples of the newest step that is recorded, and of the newest validation, with thumbnails.

    Nothing for a run without a rollout log.
    """
    samples: dict[str, list[dict[str, Any]]] = {}
    for purpose in PURPOSES:
        with contextlib.suppress(SamplesError):  # the log is off, or was damaged: the report has the rest
            samples[purpose] = _newest(reader, purpose)
    if not samples:
        return {}
    with contextlib.closing(ImageThumbnails()) as thumbnails:
        pictures = {}
        for digest in _digests([row for rows in samples.values() for row in rows]):
            with contextlib.suppress(DataError):
                png = thumbnails.of(reader.folder, digest)
                pictures[digest] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return {"samples": samples, "pictures": pictures}


def _newest(reader: RunReader, purpose: Any) -> list[dict[str, Any]]:
    from tandem.observe.samples import SampleQuery, search  # Arrow takes a while to be imported

    selection = search(
        reader.folder, SampleQuery(purpose=purpose, limit=_NUM_SAMPLES, with_tokens=False), reader.run_id()
    )
    models, run_id = reader.models(), reader.run_id()
    places = [(selection.step, sample.scored.group, sample.scored.sample) for sample in selection.samples]
    rows = [read_sample(reader.folder, place, purpose, run_id, models) for place in places]
    return [row | {"tokens": msgspec.to_builtins(row["tokens"]), "purpose": purpose} for row in rows]


def _digests(rows: list[dict[str, Any]]) -> list[str]:
    """Return the images of samples, each once."""
    prompts = (image.digest for row in rows for image in marked_in(row["prompt"]))
    later = (digest for row in rows for digest in row.get("later_images", ()))
    return [*dict.fromkeys([*prompts, *later])]
