"""Whole runs with vLLM, through the console command and with real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs import hosts_harness
from tests.harness.runs.by_hand import in_folder, refits_of
from tests.harness.runs.hosts_harness import on_two_hosts
from tests.harness.runs.running import Command, coordinator, merged, process_of, steps_of, write_config
from tests.harness.trainers.trainer_harness import make_model
from tests.vllm.run_harness import JUDGE, NUM_STEPS, SEVENS, curve

other_host = hosts_harness.other_host


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of two undisturbed runs that differ in their engine."""
    folder = tmp_path_factory.mktemp("learned")
    with in_folder(folder):
        Path("judging.py").write_text(JUDGE)
        config = write_config(SEVENS)
        for backend in ("transformers", "vllm"):
            arguments = (f"policy.generation.backend={backend}", f"logger.log_dir={backend}")
            ended = coordinator("up", config, *arguments, timeout_s=240)
            assert ended.returncode == 0, ended.stdout + ended.stderr
    return {backend: folder / backend for backend in ("transformers", "vllm")}


def test_grpo_learns_with_vllm_what_it_learns_with_the_embedded_engine(learned: dict[str, Path]) -> None:
    for run in learned.values():
        rewards = curve(run, "reward")
        assert len(rewards) == NUM_STEPS
        assert rewards[-3:].mean() > rewards[:3].mean() + 0.2
        # The engine's own log-probabilities are the trainer's.
        assert curve(run, "token_mult_prob_error").max() < 1.001
        assert np.abs(curve(run, "sampling_importance_ratio") - 1).max() < 1e-3
    # The engines draw other tokens from the same distribution, 512 samples of 8 tokens a step.
    for metric, tolerance in (("reward", 0.06), ("entropy", 0.3), ("mean_generation_length", 1.0)):
        embedded, vllm = curve(learned["transformers"], metric), curve(learned["vllm"], metric)
        assert np.abs(embedded - vllm).max() < tolerance, metric


