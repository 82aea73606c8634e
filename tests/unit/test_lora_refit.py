"""Refits of adapters: the base moves once, adapters with each version, and engines merge them to the bit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from lora_harness import CONFIG, HOST, MODEL, RANK, LoraRefit, targeted

from tandem.common.errors import CoverageError, RefitError
from tandem.refit import program as programs
from tandem.refit.adapters.catalogue import make_shape
from tandem.refit.adapters.deployment import ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.planner import plan, survey

SIZES = {
    "FSDP2 to one": (DTensor(shard=2), HuggingFace()),
    "FSDP1 to one": (DTensor(), HuggingFace()),
    "FSDP1 to TP2": (DTensor(), Vllm(tp=2)),
    "FSDP3 to TP2 PP2": (DTensor(shard=3), Vllm(tp=2, pp=2)),
    "Megatron TP2 PP2 to TP4": (Megatron(tp=2, pp=2), Vllm(tp=4)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_engines_compute_with_the_base_and_the_product_to_the_bit(sizes: str, dtype: str) -> None:
    refit = LoraRefit(*SIZES[sizes], MODEL.cast(dtype))
    first = refit.refit(0)
    refit.assert_holds(getattr(torch, dtype))
    verdict = refit.verdict()
    assert verdict.differences == ()
    refit.train()
    later = refit.refit(1, joining_engines=())
    refit.assert_holds(getattr(torch, dtype))
    assert refit.verdict().differences == ()
    assert refit.verdict().digest != verdict.digest
    moved = {link.name: link.num_bytes for link in refit.plan.links}
    frozen = {link.name: link.num_bytes for link in refit.plan.frozen_links}
    assert later == moved
    assert first == {link: moved.get(link, 0) + frozen.get(link, 0) for link in {**moved, **frozen}}


MOE = make_shape(
    {
        **CONFIG,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "float32",
)


@pytest.mark.parametrize(
    "engine", [HuggingFace(), Vllm(tp=2), Vllm(tp=2, dp=2, expert_parallel=True)], ids=["one", "vLLM TP2", "vLLM EP4"]
)
def test_experts_are_merged_wherever_an_engine_has_them(engine: ParallelDeployment) -> None:
    refit = LoraRefit(DTensor(shard=4, expert=2), engine, MOE, model=MOE)
    assert "model.layers.1.mlp.experts.3.up_proj" in refit.layers
    for version in range(2):
        refit.refit(version, joining_engines=() if version else None)
        refit.assert_holds(torch.float32)
        assert refit.verdict().differences == ()
        refit.train()


def test_fused_adapters_of_experts_take_what_the_plan_says() -> None:
    """One ``lora_A`` for both projections, and experts shared out among ranks."""
    layer = "model.layers.0.mlp.experts"
    gate_up = [f"{layer}.{expert}.{part}_proj" for expert in range(4) for part in ("gate", "up")]
    adapted = MOE.add_adapters(gate_up, 2 * RANK)
    for expert in (1, 2):
        layout = DTensor(shard=2, expert=expert, tensor=1).parameters(adapted, 0)
        sizes = {storage.name: storage.num_bytes for storage in layout.storages}
        assert sizes[f"{layer}.gate_up_proj.lora_A.weight"] == 2 * 2 * RANK * 32 * 4
        assert sizes[f"{layer}.gate_up_proj.lora_B.weight"] == 2 * 24 * 2 * RANK * 4
    tensor = DTensor(tensor=2).parameters(adapted, 0)
    sizes = {storage.name: storage.num_bytes for storage in tensor.storages}
    assert sizes[f"{layer}.gate_up_proj.lora_B.weight"] == 4 * 24 * 2 * RANK * 4, "whole on every rank"


def test_no_version_depends_on_those_before() -> None:
    refit = LoraRefit(DTensor(shard=2), Vllm(tp=2), MODEL.cast("bfloat16"))
    refit.refit(0)
    for version in range(1, 40):
        refit.train()
        refit.refit(version, joining_engines=())
    refit.assert_holds(torch.bfloat16)


def test_only_layers_that_have_an_adapter_are_held_twice() -> None:
    chosen = targeted(MODEL, "q_proj", "down_proj")
    refit = LoraRefit(DTensor(shard=2), Vllm(), MODEL, *chosen)
    refit.refit(0)
    refit.assert_holds(torch.float32)
    staged = {staging.name: staging.num_bytes for staging in refit.plan.programs["rollout-0"].staging}
    weights = sum(refit.base[f"{layer}.weight"].nbytes for layer in chosen)
    matrices = sum(matrix.nbytes for matrix in refit.adapters.values())
    assert sum(staged.values()) == weights + matrices
    assert sum(link.num_bytes for link in refit.plan.links) == matrices
    found = survey(refit.sources, refit.wanted, allow_alias=False)
    assert found.staging == {"rollout-0": weights + matrices}
    assert (found.links, found.frozen_links) == (refit.plan.links, refit.plan.frozen_links)


@pytest.mark.parametrize(
    ("engine", "copied"), [(HuggingFace(), ()), (Vllm(), ("lm_head", "model.embed_tokens"))], ids=["one", "fused"]
)
def test_a_frozen_base_on_the_same_host_is_read_in_place(engine: ParallelDeployment, copied: tuple[str, ...]) -> None:
    """Also where the engine fuses weights, because it is merging that fuses them; vLLM pads the vocabulary."""
    refit = LoraRefit(DTensor(), engine, MODEL, allow_alias=True)
    matrices = sum(matrix.nbytes for matrix in refit.adapters.values())
    assert sum(link.num_bytes for link in refit.plan.links) == matrices
    of_frozen = sum(refit.base[f"{name}.weight"].nbytes for name in copied)
    assert sum(link.num_bytes for link in refit.plan.frozen_links) == of_frozen
    found = survey(refit.sources, refit.wanted, allow_alias=False, alias_frozen=True)
    assert found.staging == {"rollout-0": matrices}
    assert found.frozen_links == refit.plan.frozen_links
    for version in range(3):
        refit.refit(version, joining_engines=None if version == 0 else ())
        refit.assert_holds(torch.float32)
        assert refit.verdict().differences == ()
        refit.train()
    refit.install()  # what was read in place is memory of its own again, and nothing writes through it
    refit.refit(4)
    refit.assert_holds(torch.float32)
    assert refit.verdict().differences == ()


def test_an_adapter_in_half_precision_is_widened() -> None:
    refit = LoraRefit(DTensor(), HuggingFace(), MODEL, adapter_dtype=torch.bfloat16)
    refit.refit(0)
    refit.assert_holds(torch.float32)
    assert refit.verdict().differences == ()
    assert sum(link.num_bytes for link in refit.plan.links) == sum(m.nbytes for m in refit.adapters.values())


def test_what_never_changes_is_digested_once() -> None:
    refit = LoraRefit(DTensor(shard=2), Vllm(tp=2), MODEL)
    refit.refit(0)
    for weights in (*refit.trainers.values(), *refit.engines.values()):
        task = weights.digest_task(None)
        first = task.expected_s
        task.advance(60.0)
        assert weights.digest_task(None).expected_s < 0.55 * first
    before = refit.verdict()
    refit.base["lm_head.weight"][3, 3] += 1.0
    for weights in refit.trainers.values():
        weights.storages["lm_head.weight"].view(-1)[5] += 1.0  # a trainer that breaks its word is not noticed later
    assert refit.verdict() == before
    for name, weights in refit.trainers.items():
        weights.install([refit.plan.programs[name]])
    assert refit.verdict().differing == {"rollout": "lm_head.weight"}


def test_damage_is_told() -> None:
    refit = LoraRefit(DTensor(shard=2), Vllm(tp=2), MODEL)
    refit.refit(0)
    assert refit.verdict().differences == ()
    layer = "model.layers.1.self_attn.o_proj"
    engine = refit.engines["rollout-1"]
    live = refit.live["rollout-1"][f"{layer}.weight"]
    live[17] ^= 1  # the lowest bit of a merged weight
    with pytest.raises(RefitError, match=rf"{layer}.weight: the weights held are not the merge"):
        refit.digests(engine)
    live[17] ^= 1
    assert refit.verdict().differences == ()
    refit.train()  # the adapter of a version that has not come
    assert refit.verdict().differences[0].num_tensors == 2 * len(refit.layers)
    refit.refit(1, joining_engines=())
    assert refit.verdict().differences == ()


def test_merging_twice_would_be_told() -> None:
    refit = LoraRefit(DTensor(), HuggingFace(), MODEL)
    refit.refit(0)
    layer = refit.layers[0]
    live = refit.live["rollout-0"][f"{layer}.weight"].view(torch.float32)
    a, b = (refit.adapters[f"{layer}.lora_{kind}.weight"] for kind in "AB")
    live += (b @ a).flatten() * 8.0
    with pytest.raises(RefitError, match=f"{layer}.weight: the weights held are not the merge"):
        refit.verdict()


def test_programs_with_adapters_survive_the_wire() -> None:
    refit = LoraRefit(DTensor(shard=2), Vllm(tp=2), MODEL)
    for program in refit.plan.programs.values():
        assert programs.decode(programs.encode(program)) == program


def test_what_cannot_be_merged_is_refused() -> None:
    refit = LoraRefit(DTensor(), HuggingFace(), MODEL)
    name = f"{refit.layers[0]}.weight"
    with pytest.raises(RefitError, match=f"rollout-0 wants {name} as float8_e4m3fn: no adapter can be merged"):
        plan(
            refit.sources,
            {"rollout-0": Vllm().layouts(MODEL.quantised((8, 8)), HOST)[0]},
            allow_alias=False,
        )
    (source,) = refit.sources.values()
    without = tuple(
        msgspec.structs.replace(t, name=t.name.replace("lora_B", "lora_C")) if "lora_B" in t.name else t
        for t in source.tensors
    )
    with pytest.raises(CoverageError, match=r"has no lora_B\.weight, which no trainer holds"):
        plan({"trainer-0": msgspec.structs.replace(source, tensors=without)}, refit.wanted, allow_alias=False)
