"""One trainer in this process: a Qwen3 of 41M parameters in float32 with AdamW, one rank, one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from smoke import sized

from tandem.config import Config, build_config
from tandem.config.schema import NewModel
from tandem.samples.batch import SampleBatch, build_given_table
from tandem.samples.model_files import write_new_model

CHARACTERS = "0123456789+-= "
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 768,
    "num_hidden_layers": sized(6, 1),
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "tie_word_embeddings": True,
}
NUM_SEQUENCES, LENGTH = 4, 32


@contextmanager
def one_trainer(folder: Path) -> Iterator[Config]:
    """Make a model in `folder`; this process is the only trainer of it, with one thread, as long as the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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


def make_batch() -> SampleBatch:
    """Return random tokens."""
    random = np.random.default_rng(0)
    num_tokens = NUM_SEQUENCES * LENGTH
    batch = SampleBatch(
        lengths_S=np.full(NUM_SEQUENCES, LENGTH, dtype=np.int32),
        token_ids_T=random.integers(3, len(CHARACTERS), num_tokens).astype(np.int32),
        loss_mask_T=np.tile(np.arange(LENGTH) >= LENGTH // 4, NUM_SEQUENCES),
        generation_logprobs_T=np.full(num_tokens, -2.0, dtype=np.float32),
        advantages_S=random.normal(0.0, 1.0, NUM_SEQUENCES).astype(np.float32),
        rewards_S=np.zeros(NUM_SEQUENCES, dtype=np.float32),
    )
    return batch.replace(**build_given_table(batch).columns)
