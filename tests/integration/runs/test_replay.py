"""Replays through the console command: the same weights from recorded samples alone, and experiments on them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tandem.samples import sample_files
from tests.harness.processes import slow_trainer
from tests.harness.processes.slow_trainer import training_file
from tests.harness.runs.by_hand import MEGATRON_TP2, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    Command,
    coordinator,
    deterministic,
    joins,
    merged,
    steps_of,
    wait_until,
    weights_of,
    write_config,
)

EVERYTHING: dict[str, Any] = {
    "grpo": {"max_num_steps": 4, "val_at_start": True},
    "loss_fn": {"reference_policy_kl_penalty": 0.1},
    "policy": {
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "scheduler": {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.9}},
    },
    "cluster": {"rollouts": 2},
    "logger": {"tensorboard_enabled": True},
}
"""A reference model, two optimizer steps a batch, a schedule, samples of two engines."""
ASYNCHRONOUS: dict[str, Any] = {
    "grpo": {
        "max_num_steps": 4,
        "val_period": 0,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True},
    },
    "loss_fn": {"use_importance_sampling_correction": True},
    "policy": {"generation": {"async_engine": True, "colocated": {"enabled": False}}},
    "cluster": {"gpus_per_node": 0, "rollouts": 2},
    "checkpointing": {"metric_name": "reward"},
}
DYNAMIC: dict[str, Any] = {
    "grpo": {"max_num_steps": 3, "use_dynamic_sampling": True, "batch_multiplier": 1.25, "overlong_filtering": True},
    "env": {"mine": {"class": "judging.Judge"}},
}
JUDGE = """
from tandem.rollout.environments import Score

class Judge:
    def score(self, problem, response):
        return Score(float("1" in response), correct="1" in response)
"""
RUNS: dict[str, dict[str, Any]] = {
    "1-trainer": EVERYTHING,
    "2-trainers": merged(EVERYTHING, {"cluster": {"trainers": 2}}),
    "megatron": merged(EVERYTHING, merged(MEGATRON_TP2, {"policy": {"scheduler": []}})),
    "asynchronous": ASYNCHRONOUS,
    "dynamic-sampling": DYNAMIC,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a run of four steps, which tests copy."""
    folder = tmp_path_factory.mktemp("recorded")
    undisturbed_run(folder, EVERYTHING)
    return folder


@pytest.fixture
def run(recorded: Path) -> str:
    """Copy that folder to the working directory; return the run's."""
    shutil.copytree(recorded, ".", dirs_exist_ok=True, symlinks=True)
    return "run"


def state_of(checkpoint: str | Path) -> dict[str, bytes]:
    """Return all tensors of a checkpoint, the optimizer's too, to the bit."""
    files = sorted(Path(checkpoint, "optimizer").glob("*.safetensors"))
    state = {
        f"{file.name}.{name}": tensor.numpy().tobytes() for file in files for name, tensor in load_file(file).items()
    }
    assert state, checkpoint
    return state | weights_of(checkpoint)


def assert_equal(replay: str, run: str = "run", *, first_step: int = 1) -> None:
    """Compare what a replay has of each step with what the run has, to the bit."""
    last = steps_of(run)[-1].step
    assert state_of(f"{replay}/checkpoints/step_{last}") == state_of(f"{run}/checkpoints/step_{last}")
    replayed = steps_of(replay)
    assert [step.step for step in replayed] == list(range(first_step, last + 1))
    for mine, theirs in zip(replayed, [step for step in steps_of(run) if step.step >= first_step], strict=True):
        metrics = deterministic(mine.metrics)
        assert {"loss", "grad_norm", "reward", "entropy", "mean_generation_length"} <= metrics.keys()
        assert metrics == {name: theirs.metrics[name] for name in metrics}


