"""Vision models, with their layers divided over ranks by the DTensor backend, against plain Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.trainers.reference import (
    Numbers,
    assert_same_numbers,
    gathered_numbers,
    plain_numbers,
    train_one_rank,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import run_ranks, train_on
from tests.harness.trainers.vision_harness import SEQUENCES, PlainVision, seeing_batch, vision_config
from tests.harness.vision_models import FAMILIES, write_vision_model

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TEXT: dict[str, dict[str, Any]] = {
    family: {"num_attention_heads": 2 if family == "qwen2_5_vl" else 4, "num_key_value_heads": 2} for family in FAMILIES
}
"""Heads for two ranks. The sections of Qwen2.5-VL's positions fill heads of 32 dimensions."""
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "shared": {"train_micro_batch_size": 4},
    "packed": {**PACKED, "activation_checkpointing_enabled": True},
}


def make(config: Config) -> DTensorBackend:
    return DTensorBackend(config, checkpoint=None)


def train_all(rank: int, configs: Sequence[Config], batch: SampleBatch, folder: Path) -> list[Any]:
    """Train a model with each of these configurations, one after the other."""
    return [train_one_rank(rank, make, config, [batch], folder / str(number)) for number, config in enumerate(configs)]


def check(configs: Sequence[Config], names: Sequence[str], world_size: int, folder: Path) -> None:
    """Compare what ranks find with each configuration with what plain Hugging Face finds."""
    batch = seeing_batch(configs[0])
    expected = plain_numbers(PlainVision(configs[0], batch), [batch], temperature=1.0, kl=0.1)
    ranks = run_ranks(world_size, train_all, configs, batch, folder)
    for number, name in enumerate(names):
        found: Numbers = gathered_numbers([each[number] for each in ranks], folder / str(number))
        try:
            assert_same_numbers(found, expected, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("family", "world_size"), [*((family, 2) for family in FAMILIES), ("qwen3_vl", 4), ("gemma3", 4)]
)
def test_tensor_ranks_match_plain_hugging_face(family: str, world_size: int, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "model", **TEXT[family])
    loss = {"reference_policy_kl_penalty": 0.1}
    configs = [
        vision_config(folder, tmp_path / "run", loss=loss, trainers=world_size, dtensor_cfg=TP2, **settings)
        for settings in KINDS.values()
    ]
    check(configs, list(KINDS), world_size, tmp_path / "saved")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"])
def test_tensor_ranks_with_parts_of_rows_match_plain_hugging_face(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "model", **TEXT[family])
    loss, parts = {"reference_policy_kl_penalty": 0.1}, {**TP2, "sequence_parallel": True}
    configs = [
        vision_config(folder, tmp_path / "run", loss=loss, trainers=2, dtensor_cfg=parts, **settings)
        for settings in KINDS.values()
    ]
    check(configs, list(KINDS), 2, tmp_path / "saved")


def own_plan() -> dict[str, ParallelStyle]:
    """A plan of linear layers of a language model alone: nothing of embeddings and the output layer."""
    attention, feed_forward = "model.text_model.layers.*.self_attn", "model.text_model.layers.*.mlp"
    by_rows = [f"{attention}.{part}_proj" for part in "qkv"]
    by_rows += [f"{feed_forward}.{part}_proj" for part in ("gate", "up")]
    by_columns = [f"{attention}.o_proj", f"{feed_forward}.down_proj"]
    return {name: ColwiseParallel() for name in by_rows} | {name: RowwiseParallel() for name in by_columns}


def test_a_custom_plan_matches_plain_hugging_face(tmp_path: Path) -> None:
    folder = write_vision_model("idefics3", tmp_path / "model", **TEXT["idefics3"])
    plan = {**TP2, "custom_parallel_plan": f"{__name__}.own_plan"}
    loss = {"reference_policy_kl_penalty": 0.1}
    config = vision_config(folder, tmp_path / "run", loss=loss, trainers=2, dtensor_cfg=plan, **PACKED)
    check([config], ["custom"], 2, tmp_path / "saved")


@pytest.mark.parametrize("part", ["freeze_vision_tower", "freeze_language_model"])
def test_a_frozen_part_stays_as_it_is(part: str, tmp_path: Path) -> None:
    folder = write_vision_model("smolvlm", tmp_path / "model", **TEXT["smolvlm"])
    frozen = {"freeze_vision_tower": False, part: True}
    sharded = {**TP2, "automodel_kwargs": {"freeze_config": frozen}}
    config = vision_config(folder, tmp_path / "run", trainers=2, dtensor_cfg=sharded)
    batch = seeing_batch(config)
    plain = PlainVision(config, batch)
    prefix = "model.vision_model." if part == "freeze_vision_tower" else "model.text_model."
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))
    expected = plain_numbers(plain, [batch], temperature=1.0, kl=0.0)
    ranks = run_ranks(2, train_all, [config], batch, tmp_path / "saved")
    assert_same_numbers(gathered_numbers([each[0] for each in ranks], tmp_path / "saved" / "0"), expected, TOLERANCE)


