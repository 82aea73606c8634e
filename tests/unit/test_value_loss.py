"""The value model's loss against numbers worked out by hand, with and without its clip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from loss_harness import CPU, MASK_BT, micro_batch

from tandem.common.errors import ModelError
from tandem.config import build_config
from tandem.config.schema import ValueLossFn
from tandem.trainer.losses import Counts
from tandem.trainer.losses.value import ValueLoss
from tandem.trainer.models import load_scalar_model, scalar_head
from tandem.trainer.scores import TokenValues

COUNTS = Counts(tokens=4, sequences=2)
OLD_BT = torch.tensor([[9.0, 1.0, 2.0, 0.0], [9.0, 9.0, -1.0, 9.0]])
RETURNS_BT = torch.tensor([[9.0, 2.0, 2.0, 1.0], [9.0, 9.0, 0.0, 9.0]])
NOW_BT = torch.tensor([[5.0, 1.5, 2.4, -0.1], [5.0, 5.0, -0.5, 5.0]])
POLICY = {"model_name": "model", "max_total_sequence_length": 16}


def loss_of(settings: ValueLossFn, mask_BT: torch.Tensor = MASK_BT) -> tuple[float, torch.Tensor, list[float]]:
    """Return the loss, its gradient by the values, and what it reports."""
    loss = ValueLoss(settings, COUNTS, CPU)
    values_BT = NOW_BT.clone().requires_grad_()
    batch = micro_batch(loss_mask_BT=mask_BT, values_BT=OLD_BT, returns_BT=RETURNS_BT)
    value = loss(batch, TokenValues(values_BT))
    value.backward()  # type: ignore[no-untyped-call]
    assert values_BT.grad is not None
    return float(value.detach()), values_BT.grad, (loss.report.sums / loss.report.count).tolist()


def test_without_a_clip_it_is_half_the_mean_squared_distance() -> None:
    value, grad_BT, (values, returns, clipped) = loss_of(ValueLossFn(scale=0.4, cliprange=None))
    squares = [0.5**2, 0.4**2, 1.1**2, 0.5**2]
    assert value == pytest.approx(0.5 * 0.4 * sum(squares) / 4)
    expected_BT = torch.where(MASK_BT, 0.4 * (NOW_BT - RETURNS_BT) / 4, 0.0)
    torch.testing.assert_close(grad_BT, expected_BT)
    assert (values, returns, clipped) == pytest.approx(((1.5 + 2.4 - 0.1 - 0.5) / 4, 1.25, 0.0))


def test_a_value_that_went_further_than_the_clip_towards_its_return_pulls_no_more() -> None:
    value, grad_BT, (_, _, clipped) = loss_of(ValueLossFn(scale=1.0, cliprange=0.2))
    # Clipped: 1.2 of 1.5, 2.2 of 2.4, -0.1 as it is, -0.8 of -0.5; the larger distance counts.
    squares = [0.8**2, 0.4**2, 1.1**2, 0.8**2]
    assert value == pytest.approx(0.5 * sum(squares) / 4)
    expected_BT = torch.zeros(2, 4)
    expected_BT[0, 2], expected_BT[0, 3] = 0.4 / 4, -1.1 / 4
    torch.testing.assert_close(grad_BT, expected_BT)
    assert clipped == pytest.approx(0.5)


def test_the_losses_of_micro_batches_add_up() -> None:
    settings = ValueLossFn(scale=0.7, cliprange=0.2)
    rows = torch.tensor([[True], [False]])
    parts = [loss_of(settings, MASK_BT & rows)[0], loss_of(settings, MASK_BT & ~rows)[0]]
    assert sum(parts) == pytest.approx(loss_of(settings)[0])


def test_a_value_model_has_the_layers_of_a_language_model_and_a_head_of_zeros(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=11,
    )
    language_model = transformers.Qwen3ForCausalLM(config)
    language_model.save_pretrained(tmp_path / "model")
    settings = build_config(
        {"sft": {}, "policy": POLICY, "data": {"dataset_name": "jsonl", "train_data_path": "x"}}
    ).policy
    model = load_scalar_model(str(tmp_path / "model"), settings, torch.float32, "value")
    assert not any(parameter.any() for parameter in scalar_head(model).parameters())
    for name, parameter in language_model.model.named_parameters():
        assert torch.equal(parameter, model.model.get_parameter(name))

    with torch.no_grad():
        scalar_head(model).weight.fill_(0.5)
    model.save_pretrained(tmp_path / "trained")
    again = load_scalar_model(str(tmp_path / "trained"), settings, torch.float32, "value")
    assert torch.equal(scalar_head(again).weight, torch.full((1, 16), 0.5))

    config.num_labels = 3
    transformers.Qwen3ForTokenClassification(config).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ModelError, match=r"cannot load a value model from .*classifier"):
        load_scalar_model(str(tmp_path / "classifier"), settings, torch.float32, "value")
