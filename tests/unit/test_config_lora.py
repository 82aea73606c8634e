"""The configuration of adapters: which layers have one, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from tandem.common.errors import ConfigError
from tandem.config import Config, build_config, notices
from tandem.config.models.lora import choose_layers, count_projections
from tandem.config.schema.adapters import LoraCfg, PeftConfig
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.megatron import linear_layers

LAYERS = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate")
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, LAYERS),
        ({"target_modules": ("q_proj",)}, LAYERS),
        ({"match_all_linear": False}, [layer for layer in LAYERS if layer.endswith("_proj")]),
        ({"match_all_linear": False, "target_modules": ("q_proj", "o_proj")}, [LAYERS[i] for i in (0, 1, 4, 5)]),
        ({"match_all_linear": False, "target_modules": ("*.layers.1.*_proj",)}, LAYERS[4:7]),
        ({"match_all_linear": False, "exclude_modules": ("*.mlp.*", "o_proj")}, [LAYERS[0], LAYERS[4]]),
        ({"exclude_modules": ("*out_proj*", "gate")}, [layer for layer in LAYERS if layer.endswith("_proj")]),
    ],
)
def test_layers_are_chosen_by_name_or_wildcard(settings: dict[str, Any], expected: list[str]) -> None:
    assert choose_layers(LAYERS, LoraCfg(enabled=True, **settings), "lora") == expected


def test_a_name_that_fits_no_layer_is_refused() -> None:
    wrong = LoraCfg(match_all_linear=False, target_modules=("q_porj",))
    with pytest.raises(ConfigError, match=r"lora.target_modules: no layer is called 'q_porj'; did you mean 'q_proj'\?"):
        choose_layers(LAYERS, wrong, "lora")
    with pytest.raises(ConfigError, match="lora: no layer is left for an adapter, among gate, o_proj, q_proj, up_proj"):
        choose_layers(LAYERS, LoraCfg(exclude_modules=("*",)), "lora")


def test_megatrons_fused_layers_are_several_of_a_checkpoint() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    model = make_shape({"model_type": "llama", **sizes, **heads})
    linear = linear_layers(model)
    found = choose_layers(list(linear), PeftConfig(exclude_modules=("*.layers.0.*",)), "peft")
    assert {name: linear[name] for name in found} == {
        "decoder.layers.1.self_attention.linear_qkv": tuple(f"model.layers.1.self_attn.{p}_proj" for p in "qkv"),
        "decoder.layers.1.self_attention.linear_proj": ("model.layers.1.self_attn.o_proj",),
        "decoder.layers.1.mlp.linear_fc1": ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"),
        "decoder.layers.1.mlp.linear_fc2": ("model.layers.1.mlp.down_proj",),
    }
    fused = linear_layers(make_shape({"model_type": "phi3", **sizes, **heads}))
    assert fused.keys() == linear.keys()
    assert fused["decoder.layers.1.self_attention.linear_qkv"] == ("model.layers.1.self_attn.qkv_proj",)
    assert fused["decoder.layers.1.mlp.linear_fc1"] == ("model.layers.1.mlp.gate_up_proj",)
    layers = [layer for name in found for layer in linear[name]]
    adapted = model.add_adapters(layers, 4)
    assert adapted.shape_of("model.layers.{layer}.self_attn.k_proj.lora_B.weight") == (16, 4)
    assert adapted.tensors[: len(model.tensors)] == model.tensors
    assert len(adapted.tensors) == len(model.tensors) + 2 * 7


def sft(lora: dict[str, Any] | None = None, peft: dict[str, Any] | None = None, **policy: Any) -> Config:
    backend: dict[str, Any] = {"dtensor_cfg": {"lora_cfg": {"enabled": True, **(lora or {})}}}
    if peft is not None:
        megatron = {"enabled": True, "optimizer": {"optimizer": "adam", "lr": 1e-3}, "peft": {"enabled": True, **peft}}
        backend = {"megatron_cfg": megatron}
    return build_config(
        {
            "algorithm": "sft",
            "policy": {"model_name": "model", **backend, **policy},
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lora": {"restore_from": "nowhere"}}, "'nowhere' is not a folder of adapters: it has no adapter_config.json"),
        ({"lora": {"dropout": 1.0}}, "policy.dtensor_cfg.lora_cfg.dropout"),
        ({"peft": {"dropout": 0.1}}, "not supported yet: policy.megatron_cfg.peft.dropout (0.1)"),
        ({"lora": {"lora_A_init": "gauss"}}, "policy.dtensor_cfg.lora_cfg.lora_A_init"),
        ({"peft": {"lora_dtype": "float32"}}, "peft.lora_dtype: 'float32' is not policy.precision (bfloat16)"),
        (
            {"peft": {"target_modules": ["all-linear"]}},
            "peft.target_modules: 'all-linear' is no layer: an empty list chooses linear_qkv, linear_proj,",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    settings: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        sft(**settings)
    assert expected in str(raised.value)


@pytest.mark.parametrize("lora", ["lora", "peft"])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, None),
        ({"r": 4}, "adapter_config.json has r 4 and lora_alpha 16, the configuration has dim 8 and alpha 16"),
        ({"lora_alpha": 8}, "adapter_config.json has r 8 and lora_alpha 8, the configuration has dim 8 and alpha 16"),
        ({"use_dora": True}, "adapter_config.json: these are no plain LoRA adapters (use_dora, use_rslora, "),
        ({"use_rslora": True}, "adapter_config.json: these are no plain LoRA adapters (use_dora, use_rslora, "),
        ({"rank_pattern": {"q_proj": 4}}, "adapter_config.json: these are no plain LoRA adapters (use_dora, "),
    ],
)
def test_restored_adapters_of_another_rank_or_scale_are_refused(
    lora: str, written: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    """The files are PEFT's own."""
    key = "policy.dtensor_cfg.lora_cfg.restore_from" if lora == "lora" else "policy.megatron_cfg.peft.restore_from"
    settings: dict[str, Any] = {lora: {"restore_from": str(tmp_path), "dim": 8, "alpha": 16}}
    peft.LoraConfig(**{"r": 8, "lora_alpha": 16, **written}).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=f"{key}: {tmp_path} has no adapter_model.safetensors"):
        sft(**settings)
    (tmp_path / "adapter_model.safetensors").touch()
    if expected is None:
        sft(**settings)
        return
    with pytest.raises(ConfigError) as raised:
        sft(**settings)
    assert f"{key}: {tmp_path}/{expected}" in str(raised.value)


