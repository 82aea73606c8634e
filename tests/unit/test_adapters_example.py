"""The example of an adapter in the documentation does what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from adapters_harness import Weights, materialise, replicas
from example_adapter import layout
from torch.nn.functional import linear

from tandem.refit.adapters.catalogue import ModelShape, read_shape

HIDDEN, NUM_HEADS, SIZE = 8, 4, 2


@pytest.fixture(scope="module")
def real() -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(n_embd=HIDDEN, n_head=NUM_HEADS, n_layer=2, vocab_size=20, n_positions=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def shape(real: transformers.GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("gpt2")
    real.save_pretrained(folder)
    return read_shape(folder)


def engine_of(shape: ModelShape, real: transformers.GPT2LMHeadModel, rank: int) -> Weights:
    """The parameters of a rank, as the engine shapes them."""
    weights = {name: value.detach() for name, value in real.state_dict().items()}
    memory = materialise(layout(shape, rank, SIZE, "here"), weights)
    found = {}
    for name, memory_B in memory.items():
        is_turned = ".c_" in name and weights[name].ndim == 2
        columns = weights[name].shape[0] if is_turned else weights[name].shape[-1]
        if name.endswith("c_proj.weight"):
            columns //= SIZE
        flat = torch.from_numpy(memory_B.view(np.float32))
        found[name] = flat.reshape(-1, columns) if weights[name].ndim == 2 else flat
    return found


def test_the_ranks_of_the_engine_compute_what_gpt2_does(shape: ModelShape, real: transformers.GPT2LMHeadModel) -> None:
    block = real.transformer.h[0]
    hidden_BD = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    queries_BD, keys_BD, values_BD = block.attn.c_attn(hidden_BD).split(HIDDEN, dim=-1)
    after_BD = torch.zeros(5, HIDDEN)
    for rank in range(SIZE):
        own = engine_of(shape, real, rank)
        prefix = "transformer.h.0."
        heads_BD = linear(hidden_BD, own[prefix + "attn.c_attn.weight"], own[prefix + "attn.c_attn.bias"])
        expected_BD = torch.cat([part_BD.chunk(SIZE, -1)[rank] for part_BD in (queries_BD, keys_BD, values_BD)], -1)
        torch.testing.assert_close(heads_BD, expected_BD)
        inner_BF = linear(hidden_BD, own[prefix + "mlp.c_fc.weight"], own[prefix + "mlp.c_fc.bias"])
        after_BD += linear(block.mlp.act(inner_BF), own[prefix + "mlp.c_proj.weight"])
        torch.testing.assert_close(own["transformer.wte.weight"], real.transformer.wte.weight.detach())
    torch.testing.assert_close(after_BD + block.mlp.c_proj.bias, block.mlp(hidden_BD))


def test_every_element_has_a_place(shape: ModelShape) -> None:
    held = replicas([layout(shape, rank, SIZE, "here") for rank in range(SIZE)])
    cut = (".c_attn.", ".c_fc.", "c_proj.weight")
    assert held == {name: {1 if any(part in name for part in cut) else SIZE} for name in held}
