"""The catalogue names the tensors of real checkpoints: those that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from adapters_harness import DEEPSEEK, EVERY, LLAMA, QWEN3
from safetensors.torch import save_file

from tandem.common.errors import ModelError
from tandem.refit.adapters import catalogue
from tandem.refit.adapters.catalogue import make_shape, read_shape

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
VARIANTS = [
    *(pytest.param(config, id=name) for name, config in EVERY.items()),
    pytest.param(LLAMA | {"attention_bias": True, "mlp_bias": True}, id="llama with biases"),
    pytest.param(LLAMA | {"tie_word_embeddings": True}, id="llama tied"),
    pytest.param(QWEN3 | {"attention_bias": True}, id="qwen3 with biases"),
    pytest.param({k: v for k, v in QWEN3.items() if k != "head_dim"}, id="qwen3 without head_dim"),
    pytest.param(DEEPSEEK | {"q_lora_rank": None, "attention_bias": True}, id="deepseek_v3 without query rank"),
    pytest.param(DEEPSEEK | {"attention_bias": True}, id="deepseek_v3 with biases"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that has transformers write a checkpoint of a configuration."""

    def save(config: dict[str, Any], **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        values = {key: value for key, value in config.items() if key != "model_type"}
        made = transformers.AutoConfig.for_model(config["model_type"], **values)
        with torch.random.fork_rng():
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        model.save_pretrained(folder, **options)
        return folder

    return save


@pytest.mark.parametrize("config", VARIANTS)
def test_names_and_shapes_are_those_of_a_saved_checkpoint(config: dict[str, Any], saved: Any) -> None:
    folder = saved(config)
    written = {name: shape for name, (shape, _) in catalogue.read_headers(folder).items()}
    from_fields = make_shape(config)
    assert {tensor.name: tensor.shape for tensor in from_fields.tensors} == written
    from_file = read_shape(folder)
    assert {tensor.name: tensor.shape for tensor in from_file.tensors} == written
    assert from_file.geometry == from_fields.geometry
    assert from_file.num_parameters == sum(int(np.prod(shape)) for shape in written.values())


def test_element_types_are_the_checkpoint_s(saved: Any) -> None:
    folder = saved(DEEPSEEK)
    found = {tensor.name: tensor.dtype for tensor in read_shape(folder).tensors}
    assert found == {name: dtype for name, (_, dtype) in catalogue.read_headers(folder).items()}
    half = {tensor.dtype for tensor in make_shape(LLAMA).cast("float16").tensors}
    assert half == {"float16"}


def test_several_files_are_read_through_their_index(saved: Any) -> None:
    folder = saved(QWEN3, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "other.safetensors").write_bytes(b"not listed, not read")
    assert len(read_shape(folder).tensors) == len(make_shape(QWEN3).tensors)


def test_a_quantised_checkpoint_has_scales_for_every_linear_layer() -> None:
    model = make_shape(DEEPSEEK).quantised((4, 8))
    tensors = {tensor.name: tensor for tensor in model.tensors}
    scaled = {name for name, tensor in tensors.items() if tensor.scales}
    assert {name.removesuffix("_scale_inv") for name in model.names_of_scales} == scaled
    assert scaled == {name for name in tensors if name.endswith(("_proj.weight", "_with_mqa.weight"))}
    keys = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert (keys.shape, keys.dtype, keys.block) == ((12, 16), "float8_e4m3fn", (4, 8))
    assert (tensors[keys.scales].shape, tensors[keys.scales].dtype) == ((3, 2), "float32")
    rounded_up = tensors[tensors["model.layers.0.self_attn.kv_b_proj.weight"].scales]
    assert rounded_up.shape == (11, 1)


def test_an_unknown_architecture_is_known_by_its_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b.c": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "novel"}')
    model = read_shape(tmp_path)
    assert [(t.name, t.shape, t.dtype) for t in model.tensors] == [("a", (2, 3), "float32"), ("b.c", (4,), "bfloat16")]
    with pytest.raises(ModelError, match="only the tensors of this model are known"):
        _ = model.required_geometry


def test_what_cannot_be_described_is_refused(tmp_path: Path, saved: Any) -> None:
    with pytest.raises(ModelError, match="model_type 'novel' has no catalogue"):
        make_shape({"model_type": "novel"})
    with pytest.raises(ModelError, match="lacks 'vocab_size'"):
        make_shape({k: v for k, v in LLAMA.items() if k != "vocab_size"})
    with pytest.raises(ModelError, match="does not describe a llama"):
        make_shape(LLAMA | {"num_attention_heads": None})
    with pytest.raises(ModelError, match="no safetensors files"):
        read_shape(tmp_path)
    folder = saved(LLAMA)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 151}))
    with pytest.raises(ModelError, match=r"embed_tokens.weight should have shape"):
        read_shape(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="no readable safetensors header"):
        read_shape(folder)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-235B-A22B", 235_093_634_560),
        # The published total is of these and the multi-token prediction layer, which no refit moves.
        ("DeepSeek-V3", 671_026_419_200),
    ],
)
def test_example_models_have_the_published_sizes(name: str, num_parameters: int) -> None:
    config = json.loads((EXAMPLES / name / "config.json").read_bytes())
    assert make_shape(config).num_parameters == num_parameters


@pytest.mark.parametrize("name", sorted(path.parent.name for path in EXAMPLES.glob("*/config.json")))
def test_transformers_makes_the_same_tensors_of_example_models(name: str) -> None:
    # Two layers of each kind at the true widths, on the meta device.
    config = json.loads((EXAMPLES / name / "config.json").read_bytes())
    config |= {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    config.pop("quantization_config", None)
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **values), dtype=torch.bfloat16
        )
    tensors = {id(tensor): tensor for tensor in made.state_dict(keep_vars=True).values()}  # tied ones once
    assert make_shape(config).num_parameters == sum(tensor.numel() for tensor in tensors.values())