MOE = {
    "new_model": {"characters": "01", "config": {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4}}
}
LATENT = {"new_model": {"characters": "01", "config": {"model_type": "deepseek_v3"}}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"peft": {}}, 'but adapters of routed experts are not built: leave them out with ["*.mlp.experts.*"]'),
        ({"peft": {"target_modules": ["*.linear_fc2"]}}, "but adapters of routed experts are not built"),
        ({"lora": {"dropout": 0.1}}, "lora_cfg.dropout: 0.1, but adapters of routed experts drop nothing: leave them"),
        (
            {"lora": {}, "generation": {"backend": "vllm", "adapter_sets": 2}},
            "adapter_sets: 2, but vLLM has the adapters of several versions only of linear layers, not of routed "
            "experts (model.layers.0.mlp.experts.gate_up_proj)",
        ),
    ],
)
def test_adapters_of_routed_experts_are_refused_where_none_are_built(settings: dict[str, Any], expected: str) -> None:
    policy = {"generation": settings["generation"]} if "generation" in settings else {}
    with pytest.raises(ConfigError) as raised:
        sft(settings.get("lora"), settings.get("peft"), **MOE, **policy)
    assert expected in str(raised.value)


FUSED = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize(
    ("settings", "expected", "ranks"),
    [
        ({"match_all_linear": True}, [*LAYERS, *FUSED], (2, 1)),
        ({"target_modules": ("all-linear",)}, [*LAYERS, *FUSED], (2, 1)),
        ({"target_modules": ("gate_proj", "up_proj", "down_proj")}, [LAYERS[2], LAYERS[6], *FUSED], (2, 1)),
        ({"target_modules": ("w1", "w2", "w3")}, FUSED, (2, 1)),
        ({"target_modules": ("*.experts.gate_up_proj",)}, FUSED[::2], (1, 1)),
        ({"target_modules": ("*.layers.1.mlp.experts.*",)}, FUSED[2:], (2, 1)),
        ({"target_modules": ("*_proj",), "exclude_modules": ("*.mlp.*",)}, [LAYERS[i] for i in (0, 1, 4, 5)], (2, 1)),
        ({"target_modules": ("q_proj", "down_proj")}, [LAYERS[0], LAYERS[4], *FUSED[1::2]], (1, 1)),
    ],
)
def test_experts_are_named_like_layers_or_by_their_projections(
    settings: dict[str, Any], expected: list[str], ranks: tuple[int, int]
) -> None:
    adapters = LoraCfg(enabled=True, **{"match_all_linear": False, **settings})
    assert choose_layers(LAYERS, adapters, "lora", FUSED) == expected
    takes = [name for name in FUSED[2:] if name in expected]
    for name, rank in zip(FUSED[2:], ranks, strict=True):
        assert name not in takes or count_projections(name, adapters) == rank


