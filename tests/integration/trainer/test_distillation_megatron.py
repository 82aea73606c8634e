"""Distillation under Megatron-Core, however student and teacher are cut: the numbers of models in a process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer import step
from tests.harness.trainers.megatron_harness import CP2, OPTIMIZER, PP2, SP, TP2, make, make_checkpoint
from tests.harness.trainers.reference import assert_same_steps, trained_weights
from tests.harness.trainers.reference_distillation import plain_distillation
from tests.harness.trainers.trainer_harness import make_config, make_groups, run_ranks, share_of, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TOPK, TEMPERATURE = 5, 0.8
BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
REVERSE = {"kl_type": "reverse", "zero_outside_topk": True}
FORWARD = {"kl_type": "forward"}
ALONE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
"""Sizes of a model that is whole on each rank."""
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank, jsd": (1, {"kl_type": "jsd", "mixed_kl_weight": 0.3}, {}, {}),
    "tensor and sequence parallel, over all tokens": (2, REVERSE, {**TP2, **SP}, {**TP2, **SP}),
    "context parallel, over all tokens": (2, {**REVERSE, "kl_type": "mixed"}, CP2, CP2),
    "pipeline parallel, forward": (2, FORWARD, PP2, PP2),
    "a tensor-parallel student, a teacher on each rank": (2, REVERSE, TP2, {}),
    "two students, a teacher cut along sequences": (2, FORWARD, {}, {**TP2, **SP}),
    "a student in two stages, a context-parallel teacher": (2, FORWARD, PP2, CP2),
    "two tensor-parallel students, a teacher in two stages on each two ranks": (4, FORWARD, TP2, PP2),
}
"""Ranks, and keys of ``loss_fn`` and of each model's ``megatron_cfg``."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("student"), "llama")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another kind, whose output layer is its embedding."""
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen2", seed=5)


def train_steps(rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path) -> list[dict[str, float]]:
    backend = make(config)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    backend.close()
    return metrics


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_a_plain_loop(case: str, student: Path, teacher: Path, tmp_path: Path) -> None:
    num_ranks, loss, of_student, of_teacher = CASES[case]
    config = make_config(
        student,
        algorithm="distillation",
        loss=loss,
        teacher={"model_name": str(teacher), "megatron_cfg": {"enabled": True, **ALONE, **of_teacher}},
        topk=TOPK,
        temperature=TEMPERATURE,
        trainers=num_ranks,
        megatron_cfg={"enabled": True, **of_student, "optimizer": OPTIMIZER},
    )
    expected = plain_distillation(
        student, [teacher], BATCHES, loss, topk=TOPK, temperature=TEMPERATURE, decays_vectors=False
    )
    metrics, *others = run_ranks(num_ranks, train_steps, config, BATCHES, tmp_path)
    assert all(each == metrics for each in others), "every rank reports the same"
    assert_same_steps(metrics, expected.steps, TOLERANCE)
    for name, tensor in trained_weights(tmp_path).items():
        torch.testing.assert_close(
            tensor, expected.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


EP2 = {"expert_model_parallel_size": 2}
EXPERTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "experts apart, a tensor-parallel teacher": (2, EP2, {**TP2, **SP, "expert_model_parallel_size": 1}),
    "tensor-parallel experts, a teacher with experts apart": (2, {**TP2, **SP}, {**EP2, **ALONE}),
    "experts apart on two stages, a teacher with experts apart": (4, {**EP2, **PP2}, {**EP2, **ALONE}),
}
"""Ranks, and keys of each model's ``megatron_cfg``, where both have experts."""


