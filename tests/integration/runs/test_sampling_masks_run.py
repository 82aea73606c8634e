"""Runs that draw from some of the tokens, through the console command: each token's log-probability is the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.observe.samples import trainer_logprobs
from tandem.samples.batch import MASKS, SampleBatch
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.by_hand import MEGATRON_TP2
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    Command,
    coordinator,
    deterministic,
    merged,
    process_of,
    steps_of,
    weights_of,
    write_config,
)
from tests.harness.trainers.masks_harness import kept_in

TEMPERATURE = 0.8
CUT: dict[str, Any] = {
    "grpo": {"max_num_steps": 2, "val_period": 0, "adv_estimator": {"name": "grpo"}},
    "loss_fn": {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.01},
    "policy": {
        "new_model": {
            "characters": "".join(map(chr, range(32, 150))),
            "config": {"num_key_value_heads": 2, "initializer_range": 0.2},
        },
        "generation": {"temperature": TEMPERATURE, "top_p": 0.9},
    },
    "logger": {"samples": "all"},
    "checkpointing": {"metric_name": "reward", "save_period": 1, "keep_top_k": None},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "1-trainer": {},
    "dtensor-tp2": {"policy": {"dtensor_cfg": {"tensor_parallel_size": 2}}, "cluster": {"trainers": 2}},
    "megatron-tp2": MEGATRON_TP2,
}


def masked_logprobs(model: Any, arrays: SampleBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the log-probability of each token but the first, over the tokens that its mask keeps."""
    token_ids_T = torch.from_numpy(arrays.token_ids_T.astype(np.int64))
    (is_kept_TV,) = kept_in(arrays, model.config.vocab_size)
    assert is_kept_TV is not None
    with torch.no_grad():
        logits_TV = model(input_ids=token_ids_T[None]).logits[0, :-1] / TEMPERATURE
    logprobs_TV = logits_TV.masked_fill(~is_kept_TV[1:], -torch.inf).log_softmax(dim=-1)
    found: np.ndarray[Any, np.dtype[np.float32]] = logprobs_TV.gather(1, token_ids_T[1:, None])[:, 0].numpy()
    return found


@pytest.mark.parametrize("kind", TRAINERS)
def test_log_probabilities_are_the_engines_and_transformers_and_a_replay_has_them_to_the_bit(kind: str) -> None:
    config = write_config(merged(CUT, TRAINERS[kind]))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for step in steps_of("run"):
        assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
        assert step.metrics["kl"] >= 0
        logprobs = trainer_logprobs(Path("run"), step.step)
        for sample in read_step(Path("run") / "samples", step.step):
            arrays, is_drawn_T = sample.arrays, sample.arrays.loss_mask_T
            assert (arrays.mask_lengths_T > 0)[is_drawn_T].any()
            assert not arrays.mask_lengths_T[~is_drawn_T].any()
            logprobs_T = logprobs[sample.scored.group, sample.scored.sample]
            assert np.abs(logprobs_T - arrays.generation_logprobs_T)[is_drawn_T].max() < 1e-5
    assert steps_of("run")[0].metrics["kl"] == pytest.approx(0.0, abs=1e-6), "both without masks, of equal weights"
    plain = transformers.AutoModelForCausalLM.from_pretrained("run/checkpoints/step_1/policy", dtype=torch.float32)
    for sample in read_step(Path("run") / "samples", 2):
        is_drawn_T = sample.arrays.loss_mask_T[1:]
        expected_T = masked_logprobs(plain, sample.arrays)
        assert np.abs(sample.arrays.generation_logprobs_T[1:] - expected_T)[is_drawn_T].max() < 1e-5
    replayed = coordinator("replay", "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    (folder,) = Path().glob("run-replay*")
    assert weights_of(folder / "checkpoints/step_2") == weights_of("run/checkpoints/step_2")
    for mine, theirs in zip(steps_of(folder), steps_of("run"), strict=True):
        metrics = deterministic(mine.metrics)
        assert {"loss", "grad_norm", "sampling_importance_ratio", "entropy"} <= metrics.keys()
        assert metrics == {name: theirs.metrics[name] for name in metrics}


def test_a_run_whose_engine_and_trainer_are_killed_has_the_same_masks_and_weights() -> None:
    config = write_config(merged(merged(CUT, TRAINERS["dtensor-tp2"]), {"grpo": {"max_num_steps": 16}}))
    assert coordinator("up", config, "logger.log_dir=whole").returncode == 0
    for score in (33, 81):  # of what the killed engine had some is scored again
        hold(score)
    with Command("coordinator", "up", config) as run:
        for after, kind in ((2, "rollout"), (4, "trainer")):
            await_hold(run, f"step {after}/16")
            process_of(run, kind).kill()
            go_on()
        assert run.wait() == 0, run.output()
        assert run.output().count(" is lost: killed by SIGKILL") == 2
    assert weights_of("run/checkpoints/step_16") == weights_of("whole/checkpoints/step_16")
    for step in range(1, 17):
        pairs = zip(read_step(Path("run/samples"), step), read_step(Path("whole/samples"), step), strict=True)
        for mine, theirs in pairs:
            for name in MASKS:
                assert mine.arrays.columns[name].tobytes() == theirs.arrays.columns[name].tobytes()


def test_a_run_that_draws_from_all_tokens_has_no_masks() -> None:
    config = write_config(merged(CUT, {"policy": {"generation": {"top_p": 1.0}}, "grpo": {"max_num_steps": 1}}))
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (step,) = steps_of("run")
    assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert all(MASKS[0] not in sample.arrays.columns for sample in read_step(Path("run") / "samples", 1))
