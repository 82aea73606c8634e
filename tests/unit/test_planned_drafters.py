"""Memory of drafters in engines, as ``coordinator plan`` says, against closed forms and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.config import Config, load_config
from tandem.config.models.families import MTP_DRAFTS
from tandem.coordinator.cli import main
from tandem.coordinator.forecast.drafters import DrafterForecast, forecast_drafter
from tandem.coordinator.forecast.sides import model_shape, sides
from tandem.coordinator.forecast.transfers import predict
from tests.harness.runs.running import merged, write_config
from tests.harness.trainers import megatron_harness
from tests.harness.trainers.trainer_harness import add_mtp_layers, make_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "models"
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
LENGTH = 64


def make_config(
    folder: Path, speculation: dict[str, Any] | None, over: dict[str, Any] | None = None, **vllm_cfg: Any
) -> Config:
    """Return the configuration of a run of the folder's model with vLLM."""
    generation = {
        "backend": "vllm",
        "vllm_cfg": {"precision": "bfloat16", "max_model_len": LENGTH, **vllm_cfg},
        "vllm_kwargs": {"speculative_config": speculation},
    }
    lengths = {"max_total_sequence_length": LENGTH, "sequence_packing": {"enabled": False}}
    policy = {"new_model": None, "model_name": str(folder), **lengths, "generation": generation}
    return load_config(write_config(merged({"policy": policy}, over or {})), to_run=False)


def plan(config: Config) -> DrafterForecast | None:
    model = model_shape(config)
    assert not isinstance(model, str), model
    return forecast_drafter(config, model)


def find_drafter(config: Config) -> DrafterForecast:
    drafter = plan(config)
    assert drafter is not None
    return drafter


def make_with_layers(folder: Path, architecture: str, num: int) -> int:
    """Write a model with these layers; return the number of their parameters, without copies of the policy's."""
    if architecture == "deepseek_v3":
        megatron_harness.make_checkpoint(folder, architecture)
    else:
        make_model(folder, architecture)
    names = add_mtp_layers(folder, num)
    if architecture == "deepseek_v3":  # what vLLM reads of its files
        path = folder / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
        )
    tensors = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    return sum(tensors[name].numel() for name in names if not name.endswith(copies))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", MTP_DRAFTS)
def test_layers_of_the_policys_own_checkpoint(architecture: str, ranks: int, tmp_path: Path) -> None:
    num = 2 if architecture in ("deepseek_v3", "glm4_moe") else 1
    num_parameters = make_with_layers(tmp_path / "model", architecture, num)
    drafter = find_drafter(make_config(tmp_path / "model", MTP, tensor_parallel_size=ranks))
    assert drafter.num_parameters == num_parameters
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    num_in_float32 = num * config.get("n_routed_experts", 0)  # what routers add to their scores
    whole = 2 * (num_parameters + num_in_float32)
    assert drafter.weights == whole if ranks == 1 else whole / 2 <= drafter.weights < whole
    per_token = 2 * config["num_key_value_heads"] * config.get("head_dim", 0)
    if architecture == "deepseek_v3":
        per_token = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert drafter.cache is not None
    assert [layers.num_layers for layers in drafter.cache.layers] == [num]
    assert drafter.cache.num_bytes == num * 2 * per_token * LENGTH


