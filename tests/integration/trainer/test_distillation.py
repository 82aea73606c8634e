"""Distillation under the DTensor backend: the numbers of Hugging Face models in one process, however work is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer import step
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.trainers import megatron_harness
from tests.harness.trainers.reference import adamw, assert_same_steps, logprobs_of, sequences_of, trained_weights
from tests.harness.trainers.reference_distillation import joint_weights, plain_distillation
from tests.harness.trainers.trainer_harness import (
    begin,
    evaluate_on,
    evaluate_rank,
    make_config,
    make_groups,
    make_model,
    run_ranks,
    share_of,
    train_on,
    train_rank,
)

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TOPK, TEMPERATURE = 5, 0.8
BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
LARGER = {"hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 64}

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
BY_TOKENS = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 80}}
TP2 = {"dtensor_cfg": {"tensor_parallel_size": 2}}
ONE_RANK = {"enabled": True, "optimizer": megatron_harness.OPTIMIZER}
MEGATRON_TP2 = {**ONE_RANK, **megatron_harness.TP2}
PP2 = {**megatron_harness.PP2, "num_layers_in_first_pipeline_stage": 1}
"""Of a model of three layers."""
SCALED = {"kl_type": "mixed", "dynamic_loss_scaling": True, "ce_loss_scale": 0.3, "kl_loss_weight": 7.0}
"""The two weights have no effect."""
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank, mixed": (1, {"kl_type": "mixed", "mixed_kl_weight": 0.3}, {}, {}),
    "one rank, forward over all tokens": (1, {"kl_type": "forward", "zero_outside_topk": True}, {}, {}),
    "two ranks, reverse, a packed student": (2, {"kl_type": "reverse"}, PACKED, BY_TOKENS),
    "two ranks, jsd": (2, {"kl_type": "jsd", "mixed_kl_weight": 0.3}, {"share_prompts": False}, {}),
    "tensor parallel, reverse over all tokens": (2, {"kl_type": "reverse", "zero_outside_topk": True}, TP2, {}),
    "tensor parallel, jsd over all tokens": (2, {"kl_type": "jsd", "zero_outside_topk": True}, TP2, {}),
    "context parallel, mixed over all tokens": (
        2,
        {"kl_type": "mixed", "zero_outside_topk": True},
        {"dtensor_cfg": {"context_parallel_size": 2}},
        {},
    ),
    "one rank, the divergence scaled to the likelihood": (1, SCALED, {"train_micro_batch_size": 8}, {}),
    "context parallel, the same": (
        2,
        SCALED,
        {"train_micro_batch_size": 8, "dtensor_cfg": {"context_parallel_size": 2}},
        {},
    ),
}
"""Ranks, and keys of ``loss_fn``, ``policy`` and ``teacher``."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("student"), "llama")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another kind and size, with the same tokens."""
    return make_model(tmp_path_factory.mktemp("teacher"), "qwen3", seed=5, **LARGER)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_a_plain_loop(case: str, student: Path, teacher: Path, tmp_path: Path) -> None:
    num_ranks, loss, policy, others = CASES[case]
    config = make_config(
        student,
        algorithm="distillation",
        loss=loss,
        teacher={"model_name": str(teacher), **others},
        topk=TOPK,
        temperature=TEMPERATURE,
        trainers=num_ranks,
        **policy,
    )
    expected = plain_distillation(student, [teacher], BATCHES, loss, topk=TOPK, temperature=TEMPERATURE)
    (metrics, _), *others_metrics = run_ranks(num_ranks, train_rank, config, BATCHES, tmp_path)
    assert all(each == metrics for each, _ in others_metrics), "every rank reports the same"
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    found = trained_weights(tmp_path)
    assert found.keys() == expected.weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(0 < each["topk_probability"] < 1 and each["teacher_entropy"] > 0 for each in metrics)


OWN: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "one process each": (1, 1, {}, {}),
    "a tensor-parallel teacher": (1, 2, {}, TP2),
    "a tensor-parallel student": (2, 1, TP2, {"dtensor_cfg": {"tensor_parallel_size": 1}}),
    "two packed ranks, one teacher": (2, 1, PACKED, BY_TOKENS),
    "two teachers' ranks": (1, 2, {}, {}),
    "Megatron-Core, a teacher by FSDP2": (2, 1, {"megatron_cfg": MEGATRON_TP2}, {"megatron_cfg": {"enabled": False}}),
    "FSDP2, a pipelined teacher by Megatron-Core": (1, 2, {}, {"megatron_cfg": {"enabled": True, **PP2}}),
    "Megatron-Core, a teacher of other sizes": (
        2,
        2,
        {"megatron_cfg": MEGATRON_TP2},
        {"megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 1, **PP2}},
    ),
}
"""Processes of the student and of the teacher, and keys of ``policy`` and ``teacher``."""


