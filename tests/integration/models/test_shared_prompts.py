"""Prompts computed once for all of their responses, against plain rows and plain Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.config import Config
from tandem.config.schema.columns import ADVANTAGES
from tandem.samples.batch import SampleBatch, build_given_table
from tandem.trainer.attention import prepare_to_share
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.batching.shard import pad
from tests.harness.trainers.reference import assert_same_steps, assert_same_weights, plain_grpo, trained_weights
from tests.harness.trainers.trainer_harness import (
    ARCHITECTURES,
    FAMILIES,
    OTHER_ATTENTION,
    STATEFUL,
    UNSHARED,
    make_batch,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    train_on,
    train_rank,
)

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-6
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("architecture", "world_size"),
    [
        *((name, size) for name in ARCHITECTURES for size in (1, 2)),
        *((name, 1) for name in (*FAMILIES, *STATEFUL, *OTHER_ATTENTION)),
    ],
)
def test_steps_with_shared_prompts_match_a_plain_loop(architecture: str, world_size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    config = make_config(
        folder,
        loss={"reference_policy_kl_penalty": 0.1},
        temperature=0.7,
        train_global_batch_size=8,
        train_micro_batch_size=4,
        logprob_batch_size=3,
    )
    # Two optimizer steps a batch, so previous and reference log-probabilities are read as well.
    batches = [make_groups(4, 4, 4, 4, seed=seed) for seed in range(2)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=8, temperature=0.7, kl=0.1)

    ranks = run_ranks(world_size, train_counting_tokens, config, batches, tmp_path / "saved")
    metrics, num_tokens = ranks[0][:2]
    assert_same_steps(metrics, expected, TOLERANCE)
    assert min(num_tokens) > 0, "prompts were shared"
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


def train_counting_tokens(rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path) -> Any:
    """Train; return the metrics of each batch, the tokens in its rows that share prompts, and what was said."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        backend = DTensorBackend(config, checkpoint=None)
    counts = []

    def count(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("row") is not None:
            counts[-1] += kwargs["input_ids"].numel()

    backend._held["policy", 0].model.register_forward_pre_hook(count, with_kwargs=True)
    metrics = []
    for batch in batches:
        counts.append(0)
        metrics.append(train_on(backend, batch, config).metrics)
    backend.save(folder).num_bytes.result()
    return metrics, counts, said.getvalue()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_sharing_changes_no_number(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    # Groups that fit neither micro-batches nor hands, one of them alone; rows of several widths.
    batch = make_groups(5, 3, 1, 3, 4, seed=3)
    found = []
    for shares, micro_batch_size, divisible_by, world_size in [
        (False, 8, 1, 1),
        (True, 8, 1, 1),
        (True, 4, 16, 1),
        (True, 2, 1, 2),
        (True, 4, 1, 3),
    ]:
        config = make_config(
            folder,
            share_prompts=shares,
            train_micro_batch_size=micro_batch_size,
            make_sequence_length_divisible_by=divisible_by,
        )
        saved = tmp_path / f"{shares}-{micro_batch_size}-{world_size}"
        history, _ = run_ranks(world_size, train_rank, config, [batch], saved)[0]
        found.append((history[0], trained_weights(saved)))
    metrics, weights = found[0]
    for other_metrics, other_weights in found[1:]:
        assert other_metrics == pytest.approx(metrics, rel=TOLERANCE, abs=TOLERANCE)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("key", ["activation_checkpointing_enabled", "precision"])
def test_sharing_goes_with_recomputation_and_bfloat16(key: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    value: Any = True if key == "activation_checkpointing_enabled" else "bfloat16"
    loss = {"reference_policy_kl_penalty": 0.1}
    batches = [make_groups(4, 4, seed=seed) for seed in range(2)]
    plain = run_ranks(1, train_rank, make_config(folder, loss=loss, share_prompts=False, **{key: value}), batches)
    shared = run_ranks(1, train_rank, make_config(folder, loss=loss, train_micro_batch_size=8, **{key: value}), batches)
    close = {"abs": 1e-6} if value is True else {"abs": 0.02, "rel": 0.05}
    for expected, found in zip(plain[0][0], shared[0][0], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], **close)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], **close)


