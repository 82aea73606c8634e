"""Packed rows, and micro-batches by tokens, against plain rows and plain Hugging Face."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.common.errors import ConfigError, ModelError
from tandem.config import Config
from tandem.config.schema.columns import ADVANTAGES
from tandem.samples.batch import SampleBatch
from tandem.trainer.attention import explain_lookahead, explain_undivided, prepare_to_pack
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.batching.shard import pad
from tandem.trainer.models import has_linear_head
from tandem.trainer.scorers.scorer import TokenScorer
from tests.harness.trainers.reference import assert_same_steps, assert_same_weights, plain_grpo, trained_weights
from tests.harness.trainers.trainer_harness import (
    ARCHITECTURES,
    FAMILIES,
    OTHER_ATTENTION,
    STATEFUL,
    VOCABULARY,
    evaluate_rank,
    make_batch,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    train_rank,
)
from tests.unit.scoring_harness import LargestTensor

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-6
CPU = torch.device("cpu")
LENGTHS = (7, 32, 4, 12, 9)
"""Of five sequences: with rows of 32 tokens, one of them fills a row, and the others share."""


def by_tokens(kind: str, num_tokens: int = 32, **limits: Any) -> dict[str, Any]:
    """Return the setting of `policy` that makes micro-batches of so many tokens."""
    section = {"enabled": True, "train_mb_tokens": num_tokens, "logprob_mb_tokens": 2 * num_tokens, **limits}
    return {kind: section}


def batch_of_lengths(*lengths: int, seed: int = 0) -> SampleBatch:
    random = np.random.default_rng(seed)
    masks = [np.arange(length) >= 1 + length // 3 for length in lengths]
    num_tokens = sum(lengths)
    return SampleBatch(
        lengths_S=np.array(lengths, dtype=np.int32),
        token_ids_T=random.integers(3, VOCABULARY, num_tokens).astype(np.int32),
        loss_mask_T=np.concatenate(masks),
        generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
        advantages_S=random.normal(0.0, 1.0, len(lengths)).astype(np.float32),
        rewards_S=np.zeros(len(lengths), dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("architecture", "world_size"),
    [
        *((name, size) for name in ARCHITECTURES for size in (1, 2)),
        *((name, 2) for name in (*FAMILIES, *STATEFUL, *OTHER_ATTENTION, "deepseek_v32", "glm_moe_dsa", "falcon")),
    ],
)
def test_steps_with_packed_rows_match_a_plain_loop(architecture: str, world_size: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    config = make_config(
        folder,
        loss={"reference_policy_kl_penalty": 0.1},
        temperature=0.7,
        train_global_batch_size=8,
        **by_tokens("sequence_packing", sequence_length_round=8),
    )
    # Two optimizer steps a batch, so previous and reference log-probabilities are read as well.
    batches = [make_groups(4, 4, 4, 4, seed=seed) for seed in range(2)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain_grpo(model, batches, size=8, temperature=0.7, kl=0.1)

    ranks = run_ranks(world_size, train_rank, config, batches, tmp_path / "saved")
    assert_same_steps(ranks[0][0], expected, TOLERANCE)
    assert_same_weights(trained_weights(tmp_path / "saved"), model)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("deepseek_v4", "it has layers of type compressed_sparse_attention"),
        ("minimax", "its tokens meet outside of attention"),
    ],
)
def test_a_model_whose_sequences_would_meet_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", architecture))
    refusal = prepare_to_pack(model, 32)
    assert refusal is not None
    assert re.match(reason, refusal)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("deepseek_v32", "it has layers of type indexed_attention"),
        ("llama4_text", "it has attention in chunks"),
        ("lfm2", "it has layers that carry a state from token to token"),
    ],
)
def test_models_that_pack_and_whose_sequences_ranks_cannot_share(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", architecture))
    numbers = [getattr(module, "index_topk", None) for module in model.modules()]
    assert prepare_to_pack(model, 32) is None
    assert explain_undivided(model) == reason
    assert [getattr(module, "index_topk", None) for module in model.modules()] == numbers


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_no_way_of_batching_changes_a_number(architecture: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", architecture)
    batch = batch_of_lengths(*LENGTHS, 5, 21, 3)
    plain = {"train_micro_batch_size": 4, "share_prompts": False}
    found = []
    for world_size, settings in [
        (1, plain),
        (1, by_tokens("sequence_packing")),
        (1, by_tokens("sequence_packing", algorithm="concatenative", sequence_length_round=1)),
        (1, {"make_sequence_length_divisible_by": 8, **by_tokens("sequence_packing", 64)}),
        (2, by_tokens("sequence_packing", 32, algorithm="first_fit_shuffle")),
        (3, by_tokens("sequence_packing", 96, algorithm="first_fit_decreasing")),
        (1, by_tokens("dynamic_batching", sequence_length_round=8)),
        (2, by_tokens("dynamic_batching", 64, sequence_length_round=1)),
    ]:
        saved = tmp_path / str(len(found))
        config = make_config(folder, loss={"reference_policy_kl_penalty": 0.1}, **settings)
        ranks = run_ranks(world_size, train_rank, config, [batch], saved)
        found.append((ranks[0][0][0], trained_weights(saved)))
    metrics, weights = found[0]
    for other_metrics, other_weights in found[1:]:
        assert other_metrics == pytest.approx(metrics, rel=TOLERANCE, abs=TOLERANCE)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["sequence_packing", "dynamic_batching"])
def test_evaluation_by_tokens_is_evaluation(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    plain = run_ranks(1, evaluate_rank, make_config(folder, algorithm="sft"), make_batch())
    found = run_ranks(2, evaluate_rank, make_config(folder, algorithm="sft", **by_tokens(kind)), make_batch())
    for evaluation in found:
        assert evaluation == pytest.approx(plain[0], abs=TOLERANCE)


@pytest.mark.parametrize("key", ["activation_checkpointing_enabled", "precision"])
def test_packing_goes_with_recomputation_and_bfloat16(key: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    value: Any = True if key == "activation_checkpointing_enabled" else "bfloat16"
    batches = [make_batch(seed=seed) for seed in range(2)]
    plain = run_ranks(1, train_rank, make_config(folder, **{key: value}), batches)
    packed = run_ranks(1, train_rank, make_config(folder, **{key: value}, **by_tokens("sequence_packing")), batches)
    close = {"abs": 1e-6} if value is True else {"abs": 0.02, "rel": 0.05}
    for expected, found in zip(plain[0][0], packed[0][0], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], **close)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], **close)


def packed_model(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert prepare_to_pack(model, 64) is None
    return model


@pytest.mark.parametrize("rows", [range(5), [1]], ids=["several", "one that fills the row"])
def test_logprobs_and_gradients_are_those_of_padded_rows(rows: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    batch = batch_of_lengths(*LENGTHS)
    found = []
    for row_divisible_by in (None, 1):
        model = packed_model(folder)
        columns = {ADVANTAGES: batch.of_tokens("advantages")}
        micro = pad(batch, rows, divisible_by=1, device=CPU, row_divisible_by=row_divisible_by, columns=columns)
        logprobs_BT, entropy_BT, _ = TokenScorer(model, 0.7, linear_head=has_linear_head(model))(micro)
        (logprobs_BT * micro.advantages_BT).sum().div(micro.loss_mask_BT.sum()).backward()
        found.append((logprobs_BT, entropy_BT, {name: tensor.grad for name, tensor in model.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=TOLERANCE)


def test_no_token_attends_across_a_boundary(tmp_path: Path) -> None:
    """Neither what a neighbour says, nor whether it is there, reaches a sequence; nor does its gradient."""
    model = packed_model(make_model(tmp_path / "model"))
    batch = batch_of_lengths(*LENGTHS)
    micro = pad(batch, range(5), divisible_by=2, device=CPU, row_divisible_by=16)
    packed = micro.row
    assert packed is not None
    inputs = {"position_ids": packed.position_ids_1N, "row": packed, "use_cache": False}
    starts = np.cumsum([0, *packed.lengths]).tolist()
    with torch.no_grad():
        before_1NV = model(input_ids=packed.token_ids_1N, **inputs).logits
        for changed, length in enumerate(LENGTHS):
            token_ids_1N = packed.token_ids_1N.clone()
            own = slice(starts[changed], starts[changed] + length)
            token_ids_1N[0, own] = (token_ids_1N[0, own] + 1) % VOCABULARY
            after_1NV = model(input_ids=token_ids_1N, **inputs).logits
            for index, (start, end) in enumerate(itertools.pairwise(starts)):
                same = torch.equal(after_1NV[0, start:end], before_1NV[0, start:end])
                assert same == (index != changed)

    embedded_1NH = model.get_input_embeddings()(packed.token_ids_1N).detach().requires_grad_()
    logits_1NV = model(inputs_embeds=embedded_1NH, **inputs).logits
    logits_1NV[0, starts[2] : starts[3]].square().sum().backward()
    assert embedded_1NH.grad is not None
    reached_N = embedded_1NH.grad[0].abs().amax(dim=1) > 0
    assert reached_N.nonzero()[:, 0].tolist() == list(range(starts[2], starts[3]))


def test_a_backend_whose_model_cannot_take_packed_rows_says_so(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "config.json"
    rotation = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changes = {"rope_parameters": rotation, "max_position_embeddings": 16}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (message,) = run_ranks(1, error_of_backend, make_config(folder, **by_tokens("sequence_packing")))
    assert message == (
        "policy.sequence_packing.enabled: Qwen3ForCausalLM cannot take packed rows: its rotary embeddings of type "
        "dynamic turn tokens by the length of the longest row"
    )


def error_of_backend(rank: int, config: Config) -> str:
    with pytest.raises((ConfigError, ModelError)) as raised:
        DTensorBackend(config, checkpoint=None)
    return str(raised.value)


def test_a_model_whose_tokens_look_ahead_is_not_trained(tmp_path: Path) -> None:
    """Rows are padded without a mask: findings/doge_experts_of_other_tokens.sh."""
    folder = make_model(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for is_moe in (False, True):
        experts = {"is_moe": is_moe, "num_experts": 4, "num_experts_per_tok": 2}
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.DogeConfig(**sizes, **tokens, **experts, initializer_range=0.3)
        )
        assert (explain_lookahead(model.eval()) is not None) == is_moe
    model.save_pretrained(folder)
    (message,) = run_ranks(1, error_of_backend, make_config(folder))
    assert message == (
        f"{folder}: DogeForCausalLM cannot be trained: the logits of a token depend on the tokens after it"
    )


def tiny(config: Any, **sizes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY} | sizes
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(**sizes)).eval()


def test_a_long_row_of_a_large_vocabulary_never_has_all_its_logits() -> None:
    """Forward alone and with backward: no tensor is larger than the logits that may exist at once, 2**26."""
    model = tiny(transformers.Qwen3Config, hidden_size=16, vocab_size=2**15, tie_word_embeddings=True)
    length = 4096
    micro = pad(batch_of_lengths(length, length), (0,), divisible_by=1, device=CPU, row_divisible_by=1)
    num_logits = int(micro.loss_mask_BT.sum()) * 2**15
    scorer = TokenScorer(model, 1.0, linear_head=has_linear_head(model))
    assert prepare_to_pack(model, length) is None
    with torch.no_grad(), LargestTensor() as forward:
        scorer(micro)
    with LargestTensor() as backward:
        scorer(micro)[0].sum().backward()
    for largest in (forward, backward):
        assert 2**25 < largest.num_elements <= 2**26 < num_logits


def test_models_with_more_than_a_matrix_for_an_output_layer_are_scored_by_their_logits(tmp_path: Path) -> None:
    """A cap on the logits, a scale of them, a bias: none of it is left out."""
    batch = make_batch(3)
    micro = pad(batch, range(3), divisible_by=1, device=CPU)
    target_BT1 = micro.token_ids_BT[:, 1:, None]
    for model, is_linear in [
        (tiny(transformers.Qwen3Config), True),
        (tiny(transformers.Gemma2Config, final_logit_softcapping=0.5), False),
        (tiny(transformers.CohereConfig, logit_scale=0.25), False),
        (tiny(transformers.PhiConfig), False),
    ]:
        if not is_linear and model.get_output_embeddings().bias is not None:
            torch.nn.init.normal_(model.get_output_embeddings().bias)
        assert has_linear_head(model) == is_linear, type(model).__name__
        with torch.no_grad():
            logits = model(input_ids=micro.token_ids_BT, use_cache=False).logits / 0.7
            expected_BT = logits.log_softmax(-1)[:, :-1].gather(2, target_BT1)[:, :, 0] * micro.loss_mask_BT[:, 1:]
            logprobs_BT, entropy_BT, _ = TokenScorer(model, 0.7, linear_head=is_linear)(micro)
        torch.testing.assert_close(logprobs_BT[:, 1:], expected_BT, rtol=0, atol=1e-5)
        counted = micro.loss_mask_BT[:, 1:]
        entropies = torch.distributions.Categorical(logits=logits[:, :-1][counted]).entropy()
        torch.testing.assert_close(entropy_BT[:, 1:][counted], entropies, rtol=0, atol=1e-5)
