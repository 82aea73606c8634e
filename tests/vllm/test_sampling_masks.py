"""What vLLM keeps of each distribution: log-probabilities over the masks are those that it drew with, also at ties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_harness import request, run_all

from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.sampling import restrict
from tandem.rollout.engines.vllm.engine import VllmEngine
from tandem.samples.sampling_masks import MaskFormat
from tests.harness.trainers.masks_harness import as_sample, kept_in
from tests.vllm.vllm_harness import refit, running, tiny_model

PROMPT = (2, 7, 1, 8)
VOCABULARY = 61
SAMPLINGS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_p": 0.7, "top_k": 9, "min_p": 0.05},
]


class Filled(NamedTuple):
    engine: VllmEngine
    model: Any


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3", folder)
    settings = {"tensor_parallel_size": request.param}
    with running(folder, settings, mask_format=MaskFormat(vocabulary=VOCABULARY)) as engine:
        refit(engine, model, 0)
        yield Filled(engine, model)


def logits_of(model: Any, completion: EngineCompletion) -> torch.Tensor:
    """Return the scaled logits from which the tokens of a response were drawn."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([[*PROMPT, *completion.token_ids_T.tolist()]])).logits[0]
    scaled_TV: torch.Tensor = logits_TV[len(PROMPT) - 1 : -1] / 0.8
    return scaled_TV


def masks_of(completion: EngineCompletion) -> torch.Tensor:
    (is_kept_TV,) = kept_in(as_sample(PROMPT, completion), VOCABULARY)
    assert is_kept_TV is not None
    return is_kept_TV[len(PROMPT) :]


def assert_drawn_from(completion: EngineCompletion, logits_TV: torch.Tensor, is_kept_TV: torch.Tensor) -> None:
    logprobs_TV = logits_TV.masked_fill(~is_kept_TV, -torch.inf).log_softmax(dim=-1)
    token_ids_T = torch.from_numpy(completion.token_ids_T.astype(np.int64))
    logprobs_T = logprobs_TV.gather(1, token_ids_T[:, None])[:, 0].numpy()
    assert np.abs(completion.logprobs_T - logprobs_T).max() < 1e-5


def test_masks_are_what_was_drawn_from(filled: Filled) -> None:
    asked = [request(number, PROMPT, temperature=0.8, **SAMPLINGS[number % 4]) for number in range(12)]
    plain = request(12, PROMPT, temperature=0.8)
    made = run_all(filled.engine, [*asked, plain])
    for number, one in enumerate(asked):
        sampling, logits_TV = one.sampling, logits_of(filled.model, made[number])
        limits = sampling.top_k, sampling.top_p, sampling.min_p
        expected_TV = restrict(logits_TV, *(torch.tensor([limit]).expand(len(logits_TV)) for limit in limits))
        is_kept_TV = masks_of(made[number])
        assert torch.equal(is_kept_TV, expected_TV > -torch.inf), "as the embedded engine where nothing is tied"
        assert_drawn_from(made[number], logits_TV, is_kept_TV)
    assert masks_of(made[12]).all()


def test_masks_leave_out_bad_words_alone(filled: Filled) -> None:
    free = run_all(filled.engine, [request(0, PROMPT, temperature=0.8)])[0].token_ids_T.tolist()
    forbidden = ((free[1],), (free[3], free[4]))
    asked = [request(number, PROMPT, temperature=0.8, bad_token_ids=forbidden) for number in range(6)]
    for completion in run_all(filled.engine, asked).values():
        is_kept_TV = masks_of(completion)
        tokens = completion.token_ids_T.tolist()
        left_out = [{free[1]} | ({free[4]} if before == free[3] else set()) for before in [None, *tokens[:-1]]]
        assert [set(np.flatnonzero(~kept.numpy()).tolist()) for kept in is_kept_TV] == left_out
        assert completion.masks is not None
        assert completion.masks.lengths_T.tolist() == [len(each) for each in left_out]
        assert_drawn_from(completion, logits_of(filled.model, completion), is_kept_TV)


def test_masks_at_ties_are_vllms(filled: Filled) -> None:
    with torch.no_grad():
        rows_VH = filled.model.get_output_embeddings().weight
        rows_VH[20:40] = rows_VH[40:60] = rows_VH[:20]
    refit(filled.engine, filled.model, 1)
    made = run_all(
        filled.engine, [request(number, PROMPT, temperature=0.8, **SAMPLINGS[number % 4]) for number in range(12)]
    )
    for number, completion in made.items():
        is_kept_TV = masks_of(completion)
        if number % 4 == 1:
            assert is_kept_TV.sum(dim=1).tolist() == [6] * len(is_kept_TV), "two threes: all that tie with the fifth"
        assert_drawn_from(completion, logits_of(filled.model, completion), is_kept_TV)


def test_masks_grow_with_a_response_and_are_forgotten_with_it(filled: Filled) -> None:
    filled.engine.add_request(request(100, PROMPT, temperature=0.8, top_k=5))
    for _ in range(3):
        filled.engine.step()
    masks = filled.engine.made({100: 1})[100].masks
    assert masks is not None
    assert len(masks.lengths_T) == 2
    completion = filled.engine.abort(100)
    assert completion is not None
    assert masks_of(completion).sum(dim=1).min() >= 5
    whole = run_all(filled.engine, [request(101, PROMPT, top_k=5)])[101]
    assert filled.engine._llm.ask("masks", {"100": 1})[0] == [(b"", b"")]
    assert len(masks_of(whole)) == len(whole.token_ids_T)
