"""Vision models, trained by Megatron-Core, against plain Hugging Face with pixels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config import Config
from tandem.config.models.lora import is_adapter
from tandem.samples.batch import SampleBatch
from tandem.trainer.files.merging import merge
from tests.harness.trainers.megatron_harness import (
    OPTIMIZER,
    PLAIN,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    config_for,
    make,
    make_checkpoint,
)
from tests.harness.trainers.reference import (
    assert_same_numbers,
    numbers_of,
    plain_numbers,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import make_batch, run_ranks, train_on
from tests.harness.trainers.vision_harness import SEQUENCES, PlainVision, seeing_batch, vision_config
from tests.harness.vision_models import write_vision_model

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TEXT = {"num_key_value_heads": 2, "num_hidden_layers": 4}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}}
OVERLAPS = {"distributed_data_parallel_config": {"overlap_grad_reduce": True}}
UNTIED = {"tie_word_embeddings": False}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one rank": ("qwen2_5_vl", 1, {}, {}, {}),
    "one rank, llama": ("smolvlm", 1, {}, {}, PACKED),
    "DP2, packed": ("qwen2_5_vl", 2, {}, {}, PACKED),
    "TP2": ("qwen2_5_vl", 2, TP2, {}, {}),
    "TP2+SP, packed": ("qwen2_5_vl", 2, TP2 | SP, {}, PACKED),
    "PP2": ("qwen2_5_vl", 2, PP2, {}, {}),
    "PP2, packed, untied": ("qwen2_5_vl", 2, PP2, UNTIED, PACKED),
    "PP2 with virtual stages": ("qwen2_5_vl", 2, PP2 | VIRTUAL, {}, {}),
    "DP2, overlapped and recomputed": ("smolvlm", 2, OVERLAPS | {"activation_checkpointing": True}, {}, {}),
    "one rank, deepstack": ("qwen3_vl", 1, {}, {}, {}),
    "TP2+SP, deepstack, recomputed": ("qwen3_vl", 2, TP2 | SP | {"activation_checkpointing": True}, {}, PACKED),
    "PP2, deepstack, recomputed": ("qwen3_vl", 2, PP2 | {"activation_checkpointing": True}, {}, {}),
    "TP2+SP+PP2, deepstack": ("qwen3_vl", 4, TP2 | SP | PP2, {}, {}),
    "PP2 with virtual stages, a row that fills up": (
        "qwen2_5_vl",
        2,
        PP2 | VIRTUAL | OVERLAPS,
        {},
        {"train_micro_batch_size": 8, "logprob_batch_size": 8},
    ),
    "TP2+SP+PP2": ("idefics3", 4, TP2 | SP | PP2, {}, {}),
    "TP2+DP2, plain optimizer": ("qwen2_5_vl", 4, TP2 | PLAIN, {}, PACKED),
}


def megatron_config(folder: Path, num_ranks: int, megatron: dict[str, Any], runs: Path, **policy: Any) -> Config:
    megatron = {"enabled": True, **megatron, "optimizer": OPTIMIZER | megatron.get("optimizer", {})}
    loss = {"reference_policy_kl_penalty": 0.1 if policy.get("algorithm", "grpo") == "grpo" else 0.0}
    return vision_config(folder, runs, loss=loss, trainers=num_ranks, megatron_cfg=megatron, **policy)


@pytest.mark.parametrize(("family", "num_ranks", "megatron", "text", "policy"), CASES.values(), ids=CASES)
def test_layouts_match_plain_hugging_face(
    family: str, num_ranks: int, megatron: dict[str, Any], text: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_vision_model(family, tmp_path / "model", **{**TEXT, **text})
    config = megatron_config(folder, num_ranks, megatron, tmp_path / "run", **policy)
    batches = [seeing_batch(config, seed=seed) for seed in range(2)]
    expected = plain_numbers(PlainVision(config, batches[0]), batches, temperature=1.0, kl=0.1, decays_vectors=False)
    found = numbers_of(num_ranks, make, config, batches, tmp_path / "saved")
    assert_same_numbers(found, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("part", "megatron", "text"),
    [
        ("vision_tower", TP2, {}),
        ("language_model", TP2, {}),
        ("language_model", PP2, {}),
        ("language_model", PP2, UNTIED),
    ],
)
def test_a_frozen_part_stays_as_it_is(
    part: str, megatron: dict[str, Any], text: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_vision_model("smolvlm", tmp_path / "model", **{**TEXT, **text})
    frozen = {"freeze_vision_tower": False, f"freeze_{part}": True}
    config = megatron_config(
        folder, 2, megatron, tmp_path / "run", dtensor_cfg={"automodel_kwargs": {"freeze_config": frozen}}
    )
    batch = seeing_batch(config)
    plain = PlainVision(config, batch)
    prefix = "model.vision_model." if part == "vision_tower" else "model.text_model."
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))
    expected = plain_numbers(plain, [batch], temperature=1.0, kl=0.1, decays_vectors=False)
    found = numbers_of(2, make, config, [batch], tmp_path / "saved")
    assert_same_numbers(found, expected, TOLERANCE)


@pytest.mark.parametrize("megatron", [TP2 | SP, PP2 | OVERLAPS], ids=["TP2+SP", "PP2, overlapped"])
def test_a_batch_without_any_image_trains_as_text(megatron: dict[str, Any], tmp_path: Path) -> None:
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model", **TEXT)
    config = megatron_config(folder, 2, megatron, tmp_path / "run", train_global_batch_size=2)
    batch = seeing_batch(config, SEQUENCES[6:])
    plain = PlainVision(config, batch, SEQUENCES[6:])
    expected = plain_numbers(plain, [batch], temperature=1.0, kl=0.1, decays_vectors=False)
    found = numbers_of(2, make, config, [batch], tmp_path / "saved")
    # The tower's gradients are zeros, not absent: weight decay shrinks it, as it does with images.
    language = {name: tensor for name, tensor in found.weights.items() if not name.startswith("model.visual.")}
    own = expected._replace(weights={name: expected.weights[name] for name in language})
    assert_same_numbers(found._replace(weights=language), own, TOLERANCE)


def resumed(rank: int, config: Config, batch: SampleBatch, checkpoint: Path | None, folder: Path) -> dict[str, float]:
    """Take a step, from a checkpoint if given, and save what it comes to."""
    backend = make(config, checkpoint)
    metrics = train_on(backend, batch, config).metrics
    backend.save(folder).num_bytes.result()
    backend.close()
    return metrics


def test_a_checkpoint_is_resumed_by_other_ranks(tmp_path: Path) -> None:
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model", **TEXT)
    first, *others = (megatron_config(folder, 2, each, tmp_path / "run") for each in (TP2 | SP, PP2, {}))
    batch = seeing_batch(first)
    run_ranks(2, resumed, first, batch, None, tmp_path / "step_1")
    expected, *_ = run_ranks(2, resumed, first, batch, tmp_path / "step_1", tmp_path / "first")
    there = trained_weights(tmp_path / "first")
    for number, config in enumerate(others):
        for found in run_ranks(2, resumed, config, batch, tmp_path / "step_1", tmp_path / str(number)):
            assert found["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=TOLERANCE)
        for name, tensor in trained_weights(tmp_path / str(number)).items():
            torch.testing.assert_close(tensor, there[name], rtol=0, atol=TOLERANCE)


def adapted(rank: int, config: Config, batch: SampleBatch, folder: Path) -> list[dict[str, float]]:
    """Train adapters for two steps: nothing else may change."""
    backend: Any = make(config)
    weights = backend._held["policy", 0].weights
    base = {name: each.detach().clone() for name, each in weights.parameters.items() if not is_adapter(name)}
    metrics = [train_on(backend, batch, config).metrics for _ in range(2)]
    for name, before in base.items():
        assert torch.equal(before, weights.parameters[name]), name
    backend.save(folder).num_bytes.result()
    return metrics


def test_adapters_are_those_of_the_language_model(tmp_path: Path) -> None:
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model", **TEXT)
    peft = {"peft": {"enabled": True, "dim": 4, "alpha": 16}}
    one, *others = (
        megatron_config(folder, size, megatron | peft, tmp_path / "run", algorithm="sft")
        for size, megatron in ((1, {}), (2, TP2 | SP), (2, PP2))
    )
    batch = seeing_batch(one)
    (expected,) = run_ranks(1, adapted, one, batch, tmp_path / "one")
    assert expected[1]["loss"] < expected[0]["loss"]
    for number, config in enumerate(others):
        for metrics in run_ranks(2, adapted, config, batch, tmp_path / str(number)):
            for found, step in zip(metrics, expected, strict=True):
                assert found["loss"] == pytest.approx(step["loss"], abs=TOLERANCE)
                assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=TOLERANCE)
    merge(tmp_path / "0" / "policy", tmp_path / "merged", str(folder))
    merged, before = trained_weights(tmp_path, "merged"), trained_weights(tmp_path, "model")
    changed = {name for name, tensor in merged.items() if not tensor.equal(before[name])}
    assert len(changed) == 4 * 7
    assert all(name.startswith("model.language_model.layers.") for name in changed)


def distilled(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    return train_on(make(config), batch, config).metrics


def test_a_teacher_that_is_the_policy_has_nothing_to_teach(tmp_path: Path) -> None:
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model", **TEXT)
    megatron = {"enabled": True, **TP2, "optimizer": OPTIMIZER}
    teacher = {"model_name": str(folder), "megatron_cfg": megatron}
    config = megatron_config(folder, 2, TP2, tmp_path / "run", algorithm="distillation", teacher=teacher, topk=32)
    for metrics in run_ranks(2, distilled, config, seeing_batch(config)):
        assert metrics["loss"] == pytest.approx(0.0, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-3)


def test_bfloat16_trains(tmp_path: Path) -> None:
    folder = write_vision_model("smolvlm", tmp_path / "model", **TEXT)
    config = megatron_config(folder, 2, TP2 | SP, tmp_path / "run", precision="bfloat16")
    for metrics in run_ranks(2, distilled, config, seeing_batch(config)):
        assert metrics["grad_norm"] > 0


def imported(rank: int, config: Config, batch: SampleBatch) -> list[str]:
    """Train, and say which modules for images that took."""
    train_on(make(config), batch, config)
    return sorted(name for name in sys.modules if name.endswith((".megatron.vision", ".backends.pictures")))


def test_a_model_of_text_needs_nothing_of_it(tmp_path: Path) -> None:
    text = config_for(make_checkpoint(tmp_path / "text", "qwen3"), 1, {})
    assert run_ranks(1, imported, text, make_batch()) == [[]]
    sees = megatron_config(write_vision_model("smolvlm", tmp_path / "sees"), 1, {}, tmp_path / "run")
    assert [len(names) for names in run_ranks(1, imported, sees, seeing_batch(sees))] == [2]