def test_a_mixture_of_experts_trains_with_vllm() -> None:
    experts = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    over = {
        "policy": {"new_model": {"config": experts}, "generation": SEVENS["policy"]["generation"]},
        "cluster": SEVENS["cluster"],
        "refit": {"verify": "full"},
    }
    path = write_config(over)
    config = yaml.safe_load(path.read_text())
    del config["policy"]["new_model"]["config"]["head_dim"]  # what this architecture derives
    path.write_text(yaml.safe_dump(config))
    ended = coordinator("up", path, "policy.generation.backend=vllm", timeout_s=240.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert curve("run", "token_mult_prob_error").max() < 1.001


def test_vllm_holds_the_base_and_merges_the_adapters_of_every_version() -> None:
    make_model(Path("base"), hidden_size=64, head_dim=32)
    policy = {
        "model_name": "base",
        "new_model": None,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2}},
        "generation": SEVENS["policy"]["generation"],
        "optimizer": {"kwargs": {"lr": 1.0e-2}},
    }
    over = {"policy": policy, "cluster": SEVENS["cluster"], "refit": {"verify": "full", "alias": "never"}}
    config = write_config({**over, "checkpointing": {"save_period": 1, "metric_name": "reward"}})
    ended = coordinator("up", config, "policy.generation.backend=vllm", timeout_s=240.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Trainers do not merge: they add what the adapters say to what the layer does.
    assert curve("run", "token_mult_prob_error").max() < 1.001
    with read_journal(Path("run")) as journal:
        moved = [sum(record.num_bytes.values()) for record in journal.refits()]
    newest = max(Path("run/checkpoints").glob("step_*"), key=lambda folder: int(folder.name.partition("_")[2]))
    adapters = load_file(newest / "policy" / "adapter_model.safetensors")
    assert set(moved[1:]) == {sum(tensor.nbytes for tensor in adapters.values())}
    assert moved[0] > moved[1]


def test_a_run_generates_in_float8() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 2}
    over = {"policy": {"new_model": {"config": sizes}, "generation": SEVENS["policy"]["generation"]}}
    config = write_config(merged(over, {"cluster": SEVENS["cluster"], "refit": {"verify": "full"}}))
    arguments = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.precision=fp8")
    ended = coordinator("up", config, *arguments, timeout_s=240.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # The engine's probabilities are those of the rounded weights: not the trainer's, but near.
    assert (np.abs(curve("run", "sampling_importance_ratio") - 1) > 1e-6).all()
    assert (curve("run", "token_mult_prob_error") < 1.05).all()


@pytest.mark.timeout(600)
def test_an_engine_in_float8_makes_it_of_what_has_changed(other_host: tuple[str, ...], tmp_path: Path) -> None:
    """It holds the same as if it were sent everything.

    What it is sent and quantises is in the trainer's element type, float32. Nearly all of that changes, but most of it
    in the lower half only, which is written as values and a bitmap: 9/16 of the bytes.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 2}
    generation = merged(SEVENS["policy"]["generation"], {"backend": "vllm", "vllm_cfg": {"precision": "fp8"}})
    policy = {
        "precision": "bfloat16",
        "new_model": {"config": sizes},
        "generation": generation,
        "optimizer": {"kwargs": {"lr": 1.0e-6}},
    }
    off = {"policy": policy, "cluster": SEVENS["cluster"], "checkpointing": {"enabled": False}}
    auto = merged(off, {"refit": {"differences": "auto"}, "cluster": {"links": {"network": 0.1}}})
    for name, config in (("off", off), ("auto", auto)):
        (tmp_path / name).mkdir()
        with in_folder(tmp_path / name), on_two_hosts(config, other_host) as (run, engines, _):
            assert run.wait() == 0, run.output() + engines[0].output()
            assert engines[0].wait() == 0
    whole, differing = (refits_of(tmp_path / name / "run") for name in ("off", "auto"))
    assert [refit.digest for refit in differing] == [refit.digest for refit in whole]
    assert not any(refit.quarantined for refit in differing)
    sizes_of = [[sum(refit.num_bytes.values()) for refit in refits] for refits in (whole, differing)]
    assert sizes_of[0][0] == sizes_of[1][0]
    assert all(0 < ours < 0.6 * theirs for ours, theirs in zip(sizes_of[1][1:], sizes_of[0][1:], strict=True)), sizes_of
    ours, theirs = (curve(tmp_path / name / "run", "token_mult_prob_error").tolist() for name in ("auto", "off"))
    assert ours == theirs


def test_async_engines_make_the_samples_of_one_that_waits(learned: dict[str, Path]) -> None:
    Path("judging.py").write_text(JUDGE)
    arguments = (write_config(SEVENS), "policy.generation.backend=vllm", "grpo.max_num_steps=2")
    ended = coordinator("up", *arguments, "policy.generation.vllm_cfg.async_engine=true", "cluster.rollouts=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Samples are drawn from their own seeds, whoever draws them and whatever is computed beside.
    for metric in ("reward", "mean_generation_length", "loss"):
        assert curve("run", metric)[0] == pytest.approx(curve(learned["vllm"], metric)[0], abs=1e-5), metric
    assert curve("run", "token_mult_prob_error").max() < 1.001


def test_an_unknown_argument_of_vllm_is_named_before_anything_starts() -> None:
    ended = coordinator(
        "up", write_config(), "policy.generation.backend=vllm", "policy.generation.vllm_kwargs={max_num_sequences: 4}"
    )
    assert ended.returncode == 2
    assert "policy.generation.vllm_kwargs.max_num_sequences: vLLM's engine has no such argument" in ended.stderr
    assert "did you mean 'max_num_seqs'" in ended.stderr


def test_kill_9_of_vllm_changes_nothing_but_the_time_it_takes(learned: dict[str, Path]) -> None:
    Path("judging.py").write_text(JUDGE)
    arguments = (write_config(SEVENS), "policy.generation.backend=vllm", "grpo.max_num_steps=5")
    with Command("coordinator", "up", *arguments) as run:
        run.wait_for(r"step 2/5")
        process_of(run, "rollout").kill()
        run.wait_for(r"rollout-0 is lost: killed by SIGKILL.*; another is launched in its place")
        assert run.wait() == 0, run.output()
    # Every sample was drawn again from its own seed: none is lost, and none counted twice.
    for metric in ("reward", "loss", "mean_generation_length"):
        assert curve("run", metric).tolist() == curve(learned["vllm"], metric)[:5].tolist(), metric


def test_what_was_generated_before_a_kill_is_not_generated_again(learned: dict[str, Path]) -> None:
    Path("judging.py").write_text(JUDGE)
    config = write_config(
        merged(SEVENS, {"checkpointing": {"enabled": True, "metric_name": "reward", "save_period": 2}})
    )
    arguments = (config, "policy.generation.backend=vllm", "grpo.max_num_steps=6")
    with Command("coordinator", "up", *arguments) as run:
        run.wait_for(r"step 5/6")
        run.process.kill()
    ended = coordinator("up", *arguments, "--resume", timeout_s=240.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for metric in ("reward", "loss", "mean_generation_length"):
        assert curve("run", metric).tolist() == curve(learned["vllm"], metric)[:6].tolist(), metric
    assert "had been generated, and are not generated again" in ended.stdout
    assert "tokens_per_s" not in steps_of()[4].metrics, "step 5 had been done"
