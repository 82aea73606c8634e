"""SFT and DPO as TRL 1.16's own trainers step, and Tandem on their batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tandem.samples.batch import SampleBatch
from tests.harness.trainers.reference import trained_weights
from tests.harness.trainers.trainer_harness import ADAMW, make_config, make_model, run_ranks, start_server, train_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Transformers' trainer uses what Transformers deprecates
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOLERANCE = 1e-5
ROWS = 4
NUM_STEPS = 3
PROBLEMS = [(f"{a}+{b}=", str(a + b), str(a + 3 * b)) for a in (1, 12, 345) for b in (2, 7, 60, 89)]


class Step(NamedTuple):
    """An optimizer step of TRL's trainer."""

    batch: SampleBatch
    loss: float
    norm: float


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """Start the server that ranks are forked from."""
    start_server()


def batch_of(token_ids: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> SampleBatch:
    """Return unpadded rows as a batch."""
    num_rows, num_tokens = len(token_ids), sum(map(len, token_ids))
    return SampleBatch(
        lengths_S=np.array([len(row) for row in token_ids], dtype=np.int32),
        token_ids_T=torch.cat(list(token_ids)).numpy().astype(np.int32),
        loss_mask_T=torch.cat(list(masks)).bool().numpy(),
        generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
        advantages_S=np.zeros(num_rows, dtype=np.float32),
        rewards_S=np.zeros(num_rows, dtype=np.float32),
    )


def common(out: Path, num_parts: int) -> dict[str, Any]:
    """Return the settings of both trainers, of steps of `num_parts` micro-batches."""
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": ROWS // num_parts,
        "gradient_accumulation_steps": num_parts,
        "max_steps": NUM_STEPS,
        "learning_rate": ADAMW["lr"],
        "adam_epsilon": ADAMW["eps"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
    }


def recorded(trainer_class: Any) -> Any:
    class Recorded(trainer_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen: list[tuple[dict[str, torch.Tensor], float]] = []
            super().__init__(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.seen.append((given, float((loss[0] if isinstance(loss, tuple) else loss).detach())))
            return loss

    return Recorded


def norms(trainer: Any) -> list[float]:
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def assert_same_steps(folder: Path, out: Path, steps: Sequence[Step], trainer: Any, **settings: Any) -> None:
    """Train on TRL's batches, and compare losses, gradient norms and weights."""
    config = make_config(
        folder,
        max_total_sequence_length=32,
        train_global_batch_size=ROWS,
        train_micro_batch_size=ROWS // 2,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {**ADAMW, "weight_decay": 0.0}},
        warmup_steps=2,
        **settings,
    )
    ((metrics, _),) = run_ranks(1, train_rank, config, [step.batch for step in steps], out)
    assert [one["loss"] for one in metrics] == pytest.approx([step.loss for step in steps], abs=TOLERANCE)
    assert [one["grad_norm"] for one in metrics] == pytest.approx([step.norm for step in steps], rel=TOLERANCE)
    weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    for name, tensor in trained_weights(out).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_sft_makes_the_steps_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    folder = make_model(tmp_path / "model")
    rows = Dataset.from_list([{"prompt": prompt, "completion": answer} for prompt, answer, _ in PROBLEMS])
    trainer = recorded(SFTTrainer)(model=str(folder), args=SFTConfig(**common(tmp_path / "trl", 2)), train_dataset=rows)
    trainer.train()
    steps = []
    for number, norm in enumerate(norms(trainer)):
        parts = trainer.seen[2 * number : 2 * number + 2]
        token_ids, masks = [], []
        for inputs, _ in parts:
            for ids, labels, is_token in zip(
                inputs["input_ids"], inputs["labels"], inputs["attention_mask"].bool(), strict=True
            ):
                token_ids.append(ids[is_token])
                masks.append(labels[is_token] != -100)
        steps.append(Step(batch_of(token_ids, masks), sum(loss for _, loss in parts), norm))
    assert len(steps) == NUM_STEPS
    assert any(not mask for mask in steps[0].batch.loss_mask_T), "prompts are not learned"
    assert_same_steps(folder, tmp_path / "tandem", steps, trainer, algorithm="sft")


@pytest.mark.parametrize(
    ("trl", "dpo"),
    [
        ({"beta": 0.3}, {"reference_policy_kl_penalty": 0.3}),
        (
            {"beta": 2.0, "loss_type": ["sigmoid_norm"]},
            {"reference_policy_kl_penalty": 2.0, "preference_average_log_probs": True},
        ),
    ],
    ids=["sigmoid", "sigmoid_norm"],
)
def test_dpo_makes_the_steps_of_trl(tmp_path: Path, trl: dict[str, Any], dpo: dict[str, Any]) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    folder = make_model(tmp_path / "model")
    rows = [{"prompt": prompt, "chosen": answer, "rejected": wrong} for prompt, answer, wrong in PROBLEMS]
    settings = DPOConfig(**common(tmp_path / "trl", 1), **trl)
    trainer = recorded(DPOTrainer)(model=str(folder), args=settings, train_dataset=Dataset.from_list(rows))
    trainer.train()
    steps = []
    for (inputs, loss), norm in zip(trainer.seen, norms(trainer), strict=True):
        order = torch.arange(2 * ROWS).view(2, ROWS).T.flatten()  # TRL has the chosen first, then the rejected
        is_token = inputs["attention_mask"].bool()
        token_ids = [inputs["input_ids"][row][is_token[row]] for row in order]
        masks = [inputs["completion_mask"][row][is_token[row]] for row in order]
        steps.append(Step(batch_of(token_ids, masks), loss, norm))
    assert len(steps) == NUM_STEPS
    assert_same_steps(folder, tmp_path / "tandem", steps, trainer, algorithm="dpo", dpo=dpo)
