"""Small data sets in the layout of NeMo-RL's with images: Parquet files with the types that their cards declare."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets

from tests.harness.vision_models import encoded, picture

PICTURES = [encoded(picture(48, 40, seed)) for seed in range(16)]
ASKED = "Please provide the bounding box coordinate of the region described by the following phrase: "

_FEATURES = {
    "solution": datasets.Features(
        {"image": datasets.Image(), "problem": datasets.Value("string"), "solution": datasets.Value("string")}
    ),
    "answer": datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    ),
    "bbox": datasets.Features(
        {
            "sent_ids": datasets.List(datasets.Value("int64")),
            "file_name": datasets.Value("string"),
            "split": datasets.Value("string"),
            "raw_anns": datasets.Value("string"),
            "image_path": datasets.Value("string"),
            "bbox": datasets.List(datasets.Value("float64")),
            "captions": datasets.List(datasets.Value("string")),
        }
    ),
}
"""Features of data sets, by a column that no other has."""


def clevr_rows(num: int, first: int = 0) -> list[dict[str, Any]]:
    """Return rows of CLEVR-CoGenT: how many items there are."""
    return [
        {
            "image": {"bytes": PICTURES[number], "path": f"{number}.png"},
            "problem": f"How many items are there? {number}",
            "solution": f"<answer> {number} </answer>",
        }
        for number in range(first, first + num)
    ]


def geometry_rows(num: int, first: int = 0) -> list[dict[str, Any]]:
    """Return rows of Geometry3K."""
    return [
        {
            "images": [{"bytes": PICTURES[number], "path": None}],
            "problem": f"<image>Find x of {number}.",
            "answer": rf"\sqrt{{{number}}}",
        }
        for number in range(first, first + num)
    ]


def refcoco_rows(num: int, first: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """Return rows of RefCOCO; their images are those of `write_coco`."""
    return [
        {
            "sent_ids": [number],
            "file_name": f"{number}.jpg",
            "split": split,
            "raw_anns": json.dumps({"area": 1.0}),
            "image_path": f"coco/train2014/{number}.jpg",
            "bbox": [8.0, 4.0, 40.0, 20.0 + number],
            "captions": [f"man {number}", f"the man on the left {number}"],
        }
        for number in range(first, first + num)
    ]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as a Parquet file with the features of their data set."""
    (kind,) = (kind for column, kind in _FEATURES.items() if column in rows[0])
    written = io.BytesIO()
    datasets.Dataset.from_list(rows, features=kind).to_parquet(written)
    return written.getvalue()


def files_of(train: list[dict[str, Any]], others: dict[str, list[dict[str, Any]]] | None = None) -> dict[str, bytes]:
    """Return the files of a repository by name: one a split."""
    splits = {"train": train, **(others or {})}
    return {f"data/{name}-00000-of-00001.parquet": parquet(rows) for name, rows in splits.items()}


def write_set(
    folder: str | Path, train: list[dict[str, Any]], others: dict[str, list[dict[str, Any]]] | None = None
) -> None:
    """Write a copy of a repository."""
    for name, data in files_of(train, others).items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_coco(folder: Path, num: int) -> None:
    """Write images of 80 × 40 pixels, as COCO's archive has them."""
    (folder / "train2014").mkdir(parents=True)
    for number in range(num):
        picture(80, 40, number).convert("RGB").save(folder / "train2014" / f"{number}.jpg", "JPEG")
