"""Sampling masks on both backends: the policy is scored over the tokens that an engine drew from.

The rule is that of DeepSeek-V3.2's Keep Sampling Mask (arXiv:2512.02556, section 3.1), and the penalty is without masks
as in NeMo-RL v0.7 (``curr_logprobs_unfiltered`` in its ``ClippedPGLossFn``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.samples.batch import MASKS
from tests.harness.trainers.masks_harness import drawn, masked
from tests.harness.trainers.megatron_harness import (
    BATCHES,
    CP2,
    PP2,
    SP,
    TP2,
    config_for,
    make,
    make_checkpoint,
)
from tests.harness.trainers.reference import (
    TOLERANCE,
    assert_same_numbers,
    assert_same_steps,
    assert_same_weights,
    numbers_of,
    plain_grpo,
    plain_numbers,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import make_config, make_groups, make_model, run_ranks, train_rank

pytestmark = pytest.mark.usefixtures("rank_server")

CHARACTERS = "".join(map(chr, range(32, 150)))
TOP_P = {"top_p": 0.9}
SAMPLINGS: list[dict[str, Any]] = [
    TOP_P,
    {"top_k": 3},
    {"min_p": 0.3},
    {"top_p": 0.7, "top_k": 9, "min_p": 0.1},
    {"bad_token_ids": ((40,), (41,), (42, 43))},
]
LOSS = {"reference_policy_kl_penalty": 0.1}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 60}}


def dtensor(**sizes: Any) -> dict[str, Any]:
    return {"dtensor_cfg": {"enabled": True, **sizes}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a vocabulary in which masks are lists, or bitmaps of four words."""
    return make_model(tmp_path_factory.mktemp("model") / "model", characters=CHARACTERS)


def vocabulary_of(folder: Path) -> int:
    return int(transformers.AutoConfig.from_pretrained(folder).vocab_size)


@pytest.mark.parametrize(
    ("num_trainers", "policy"),
    [
        (1, {"share_prompts": False}),
        (2, {"share_prompts": True, "train_micro_batch_size": 4}),
        (1, PACKED),
        (2, {**PACKED, **dtensor(context_parallel_size=2)}),
        (2, {"share_prompts": False, **dtensor(tensor_parallel_size=2, sequence_parallel=True)}),
    ],
    ids=["padded", "prompts", "packed", "context", "tensor"],
)
def test_steps_match_a_plain_loop_that_masks_logits(
    model: Path, num_trainers: int, policy: Mapping[str, Any], tmp_path: Path
) -> None:
    vocabulary = vocabulary_of(model)
    batches = [masked(make_groups(4, 4, 4, 4, seed=seed), vocabulary, seed=seed) for seed in range(2)]
    generation = {"temperature": 0.8, **TOP_P}
    config = make_config(model, loss=LOSS, trainers=num_trainers, generation=generation, **policy)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    # Two optimizer steps a batch, so previous log-probabilities are computed as well, with masks; references without.
    expected = plain_grpo(plain, batches, size=8, kl=0.1, temperature=0.8)
    metrics, _ = run_ranks(num_trainers, train_rank, config, batches, tmp_path / "saved")[0]
    assert_same_steps(metrics, expected, TOLERANCE)
    assert_same_weights(trained_weights(tmp_path / "saved"), plain)


