"""A whole run of a vision model, with vLLM: what it trains on is what vLLM saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal import read_journal
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.running import Command, coordinator, merged, process_of, write_config
from tests.harness.vision_models import write_vision_model
from tests.vllm.run_harness import curve

SHAPES: dict[str, Any] = {
    "grpo": {"max_num_steps": 4, "max_val_samples": 8},
    "policy": {
        "model_name": "sees",
        "new_model": None,
        "max_total_sequence_length": 64,
        "generation": {"backend": "vllm", "vllm_kwargs": {"kv_cache_memory_bytes": 2**26}},
    },
    "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 64, "num_validation": 16},
    "env": {"digits": {"class": "digits.Digits"}},
    "refit": {"verify": "full"},
    "cluster": {"deadlines": {"build_s": 240.0}},
}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_model_that_sees_is_trained_on_what_vllm_saw(family: str) -> None:
    write_vision_model(family, Path("sees"))
    ended = coordinator(
        "up", write_config(merged(SHAPES, {"policy": {"max_total_sequence_length": 128}})), timeout_s=240.0
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(curve("run", "reward")) == 4
    # The engine's own log-probabilities are the trainer's, pictures and all.
    assert curve("run", "token_mult_prob_error") == pytest.approx(1.0, abs=1e-4)
    assert (curve("run", "grad_norm") > 0).all()
    with read_journal(Path("run")) as journal:
        refits = list(journal.refits())
    assert {refit.version for refit in refits} >= {1, 2, 3, 4}
    assert all(refit.verify == "full" and refit.digest for refit in refits)


SHOWS = '''
from PIL import Image
from tandem.rollout.environments import Score, Turn

class Shows:
    """A first answer is answered by a picture; the second ends the sample."""

    def step(self, problem, conversation):
        if len(conversation) > 1:
            return Score(reward=float(len(conversation[-1]["content"])), correct=True)
        picture = Image.new("RGB", (40, 24), ("red", "blue")[len(conversation[0]["content"]) % 2])
        return Turn([{"role": "user", "content": [{"type": "image", "image": picture}]}], reward=0.5)
'''


def test_an_environment_shows_vllm_a_picture_in_a_later_turn() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    Path("shows.py").write_text(SHOWS)
    turns = {
        "grpo": {"max_num_steps": 2, "val_period": 0, "max_rollout_turns": 2},
        "policy": {"generation": {"max_new_tokens": 4}, "max_total_sequence_length": 128},
        "env": {"shows": {"class": "shows.Shows"}},
    }
    ended = coordinator("up", write_config(merged(merged(SHAPES, {"env": None}), turns)), timeout_s=240.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert curve("run", "token_mult_prob_error") == pytest.approx(1.0, abs=1e-4)
    samples = read_step(Path("run/samples"), 1)
    assert samples
    assert all(sample.scored.num_turns == 2 and len(sample.arrays.image_digests_IX) == 2 for sample in samples)


def test_kill_9_of_vllm_changes_nothing_but_the_time_it_takes() -> None:
    write_vision_model("qwen2_5_vl", Path("sees"))
    config = write_config(SHAPES)
    ended = coordinator("up", config, "logger.log_dir=whole", timeout_s=240.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with Command("coordinator", "up", config) as run:
        run.wait_for(r"step 1/4")
        process_of(run, "rollout").kill()
        assert run.wait() == 0, run.output()
    for metric in ("reward", "loss", "mean_generation_length"):
        assert curve("run", metric).tolist() == curve("whole", metric).tolist(), metric