@pytest.mark.parametrize("case", EXPERTS)
def test_models_with_experts_divide_the_ranks_otherwise(case: str, tmp_path: Path) -> None:
    num_ranks, of_student, of_teacher = EXPERTS[case]
    student, teacher = (make_checkpoint(tmp_path / name, "qwen3_moe", seed=seed) for seed, name in enumerate("st"))
    config = make_config(
        student,
        algorithm="distillation",
        loss=FORWARD,
        teacher={"model_name": str(teacher), "megatron_cfg": {"enabled": True, **of_teacher}},
        topk=TOPK,
        temperature=TEMPERATURE,
        trainers=num_ranks,
        megatron_cfg={"enabled": True, "freeze_moe_router": False, **of_student, "optimizer": OPTIMIZER},
    )
    expected = plain_distillation(
        student, [teacher], BATCHES, FORWARD, topk=TOPK, temperature=TEMPERATURE, decays_vectors=False
    )
    metrics, *others = run_ranks(num_ranks, train_steps, config, BATCHES, tmp_path / "trained")
    assert all(each == metrics for each in others), "every rank reports the same"
    assert_same_steps(metrics, expected.steps, TOLERANCE)


TEACHER_OF = [0, 1, 1, 1, 0, 1, 1, 1]
"""Not as many on one rank as on the other."""


def train_taught(rank: int, config: Config, batches: Sequence[SampleBatch]) -> list[dict[str, float]]:
    """Train on batches whose sequences have teachers of their own."""
    backend, metrics = make(config), []
    for batch in batches:
        table, share = share_of(backend, batch, config)
        table = table.replace(teacher_S=np.array(TEACHER_OF, dtype=np.int32))
        metrics.append(step.train(backend, table, share, config).metrics)
    backend.close()
    return metrics


@pytest.mark.parametrize(
    ("of_student", "of_teachers"),
    [(TP2, {"tensor_model_parallel_size": 1}), ({}, TP2), (TP2, {"tensor_model_parallel_size": 1, **PP2})],
    ids=["a tensor-parallel student", "tensor-parallel teachers", "teachers in two stages"],
)
def test_several_teachers_divide_the_ranks_otherwise(
    of_student: dict[str, Any], of_teachers: dict[str, Any], student: Path, teacher: Path
) -> None:
    loss = {"kl_type": "mixed"}
    config = make_config(
        student,
        algorithm="distillation",
        loss=loss,
        teacher={"megatron_cfg": {"enabled": True, **of_teachers}},
        routes={"enabled": True, "teacher_model_by_agent_name": {"first": str(teacher), "second": str(student)}},
        topk=TOPK,
        trainers=2,
        megatron_cfg={"enabled": True, **of_student, "optimizer": OPTIMIZER},
    )
    assert config.num_of("teacher") == 2
    expected = plain_distillation(
        student, [teacher, student], BATCHES, loss, topk=TOPK, teacher_of=TEACHER_OF, decays_vectors=False
    )
    metrics, others = run_ranks(2, train_taught, config, BATCHES)
    assert metrics == others
    assert_same_steps(metrics, expected.steps, TOLERANCE)


@pytest.mark.parametrize("of_teachers", [TP2, {**PP2}], ids=["tensor parallel", "two stages"])
def test_all_teachers_teach_every_sequence(
    of_teachers: dict[str, Any], student: Path, teacher: Path, tmp_path: Path
) -> None:
    loss = {"kl_type": "forward", "ce_loss_scale": 0.1, "sum_weights_metric": "max_prob", "alpha": 2.0}
    folders = [teacher, make_checkpoint(tmp_path / "other", "qwen2", seed=9)]
    own = {"megatron_cfg": {"enabled": True, **ALONE, **of_teachers}}
    config = make_config(
        student,
        algorithm="off_policy_distillation",
        loss=loss,
        teachers=[{"model_name": str(each), **own} for each in folders],
        topk=TOPK,
        trainers=2,
        megatron_cfg={"enabled": True, **TP2, "optimizer": OPTIMIZER},
    )
    expected = plain_distillation(student, folders, BATCHES, loss, topk=TOPK, decays_vectors=False)
    metrics, others = run_ranks(2, train_steps, config, BATCHES, tmp_path / "trained")
    assert metrics == others
    assert_same_steps(metrics, expected.steps, TOLERANCE)
