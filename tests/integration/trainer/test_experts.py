"""Layers whose experts several ranks share, wherever tokens go, against the layers of Transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tandem.common.errors import ConfigError
from tandem.trainer.backends.sharding import share_out
from tests.harness.trainers.trainer_harness import ARCHITECTURES, run_ranks

pytestmark = pytest.mark.usefixtures("rank_server")

NUM_TOKENS, HIDDEN, CHOSEN = (5, 0, 2), 32, 2
ROUTES = {
    "anywhere": range(6),
    "to the first rank alone": range(2),
    "to the last expert alone": range(5, 6),
}


def make_layers(implementation: str) -> transformers.PreTrainedModel:
    settings = transformers.AutoConfig.for_model(**ARCHITECTURES["qwen3_moe"] | {"num_experts": 6})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(settings, experts_implementation=implementation)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens_of(rank: int, routes: range) -> list[torch.Tensor]:
    """Return hidden states, experts, gates, and the gradient of what comes of them."""
    torch.manual_seed(rank + 1)
    num = NUM_TOKENS[rank]
    experts = torch.tensor(routes)[torch.randint(len(routes), (num, CHOSEN))]
    hidden, gates, gradient = torch.randn(num, HIDDEN), torch.rand(num, CHOSEN), torch.randn(num, HIDDEN)
    return [hidden.requires_grad_(), experts, gates.requires_grad_(), gradient]


def compute(experts: torch.nn.Module, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what comes of tokens, and the gradients of hidden states, gates and weights."""
    hidden, chosen, gates, gradient = tokens
    found = experts(hidden, chosen, gates)
    wanted = [hidden, gates, *experts.parameters()]
    return [found.detach(), *torch.autograd.grad(found, wanted, gradient)]


def shared(rank: int, implementation: str, routes: range) -> list[np.ndarray[Any, Any]]:
    model = make_layers(implementation)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    experts, _ = share_out(model, mesh)
    found = compute(experts, tokens_of(rank, routes))
    return [(each.full_tensor() if isinstance(each, DTensor) else each).numpy() for each in found]


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_tokens_meet_their_experts_wherever_these_are(implementation: str, routes: range) -> None:
    experts = make_layers(implementation).get_submodule("model.layers.0.mlp.experts")
    ranks = run_ranks(3, shared, implementation, routes)
    tokens = [tokens_of(rank, routes) for rank in range(3)]
    together = [torch.cat([each.detach() for each in column]) for column in zip(*tokens, strict=True)]
    together = [each.requires_grad_(each.is_floating_point()) for each in together]
    expected = compute(experts, together)
    for index in range(3):  # what comes of tokens, and the gradients of hidden states and gates
        found = np.concatenate([rank[index] for rank in ranks])
        np.testing.assert_allclose(found, expected[index], rtol=1e-5, atol=1e-6)
    for rank in ranks:
        for found, whole in zip(rank[3:], expected[3:], strict=True):
            np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


def refusal(rank: int, architecture: str) -> str:
    settings = transformers.AutoConfig.for_model(**ARCHITECTURES[architecture])
    model = transformers.AutoModelForCausalLM.from_config(settings)
    with pytest.raises(ConfigError) as caught:
        share_out(model, init_device_mesh("cpu", (dist.get_world_size(), 1)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("qwen3", "3, but Qwen3ForCausalLM has no experts in one parameter for each layer"),
        ("qwen3_moe", "3 does not divide 4 experts"),
    ],
)
def test_models_without_such_experts_are_refused(architecture: str, expected: str) -> None:
    assert set(run_ranks(3, refusal, architecture)) == {f"dtensor_cfg.expert_parallel_size: {expected}"}
