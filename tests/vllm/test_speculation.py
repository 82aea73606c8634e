"""Speculative decoding by the real vLLM: tokens have the distribution that they have without, whatever is drafted."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_harness import (
    logprobs_without,
    random_prompts,
    reference_logprobs,
    request,
    run_all,
    sequences_in,
)
from safetensors.torch import load_file, save_file

from tandem.rollout.engines.vllm.engine import VllmEngine
from tests.harness.runs.running import coordinator, merged, write_config
from tests.harness.trainers.trainer_harness import make_model
from tests.vllm.run_harness import JUDGE, SEVENS, curve
from tests.vllm.vllm_harness import (
    drafts_parameters,
    find_chance_of_third_token,
    greedy,
    measure_drafter,
    num_steps,
    plan_drafter,
    refit,
    running,
    tiny_model,
    train,
)

PROMPT = (2, 7, 1, 8)
REPEATING = (2, 7, 1, 8, 2, 7, 1, 8, 2, 7)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
HAS_NUMBA = importlib.util.find_spec("numba") is not None
"""Whether vLLM can find n-grams."""


class Drafting(NamedTuple):
    engine: VllmEngine
    model: Any
    draft: Any


def draft_of(model: Any, folder: Path, *, noise: float) -> Any:
    """Write a model that differs from the policy by so much, and return it."""
    generator = torch.Generator().manual_seed(5)
    draft = type(model)(model.config)
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    draft.save_pretrained(folder)
    return draft


def by_model(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


@pytest.fixture(
    scope="module",
    params=[
        "draft_model",
        pytest.param("ngram", marks=pytest.mark.skipif(not HAS_NUMBA, reason="vLLM finds n-grams by numba")),
    ],
)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    """An engine for all tests that leave its weights alone; its draft is about half as good as the policy."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("qwen3", folder / "policy")
    draft = draft_of(model, folder / "draft", noise=0.01)
    speculation = NGRAM if request.param == "ngram" else by_model(folder / "draft")
    with running(folder / "policy", speculative_config=speculation) as engine:
        refit(engine, model, 0)
        yield Drafting(engine, model, draft)


def test_greedy_tokens_are_those_of_the_model_in_fewer_steps(drafting: Drafting) -> None:
    prompts = [REPEATING, *random_prompts(6, seed=1)]
    asked = [request(number, prompt, temperature=0.0, max_new_tokens=40) for number, prompt in enumerate(prompts)]
    made = run_all(drafting.engine, asked)
    for number, prompt in enumerate(prompts):
        assert made[number].token_ids_T.tolist() == greedy(drafting.model, prompt, 40)
        assert (made[number].logprobs_T == 0).all()
    assert num_steps(drafting.engine, asked[:1]) < 40, "some drafts are accepted"


def test_log_probabilities_are_those_of_the_model_and_tokens_depend_on_the_seed_alone(drafting: Drafting) -> None:
    asked = [request(number, PROMPT, max_new_tokens=40) for number in range(12)]
    made = run_all(drafting.engine, [*asked, *(request(20 + n, each) for n, each in enumerate(random_prompts(12)))])
    for one in asked:
        found = made[one.request_id]
        expected = reference_logprobs(drafting.model, PROMPT, found.token_ids_T)
        assert np.abs(found.logprobs_T - expected).max() < 1e-4
        assert len(found.versions_T) == 40
    alone = run_all(drafting.engine, [asked[5]])[5]
    assert alone.token_ids_T.tolist() == made[5].token_ids_T.tolist()


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5, "top_k": 6}], ids=str)
def test_tokens_after_drafts_have_the_distribution_of_the_model(changes: dict[str, Any], drafting: Drafting) -> None:
    """The third token of a response, over all that may come before it."""
    num_samples = 1024
    asked = [request(n, REPEATING, max_new_tokens=3, seed=n * 7919, **changes) for n in range(num_samples)]
    made = run_all(drafting.engine, asked)
    assert find_chance_of_third_token(drafting.model, REPEATING, list(made.values()), changes) > 1e-3


def test_responses_end_within_drafts(drafting: Drafting) -> None:
    tokens = greedy(drafting.model, REPEATING, 40)
    stop = tokens[17]
    first = tokens.index(stop)
    made = run_all(
        drafting.engine,
        [
            request(0, REPEATING, temperature=0.0, max_new_tokens=40, stop_token_ids=(stop,)),
            *(request(length, REPEATING, temperature=0.0, max_new_tokens=length) for length in range(1, 12)),
        ],
    )
    assert made[0].token_ids_T.tolist() == tokens[: first + 1]
    assert made[0].finish_reason == "stop"
    for length in range(1, 12):
        assert made[length].token_ids_T.tolist() == tokens[:length]
        assert made[length].finish_reason == "length"


def test_drafts_contain_no_forbidden_sequence(drafting: Drafting) -> None:
    tokens = greedy(drafting.model, REPEATING, 24)
    forbidden = ((tokens[2],), (tokens[5], tokens[6]))
    asked = [
        request(n, REPEATING, max_new_tokens=24, temperature=float(n > 0), bad_token_ids=forbidden) for n in range(6)
    ]
    made = run_all(drafting.engine, asked)
    for one in asked:
        own = made[one.request_id].token_ids_T.tolist()
        assert not any(each in sequences_in(own, len(each)) for each in forbidden)
        if one.request_id:
            expected = logprobs_without(drafting.model, REPEATING, own, forbidden)
            assert made[one.request_id].logprobs_T.tolist() == pytest.approx(expected, abs=1e-4)


