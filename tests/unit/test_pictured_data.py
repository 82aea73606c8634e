"""NeMo-RL's data sets with images, in the layout of their repositories: questions, answers and splits."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_harness import data_config
from PIL import Image

from tandem.common.errors import ConfigError, DataError
from tandem.config import Config, build_config
from tandem.samples.data_sets import load_conversations, load_problems
from tandem.samples.data_sets.pictured import PicturedRows
from tandem.samples.data_sets.prompts import PromptWriter
from tandem.samples.data_sets.sources import hub
from tandem.samples.images.rows import StoredMedia
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marked_in, marker
from tests.harness.pictured_data import ASKED, PICTURES, clevr_rows, geometry_rows, refcoco_rows, write_coco, write_set
from tests.harness.vision_models import write_vision_files


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configured(algorithm: str = "grpo", **data: Any) -> Config:
    env = {name: {"reward_functions": [{"name": "format", "weight": 1}]} for name in ("clevr-cogent", "geometry3k")}
    tree: dict[str, Any] = {
        algorithm: {},
        "policy": {"model_name": str(write_vision_files("qwen2_5_vl", Path("model"))), "train_global_batch_size": 8},
        "data": data,
    }
    return build_config(tree | ({"env": env} if algorithm == "grpo" else {}))


def mark(data: bytes) -> str:
    return marker(hashlib.sha256(data).hexdigest(), *Image.open(io.BytesIO(data)).size)


def test_clevr_has_its_answer_in_tags() -> None:
    write_set("clevr", clevr_rows(12))
    sets = {"train": {"dataset_name": "clevr-cogent", "data_path": "clevr"}, "split_validation_size": 2}
    config = configured(**sets, default={"env_name": "clevr-cogent"})
    reader = PicturedRows(config)
    problems = load_problems(config, reader)
    found = sorted([*problems.train, *problems.validation], key=lambda each: int(each.problem_id.split(":")[-1]))
    assert [problem.question for problem in found] == [
        f"{mark(PICTURES[number])}How many items are there? {number}" for number in range(12)
    ]
    assert [problem.answer for problem in found] == [str(number) for number in range(12)]
    assert all(not problem.metadata for problem in found)
    reader.images.keep(Path("kept"))
    assert ImageFolder(Path("kept")).get(marked_in(found[3].question)[0].digest) == PICTURES[3]


def test_geometry_shows_the_first_image_in_front() -> None:
    write_set("geometry", geometry_rows(8), {"test": geometry_rows(4, first=8)})
    sets = {
        "train": {"dataset_name": "geometry3k", "data_path": "geometry"},
        "validation": {"dataset_name": "geometry3k", "data_path": "geometry", "split": "test"},
    }
    problems = load_problems(config := configured(**sets, default={"env_name": "geometry3k"}), PicturedRows(config))
    assert [problem.question for problem in problems.train] == [
        f"{mark(PICTURES[number])}Find x of {number}." for number in range(8)
    ]
    assert [problem.answer for problem in problems.validation] == [rf"\sqrt{{{number}}}" for number in range(8, 12)]


def test_refcoco_asks_for_a_box_in_a_scaled_image() -> None:
    write_set("refcoco", refcoco_rows(8), {"validation": refcoco_rows(4, first=8, split="val")})
    write_coco(Path("coco_images"), 12)
    names = {"dataset_name": "refcoco", "data_path": "refcoco"}
    config = configured(train=names, validation={**names, "split": "validation"}, default={"env_name": "clevr-cogent"})
    reader = PicturedRows(config)
    problems = load_problems(config, reader)
    for number, problem in enumerate([*problems.train, *problems.validation]):
        (image,) = marked_in(problem.question)
        assert (image.width, image.height) == (256, 256)
        text = problem.question.rpartition("⟧")[2]
        assert text.startswith(ASKED)
        phrases = refcoco_rows(1, first=number)[0]["captions"]
        assert text.removeprefix(ASKED) in phrases
        if number >= 8:
            assert text.removeprefix(ASKED) == phrases[1], "the longest"
        # The images are 80 × 40 pixels, the box (8, 4) to (40, 20 + number).
        assert problem.answer == f"[100, 100, 500, {round((20 + number) / 40 * 1000)}]"
    reader.images.keep(Path("kept"))
    with Image.open("coco_images/train2014/3.jpg") as original:
        expected = original.convert("RGB").resize((256, 256))
    with Image.open("coco_images/train2014/0.jpg") as first:
        assert first.size == (80, 40)
    kept = ImageFolder(Path("kept")).get(marked_in(problems.train[3].question)[0].digest)
    assert Image.open(io.BytesIO(kept)).tobytes() == expected.tobytes()
    again = load_problems(config, PicturedRows(config))
    assert [problem.question for problem in again.train] == [problem.question for problem in problems.train]


def test_a_folder_of_coco_that_is_not_there_is_named() -> None:
    write_set("refcoco", refcoco_rows(8))
    sets = {"dataset_name": "refcoco", "data_path": "refcoco", "download_dir": "elsewhere"}
    config = configured(train=sets, split_validation_size=2, default={"env_name": "clevr-cogent"})
    with pytest.raises(DataError) as caught:
        load_problems(config, PicturedRows(config))
    assert "cannot read 'elsewhere/train2014/0.jpg': No such file or directory" in str(caught.value)
    assert "data.download_dir (elsewhere) is a folder with COCO's train2014" in str(caught.value)


def test_instructions_follow_the_images_as_in_nemo_rl() -> None:
    Path("cot.txt").write_text("Think first.\n{}\n\nLet's think.")
    write_set("clevr", clevr_rows(4))
    sets = {"dataset_name": "clevr-cogent", "data_path": "clevr", "prompt_file": "cot.txt"}
    config = configured(train=sets, num_validation=0, default={"env_name": "clevr-cogent"})
    problems = load_problems(config, PicturedRows(config))
    (message,) = PromptWriter(config.data.train_sets[0]).messages(problems.train[0])
    assert message["content"] == (f"{mark(PICTURES[0])}Think first.\nHow many items are there? 0\n\nLet's think.")


def test_sft_learns_the_answers() -> None:
    write_set("clevr", clevr_rows(6))
    sets = {"dataset_name": "clevr-cogent", "data_path": "clevr"}
    config = configured("sft", train=sets, split_validation_size=2, default={"processor": "sft_processor"})
    conversations = load_conversations(config, PicturedRows(config))
    one = next(each for each in conversations.train if each.name.endswith(":1"))
    assert list(one.prompt) == [{"role": "user", "content": f"{mark(PICTURES[1])}How many items are there? 1"}]
    assert list(one.answers[0]) == [{"role": "assistant", "content": "1"}]


def test_files_hold_the_same_rows() -> None:
    rows = [{"image": f"{n}.png", "problem": f"How many? {n}", "solution": f"<answer> {n} </answer>"} for n in range(8)]
    for number in range(8):
        Path(f"{number}.png").write_bytes(PICTURES[number])
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {"dataset_name": "clevr-cogent", "data_path": "rows.jsonl"}
    config = configured(train=sets, split_validation_size=2, default={"env_name": "clevr-cogent"})
    problems = load_problems(config, PicturedRows(config))
    assert {problem.answer for problem in [*problems.train, *problems.validation]} == {str(n) for n in range(8)}


def test_rows_of_another_shape_are_named() -> None:
    Path("rows.jsonl").write_text('{"image": "a.png", "question": "how many?"}\n')
    sets = {"dataset_name": "clevr-cogent", "data_path": "rows.jsonl"}
    config = configured(train=sets, split_validation_size=1, default={"env_name": "clevr-cogent"})
    with pytest.raises(DataError, match=r"rows.jsonl:1 has no 'solution', which rows of clevr-cogent have: image, que"):
        load_problems(config, PicturedRows(config))


def test_splits_are_repositories() -> None:
    with pytest.raises(
        ConfigError, match=r"data.train\[0\].split: 'test', but clevr-cogent has train, trainA, valA and"
    ):
        configured(train={"dataset_name": "clevr-cogent", "split": "test"}, default={"env_name": "clevr-cogent"})


def test_nemo_rls_older_form_names_the_data_set_alone() -> None:
    """Its environment is that of the data set's name; the split to validate on is the data set's own."""
    data = configured(dataset_name="clevr-cogent", split="trainA").data
    assert (data.environment, data.split, data.input_key) == ("clevr-cogent", "trainA", "problem")
    assert [(each.dataset_name, each.split) for each in data.validation] == [("clevr-cogent", "valA")]
    data = configured(dataset_name="geometry3k").data
    assert (data.environment, data.validation[0].split) == ("geometry3k", "validation")
    data = configured(dataset_name="geometry3k", num_validation=8).data
    assert (data.validation, data.num_validation) == ((), 8)


def test_copies_are_validated_on_where_they_have_what_to_validate_on() -> None:
    """A copy of Geometry3K has all its splits; one of CLEVR-CoGenT's repositories is one split."""
    data = configured(dataset_name="geometry3k", train_data_path="copy").data
    assert [(each.data_path, each.split) for each in data.validation] == [("copy", "validation")]
    data = configured(dataset_name="clevr-cogent", train_data_path="copy").data
    assert (data.train[0].data_path, data.validation, data.num_validation) == ("copy", (), None)
    data = configured(dataset_name="clevr-cogent", train_data_path="copy", val_data_path="other").data
    assert [(each.data_path, each.split) for each in data.validation] == [("other", "valA")]


