"""The embedded engine computes what Hugging Face computes, whatever shares a step with a sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_harness import (
    ARCHITECTURES,
    assert_close_to_transformers,
    make_engine,
    make_model,
    random_prompts,
    reference_logprobs,
    refit,
    request,
    run_all,
)

from tandem.common.errors import ModelError
from tandem.rollout.engines.transformers import TransformersEngine

TOLERANCE = 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_match_a_forward_over_the_whole_sequence(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    engine = make_engine(tmp_path, model, num_slots=5)
    prompts = random_prompts(6)
    requests = [
        request(index, prompts[index % 6], temperature=0.8, max_new_tokens=3 + 5 * index % 17) for index in range(14)
    ]
    finished = run_all(engine, requests)
    for one in requests:
        assert len(finished[one.request_id].token_ids_T) == one.sampling.max_new_tokens
    completions = [(one, finished[one.request_id]) for one in requests]
    assert_close_to_transformers(model, completions, TOLERANCE, temperature=0.8)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    engine = make_engine(tmp_path, model, num_slots=3)
    prompts = random_prompts(5, seed=1)
    finished = run_all(engine, [request(index, prompt, temperature=0.0) for index, prompt in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        inputs = torch.tensor([prompt])
        expected = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert finished[index].token_ids_T.tolist() == expected[0, len(prompt) :].tolist()
        assert finished[index].logprobs_T.tolist() == [0.0] * 12


@pytest.mark.parametrize("num_slots", [1, 3, 16])
def test_a_response_depends_on_its_seed_and_not_on_its_company(num_slots: int, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    prompts = random_prompts(4, seed=2)
    requests = [
        request(index, prompts[index % 4], seed=2**63 + index, max_new_tokens=4 + index, top_k=index % 3 * 10)
        for index in range(9)
    ]
    together = run_all(make_engine(tmp_path, model, num_slots=num_slots), requests)
    alone_engine = make_engine(tmp_path, model, num_slots=1)
    for one in requests:
        alone = run_all(alone_engine, [one])[one.request_id]
        assert alone.token_ids_T.tolist() == together[one.request_id].token_ids_T.tolist()
        assert np.abs(alone.logprobs_T - together[one.request_id].logprobs_T).max() < TOLERANCE


def test_different_seeds_give_different_responses(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, make_model("llama", tmp_path), num_slots=16)
    finished = run_all(engine, [request(index, (1, 2, 3)) for index in range(16)])
    assert len({tuple(made.token_ids_T.tolist()) for made in finished.values()}) == 16


def test_a_group_shares_its_prompts_pass_and_loses_nothing(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    prompt = random_prompts(1, seed=3)[0]
    requests = [request(index, prompt) for index in range(6)]
    shared = run_all(make_engine(tmp_path, model, num_slots=6), requests)
    one_by_one = make_engine(tmp_path, model, num_slots=6)
    separate = {one.request_id: run_all(one_by_one, [one])[one.request_id] for one in requests}
    for index in range(6):
        assert shared[index].token_ids_T.tolist() == separate[index].token_ids_T.tolist()
        assert np.abs(shared[index].logprobs_T - separate[index].logprobs_T).max() < TOLERANCE


def test_a_group_reads_its_prompt_once(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    engine = make_engine(tmp_path, model, num_slots=8)
    lengths: list[int] = []
    embeddings = engine._model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].numel()))
    run_all(engine, [request(index, (5, 6, 7, 8), max_new_tokens=3) for index in range(8)])
    assert lengths == [4, 8, 8]


def test_bfloat16_matches_a_bfloat16_forward(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path).to(torch.bfloat16)
    engine = TransformersEngine(tmp_path, num_slots=4, max_total_sequence_length=32, dtype="bfloat16")
    assert {parameter.dtype for parameter in engine._model.parameters()} == {torch.bfloat16}
    refit(engine, model, 0)
    finished = run_all(engine, [request(index, (1, 2, 3 + index)) for index in range(4)])
    for index, made in finished.items():
        expected_T = reference_logprobs(model.float(), (1, 2, 3 + index), made.token_ids_T)
        # bfloat16 keeps 8 bits; these logits reach a few units.
        assert 0 < np.abs(made.logprobs_T - expected_T).max() < 0.3


@pytest.mark.parametrize(
    ("architecture", "changes", "complaint"),
    [
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 16,
            },
            "type dynamic",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "its attention is not causal"),
        ("bert", {}, "the attention of BertSelfAttention is not causal"),
        ("openai-gpt", {}, "only 0 of its 3 layers use the attention interface .* its forward pass takes no cache"),
        ("recurrent_gemma", {}, "with a cache of its own it fails: ModelError: its forward pass returns no cache"),
    ],
)
def test_architectures_that_slots_would_compute_wrongly_are_refused(
    architecture: str, changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    make_model(architecture, tmp_path, **changes)
    with pytest.raises(ModelError, match=complaint):
        TransformersEngine(tmp_path, num_slots=1, max_total_sequence_length=32, dtype="float32")


def test_a_window_wider_than_the_context_is_full_attention(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    engine = make_engine(tmp_path, model, max_length=64)
    made = run_all(engine, [request(0, (1, 2, 3))])[0]
    assert np.abs(made.logprobs_T - reference_logprobs(model, (1, 2, 3), made.token_ids_T)).max() < TOLERANCE


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        TransformersEngine(tmp_path, num_slots=1, max_total_sequence_length=32, dtype="float32")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="no_such_model"):
        TransformersEngine(tmp_path, num_slots=1, max_total_sequence_length=32, dtype="float32")
