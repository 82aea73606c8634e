"""Generation by the real vLLM: log-probabilities, seeds, stopping, prefix caching, updates in flight, sleep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import psutil
import pytest
import torch
from engine_harness import (
    logprobs_without,
    random_prompts,
    request,
    run_all,
    sequences_in,
    write_byte_tokenizer,
)

from tandem.common.errors import DataError
from tandem.rollout.engines.sampling import restrict
from tandem.rollout.engines.served import ResponseGrammar, ServedSampling, penalised
from tandem.rollout.engines.vllm.engine import VllmEngine
from tests.vllm.vllm_harness import refit, running, tiny_model

PROMPT = (2, 7, 1, 8)


class Filled(NamedTuple):
    engine: VllmEngine
    model: Any
    texts: list[str]
    """Of each token."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """One engine for all tests that leave its weights alone."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3", folder)
    with running(folder) as engine:
        refit(engine, model, 0)
        yield Filled(engine, model, write_byte_tokenizer(folder))


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.6}])
def test_logprobs_are_of_the_distribution_that_was_sampled(changes: dict[str, Any], filled: Filled) -> None:
    made = run_all(filled.engine, [request(index, PROMPT, **changes) for index in range(16)])
    top_k, top_p = torch.tensor([changes.get("top_k", 0)]), torch.tensor([changes.get("top_p", 1.0)])
    for one in made.values():
        sequence = torch.tensor([[*PROMPT, *one.token_ids_T.tolist()]])
        with torch.no_grad():
            logits_TV = filled.model(input_ids=sequence).logits[0, len(PROMPT) - 1 : -1]
        scaled_TV = logits_TV / changes.get("temperature", 1.0)
        num = len(scaled_TV)
        logprobs_TV = restrict(scaled_TV, top_k.expand(num), top_p.expand(num)).log_softmax(dim=-1)
        expected_T = logprobs_TV.gather(1, sequence[0, len(PROMPT) :, None]).squeeze(1).numpy()
        assert np.abs(one.logprobs_T - expected_T).max() < 1e-4


def test_a_greedy_token_is_certain(filled: Filled) -> None:
    made = run_all(filled.engine, [request(0, PROMPT, temperature=0.0), request(1, PROMPT)])
    sequence = torch.tensor([[*PROMPT, *made[0].token_ids_T.tolist()]])
    with torch.no_grad():
        best_T = filled.model(input_ids=sequence).logits[0, len(PROMPT) - 1 : -1].argmax(dim=-1)
    assert made[0].token_ids_T.tolist() == best_T.tolist()
    assert (made[0].logprobs_T == 0).all()
    assert (made[1].logprobs_T < 0).any()


def test_tokens_depend_on_the_seed_and_not_on_what_runs_beside(filled: Filled) -> None:
    alone = run_all(filled.engine, [request(0, PROMPT, seed=2**64 - 1)])[0]
    prompts = random_prompts(31)
    others = [request(index + 1, prompt) for index, prompt in enumerate(prompts)]
    beside = run_all(filled.engine, [*others[:7], request(0, PROMPT, seed=2**64 - 1), *others[7:]])
    assert beside[0].token_ids_T.tolist() == alone.token_ids_T.tolist()
    assert run_all(filled.engine, [request(0, PROMPT, seed=5)])[0].token_ids_T.tolist() != alone.token_ids_T.tolist()


def test_forbidden_sequences_are_never_made_and_log_probabilities_are_of_what_remains(filled: Filled) -> None:
    free = run_all(filled.engine, [request(0, PROMPT, max_new_tokens=24)])[0].token_ids_T.tolist()
    forbidden = ((free[3],), (free[6], free[7]), (free[9], free[10], free[11]))
    asked = [request(number, PROMPT, max_new_tokens=24, bad_token_ids=forbidden) for number in range(8)]
    made = run_all(filled.engine, [*asked, request(8, PROMPT, seed=0, max_new_tokens=24)])
    assert made[8].token_ids_T.tolist() == free, "it did not ask for that"
    for one in asked:
        tokens = made[one.request_id].token_ids_T.tolist()
        assert not any(each in sequences_in(tokens, len(each)) for each in forbidden)
        expected = logprobs_without(filled.model, PROMPT, tokens, forbidden)
        assert made[one.request_id].logprobs_T.tolist() == pytest.approx(expected, abs=1e-4)


