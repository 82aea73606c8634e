"""Penalties: the embedded engine's against Hugging Face's and closed forms."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from engine_harness import make_engine, make_model, random_prompts, request, run_all

from tandem.rollout.engine import SequenceRequest
from tandem.rollout.engines.served import ServedSampling


def asking(one: SequenceRequest, **penalties: float) -> SequenceRequest:
    sampling = ServedSampling(**{**msgspec.structs.asdict(one.sampling), **penalties})
    return msgspec.structs.replace(one, sampling=sampling)


def test_a_repetition_penalty_is_that_of_generate_and_changes_no_other_sequence(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    engine = make_engine(tmp_path, model, num_slots=3)
    prompts = random_prompts(2, seed=1)
    plain = request(0, prompts[0], temperature=0.0)
    wanted = [
        asking(request(1 + i, prompt, temperature=0.0), repetition_penalty=1.7) for i, prompt in enumerate(prompts)
    ]
    alone = run_all(make_engine(tmp_path, model, num_slots=3), [plain])
    finished = run_all(engine, [plain, *wanted])
    assert finished[0].token_ids_T.tolist() == alone[0].token_ids_T.tolist()
    for one in wanted:
        inputs = torch.tensor([one.prompt_ids])
        expected = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            repetition_penalty=1.7,
        )
        assert finished[one.request_id].token_ids_T.tolist() == expected[0, len(one.prompt_ids) :].tolist()
    assert finished[1].token_ids_T.tolist() != alone[0].token_ids_T.tolist(), "or nothing was compared"


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.8), (-1.0, 1.9)])
def test_log_probabilities_are_of_the_closed_form(presence: float, frequency: float, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    (prompt,) = random_prompts(1, seed=2)
    one = asking(
        request(0, prompt, temperature=0.7, max_new_tokens=24), presence_penalty=presence, frequency_penalty=frequency
    )
    made = run_all(make_engine(tmp_path, model, num_slots=1), [one])[0]
    tokens = made.token_ids_T.tolist()
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    for place, token in enumerate(tokens):
        before = tokens[:place]
        for seen in set(before):
            logits_TV[place, seen] -= presence + frequency * before.count(seen)
        expected = (logits_TV[place] / 0.7).log_softmax(-1)[token].item()
        assert made.logprobs_T[place] == pytest.approx(expected, abs=1e-4)
