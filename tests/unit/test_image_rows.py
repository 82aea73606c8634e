"""Rows with images become texts with markers, and their bytes are kept in the run's folder."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from data_harness import data_config

from tandem.common.errors import DataError
from tandem.samples.data_sets import load_conversations, load_problems
from tandem.samples.data_sets.pictured import PicturedRows
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marked_in, marker, shown
from tests.harness.vision_models import encoded, picture

PICTURES = [encoded(picture(48, 40, seed)) for seed in range(12)]
MARKERS = [marker(hashlib.sha256(data).hexdigest(), 48, 40) for data in PICTURES]


def rows_of(path: Path, rows: list[dict[str, Any]], **data: Any) -> tuple[list[Any], PicturedRows]:
    """Write rows, and return the questions that are read from them, in order, and the reader."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"dataset_name": "jsonl", "train_data_path": str(path), "num_validation": 2}
    config = data_config(**keys, input_key="question", output_key="answer", **data)
    reader = PicturedRows(config)
    problems = load_problems(config, reader)
    found = sorted([*problems.train, *problems.validation], key=lambda problem: int(problem.problem_id.split(":")[1]))
    return [problem.question for problem in found], reader


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_files_and_data_uris_stand_in_front_or_where_the_text_says(tmp_path: Path) -> None:
    for number, data in enumerate(PICTURES):
        (tmp_path / f"{number}.png").write_bytes(data)
    rows = [{"question": f"how many? {n}", "answer": "1", "image": f"{n}.png"} for n in range(4)]
    rows.append({"question": "is <image> like <image>?", "answer": "no", "images": ["4.png", uri(PICTURES[5])]})
    rows.append({"question": "no picture", "answer": "yes", "image": None})
    questions, reader = rows_of(tmp_path / "rows.jsonl", rows)
    assert questions[0] == f"{MARKERS[0]}how many? 0"
    assert questions[4] == f"is {MARKERS[4]} like {MARKERS[5]}?"
    assert questions[5] == "no picture"
    reader.images.keep(tmp_path / "kept")
    kept = ImageFolder(tmp_path / "kept")
    assert [kept.get(found.digest) for found in marked_in("".join(MARKERS[:6]))] == PICTURES[:6]


def test_paths_begin_at_the_folder_of_their_own_file(tmp_path: Path) -> None:
    for name, numbers in (("train", range(8)), ("held_out", range(8, 12))):
        folder = tmp_path / name
        folder.mkdir()
        for number in numbers:
            (folder / f"{number}.png").write_bytes(PICTURES[number])
        rows = [{"question": f"{n}?", "answer": str(n), "image": f"{n}.png"} for n in numbers]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {
        "train_data_path": str(tmp_path / "train/rows.jsonl"),
        "val_data_path": str(tmp_path / "held_out/rows.jsonl"),
    }
    config = data_config(dataset_name="jsonl", input_key="question", output_key="answer", **files)
    problems = load_problems(config, PicturedRows(config))
    assert {problem.question for problem in problems.train} == {f"{MARKERS[n]}{n}?" for n in range(8)}
    assert {problem.question for problem in problems.validation} == {f"{MARKERS[n]}{n}?" for n in range(8, 12)}


