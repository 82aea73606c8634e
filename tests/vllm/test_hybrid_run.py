"""A model of several kinds of layers in the real vLLM: two workers beside two trainers whose rows are packed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.config.schema import NewModel
from tandem.samples.model_files import write_new_model
from tandem.trainer import attention
from tests.harness.runs.by_hand import assert_same_results, in_folder
from tests.harness.runs.running import Command, joins, merged, process_of, write_config
from tests.vllm.run_harness import JUDGE, SEVENS, curve
from tests.vllm.vllm_harness import LEARNED

NUM_STEPS = 6
MODEL = NewModel(
    characters="0123456789+-= ",
    config={
        "model_type": "qwen3_5_moe_text",
        **LEARNED["qwen3_5_moe_text"],
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
)
SETTINGS: dict[str, Any] = merged(
    SEVENS,
    {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 8, "max_num_steps": NUM_STEPS},
        "policy": {
            "new_model": None,
            "train_global_batch_size": 32,
            "train_micro_batch_size": 8,
            "sequence_packing": {"enabled": True},
            "generation": {
                "backend": "vllm",
                # vLLM computes states in bfloat16 alone on a CPU.
                "vllm_cfg": {"precision": "bfloat16", "tensor_parallel_size": 2},
            },
        },
        "checkpointing": {"enabled": True, "save_period": 2, "metric_name": None},
        "cluster": {"trainers": 2, "heartbeat_timeout_s": 12.0, "launch": {"trainers": 2, "refit": True}},
        "refit": {"verify": "full"},
    },
)


def make_model(folder: Path) -> Path:
    """Write a random model and its tokenizer."""
    write_new_model(folder, MODEL)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_packed_rows_are_refused_with_the_release_that_is_needed(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"))
    needed = "its layers of type linear_attention need Transformers 5.24 or later, and"
    assert attention.prepare_to_pack(model, 64) == f"{needed} {transformers.__version__} is installed"


COORDINATOR = Path(sys.prefix).with_name("venv") / "bin" / "coordinator"
"""That of the environment without vLLM: packed rows of such layers need a later Transformers than vLLM takes."""


@contextlib.contextmanager
def trained(settings: dict[str, Any]) -> Iterator[tuple[Command, list[str]]]:
    """Start a run with its trainers; yield the words that start an engine."""
    Path("judging.py").write_text(JUDGE)
    with Command(COORDINATOR, "up", write_config(settings)) as run:
        yield run, ["rollout", *joins(run.wait_for(r"listens on (tcp://\S+)")[1])]


@pytest.mark.timeout(900)
@pytest.mark.skipif(not COORDINATOR.exists(), reason="there is no environment without vLLM beside this one")
def test_kill_9_of_trainer_engine_and_worker_changes_nothing_but_the_time_it_takes(tmp_path: Path) -> None:
    settings = merged(SETTINGS, {"policy": {"model_name": str(make_model(tmp_path / "model"))}})
    (tmp_path / "whole").mkdir()
    with in_folder(tmp_path / "whole"), trained(settings) as (run, words), Command(*words) as engine:
        assert run.wait() == 0, run.output() + engine.output()
    assert curve(tmp_path / "whole" / "run", "token_mult_prob_error").max() < 1.05
    with trained(settings) as (run, words), contextlib.ExitStack() as stack:
        engine = stack.enter_context(Command(*words))
        run.wait_for(rf"step 2/{NUM_STEPS}")
        process_of(run, "trainer").kill()
        run.wait_for(r"trainer-\d is lost: killed by SIGKILL")
        run.wait_for(rf"step 3/{NUM_STEPS}")
        worker = next(child for child in engine.children() if "Worker" in " ".join(child.cmdline()))
        worker.kill()
        assert engine.wait() == 1, engine.output()
        engine = stack.enter_context(Command(*words))
        run.wait_for(rf"step 5/{NUM_STEPS}")
        engine.process.kill()
        stack.enter_context(Command(*words))
        assert run.wait() == 0, run.output()
    assert_same_results("run", tmp_path / "whole" / "run")
