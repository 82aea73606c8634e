"""Activations of a trainer, by closed forms; `tests/simulated_gpu` counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config import load_config
from tandem.coordinator.forecast.memory import RankMemory, memory_of
from tandem.coordinator.forecast.sides import model_shape, sides

PLANS = Path(__file__).parents[2] / "examples" / "plans"
LLAMA, LLAMA_70B = "llama-8b-fsdp8-to-tp2.yaml", "llama-70b-tp8pp2-to-tp8.yaml"
PASSES = "forward and backward passes"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PLANS.parents[1])


def planned(plan: str, *overrides: str) -> RankMemory:
    config = load_config(PLANS / plan, list(overrides), to_run=False)
    shape = model_shape(config)
    assert not isinstance(shape, str)
    return memory_of(config, sides(config, shape)[0])


def held(memory: RankMemory, what: str, phase: str = PASSES) -> float:
    return next(each.parts.get(what, 0.0) for each in memory.phases if each.name == phase)


def test_a_layer_of_llama_keeps_what_its_operators_save() -> None:
    tokens, hidden, queries, keys, intermediate = 4096, 4096, 4096, 1024, 14336
    # Two norms, each input in float32 and two results; queries, keys, values, outputs, sums; the network's four.
    layer = 16 * hidden + 4 * queries + 4 * keys + 4 * 32 + 8 * intermediate
    ends = 8 * hidden + hidden  # the last norm, and the half of the tokens that is scored
    assert held(planned(LLAMA), "activations") == pytest.approx(tokens * (32 * layer + ends))


def test_more_tokens_keep_more_and_recomputation_keeps_inputs_alone() -> None:
    once = held(planned(LLAMA), "activations")
    assert held(planned(LLAMA, "policy.train_micro_batch_size=2"), "activations") == pytest.approx(2 * once)
    packed = planned(LLAMA, "policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=12288")
    assert held(packed, "activations") == pytest.approx(3 * once)
    recomputed = planned(LLAMA, "policy.dtensor_cfg.activation_checkpointing=true")
    assert held(recomputed, "activations") < 0.05 * once
    assert held(recomputed, "buffers") > held(planned(LLAMA), "buffers")


def test_the_first_stage_of_a_pipeline_keeps_most_and_its_micro_batches_count() -> None:
    found = planned(LLAMA_70B)
    assert (found.rank, found.peak.name) == (0, PASSES)
    alone = planned(LLAMA_70B, "policy.train_global_batch_size=1", "grpo.num_prompts_per_step=1")
    assert held(alone, "activations") < 0.6 * held(found, "activations")
    divided = planned(LLAMA_70B, "policy.megatron_cfg.sequence_parallel=true")
    assert held(divided, "activations") < 0.5 * held(found, "activations")


def test_an_optimizer_that_is_not_fused_needs_square_roots_of_all_second_moments() -> None:
    found = planned(LLAMA, "policy.optimizer.kwargs={lr: 1.0e-6, fused: false}")
    assert held(found, "buffers", "optimizer step") == held(found, "weights")


def test_what_has_no_forms_has_no_activations() -> None:
    config = load_config(PLANS / LLAMA, [], to_run=False)
    shape = model_shape(config)
    assert not isinstance(shape, str)
    found = memory_of(config, sides(config, shape)[0], with_activations=False)
    assert [phase.name for phase in found.phases] == ["optimizer step"]