@pytest.mark.parametrize(
    ("num_ranks", "megatron", "policy"),
    [
        (1, {}, {}),
        (2, TP2 | SP, {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 96}}),
        (2, CP2, {}),
        (2, PP2, {}),
    ],
    ids=["one rank", "TP2, packed", "CP2", "PP2"],
)
def test_megatron_matches_the_plain_loop(
    num_ranks: int, megatron: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3")
    batches = [masked(batch, vocabulary_of(folder), seed=seed) for seed, batch in enumerate(BATCHES[:2])]
    expected = plain_numbers(folder, batches, temperature=0.7, kl=0.1, decays_vectors=False)
    config = config_for(folder, num_ranks, megatron, generation={"temperature": 0.7, **TOP_P}, **policy)
    assert_same_numbers(numbers_of(num_ranks, make, config, batches, tmp_path / "saved"), expected, 1e-5)


def tie(folder: Path) -> None:
    """Give tokens of the model in a folder equal rows in threes, so that their logits are always equal."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows_VH = plain.get_output_embeddings().weight.detach()
    num = len(rows_VH) // 3
    rows_VH[num : 2 * num] = rows_VH[2 * num : 3 * num] = rows_VH[:num]
    plain.save_pretrained(folder)


@pytest.mark.parametrize("has_ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_log_probabilities_are_the_engines_at_the_same_weights(
    num_trainers: int, has_ties: bool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", characters=CHARACTERS)
    if has_ties:
        tie(folder)
    batch = drawn(folder, vocabulary_of(folder), [{"temperature": 0.8, **sampling} for sampling in SAMPLINGS])
    lengths_T = batch.mask_lengths_T[batch.loss_mask_T]
    assert 0 < lengths_T.min() < lengths_T.max() == 4, "lists and bitmaps"
    sizes = dtensor(tensor_parallel_size=num_trainers)
    metrics = {}
    for name, generation in (("cut", TOP_P), ("whole", {})):
        config = make_config(
            folder,
            trainers=num_trainers,
            generation={"temperature": 0.8, **generation},
            max_total_sequence_length=64,
            **sizes,
        )
        own = batch if generation else batch.only([name for name in batch.columns if name not in MASKS])
        (metrics[name],), _ = run_ranks(num_trainers, train_rank, config, [own])[0]
    cut, whole = metrics["cut"], metrics["whole"]
    assert cut["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert cut["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert whole["sampling_importance_ratio"] < 0.95, "what it was before there were masks"
    assert cut["entropy"] < whole["entropy"]


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_a_divergence_in_the_reward_is_of_whole_distributions(num_trainers: int, tmp_path: Path) -> None:
    """Equal models do not diverge, whatever the policy drew from, so the penalty changes nothing."""
    folder = make_model(tmp_path / "model", characters=CHARACTERS)
    batch = drawn(folder, vocabulary_of(folder), [{"temperature": 0.8, **TOP_P}])
    metrics = []
    for penalty in (1e-12, 10.0):
        config = make_config(
            folder,
            loss={"reference_policy_kl_penalty": penalty, "use_kl_in_reward": True},
            trainers=num_trainers,
            generation={"temperature": 0.8, **TOP_P},
            max_total_sequence_length=64,
            estimator="reinforce_plus_plus",
            **dtensor(tensor_parallel_size=num_trainers),
        )
        (of_step,), _ = run_ranks(num_trainers, train_rank, config, [batch])[0]
        metrics.append(of_step)
    assert metrics[0]["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-5), "the loss is with masks"
    for name in ("loss", "grad_norm"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-5)


def test_weights_that_have_moved_leave_no_drawn_token_out(model: Path, tmp_path: Path) -> None:
    """The policy's own top-k would not have the tokens that another model drew."""
    other = make_model(tmp_path / "other", characters=CHARACTERS, seed=7)
    batch = drawn(other, vocabulary_of(other), [{"top_k": 2}])
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        token_ids = torch.from_numpy(batch.token_ids_T[: batch.lengths_S[0]].astype(np.int64))
        is_likely_TV = plain(input_ids=token_ids[None]).logits[0, :-1].argsort(descending=True)[:, :2]
    is_made_T = torch.from_numpy(batch.loss_mask_T[1 : batch.lengths_S[0]])
    assert not (is_likely_TV == token_ids[1:, None]).any(1)[is_made_T].all()
    config = make_config(model, generation={"top_k": 2}, max_total_sequence_length=64)
    (metrics,), _ = run_ranks(1, train_rank, config, [batch])[0]
    assert np.isfinite(metrics["loss"])
    assert metrics["token_mult_prob_error"] < 1e4
    assert metrics["grad_norm"] > 0
