"""Megatron-Core's layouts of vision models: the language model divided, the tower whole on the first stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tandem.config.models.families import MEGATRON_VISION
from tandem.config.models.vision_families import VISION
from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.megatron import Megatron, linear_layers
from tandem.refit.adapters.vision import as_seeing, as_text, is_of_tower, names_in_checkpoint
from tests.harness.vision_models import write_vision_files, write_vision_model

SIZES = {
    "TP2": Megatron(tp=2),
    "PP2": Megatron(pp=2),
    "TP2+PP2+DP2": Megatron(tp=2, pp=2, dp=2),
    "virtual stages": Megatron(pp=2, vpp=2),
}


def shape_of(family: str, folder: Path) -> ModelShape:
    written = write_vision_files(family, folder, num_key_value_heads=2, num_hidden_layers=4)
    return make_shape(json.loads((written / "config.json").read_text()), "float32")


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("family", MEGATRON_VISION)
def test_each_replica_has_every_element_once_and_first_stages_the_whole_tower(
    family: str, sizes: Megatron, tmp_path: Path
) -> None:
    model = shape_of(family, tmp_path)
    towers = {tensor.name for tensor in model.tensors if is_of_tower(tensor.name, VISION[family])}
    assert len(towers) > 10
    held: dict[str, dict[object, int]] = {tensor.name: {} for tensor in model.tensors}
    for rank, layout in enumerate(sizes.layouts(model, HostNames("here"))):
        assert layout.tensors is model.tensors
        at = sizes.coordinates(rank)
        here = set()
        for row, index in enumerate(layout.pieces.tensor_P.tolist()):
            piece, tensor = layout.piece(row), model.tensors[index]
            held[tensor.name][piece.box] = piece.box.num_elements
            if tensor.name in towers:
                here.add(tensor.name)
                assert piece.box.shape == tensor.shape
                assert piece.parameter.removeprefix("0.") == f"tower.{tensor.name}"
        assert here == (towers if at.pp == 0 else set())
    whole = {tensor.name: sum(held[tensor.name].values()) for tensor in model.tensors}
    assert sum(whole.values()) == model.num_parameters
    assert all(whole.values())


@pytest.mark.parametrize("family", MEGATRON_VISION)
def test_names_of_the_language_model_are_those_of_a_model_of_text(family: str, tmp_path: Path) -> None:
    model, known = shape_of(family, tmp_path), VISION[family]
    text = model.as_text
    assert text.required_geometry.num_layers == 4
    assert "model.layers.3.mlp.down_proj.weight" in text.index
    assert [as_seeing(each.name, known) for each in text.tensors if not is_of_tower(each.name, known)] == [
        each.name for each in model.tensors if not is_of_tower(each.name, known)
    ]
    assert all(as_text(as_text(each.name, known), known) == as_text(each.name, known) for each in model.tensors)
    layers = linear_layers(model)
    assert layers["decoder.layers.0.mlp.linear_fc2"] == (f"{known.language_prefix}layers.0.mlp.down_proj",)
    adapted = model.add_adapters(layers["decoder.layers.0.self_attention.linear_qkv"], 4)
    names = {storage.name for storage in Megatron(tp=2).parameters(adapted, 1).storages}
    assert "decoder.layers.0.self_attention.linear_qkv.lora_B.weight" in names


@pytest.mark.parametrize("family", MEGATRON_VISION)
def test_files_have_every_tensor_by_its_name_in_memory_or_an_older_one(family: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = write_vision_model(family, tmp_path)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        there = set(file.keys())
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    for name, _ in model.named_parameters():
        found = there & set(names_in_checkpoint(name, VISION[family]))
        assert len(found) == 1, name
