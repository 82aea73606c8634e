"""How long does saving a checkpoint hold training up?

A Qwen3 of 41M parameters in float32 with AdamW, one rank, one thread for training. In turns in one process: a save that
is written at once, as where memory has no room for a copy, and one that a thread writes while training goes on, as the
trainer does elsewhere. Measured is the time in which no step can start; beside it, the time until all is synced to the
disk that temporary folders lie on, and how many steps are done meanwhile.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from measure import Turns, report
from pytest_benchmark.fixture import BenchmarkFixture

from tandem.common.batch import TrainingBatch
from tandem.common.config import Config, build_config
from tandem.common.config.schema import NewModel
from tandem.common.tokenizer import write_new_model
from tandem.trainer import checkpoints, step
from tandem.trainer.backends.dtensor import DTensorBackend

CHARACTERS = "0123456789+-= "
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "tie_word_embeddings": True,
}
NUM_SEQUENCES, LENGTH = 4, 32
NUM_ROUNDS = 7
AT_ONCE, ASIDE = "written at once", "written aside"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    """A folder with a model; this process is the only trainer, with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = tmp_path / "model"
    write_new_model(folder, NewModel(config=MODEL, characters=CHARACTERS, seed=0))
    described = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32).save_pretrained(folder)
    yield build_config(
        {
            "algorithm": "grpo",
            "grpo": {"num_prompts_per_step": NUM_SEQUENCES // 2, "num_generations_per_prompt": 2},
            "loss_fn": {"reference_policy_kl_penalty": 0.0},
            "policy": {
                "model_name": str(folder),
                "precision": "float32",
                "max_total_sequence_length": LENGTH,
                "train_global_batch_size": NUM_SEQUENCES,
                "train_micro_batch_size": NUM_SEQUENCES,
                "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6}},
            },
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )
    dist.destroy_process_group()
    torch.set_num_threads(before)


def make_batch() -> TrainingBatch:
    random = np.random.default_rng(0)
    num_tokens = NUM_SEQUENCES * LENGTH
    return TrainingBatch(
        lengths_S=np.full(NUM_SEQUENCES, LENGTH, dtype=np.int32),
        token_ids_T=random.integers(3, len(CHARACTERS), num_tokens).astype(np.int32),
        loss_mask_T=np.tile(np.arange(LENGTH) >= LENGTH // 4, NUM_SEQUENCES),
        generation_logprobs_T=np.full(num_tokens, -2.0, dtype=np.float32),
        advantages_S=random.normal(0.0, 1.0, NUM_SEQUENCES).astype(np.float32),
    )


class Saving:
    """Saves between training steps."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._batch = make_batch()
        self.backend = DTensorBackend(config, checkpoint=None)
        self.train()
        self.num_bytes = 0
        self.until_synced: list[float] = []
        self.num_steps: list[int] = []
        """Done while a thread wrote."""

    def train(self) -> None:
        """Take a step."""
        step.train(self.backend, self._batch.table(), self._batch, self._config)

    def aside(self) -> float:
        """Return the seconds in which no step can start; then train until all is written."""
        begun = time.perf_counter()
        writing = self.backend.save(self._folder)
        held_s = time.perf_counter() - begun
        assert not writing.why_waited
        num_steps = 0
        while not writing.num_bytes.done():
            self.train()
            num_steps += 1
        self.until_synced.append(time.perf_counter() - begun)
        self.num_steps.append(num_steps)
        self.num_bytes = writing.num_bytes.result()
        shutil.rmtree(self._folder)
        return held_s

    def at_once(self) -> float:
        """Return the seconds that it takes as if memory had no room for a copy."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints, "available_bytes", lambda: 0)
            begun = time.perf_counter()
            writing = self.backend.save(self._folder)
            held_s = time.perf_counter() - begun
        assert writing.why_waited
        assert writing.num_bytes.done()
        shutil.rmtree(self._folder)
        return held_s


def test_the_time_that_a_save_holds_training_up(benchmark: BenchmarkFixture, config: Config, tmp_path: Path) -> None:
    saving = Saving(config, tmp_path / "saved")
    turns = Turns({AT_ONCE: saving.at_once, ASIDE: saving.aside})
    turns.round()
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS, iterations=1)
    facts = {
        "parameters": saving.backend.num_parameters,
        "until synced, written aside": saving.until_synced[-NUM_ROUNDS:],
        "steps done while it is written": saving.num_steps[-NUM_ROUNDS:],
    }
    shares = report(
        benchmark,
        turns.last(NUM_ROUNDS),
        title=f"A checkpoint of {saving.num_bytes / 1e6:.0f} MB: no step can start for",
        num_bytes=saving.num_bytes,
        against=AT_ONCE,
        **facts,
    )
    print(f"written aside: synced after {statistics.median(saving.until_synced[-NUM_ROUNDS:]):.2f} s")
    assert min(saving.num_steps) > 0
    assert shares[ASIDE] > 2
