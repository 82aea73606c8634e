"""A tiny run whose episodes a program plays: the program, the configuration, and what is recorded of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tandem.samples.sample_record import RecordedSample
from tests.harness.runs.running import merged, write_config

AGENT = """
import json, os, sys, urllib.request

order = json.load(sys.stdin)

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

def ask(*said):
    messages = [{"role": role, "content": content} for role, content in said]
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
    return answer["choices"][0]["message"]["content"]

question = ("user", order["problem"]["question"])
with open("pids", "a") as file:
    file.write(f"{os.getpid()} ")
first = ask(question)
again = ask(question)
last = ask(question, ("assistant", first), ("user", "= "))
share = sum(map(str.isdigit, last + again)) / (len(last + again) + 1)
post(os.environ["TANDEM_SESSION_URL"] + "/reward", {"reward": share, "correct": last == order["problem"]["answer"]})
"""
"""Asks three times, in two branches."""
LR = 0.5
OVER: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 3, "val_period": 0},
    "policy": {
        "train_global_batch_size": 4,
        "train_micro_batch_size": 2,
        "max_grad_norm": None,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": LR, "fused": False}},
    },
    "checkpointing": {"save_period": 1, "keep_top_k": None, "metric_name": "reward"},
    "data": {"environment": "agent"},
}
"""Two optimizer steps a batch, each of four episodes of two branches."""


def configure(over: dict[str, Any] | None = None, *, source: str = AGENT, **agent: Any) -> Path:
    """Write the program and the configuration of a run, with changes, to the working directory."""
    Path("agent.py").write_text(source)
    settings = {"command": ["python", "agent.py"], "timeout_s": 120, **agent}
    return write_config(merged(OVER, {**(over or {}), "env": {"agent": settings}}))


def model_after(step: int, run: str = "run") -> Any:
    """Load the model that a step of the run ended with."""
    return transformers.AutoModelForCausalLM.from_pretrained(f"{run}/checkpoints/step_{step}/policy")


def branches_of(sample: RecordedSample) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the tokens of each branch, which of them count, and their log-probabilities; but for the first of each."""
    arrays, found = sample.arrays, []
    for start, end in zip(arrays.offsets()[:-1], arrays.offsets()[1:], strict=True):
        token_ids = torch.from_numpy(arrays.token_ids_T[start:end].astype(np.int64))
        mask = torch.from_numpy(arrays.loss_mask_T[start:end].copy())[1:]
        found.append((token_ids, mask, torch.from_numpy(arrays.generation_logprobs_T[start:end].copy())[1:]))
    return found
