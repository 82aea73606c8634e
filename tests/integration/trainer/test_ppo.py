"""PPO under both backends: the numbers of Hugging Face models in one process, however work is shared."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tandem.config import Config
from tandem.config.placement import list_model_groups
from tandem.config.schema import PpoConfig
from tandem.samples.batch import SampleBatch
from tandem.trainer import step
from tandem.trainer.backends import make_backend
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.backends.holding import OffloadedStorages
from tandem.trainer.exposed_weights import local_of
from tests.harness.trainers.megatron_harness import CP2, PP2, SP, TP2
from tests.harness.trainers.megatron_harness import OPTIMIZER as MEGATRON_OPTIMIZER
from tests.harness.trainers.reference import sequences_of
from tests.harness.trainers.reference_ppo import (
    CLIP,
    GAMMA,
    LAMBDA,
    OPTIMIZER,
    SCALE,
    VALUE_CLIP,
    PlainPpo,
    plain_ppo,
    values_of,
)
from tests.harness.trainers.trainer_harness import (
    begin,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    said_by,
    share_of,
)

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
KL = 0.05
EPOCHS, SIZE = 2, 4
WARM_UP = 1
BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
LOSS = {
    "reference_policy_kl_penalty": KL,
    "reference_policy_kl_type": "k1",
    "use_kl_in_reward": True,
    "ratio_clip_min": CLIP,
    "ratio_clip_max": CLIP,
}
PPO = {
    "ppo_epochs": EPOCHS,
    "policy_training_start_step": WARM_UP,
    "adv_estimator": {"gae_gamma": GAMMA, "gae_lambda": LAMBDA},
}


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
BY_TOKENS = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 80}}
ONE_BY_ONE = {"train_micro_batch_size": 1, "share_prompts": False, "activation_checkpointing_enabled": True}
TORCH = {"name": "torch.optim.AdamW", "kwargs": OPTIMIZER}
LEARNS: dict[str, Any] = {"optimizer": MEGATRON_OPTIMIZER | {"weight_decay": 0.0}}
MEGATRON: dict[str, Any] = {"enabled": True, **LEARNS}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "one rank, values one by one": (1, {}, ONE_BY_ONE),
    "two ranks": (2, {}, {}),
    "two ranks, a packed policy and values batched by tokens": (2, PACKED, BY_TOKENS),
    "two ranks, packed values": (2, {}, PACKED),
    "two tensor-parallel ranks, values cut along sequences": (
        2,
        {"dtensor_cfg": {"tensor_parallel_size": 2}},
        {"dtensor_cfg": {"sequence_parallel": True}},
    ),
    "two context-parallel ranks": (2, {"dtensor_cfg": {"context_parallel_size": 2}}, {}),
    "two whole replicas, tensor-parallel values": (
        2,
        {"dtensor_cfg": {"dp_replicate_size": 2}},
        {"dtensor_cfg": {"tensor_parallel_size": 2, "dp_replicate_size": 1}},
    ),
    "two ranks, tensor-parallel values": (2, {}, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "two tensor-parallel ranks, packed values of their own": (
        2,
        {"dtensor_cfg": {"tensor_parallel_size": 2}},
        {"dtensor_cfg": {"tensor_parallel_size": 1}, **PACKED},
    ),
    "two packed ranks, values one by one": (2, PACKED, ONE_BY_ONE),
    "Megatron-Core, two ranks": (2, {"megatron_cfg": MEGATRON}, {"megatron_cfg": LEARNS}),
    "Megatron-Core, two stages, packed values": (
        2,
        {"megatron_cfg": MEGATRON | PP2},
        {"megatron_cfg": LEARNS, **PACKED},
    ),
    "Megatron-Core, two tensor-parallel ranks, values cut along sequences": (
        2,
        {"megatron_cfg": MEGATRON | TP2},
        {"megatron_cfg": LEARNS | SP},
    ),
    "Megatron-Core, two tensor-parallel ranks, two of values": (
        2,
        {"megatron_cfg": MEGATRON | TP2},
        {"megatron_cfg": LEARNS | {"tensor_model_parallel_size": 1}, **PACKED},
    ),
    "Megatron-Core, four ranks, values in two stages of two replicas": (
        4,
        {"megatron_cfg": MEGATRON | TP2},
        {"megatron_cfg": LEARNS | PP2 | {"tensor_model_parallel_size": 1}},
    ),
    "Megatron-Core, two ranks, tensor-parallel values": (2, {"megatron_cfg": MEGATRON}, {"megatron_cfg": LEARNS | TP2}),
    "Megatron-Core, two stages, values cut along sequences": (
        2,
        {"megatron_cfg": MEGATRON | PP2},
        {"megatron_cfg": LEARNS | TP2 | SP | {"pipeline_model_parallel_size": 1}},
    ),
    "Megatron-Core, two context-parallel ranks, values in two stages": (
        2,
        {"megatron_cfg": MEGATRON | CP2},
        {"megatron_cfg": LEARNS | PP2 | {"context_parallel_size": 1}},
    ),
    "Megatron-Core, two context-parallel ranks": (2, {"megatron_cfg": MEGATRON | CP2}, {"megatron_cfg": LEARNS}),
}
"""Ranks, and keys of ``policy`` and ``value``."""


def ppo_config(
    model: Path,
    policy: Mapping[str, Any],
    value: Mapping[str, Any],
    trainers: int = 1,
    processes_of: Mapping[str, int] | None = None,
) -> Config:
    return make_config(
        model,
        algorithm="ppo",
        loss=LOSS,
        ppo=PPO,
        value={"optimizer": TORCH, **value},
        value_loss={"scale": SCALE, "cliprange": VALUE_CLIP},
        trainers=trainers,
        processes_of=processes_of,
        **{"train_global_batch_size": SIZE, "optimizer": TORCH, **policy},
    )


def train_steps(
    rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path, first: int = 1
) -> list[dict[str, float]]:
    """Train on batches as the steps from `first` on, and save; go on from the checkpoint before it if there is one."""
    checkpoint = folder / f"step_{first - 1}" if first > 1 else None
    backend, exchange = begin(rank, config, checkpoint)
    metrics = []
    for number, batch in enumerate(batches, start=first):
        trained, shared = config.trained_in(number), share_of(backend, batch, config, exchange=exchange)
        metrics.append(step.train(backend, *shared, config, trained=trained, exchange=exchange).metrics)
    target = folder / f"step_{first - 1 + len(batches)}"
    backend.save(target).num_bytes.result()
    return metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainPpo:
    torch.set_num_threads(1)
    return plain_ppo(model, BATCHES, size=SIZE, epochs=EPOCHS, kl=KL, skipped=WARM_UP)


def train_plainly(rank: int, config: Config, batches: Sequence[SampleBatch]) -> list[dict[str, float]]:
    backend = DTensorBackend(config, checkpoint=None)
    return [step.train(backend, *share_of(backend, batch, config), config).metrics for batch in batches]


def train_and_move(rank: int, config: Config, batches: Sequence[SampleBatch]) -> list[dict[str, float]]:
    """Train, and after each step move what may be moved away, and back."""
    backend = DTensorBackend(config, checkpoint=None)
    metrics = []
    for batch in batches:
        metrics.append(step.train(backend, *share_of(backend, batch, config), config).metrics)
        value = backend._held["value", 0]
        held = sum(local_of(parameter).nbytes for parameter in value.parameters.values())
        tensors = value.movable()
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        assert sum(sizes) >= 3 * held, "two moments of each parameter, and the parameters"
        moved = OffloadedStorages(tensors)
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        moved.reload()
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    return metrics


def assert_same_steps(found: Sequence[float], expected: Sequence[float], *, is_norm: bool) -> None:
    """Compare the mean of each batch with the optimizer steps that it took."""
    means = np.reshape(expected, (len(found), -1)).mean(axis=1)
    if is_norm:
        np.testing.assert_allclose(found, means, rtol=TOLERANCE, atol=0)
    else:
        np.testing.assert_allclose(found, means, rtol=0, atol=TOLERANCE)


def assert_same_weights(found: Any, expected: Any) -> None:
    weights = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        difference = (weights[name] - parameter).abs().max()
        assert difference < TOLERANCE, f"{name} differs by {difference}"


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_a_plain_loop(case: str, model: Path, plain: PlainPpo, tmp_path: Path) -> None:
    num_ranks, policy, value = CASES[case]
    config = ppo_config(model, policy, value, num_ranks)
    ranks = run_ranks(num_ranks, train_steps, config, BATCHES, tmp_path)
    metrics = ranks[0]
    assert all(other == metrics for other in ranks), "every rank reports the same"
    assert_plain(metrics, tmp_path / "step_3", plain)


OWN: dict[str, tuple[dict[str, int], int, dict[str, Any], dict[str, Any]]] = {
    "one process each": ({"reference": 1, "value": 1}, 1, {}, {}),
    "one policy, tensor-parallel values": ({"value": 2}, 1, {}, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "two packed ranks, values one by one": ({"value": 1}, 2, PACKED, ONE_BY_ONE),
    "tensor-parallel policy and reference, two ranks of values": (
        {"reference": 2, "value": 2},
        2,
        {"dtensor_cfg": {"tensor_parallel_size": 2}},
        BY_TOKENS,
    ),
    "Megatron-Core, two stages, values by FSDP2": (
        {"value": 1},
        2,
        {"megatron_cfg": MEGATRON | PP2},
        {"megatron_cfg": {"enabled": False}},
    ),
    "FSDP2, tensor-parallel values by Megatron-Core": ({"value": 2}, 1, {}, {"megatron_cfg": MEGATRON | TP2}),
}
"""Processes of models, of the policy, and keys of ``policy`` and ``value``."""


@pytest.mark.parametrize("case", OWN)
def test_models_with_processes_of_their_own_are_the_same_and_go_on_anywhere(
    case: str, model: Path, plain: PlainPpo, tmp_path: Path
) -> None:
    processes_of, num_ranks, policy, value = OWN[case]
    apart = ppo_config(model, policy, value, num_ranks, processes_of)
    ranks = run_ranks(apart.num_trainers, train_steps, apart, BATCHES[:2], tmp_path)
    # An optimizer's state is read by the backend that wrote it.
    then = apart if "Megatron" in case else ppo_config(model, {}, {}, 1)
    last = run_ranks(then.num_trainers, train_steps, then, BATCHES[2:], tmp_path, 3)
    of_value = list_model_groups(apart)[-1].first
    assert {name.partition("/")[0] for each in ranks[of_value] for name in each} == {"value"}
    metrics = [policy | value for policy, value in zip(ranks[0], ranks[of_value], strict=True)]
    metrics += [last[0][0] | last[of_value if then is apart else 0][0]]
    assert_plain(metrics, tmp_path / "step_3", plain)


def assert_plain(metrics: Sequence[dict[str, float]], saved: Path, plain: PlainPpo) -> None:
    """Compare all steps, and the weights that they end with, with those of the plain loop."""
    assert "loss" not in metrics[0], "the policy is not trained before its first step"
    for name, is_norm in (("loss", False), ("grad_norm", True)):
        column = int(is_norm)
        values = [each[f"value/{name}"] for each in metrics]
        assert_same_steps(values, [each[column] for each in plain.value_steps], is_norm=is_norm)
        found = [each[name] for each in metrics[WARM_UP:]]
        assert_same_steps(found, [each[column] for each in plain.policy_steps], is_norm=is_norm)
    assert_same_weights(transformers.AutoModelForCausalLM.from_pretrained(saved / "policy"), plain.policy)
    trained = transformers.AutoModelForTokenClassification.from_pretrained(saved / "value")
    assert_same_weights(trained, plain.value)
    assert trained.config.num_labels == 1


def test_a_value_model_that_was_in_host_memory_between_steps_is_the_same(model: Path) -> None:
    """On a CPU the memory goes from one place to another, with the code that moves it between a GPU and its host."""
    config = msgspec.structs.replace(ppo_config(model, {}, {}, 2), ppo=PpoConfig(ppo_epochs=1))
    moved, plainly = (run_ranks(2, train, config, BATCHES[:2]) for train in (train_and_move, train_plainly))
    assert moved == plainly


@pytest.mark.parametrize("case", ["two stages, packed values", "two tensor-parallel ranks, two of values"])
def test_models_that_megatron_core_trains_are_resumed_to_the_bit(case: str, model: Path, tmp_path: Path) -> None:
    config = ppo_config(model, *CASES[f"Megatron-Core, {case}"][1:], 2)
    whole = run_ranks(2, train_steps, config, BATCHES, tmp_path)[0]
    kept = tensors_of(tmp_path / "step_3")
    assert {path.parts[0] for path, _ in kept} == {"policy", "optimizer", "value", "value_optimizer"}
    run_ranks(2, train_steps, config, BATCHES[:2], tmp_path)
    resumed = run_ranks(2, train_steps, config, BATCHES[2:], tmp_path, 3)[0]
    assert resumed == whole[2:]
    assert tensors_of(tmp_path / "step_3") == kept


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("two ranks, tensor-parallel values", "two tensor-parallel ranks, packed values of their own"),
        (
            "Megatron-Core, two ranks, tensor-parallel values",
            "Megatron-Core, two context-parallel ranks, values in two stages",
        ),
    ],
    ids=["DTensor", "Megatron-Core"],
)
def test_a_resumed_run_may_divide_the_ranks_otherwise_for_each_model(
    first: str, then: str, model: Path, plain: PlainPpo, tmp_path: Path
) -> None:
    former, later = (ppo_config(model, *CASES[case][1:], 2) for case in (first, then))
    run_ranks(2, train_steps, former, BATCHES[:2], tmp_path)
    run_ranks(2, train_steps, later, BATCHES[2:], tmp_path, 3)
    saved = tmp_path / "step_3"
    assert_same_weights(transformers.AutoModelForCausalLM.from_pretrained(saved / "policy"), plain.policy)
    assert_same_weights(transformers.AutoModelForTokenClassification.from_pretrained(saved / "value"), plain.value)


@pytest.mark.parametrize(
    "case",
    [
        "two ranks",
        "two ranks, tensor-parallel values",
        "Megatron-Core, two tensor-parallel ranks, two of values",
    ],
)
def test_sequences_that_generation_saw_differently_teach_neither_model(case: str, model: Path, tmp_path: Path) -> None:
    num_ranks, policy, value = CASES[case]
    config = ppo_config(model, policy, value, num_ranks)
    both = msgspec.structs.replace(config.ppo, policy_training_start_step=0)
    strict = msgspec.structs.replace(both, seq_logprob_error_threshold=8.0)
    batch, wrong_S = BATCHES[0], np.isin(np.arange(8), [1, 6])
    wrong_T = np.repeat(wrong_S, batch.lengths_S) & batch.loss_mask_T
    batch = batch.replace(generation_logprobs_T=batch.generation_logprobs_T - np.where(wrong_T, np.float32(4), 0))
    without = batch.replace(loss_mask_T=batch.loss_mask_T & ~wrong_T)
    found = []
    for name, section, given in (("all", strict, batch), ("fewer", both, without)):
        settings = msgspec.structs.replace(config, ppo=section)
        found.append(run_ranks(num_ranks, train_steps, settings, [given], tmp_path / name)[0][0])
    metrics, expected = found
    assert metrics["num_masked_seqs_by_logprob_error"] == 2
    assert metrics["num_valid_samples"] == 6
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    tensors, others = (
        {
            path.relative_to(tmp_path / name / "step_1"): load_file(path)
            for path in (tmp_path / name).rglob("model.saf*")
        }
        for name in ("all", "fewer")
    )
    assert {path.parts[0] for path in tensors} == {"policy", "value"}
    for path, weights in others.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(tensors[path][name], tensor, rtol=0, atol=TOLERANCE)


def tensors_of(checkpoint: Path) -> dict[tuple[Path, str], bytes]:
    """Every tensor of a checkpoint, to the bit, by its file and its name."""
    return {
        (path.relative_to(checkpoint), name): tensor.numpy().tobytes()
        for path in checkpoint.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("backend", ["DTensor", "Megatron-Core, two tensor-parallel ranks"])
def test_a_value_model_may_begin_as_a_reward_model(backend: str, model: Path, tmp_path: Path) -> None:
    reward_model = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(reward_model.score.weight)
    reward_model.save_pretrained(tmp_path / "reward")
    (num_ranks, policy, learns) = (1, {}, {}) if backend == "DTensor" else (2, {"megatron_cfg": MEGATRON | TP2}, LEARNS)
    value = {"model_name": str(tmp_path / "reward"), "megatron_cfg": learns}
    config = ppo_config(model, policy, value, num_ranks)
    (batch, *_), tokens = BATCHES, BATCHES[0].valid()
    plain = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "reward", num_labels=1).eval()
    torch.nn.init.zeros_(plain.score.bias)
    with torch.no_grad():
        expected_K = torch.cat([values_of(plain, each["token_ids"])[each["mask"]] for each in sequences_of(batch)])
    assert float(expected_K.std()) > 0.1
    for found_T in run_ranks(num_ranks, values_at_first, config, batch):
        np.testing.assert_allclose(found_T[tokens], expected_K.numpy(), rtol=0, atol=TOLERANCE)


def values_at_first(rank: int, config: Config, batch: SampleBatch) -> Any:
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{config.policy.model_name}-converted"
    backend = make_backend(config, checkpoint=None)
    return said_by(backend, batch, config, "value")
