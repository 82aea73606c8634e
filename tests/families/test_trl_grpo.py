"""GRPO as TRL 1.16 trains it: its own trainer generates and steps, and Tandem makes the same steps on its batches.

TRL's optimizer decays no norms, so nothing decays here. Its epsilon beside a standard deviation is 1e-4, which rewards
of some dozens hide; its deviation within a group is that of a sample, and Tandem's, as NeMo-RL's, a population's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tandem.config.schema import AdvEstimator
from tandem.coordinator.algorithms.advantages import advantages
from tandem.samples.batch import SampleBatch
from tests.harness.trainers.reference import trained_weights
from tests.harness.trainers.trainer_harness import ADAMW, make_config, make_model, run_ranks, start_server, train_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Transformers' trainer uses what Transformers deprecates
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
NUM_GENERATIONS, LENGTH, ROWS = 4, 8, 4
TOLERANCE = 1e-5


class Case(NamedTuple):
    """What TRL is told beside the common settings, and the same for Tandem."""

    trl: dict[str, Any]
    loss: dict[str, Any]
    is_one_step: bool = False
    """Whether the rollout batch is one optimizer step of two micro-batches; else it is two of one."""


CASES = {
    "dapo": Case(
        {"loss_type": "dapo", "num_iterations": 3, "epsilon": 0.05, "epsilon_high": 0.1},
        {"ratio_clip_min": 0.05, "ratio_clip_max": 0.1},
        is_one_step=True,
    ),
    "grpo": Case({"loss_type": "grpo", "scale_rewards": "batch"}, {"loss_type": "grpo"}),
    # One micro-batch a step: TRL's have sequences in any order, Tandem's those of like length.
    "bnpo": Case({"loss_type": "bnpo", "num_iterations": 2, "scale_rewards": "none"}, {"loss_type": "bnpo"}),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", "num_iterations": 2, "entropy_coef": 0.5},
        {"loss_type": "dr_grpo", "entropy_coef": 0.5},
    ),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 0.01},
        {"loss_type": "grpo", "sequence_level_importance_ratios": True, "ratio_clip_min": 0.01, "ratio_clip_max": 0.01},
    ),
    "cispo": Case(
        {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 1.1},
        {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.1},
        is_one_step=True,
    ),
    "dual clip and KL": Case(
        {"loss_type": "bnpo", "num_iterations": 2, "delta": 1.25, "beta": 0.5, "scale_rewards": "none"},
        {"ratio_clip_c": 1.25, "reference_policy_kl_penalty": 0.5, "use_on_policy_kl_approximation": True},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """Start the server that ranks are forked from."""
    start_server()


class TrlRun(NamedTuple):
    """What TRL's trainer did with one rollout batch."""

    batch: SampleBatch
    """The batch in the order of its optimizer steps."""
    rewards_GN: NDArray[np.float64]
    advantages_GN: NDArray[np.float32]
    losses: list[float]
    """Of each optimizer step."""
    norms: list[float]
    weights: dict[str, torch.Tensor]


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 97) for completion in completions]


