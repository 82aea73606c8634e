"""Tensors that a model does not load: in every export as they came, with index and configuration."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from tandem.config import Config
from tandem.coordinator.cli import main
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.files.policy_files import CarriedTensors
from tests.harness.trainers.trainer_harness import make_config, make_groups, make_model, run_ranks, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(2)]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def add_tensors(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    """Add tensors to a model's folder, in a file of their own, as those of multi-token prediction layers are."""
    own = load_file(folder / "model.safetensors")
    added = {name: torch.randn(5, 3, dtype=torch.bfloat16) for name in names}
    save_file(added, folder / "mtp.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(own, "model.safetensors") | dict.fromkeys(added, "mtp.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return added


def rank(rank: int, config: Config, folder: Path, checkpoint: Path | None) -> tuple[int, str]:
    """Train a step, and write a checkpoint; return the number of the model's parameters, and what was printed."""
    backend = DTensorBackend(config, checkpoint=checkpoint)
    train_on(backend, BATCHES[checkpoint is not None], config)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        backend.save(folder).num_bytes.result()
        backend.save(folder).num_bytes.result()  # and is silent the second time
    dist.barrier()
    return backend.num_parameters, printed.getvalue()


def assert_carried(target: Path, source: dict[str, torch.Tensor], carried: set[str]) -> None:
    """Check that an export has the names of its source, and its carried tensors to the bit."""
    written = tensors_in(target)
    assert written.keys() == source.keys()
    for name in carried:
        assert written[name].dtype == source[name].dtype
        assert torch.equal(written[name], source[name]), name
    changed = [name for name in written if name not in carried and not torch.equal(written[name], source[name].float())]
    assert changed, "the model itself was trained"
    index = target / "model.safetensors.index.json"
    if index.is_file():
        assert json.loads(index.read_text())["weight_map"].keys() == source.keys()


MTP = {
    # DeepSeek-V3's and GLM-4.5's layers of prediction follow the model's own, where Transformers knows their numbers.
    "glm4_moe": ("model.layers.46.eh_proj.weight", "model.layers.46.mlp.experts.0.gate_proj.weight"),
    "qwen3_next": ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"),
    "nemotron_h": ("mtp.layers.0.eh_proj.weight",),
    # Transformers says that these are unexpected, and goes on.
    "qwen3": ("model.layers.2.eh_proj.weight", "draft.weight"),
}


@pytest.mark.parametrize("architecture", MTP)
def test_multi_token_prediction_layers_are_in_every_export(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    carried = add_tensors(folder, *MTP[architecture])
    source = tensors_in(folder)
    config = make_config(folder, algorithm="sft", trainers=2)
    (_, printed), *_ = run_ranks(2, rank, config, tmp_path / "step_1", None)
    assert_carried(tmp_path / "step_1/policy", source, set(carried))
    assert printed.startswith(f"exports have {len(carried)} tensors of {folder} as they are: ")
    assert printed.count("\n") == 1
    # From a checkpoint they are carried on, and the model's own still load.
    run_ranks(2, rank, config, tmp_path / "step_2", tmp_path / "step_1")
    assert_carried(tmp_path / "step_2/policy", source, set(carried))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step_2/policy")
    assert reloaded.config.num_hidden_layers == len(reloaded.base_model.layers)


def test_a_merged_model_has_them_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "model", "qwen3_next")
    carried = add_tensors(folder, *MTP["qwen3_next"])
    source = tensors_in(folder)
    lora = {"enabled": True, "dim": 2, "exclude_modules": ["*.mlp.*"]}
    config = make_config(folder, algorithm="sft", dtensor_cfg={"lora_cfg": lora})
    run_ranks(1, rank, config, tmp_path / "step_1", None)
    assert main(["merge", str(tmp_path / "step_1"), str(tmp_path / "merged")]) == 0, capfd.readouterr().err
    assert_carried(tmp_path / "merged", source, set(carried))


def test_those_of_a_float8_checkpoint_are_dequantised_like_its_weights(tmp_path: Path) -> None:
    """By the formula of DeepSeek-V3 (arXiv:2412.19437, section 3.3): an element times the scale of its block."""
    folder = make_model(tmp_path / "model", "qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    own = load_file(folder / "model.safetensors")
    name, trained = "mtp.fc.weight", "model.layers.0.mlp.up_proj.weight"
    quantised = torch.randn(5, 6).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    source = {name: quantised, f"{name}_scale_inv": scales, f"{trained}_scale_inv": torch.ones(1, 1)}
    save_file(own | source | {"mtp.norm.weight": torch.ones(6)}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (folder / "config.json").write_text(json.dumps(settings))
    carried = dict(CarriedTensors(model, ["", str(folder)]).read(own))
    assert carried.keys() == {name, "mtp.norm.weight"}
    for row, column in ((0, 0), (3, 5), (4, 3), (4, 5)):
        expected = float(quantised[row, column]) * float(scales[row // 4, column // 4])
        assert float(carried[name][row, column]) == pytest.approx(expected, rel=2**-8)
    assert carried[name].dtype == torch.bfloat16
    rest = dict(CarriedTensors(model, [str(folder)]).read({name}))
    assert rest.keys() == {"mtp.norm.weight"}, "nothing takes the place of what is trained"
    settings["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(settings))
    assert not dict(CarriedTensors(model, [str(folder)]).read(own)), "they cannot be read in an export"


def test_layers_that_a_run_takes_from_its_model_do_not_come_back(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3")
    overrides = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = make_config(folder, algorithm="sft", hf_config_overrides=overrides)
    run_ranks(1, rank, config, tmp_path / "step_1", None)
    assert not [name for name in tensors_in(tmp_path / "step_1/policy") if ".layers.1." in name]


SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 32,
            },
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "global_head_dim": 8,
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            "audio_config": None,
        },
    ),
}


@pytest.mark.parametrize("family", SEEING)
def test_the_text_part_of_a_model_that_sees_is_trained_and_the_whole_exported(family: str, tmp_path: Path) -> None:
    name, sizes = SEEING[family]
    folder = make_model(tmp_path / "model", "qwen3")  # for its tokenizer
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes["text_config"] |= {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary, "pad_token_id": 0}
    described = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(described)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    source = tensors_in(folder)
    tower = {each for each in source if ".language_model." not in each and each != "lm_head.weight"}
    assert tower
    config = make_config(folder, algorithm="sft", trainers=2)
    (num_parameters, _), *_ = run_ranks(2, rank, config, tmp_path / "step_1", None)
    buffers = {each for each in source if each.endswith(".layer_scalar")}
    num_text = sum(each.numel() for each_name, each in source.items() if each_name not in tower | buffers)
    assert num_parameters == num_text, "no tower is held"
    assert_carried(tmp_path / "step_1/policy", source, tower)
    assert json.loads((tmp_path / "step_1/policy/config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    # Others read it whole, and a run resumes from it.
    whole = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained(tmp_path / "step_1/policy")
    assert sorted(whole.state_dict()) == sorted(model.state_dict())
    run_ranks(2, rank, config, tmp_path / "step_2", tmp_path / "step_1")
    assert_carried(tmp_path / "step_2/policy", source, tower)
