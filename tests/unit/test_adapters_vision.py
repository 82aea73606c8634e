"""The catalogue names the tensors of models that see as they are in memory, and plans leave their towers whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tandem.common.errors import ModelError
from tandem.refit.adapters.catalogue import from_checkpoint, from_config
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.huggingface import HuggingFace, is_of_tower
from tests.harness.vision_models import FAMILIES, write_vision_files, write_vision_model


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_the_model_in_memory(family: str, is_tied: bool, tmp_path: Path) -> None:
    folder = write_vision_files(family, tmp_path)
    settings = transformers.AutoConfig.from_pretrained(folder, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(settings)
    found = from_config(json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": is_tied})
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in found.tensors} == expected
    towers = {name for name in expected if "visual" in name or "vision" in name or "projector" in name}
    towers |= {name for name in expected if "connector" in name}
    assert {tensor.name for tensor in found.tensors if is_of_tower(tensor.name)} == towers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_as_many_parameters(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path)
    saved, described = from_checkpoint(folder), from_config(json.loads((folder / "config.json").read_text()))
    assert saved.num_parameters == described.num_parameters
    towers = [sum(is_of_tower(tensor.name) for tensor in model.tensors) for model in (saved, described)]
    assert towers[0] == towers[1] > 10, "under the names of the files, too"


def test_tensor_parallelism_leaves_the_tower_whole(tmp_path: Path) -> None:
    folder = write_vision_files("smolvlm", tmp_path)
    model = from_config(json.loads((folder / "config.json").read_text()))
    layout = DTensor(tensor=2).parameters(model, 1)
    whole = HuggingFace().parameters(model, 0)
    shapes = {tensor.name: tensor.shape for tensor in whole.tensors}
    cut = {
        layout.tensors[int(layout.pieces.tensor_P[row])].name
        for row in range(len(layout.pieces.tensor_P))
        if layout.piece(row).box.shape != shapes[layout.tensors[int(layout.pieces.tensor_P[row])].name]
    }
    assert cut
    assert not any(is_of_tower(name) for name in cut)


def test_a_size_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_vision_files("smolvlm", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["patch_size"]
    with pytest.raises(ModelError, match="the model's configuration lacks 'patch_size'"):
        from_config(config)