def train_apart(rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path) -> list[dict[str, float]]:
    backend, exchange = begin(rank, config)
    metrics = [train_on(backend, batch, config, exchange).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    return metrics


@pytest.mark.parametrize("case", OWN)
def test_a_teacher_with_processes_of_its_own_teaches_the_same(
    case: str, student: Path, teacher: Path, tmp_path: Path
) -> None:
    num_ranks, num_teachers, policy, others = OWN[case]
    is_megatron = "megatron_cfg" in policy
    config = make_config(
        student,
        algorithm="distillation",
        loss={"kl_type": "reverse"},
        teacher={"model_name": str(teacher), **others},
        topk=TOPK,
        temperature=TEMPERATURE,
        trainers=num_ranks,
        processes_of={"teacher": num_teachers},
        **policy,
    )
    expected = plain_distillation(
        student,
        [teacher],
        BATCHES,
        {"kl_type": "reverse"},
        topk=TOPK,
        temperature=TEMPERATURE,
        decays_vectors=not is_megatron,
    )
    ranks = run_ranks(config.num_trainers, train_apart, config, BATCHES, tmp_path)
    assert_same_steps(ranks[0], expected.steps, TOLERANCE)
    assert not any(each for metrics in ranks[num_ranks:] for each in metrics), "the student's say all"
    for name, tensor in trained_weights(tmp_path).items():
        torch.testing.assert_close(
            tensor, expected.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def evaluate_apart(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    backend, exchange = begin(rank, config)
    return evaluate_on(backend, batch, config, {"first": 3, "second": 5}, exchange)


def test_a_teacher_with_processes_of_its_own_is_compared_on_what_is_held_out(student: Path, teacher: Path) -> None:
    config = make_config(
        student,
        algorithm="off_policy_distillation",
        loss={"kl_type": "forward"},
        teacher={"model_name": str(teacher)},
        topk=TOPK,
        processes_of={"teacher": 1},
    )
    expected = plain_distillation(student, [teacher], BATCHES, {"kl_type": "forward"}, topk=TOPK)
    validated, nothing = run_ranks(2, evaluate_apart, config, BATCHES[0])
    assert validated["loss"] == pytest.approx(expected.steps[0][0], abs=TOLERANCE)
    assert nothing == {}


def test_recorded_text_is_learned_and_validated_in_the_same_way(student: Path, teacher: Path) -> None:
    loss = {"kl_type": "forward", "kl_loss_weight": 0.7, "ce_loss_scale": 0.3}
    config = make_config(
        student,
        algorithm="off_policy_distillation",
        loss=loss,
        teacher={"model_name": str(teacher)},
        topk=TOPK,
        trainers=2,
    )
    expected = plain_distillation(student, [teacher], BATCHES, loss, topk=TOPK)
    (metrics, _), _ = run_ranks(2, train_rank, config, BATCHES)
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    (validated, _) = run_ranks(2, evaluate_rank, config, BATCHES[0])
    assert validated["loss"] == pytest.approx(expected.steps[0][0], abs=TOLERANCE)


TEACHER_OF = [0, 1, 1, 1, 0, 1, 1, 1]
"""Not as many on one rank as on the other."""


def train_taught(
    rank: int, config: Config, batches: Sequence[SampleBatch], teacher_of: Sequence[int]
) -> list[dict[str, float]]:
    """Train on batches whose sequences learn from these teachers."""
    backend, metrics = DTensorBackend(config, checkpoint=None), []
    for batch in batches:
        table, share = share_of(backend, batch, config)
        table = table.replace(teacher_S=np.array(teacher_of, dtype=np.int32))
        metrics.append(step.train(backend, table, share, config).metrics)
    return metrics


def routes(*teachers: Path) -> dict[str, Any]:
    names = {f"task_{number}": str(folder) for number, folder in enumerate(teachers)}
    return {"enabled": True, "teacher_model_by_agent_name": names}


@pytest.mark.parametrize("policy", [{}, PACKED], ids=["padded", "packed"])
def test_each_sequence_learns_from_its_own_teacher(policy: dict[str, Any], student: Path, teacher: Path) -> None:
    loss = {"kl_type": "mixed"}
    config = make_config(
        student,
        algorithm="distillation",
        loss=loss,
        teacher={},
        routes=routes(teacher, student),
        topk=TOPK,
        trainers=2,
        **policy,
    )
    assert config.num_of("teacher") == 2
    expected = plain_distillation(student, [teacher, student], BATCHES, loss, topk=TOPK, teacher_of=TEACHER_OF)
    metrics, others = run_ranks(2, train_taught, config, BATCHES, TEACHER_OF)
    assert metrics == others
    assert_same_steps(metrics, expected.steps, TOLERANCE)


def test_grpo_takes_the_teachers_log_probabilities_minus_its_own_as_advantages(student: Path, teacher: Path) -> None:
    config = make_config(
        student,
        loss={"disable_ppo_ratio": True},
        estimator="opd",
        routes=routes(teacher, student),
        trainers=2,
    )
    assert config.holds == ("policy", "teacher")
    (metrics, _) = run_ranks(2, train_taught, config, BATCHES, TEACHER_OF)

    policy = transformers.AutoModelForCausalLM.from_pretrained(student)
    models = [transformers.AutoModelForCausalLM.from_pretrained(each) for each in (teacher, student)]
    optimizer, steps = adamw(policy), []
    for batch, found in zip(BATCHES, metrics, strict=True):
        samples = sequences_of(batch)
        total, apart = torch.zeros(()), []
        for sample, number in zip(samples, TEACHER_OF, strict=True):
            ids, mask = sample["token_ids"], sample["mask"]
            logprobs = logprobs_of(policy, ids)[mask]
            with torch.no_grad():
                apart.append(logprobs_of(models[number], ids)[mask] - logprobs)
            total = total - (apart[-1] * logprobs).sum() / sum(int(each["mask"].sum()) for each in samples)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total.item(), norm.item()))
        assert found["teacher_kl"] == pytest.approx(-torch.cat(apart).mean().item(), abs=TOLERANCE)
    assert_same_steps(metrics, steps, TOLERANCE)


JOINT: dict[str, tuple[int, tuple[float, ...], dict[str, Any], dict[str, Any]]] = {
    "given weights, two packed ranks": (2, (0.7, 0.4), {"kl_loss_weight": 0.7, "ce_loss_scale": 0.3}, PACKED),
    "one teacher with a weight": (1, (0.5,), {"ce_loss_scale": 0.1}, {}),
    "by likelihood, two ranks": (2, (), {"sum_weights_metric": "ce", "alpha": 2.0}, {}),
    "by entropy, tensor parallel": (2, (), {"sum_weights_metric": "entropy", "alpha": 3.0}, TP2),
    "by probability, context parallel": (
        2,
        (),
        {"sum_weights_metric": "max_prob"},
        {"dtensor_cfg": {"context_parallel_size": 2}},
    ),
    "the likeliest alone, the divergence scaled to the likelihood": (
        1,
        (),
        {"kd_loss_mode": "select_teacher", "dynamic_loss_scaling": True},
        {"train_micro_batch_size": 8},
    ),
}
"""Ranks, weights, and keys of ``loss_fn`` and ``policy``."""


def joint_config(student: Path, teachers: Sequence[dict[str, Any]], loss: dict[str, Any], **others: Any) -> Config:
    return make_config(
        student, algorithm="off_policy_distillation", loss=loss, teachers=list(teachers), topk=TOPK, **others
    )


@pytest.mark.parametrize("case", JOINT)
def test_all_teachers_teach_every_sequence(case: str, student: Path, teacher: Path, tmp_path: Path) -> None:
    num_ranks, weights, options, policy = JOINT[case]
    loss = {"kl_type": "forward", **options}
    folders = [teacher, make_model(tmp_path / "other", "llama", seed=9)][: len(weights) or None]
    # `teachers` read nothing of the policy's parallel sizes but what they are given.
    own = {"dtensor_cfg": policy["dtensor_cfg"]} if "dtensor_cfg" in policy else {}
    teachers = [{"model_name": str(folder), **own} for folder in folders]
    if weights:
        teachers = [{**each, "weight": weight} for each, weight in zip(teachers, weights, strict=True)]
    config = joint_config(student, teachers, loss, trainers=num_ranks, **policy)
    assert [Path(each.model_name) for each in config.joint_teachers] == folders
    expected = plain_distillation(student, folders, BATCHES, loss, topk=TOPK, weights=weights)
    (metrics, _), *others = run_ranks(num_ranks, train_rank, config, BATCHES, tmp_path / "trained")
    assert all(each == metrics for each, _ in others), "every rank reports the same"
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    models = [transformers.AutoModelForCausalLM.from_pretrained(each) for each in folders]
    if not weights:
        found = [metrics[0][f"weight_t{index}"] for index in range(2)]
        assert found == pytest.approx(joint_weights(models, BATCHES[0], loss), abs=TOLERANCE)
        assert sum(found) == pytest.approx(1.0)
    for name, tensor in trained_weights(tmp_path / "trained").items():
        torch.testing.assert_close(
            tensor, expected.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_joint_teachers_with_processes_of_their_own_teach_the_same(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    loss = {"kl_type": "reverse", "sum_weights_metric": "ce", "alpha": 2.0}
    folders = [teacher, make_model(tmp_path / "other", "llama", seed=9)]
    teachers = [{"model_name": str(folder)} for folder in folders]
    config = joint_config(student, teachers, loss, processes_of={"teacher": 1})
    expected = plain_distillation(student, folders, BATCHES, loss, topk=TOPK)
    metrics, nothing = run_ranks(2, train_apart, config, BATCHES, tmp_path / "trained")
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    assert not any(nothing), "the student's process says all"