def train_with_trl(folder: Path, out: Path, case: Case) -> TrlRun:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    window = 2 if case.is_one_step else 1
    seen: list[tuple[dict[str, torch.Tensor], float]] = []
    scored: list[torch.Tensor] = []
    rewards: list[list[float]] = []

    class Recorded(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            scored.append(output["advantages"])
            return output

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            seen.append((inputs, float(loss.detach())))
            return loss

    def recorded(completions: list[str], **kwargs: Any) -> list[float]:
        rewards.append(reward(completions))
        return rewards[-1]

    settings = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=window,
        steps_per_generation=2,
        num_generations=NUM_GENERATIONS,
        max_completion_length=LENGTH,
        max_steps=2 // window * case.trl.get("num_iterations", 1),
        learning_rate=ADAMW["lr"],
        adam_epsilon=ADAMW["eps"],
        lr_scheduler_type="constant",
        **case.trl,
    )
    problems = Dataset.from_list([{"prompt": prompt} for prompt in ("1+2=", "3+44=")])
    trainer = Recorded(model=str(folder), reward_funcs=recorded, args=settings, train_dataset=problems)
    trainer.train()
    assert len(scored) == 1, "one rollout batch"
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return TrlRun(
        batch=batch_of([inputs for inputs, _ in seen[:2]]),
        rewards_GN=np.array(rewards[0]).reshape(-1, NUM_GENERATIONS),
        advantages_GN=scored[0].numpy().reshape(-1, NUM_GENERATIONS),
        losses=np.array([loss for _, loss in seen]).reshape(-1, window).sum(axis=1).tolist(),
        norms=[entry["grad_norm"] for entry in logged],
        weights={name: parameter.detach() for name, parameter in trainer.model.named_parameters()},
    )


def batch_of(parts: list[dict[str, torch.Tensor]]) -> SampleBatch:
    """Return TRL's padded rows as a batch."""
    tokens, masks, generation, lengths, of_samples = [], [], [], [], []
    for part in parts:
        for row, completion_mask in enumerate(part["completion_mask"].bool()):
            prompt = part["prompt_ids"][row][part["prompt_mask"][row].bool()]
            completion = part["completion_ids"][row][completion_mask]
            logprobs = torch.zeros(len(prompt) + len(completion))
            if "old_per_token_logps" in part and part["old_per_token_logps"] is not None:
                logprobs[len(prompt) :] = part["old_per_token_logps"][row][completion_mask]
            tokens.append(torch.cat([prompt, completion]))
            masks.append(torch.arange(len(tokens[-1])) >= len(prompt))
            generation.append(logprobs)
            lengths.append(len(tokens[-1]))
            of_samples.append(float(part["advantages"][row]))
    return SampleBatch(
        lengths_S=np.array(lengths, dtype=np.int32),
        token_ids_T=torch.cat(tokens).numpy().astype(np.int32),
        loss_mask_T=torch.cat(masks).numpy(),
        generation_logprobs_T=torch.cat(generation).numpy(),
        advantages_S=np.array(of_samples, dtype=np.float32),
        rewards_S=np.zeros(len(lengths), dtype=np.float32),
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_grpo_makes_the_steps_of_trl(tmp_path: Path, case: Case) -> None:
    folder = make_model(tmp_path / "model")
    run = train_with_trl(folder, tmp_path / "trl", case)
    scale = case.trl.get("scale_rewards", "group")
    estimator = AdvEstimator(scale_rewards=scale, normalize_rewards=scale != "none", use_leave_one_out_baseline=False)
    found_GN = advantages(run.rewards_GN, estimator, np.ones(run.rewards_GN.shape, dtype=np.bool_))
    of_sample = np.sqrt(1 - 1 / NUM_GENERATIONS) if scale == "group" else 1.0
    np.testing.assert_allclose(found_GN * of_sample, run.advantages_GN, rtol=1e-4)

    config = make_config(
        folder,
        loss=case.loss,
        max_total_sequence_length=32,
        train_global_batch_size=2 * ROWS if case.is_one_step else ROWS,
        train_micro_batch_size=ROWS,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {**ADAMW, "weight_decay": 0.0}},
        generation={"max_new_tokens": LENGTH},
    )
    grpo = msgspec.structs.replace(config.grpo, num_iterations=case.trl.get("num_iterations", 1))
    config = msgspec.structs.replace(config, grpo=grpo)
    (((metrics,), _),) = run_ranks(1, train_rank, config, [run.batch], tmp_path / "tandem")
    assert metrics["loss"] == pytest.approx(np.mean(run.losses), abs=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(np.mean(run.norms), rel=TOLERANCE)
    for name, tensor in trained_weights(tmp_path / "tandem").items():
        torch.testing.assert_close(tensor, run.weights[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
