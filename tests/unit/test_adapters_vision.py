"""The catalogue names the tensors of vision models as they are in memory, and plans leave their towers whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tandem.common.errors import ModelError, RefitError
from tandem.config.models.families import VLLM_SEEING
from tandem.refit.adapters.catalogue import make_shape, read_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.huggingface import HuggingFace, is_outside_language
from tandem.refit.adapters.vllm import Vllm
from tests.harness.vision_models import FAMILIES, write_vision_files, write_vision_model


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_the_model_in_memory(family: str, is_tied: bool, tmp_path: Path) -> None:
    folder = write_vision_files(family, tmp_path)
    settings = transformers.AutoConfig.from_pretrained(folder, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(settings)
    found = make_shape(json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": is_tied})
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in found.tensors} == expected
    towers = {name for name in expected if "visual" in name or "vision" in name or "projector" in name}
    towers |= {name for name in expected if "connector" in name}
    assert {tensor.name for tensor in found.tensors if is_outside_language(tensor.name)} == towers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_as_many_parameters(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path)
    saved, described = read_shape(folder), make_shape(json.loads((folder / "config.json").read_text()))
    assert saved.num_parameters == described.num_parameters
    towers = [sum(is_outside_language(tensor.name) for tensor in model.tensors) for model in (saved, described)]
    assert towers[0] == towers[1] > 10, "under the names of the files, too"


def test_tensor_parallelism_leaves_the_tower_whole(tmp_path: Path) -> None:
    folder = write_vision_files("smolvlm", tmp_path)
    model = make_shape(json.loads((folder / "config.json").read_text()))
    layout = DTensor(tensor=2).parameters(model, 1)
    whole = HuggingFace().parameters(model, 0)
    shapes = {tensor.name: tensor.shape for tensor in whole.tensors}
    cut = {
        layout.tensors[int(layout.pieces.tensor_P[row])].name
        for row in range(len(layout.pieces.tensor_P))
        if layout.piece(row).box.shape != shapes[layout.tensors[int(layout.pieces.tensor_P[row])].name]
    }
    assert cut
    assert not any(is_outside_language(name) for name in cut)


@pytest.mark.parametrize("family", VLLM_SEEING)
def test_vllms_workers_hold_every_tensor_under_its_names(family: str, tmp_path: Path) -> None:
    folder = write_vision_files(family, tmp_path)
    model = make_shape(json.loads((folder / "config.json").read_text()))
    for ranks in (1, 2):
        layouts = Vllm(tp=ranks).layouts(model, HostNames("host"))  # which raises if one is lost
        assert all(layout.tensors == model.tensors for layout in layouts)
        names = {storage.name for storage in layouts[0].storages}
        assert len(names) < len(model.tensors), "some are fused"
        language = "model.text_model." if family in ("smolvlm", "idefics3") else "language_model.model."
        assert f"{language}layers.0.self_attn.qkv_proj.weight" in names
        assert all(name.startswith((language, "visual.", "model.vision_model.", "model.connector.")) for name in names)
    with pytest.raises(RefitError, match=f"pipeline stages of a {family}, which sees, are not built"):
        Vllm(pp=2).layouts(model, HostNames("host"))


def test_a_tower_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    folder = write_vision_files("idefics3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 192}
    with pytest.raises(RefitError, match="32 elements cannot be split evenly over 3 ranks"):
        Vllm(tp=3).layouts(make_shape(config), HostNames("host"))


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_vision_files("smolvlm", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["patch_size"]
    with pytest.raises(ModelError, match="the model's configuration lacks 'patch_size'"):
        make_shape(config)
