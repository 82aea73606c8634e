"""A vision model, whose trainers and engines do not see the run's folder: they fetch its images by digest."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.samples.images.store import ImageFolder
from tests.harness.runs.by_hand import assert_same_metrics, in_folder
from tests.harness.runs.hosts_harness import command
from tests.harness.runs.running import Command, coordinator, joins, merged, steps_of, write_config
from tests.harness.vision_models import write_vision_model

SHAPES: dict[str, Any] = {
    "grpo": {"max_num_steps": 2, "max_val_samples": 8, "val_period": 2, "max_rollout_turns": 2},
    "policy": {"model_name": "sees", "new_model": None, "max_total_sequence_length": 256},
    "data": {"dataset_name": "shapes", "task_params": {"size": 32}, "num_train": 64, "num_validation": 16},
    "env": {"shows": {"class": "pictures.Shows"}},
    "checkpointing": {"enabled": False},
    "logger": {"samples": "off"},
    "cluster": {"trainers": 1, "rollouts": 1},
}
SFT: dict[str, Any] = {
    "algorithm": "sft",
    "sft": {"max_num_steps": 2, "val_period": 2, "val_batches": 1, "val_global_batch_size": 8},
    "data": {**SHAPES["data"], "solution_template": "{answer}"},
    "cluster": {"trainers": 2},
}
SHOWS = '''
from PIL import Image
from tandem.rollout.environments import Score, Turn

class Shows:
    """A first answer is answered by a picture that the coordinator never gets."""

    def step(self, problem, conversation):
        if len(conversation) > 1:
            return Score(reward=float(len(conversation[-1]["content"])), correct=True)
        picture = Image.new("RGB", (40, 24), (8 * len(conversation[0]["content"]) % 256, 0, 99))
        return Turn([{"role": "user", "content": [{"type": "image", "image": picture}]}], reward=0.5)
'''
KINDS = {"trainers": "trainer", "rollouts": "rollout"}


def digests_in(run: Path) -> set[str]:
    """Return the digests of the images in a run's folder, each of which is whole."""
    images = ImageFolder(run / "images")
    found = {path.name for path in images.folder.glob("*/*")}
    assert all(images.get(digest) for digest in found)
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_processes_without_the_runs_folder_fetch_images(algorithm: str, tmp_path: Path) -> None:
    """Those of data sets come from the coordinator, and those that an environment shows from its rollout."""
    with in_folder(tmp_path):
        write_vision_model("qwen2_5_vl", Path("sees"))
        Path("pictures.py").write_text(SHOWS)
        config = SHAPES if algorithm == "grpo" else {**merged(SHAPES, SFT), "cluster": SFT["cluster"]}
        config = {name: value for name, value in config.items() if algorithm in (name, "grpo") or name != "grpo"}
        ended = coordinator("up", write_config(config), "logger.log_dir=shared")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        launch = {"cluster": {"launch": {"refit": algorithm == "grpo"}}}
        numbers = {kind: config["cluster"][kind] for kind in KINDS if kind in config["cluster"]}
        with ExitStack() as stack:
            run = stack.enter_context(Command("coordinator", "up", write_config(merged(config, launch))))
            address = joins(run.wait_for(r"listens on (tcp://\S+)")[1], tmp_path / "run")
            fars = [tmp_path / f"{kind}-{place}" for kind, number in numbers.items() for place in range(number)]
            for far in fars:  # each has a folder of its own, in which "run" is not the coordinator's
                far.mkdir()
                (far / "sees").symlink_to(tmp_path / "sees")
                kind = KINDS[far.name.partition("-")[0]]
                started = Command(*command((shutil.which("env") or "env", "-C", str(far)), kind), *address)
                stack.enter_context(started)
            assert run.wait() == 0, run.output()
        for ours, theirs in zip(steps_of("run"), steps_of("shared"), strict=True):
            assert_same_metrics(ours.metrics, theirs.metrics, same_batches=True, step=ours.step)
        drawn = digests_in(Path("run"))
        for far in fars:
            held, own = digests_in(far / "run"), digests_in(tmp_path / "rollouts-0" / "run") - drawn
            assert held & drawn, f"{far.name} has fetched none"
            assert held <= drawn | own
            # What the environment showed is nowhere but at the rollout and, through it, at the trainer.
            assert bool(held & own) is (algorithm == "grpo")
