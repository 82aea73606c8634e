"""The tokens of images, by arithmetic, are those of the processors and models of Transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.errors import DataError, ModelError
from tandem.config.models.vision_families import VISION, find_vision_family
from tandem.samples.images.families import (
    ImageSettings,
    check_tokenizer,
    collapse,
    expand,
    expansion,
    grid_of,
    num_tokens,
    positions,
    read_settings,
    undrawable_ids,
)
from tandem.samples.model_files import load_model_tokenizer
from tandem.samples.tokenizer import Tokenizer
from tests.harness.vision_models import FAMILIES, SPECIAL, image_processor, whole_processor, write_vision_files

NUM_SIZES = 2000


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_files(request.param, tmp_path_factory.mktemp("vision") / request.param)


@pytest.fixture(scope="module")
def settings(folder: Path) -> ImageSettings:
    return read_settings(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_model_tokenizer(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return image_processor(folder)


def sizes(number: int, longest: int = 300, seed: int = 0) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [
        (1, 1),
        (3, 3),
        (1, 3),
        *((round(longest ** rng.random()), round(longest ** rng.random())) for _ in range(number - 3)),
    ]


def their_grid(processor: Any, family: str, size: tuple[int, int]) -> tuple[int, ...]:
    """The grid that the real processor computes from an image, which it resizes."""
    extra = {"return_row_col_info": True} if VISION[family].has_crops else {}
    image = np.zeros((size[1], size[0], 3), np.uint8)
    got = processor(images=[image], return_tensors="np", input_data_format="channels_last", **extra)
    if VISION[family].is_qwen:
        assert len(got["pixel_values"]) == np.prod(got["image_grid_thw"][0])
        return tuple(got["image_grid_thw"][0].tolist())
    if VISION[family].has_crops:
        assert got["pixel_values"].shape[1] == got["rows"][0][0] * got["cols"][0][0] + 1
        return (got["rows"][0][0], got["cols"][0][0])
    assert len(got["pixel_values"]) == 1
    return ()


def test_grids_are_those_of_the_processor(settings: ImageSettings, processor: Any) -> None:
    family = settings.family.model_type
    for width, height in sizes(NUM_SIZES):
        try:
            ours: object = grid_of(settings, width, height)
        except DataError:
            with pytest.raises(ValueError):  # noqa: PT011  # theirs says no more
                their_grid(processor, family, (width, height))
            continue
        assert ours == their_grid(processor, family, (width, height)), (width, height)


def test_expansions_are_those_of_the_processor(settings: ImageSettings, folder: Path, processor: Any) -> None:
    family = settings.family.model_type
    theirs = whole_processor(family, folder, processor)
    for width, height in sizes(200, 120, 1):
        grid = grid_of(settings, width, height) if max(width, height) <= 200 * min(width, height) else None
        assert grid is not None
        if settings.family.is_qwen:
            inputs: dict[str, Any] = {"image_grid_thw": np.array([grid])}
        elif settings.family.has_crops:
            inputs = {"rows": [[grid[0]]], "cols": [[grid[1]]]}
        else:
            inputs = {"num_crops": [0]}
        text = expansion(settings, grid)
        assert text == theirs.replace_image_token(inputs, 0)
        assert text.count(settings.family.image_token) == num_tokens(settings, grid)


def conversation(settings: ImageSettings, grids: list[tuple[int, ...]], rng: random.Random) -> str:
    words = ["".join(rng.choices("abc \n", k=rng.randrange(6))) for _ in range(len(grids) + 1)]
    return words[0] + "".join(settings.family.part + word for word in words[1:])


def test_positions_are_those_of_the_model(settings: ImageSettings, tokenizer: Tokenizer, folder: Path) -> None:
    import transformers

    rng = random.Random(2)
    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = None
    if settings.family.has_mrope:
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config)
    for width, height in sizes(NUM_SIZES // 4, seed=3):
        grids = []
        for _ in range(rng.randrange(5)):
            try:
                grids.append(grid_of(settings, max(1, width + rng.randrange(50)), max(1, height + rng.randrange(50))))
            except DataError:
                continue
        text = conversation(settings, grids, rng) + "a"
        ids = tokenizer.encode(expand(settings, text, grids))
        ours, delta = positions(settings, ids, grids)
        if model is None:
            assert (ours.tolist(), delta) == ([list(range(len(ids)))], 0)
            continue
        kinds = torch.tensor([[int(token == settings.image_token_id) for token in ids]])
        theirs, deltas = model.get_rope_index(
            torch.tensor([ids]), kinds, image_grid_thw=torch.tensor(grids) if grids else None
        )
        assert ours.tolist() == theirs[:, 0].tolist()
        assert delta == deltas.item()


def test_collapsed_undoes_expanded(settings: ImageSettings, tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    check_tokenizer(tokenizer, settings)
    for width, height in sizes(100, 120, 5):
        grids = [grid_of(settings, max(1, width), height + 3 * k) for k in range(rng.randrange(5))]
        text = conversation(settings, grids, rng)
        ids = tokenizer.encode(expand(settings, text, grids))
        assert collapse(ids, tokenizer, settings) == tokenizer.encode(text)


def test_what_is_no_whole_image_is_refused(settings: ImageSettings, tokenizer: Tokenizer) -> None:
    grid = grid_of(settings, 48, 40)
    ids = tokenizer.encode(expand(settings, settings.family.part, [grid]))
    last = max(index for index, token in enumerate(ids) if token == settings.image_token_id)
    cut = ids[:last] + ids[last + 1 :]
    with pytest.raises(DataError, match=r"image tokens, its 1 images need"):
        positions(settings, cut, [grid])
    with pytest.raises(DataError, match=r"2 × .* for 1 images"):
        expand(settings, settings.family.part * 2, [grid])
    if settings.family.has_mrope:
        at = ids.index(settings.image_token_id) + 2
        with pytest.raises(DataError, match="not side by side"):
            positions(settings, [*ids[:at], tokenizer.encode("a")[0], *ids[at:]], [grid])
    else:
        with pytest.raises(DataError, match="is not followed by"):
            collapse(cut, tokenizer, settings)


def test_tokens_of_pictures_cannot_be_drawn(settings: ImageSettings, tokenizer: Tokenizer) -> None:
    ids = undrawable_ids(tokenizer, settings.family)
    assert settings.image_token_id in ids
    assert list(ids) == sorted(set(ids))
    assert tokenizer.eos_id not in ids
    texts = tokenizer.hugging_face.convert_ids_to_tokens(list(ids))
    assert set(texts) <= set(SPECIAL[settings.family.model_type])


def test_a_tokenizer_without_the_image_token_is_refused(settings: ImageSettings, tmp_path: Path) -> None:
    others = {"gemma3": "idefics3"}.get(settings.family.model_type, "gemma3")
    other = load_model_tokenizer(write_vision_files(others, tmp_path))
    with pytest.raises(ModelError, match=r"has no token <.*, which .* needs"):
        check_tokenizer(other, settings)
    wrong = SimpleNamespace(**{name: getattr(settings, name) for name in settings.__struct_fields__})
    wrong.image_token_id += 1
    own = load_model_tokenizer(write_vision_files(settings.family.model_type, tmp_path / "own"))
    with pytest.raises(ModelError, match=r"in config\.json"):
        check_tokenizer(own, wrong)  # type: ignore[arg-type]


def test_names_of_parameters(folder: Path, settings: ImageSettings) -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(folder))
    family = settings.family
    prefixes = (family.tower_prefix, family.projector_prefix, family.language_prefix)
    names = [name for name, _ in model.named_parameters()]
    assert all(name.startswith(prefixes) for name in names)
    assert all(any(name.startswith(prefix) for name in names) for prefix in prefixes)


@pytest.mark.parametrize("nested", [False, True])
def test_either_file_describes_the_processor(
    settings: ImageSettings, folder: Path, tmp_path: Path, nested: bool
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    own = tmp_path / "preprocessor_config.json"
    if nested:
        inner = json.loads(own.read_text())
        own.unlink()
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner, "image_seq_len": 16}))
    else:
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": 16}))
    assert read_settings(tmp_path) == settings


def change(folder: Path, file: str, **fields: object) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("family", "file", "fields", "says"),
    [
        ("gemma3", "config.json", {"model_type": "llava"}, "llava takes no images here"),
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan is not built"),
        ("qwen2_5_vl", "preprocessor_config.json", {"patch_size": 16}, "patch_size and merge_size are 16 and 2"),
        ("qwen2_5_vl", "preprocessor_config.json", {"patch_size": "x"}, "cannot be used"),
        ("smolvlm", "preprocessor_config.json", {"max_image_size": {"longest_edge": 64}}, "max_image_size is 64"),
        ("smolvlm", "preprocessor_config.json", {"size": {"height": 64}}, r"size\.longest_edge"),
    ],
)
def test_refused_files(family: str, file: str, fields: dict[str, object], says: str, tmp_path: Path) -> None:
    write_vision_files(family, tmp_path)
    change(tmp_path, file, **fields)
    with pytest.raises(ModelError, match=says) as caught:
        read_settings(tmp_path, "org/model")
    assert str(caught.value).startswith("org/model")
    assert "\n" not in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_settings(tmp_path)
    write_vision_files("gemma3", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no preprocessor_config\.json \(or processor_config\.json\)"):
        read_settings(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"cannot read preprocessor_config\.json"):
        read_settings(tmp_path)


def test_families_are_told_by_their_type() -> None:
    assert set(VISION) == set(FAMILIES)
    assert find_vision_family({"model_type": "qwen2_5_vl"}) is VISION["qwen2_5_vl"]
    for other in (None, {}, {"model_type": "qwen2"}, {"model_type": "gemma3_text"}, {"model_type": 3}):
        assert find_vision_family(other) is None


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "qwen3_vl": (
        {"patch_size": 16, "merge_size": 2, "size": {"longest_edge": 16777216, "shortest_edge": 65536}},
        {"patch_size": 16, "spatial_merge_size": 2},
    ),
    "smolvlm": (
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": True},
        {"image_size": 512, "patch_size": 16},
    ),
    "idefics3": (
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, "do_image_splitting": True},
        {"image_size": 364, "patch_size": 14},
    ),
}
"""The sizes of published models: those of their processors, and those of their towers."""


def bounds(processor: Any) -> Any:
    from transformers.image_utils import SizeDict

    return SizeDict(**{key: value for key, value in dict(processor.size).items() if value is not None})


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_grids_at_the_sizes_of_published_models(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 6000 pixels a side; the processor's own resizing of pixels, which takes seconds, is left out."""
    from transformers.image_processing_backends import PilBackend

    processor_fields, tower = PUBLISHED[family]
    write_vision_files(family, tmp_path)
    kind = json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"]
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": kind, "do_rescale": False, "do_normalize": False, **processor_fields})
    )
    config = json.loads((tmp_path / "config.json").read_text())
    change(tmp_path, "config.json", vision_config={**config["vision_config"], **tower})
    settings, processor = read_settings(tmp_path), image_processor(tmp_path)

    def blank(self: Any, image: Any, size: Any, **options: Any) -> Any:
        return np.broadcast_to(np.uint8(0), (3, size.height, size.width))

    monkeypatch.setattr(PilBackend, "resize", blank)
    for width, height in [(6000, 4000), (4000, 6000), (1, 180), (180, 1), *sizes(300, 6000, 7)]:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        try:
            ours = grid_of(settings, width, height)
        except DataError:
            continue
        if settings.family.is_qwen:
            factor = settings.patch_size * settings.merge_size
            _, *sides = processor.resize(image, bounds(processor), None, factor).shape
            theirs: tuple[int, ...] = (1, *(side // settings.patch_size for side in sides))
        else:
            edge = settings.crop_size
            resized_image = processor.resize_for_vision_encoder(processor.resize(image, bounds(processor)), edge)
            _, rows, columns = processor.split_images(resized_image, {"longest_edge": edge})
            theirs = (rows, columns)
        assert ours == theirs, (width, height)