def test_logprobs_and_gradients_are_those_of_the_samples_one_by_one(tmp_path: Path) -> None:
    from tandem.trainer.models import has_linear_head
    from tandem.trainer.scorers.scorer import TokenScorer

    folder = make_model(tmp_path / "model")
    batch = make_groups(4, 2)
    batch = batch.replace(**build_given_table(batch).columns)
    found = []
    for shares in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        if shares:
            assert prepare_to_share(model, 64) is None
        columns = {ADVANTAGES: batch.of_tokens("advantages")}
        micro = pad(batch, range(6), divisible_by=1, device=CPU, shares_prompts=shares, columns=columns)
        assert (micro.row is None) == (not shares)
        logprobs_BT, entropy_BT, _ = TokenScorer(model, 0.7, linear_head=has_linear_head(model))(micro)
        (logprobs_BT * micro.advantages_BT).sum().div(micro.loss_mask_BT.sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((logprobs_BT, entropy_BT, gradients))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=TOLERANCE)


def test_without_shared_prompts_the_model_is_as_it_was(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    token_ids = torch.arange(3, 15).view(2, 6)
    before = model(input_ids=token_ids).logits
    assert prepare_to_share(model, 64) is None
    assert torch.equal(model(input_ids=token_ids).logits, before)
    model.save_pretrained(tmp_path / "again")
    assert "tandem" not in (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.PhiConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=16),
            "its rotary embeddings of type dynamic turn tokens by the length of the longest row",
        ),
        (
            transformers.PhimoeConfig(sliding_window=16, num_local_experts=2),
            "layer 0 does not tell its attention that it slides over 16",
        ),
        (transformers.BloomConfig(), "its tokens meet outside of attention|it takes no attention but its own"),
        (
            transformers.DeepseekV32Config(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1),
            "it has layers of type indexed_attention",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_cannot_share_says_why_and_is_as_it_was(config: Any, reason: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 24, "n_head": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "n_layer": 2, "head_dim": 8}
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(config, name, size)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    attention = model.config._attn_implementation
    found = prepare_to_share(model, 32)
    assert found is not None
    assert re.match(reason, found)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("architecture", UNSHARED)
def test_steps_of_models_that_cannot_share_match_a_plain_loop(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    config = make_config(folder, train_global_batch_size=8, train_micro_batch_size=4, logprob_batch_size=3)
    batches = [make_groups(4, 4, 4, 4, seed=seed) for seed in range(2)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=8)
    metrics, num_tokens, said = run_ranks(1, train_counting_tokens, config, batches, tmp_path / "saved")[0]
    assert_same_steps(metrics, expected, TOLERANCE)
    assert num_tokens == [0, 0]
    assert f"policy.share_prompts has no effect: {type(model).__name__} cannot share: " in said
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


def test_a_backend_that_cannot_share_trains_plain_rows(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "config.json"
    rotation = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changes = {"rope_parameters": rotation, "max_position_embeddings": 16}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = make_config(folder, train_micro_batch_size=4)
    _, counts, said = run_ranks(1, train_counting_tokens, config, [make_groups(4, 4)], tmp_path / "saved")[0]
    assert counts == [0]
    assert "policy.share_prompts has no effect: Qwen3ForCausalLM cannot share: its rotary embeddings of" in said


def test_sequences_without_a_common_prompt_stay_plain_rows(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"), train_micro_batch_size=8)
    _, counts, said = run_ranks(1, train_counting_tokens, config, [make_batch()], tmp_path / "saved")[0]
    assert counts == [0]
    assert said == ""