def test_the_layer_of_deepseek_v3_has_the_size_that_its_authors_say() -> None:
    """``README_WEIGHTS.md`` of DeepSeek-V3: 11.5 billion parameters of its own, beside embedding and output layer."""
    hidden, q_rank, kv_rank, rope, num_heads, num_experts = 7168, 1536, 512, 64, 128, 256
    cut = (num_experts + 1) * 3 * hidden * 2048
    cut += num_heads * ((128 + rope) * q_rank + (128 + 128) * kv_rank + 128 * hidden)
    whole = hidden * (q_rank + kv_rank + rope) + q_rank + kv_rank + num_experts * hidden + 2 * hidden * hidden
    whole += 5 * hidden
    tp = 16
    drafter = find_drafter(make_config(EXAMPLES / "DeepSeek-V3", MTP, tensor_parallel_size=tp))
    assert drafter.num_parameters == cut + whole + num_experts
    assert drafter.num_parameters == pytest.approx(11.5e9, rel=0.01)
    assert drafter.weights == 2 * (cut // tp + whole) + 4 * num_experts


def test_ranks_that_outnumber_key_heads_share_one(tmp_path: Path) -> None:
    make_with_layers(tmp_path / "model", "glm4_moe", 1)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    head = 2 * config["hidden_size"] * config["head_dim"]  # bytes of its rows of a projection
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    two, four = (find_drafter(make_config(tmp_path / "model", MTP, tensor_parallel_size=size)) for size in (2, 4))
    num_experts = config["n_routed_experts"] + config["n_shared_experts"]
    feed_forward = 3 * 2 * config["hidden_size"] * config["moe_intermediate_size"] * num_experts
    queries = 4 * (2 * head + 2 * config["head_dim"])  # with biases, and the output projection
    assert two.weights - four.weights == (feed_forward + queries) / 4, "keys and values are as many on each"


def test_experts_are_whole_where_ranks_share_them_out(tmp_path: Path) -> None:
    make_with_layers(tmp_path / "model", "glm4_moe", 1)
    cut, shared = (
        find_drafter(make_config(tmp_path / "model", MTP, tensor_parallel_size=2, expert_parallel_size=size))
        for size in (1, 2)
    )
    assert cut.weights == shared.weights


def test_a_draft_model_is_another_model() -> None:
    """Of the engine's element type, cut over the ranks as the policy is."""
    speculation = {"method": "draft_model", "model": str(EXAMPLES / "Llama-3.1-8B"), "num_speculative_tokens": 2}
    drafter = find_drafter(make_config(EXAMPLES / "Llama-3.1-70B", speculation, tensor_parallel_size=4))
    hidden, num_layers, vocabulary = 4096, 32, 128256
    cut = num_layers * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * 14336) + 2 * vocabulary * hidden
    assert drafter.weights == 2 * (cut // 4 + (2 * num_layers + 1) * hidden)
    assert drafter.cache is not None
    assert drafter.cache.num_bytes == num_layers * 2 * 2 * 1024 * LENGTH


def test_a_draft_model_that_is_elsewhere_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for method, reason in (("draft_model", "no config.json of it is here"), ("eagle3", "no files of nowhere are here")):
        speculation = {"method": method, "model": "nowhere", "num_speculative_tokens": 2}
        config = make_config(EXAMPLES / "Llama-3.1-8B", speculation)
        assert find_drafter(config) == DrafterForecast(method=method, unknown=reason)
        assert main(["plan", "config.yaml"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"the drafter ({method}): weights are unknown, because {reason}" in text


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_nothing_is_counted_where_nothing_has_weights(speculation: dict[str, Any] | None) -> None:
    assert plan(make_config(EXAMPLES / "Llama-3.1-8B", speculation)) is None


def test_what_is_printed_and_given_to_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_config(EXAMPLES / "DeepSeek-V3", MTP, {"policy": {"precision": "bfloat16"}}, tensor_parallel_size=8)
    assert main(["plan", "config.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["drafter"]
    assert (found["method"], found["num_parameters"]) == ("mtp", 11_610_068_224)
    assert main(["plan", "config.yaml"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "the drafter (mtp): 11,610.1 million parameters, "
        f"{found['weights'] / 1e9:,.3g} GB of weights an engine rank; it keeps 0.07373 MB of 64 tokens: "
        "0.0737 MB in each of 1 full_attention layers"
    ) in text


@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_next"])
def test_refits_bring_what_is_trained(architecture: str, tmp_path: Path) -> None:
    make_with_layers(tmp_path / "model", architecture, 1)
    over = {"policy": {"mtp": {"num_layers": 1}}, "cluster": {"trainers": 2, "launch": {"trainers": 2}}}
    received = []
    for speculation in (None, MTP):
        config = make_config(tmp_path / "model", speculation, over, tensor_parallel_size=2)
        model = model_shape(config)
        assert not isinstance(model, str)
        received.append(max(predict(config, *sides(config, model)).survey.ingress.values()))
    assert received[1] - received[0] == pytest.approx(find_drafter(config).weights, rel=0.02)
