"""Whole runs through the console commands, with real processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.common.wire import EXIT_NOT_ADMITTED
from tandem.observe.run_folder.journal import read_journal
from tests.harness.runs.by_hand import undisturbed_run
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four steps, which tests only read, or copy."""
    return undisturbed_run(tmp_path_factory.mktemp("whole"), {"grpo": {"max_num_steps": 4}})


def test_one_command_runs_grpo_and_leaves_results(whole: Path) -> None:
    steps = steps_of(whole)
    assert [(s.step, s.version) for s in steps] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    for step in steps:
        assert {"reward", "accuracy", "loss", "kl", "entropy", "clip_fraction", "grad_norm"} <= step.metrics.keys()
        assert step.metrics["mean_generation_length"] <= 6
        # The engine's own log-probabilities are the trainer's: that is what keeps training on-policy.
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step.metrics["sampling_importance_ratio"] == pytest.approx(1.0, abs=1e-4)
        parts = {name: s for name, s in step.seconds.items() if name != "total"}
        assert {"generation", "policy_training", "refit", "get_logprobs"} <= parts.keys()
        assert sum(parts.values()) == pytest.approx(step.seconds["total"], rel=0.01, abs=2e-3)
    assert ["val_accuracy" in s.metrics for s in steps] == [False, True, False, True]
    assert [bool(s.checkpoint) for s in steps] == [False, True, False, True]
    for step in steps[1::2]:
        record = json.loads((whole / "checkpoints" / f"step_{step.step}" / "training.json").read_text())
        assert record["metric"] == step.metrics["val_reward"], "what checkpoints are ranked by"
    assert (whole / "report.png").stat().st_size > 5000
    assert (whole / "report.json").exists()
    assert '"token_mult_prob_error"' in (whole / "report.html").read_text()


def test_a_checkpoint_loads_in_transformers(whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = whole / "checkpoints/latest/policy"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("1 + 2", return_tensors="pt")
    assert tokens["input_ids"][0].tolist()[0] == model.config.bos_token_id, "a text begins as a conversation does"
    assert model(input_ids=tokens["input_ids"]).logits.shape == (1, 6, 17)


def test_two_trainers_and_two_engines_learn_what_one_of_each_learns(whole: Path) -> None:
    two_of_each = ("cluster.trainers=2", "cluster.rollouts=2", "policy.train_micro_batch_size=4")
    ended = coordinator("up", write_config(), *two_of_each)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # The first step is the same; later ones may sample other tokens where probabilities differ in the last bit.
    one, two = steps_of(whole)[0].metrics, steps_of()[0].metrics
    for name in ("loss", "grad_norm", "entropy", "reward", "mean_generation_length"):
        assert two[name] == pytest.approx(one[name], abs=1e-5), name


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(whole: Path) -> None:
    config = write_config({"grpo": {"max_num_steps": 4}})
    first = coordinator("up", config, "grpo.max_num_steps=2")
    assert first.returncode == 0, first.stderr
    second = coordinator("up", config, "--resume")
    assert second.returncode == 0, second.stderr
    assert "resuming at step 3" in second.stdout
    assert weights_of("run/checkpoints/step_4") == weights_of(whole / "checkpoints/step_4")
    resumed, uninterrupted = steps_of("run"), steps_of(whole)
    assert [s.step for s in resumed] == [1, 2, 3, 4]
    for a, b in zip(resumed[2:], uninterrupted[2:], strict=True):
        assert deterministic(a.metrics) == deterministic(b.metrics)


def test_several_optimizer_steps_and_a_reference_model() -> None:
    config = write_config(
        {
            "policy": {"train_global_batch_size": 8},
            "loss_fn": {"reference_policy_kl_penalty": 0.1},
            "grpo": {"max_num_steps": 2},
        }
    )
    ended = coordinator("up", config)
    assert ended.returncode == 0, ended.stderr
    first, second = steps_of()
    # At the first optimizer step policy and reference are the same model; the mean is over two of them.
    assert 0 <= first.metrics["kl"] < second.metrics["kl"]
    assert first.seconds["get_logprobs"] > 0


def test_bfloat16_and_copies_in_place_of_aliases() -> None:
    """The engine holds bfloat16 copies of float32 parameters: digests agree on what was meant to be sent."""
    ended = coordinator("up", write_config({"policy": {"precision": "bfloat16"}, "grpo": {"max_num_steps": 2}}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_of()[-1].metrics["token_mult_prob_error"] < 1.05
    lines = Path("run/logs/trainer-0.log").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["joined", "leaves:"], "no warnings of torch"


def test_a_second_run_in_the_same_folder_needs_a_decision(whole: Path) -> None:
    config = write_config({"grpo": {"max_num_steps": 1}})
    shutil.copytree(whole, "run", symlinks=True)
    again = coordinator("up", config)
    assert again.returncode == 1
    assert re.fullmatch(r"error: run already holds a run: continue it with --resume.*\n", again.stderr)
    anew = coordinator("up", config, "--restart")
    assert anew.returncode == 0, anew.stderr
    assert (len(steps_of("run.1")), len(steps_of("run"))) == (4, 1)


def test_a_restart_leaves_a_run_in_progress_alone() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}})
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 2/")
        refused = coordinator("up", config, "--restart")
        assert refused.returncode == 1
        assert re.fullmatch(r"error: run is in use by process \d+ on .*: stop that coordinator or .*\n", refused.stderr)
        assert not Path("run.1").exists()
        num_steps = len(steps_of())
        run.wait_for(f"step {num_steps + 3}/")
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.output()


