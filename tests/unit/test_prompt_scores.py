"""Probabilities of a prompt's tokens, which multiple choice compares: Transformers' own, in any company."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import (
    ARCHITECTURES,
    assert_close_to_transformers,
    exact,
    make_engine,
    make_model,
    random_prompts,
    reference_logprobs,
    request,
    run_all,
)

from tandem.rollout.engine import EngineCompletion, PromptScores, SequenceRequest
from tandem.rollout.engines import served
from tandem.rollout.engines.served import ServedSampling

TOLERANCE = 1e-5


def scoring(one: SequenceRequest, num_alternatives: int = 0) -> SequenceRequest:
    """Have a request ask for the scores of its prompt."""
    sampling = ServedSampling(
        **msgspec.structs.asdict(one.sampling), scores_prompt=True, num_alternatives=num_alternatives
    )
    return msgspec.structs.replace(one, sampling=sampling)


def scores_of(completion: EngineCompletion) -> PromptScores:
    assert completion.prompt_scores is not None
    return completion.prompt_scores


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_transformers_and_change_no_other_sequence(architecture: str, tmp_path: Path) -> None:
    """They join, in the middle, sequences that run, and leave before them."""
    model = make_model(architecture, tmp_path)
    prompts = random_prompts(8)
    plain = [request(index, prompt, max_new_tokens=14) for index, prompt in enumerate(prompts[:3])]
    alone = run_all(make_engine(tmp_path, model, num_slots=3), plain)
    engine = make_engine(tmp_path, model, num_slots=5)
    engine.add_request(plain[0])
    engine.step()
    scored = [scoring(request(10 + index, prompt, max_new_tokens=1 + index)) for index, prompt in enumerate(prompts)]
    finished = run_all(engine, [*scored[:4], *plain[1:], *scored[4:]])
    for one in plain:
        assert finished[one.request_id].token_ids_T.tolist() == alone[one.request_id].token_ids_T.tolist()
        assert finished[one.request_id].prompt_scores is None
    for completions in (alone, finished):
        assert_close_to_transformers(model, [(one, completions[one.request_id]) for one in plain], TOLERANCE)
    wide, apart, off, rounding = exact(model), 0.0, 0.0, 0.0
    for one in scored:
        scores, rest_T = scores_of(finished[one.request_id]), np.array(one.prompt_ids[1:], np.int32)
        assert len(scores.logprobs_P) == len(scores.alternatives) == len(rest_T)
        expected_P = reference_logprobs(model, one.prompt_ids[:1], rest_T)
        exact_P = reference_logprobs(wide, one.prompt_ids[:1], rest_T)
        apart = max(apart, np.abs(scores.logprobs_P - expected_P).max(initial=0))
        off = max(off, np.abs(scores.logprobs_P - exact_P).max(initial=0))
        rounding = max(rounding, np.abs(expected_P - exact_P).max(initial=0))
    assert min(apart, off) < max(TOLERANCE, 2 * rounding), (apart, off, rounding)


def test_a_long_prompt_is_scored_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3", tmp_path)
    engine = make_engine(tmp_path, model, num_slots=1)
    prompt = tuple(range(1, 31))
    one = scoring(request(0, prompt, max_new_tokens=1), num_alternatives=3)
    whole = scores_of(run_all(engine, [one])[0])
    monkeypatch.setattr(served, "_MOST_LOGITS", 7 * model.config.vocab_size)
    parts = scores_of(run_all(engine, [one])[0])
    np.testing.assert_allclose(parts.logprobs_P, whole.logprobs_P, atol=TOLERANCE)
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for place, alternatives in enumerate(parts.alternatives):
        likeliest = logprobs_TV[place].topk(3)
        assert [token for token, _ in alternatives] == likeliest.indices.tolist()
        np.testing.assert_allclose([logprob for _, logprob in alternatives], likeliest.values, atol=TOLERANCE)


def test_a_prompt_of_one_token_has_no_scores(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, make_model("qwen3", tmp_path), num_slots=1)
    scores = scores_of(run_all(engine, [scoring(request(0, (5,), max_new_tokens=1), num_alternatives=2)])[0])
    assert (len(scores.logprobs_P), scores.alternatives) == (0, [])
