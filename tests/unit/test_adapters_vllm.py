"""vLLM's shards, beside parameters filled by hand as its weight loaders fill them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters_harness import (
    DEEPSEEK,
    GEMMA3,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    Weights,
    assert_holds,
    assert_same_shards,
    model_of,
    replicas,
    weights_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import HostNames, list_vllm_stages
from tandem.refit.adapters.vllm import Vllm, VllmCoordinates

BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}
CASES = {
    "one rank": (QWEN3, Vllm()),
    "one rank with latent attention": (DEEPSEEK, Vllm()),
    "TP": (LLAMA, Vllm(tp=4)),
    "TP with biases": (BIASED, Vllm(tp=2)),
    "TP beyond the key heads": (QWEN3, Vllm(tp=8)),
    "TP beyond the key heads with biases": (QWEN2, Vllm(tp=8)),
    "a vocabulary whose last rank has only padding": (LLAMA | {"vocab_size": 65}, Vllm(tp=8)),
    "PP": (LLAMA, Vllm(tp=2, pp=2)),
    "PP, uneven, of a tied model": (QWEN3, Vllm(pp=3)),
    "TP of experts": (QWEN3_MOE, Vllm(tp=4)),
    "TP of experts over data parallel ranks": (QWEN3_MOE, Vllm(tp=2, dp=4)),
    "EP": (QWEN3_MOE, Vllm(tp=4, expert_parallel=True)),
    "EP over data parallel ranks": (QWEN3_MOE, Vllm(dp=4, expert_parallel=True)),
    "EP, uneven": (QWEN3_MOE, Vllm(dp=3, expert_parallel=True)),
    "latent attention": (DEEPSEEK, Vllm(tp=4)),
    "latent attention, EP, PP and DP": (DEEPSEEK, Vllm(tp=2, pp=2, dp=2, expert_parallel=True)),
    "latent attention without query rank": (DEEPSEEK | {"q_lora_rank": None}, Vllm(tp=2)),
    "four norms": (GEMMA3, Vllm(tp=2)),
    "shared experts, and heads with norms": (GLM4_MOE, Vllm(tp=2, dp=2, expert_parallel=True)),
    "several engines": (QWEN3_MOE, Vllm(tp=2, pp=2, replicas=2, experts_module="mlp.experts")),
}


class Loader:
    """Parameters of a rank, allocated and then filled tensor by tensor."""

    def __init__(self, config: dict[str, Any], sizes: Vllm, at: VllmCoordinates, weights: Weights) -> None:
        self.config, self.sizes, self.at, self.weights = config, sizes, at, weights
        self.parameters: Weights = {}

    def load(self) -> Weights:
        layers = list_vllm_stages(self.config["num_hidden_layers"], self.sizes.pp)[self.at.pp]
        is_first, is_last = self.at.pp == 0, self.at.pp == self.sizes.pp - 1
        for name, weight in self.weights.items():
            if name.startswith("model.layers."):
                if int(name.split(".")[2]) in layers:
                    self.load_of_layer(name, weight)
            elif name == "model.embed_tokens.weight":
                if is_first or (is_last and self.config["tie_word_embeddings"]):
                    self.load_vocabulary(name, weight)
            elif is_last and name == "lm_head.weight":
                self.load_vocabulary(name, weight)
            elif is_last:
                self.parameters[name] = weight
        return self.parameters

    def load_vocabulary(self, name: str, weight: torch.Tensor) -> None:
        num_padded = (len(weight) + 63) // 64 * 64
        per_rank = num_padded // self.sizes.tp
        start = self.at.tp * per_rank
        parameter = weight.new_zeros(per_rank, weight.shape[1])
        held = weight[start : min(start + per_rank, len(weight))]
        parameter[: len(held)].copy_(held)
        self.parameters[name] = parameter

    def load_of_layer(self, name: str, weight: torch.Tensor) -> None:
        if ".mlp.experts." in name:
            self.load_expert(name, weight)
            return
        for part in ("q", "k", "v"):
            if f".self_attn.{part}_proj." in name and "deepseek" not in self.config["model_type"]:
                self.load_heads(name.replace(f"{part}_proj", "qkv_proj"), part, weight)
                return
        for index, part in enumerate(("gate", "up")):
            if f".{part}_proj." in name:
                self.load_merged(name.replace(f"{part}_proj", "gate_up_proj"), index, weight)
                return
        if ".q_a_proj." in name or (".kv_a_proj_with_mqa." in name and self.config["q_lora_rank"] is not None):
            self.load_down(name, weight)
        elif name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")):
            self.parameters[name] = self.narrow(weight, 0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            self.parameters[name] = self.narrow(weight, 1, self.is_whole(name))
        else:
            self.parameters[name] = weight

    def is_whole(self, name: str) -> bool:
        """Shared experts are repeated where a batch is spread over the tensor parallel ranks (sequence parallel)."""
        spreads = self.sizes.expert_parallel and self.sizes.dp > 1 and self.sizes.tp > 1
        return "shared_experts" in name and spreads

    def narrow(self, weight: torch.Tensor, dim: int, is_whole: bool = False) -> torch.Tensor:
        if is_whole:
            return weight
        n = weight.shape[dim] // self.sizes.tp
        return weight.narrow(dim, self.at.tp * n, n)

    def load_heads(self, name: str, part: str, weight: torch.Tensor) -> None:
        """`QKVParallelLinear.weight_loader`."""
        tp, kv, queries = self.sizes.tp, self.config["num_key_value_heads"], self.config["num_attention_heads"]
        head = self.config.get("head_dim", self.config["hidden_size"] // queries)
        num_heads = queries // tp
        num_kv_heads, num_replicas = (1, tp // kv) if tp >= kv else (kv // tp, 1)
        sizes = {"q": num_heads * head, "k": num_kv_heads * head, "v": num_kv_heads * head}
        offsets = {"q": 0, "k": sizes["q"], "v": sizes["q"] + sizes["k"]}
        empty = weight.new_zeros(sum(sizes.values()), *weight.shape[1:])
        parameter = self.parameters.setdefault(name, empty)
        shard = self.at.tp if part == "q" else self.at.tp // num_replicas
        held = weight.narrow(0, shard * sizes[part], sizes[part])
        parameter.narrow(0, offsets[part], sizes[part]).copy_(held)

    def load_merged(self, name: str, index: int, weight: torch.Tensor) -> None:
        """`MergedColumnParallelLinear.weight_loader`."""
        held = self.narrow(weight, 0, self.is_whole(name))
        empty = weight.new_zeros(2 * len(held), *weight.shape[1:])
        self.parameters.setdefault(name, empty).narrow(0, index * len(held), len(held)).copy_(held)

    def load_down(self, name: str, weight: torch.Tensor) -> None:
        """`DeepSeekV2FusedQkvAProjLinear`, which is not cut."""
        query, keys = self.config["q_lora_rank"], self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"]
        start = 0 if "q_a_proj" in name else query
        name = name.replace("kv_a_proj_with_mqa", "fused_qkv_a_proj").replace("q_a_proj", "fused_qkv_a_proj")
        empty = weight.new_zeros(query + keys, weight.shape[1])
        self.parameters.setdefault(name, empty).narrow(0, start, len(weight)).copy_(weight)

    def load_expert(self, name: str, weight: torch.Tensor) -> None:
        """`RoutedExperts.weight_loader` after `determine_expert_map`."""
        prefix, _, rest = name.partition(".experts.")
        expert, part = int(rest.split(".")[0]), rest.split(".")[1]
        num_ranks, num_experts = self.sizes.dp * self.sizes.tp, 8
        tp, first, count = num_ranks, 0, num_experts
        if self.sizes.expert_parallel:
            base, remainder = divmod(num_experts, num_ranks)
            count = base + 1 if self.at.expert < remainder else base
            tp, first = 1, self.at.expert * base + min(self.at.expert, remainder)
        if not first <= expert < first + count:
            return
        module = f"{prefix.removesuffix('.mlp')}.{self.sizes.experts_module}"
        rank, width = (self.at.expert, weight.shape[1 if part == "down_proj" else 0] // tp) if tp > 1 else (0, None)
        if part == "down_proj":
            held = weight if width is None else weight.narrow(1, rank * width, width)
            parameter = self.parameters.setdefault(f"{module}.w2_weight", weight.new_zeros(count, *held.shape))
            parameter[expert - first].copy_(held)
            return
        held = weight if width is None else weight.narrow(0, rank * width, width)
        empty = weight.new_zeros(count, 2 * len(held), weight.shape[1])
        parameter = self.parameters.setdefault(f"{module}.w13_weight", empty)
        start = 0 if part == "gate_proj" else len(held)
        parameter[expert - first].narrow(0, start, len(held)).copy_(held)


@pytest.mark.parametrize(("config", "sizes"), CASES.values(), ids=CASES)
def test_every_parameter_is_as_vllm_loads_it(config: dict[str, Any], sizes: Vllm) -> None:
    model = model_of(config)
    weights = weights_of(model)
    for rank, layout in enumerate(sizes.layouts(model, HostNames("here"))):
        expected = Loader(config, sizes, sizes.coordinates(rank), weights).load()
        assert_holds(layout, weights, expected)
        assert {storage.name for storage in layout.storages} == set(expected), "those that are only padding as well"


@pytest.mark.parametrize(("config", "sizes"), CASES.values(), ids=CASES)
def test_every_element_is_held_as_often_as_it_is_read(config: dict[str, Any], sizes: Vllm) -> None:
    model = model_of(config)
    engines = sizes.dp * sizes.replicas
    cut = ["embed_tokens", "lm_head", "gate_proj", "up_proj", "down_proj.weight", "o_proj.weight"]
    cut += [".q_proj", "q_b_proj", "kv_b_proj"]
    for name, counts in replicas(sizes.layouts(model, HostNames("here"))).items():
        expected = engines * (1 if any(part in name for part in cut) else sizes.tp)
        if ".k_proj" in name or ".v_proj" in name:
            expected = engines * max(1, sizes.tp // config["num_key_value_heads"])
        if "shared_experts" in name and sizes.repeats_shared_experts:
            expected = engines * sizes.tp
        if ".experts." in name:
            expected = sizes.replicas
        if "embed_tokens" in name and config["tie_word_embeddings"] and sizes.pp > 1:
            expected *= 2
        assert counts == {expected}, name


def test_ranks_stand_where_vllm_puts_them() -> None:
    sizes = Vllm(tp=2, pp=2, dp=2, replicas=2)
    places = [sizes.coordinates(rank) for rank in range(sizes.num_ranks)]
    # parallel_state.py: arange(world_size).reshape(external_dp, dp, pp, pcp, tp).
    ranks = torch.arange(16).reshape(2, 2, 2, 2)
    for replica in range(2):
        for dp in range(2):
            for pp in range(2):
                for tp in range(2):
                    assert places[int(ranks[replica, dp, pp, tp])] == VllmCoordinates(tp, pp, dp * 2 + tp)


@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [(8, [2, 2, 2, 2]), (9, [2, 2, 3, 2]), (10, [2, 3, 3, 2]), (11, [3, 3, 3, 2]), (61, [15, 15, 16, 15])],
)
def test_stages_have_the_layers_of_get_pp_indices(num_layers: int, counts: list[int]) -> None:
    found = list_vllm_stages(num_layers, 4)
    assert [len(layers) for layers in found] == counts
    assert [layer for layers in found for layer in layers] == list(range(num_layers))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.builds(
        Vllm,
        tp=st.sampled_from([1, 2, 4]),
        pp=st.integers(1, 4),
        dp=st.sampled_from([1, 2]),
        replicas=st.sampled_from([1, 2]),
        expert_parallel=st.booleans(),
    ),
    config=st.sampled_from([QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK]),
    num_layers=st.integers(4, 9),
    data=st.data(),
)
def test_any_sizes_put_parameters_where_vllm_does(
    sizes: Vllm, config: dict[str, Any], num_layers: int, data: st.DataObject
) -> None:
    config = config | {"num_hidden_layers": num_layers}
    rank = data.draw(st.integers(0, sizes.num_ranks - 1))
    model = model_of(config)
    weights = weights_of(model)
    expected = Loader(config, sizes, sizes.coordinates(rank), weights).load()
    assert_holds(sizes.layout(model, rank, "here"), weights, expected)


BLOCKED = DEEPSEEK | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
}
FLOAT8 = {
    "latent attention": (BLOCKED, Vllm(tp=2)),
    "EP": (BLOCKED, Vllm(tp=2, dp=2, expert_parallel=True)),
    "heads": (QWEN3_MOE | {"hidden_size": 32, "head_dim": 4}, Vllm(tp=2, pp=2)),
}


@pytest.mark.parametrize(("config", "sizes"), FLOAT8.values(), ids=FLOAT8)
def test_scales_lie_beside_the_blocks_that_they_scale(config: dict[str, Any], sizes: Vllm) -> None:
    # Each scale is one more than the first element of its block in the tensor, so it says which block it is of: a
    # parameter's scales must be its own elements at the blocks' corners.
    model = model_of(config).quantised((4, 4), "int32")
    weights = weights_of(model_of(config))
    for tensor in model.tensors:
        if tensor.scales:
            weights[tensor.scales] = weights[tensor.name][::4, ::4].to(torch.float32) + 1
    for rank, layout in enumerate(sizes.layouts(model, HostNames("here"))):
        plain = {name: weights[name] for name in model_of(config).index}
        expected = Loader(config, sizes, sizes.coordinates(rank), plain).load()
        scaled = {
            name: parameter[..., ::4, ::4].to(torch.float32) + 1
            for name, parameter in expected.items()
            if name.endswith(("_proj.weight", "_with_mqa.weight", "w13_weight", "w2_weight"))
        }
        assert scaled
        assert_holds(layout, weights, expected | {f"{name}_scale_inv": scales for name, scales in scaled.items()})


def test_sizes_that_cannot_be_are_refused() -> None:
    model = make_shape(LLAMA)
    with pytest.raises(RefitError, match="8 query heads and 4 key heads cannot be split over 3 ranks"):
        Vllm(tp=3).layout(model_of(LLAMA | {"vocab_size": 192}), 0, "here")
    with pytest.raises(RefitError, match="192 elements cannot be split evenly over 5 ranks"):
        Vllm(tp=5).layout(model, 0, "here")
    with pytest.raises(RefitError, match=r"Vllm has no place for 12 tensors, the first is .*q_a_proj.bias"):
        Vllm().layouts(model_of(DEEPSEEK | {"attention_bias": True}), HostNames("here"))
    with pytest.raises(RefitError, match=r"q_proj.weight\[0:2, 0:16\] does not end where its blocks of 4 elements do"):
        Vllm(tp=8).layout(model.quantised((4, 4)), 0, "here")


def test_a_checkpoint_that_fuses_layers_is_cut_as_one_that_does_not() -> None:
    assert_same_shards([Vllm(tp=4), Vllm(tp=8), Vllm(tp=2, pp=2)])


def test_an_architecture_whose_shards_are_not_known_is_refused() -> None:
    with pytest.raises(RefitError, match=r"it is unknown how vLLM shards a gpt_oss; known are llama, .*glm4_moe, "):
        Vllm().layout(model_of(GPT_OSS), 0, "here")