def test_a_restart_moves_a_model_in_the_run_folder_only_if_it_is_made_anew() -> None:
    over: dict[str, Any] = {"policy": {"model_name": "run/model"}, "grpo": {"max_num_steps": 1}}
    config = write_config(over)
    assert coordinator("up", config).returncode == 0
    made = write_config(merged(over, {"policy": {"new_model": None}}), "made.yaml")
    refused = coordinator("up", made, "--restart")
    assert refused.returncode == 1
    assert refused.stderr == (
        "error: cannot set run aside for --restart: policy.model_name, 'run/model', lies within it, and "
        "policy.new_model does not say how to make it; move the model elsewhere first\n"
    )
    assert Path("run/model/config.json").exists()
    assert not Path("run.1").exists()
    anew = coordinator("up", config, "--restart")
    assert anew.returncode == 0, anew.stderr
    (earlier,), (later,) = steps_of("run.1"), steps_of("run")
    assert later.metrics["reward"] == earlier.metrics["reward"]


# --- by hand ---------------------------------------------------------------------------------------------------------

BY_HAND = {"cluster": {"launch": "none"}, "grpo": {"max_num_steps": 1}}


@pytest.mark.parametrize("order", [("refit", "trainer", "rollout"), ("rollout", "trainer", "refit")])
def test_services_started_by_hand_join_in_any_order(order: tuple[str, ...]) -> None:
    with Command("coordinator", "up", write_config(BY_HAND)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        commands = []
        try:
            for kind in order:
                commands.append(Command(kind, *joins(address)))
                time.sleep(0.5)  # late: the others are long there
            assert run.wait() == 0, run.output()
            assert [command.wait() for command in commands] == [0, 0, 0]
        finally:
            for command in commands:
                command.__exit__()
    assert [s.step for s in steps_of()] == [1]


def test_a_process_too_many_is_refused() -> None:
    with Command("coordinator", "up", write_config(BY_HAND)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("refit", *joins(address)) as first, Command("refit", *joins(address)) as second:
            first.wait_for("joined|refused")
            second.wait_for("joined|refused")
            wait_until(lambda: "refused" in first.output() + second.output(), lambda: "a refusal")
            refused = first if "refused" in first.output() else second
            assert refused.wait() == EXIT_NOT_ADMITTED
            assert "the run has its 1 refit process already" in refused.output()
            run.signal(signal.SIGINT)
            assert run.wait() == 130


# --- refits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
def test_every_refit_leaves_a_record(verify: str) -> None:
    ended = coordinator("up", write_config({"refit": {"verify": verify, "alias": "never"}, "cluster": {"rollouts": 2}}))
    assert ended.returncode == 0, ended.stderr
    with read_journal(Path("run")) as journal:
        refits = journal.refits()
    assert [refit.version for refit in refits] == [0, 1, 2, 3]
    num_bytes = sum(len(tensor) for tensor in weights_of("run/checkpoints/latest").values())
    for refit in refits:
        assert refit.engines == ("rollout-0", "rollout-1")
        assert refit.num_bytes == {f"trainer-0>rollout-{i}": num_bytes for i in range(2)}
        assert {"transfer", "copy", "commit"} <= refit.seconds.keys()
        assert 0 < refit.bound_s <= refit.predicted_s
    digests = [refit.digest for refit in refits]
    assert len(set(digests)) == (1 if verify == "off" else 4)
    listed = coordinator("refits", "run")
    assert listed.returncode == 0, listed.stderr
    assert "trainer-0>rollout-1" in listed.stdout
    assert ("not verified" in listed.stdout) == (verify == "off")
    assert all(f"{digest:016x}" in listed.stdout for digest in digests if digest)


def test_a_learning_rate_that_changes_no_weight_is_an_error() -> None:
    """An update of so little is lost; the optimizer believes that it has trained."""
    # Also a weight of 0 stays as it is: in float32 the product of the two is 0.
    over = {"policy": {"precision": "bfloat16", "max_grad_norm": 1e-30, "optimizer": {"kwargs": {"lr": 1e-30}}}}
    ended = coordinator("up", write_config(over))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert re.match(r"error: refit-0 failed while committing version 1: .*no weight has changed", line), line