def test_the_images_of_known_sets_are_found_whatever_images_are_called_elsewhere() -> None:
    write_set("clevr", clevr_rows(4))
    sets = {"train": {"dataset_name": "clevr-cogent", "data_path": "clevr"}, "split_validation_size": 1}
    config = configured(**sets, image_key="picture", default={"env_name": "clevr-cogent"})
    problems = load_problems(config, PicturedRows(config))
    assert all(marked_in(problem.question) for problem in problems.train)


def test_a_text_model_is_told(tmp_path: Path) -> None:
    write_set("clevr", clevr_rows(4))
    config = data_config(dataset_name=None, train={"dataset_name": "clevr-cogent", "data_path": "clevr"}, task=None)
    with pytest.raises(DataError, match=r"clevr-cogent has images, but policy.model_name is a text model"):
        load_problems(config)


def test_the_features_are_those_of_the_hub() -> None:
    """What `datasets` prepares of the folders has the types of the repositories' own cards."""
    write_set("clevr", clevr_rows(2))
    loaded = datasets.load_dataset("clevr", split="train")
    assert isinstance(loaded.features["image"], datasets.Image)


def test_images_of_the_hub_stay_in_their_files_until_they_are_read() -> None:
    kind = datasets.Features({"input": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = [
        {"input": "two?", "images": [{"bytes": PICTURES[0], "path": None}, {"bytes": PICTURES[1], "path": None}]},
        {"input": "none?", "images": []},
        {"input": "null?", "images": None},
    ]
    Path("set").mkdir()
    datasets.Dataset.from_list(rows, features=kind).to_parquet("set/train.parquet")
    (_, first), (_, second), (_, third) = hub("set", "train", None)
    assert all(isinstance(image, StoredMedia) for image in first["images"])
    assert [image.read() for image in first["images"]] == PICTURES[:2]
    assert (second["images"], third["images"]) == ([], None)
    assert first["input"] == "two?"


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_sounds_and_videos_are_refused_by_name(kind: str) -> None:
    """Also where a row has an image beside them, and no package that could decode them."""
    feature = {"audio": datasets.Audio(), "video": datasets.Video()}[kind]
    features = datasets.Features(
        {"input": datasets.Value("string"), "output": datasets.Value("string"), "clip": feature}
    )
    rows = [
        {"input": f"what is it? {n}", "output": "a cat", "clip": {"bytes": b"encoded", "path": None}} for n in range(4)
    ]
    table = pyarrow.Table.from_pylist(rows, schema=features.arrow_schema)
    Path("set").mkdir()
    pyarrow.parquet.write_table(table, "set/train.parquet")
    config = configured(dataset_name="set", input_key="input", output_key="output", environment="geometry3k")
    with pytest.raises(DataError, match=rf"set\[train\]:0 has {kind} in 'clip', which is not built"):
        load_problems(config, PicturedRows(config))
