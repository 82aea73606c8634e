"""Plans for tensor parallelism: which there are, and what is said of one that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem.common.errors import ConfigError
from tandem.config.models.families import TENSOR_PLANS
from tandem.trainer.backends.tensor_plans import cut, load_plan, plan_of

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 24,
    "pad_token_id": 0,
}
KEY = "policy.dtensor_cfg.custom_parallel_plan: "
PLANS = """
from torch.distributed.tensor.parallel import ColwiseParallel

embedding = {"model.embed_tokens": ColwiseParallel()}
plan = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "lm_head": ColwiseParallel()}
mistyped = {"model.layers.*.mlp.upproj": ColwiseParallel()}
nothing = {}
names = {"lm_head": "colwise"}

def make_plan():
    return plan
"""


def model_of(model_type: str, device: str = "meta", **sizes: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, "num_key_value_heads": 2, **sizes})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", [*TENSOR_PLANS, "gemma", "smollm3", "seed_oss", "helium"])
def test_a_plan_cuts_every_projection_of_attention(model_type: str) -> None:
    model = model_of(model_type)
    plan = plan_of(model, 2, sequence_parallel=False)
    modules = {name for name, _ in model.named_modules()}
    assert plan.keys() <= modules
    assert {name for name in modules if "self_attn." in name and name.endswith("_proj")} <= plan.keys()


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2, but there is no plan for olmo2, only for "):
        plan_of(model_of("olmo2"), 2, sequence_parallel=False)
    with pytest.raises(ConfigError, match=r"sequence_parallel: true, but the norms of gemma are not known to be those"):
        plan_of(model_of("gemma", head_dim=4), 2, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 4 does not divide 2 heads of attention"):
        plan_of(model_of("llama"), 4, sequence_parallel=False)


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plans_of_mine.py").write_text(PLANS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("name", ["plan", "make_plan"])
def test_a_plan_is_a_dict_or_made_by_a_function(name: str) -> None:
    assert load_plan(f"plans_of_mine.{name}", model_of("mistral")).keys() == {"model.layers.*.mlp.up_proj", "lm_head"}


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("no_such_module.plan", "cannot import 'no_such_module.plan': No module named 'no_such_module'"),
        ("plans_of_mine.mke_plan", "plans_of_mine has no 'mke_plan'; did you mean 'make_plan'?"),
        ("plans_of_mine.nothing", "'plans_of_mine.nothing' is no plan: a dict from paths of modules to styles of "),
        ("plans_of_mine.names", "'plans_of_mine.names' is no plan: a dict from paths of modules to styles of "),
        (
            "plans_of_mine.mistyped",
            "'plans_of_mine.mistyped' names 'model.layers.*.mlp.upproj', which the model has not",
        ),
    ],
)
def test_what_is_no_plan_is_said_in_one_line(path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plan(path, model_of("llama"))
    assert str(caught.value).startswith(KEY + expected)


@pytest.mark.usefixtures("plans")
def test_an_output_layer_that_is_the_embedding_is_cut_by_rows() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        transfer_group = init_device_mesh("cpu", (2,))
        tied = model_of("llama", "cpu", tie_word_embeddings=True)
        cut(tied, transfer_group, sequence_parallel=False, custom_plan="plans_of_mine.plan")
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
        assert tied.lm_head.weight.placements == (Shard(0),)
        tied = model_of("llama", "cpu", tie_word_embeddings=True)
        with pytest.raises(ConfigError, match=r"the embedding is the output layer too, so only RowwiseParallel can"):
            cut(tied, transfer_group, sequence_parallel=False, custom_plan="plans_of_mine.embedding")
    finally:
        dist.destroy_process_group()
