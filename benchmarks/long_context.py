"""One training step on one long sequence, in a process of its own: its peak of memory, seconds, loss.

``python long_context.py WAY LENGTH FOLDER`` prints them as JSON. The model is that of `FOLDER`. A step on a few tokens
comes first, so that the optimizer's state is there. What counts is the memory of the process beyond what it held when
the long step began: Linux keeps the most that was resident (``VmHWM`` of proc(5)), and forgets it where
``/proc/self/clear_refs`` says so. Freed memory goes back before.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

SHORT = 64
"""Tokens of the first step."""
RATE, CLIP = 1e-6, 1.0
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class StepMeter:
    """The memory and the time of a step."""

    def start(self) -> None:
        """Begin: give freed memory back, and forget the peak so far."""
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")
        self._before = read_status("VmRSS")
        self._started, self._computed = time.perf_counter(), time.process_time()

    def stop(self) -> dict[str, float]:
        """Return the bytes of the peak, and seconds by the wall and of all threads."""
        seconds, processor_seconds = time.perf_counter() - self._started, time.process_time() - self._computed
        return {
            "bytes before": self._before,
            "peak bytes": read_status("VmHWM") - self._before,
            "seconds": seconds,
            "processor seconds": processor_seconds,
        }


def read_status(name: str) -> int:
    """Return a number of proc(5)'s ``status``, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def make_tokens(length: int, vocabulary: int) -> torch.Tensor:
    """Return random tokens, ``[1, T]``, the same for every way."""
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(length))


def policy_of(way: str, folder: Path, length: int) -> dict[str, Any]:
    """Return the section of a backend: packed rows, and each layer computed again in the backward pass."""
    optimizers: dict[str, dict[str, Any]] = {
        "dtensor": {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE, "weight_decay": 0.0}}},
        "megatron": {
            "dtensor_cfg": {"enabled": False},
            "megatron_cfg": {"enabled": True, "optimizer": {"lr": RATE, "min_lr": RATE, "weight_decay": 0.0}},
        },
    }
    return {
        "model_name": str(folder),
        "precision": "float32",
        "max_total_sequence_length": length,
        "max_grad_norm": CLIP,
        "train_global_batch_size": 1,
        "train_micro_batch_size": 1,
        "activation_checkpointing_enabled": True,
        "sequence_packing": {"enabled": True, "train_mb_tokens": length, "logprob_mb_tokens": length},
        **optimizers[way],
    }


def settings_of(way: str, folder: Path, length: int) -> dict[str, Any]:
    """Return the configuration of supervised fine-tuning by a backend."""
    return {
        "algorithm": "sft",
        "policy": policy_of(way, folder, length),
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
    }


def run_tandem(way: str, folder: Path, length: int, vocabulary: int) -> dict[str, float]:
    """Take the steps of a trainer, from a batch of samples to its metrics."""
    from tandem.config import build_config
    from tandem.samples.batch import SampleBatch, build_given_table
    from tandem.trainer.backends import make_backend
    from tandem.trainer.step import train

    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = str(folder / "converted")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = build_config(settings_of(way, folder, length))
    backend = make_backend(config, checkpoint=None)

    def step(num_tokens: int) -> float:
        batch = SampleBatch(
            lengths_S=np.full(1, num_tokens, dtype=np.int32),
            token_ids_T=make_tokens(num_tokens, vocabulary)[0].numpy().astype(np.int32),
            loss_mask_T=np.arange(num_tokens) > 0,
            generation_logprobs_T=np.zeros(num_tokens, dtype=np.float32),
            advantages_S=np.ones(1, dtype=np.float32),
            rewards_S=np.zeros(1, dtype=np.float32),
        )
        batch = batch.replace(**build_given_table(batch).columns)
        return train(backend, batch, batch, config).metrics["loss"]

    return measure(step, length)


def run_loop(folder: Path, length: int, vocabulary: int) -> dict[str, float]:
    """Take the steps of a plain loop over the Hugging Face model, each layer computed again in the backward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)

    def step(num_tokens: int) -> float:
        token_ids_1T = make_tokens(num_tokens, vocabulary)
        loss = model(input_ids=token_ids_1T, labels=token_ids_1T, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return measure(step, length)


def measure(step: Callable[[int], float], length: int) -> dict[str, float]:
    """Return what `StepMeter` finds of a step on so many tokens after one on a few, and its loss."""
    step(SHORT)
    meter = StepMeter()
    meter.start()
    loss = step(length)
    return meter.stop() | {"loss": loss}


def run_trl(folder: Path, length: int, vocabulary: int) -> dict[str, float]:
    """Take the steps of TRL's SFTTrainer, with its defaults: logits in tiles, each layer computed again."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b", pad_token="b")
    meter = StepMeter()
    measured: dict[str, float] = {}

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            measured.update(meter.stop())

    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=1,
        max_steps=2,
        max_length=length,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": make_tokens(num_tokens, vocabulary)[0].tolist()} for num_tokens in (SHORT, length)]
    trainer = trl.SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    measured["loss"] = float([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])
    return measured


def main(way: str, length: int, folder: Path) -> None:
    """Measure a way, and print what it took."""
    vocabulary = int(json.loads((folder / "config.json").read_bytes())["vocab_size"])
    if way == "trl":
        measured = run_trl(folder, length, vocabulary)
    elif way == "hugging face":
        measured = run_loop(folder, length, vocabulary)
    else:
        measured = run_tandem(way, folder, length, vocabulary)
    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
