"""Megatron-Core's shards, beside arrays cut and joined as its checkpoint converters do with whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters_harness import (
    DEEPSEEK,
    GEMMA3,
    GLM4_MOE,
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
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.common.errors import RefitError
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.adapters.megatron import Megatron, MegatronCoordinates

BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}
CASES = {
    "one rank": (QWEN3, Megatron()),
    "one rank with experts": (QWEN3_MOE, Megatron()),
    "one rank with latent attention": (DEEPSEEK, Megatron()),
    "TP": (LLAMA, Megatron(tp=4)),
    "TP with biases": (BIASED, Megatron(tp=2)),
    "TP of a tied model": (QWEN2, Megatron(tp=4, vocabulary_divisor=1)),
    "TP beyond the key heads": (LLAMA, Megatron(tp=8)),
    "local layers": (QWEN3, Megatron(tp=2, transformer_engine=False)),
    "PP": (LLAMA, Megatron(pp=4)),
    "PP of a tied model": (QWEN3, Megatron(tp=2, pp=2)),
    "PP with few layers at the ends": (
        LLAMA,
        Megatron(pp=4, num_layers_in_first_stage=1, num_layers_in_last_stage=3),
    ),
    "virtual PP": (QWEN2, Megatron(tp=2, pp=2, vpp=2)),
    "virtual PP, uneven": (LLAMA, Megatron(pp=3, vpp=2, num_layers_in_first_stage=2, num_layers_in_last_stage=4)),
    "DP and CP": (LLAMA, Megatron(tp=2, cp=2, dp=2)),
    "EP": (QWEN3_MOE, Megatron(dp=4, ep=4)),
    "EP × ETP": (QWEN3_MOE, Megatron(tp=2, dp=4, ep=2, etp=2)),
    "EP without ETP": (QWEN3_MOE, Megatron(tp=2, dp=2, pp=2, ep=4, etp=1)),
    "EP over CP": (QWEN3_MOE, Megatron(tp=1, cp=2, dp=1, ep=2)),
    "one module an expert": (QWEN3_MOE, Megatron(dp=2, ep=2, experts="sequential", transformer_engine=False)),
    "one parameter for all experts": (QWEN3_MOE, Megatron(tp=2, dp=2, ep=2, experts="legacy")),
    "latent attention": (DEEPSEEK, Megatron(tp=2, pp=2, dp=4, ep=4)),
    "latent attention of local layers": (DEEPSEEK, Megatron(tp=2, dp=2, ep=2, etp=1, transformer_engine=False)),
    "latent attention without query rank": (DEEPSEEK | {"q_lora_rank": None}, Megatron(tp=4)),
    "shared experts, and heads with norms": (GLM4_MOE, Megatron(tp=2, dp=2, ep=2, etp=1)),
    "another order of ranks": (QWEN3_MOE, Megatron(tp=2, dp=2, pp=2, ep=2, order="tp-ep-dp-cp-pp")),
}


class Reference:
    """Parameters of a rank, made from whole tensors."""

    def __init__(self, config: dict[str, Any], sizes: Megatron, at: MegatronCoordinates, weights: Weights) -> None:
        self.config, self.sizes, self.at, self.weights = config, sizes, at, weights
        self.parameters: Weights = {}

    def column(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(self.sizes.tp, 0)[self.at.tp]

    def row(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(self.sizes.tp, 1)[self.at.tp]

    def vocabulary(self, weight: torch.Tensor) -> torch.Tensor:
        multiple = self.sizes.vocabulary_divisor * self.sizes.tp
        missing = -len(weight) % multiple
        return self.column(torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]))

    def build(self) -> Weights:
        for chunk in range(self.sizes.vpp):
            module = f"{chunk}." if self.sizes.vpp > 1 else ""
            for local, layer in enumerate(layers_of(self.config["num_hidden_layers"], self.sizes, self.at.pp, chunk)):
                self.layer(f"{module}decoder.layers.{local}.", f"model.layers.{layer}.")
        first, last = ("0.", f"{self.sizes.vpp - 1}.") if self.sizes.vpp > 1 else ("", "")
        embedding = self.vocabulary(self.weights["model.embed_tokens.weight"])
        if self.at.pp == 0:
            self.parameters[first + "embedding.word_embeddings.weight"] = embedding
        if self.at.pp == self.sizes.pp - 1:
            self.parameters[last + "decoder.final_layernorm.weight"] = self.weights["model.norm.weight"]
            if not self.config["tie_word_embeddings"]:
                self.parameters[last + "output_layer.weight"] = self.vocabulary(self.weights["lm_head.weight"])
            elif self.sizes.pp > 1:
                self.parameters[last + "output_layer.weight"] = embedding
        return self.parameters

    def layer(self, here: str, there: str) -> None:
        of, engine = self.weights, self.sizes.transformer_engine
        is_latent = self.config["model_type"] == "deepseek_v3"
        if is_latent:
            self.latent_attention(here + "self_attention.", there + "self_attn.")
        else:
            self.attention(here + "self_attention.", there + "self_attn.")
        self.parameters[here + "self_attention.linear_proj.weight"] = self.row(of[there + "self_attn.o_proj.weight"])
        if there + "self_attn.o_proj.bias" in of:
            self.parameters[here + "self_attention.linear_proj.bias"] = of[there + "self_attn.o_proj.bias"]
        is_sparse = there + "mlp.gate.weight" in of
        norm = "self_attention.linear_qkv.layer_norm_weight" if engine and not is_latent else "input_layernorm.weight"
        self.parameters[here + norm] = of[there + "input_layernorm.weight"]
        norm = "mlp.linear_fc1.layer_norm_weight" if engine and not is_sparse else "pre_mlp_layernorm.weight"
        self.parameters[here + norm] = of[there + "post_attention_layernorm.weight"]
        if is_sparse:
            self.experts(here + "mlp.", there + "mlp.")
        else:
            self.feed_forward(here + "mlp.", there + "mlp.")

    def attention(self, here: str, there: str) -> None:
        of, groups = self.weights, self.config["num_key_value_heads"]
        for kind in ("weight", "bias"):
            if f"{there}q_proj.{kind}" in of:
                q, k, v = (torch.unflatten(of[f"{there}{part}_proj.{kind}"], 0, (groups, -1)) for part in "qkv")
                joined = torch.cat([q, k, v], 1).flatten(0, 1)
                self.parameters[f"{here}linear_qkv.{kind}"] = self.column(joined)
        for part in "qk":
            if f"{there}{part}_norm.weight" in of:
                self.parameters[f"{here}{part}_layernorm.weight"] = of[f"{there}{part}_norm.weight"]

    def latent_attention(self, here: str, there: str) -> None:
        of, engine = self.weights, self.sizes.transformer_engine
        parts = [("kv", "kv_a_proj_with_mqa")]
        if self.config["q_lora_rank"] is None:
            self.parameters[here + "linear_q_proj.weight"] = self.column(of[there + "q_proj.weight"])
        else:
            parts.append(("q", "q_a_proj"))
        for part, name in parts:
            self.parameters[f"{here}linear_{part}_down_proj.weight"] = of[f"{there}{name}.weight"]
            self.parameters[f"{here}linear_{part}_up_proj.weight"] = self.column(of[f"{there}{part}_b_proj.weight"])
            norm = f"linear_{part}_up_proj.layer_norm_weight" if engine else f"{part}_layernorm.weight"
            self.parameters[here + norm] = of[f"{there}{part}_a_layernorm.weight"]

    def feed_forward(self, here: str, there: str) -> None:
        of = self.weights
        for kind in ("weight", "bias"):
            if f"{there}gate_proj.{kind}" in of:
                gate_up = [self.column(of[f"{there}{part}_proj.{kind}"]) for part in ("gate", "up")]
                self.parameters[f"{here}linear_fc1.{kind}"] = torch.cat(gate_up)
        self.parameters[here + "linear_fc2.weight"] = self.row(of[there + "down_proj.weight"])
        if there + "down_proj.bias" in of:
            self.parameters[here + "linear_fc2.bias"] = of[there + "down_proj.bias"]

    def experts(self, here: str, there: str) -> None:
        of, at, etp = self.weights, self.at, self.sizes.etp or self.sizes.tp
        self.parameters[here + "router.weight"] = of[there + "gate.weight"]
        if there + "gate.e_score_correction_bias" in of:
            self.parameters[here + "router.expert_bias"] = of[there + "gate.e_score_correction_bias"]
            self.feed_forward(here + "shared_experts.", there + "shared_experts.")
        count = 8 // self.sizes.ep
        first, second = [], []
        for expert in range(at.ep * count, (at.ep + 1) * count):
            gate, up, down = (of[f"{there}experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            first.append(torch.cat([gate.chunk(etp)[at.etp], up.chunk(etp)[at.etp]]))
            second.append(down.chunk(etp, 1)[at.etp])
        if self.sizes.experts == "legacy":
            self.parameters[here + "experts.weight1"] = torch.stack([weight.T for weight in first])
            self.parameters[here + "experts.weight2"] = torch.stack([weight.T for weight in second])
            return
        for local, (fc1, fc2) in enumerate(zip(first, second, strict=True)):
            if self.sizes.experts == "sequential":
                names = [f"experts.local_experts.{local}.linear_fc{n}.weight" for n in (1, 2)]
            else:
                names = [f"experts.linear_fc{n}.weight{local}" for n in (1, 2)]
            self.parameters |= {here + names[0]: fc1, here + names[1]: fc2}


def layers_of(num_layers: int, sizes: Megatron, pp: int, chunk: int) -> range:
    """`get_transformer_layer_offset` and `get_num_layers_to_build` of Megatron-Core, for the cases above."""
    first, last = sizes.num_layers_in_first_stage, sizes.num_layers_in_last_stage
    uneven = (first is not None) + (last is not None)
    middle_layers, middle_stages = num_layers - (first or 0) - (last or 0), sizes.pp - uneven
    per_stage = middle_layers // middle_stages
    mine = first if pp == 0 and first is not None else last if pp == sizes.pp - 1 and last is not None else per_stage
    middle_rank = pp if first is None else pp - 1
    round_of_all = (first or 0) // sizes.vpp + middle_layers // sizes.vpp + (last or 0) // sizes.vpp
    offset = chunk * round_of_all
    if pp > 0:
        offset += (first or 0) // sizes.vpp + middle_rank * (middle_layers // sizes.vpp // middle_stages)
    return range(offset, offset + mine // sizes.vpp)


@pytest.mark.parametrize(("config", "sizes"), CASES.values(), ids=CASES)
def test_every_parameter_is_that_of_megatron(config: dict[str, Any], sizes: Megatron) -> None:
    model = model_of(config)
    weights = weights_of(model)
    seen = set()
    for rank, layout in enumerate(sizes.layouts(model, HostNames("here"))):
        at = sizes.coordinates(rank)
        if at not in seen:
            seen.add(at)
            assert_holds(layout, weights, Reference(config, sizes, at, weights).build())


@pytest.mark.parametrize(("config", "sizes"), CASES.values(), ids=CASES)
def test_every_element_is_held_by_each_replica_once(config: dict[str, Any], sizes: Megatron) -> None:
    model = model_of(config)
    etp = sizes.etp or sizes.tp
    expert_dp = sizes.num_ranks // (etp * sizes.ep * sizes.pp)
    cut = ["embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj.weight", "q_b_proj", "kv_b_proj"]
    cut += ["gate_proj", "up_proj", "down_proj.weight"]
    for name, counts in replicas(sizes.layouts(model, HostNames("here"))).items():
        is_cut = any(part in name for part in cut)
        expected = sizes.dp * sizes.cp * (1 if is_cut else sizes.tp)
        if ".experts." in name:
            expected = expert_dp
        if "embed_tokens" in name and config["tie_word_embeddings"] and sizes.pp > 1:
            expected *= 2
        assert counts == {expected}, name


@pytest.mark.parametrize(
    ("sizes", "tp", "pp", "ep", "etp"),
    [
        # Rank by rank; the groups of RankGenerator in Megatron-Core for the same sizes say the same.
        (Megatron(tp=2, pp=2, dp=2), "01010101", "00001111", "00000000", "01010101"),
        (Megatron(tp=2, cp=2, dp=2), "01010101", "00000000", "00000000", "01010101"),
        (Megatron(tp=2, pp=2, dp=2, ep=2), "01010101", "00001111", "00110011", "01010101"),
        (Megatron(tp=2, pp=2, dp=2, ep=2, etp=1), "01010101", "00001111", "01010101", "00000000"),
        (Megatron(tp=2, dp=4, ep=2, etp=2), "01010101", "00000000", "00110011", "01010101"),
        (Megatron(cp=2, dp=4, ep=4), "00000000", "00000000", "01230123", "00000000"),
        (Megatron(tp=2, dp=4, ep=4, etp=2), "01010101", "00000000", "00112233", "01010101"),
    ],
)
def test_ranks_stand_where_megatron_puts_them(sizes: Megatron, tp: str, pp: str, ep: str, etp: str) -> None:
    places = [sizes.coordinates(rank) for rank in range(sizes.num_ranks)]
    for axis, expected in {"tp": tp, "pp": pp, "ep": ep, "etp": etp}.items():
        assert "".join(str(getattr(place, axis)) for place in places) == expected, axis


POWERS = st.sampled_from([1, 2, 4])


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.builds(
        Megatron,
        tp=POWERS,
        pp=st.sampled_from([1, 2]),
        cp=st.sampled_from([1, 2]),
        dp=POWERS,
        ep=POWERS,
        etp=st.sampled_from([None, 1, 2]),
        vpp=st.sampled_from([1, 2]),
        vocabulary_divisor=st.sampled_from([1, 16]),
        transformer_engine=st.booleans(),
        experts=st.sampled_from(["grouped", "sequential", "legacy"]),
    ),
    config=st.sampled_from([QWEN3_MOE, DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 1}]),
    data=st.data(),
)
def test_any_sizes_put_parameters_where_megatron_does(
    sizes: Megatron, config: dict[str, Any], data: st.DataObject
) -> None:
    assume(sizes.num_ranks % (sizes.expert_tensor_size * sizes.ep * sizes.pp) == 0)
    rank = data.draw(st.integers(0, sizes.num_ranks - 1))
    model = model_of(config)
    weights = weights_of(model)
    expected = Reference(config, sizes, sizes.coordinates(rank), weights).build()
    assert_holds(sizes.layout(model, rank, "here"), weights, expected)


def test_sizes_that_cannot_be_are_refused() -> None:
    model = make_shape(LLAMA)
    with pytest.raises(RefitError, match="8 layers cannot be split evenly over 3 pipeline stages"):
        Megatron(pp=3).layout(model, 0, "here")
    with pytest.raises(RefitError, match="cannot be split evenly into 3 chunks"):
        Megatron(pp=2, vpp=3).layout(model, 0, "here")
    with pytest.raises(RefitError, match="24 elements cannot be split evenly over 16 ranks"):
        Megatron(tp=16).layout(model, 0, "here")
    with pytest.raises(RefitError, match="4 ranks cannot be split in etp 1 × ep 8 × pp 1"):
        Megatron(dp=4, ep=8).layout(make_shape(QWEN3_MOE), 0, "here")
    with pytest.raises(RefitError, match="must name tp, cp, ep, dp and pp once each, not 'tp-dp'"):
        Megatron(tp=2, order="tp-dp").layout(model, 0, "here")
    with pytest.raises(RefitError, match="let the order end in pp"):
        Megatron(tp=2, dp=2, pp=2, ep=2, etp=1, order="tp-pp-dp-ep-cp").layouts(
            make_shape(QWEN3_MOE), HostNames("here")
        )


def test_a_checkpoint_that_fuses_layers_is_cut_as_one_that_does_not() -> None:
    assert_same_shards([Megatron(tp=4), Megatron(tp=8, transformer_engine=False), Megatron(tp=2, pp=2)])


def test_an_architecture_whose_shards_are_not_known_is_refused() -> None:
    with pytest.raises(RefitError, match="it is unknown how Megatron-Core shards a gemma3_text; known are llama, "):
        Megatron().layout(model_of(GEMMA3), 0, "here")
