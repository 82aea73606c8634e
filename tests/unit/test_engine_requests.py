"""Requests come and go: order, stopping, aborting, pausing, versions, partial weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import (
    VOCABULARY,
    make_engine,
    make_model,
    make_programs,
    random_prompts,
    reference_logprobs,
    refit,
    request,
    run_all,
    shared_layout,
    write_byte_tokenizer,
)

from tandem.common.errors import DataError, ModelError, RefitError
from tandem.refit.layout import PrivateMemory
from tandem.refit.weights import host_name
from tandem.rollout.engines.transformers import TransformersEngine

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return make_model("qwen3", tmp_path)


def test_finished_requests_come_back_in_request_order_as_they_finish(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model, num_slots=4)
    lengths = {10: 3, 7: 1, 8: 3, 2: 2, 5: 2, 6: 1}
    for request_id, max_new_tokens in lengths.items():
        engine.add_request(request(request_id, PROMPT, max_new_tokens=max_new_tokens))
    assert engine.num_unfinished == 6
    by_step = []
    while engine.num_unfinished:
        by_step.append([completion.request_id for completion in engine.step()])
    # Slots 0-3 hold 10, 7, 8, 2; 5 takes the slot that 7 frees, 6 the one that 2 frees.
    assert by_step == [[7], [2], [10, 8, 5, 6]]
    assert engine.step() == []


def test_stop_token_ends_the_response_and_stays_in_it(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    free = run_all(engine, [request(0, PROMPT, max_new_tokens=20)])[0]
    assert free.finish_reason == "length"
    stop_ids = (VOCABULARY + 7, int(free.token_ids_T[6]))
    first = free.token_ids_T.tolist().index(stop_ids[1])
    both = run_all(
        engine,
        [
            request(1, PROMPT, seed=0, max_new_tokens=20, stop_token_ids=stop_ids),
            request(2, PROMPT, seed=0, max_new_tokens=20),
        ],
    )
    assert both[1].finish_reason == "stop"
    assert both[1].token_ids_T.tolist() == free.token_ids_T.tolist()[: first + 1]
    assert both[2].token_ids_T.tolist() == free.token_ids_T.tolist()


def test_a_stop_token_at_the_limit_counts_as_stop(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    free = run_all(engine, [request(0, PROMPT, max_new_tokens=1)])[0]
    stop_ids = (int(free.token_ids_T[0]),)
    made = run_all(engine, [request(1, PROMPT, seed=0, max_new_tokens=1, stop_token_ids=stop_ids)])[1]
    assert (made.finish_reason, len(made.token_ids_T)) == ("stop", 1)
    # The next request in the same slot does not inherit them.
    assert run_all(engine, [request(2, PROMPT, seed=0, max_new_tokens=1)])[2].finish_reason == "length"


def test_stop_string_across_tokens_ends_the_response(model: Any, tmp_path: Path) -> None:
    texts = write_byte_tokenizer(tmp_path)
    engine = make_engine(tmp_path, model)
    free = run_all(engine, [request(0, PROMPT, max_new_tokens=30)])[0].token_ids_T.tolist()
    stop_string = "".join(texts[token] for token in free[10:13])
    assert "\ufffd" not in stop_string
    text = "".join(texts[token] for token in free)
    assert len(text) == 30  # so that positions in text and in tokens are the same
    end = text.index(stop_string) + len(stop_string)
    both = run_all(
        engine,
        [
            request(1, PROMPT, seed=0, max_new_tokens=30, stop_strings=("not there", stop_string)),
            request(2, PROMPT, seed=0, max_new_tokens=30, stop_strings=("not there",)),
        ],
    )
    assert both[1].finish_reason == "stop"
    assert both[1].token_ids_T.tolist() == free[:end]
    assert both[2].finish_reason == "length"
    assert both[2].token_ids_T.tolist() == free


def test_stop_strings_need_a_tokenizer(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        engine.add_request(request(0, PROMPT, stop_strings=("x",)))


def test_a_response_ends_where_the_context_ends(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model, max_length=9)
    made = run_all(engine, [request(0, PROMPT, max_new_tokens=50)])[0]
    assert (made.finish_reason, len(made.token_ids_T)) == ("length", 4)
    assert np.abs(made.logprobs_T - reference_logprobs(model, PROMPT, made.token_ids_T)).max() < 1e-5


def test_prompts_that_leave_no_room_are_refused(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model, max_length=5)
    with pytest.raises(DataError, match=r"5 tokens leaves no room .* policy\.max_total_sequence_length=5"):
        engine.add_request(request(0, PROMPT))
    with pytest.raises(DataError, match="the prompt is empty"):
        engine.add_request(request(0, ()))
    assert engine.num_unfinished == 0


def test_abort_returns_what_was_made_and_disturbs_nobody(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model, num_slots=3)
    prompts = random_prompts(4)
    requests = [request(index, prompt) for index, prompt in enumerate(prompts)]
    expected = run_all(engine, requests)
    for one in requests:
        engine.add_request(one)
    for _ in range(5):
        assert engine.step() == []
    running, queued = engine.abort(0), engine.abort(3)
    assert running is not None
    assert queued is not None
    assert running.finish_reason == queued.finish_reason == "abort"
    assert running.token_ids_T.tolist() == expected[0].token_ids_T.tolist()[:5]
    assert len(queued.token_ids_T) == len(queued.logprobs_T) == len(queued.versions_T) == 0
    assert engine.abort(0) is None
    assert engine.abort(99) is None
    rest = run_all(engine, [])
    assert sorted(rest) == [1, 2]
    for index in (1, 2):
        assert rest[index].token_ids_T.tolist() == expected[index].token_ids_T.tolist()
        assert np.abs(rest[index].logprobs_T - expected[index].logprobs_T).max() < 1e-5


def test_pause_keeps_everything(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    expected = run_all(engine, [request(0, PROMPT)])[0]
    engine.add_request(request(0, PROMPT))
    for _ in range(4):
        assert engine.step() == []
    engine.pause()
    for _ in range(20):
        assert engine.step() == []
    assert engine.num_unfinished == 1
    engine.resume()
    assert run_all(engine, [])[0].token_ids_T.tolist() == expected.token_ids_T.tolist()


def test_ragged_requests_through_few_slots(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model, num_slots=4)
    prompts = random_prompts(40, seed=4)
    generator = np.random.default_rng(0)
    requests = [
        request(index, prompt, max_new_tokens=int(generator.integers(1, 30))) for index, prompt in enumerate(prompts)
    ]
    finished: dict[int, Any] = {}
    pending = list(requests)
    while pending or engine.num_unfinished:
        for one in pending[:2]:
            engine.add_request(one)
        pending = pending[2:]
        finished.update({completion.request_id: completion for completion in engine.step()})
    assert len(finished) == 40
    for one in requests:
        made = finished[one.request_id]
        assert len(made.token_ids_T) == one.sampling.max_new_tokens
        expected_T = reference_logprobs(model, one.prompt_ids, made.token_ids_T)
        assert np.abs(made.logprobs_T - expected_T).max() < 1e-5


def test_prompts_beyond_a_steps_budget_wait_for_the_next(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.rollout.engines.transformers.MAX_PROMPT_TOKENS_PER_STEP", 12)
    engine = make_engine(tmp_path, model)
    prompts = [(1,) * 8, (2,) * 4, (3,) * 20, (4,) * 2]
    for index, prompt in enumerate(prompts):
        engine.add_request(request(index, prompt, max_new_tokens=1))
    finished = []
    while engine.num_unfinished:
        finished.append([completion.request_id for completion in engine.step()])
    assert finished == [[0, 1], [2], [3]]


def test_tokens_carry_the_version_that_made_them(model: Any, tmp_path: Path) -> None:
    newer = make_model("qwen3", tmp_path, seed=1)
    engine = make_engine(tmp_path, model)
    engine.add_request(request(0, PROMPT, max_new_tokens=6))
    for _ in range(2):
        engine.step()
    refit(engine, newer, 7)
    assert engine.version == 7
    made = run_all(engine, [])[0]
    assert made.versions_T.tolist() == [0, 0, 7, 7, 7, 7]
    old_T = reference_logprobs(model, PROMPT, made.token_ids_T)
    assert np.abs(made.logprobs_T[:2] - old_T[:2]).max() < 1e-5
    assert np.abs(made.logprobs_T[2:] - old_T[2:]).max() > 1e-2
    fresh = run_all(engine, [request(1, PROMPT)])[1]
    assert np.abs(fresh.logprobs_T - reference_logprobs(newer, PROMPT, fresh.token_ids_T)).max() < 1e-5


def test_an_engine_serves_no_token_until_it_holds_a_whole_version(model: Any, tmp_path: Path) -> None:
    engine = TransformersEngine(tmp_path, num_slots=2, max_total_sequence_length=64, dtype="float32")
    assert engine.version is None
    with pytest.raises(RefitError, match="no transfer program"):
        engine.apply(0, 60.0)
    source = copy.deepcopy(model)
    engine.install(make_programs(shared_layout(source), engine))
    assert engine.version is None
    engine.add_request(request(0, PROMPT))
    with pytest.raises(RefitError, match="no whole weight version"):
        engine.step()
    engine.apply(1, 60.0)
    engine.step()
    with pytest.raises(RefitError, match="the deadline passed"):
        engine.apply(2, -1.0)
    assert engine.version is None
    with pytest.raises(RefitError, match="no whole weight version"):
        engine.step()
    engine.apply(3, 60.0)
    made = run_all(engine, [])[0]
    assert made.versions_T.tolist() == [1] + [3] * 11
    assert np.abs(made.logprobs_T - reference_logprobs(model, PROMPT, made.token_ids_T)).max() < 1e-5


def test_an_engine_that_is_not_asked_keeps_its_version(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    assert engine.apply(1, 60.0, only=("rollout-1",)) == {}
    assert engine.version == 0


def test_weights_that_are_not_numbers_are_reported(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    broken = make_model("qwen3", tmp_path)
    with torch.no_grad():
        broken.get_input_embeddings().weight.fill_(torch.nan)
    refit(engine, broken, 4)
    engine.add_request(request(0, PROMPT))
    with pytest.raises(ModelError, match="weight version 4 gives probabilities that are not numbers"):
        engine.step()


def test_sleep_gives_memory_back_and_wake_goes_on(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    before = run_all(engine, [request(0, PROMPT)])[0]
    assert engine._cache.num_bytes == 3 * 2 * 8 * 2 * 64 * 16 * 4  # layers, K and V, slots, heads, length, dim, float32
    engine.add_request(request(0, PROMPT))
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.sleep()
    engine.abort(0)
    engine.sleep()
    assert engine._cache.num_bytes == 0
    engine.add_request(request(0, PROMPT))
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.step()
    engine.wake()
    after = run_all(engine, [])[0]
    assert after.token_ids_T.tolist() == before.token_ids_T.tolist()
    assert after.logprobs_T.tolist() == before.logprobs_T.tolist()


def test_layout_describes_the_live_parameters(model: Any, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, model)
    layout = engine.layouts()[0]
    expected = dict(model.named_parameters())
    assert "lm_head.weight" not in expected  # tied
    assert [tensor.name for tensor in layout.tensors] == list(expected)
    assert [storage.name for storage in layout.storages] == list(expected)
    assert layout.host == host_name()
    for tensor, storage, (name, parameter) in zip(layout.tensors, layout.storages, expected.items(), strict=True):
        assert (tensor.shape, tensor.dtype) == (tuple(parameter.shape), "float32")
        (piece,) = layout.pieces_of(name)
        assert (piece.box.start, piece.box.shape) == ((0,) * parameter.dim(), tuple(parameter.shape))
        assert piece.strides == tuple(4 * stride for stride in parameter.stride())
        assert (piece.parameter, piece.offset) == (name, 0)
        assert storage.num_bytes == 4 * parameter.numel()
        assert isinstance(storage.address, PrivateMemory)