@pytest.mark.parametrize("kind", RUNS)
def test_with_nothing_changed_weights_and_metrics_are_the_runs_to_the_bit(kind: str, recorded: Path) -> None:
    Path("judging.py").write_text(JUDGE)
    if kind == "1-trainer":
        shutil.copytree(recorded, ".", dirs_exist_ok=True, symlinks=True)
    else:
        undisturbed_run(Path(), RUNS[kind])
    replayed = coordinator("replay", "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    last = RUNS[kind]["grpo"]["max_num_steps"]
    assert replayed.stdout.startswith(
        f"run-replay is a replay of run: steps 1 to {last}, from the model that it started from\n"
    )
    assert ("validation is left out" in replayed.stdout) == (kind != "asynchronous")
    assert replayed.stdout.rstrip().endswith(f"weights are equal to the bit to those of step {last} of run")
    first = 1 if kind in ("asynchronous", "dynamic-sampling") else 0
    assert steps_of("run")[0].step == first
    assert_equal("run-replay")
    num_trainers = RUNS[kind].get("cluster", {}).get("trainers", 1)
    logs = sorted(path.name for path in Path("run-replay/logs").iterdir())
    assert logs == [f"trainer-{rank}.log" for rank in range(num_trainers)], "no engine, and no refit"
    assert not Path("run-replay/samples").exists()
    if kind == "asynchronous":
        ages = [step.metrics["max_trajectory_age"] for step in steps_of("run-replay")]
        assert max(ages) > 0, "some samples were made with older weights"


def test_it_goes_on_from_a_checkpoint(run: str) -> None:
    replayed = coordinator("replay", run, "--from", "2")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "steps 3, 4, from its checkpoint of step 2" in replayed.stdout
    assert "weights are equal to the bit to those of step 4 of run" in replayed.stdout
    assert_equal("run-replay", first_step=3)


def test_without_the_first_samples_it_begins_where_it_can(run: str) -> None:
    for file in sample_files.files(Path(run, sample_files.FOLDER)):
        if file.step == 1:
            file.path.unlink()
    replayed = coordinator("replay", run)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "steps 3, 4, from its checkpoint of step 2" in replayed.stdout
    assert_equal("run-replay", first_step=3)


def test_other_options_are_an_experiment_with_a_folder_of_its_own(run: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(run).rglob("*") if path.is_file()}
    replayed = coordinator(
        "replay",
        run,
        "logger.log_dir=mine",
        "policy.optimizer.kwargs.lr=1e-2",
        "grpo.normalize_rewards=false",
        "--to",
        "3",
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert (
        "weights differ from those of step 2 of run, as grpo.normalize_rewards, policy.optimizer.kwargs.lr were changed"
    ) in replayed.stdout
    mine, theirs = steps_of("mine"), steps_of(run)[1:]
    assert [step.step for step in mine] == [1, 2, 3]
    for name in ("reward", "mean_generation_length"):
        assert [step.metrics[name] for step in mine] == [step.metrics[name] for step in theirs[:3]], "the same data"
    assert mine[0].metrics["loss"] != theirs[0].metrics["loss"], "advantages are made anew from the recorded rewards"
    assert mine[2].metrics["learning_rate"] == pytest.approx(10 * theirs[2].metrics["learning_rate"])
    assert list(Path("mine/tensorboard").iterdir())
    assert {path.name for path in Path("mine/checkpoints").glob("step_*")} == {"step_2", "step_3"}
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before, "the run is as it was"
    assert coordinator("report", "mine").returncode == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_replay_is_resumed_by_its_folder(how: signal.Signals, run: str) -> None:
    training_file(3).touch()
    with Command("coordinator", "replay", run, "checkpointing.save_period=1", "cluster.launch.trainers=0") as replay:
        address = replay.wait_for(r"listens on (tcp://\S+)")[1]
        with Command(slow_trainer.__name__, *joins(address, "run-replay")):
            replay.wait_for(r"step 2/4")
            replay.signal(how)
            if how is signal.SIGINT:
                replay.wait_for("interrupted: finishing")
            training_file(3).unlink()
            assert replay.wait() == (130 if how is signal.SIGINT else -9)
        if how is signal.SIGINT:
            assert "interrupted; continue with: coordinator replay run-replay --resume" in replay.output()
    assert steps_of("run-replay")[-1].step < 4, "it was stopped in time"
    resumed = coordinator("replay", "run-replay", "--resume", "cluster.launch=all")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "weights are equal to the bit to those of step 4 of run" in resumed.stdout
    assert_equal("run-replay")


def test_a_run_that_was_killed_and_resumed_is_replayed_to_the_bit() -> None:
    config = write_config(merged(ASYNCHRONOUS, {"grpo": {"max_num_steps": 24}}))
    hold(at=97)  # beside three steps, of what engines may do by then
    with Command("coordinator", "up", config) as original:
        await_hold(original, r"step 3/24")
        wait_until(lambda: Path("run/checkpoints/latest").exists(), lambda: "a checkpoint")
        original.signal(signal.SIGKILL)
        original.wait()
    go_on()
    saved = int(Path("run/checkpoints/latest").resolve().name.removeprefix("step_"))
    resumed = coordinator("up", config, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resuming at step {saved + 1} " in resumed.stdout
    replayed = coordinator("replay", "run")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "weights are equal to the bit to those of step 24 of run" in replayed.stdout
    assert_equal("run-replay")


def test_a_run_is_replayed_while_it_goes_on() -> None:
    checkpointing = {"metric_name": "reward", "keep_top_k": None}
    config = write_config({"grpo": {"max_num_steps": 60, "val_period": 0}, "checkpointing": checkpointing})
    hold(at=81)
    with Command("coordinator", "up", config) as original:
        await_hold(original, r"step 5/60")
        wait_until(lambda: len(sample_files.files(Path("run/samples"))) >= 4, lambda: "four shards")
        replayed = coordinator("replay", "run", "--to", "4")
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert "weights are equal to the bit to those of step 4 of run" in replayed.stdout
        assert original.process.poll() is None, "it goes on"
        original.signal(signal.SIGINT)
        original.wait_for("interrupted: finishing")
        go_on()
        assert original.wait() == 130, original.output()
    theirs = {step.step: step.metrics for step in steps_of("run")}
    for step in steps_of("run-replay"):
        metrics = deterministic(step.metrics)
        assert metrics == {name: theirs[step.step][name] for name in metrics}


def test_a_shard_that_is_damaged_ends_the_replay_in_one_line(run: str) -> None:
    (shard,) = (
        file.path for file in sample_files.files(Path(run, "samples")) if (file.step, file.rollout) == (3, "rollout-0")
    )
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    replayed = coordinator("replay", run)
    assert replayed.returncode == 1
    assert f"error: {shard} cannot be read as part of the rollout log" in replayed.stderr
    assert len(replayed.stderr.strip().splitlines()) == 1