def test_stop_tokens_and_lengths(filled: Filled) -> None:
    long = run_all(filled.engine, [request(0, PROMPT, max_new_tokens=1000)])[0]
    assert (len(long.token_ids_T), long.finish_reason) == (124, "length")  # max_model_len is 128
    stop = int(long.token_ids_T[5])
    first = long.token_ids_T.tolist().index(stop)
    stopped = run_all(filled.engine, [request(0, PROMPT, max_new_tokens=50, stop_token_ids=(stop,))])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids_T.tolist() == long.token_ids_T.tolist()[: first + 1]
    assert len(stopped.logprobs_T) == len(stopped.versions_T) == first + 1


def test_a_stop_string_across_tokens_ends_the_response(filled: Filled) -> None:
    free = run_all(filled.engine, [request(0, PROMPT, max_new_tokens=30)])[0].token_ids_T.tolist()
    text = "".join(filled.texts[token] for token in free)
    assert len(text) == 30  # so that positions in text and in tokens are the same
    stop_string = text[10:13]
    assert "\ufffd" not in stop_string
    requests = [
        request(1, PROMPT, seed=0, max_new_tokens=30, stop_strings=("not there", stop_string)),
        request(2, PROMPT, seed=0, max_new_tokens=30, stop_strings=("not there",)),
    ]
    made = run_all(filled.engine, requests)
    assert made[1].finish_reason == "stop"
    assert made[1].token_ids_T.tolist() == free[: text.index(stop_string) + 3]
    assert (made[2].finish_reason, made[2].token_ids_T.tolist()) == ("length", free)
    assert not filled.engine._llm.engine.has_unfinished_requests()


def test_requests_that_can_make_no_token_are_refused(filled: Filled) -> None:
    with pytest.raises(DataError, match="the prompt is empty"):
        filled.engine.add_request(request(0, ()))
    with pytest.raises(DataError, match="max_model_len=128"):
        filled.engine.add_request(request(0, (1,) * 128))
    assert filled.engine.num_unfinished == 0


def test_an_aborted_request_returns_what_it_has_made(filled: Filled) -> None:
    engine = filled.engine
    for index in range(3):
        engine.add_request(request(index, PROMPT))
    for _ in range(4):
        assert engine.step() == []
    aborted = engine.abort(1)
    assert aborted is not None
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids_T) == len(aborted.logprobs_T) > 0
    assert engine.abort(1) is None
    assert sorted(run_all(engine, [request(1, PROMPT)])) == [0, 1, 2]


def test_a_paused_engine_makes_no_token(filled: Filled) -> None:
    engine = filled.engine
    expected = run_all(engine, [request(0, PROMPT)])[0]
    engine.add_request(request(0, PROMPT))
    engine.step()
    engine.pause()
    assert engine.step() == []
    assert engine.num_unfinished == 1
    engine.resume()
    assert run_all(engine, [])[0].token_ids_T.tolist() == expected.token_ids_T.tolist()


def test_a_sleeping_engine_gives_its_cache_back(filled: Filled) -> None:
    engine = filled.engine
    expected = run_all(engine, [request(0, PROMPT)])[0]
    memory = psutil.Process().memory_info
    (caches,) = engine._llm.engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    assert num_bytes > 2**25
    for storage in storages.values():
        storage.fill_(0)  # every page of it is written, and taken
    awake = memory().rss
    engine.sleep()
    assert memory().rss < awake - 0.9 * num_bytes
    engine.wake()
    assert memory().rss < awake - 0.9 * num_bytes
    assert run_all(engine, [request(0, PROMPT)])[0].token_ids_T.tolist() == expected.token_ids_T.tolist()
    engine.add_request(request(0, PROMPT))
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.sleep()
    engine.abort(0)


