"""Compiled layers and fused scores against plain Hugging Face and against the same layers as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from tandem.trainer.attention import ATTENTION_NAME, use_attention
from tandem.trainer.backends.compiling import compile_layers
from tests.harness.trainers.reference import assert_same_steps, assert_same_weights, plain_grpo, trained_weights
from tests.harness.trainers.trainer_harness import make_config, make_groups, make_model, run_ranks, train_rank

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler looks at attributes that torch warns of
]

TOLERANCE = 1e-5
"""Of float32: fused kernels add up in another order."""
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 64}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded, packed rows, recomputed": (2, {**PACKED, "dtensor_cfg": {"activation_checkpointing": True}}),
    "megatron": (1, {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}),
}
NUM_LAYERS = 10
"""More than the graphs that torch makes of one function."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("rank_server")
def test_steps_match_a_plain_loop(way: str, tmp_path: Path) -> None:
    world_size, policy = WAYS[way]
    folder = make_model(tmp_path / "model", "qwen3")
    config = make_config(
        folder,
        temperature=0.7,
        train_global_batch_size=8,
        compile=True,
        trainers=world_size,
        **policy,
    )
    batches = [make_groups(4, 4, 4, 4)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=8, temperature=0.7, kl=0.0)
    ranks = run_ranks(world_size, train_rank, config, batches, tmp_path / "saved", deadline_s=500.0)
    assert_same_steps(ranks[0][0], expected, TOLERANCE)
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


def gradients(model: Any, length: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of a sequence, and the gradients of their squares."""
    token_ids_BT = torch.randint(64, (1, length), generator=torch.Generator().manual_seed(length))
    position_ids_BT = torch.arange(length)[None]
    logits = model(input_ids=token_ids_BT, position_ids=position_ids_BT, use_cache=False).logits
    model.zero_grad()
    logits.square().mean().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recomputes", [True, False])
def test_layers_are_one_graph_with_their_attention(recomputes: bool) -> None:
    """For all layers, and all lengths."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    use_attention(model, ATTENTION_NAME)
    lengths = (9, 17, 32)
    expected = [gradients(model, length) for length in lengths]
    counters.clear()
    torch._dynamo.reset()
    compile_layers(model, with_attention=True, recomputes=recomputes)
    for length, (logits, of_parameters) in zip(lengths, expected, strict=True):
        found, found_of_parameters = gradients(model, length)
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(found_of_parameters, of_parameters, rtol=0, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


ONE_GRAPH = """
import torch
from tandem.trainer.backends.compiling import compiled, instruction_set

def sums(values_RV: torch.Tensor) -> torch.Tensor:
    return torch.stack([values_RV.exp().sum(-1), (values_RV * values_RV).sum(-1), values_RV.max(-1).values])

values_RV = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
torch.testing.assert_close(compiled(sums)(values_RV), sums(values_RV), rtol=1e-5, atol=0)
print(instruction_set())
"""


def test_processors_that_share_a_cache_have_kernels_of_their_own(tmp_path: Path) -> None:
    """First one without AVX-512, as `ATEN_CPU_CAPABILITY` makes of any."""
    folders = []
    for capability in ("avx2", "default", ""):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run([sys.executable, "-c", ONE_GRAPH], env=env, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        folders.append(done.stdout.strip())
    assert {path.name for path in tmp_path.iterdir()} == set(folders)
    assert len(set(folders)) >= 2
