"""What `coordinator plan` says of vision models, beside what Transformers' towers keep, counted on the CPU."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console

from tandem.config import Config, build_config
from tandem.config.models.vision_families import VISION
from tandem.coordinator.forecast.media import bound_image_tokens, tower_of
from tandem.coordinator.forecast.memory import memory_of
from tandem.coordinator.forecast.plan import explain
from tandem.coordinator.forecast.sides import model_shape, sides
from tandem.trainer.backends.pictures import freeze
from tests.harness.vision_models import vision_config, vision_tokenizer

HIDDEN, INNER, DEPTH, SIDE, PATCH = 96, 256, 6, 224, 14
FROZEN = {"dtensor_cfg": {"automodel_kwargs": {"freeze_config": {"freeze_vision_tower": True}}}}


def model_config(family: str) -> Any:
    """Return a family's configuration with a tower that is not tiny."""
    config = vision_config(family, vision_tokenizer(family).get_vocab())
    tower = config.vision_config
    tower.hidden_size, tower.intermediate_size, tower.patch_size = HIDDEN, INNER, PATCH
    for name in ("depth", "num_hidden_layers"):
        if hasattr(tower, name):
            setattr(tower, name, DEPTH)
    if not VISION[family].is_qwen:
        tower.image_size = SIDE
    elif hasattr(tower, "window_size"):
        tower.window_size = 8 * PATCH
    return config


def config_of(folder: Path, family: str, **policy: Any) -> Config:
    model_config(family).save_pretrained(folder)
    settings = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": str(folder),
            "train_global_batch_size": 4,
            "train_micro_batch_size": 2,
            "max_total_sequence_length": 512,
            "generation": {"max_new_tokens": 128},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6}},
            **policy,
        },
        "data": {"dataset_name": "shapes"},
        "cluster": {"gpus_per_node": 1},
    }
    return build_config(settings)


def kept_by(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """Return the bytes that autograd keeps of an image's way through a tower and its projector."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            alive.append(tensor)
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.get_image_features(**inputs)
    return sum(sizes.values())


def inputs_of(config: Any, family: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """Return the inputs of a tower for an image, and its patches."""
    rows = SIDE // PATCH
    if VISION[family].is_qwen:
        size = config.vision_config.temporal_patch_size * 3 * PATCH**2
        grid = torch.tensor([[1, rows, rows]])
        return {"pixel_values": torch.randn(rows**2, size, dtype=dtype), "image_grid_thw": grid}, rows**2
    crops = (1,) if VISION[family].has_crops else ()
    return {"pixel_values": torch.randn(*crops, 1, 3, SIDE, SIDE, dtype=dtype)}, rows**2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", VISION)
def test_a_tower_keeps_what_was_planned(family: str, precision: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, family)
    shape = model_shape(config)
    assert not isinstance(shape, str)
    tower = tower_of(config, shape)
    assert tower is not None
    assert (tower.depth, tower.hidden, tower.inner) == (DEPTH, HIDDEN, INNER)
    dtype = getattr(torch, precision)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_config(read, dtype=dtype).train()
    inputs, num_patches = inputs_of(read, family, dtype)
    counted = kept_by(model, inputs)
    planned = tower.measure_kept(num_patches / tower.patches_per_token, dtype.itemsize, recomputes=False)
    print(family, precision, planned / counted)
    assert planned == pytest.approx(counted, rel=0.1)
    with torch.no_grad():
        features = model.model.get_image_features(**inputs).pooler_output
    assert sum(map(len, features)) == num_patches / tower.patches_per_token


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_of_a_tower_and_its_gradients_are_those_of_the_model(
    family: str, is_frozen: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, family, **(FROZEN if is_frozen else {}))
    shape = model_shape(config)
    assert not isinstance(shape, str)
    planned = memory_of(config, sides(config, shape)[0])
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(read, dtype=torch.float32)
    freeze(model, VISION[family], config.policy.dtensor_cfg)
    trained = sum(each.numel() * 4 for each in model.parameters() if each.requires_grad)
    frozen = sum(each.numel() * 4 for each in model.parameters() if not each.requires_grad)
    assert planned.resident["weights"] == pytest.approx(trained, rel=0.01)
    assert planned.resident["gradients"] == pytest.approx(trained, rel=0.01)
    assert planned.resident["optimizer"] == pytest.approx(2 * trained, rel=0.01)
    assert planned.resident.get("frozen weights", 0.0) == pytest.approx(frozen, rel=0.01)
    of_images = [phase.parts.get("images", 0.0) for phase in planned.phases]
    assert (max(of_images) > 0) is not is_frozen


def test_megatron_core_freezes_what_is_named_too(tmp_path: Path) -> None:
    megatron = {"megatron_cfg": {"enabled": True, "optimizer": {"lr": 1e-6}}, "optimizer": None}
    configs = [config_of(tmp_path, "smolvlm", **megatron, **more) for more in ({}, FROZEN)]
    trained, frozen = (memory_of(each, sides(each, model_shape(each))[0]).resident for each in configs)  # type: ignore[arg-type]
    assert frozen["weights"] + frozen["frozen weights"] == trained["weights"]
    assert 0 < frozen["frozen weights"] < trained["weights"]


def test_a_plan_says_how_many_image_tokens_it_counts(tmp_path: Path) -> None:
    vllm = {"backend": "vllm", "max_new_tokens": 128, "colocated": {"enabled": True}}
    config, out = config_of(tmp_path, "qwen2_5_vl", precision="bfloat16", generation=vllm), io.StringIO()
    assert bound_image_tokens(config, 1024) == 768
    explain(config, Console(file=out, width=200))
    assert "images: as if all tokens of prompts stood for some, 75% of a micro-batch's" in out.getvalue()
    recomputed = config_of(tmp_path, "qwen2_5_vl", dtensor_cfg={"activation_checkpointing": True})
    found = [memory_of(each, sides(each, model_shape(each))[0]) for each in (config, recomputed)]  # type: ignore[arg-type]
    once, again = (max(phase.parts.get("images", 0.0) for phase in memory.phases) for memory in found)
    assert 0 < again < 0.5 * once