@pytest.mark.parametrize(
    "settings", [{"target_modules": ("gate_proj",)}, {"exclude_modules": ("up_proj",)}], ids=["one", "all but one"]
)
def test_half_of_a_fused_parameter_is_refused_as_by_peft(settings: dict[str, Any]) -> None:
    half = LoraCfg(enabled=True, **{"match_all_linear": "exclude_modules" in settings, **settings})
    with pytest.raises(ConfigError, match="adapters of gate_proj and none of up_proj, but in model"):
        choose_layers(LAYERS, half, "lora", FUSED)


@pytest.mark.parametrize(
    ("lora", "peft"),
    [
        ({"exclude_modules": ["*.mlp.experts.*"]}, None),
        ({"match_all_linear": False, "target_modules": ["q_proj", "*.shared_experts.*"]}, None),
        (None, {"exclude_modules": ["*.mlp.experts.*"]}),
        (None, {"target_modules": ["linear_qkv", "linear_proj"]}),
    ],
)
def test_what_lies_beside_routed_experts_has_adapters(lora: dict[str, Any] | None, peft: dict[str, Any] | None) -> None:
    said = [line for line in notices(sft(lora, peft, **MOE)) if "routed experts have no adapters" in line]
    assert len(said) == (peft is None)
    assert not [line for line in notices(sft(lora, peft)) if "experts" in line]
    assert not [line for line in notices(sft({}, **MOE)) if "experts" in line]


def test_adapters_of_latent_attention_are_refused_with_the_list_of_what_has_some() -> None:
    with pytest.raises(
        ConfigError, match=r"peft.enabled: true, but Megatron-Core trains adapters of llama, .*phi3"
    ) as e:
        sft(peft={}, **LATENT)
    assert "not of deepseek_v3 with its latent attention" in str(e.value)
    assert sft(**LATENT).policy.adapters is not None


@pytest.mark.parametrize(
    ("algorithm", "section"), [("distillation", "teacher"), ("off_policy_distillation", "teacher"), ("ppo", "value")]
)
def test_a_model_beside_the_policy_is_no_folder_of_adapters(algorithm: str, section: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "policy": {"model_name": "model"},
        section: {"model_name": str(tmp_path)},
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
    }
    with pytest.raises(ConfigError, match=rf"{section}.model_name: .* holds adapters, not a model: `coord"):
        build_config(settings)


def test_the_head_of_a_reward_model_is_not_left_as_it_is() -> None:
    settings: dict[str, Any] = {
        "algorithm": "rm",
        "policy": {"model_name": "model", "dtensor_cfg": {"lora_cfg": {"enabled": True}}},
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum", "rejected_template": "0"},
    }
    why = r"lora_cfg.enabled: true, but rm trains a head, which adapters leave unchanged"
    with pytest.raises(ConfigError, match=why):
        build_config(settings)


def test_what_is_taken_and_does_nothing_is_said() -> None:
    said = notices(sft({"use_triton": True, "target_modules": ["q_proj"]}))
    key = "policy.dtensor_cfg.lora_cfg"
    assert f"{key}.use_triton (true) has no effect: torch multiplies" in said
    assert f'{key}.target_modules (["q_proj"]) has no effect: {key}.match_all_linear is true' in said
    assert sft(peft={"lora_dtype": "None"}).policy.adapters is not None
    assert sft({"enabled": False}).policy.adapters is None