def test_tokens_are_drawn_with_their_probabilities(filled: Filled) -> None:
    num_samples = 4096
    requests = [request(index, PROMPT, max_new_tokens=1, seed=index * 7919) for index in range(num_samples)]
    made = run_all(filled.engine, requests)
    with torch.no_grad():
        expected_V = filled.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].softmax(dim=-1).numpy() * num_samples
    observed_V = np.bincount([int(one.token_ids_T[0]) for one in made.values()], minlength=len(expected_V))
    chi_square = ((observed_V - expected_V) ** 2 / expected_V).sum()
    freedom = len(expected_V) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_alternatives_are_the_likeliest_tokens_of_the_model(filled: Filled, temperature: float) -> None:
    prompt = random_prompts(1, seed=11)[0]
    plain = request(0, prompt, temperature=temperature, max_new_tokens=8)
    sampling = ServedSampling(**{**msgspec.structs.asdict(plain.sampling), "num_alternatives": 3})
    made = run_all(filled.engine, [msgspec.structs.replace(plain, sampling=sampling)])[0]
    tokens = made.token_ids_T.tolist()
    assert made.alternatives is not None
    if not temperature:
        assert made.alternatives == [[(token, 0.0)] for token in tokens]
        return
    with torch.no_grad():
        logits_TV = filled.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    for logits_V, others in zip(logits_TV, made.alternatives, strict=True):
        expected = (logits_V / temperature).log_softmax(-1).topk(3)
        assert [token for token, _ in others] == expected.indices.tolist()
        assert [logprob for _, logprob in others] == pytest.approx(expected.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("num_alternatives", [0, 3])
def test_prompts_are_scored_by_the_models_own_probabilities(filled: Filled, num_alternatives: int) -> None:
    """At temperature 1, also where an earlier request has left the keys of a prompt; others have no scores."""
    prompt = tuple(token % 60 + 1 for token in range(90))
    asked = {"scores_prompt": True, "num_alternatives": num_alternatives}
    plain = request(0, prompt, temperature=0.7, max_new_tokens=2)
    expected = run_all(filled.engine, [plain])[0]
    sampling = ServedSampling(**{**msgspec.structs.asdict(plain.sampling), **asked})
    made = run_all(filled.engine, [plain, msgspec.structs.replace(plain, request_id=1, sampling=sampling)])
    assert made[0].prompt_scores is None
    assert all(one.token_ids_T.tolist() == expected.token_ids_T.tolist() for one in made.values())
    scores = made[1].prompt_scores
    assert scores is not None
    with torch.no_grad():
        logprobs_TV = filled.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    next_P = torch.tensor(prompt[1:])
    np.testing.assert_allclose(scores.logprobs_P, logprobs_TV[:-1].gather(1, next_P[:, None])[:, 0], atol=1e-3)
    for logprobs_V, others in zip(logprobs_TV[:-1], scores.alternatives, strict=True):
        likeliest = logprobs_V.topk(num_alternatives)
        assert [token for token, _ in others] == likeliest.indices.tolist()
        assert [logprob for _, logprob in others] == pytest.approx(likeliest.values.tolist(), abs=1e-3)


def test_a_grammar_is_refused(filled: Filled) -> None:
    plain = request(0, random_prompts(1, seed=11)[0])
    sampling = ServedSampling(**{**msgspec.structs.asdict(plain.sampling), "grammar": cast(ResponseGrammar, object())})
    with pytest.raises(DataError, match="response_format: vLLM has no tokenizer here"):
        filled.engine.add_request(msgspec.structs.replace(plain, sampling=sampling))


def test_penalties_are_those_of_the_closed_form(filled: Filled) -> None:
    prompt = random_prompts(1, seed=9)[0]
    plain = request(0, prompt, temperature=0.7, max_new_tokens=16)
    sampling = ServedSampling(
        **{
            **msgspec.structs.asdict(plain.sampling),
            "presence_penalty": 1.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
        }
    )
    made = run_all(filled.engine, [msgspec.structs.replace(plain, sampling=sampling)])[0]
    tokens = made.token_ids_T.tolist()
    with torch.no_grad():
        logits_TV = filled.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    expected = [
        (penalised(logits_TV[place], sampling, [*prompt], tokens[:place]) / 0.7).log_softmax(-1)[token].item()
        for place, token in enumerate(tokens)
    ]
    assert made.logprobs_T == pytest.approx(expected, abs=1e-3)
