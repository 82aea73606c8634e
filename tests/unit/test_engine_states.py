"""Layers that carry a state: what a slot goes on from after updates, moves and sleep, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_harness import make_engine, make_model, random_prompts, reference_logprobs, refit, request, run_all

from tandem.common.attention.stateful import find_stateful_modules
from tandem.common.errors import ModelError
from tandem.rollout.engines.adapters import AdaptersEngine
from tandem.rollout.engines.own_caches import BatchCache
from tandem.rollout.engines.states import StatefulCache
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.samples.routed_experts import RoutedExperts

HYBRIDS = ("qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2")
OWN_CACHES = ("deepseek_v32", "deepseek_v4", "minimax", "qwen4_exp_text", "bloom")
"""Families that run with caches of their own, each with states of another kind in them."""


@pytest.mark.parametrize("architecture", [*HYBRIDS, *OWN_CACHES])
def test_after_an_update_states_are_made_anew_by_the_new_weights(architecture: str, tmp_path: Path) -> None:
    first, second = (make_model(architecture, tmp_path, seed=seed) for seed in (0, 1))
    engine = make_engine(tmp_path, first, num_slots=3)
    prompts = random_prompts(3)
    for index, prompt in enumerate(prompts):
        engine.add_request(request(index, prompt, max_new_tokens=10))
    for _ in range(4):
        engine.step()
    refit(engine, second, 1)
    engine.recompute_caches()
    finished = run_all(engine, [])
    for index, prompt in enumerate(prompts):
        tokens_T = finished[index].token_ids_T
        assert finished[index].versions_T.tolist() == [0] * 4 + [1] * 6
        for model, part in ((first, slice(0, 4)), (second, slice(4, 10))):
            expected_T = reference_logprobs(model, prompt, tokens_T)
            assert np.abs(finished[index].logprobs_T - expected_T)[part].max() < 2e-5


@pytest.mark.parametrize("architecture", [*HYBRIDS, *OWN_CACHES])
def test_a_group_and_its_samples_alone_have_the_same_numbers(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    prompt = random_prompts(1, seed=3)[0]
    requests = [request(index, prompt, max_new_tokens=3 + index) for index in range(5)]
    together = run_all(make_engine(tmp_path, model, num_slots=5), requests)
    alone_engine = make_engine(tmp_path, model, num_slots=1)
    for one in requests:
        alone = run_all(alone_engine, [one])[one.request_id]
        assert alone.token_ids_T.tolist() == together[one.request_id].token_ids_T.tolist()
        assert np.abs(alone.logprobs_T - together[one.request_id].logprobs_T).max() < 1e-5


def test_states_take_memory_for_each_slot_and_give_it_back(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, make_model("qwen3_5_text", tmp_path), num_slots=4)
    assert isinstance(engine._cache, StatefulCache)
    assert engine._cache.num_bytes == 0
    run_all(engine, [request(0, (1, 2, 3))])
    # Of each of two layers: 3 earlier tokens of 2 * 2 * 8 + 4 * 8 channels, and 4 heads of 8 x 8, in float32.
    states = 4 * 2 * (64 * 4 + 4 * 8 * 8) * 4
    keys_and_values = 2 * 4 * 2 * 64 * 16 * 4
    assert engine._cache.num_bytes == states + keys_and_values
    engine.sleep()
    assert engine._cache.num_bytes == 0
    engine.wake()
    assert run_all(engine, [request(1, (1, 2, 3), seed=0)])[1].token_ids_T.size == 12


@pytest.mark.parametrize("architecture", OWN_CACHES)
def test_a_group_reads_its_prompt_once_and_steps_as_one_batch(architecture: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, make_model(architecture, tmp_path), num_slots=6)
    sizes: list[tuple[int, ...]] = []
    embeddings = engine._model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape)))
    prompts = {0: (5, 6, 7, 8), 1: (9, 10, 11, 12), 2: (1, 2)}
    for index in range(6):  # two of the first prompt, three of the second, one of the third
        prompt = prompts[0 if index < 2 else 1 if index < 5 else 2]
        engine.add_request(request(index, prompt, max_new_tokens=2 + (index == 3)))
    for _ in range(3):
        engine.step()
    assert not engine.num_unfinished
    # Prompts of one length are one pass, and so are their samples; then only the longest response is left.
    assert sizes == [(1, 2), (2, 4), (1, 1), (5, 1), (1, 1)]


def test_an_engine_without_slots_gives_its_memory_back_and_starts_again(tmp_path: Path) -> None:
    model = make_model("minimax", tmp_path)
    engine = make_engine(tmp_path, model, num_slots=4)
    assert isinstance(engine._cache, BatchCache)
    prompts = random_prompts(4)
    for index, prompt in enumerate(prompts):
        engine.add_request(request(index, prompt, max_new_tokens=4 + index))
    engine.step()
    num_bytes = engine._cache.num_bytes
    # Of each sequence: the keys and values of its prompt in one layer, and 4 heads of 16 x 16 in two, in float32.
    assert num_bytes == sum(2 * 2 * len(prompt) * 16 * 4 + 2 * 4 * 16 * 16 * 4 for prompt in prompts)
    assert engine.abort(2) is not None
    finished = run_all(engine, [])
    assert sorted(finished) == [0, 1, 3]
    engine.sleep()
    assert engine._cache.num_bytes == 0
    engine.wake()
    made = run_all(engine, [request(7, prompts[2])])[7]
    assert np.abs(made.logprobs_T - reference_logprobs(model, prompts[2], made.token_ids_T)).max() < 1e-5


def test_a_time_step_keeps_its_limit_in_single_tokens_too(tmp_path: Path) -> None:
    """Transformers 5.24 has it in passes over several tokens alone: findings/nemotron_h_time_step.sh."""
    model = make_model("nemotron_h", tmp_path, time_step_min=0.5)
    engine = make_engine(tmp_path, model)
    made = run_all(engine, [request(0, (3, 1, 4, 1, 5))])[0]
    assert np.abs(made.logprobs_T - reference_logprobs(model, (3, 1, 4, 1, 5), made.token_ids_T)).max() < 1e-5


def test_the_modules_that_carry_a_state_are_found_by_what_they_ask_of_a_cache(tmp_path: Path) -> None:
    layers = {name: sorted(find_stateful_modules(make_model(name, tmp_path / name))) for name in HYBRIDS}
    assert layers == {"qwen3_5_text": [0, 1], "nemotron_h": [0, 2], "falcon_h1": [0, 1, 2], "lfm2": [0, 2]}
    plain = transformers.AutoConfig.for_model("qwen3", hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    with torch.device("meta"):
        assert find_stateful_modules(transformers.AutoModelForCausalLM.from_config(plain)) == {}


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "minimax"])
def test_adapters_of_several_versions_are_refused(architecture: str, tmp_path: Path) -> None:
    make_model(architecture, tmp_path)
    with pytest.raises(ModelError, match="one version of adapters at a time"):
        AdaptersEngine(tmp_path, num_sets=2, num_slots=2, max_total_sequence_length=32, dtype="float32")


def test_router_replay_is_refused_without_slots(tmp_path: Path) -> None:
    make_model("deepseek_v32", tmp_path)
    experts = RoutedExperts(num_layers=3, num_experts=4, top_k=2)
    settings: dict[str, Any] = {"num_slots": 2, "max_total_sequence_length": 32, "dtype": "float32"}
    with pytest.raises(ModelError, match="router replay needs a model that runs in slots"):
        TransformersEngine(tmp_path, experts=experts, **settings)