def test_refits_write_the_policy_and_leave_the_draft_alone(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "policy")
    draft_of(model, tmp_path / "draft", noise=0.0)
    with running(tmp_path / "policy", speculative_config=by_model(tmp_path / "draft")) as engine:
        refit(engine, model, 0)
        before, wanted = drafts_parameters(engine), model.state_dict()
        assert torch.equal(before["model.norm.weight"], wanted["model.norm.weight"]), "it is read from its folder"
        asked = [request(0, PROMPT, temperature=0.0, max_new_tokens=40)]
        assert num_steps(engine, asked) <= 1 + 39 // 4 + 1, "the draft is the policy: all is accepted"

        running_one = request(1, PROMPT, max_new_tokens=40)
        engine.add_request(running_one)
        for _ in range(3):
            engine.step()
        train(model, seed=1)
        refit(engine, model, 1)  # in flight
        engine.recompute_caches()
        finished = None
        while engine.num_unfinished:
            for one in engine.step():
                finished = one
        assert finished is not None
        assert set(finished.versions_T.tolist()) == {0, 1}
        newer_T = finished.versions_T == 1
        expected_T = reference_logprobs(model, PROMPT, finished.token_ids_T)
        assert np.abs(finished.logprobs_T - expected_T)[newer_T].max() < 1e-4

        engine.sleep()
        engine.wake()
        made = run_all(engine, [request(2, PROMPT, temperature=0.0, max_new_tokens=40)])
        assert made[2].token_ids_T.tolist() == greedy(model, PROMPT, 40)
        after = drafts_parameters(engine)
        assert all(torch.equal(after[name], before[name]) for name in before)


def write_eagle3(folder: Path, model: Any) -> None:
    """Write the layer that drafts, for a policy of eight layers."""
    folder.mkdir()
    config = model.config
    sizes = {name: getattr(config, name) for name in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps")}
    size, heads, head = config.hidden_size, config.num_attention_heads, config.head_dim
    settings = {
        **sizes,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": 64,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    key_values = config.num_key_value_heads * head
    shapes = {
        "fc": (size, 3 * size),
        "midlayer.self_attn.q_proj": (heads * head, 2 * size),
        "midlayer.self_attn.k_proj": (key_values, 2 * size),
        "midlayer.self_attn.v_proj": (key_values, 2 * size),
        "midlayer.self_attn.o_proj": (size, heads * head),
        "midlayer.mlp.gate_proj": (64, size),
        "midlayer.mlp.up_proj": (64, size),
        "midlayer.mlp.down_proj": (size, 64),
        "lm_head": (config.vocab_size, size),
    }
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_eagle3_drafts_from_hidden_states_before_and_after_a_refit(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "policy", num_hidden_layers=8)
    write_eagle3(tmp_path / "draft", model)
    speculation = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    with running(tmp_path / "policy", speculative_config=speculation) as engine:
        for version in range(2):
            refit(engine, model, version)
            asked = [request(0, PROMPT, temperature=0.0, max_new_tokens=40)]
            asked += [request(number, PROMPT, max_new_tokens=40) for number in range(1, 8)]
            made = run_all(engine, asked)
            assert made[0].token_ids_T.tolist() == greedy(model, PROMPT, 40)
            for one in asked[1:]:
                found = made[one.request_id]
                expected_T = reference_logprobs(model, PROMPT, found.token_ids_T)
                assert np.abs(found.logprobs_T - expected_T).max() < 1e-4
            held = drafts_parameters(engine)
            rows = model.config.vocab_size
            assert torch.equal(held["model.embed_tokens.weight"][:rows], model.model.embed_tokens.weight), "shared"
            assert torch.equal(held["model.fc.weight"], load_file(tmp_path / "draft/model.safetensors")["fc.weight"])
            train(model, seed=1)
        (measured,) = measure_drafter(engine)
    planned = plan_drafter(tmp_path / "policy", speculation)
    padding = (64 - model.config.vocab_size) * model.config.hidden_size * 4  # of the output layer
    assert planned.cache is not None
    assert measured == (planned.weights + padding, planned.cache.num_bytes)


def test_two_workers_share_the_draft_as_they_share_the_policy(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "policy")
    draft_of(model, tmp_path / "draft", noise=0.01)
    speculation = by_model(tmp_path / "draft")
    planned = plan_drafter(tmp_path / "policy", speculation, tensor_parallel_size=2)
    with running(tmp_path / "policy", {"tensor_parallel_size": 2}, speculative_config=speculation) as engine:
        refit(engine, model, 0)
        asked = [request(0, PROMPT, temperature=0.0, max_new_tokens=40), request(1, PROMPT, max_new_tokens=40)]
        made = run_all(engine, asked)
        assert made[0].token_ids_T.tolist() == greedy(model, PROMPT, 40)
        expected = reference_logprobs(model, PROMPT, made[1].token_ids_T)
        assert np.abs(made[1].logprobs_T - expected).max() < 1e-4
        assert planned.cache is not None
        assert measure_drafter(engine) == [(planned.weights, planned.cache.num_bytes / 2)] * 2


def test_grpo_learns_with_drafts() -> None:
    Path("judging.py").write_text(JUDGE)
    draft = make_model(Path("draft").absolute(), characters="0123456789+-= ", hidden_size=64, head_dim=32)
    over = {"policy": {"generation": {"vllm_kwargs": {"speculative_config": by_model(draft)}}}}
    ended = coordinator("up", write_config(merged(SEVENS, over)), "policy.generation.backend=vllm", timeout_s=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rewards = curve("run", "reward")
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.2
    assert curve("run", "token_mult_prob_error").max() < 1.001
    assert np.abs(curve("run", "sampling_importance_ratio") - 1).max() < 1e-3