def test_images_of_the_hubs_data_sets_are_not_decoded(tmp_path: Path) -> None:
    kind = datasets.Features(
        {
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    rows = [{"problem": f"{n}?", "answer": str(n), "images": [{"bytes": PICTURES[n]}]} for n in range(12)]
    datasets.Dataset.from_list(rows, features=kind).to_parquet(tmp_path / "set" / "train.parquet")
    config = data_config(
        dataset_name=str(tmp_path / "set"), input_key="problem", output_key="answer", split="train", num_validation=2
    )
    problems = load_problems(config, PicturedRows(config))
    found = {problem.answer: problem for problem in (*problems.train, *problems.validation)}
    assert [found[str(n)].question for n in range(12)] == [f"{MARKERS[n]}{n}?" for n in range(12)]
    assert all("images" not in problem.metadata for problem in found.values())


def test_a_question_of_messages_has_images_as_parts_or_in_a_field(tmp_path: Path) -> None:
    system, last = {"role": "system", "content": "look"}, {"role": "user", "content": "how many?"}
    part = {"type": "image", "image": uri(PICTURES[0])}
    rows: list[dict[str, Any]] = [
        {"question": [system, {"role": "user", "content": [part, {"type": "text", "text": "how many?"}]}]},
        {"question": [system, last], "image": uri(PICTURES[1])},
        *({"question": f"{number}?"} for number in range(4)),
    ]
    questions, reader = rows_of(tmp_path / "rows.jsonl", [{**row, "answer": "1"} for row in rows])
    for number in (0, 1):
        assert questions[number] == [system, {"role": "user", "content": f"{MARKERS[number]}how many?"}]
    reader.images.keep(tmp_path / "kept")
    kept = ImageFolder(tmp_path / "kept")
    assert [kept.get(found.digest) for found in marked_in("".join(MARKERS[:2]))] == PICTURES[:2]


def test_conversations_have_images_as_parts(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": uri(PICTURES[n])}, {"type": "text", "text": f"{n}?"}],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
            ]
        }
        for n in range(12)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = data_config("sft", dataset_name="jsonl", train_data_path=str(path), num_validation=2, chat_key="messages")
    sets = load_conversations(config, PicturedRows(config))
    asked = {conversation.prompt[0]["content"] for conversation in (*sets.train, *sets.validation)}
    assert asked == {f"{MARKERS[n]}{n}?" for n in range(12)}
    assert sets.train[0].answers[0][0]["content"] == "three"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"image": "nowhere.png"}, "no such image file"),
        ({"image": "https://example.com/a.png"}, "nothing is fetched over a network"),
        ({"image": uri(b"GIF89a")}, "damaged"),
        (
            {"question": "<image> and <image>", "image": uri(PICTURES[0])},
            "has 1 images, and <image> 2 times in its text",
        ),
        ({"question": 5, "image": uri(PICTURES[0])}, "no text in 'question' (data.input_key) to show them with"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_row(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "rows.jsonl", [{"question": "?", "answer": "1", **row}])
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl:1")
    assert says in str(caught.value)


def test_large_images_are_refused_by_their_header(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.max_image_pixels"):
        rows_of(
            tmp_path / "rows.jsonl", [{"question": "?", "answer": "1", "image": uri(PICTURES[0])}], max_image_pixels=99
        )


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "answer": str(n), "image": {"bytes": PICTURES[n]}} for n in range(12)]
    kind = {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    datasets.Dataset.from_list(rows, features=datasets.Features(kind)).to_parquet(tmp_path / "set" / "train.parquet")
    config = data_config(
        dataset_name=str(tmp_path / "set"), input_key="problem", output_key="answer", split="train", num_validation=2
    )
    with pytest.raises(DataError, match=r"has an image in .image., but policy\.model_name is a text model"):
        load_problems(config)


def test_markers_are_shown_as_people_read_them() -> None:
    assert shown(f"{MARKERS[0]}how many?") == f"[image 48×40 {hashlib.sha256(PICTURES[0]).hexdigest()[:6]}]how many?"


def test_both_answers_of_a_pair_follow_the_same_images(tmp_path: Path) -> None:
    """Pairs have their question in a field of their own, or at the start of both conversations."""
    (tmp_path / "0.png").write_bytes(PICTURES[0])
    asked = {"role": "user", "content": "which <image> colour?"}
    said = {name: [asked, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    rows = [
        *({"prompt": f"{n}?", "chosen": "a", "rejected": "b", "image": "0.png"} for n in range(6)),
        said | {"image": "0.png"},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"dataset_name": "jsonl", "train_data_path": str(tmp_path / "pairs.jsonl"), "num_validation": 1}
    config = data_config("dpo", **keys, input_key="question", output_key="answer")
    found = load_conversations(config, PicturedRows(config))
    prompts = {each.name.rpartition(":")[2]: each.prompt[0]["content"] for each in (*found.train, *found.validation)}
    assert prompts["1"] == f"{MARKERS[0]}0?"
    assert prompts["7"] == f"which {MARKERS[0]} colour?"