def test_a_batch_without_any_image_trains_as_text(tmp_path: Path) -> None:
    folder = write_vision_model("qwen3_vl", tmp_path / "model", **TEXT["qwen3_vl"])
    config = vision_config(folder, tmp_path / "run", trainers=2, train_global_batch_size=2, dtensor_cfg=TP2)
    batch = seeing_batch(config, SEQUENCES[6:])
    expected = plain_numbers(PlainVision(config, batch, SEQUENCES[6:]), [batch], temperature=1.0, kl=0.0)
    ranks = run_ranks(2, train_all, [config], batch, tmp_path / "saved")
    found = gathered_numbers([each[0] for each in ranks], tmp_path / "saved" / "0")
    # The tower's gradients are zeros, not absent: weight decay shrinks it, as it does with images.
    language = {name: tensor for name, tensor in found.weights.items() if not name.startswith("model.visual.")}
    own = expected._replace(weights={name: expected.weights[name] for name in language})
    assert_same_numbers(found._replace(weights=language), own, TOLERANCE)


def resumed(rank: int, config: Config, batch: SampleBatch, checkpoint: Path | None, folder: Path) -> dict[str, float]:
    """Take a step, from a checkpoint if given, and save what it comes to."""
    backend = DTensorBackend(config, checkpoint=checkpoint)
    metrics = train_on(backend, batch, config).metrics
    backend.save(folder).num_bytes.result()
    return metrics


def test_a_checkpoint_is_resumed_by_other_ranks(tmp_path: Path) -> None:
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model", **TEXT["qwen2_5_vl"])
    cut, whole = (vision_config(folder, tmp_path / "run", trainers=2, dtensor_cfg=dtensor) for dtensor in (TP2, {}))
    batch = seeing_batch(cut)
    run_ranks(2, resumed, cut, batch, None, tmp_path / "step_1")
    expected = run_ranks(2, resumed, cut, batch, tmp_path / "step_1", tmp_path / "cut")
    found = run_ranks(2, resumed, whole, batch, tmp_path / "step_1", tmp_path / "whole")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
    there = trained_weights(tmp_path / "cut")
    for name, tensor in trained_weights(tmp_path / "whole").items():
        torch.testing.assert_close(tensor, there[name], rtol=0, atol=TOLERANCE)


def adapted(rank: int, config: Config, batch: SampleBatch, folder: Path) -> tuple[list[str], list[dict[str, float]]]:
    backend = make(config)
    metrics = [train_on(backend, batch, config).metrics for _ in range(2)]
    backend.save(folder).num_bytes.result()
    return sorted(backend._held["policy", 0]._trained()), metrics


def test_adapters_of_the_language_model_are_divided(tmp_path: Path) -> None:
    folder = write_vision_model("qwen3_vl", tmp_path / "model", **TEXT["qwen3_vl"])
    lora = {"enabled": True, "dim": 4, "alpha": 8, "match_all_linear": True}
    one, cut = (
        vision_config(
            folder, tmp_path / "run", algorithm="sft", trainers=size, dtensor_cfg={**dtensor, "lora_cfg": lora}
        )
        for size, dtensor in ((1, {}), (2, TP2))
    )
    batch = seeing_batch(one)
    ((names, expected),) = run_ranks(1, adapted, one, batch, tmp_path / "one")
    assert names
    assert all(name.startswith("model.language_model.layers.") for name in names)
    for names_there, metrics in run_ranks(2, adapted, cut, batch, tmp_path / "cut"):
        assert names_there == names
        for found, step in zip(metrics, expected, strict=True):
            assert found["loss"] == pytest.approx(step["loss"], abs=TOLERANCE)
            assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=TOLERANCE)
    assert expected[0]["grad_norm"] > 0


def distilled(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    return train_on(make(config), batch, config).metrics


def test_a_divided_teacher_draws_no_image_tokens_either(tmp_path: Path) -> None:
    """The likeliest tokens of a teacher that is the policy have the policy's own probabilities."""
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model", **TEXT["qwen2_5_vl"])
    teacher = {"model_name": str(folder), "dtensor_cfg": TP2}
    config = vision_config(
        folder,
        tmp_path / "run",
        algorithm="distillation",
        trainers=2,
        dtensor_cfg=TP2,
        teacher=teacher,
        topk=32,
    )
    for metrics in run_ranks(2, distilled, config, seeing_batch(config)):
        assert metrics["loss"] == pytest.approx(0.0, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-3)
