"""``coordinator slurm`` on a real Slurm of two nodes: a whole run, and one that is preempted and loses a node."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.runs.by_hand import assert_same_results, in_folder, undisturbed_run
from tests.harness.runs.hosts_harness import TWO_NODES
from tests.harness.runs.running import BIN, merged, write_config
from tests.slurm.slurm_harness import NODES, PROGRAMS, Slurm, slurm_in, wait_for

missing = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

JOB_S = 180.0
NUM_STEPS = 12
CONFIG: dict[str, Any] = {
    "cluster": {"trainers": 2, "rollouts": 2},
    "grpo": {"max_num_steps": NUM_STEPS, "val_period": NUM_STEPS},
    "policy": {"train_micro_batch_size": 4},
    "checkpointing": {"save_period": 2},
}


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Return a Slurm of two nodes."""
    with slurm_in(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run without Slurm."""
    return undisturbed_run(tmp_path_factory.mktemp("one_node"), CONFIG)


def submit(slurm: Slurm) -> str:
    """Submit the run in the working directory; return the job's number."""
    config = write_config(merged(CONFIG, TWO_NODES))
    words = [BIN / "coordinator", "slurm", config, "--submit", "--name", "job", "--sbatch=--chdir=."]
    environment = {**slurm.environment, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Submitted batch job "), done.stdout
    return done.stdout.split()[-1]


def log_of(job: str) -> str:
    path = Path(f"job-{job}.log")
    return path.read_text() if path.exists() else ""


def wait_for_state(slurm: Slurm, job: str, state: str) -> None:
    wait_for(lambda: slurm.state_of(job) == state, f"job {job} to be {state}:\n{log_of(job)}", JOB_S)


def wait_for_step(job: str, step: int) -> None:
    wait_for(lambda: f"step {step}/" in " ".join(log_of(job).split()), f"step {step}:\n{log_of(job)}", JOB_S)


def test_a_run_over_two_nodes(slurm: Slurm, one_node: Path, tmp_path: Path) -> None:
    """Both nodes launch their share, the results are those of one node, and nothing is left."""
    with in_folder(tmp_path):
        job = submit(slurm)
        wait_for_step(job, 2)
        nodes = {node: services_on(node) for node in NODES}
        assert nodes == {"n1": ["refit", "rollout", "trainer"], "n2": ["rollout", "trainer"]}
        wait_for_state(slurm, job, "COMPLETED")
        assert_same_results("run", one_node)
    wait_for(lambda: not services_on("n1") + services_on("n2"), "services to end", 30.0)


def test_a_run_that_is_preempted_and_then_loses_a_node(slurm: Slurm, one_node: Path, tmp_path: Path) -> None:
    """Nobody touches the job: Slurm begins it again both times, and the results are those of an undisturbed run."""
    with in_folder(tmp_path):
        job = submit(slurm)
        wait_for_step(job, 3)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: "interrupted; continue with" in log_of(job), "the run to be interrupted", JOB_S)
        wait_for(lambda: log_of(job).count("resum") >= 1, f"the job to go on:\n{log_of(job)}", JOB_S)
        wait_for_step(job, 7)
        assert slurm.kill_node("n2")
        wait_for(lambda: "down" in slurm.states()["n2"], "the controller to notice", JOB_S)
        slurm.start_node("n2")
        wait_for_state(slurm, job, "COMPLETED")
        assert_same_results("run", one_node)


def services_on(node: str) -> list[str]:
    """Return the kinds of services that run on a node, sorted."""
    found = []
    for process in psutil.process_iter():
        try:
            words, environ = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if environ.get("SLURMD_NODENAME") == node and words and words[0].split()[0] in ("refit", "trainer", "rollout"):
            found.append(words[0].split()[0])
    return sorted(found)
