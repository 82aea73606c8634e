"""Vision models, trained by the DTensor backend, against plain Hugging Face with pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.errors import ModelError, WireError
from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends.dtensor import DTensorBackend
from tandem.trainer.batching.images import ImageFormat, check_image_tokens
from tandem.trainer.batching.shard import pad
from tandem.trainer.files.merging import merge
from tests.harness.trainers.reference import (
    Numbers,
    adamw,
    assert_same_numbers,
    assert_same_weights,
    gathered_numbers,
    plain_numbers,
    train_one_rank,
    trained_weights,
)
from tests.harness.trainers.trainer_harness import evaluate_on, run_ranks, train_on
from tests.harness.trainers.vision_harness import SEQUENCES, PlainVision, seeing_batch, vision_config
from tests.harness.vision_models import FAMILIES, write_vision_model

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 768}}
KINDS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False},
    "shared": {"train_micro_batch_size": 4},
    "packed": {**PACKED},
}


def make(config: Config) -> DTensorBackend:
    return DTensorBackend(config, checkpoint=None)


def train_all(rank: int, configs: Sequence[Config], batch: SampleBatch, folder: Path) -> list[Any]:
    """Train a model with each of these configurations, one after the other."""
    return [train_one_rank(rank, make, config, [batch], folder / str(number)) for number, config in enumerate(configs)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_matches_plain_hugging_face(family: str, world_size: int, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "model")
    loss = {"reference_policy_kl_penalty": 0.1}
    configs = [vision_config(folder, tmp_path / "run", loss=loss, **settings) for settings in KINDS.values()]
    batch = seeing_batch(configs[0])
    expected = plain_numbers(PlainVision(configs[0], batch), [batch], temperature=1.0, kl=0.1)

    ranks = run_ranks(world_size, train_all, configs, batch, tmp_path / "saved")
    for number, kind in enumerate(KINDS):
        found: Numbers = gathered_numbers([each[number] for each in ranks], tmp_path / "saved" / str(number))
        try:
            assert_same_numbers(found, expected, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error


def numbers(world_size: int, config: Config, batch: SampleBatch, folder: Path) -> Numbers:
    """Train a model on a batch over some ranks."""
    ranks = run_ranks(world_size, train_all, [config], batch, folder)
    return gathered_numbers([each[0] for each in ranks], folder / "0")


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_rank_without_images_takes_part_in_the_tower(family: str, tmp_path: Path) -> None:
    config = vision_config(
        write_vision_model(family, tmp_path / "model"),
        tmp_path / "run",
        train_global_batch_size=2,
        train_micro_batch_size=1,
        logprob_batch_size=1,
    )
    sequences = (SEQUENCES[6], SEQUENCES[0])
    batch = seeing_batch(config, sequences)
    expected = plain_numbers(PlainVision(config, batch, sequences), [batch], temperature=1.0, kl=0.0)
    assert_same_numbers(numbers(2, config, batch, tmp_path / "saved"), expected, TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_without_any_image_trains_as_text(world_size: int, tmp_path: Path) -> None:
    config = vision_config(
        write_vision_model("qwen2_5_vl", tmp_path / "model"), tmp_path / "run", train_global_batch_size=2
    )
    batch = seeing_batch(config, SEQUENCES[6:])
    expected = plain_numbers(PlainVision(config, batch, SEQUENCES[6:]), [batch], temperature=1.0, kl=0.0)
    found = numbers(world_size, config, batch, tmp_path / "saved")
    # The tower's gradients are zeros, not absent: weight decay shrinks it, as it does with images.
    language = {name: tensor for name, tensor in found.weights.items() if not name.startswith("model.visual.")}
    own = expected._replace(weights={name: expected.weights[name] for name in language})
    assert_same_numbers(found._replace(weights=language), own, TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_tower_stays_as_it_is(world_size: int, tmp_path: Path) -> None:
    folder = write_vision_model("smolvlm", tmp_path / "model")
    frozen = {"automodel_kwargs": {"freeze_config": {"freeze_vision_tower": True}}}
    config = vision_config(folder, tmp_path / "run", dtensor_cfg=frozen)
    batch = seeing_batch(config)
    plain = PlainVision(config, batch)
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not name.startswith("model.vision_model."))
    expected = plain_numbers(plain, [batch], temperature=1.0, kl=0.0)
    found = numbers(world_size, config, batch, tmp_path / "saved")
    assert_same_numbers(found, expected, TOLERANCE)
    changed = {name.split(".")[1] for name, tensor in found.weights.items() if not tensor.equal(before[name])}
    assert changed == {"connector", "text_model"}


def test_recomputed_layers_and_dynamic_batches_change_no_number(tmp_path: Path) -> None:
    folder = write_vision_model("qwen3_vl", tmp_path / "model")
    settings: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing_enabled": True, **PACKED},
        {"dynamic_batching": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 600}},
    ]
    configs = [vision_config(folder, tmp_path / "run", **each) for each in settings]
    batch = seeing_batch(configs[0])
    ranks = run_ranks(2, train_all, configs, batch, tmp_path / "saved")
    expected, *others = (
        gathered_numbers([each[number] for each in ranks], tmp_path / "saved" / str(number))
        for number in range(len(configs))
    )
    for found in others:
        assert_same_numbers(found, expected, TOLERANCE)


def evaluate_and_train(rank: int, configs: Sequence[Config], batch: SampleBatch, folder: Path) -> list[Any]:
    found = []
    for number, config in enumerate(configs):
        backend = make(config)
        found.append((evaluate_on(backend, batch, config), train_on(backend, batch, config).metrics))
        backend.save(folder / str(number)).num_bytes.result()
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_the_loss_of_sft_is_hugging_faces_own(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(family, tmp_path / "model")
    configs = [vision_config(folder, tmp_path / "run", algorithm="sft", **settings) for settings in ({}, PACKED)]
    batch = seeing_batch(configs[0])
    plain = PlainVision(configs[0], batch)
    total, offsets, num_tokens = torch.zeros(()), batch.offsets(), int(batch.loss_mask_T.sum())
    for row in range(len(batch)):
        own = slice(offsets[row], offsets[row + 1])
        token_ids, mask = (torch.from_numpy(each[own].copy()) for each in (batch.token_ids_T, batch.loss_mask_T))
        labels = token_ids.long().where(mask, -100)
        total = total + plain(token_ids.long()[None], labels=labels[None]).loss * int(mask.sum()) / num_tokens
    optimizer = adamw(plain)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    for found in run_ranks(2, evaluate_and_train, configs, batch, tmp_path / "saved"):
        for number, (evaluated, trained) in enumerate(found):
            assert evaluated["loss"] == pytest.approx(float(total.detach()), abs=TOLERANCE)
            assert trained["loss"] == pytest.approx(float(total.detach()), abs=TOLERANCE)
            assert trained["grad_norm"] == pytest.approx(float(norm), rel=TOLERANCE)
            assert_same_weights(trained_weights(tmp_path / "saved" / str(number)), plain, TOLERANCE)


def adapted(rank: int, config: Config, batch: SampleBatch, folder: Path) -> tuple[list[str], dict[str, float]]:
    backend = make(config)
    metrics = train_on(backend, batch, config).metrics
    backend.save(folder).num_bytes.result()
    held = backend._held["policy", 0]
    return sorted(held._trained()), metrics


def test_adapters_are_those_of_the_language_model(tmp_path: Path) -> None:
    folder = write_vision_model("smolvlm", tmp_path / "model")
    lora = {"enabled": True, "dim": 4, "alpha": 8, "match_all_linear": True}
    config = vision_config(folder, tmp_path / "run", dtensor_cfg={"lora_cfg": lora})
    batch = seeing_batch(config)
    names, metrics = run_ranks(1, adapted, config, batch, tmp_path / "saved")[0]
    assert metrics["grad_norm"] > 0
    assert names
    assert all(name.startswith("model.text_model.") for name in names)
    merge(tmp_path / "saved" / "policy", tmp_path / "merged", str(folder))
    merged, before = trained_weights(tmp_path, "merged"), trained_weights(tmp_path, "model")
    changed = {name for name, tensor in merged.items() if not tensor.equal(before[name])}
    assert changed
    assert all(name.startswith("model.text_model.layers.") for name in changed)


def resumed(rank: int, config: Config, batch: SampleBatch, folder: Path) -> tuple[Any, Any]:
    backend = make(config)
    train_on(backend, batch, config)
    backend.save(folder).num_bytes.result()
    expected = train_on(backend, batch, config).metrics
    again = DTensorBackend(config, checkpoint=folder)
    return expected, train_on(again, batch, config).metrics


def test_a_checkpoint_resumes_to_the_bit(tmp_path: Path) -> None:
    config = vision_config(write_vision_model("qwen2_5_vl", tmp_path / "model"), tmp_path / "run")
    for expected, found in run_ranks(2, resumed, config, seeing_batch(config), tmp_path / "saved"):
        assert found == expected


def test_other_image_tokens_than_the_images_need_are_refused_by_name(tmp_path: Path) -> None:
    config = vision_config(write_vision_model("smolvlm", tmp_path / "model"), tmp_path / "run")
    images = ImageFormat.of(config)
    settings = images.settings
    batch = seeing_batch(config)
    check_image_tokens(batch, settings)
    tokens = batch.token_ids_T.copy()
    tokens[np.flatnonzero(tokens == settings.image_token_id)[-1]] = 5
    wrong = batch.replace(token_ids_T=tokens)
    text = "sequence 5 has 31 image tokens, and its 2 images need 32"
    with pytest.raises(WireError, match=text.replace("31", r"\d+").replace("32", r"\d+")):
        check_image_tokens(wrong, settings)
    with pytest.raises(ModelError, match=r"sequence 5 of the shard: the sequence has \d+ image tokens"):
        pad(wrong, range(8), divisible_by=1, device=torch.device("cpu"), media=images)


def distilled(rank: int, config: Config, batch: SampleBatch) -> dict[str, float]:
    return train_on(make(config), batch, config).metrics


def test_a_teacher_that_is_the_policy_has_nothing_to_teach(tmp_path: Path) -> None:
    folder = write_vision_model("qwen2_5_vl", tmp_path / "model")
    config = vision_config(
        folder, tmp_path / "run", algorithm="distillation", teacher={"model_name": str(folder)}, topk=64
    )
    for metrics in run_ranks(2, distilled, config, seeing_batch(config)):
        assert metrics["loss"] == pytest.approx(0.0, abs=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-3)
