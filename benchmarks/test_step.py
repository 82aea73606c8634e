"""One GRPO step end to end, Tandem and TRL, on the same model, problems and machine.

The workload: a 3M-parameter Qwen3 in float32, 16 prompts of 8 samples, 24 new tokens each. Tandem runs through its
console command, four processes and all; TRL's GRPOTrainer runs in one. Both train on every sample once, with AdamW and
no KL penalty. With 500 characters, random weights hardly ever end a response early: both make as many tokens.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

NUM_STEPS = sized(9, 4)
NUM_WARMUP = 2
NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 16, 8, 24

CONFIG = {
    "grpo": {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_SAMPLES,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": "0123456789+-= " + "".join(map(chr, range(0x100, 0x2F0))),
            "config": {
                "model_type": "qwen3",
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": 64,
        "train_global_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "train_micro_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "generation": {"max_new_tokens": NUM_TOKENS, "transformers_cfg": {"num_slots": 128}},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-6}},
    },
    "data": {
        "dataset_name": "reasoning_gym",
        "task": "chain_sum",
        "task_params": {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        "num_train": 512,
        "num_validation": 16,
        "prompt_template": "{metadata[expression]}",
    },
    "checkpointing": {"enabled": False, "metric_name": "reward"},
    "logger": {"log_dir": "run", "tensorboard_enabled": False},
}


def tandem_step_seconds(folder: Path) -> list[float]:
    """Run Tandem; return the seconds of each step after the warm-up, as its journal has them."""
    from tandem.observe.run_folder.journal import read_journal

    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    command = [str(Path(sys.executable).parent / "coordinator"), "up", str(path), "--restart"]
    subprocess.run(command, check=True, cwd=folder, timeout=300, capture_output=True)
    with read_journal(folder / "run") as journal:
        steps = journal.steps()
    assert all(s.metrics["mean_generation_length"] > NUM_TOKENS - 4 for s in steps)
    return [step.seconds["total"] for step in steps if step.step > NUM_WARMUP]


def trl_step_seconds(folder: Path) -> list[float]:
    """Run TRL's trainer on the model that Tandem made; return the seconds of each step after the warm-up."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets
    import torch
    import trl
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    prompts = [{"prompt": f"{i % 10} + {i % 7} - {i % 5} + {i % 9}"} for i in range(NUM_STEPS * NUM_PROMPTS)]
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=NUM_TOKENS,
        max_steps=NUM_STEPS,
        beta=0.0,
        learning_rate=1.0e-6,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        callbacks=[Clock()],
    )
    trainer.train()
    return [b - a for a, b in zip(ends[NUM_WARMUP - 1 :], ends[NUM_WARMUP:], strict=False)]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what TRL uses of transformers is about to be renamed
def test_a_step_beside_trl(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install -e '.[bench]' to compare with TRL")
    ours = benchmark.pedantic(tandem_step_seconds, args=(tmp_path,), rounds=1)
    theirs = trl_step_seconds(tmp_path)
    medians = {"tandem": statistics.median(ours), "trl": statistics.median(theirs)}
    ratio = medians["trl"] / medians["tandem"]
    benchmark.extra_info.update({"median step seconds": medians, "trl over tandem": ratio})
    print(f"\nmedian step: tandem {medians['tandem']:.3f} s, trl {medians['trl']:.3f} s: {ratio:.2f} times as fast")
