"""Classes and functions of the user's, named in a configuration and kept beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.observe.run_folder.journal import read_journal
from tests.harness.leaks import gone
from tests.harness.runs.running import Command, coordinator, joins, steps_of, write_config

JUDGE = """
from tandem.rollout.environments import Score

class Judge:
    def __init__(self, base):
        self.base = base

    def score(self, problem, response):
        return Score(reward=self.base + 0.5, correct=False)
"""
SOLVE = """
def solve(problem):
    return "=" + problem.answer
"""
OWN: dict[str, Any] = {"env": {"mine": {"class": "judging.Judge", "kwargs": {"base": 2.0}}}}


def test_modules_beside_the_configuration_are_found_by_the_run_and_by_its_prerequisite() -> None:
    for name, text in (("grpo/judging.py", JUDGE), ("grpo/sft/solving.py", SOLVE)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    first = {
        "algorithm": "sft",
        "sft": {"max_num_steps": 2, "val_period": 0, "seed": 1},
        "data": {"solution_template": "solving:solve"},
        "checkpointing": {"metric_name": "loss"},
        "logger": {"log_dir": "sft_run"},
    }
    write_config(first, "grpo/sft/sft.yaml")
    then = {
        "algorithm": "grpo",
        "prerequisite": "sft/sft.yaml",
        "policy": {"model_name": "sft_run/checkpoints/latest/policy", "new_model": None},
    }
    ended = coordinator("up", write_config(OWN | then, "grpo/grpo.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_of("sft_run")[-1].step == 2
    assert [step.metrics["reward"] for step in steps_of()] == [2.5, 2.5, 2.5]


PLANS = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

def feed_forward():
    return {
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }
"""


def test_four_trainers_cut_layers_by_a_plan_beside_the_configuration() -> None:
    """Two share each layer and two pairs shard the rest; every version that the engine holds is verified."""
    Path("plans.py").write_text(PLANS)
    settings = {"tensor_parallel_size": 2, "custom_parallel_plan": "plans.feed_forward"}
    over = {"policy": {"dtensor_cfg": settings}, "cluster": {"trainers": 4}, "grpo": {"max_num_steps": 2}}
    ended = coordinator("up", write_config(over))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for step in steps_of():
        # The engine has the weights that the trainers have: it gives every token the same probability.
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step.metrics["grad_norm"] > 0
    with read_journal(Path("run")) as journal:
        refits = journal.refits()
    assert [refit.version for refit in refits] == [0, 1, 2]
    assert len({refit.digest for refit in refits}) == 3, "no two versions are alike, and all were verified"
    assert {f"trainer-{rank}>rollout-0" for rank in range(4)} == {link for refit in refits for link in refit.num_bytes}


def test_services_started_by_hand_find_them_by_the_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("settings").mkdir()
    Path("settings/judging.py").write_text(JUDGE)
    config = write_config(
        OWN | {"cluster": {"launch": {"trainers": 1, "rollouts": 0, "refit": True}}}, "settings/config.yaml"
    )
    with Command("coordinator", "up", config) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        paths = [os.environ.get("PYTHONPATH", ""), os.path.abspath("settings")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with Command("rollout", *joins(address)) as rollout:
            assert run.wait() == 0, run.output() + rollout.output()
            assert rollout.wait() == 0
    assert steps_of()[-1].metrics["reward"] == 2.5


def test_a_class_that_cannot_be_found_is_said_in_one_line() -> None:
    ended = coordinator("up", write_config(OWN))
    assert ended.returncode == 2
    assert "launched" not in ended.stdout
    assert ended.stderr == "error: env.mine.class: cannot import 'judging.Judge': No module named 'judging'\n"


STARTS_DAEMONS = """
import subprocess
from pathlib import Path

def start_one():
    with Path("pids").open("a") as file:
        words, null = ["sleep", "600"], subprocess.DEVNULL
        daemon = subprocess.Popen(words, stdin=null, stdout=null, stderr=null, start_new_session=True)
        file.write(f"{daemon.pid}\\n")

start_one()

class Unlicensed:
    def __init__(self):
        start_one()
        raise OSError("no licence")

    def score(self, problem, response):
        return 1.0
"""


@pytest.mark.parametrize(("options", "num_daemons"), [((), 1), (("--show",), 3)], ids=["plain", "show"])
def test_a_check_that_shows_rewards_makes_the_environment_and_none_leaves_what_it_starts(
    options: tuple[str, ...], num_daemons: int
) -> None:
    """The class is imported to be checked; to score reference answers, it is imported again and constructed."""
    Path("starts.py").write_text(STARTS_DAEMONS)
    checked = coordinator("check", write_config({"env": {"mine": {"class": "starts.Unlicensed"}}}), *options)
    if options:
        assert (checked.returncode, checked.stderr) == (2, "error: env.mine: OSError: no licence\n")
    else:
        assert checked.returncode == 0, checked.stderr
    pids = [int(word) for word in Path("pids").read_text().split()]
    assert len(pids) == num_daemons
    assert gone(pids)
