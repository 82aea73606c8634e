"""Whole runs of a vision model, through the console commands: GRPO and SFT over pictures of shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tandem.observe.run_folder.journal import read_journal
from tandem.samples.images.store import ImageFolder
from tandem.samples.markers import marked_in, marker
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.by_hand import assert_same_results
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import Command, coordinator, deterministic, process_of, steps_of, write_config
from tests.harness.runs.shapes import SHAPES, write_shapes

TWO_OF_EACH = ("cluster.trainers=2", "cluster.rollouts=2")
LONGER = (*TWO_OF_EACH, "grpo.max_num_steps=20", "checkpointing.save_period=10")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four steps of two trainers and two engines, which tests only read."""
    return run_in(tmp_path_factory.mktemp("sees"), *TWO_OF_EACH)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of such a run of so many steps that others of that length do not end before they are hit."""
    return run_in(tmp_path_factory.mktemp("longer"), *LONGER)


def run_in(folder: Path, *settings: str) -> Path:
    """Run that in a folder; return the folder of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = coordinator("up", write_shapes(), *settings)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "run"


def test_a_model_that_sees_is_trained_on_what_its_engine_saw(whole: Path) -> None:
    steps = steps_of(whole)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        # The engine's own log-probabilities are the trainer's, pictures and all.
        assert step.metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert step.metrics["grad_norm"] > 0.0
    with read_journal(whole) as journal:
        refits = list(journal.refits())
    assert {refit.version for refit in refits} >= {1, 2, 3, 4}
    assert all(refit.verify == "full" and refit.digest for refit in refits)


def test_samples_refer_to_the_pictures_in_the_runs_folder(whole: Path) -> None:
    images = ImageFolder(whole / "images")
    samples = [sample for step in (1, 2, 3, 4) for sample in read_step(whole / "samples", step)]
    assert len(samples) == 4 * 16
    for sample in samples:
        (marked,) = marked_in(sample.question)
        assert sample.arrays.num_images_S.tolist() == [1]
        assert sample.arrays.image_digests_IX.tobytes().hex() == marked.digest
        assert sample.arrays.image_grids_IX.tolist() == [[1, 8, 8]]
        assert images.get(marked.digest).startswith(b"\x89PNG")
    assert len({sample.question for sample in samples}) > 8


def test_samples_as_text_say_where_pictures_stand(whole: Path) -> None:
    sample = read_step(whole / "samples", 4)[0]
    (marked,) = marked_in(sample.prompt)
    assert [marked] == marked_in(sample.question)
    assert f"<|vision_start|>{marker(*marked)}<|vision_end|>" in sample.prompt
    for more in ((), ("--tokens",)):
        shown = coordinator("samples", str(whole), "--step", "4", "--group", str(sample.scored.group), *more)
        assert shown.returncode == 0, shown.stderr
        assert f"<|vision_start|>[image 32×32 {marked.digest[:6]}]<|vision_end|>" in shown.stdout
        assert "image_pad" not in shown.stdout


def test_checkpoints_are_evaluated_on_pictures(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    sampled = ("eval.num_tests_per_prompt=2", "eval.save_path=scores")
    ended = coordinator("eval", "config.yaml", *sampled, "--model", "sees", "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    scores = json.loads(Path("scores/results.json").read_text())
    assert len(scores["models"]) == 2
    tables = sorted(Path("scores").glob("*.parquet"))
    assert len(tables) == 2
    for table in tables:
        for row in pq.read_table(table).to_pylist():
            (marked,) = marked_in(row["prompt"])
            assert "image_pad" not in row["prompt"]
            assert ImageFolder(next(Path("scores/runs").iterdir()) / "images").has(marked.digest)


def test_kill_9_of_a_trainer_and_of_an_engine_changes_nothing_but_the_time_it_takes(longer: Path) -> None:
    for score in (17, 73):  # what the killed engine had is scored again, and there are validations
        hold(score)
    with Command("coordinator", "up", write_shapes(), *LONGER) as run:
        await_hold(run, "step 1/20")
        process_of(run, "rollout").kill()
        go_on()
        await_hold(run, "step 3/20")
        process_of(run, "trainer", 1).kill()
        go_on()
        assert run.wait() == 0, run.output()
    assert_same_results("run", longer)


def test_a_resumed_run_equals_an_uninterrupted_one(longer: Path) -> None:
    """It is killed between two checkpoints."""
    config = write_shapes()
    hold(at=217)
    with Command("coordinator", "up", config, *LONGER) as run:
        await_hold(run, "step 11/20")
        run.process.kill()
        run.wait()
    go_on()
    ended = coordinator("up", config, "--resume", *LONGER)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "had been generated, and are not generated again" in ended.stdout
    assert_same_results("run", longer)


def test_a_replay_learns_from_the_same_pictures_to_the_bit(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are of one size and questions are few, so that images tell prompts apart."""
    monkeypatch.chdir(whole.parent)
    replayed = coordinator("replay", "run", "--to", "4", "logger.log_dir=again")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "weights are equal to the bit to those of step 4 of run" in replayed.stdout
    for mine, theirs in zip(steps_of(Path("again")), steps_of(whole), strict=True):
        metrics = deterministic(mine.metrics)
        assert metrics == {name: theirs.metrics[name] for name in metrics}
    assert not Path("again/images").exists()


def test_a_text_model_gets_no_pictures() -> None:
    ended = coordinator("check", write_config({"data": SHAPES["data"], "env": SHAPES["env"]}))
    assert ended.returncode != 0
    assert "data.dataset_name: shapes are pictures, but policy.model_name is a text model" in ended.stderr
