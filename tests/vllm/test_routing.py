"""Where vLLM sends tokens: what is kept beside the cache of keys is what Hugging Face's routers choose."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import request, run_all

from tandem.common.routers import intercept
from tandem.rollout.engine import EngineCompletion
from tandem.samples.routed_experts import RoutedExperts
from tests.vllm.vllm_harness import refit, running, tiny_model, train

EXPERTS = RoutedExperts(num_layers=4, num_experts=4, top_k=2)
PREFIX = tuple(range(1, 41))
"""More than a block of the cache, which requests that begin with it share."""


def assert_routed(model: Any, prompt: tuple[int, ...], completion: EngineCompletion) -> None:
    """Compare with what the model's own routers choose."""
    token_ids = torch.tensor([[*prompt, *completion.token_ids_T.tolist()]])
    chosen: dict[int, torch.Tensor] = {}
    listened = copy.deepcopy(model)
    intercept(listened, lambda layer, own_NK: chosen.setdefault(layer, own_NK))
    with torch.no_grad():
        listened(input_ids=token_ids)
    assert completion.routed_experts_TX is not None
    found_TLK = EXPERTS.decode(completion.routed_experts_TX)
    assert len(found_TLK) == token_ids.shape[1] - 1
    for layer in range(EXPERTS.num_layers):
        expected_TK = chosen[layer][:-1].numpy() if layer in chosen else np.full((len(found_TLK), 2), -1)
        assert np.array_equal(np.sort(found_TLK[:, layer]), np.sort(expected_TK)), layer


@pytest.mark.parametrize("workers", ["one", "two"])
def test_tokens_went_where_routers_sent_them(workers: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", tmp_path, num_hidden_layers=4, mlp_only_layers=[1])
    settings = {
        "one": {},
        "two": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    }[workers]
    with running(tmp_path, settings, experts=EXPERTS) as engine:
        refit(engine, model, 0)
        prompts = [(*PREFIX, 50 + number % 2) for number in range(4)]
        found = run_all(engine, [request(number, prompt) for number, prompt in enumerate(prompts)])
        for number, prompt in enumerate(prompts):
            assert_routed(model, prompt, found[number])
        # The next turn: its keys are cached, and so is where its tokens went.
        longer = (*prompts[0], *found[0].token_ids_T.tolist(), 7, 8)
        assert_routed(model, longer, run_all(engine, [request(10, longer)])[10])
        train(model, 1)
        refit(engine, model, 1)
        assert_routed(model, longer, run_all(engine, [request(11, longer)])[11])
