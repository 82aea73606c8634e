"""New weights in the real vLLM: log-probabilities stay the trainer's, and no key or value of old weights is used."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import random_prompts, reference_logprobs, request, run_all

from tandem.common.errors import ConfigError
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.vllm.engine import VllmEngine
from tests.vllm.vllm_harness import refit, running, tiny_model, train


def furthest(model: Any, prompts: list[tuple[int, ...]], made: dict[int, EngineCompletion]) -> float:
    """Return how far log-probabilities are from those of a Hugging Face forward."""
    distances = [
        np.abs(one.logprobs_T - reference_logprobs(model, prompts[index], one.token_ids_T)).max()
        for index, one in made.items()
    ]
    return float(max(distances))


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_logprobs_are_the_trainers_before_and_after_ten_refits(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, tmp_path / "model")
    prompts = random_prompts(24)
    with running(tmp_path / "model") as engine:
        for version in range(11):
            refit(engine, model, version)
            if version in (0, 10):
                requests = [request(index, prompt, max_new_tokens=64) for index, prompt in enumerate(prompts)]
                made = run_all(engine, requests)
                assert {len(one.token_ids_T) for one in made.values()} == {64}
                assert all((one.versions_T == version).all() for one in made.values())
                assert furthest(model, prompts, made) < 1e-4
            train(model, seed=version)


def num_computed(engine: VllmEngine, requests: list[Any]) -> int:
    """Return how many prompt tokens were computed, and not found in the cache, until all requests had a token."""
    scheduler = engine._llm.engine.engine_core.engine_core.scheduler
    for one in requests:
        engine.add_request(one)
    computed, schedule = 0, scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        output = schedule(*args, **kwargs)
        computed += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counting
    try:
        engine.step()
    finally:
        scheduler.schedule = schedule
    run_all(engine, [])
    return computed


def test_a_prompt_is_computed_once_for_its_group_and_again_for_new_weights(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    prompt = tuple(range(1, 61)) + tuple(range(1, 31))  # 90 tokens: two whole blocks of 32, and 26
    group = [request(index, prompt) for index in range(4)]
    with running(tmp_path / "model") as engine:
        refit(engine, model, 0)
        assert num_computed(engine, group[:1]) == 90
        assert num_computed(engine, group) == 4 * 26
        train(model, seed=0)
        refit(engine, model, 1)
        assert num_computed(engine, group[:1]) == 90
        made = run_all(engine, group)
        assert furthest(model, [prompt] * 4, made) < 1e-4


def test_an_update_in_flight_equals_an_engine_that_had_the_new_weights_and_the_same_prefix(tmp_path: Path) -> None:
    old = tiny_model("qwen3", tmp_path / "model")
    new = copy.deepcopy(old)
    train(new, seed=0)
    prompts = random_prompts(12)
    requests = [request(index, prompt, max_new_tokens=40) for index, prompt in enumerate(prompts)]
    with running(tmp_path / "model") as engine:
        refit(engine, old, 4)
        for one in requests:
            engine.add_request(one)
        for _ in range(15):
            assert engine.step() == []
        engine.pause()
        refit(engine, new, 5)
        engine.recompute_caches()
        engine.resume()
        made = run_all(engine, [])
    assert sorted(made) == list(range(12))
    for index, one in made.items():
        num_old = int((one.versions_T == 4).sum())
        assert num_old >= 10
        assert one.versions_T.tolist() == [4] * num_old + [5] * (40 - num_old)
        before = reference_logprobs(old, prompts[index], one.token_ids_T)
        after = reference_logprobs(new, prompts[index], one.token_ids_T)
        assert np.abs(one.logprobs_T - np.where(one.versions_T == 4, before, after)).max() < 1e-4
        assert np.abs(before - after).max() > 1e-2  # the two can be told apart


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_num_seq": 4}, r"policy.generation.vllm_kwargs.max_num_seq: .*did you mean 'max_num_seqs'"),
        ({"max_model_len": 4}, r"set policy.generation.vllm_cfg.max_model_len instead"),
        ({"logprobs_mode": "raw_logits"}, r"Tandem sets it itself"),
    ],
)
def test_arguments_are_checked(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path / "model")
    with pytest.raises(ConfigError, match=message), running(tmp_path / "model", **extra):
        pass
