"""Whole runs whose trainers are on GPUs and whose engine is on a CPU: the numbers are those of a run on CPUs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.runs.by_hand import assert_same_results, refits_of
from tests.harness.runs.running import steps_of, typed, write_config
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

NUM_STEPS = 4
TOLERANCE = 1e-4
"""Of float32 sums that are taken in another order."""
BACKENDS: dict[str, dict[str, Any]] = {
    "dtensor": {},
    "megatron": {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}},
}
STREAMS = {"whole": {}, "tcp": {"stream": "tcp"}, "differences": {"differences": "auto"}}
SLOW = {"cluster": {"links": {"network": 0.1}}}
"""Rates over which differences of any size are sent."""
SHAPES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "sharded": (2, {}, {}),
    "cut": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}}, {"tensor_model_parallel_size": 2}),
}
"""The trainers, and what each backend is told."""


def run(name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    with monkeypatch.context() as patched:
        if not on_gpu:
            patched.setenv("CUDA_VISIBLE_DEVICES", "")
        path = write_config({**config, "logger": {"log_dir": name}}, f"{name}.yaml")
        ended = typed("coordinator", "up", str(path), timeout_s=500.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [step.metrics for step in steps_of(name)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_those_of_cpus(backend: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_trainers, of_dtensor, of_megatron = SHAPES[shape]
    if num_trainers > torch.cuda.device_count():
        pytest.skip(f"{num_trainers} trainers need a GPU each")
    policy = dict(BACKENDS[backend])
    if backend == "megatron":
        pytest.importorskip("megatron.core")
        policy["megatron_cfg"] = {**policy["megatron_cfg"], **of_megatron}
    else:
        policy |= of_dtensor
    config = {
        "grpo": {"max_num_steps": NUM_STEPS, "val_period": 2},
        "policy": {"new_model": {"config": {"num_key_value_heads": 2}}, **policy},
        "cluster": {"trainers": num_trainers},
        "checkpointing": {"save_period": NUM_STEPS},
    }
    monkeypatch.chdir(tmp_path)
    there = run("gpu", config, monkeypatch, on_gpu=True)
    here = run("cpu", config, monkeypatch, on_gpu=False)
    assert len(there) == len(here) == NUM_STEPS
    for gpu, cpu in zip(there, here, strict=True):
        for metric in ("loss", "grad_norm", "reward", "token_mult_prob_error"):
            assert gpu[metric] == pytest.approx(cpu[metric], rel=TOLERANCE, abs=TOLERANCE), metric
    refits = refits_of("gpu")
    assert [refit.version for refit in refits] == [*range(NUM_STEPS + 1)]
    assert all(refit.digest and not refit.quarantined for refit in refits)


def test_every_way_of_streaming_brings_the_trainers_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
        # Of so little a change, most is lost when weights are rounded for the engine.
        "policy": {"precision": "bfloat16", "optimizer": {"kwargs": {"lr": 1e-5}}},
        "checkpointing": {"save_period": NUM_STEPS},
    }
    monkeypatch.chdir(tmp_path)
    sizes = {}
    for name, refit in STREAMS.items():
        run(name, {**config, **SLOW, "refit": {"verify": "full", **refit}}, monkeypatch, on_gpu=True)
        if name != "whole" and IS_RUNNING:  # a GPU's own kernels add the gradient up in another order each time
            assert_same_results(name, tmp_path / "whole", same_batches=True)
        refits = refits_of(name)
        assert [refit.version for refit in refits] == [*range(NUM_STEPS + 1)]
        assert all(refit.digest and not refit.quarantined for refit in refits)
        sizes[name] = [sum(refit.num_bytes.values()) for refit in refits]
    assert sizes["tcp"] == sizes["whole"]
    assert sizes["differences"][0] == sizes["whole"][0]
    assert all(0 < size < sizes["whole"][0] / 2 for size in sizes["differences"][1:]), sizes


def test_trainers_step_while_engines_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asynchronous = {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True}
    config = {
        "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0, "async_grpo": asynchronous},
        "policy": {"generation": {"colocated": {"enabled": False}}},
        "loss_fn": {"use_importance_sampling_correction": True},
        "checkpointing": {"enabled": False},
        "refit": {"verify": "full"},
    }
    monkeypatch.chdir(tmp_path)
    steps = run("gpu", config, monkeypatch, on_gpu=True)
    assert len(steps) == NUM_STEPS
    assert max(step["max_trajectory_age"] for step in steps) == 1.0
    refits = refits_of("gpu")
    assert {refit.version for refit in refits} >= {*range(1, NUM_STEPS)}
    assert all(refit.digest and not refit.quarantined for refit in refits)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="2 trainers need a GPU each")
def test_shared_experts_compute_what_those_of_cpus_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = {
        "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
        "policy": {"new_model": {"config": experts}, "dtensor_cfg": {"expert_parallel_size": 2}},
        "cluster": {"trainers": 2},
    }
    monkeypatch.chdir(tmp_path)
    there = run("gpu", config, monkeypatch, on_gpu=True)
    here = run("cpu", config, monkeypatch, on_gpu=False)
    for gpu, cpu in zip(there, here, strict=True):
        for metric in ("loss", "grad_norm", "reward", "token_mult_prob_error"):
            assert gpu[metric] == pytest.approx(cpu[metric], rel=TOLERANCE, abs=TOLERANCE), metric
    assert all(refit.digest and not refit.quarantined for refit in refits_of("gpu"))


@pytest.mark.skipif(IS_RUNNING, reason="a simulated GPU lacks the kernel of packed rows in bfloat16")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_in_bfloat16_are_as_on_cpus(
    backend: str, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    config: dict[str, Any] = {
        "grpo": {"max_num_steps": NUM_STEPS, "val_period": 0},
        "policy": {
            "new_model": {"config": {"head_dim": 64, "num_key_value_heads": 2}},
            "precision": "bfloat16",
            "sequence_packing": {"enabled": True},
            "dynamic_batching": {"enabled": False},
            **BACKENDS[backend],
        },
    }
    compiled = {**config, "policy": {**config["policy"], "compile": is_compiled}}
    monkeypatch.chdir(tmp_path)
    there = run("gpu", compiled, monkeypatch, on_gpu=True)
    here = run("cpu", config, monkeypatch, on_gpu=False)
    # Both sides begin with the same weights and samples; a step of bfloat16 rounds to other weights, and other samples.
    for metric in ("loss", "grad_norm", "reward"):
        assert there[0][metric] == pytest.approx(here[0][metric], rel=0.05, abs=0.02), metric
    for step in there:
        assert step["token_mult_prob_error"] < 1.05
