"""Which checkpoint a run goes on from, what is refused before anything starts, and what is offered in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from run_harness import WEIGHTS, Run, make_config

from tandem.common.errors import CheckpointError, DamagedCheckpoint, ServiceError
from tandem.config import config_to_json
from tandem.coordinator.preparing.resuming import StartingPoint, refuse_other_weights
from tandem.coordinator.scheduler.events import FinishRun
from tandem.observe.run_folder.journal import RefitRecord
from tandem.samples import manifest
from tests.harness.trainers.damage import flip_bit, flip_in_tensor, replace


def test_a_run_goes_on_from_its_newest_checkpoint() -> None:
    run = Run()
    assert run.start() == StartingPoint(first_step=7, resume_from=str((run.root / "step_6").absolute()))
    assert run.said == []


def test_from_goes_on_from_an_older_one_and_keeps_later_ones_out_of_the_way() -> None:
    run = Run()
    assert run.start(2).first_step == 3
    assert run.journal.last_step() == 2
    assert [step.step for step in run.journal.superseded_steps()] == [3, 4, 5, 6]
    assert sorted(path.name for path in run.root.iterdir()) == [
        "latest",
        "step_2",
        "superseded_step_4.1",
        "superseded_step_6.1",
    ]
    assert (run.root / "latest").resolve().name == "step_2"
    assert run.start().first_step == 3, "and the next resume knows no others"
    assert len([line for line in run.said if "is kept as" in line]) == 2


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        (range(2, 7, 2), "--from 3: that step has no checkpoint; these have: 2, 4, 6"),
        (range(0), "--from 3: that step has no checkpoint; none has"),
    ],
)
def test_a_step_without_a_checkpoint_lists_those_that_have_one(steps: range, complaint: str) -> None:
    run = Run(steps=steps)
    with pytest.raises(CheckpointError) as raised:
        run.start(3)
    assert str(raised.value) == complaint
    assert run.journal.last_step() == 6, "nothing was given up"


def test_a_checkpoint_without_a_manifest_is_believed_with_a_notice() -> None:
    run = Run()
    (run.root / "step_6" / "manifest.json").unlink()
    assert run.start().first_step == 7
    (line,) = run.said
    assert "step_6 has no manifest.json: an earlier release wrote it" in line


def another_run(folder: Path) -> None:
    replace(folder, Run("other").root / folder.name)


DAMAGES = {
    "a step of another run": (another_run, "step_6 is damaged: what lies there is of the run "),
    "another step": (
        lambda folder: replace(folder, folder.with_name("step_2")),
        "step_6 is damaged: what lies there is of step 2, not 6",
    ),
    "the policy of another step": (
        lambda folder: replace(folder / "policy", folder.with_name("step_2") / "policy"),
        "policy/config.json is damaged: its bytes are not what was written",
    ),
    "a file is missing": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "model.safetensors is damaged: it is missing",
    ),
    "cut short": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8]),
        "model.safetensors is damaged: it has 48",
    ),
    "another rope_theta": (
        lambda folder: (folder / "policy" / "config.json").write_text('{"rope_theta": 7}'),
        "policy/config.json is damaged: its bytes are not what was written",
    ),
    "a header": (
        lambda folder: flip_bit(folder / WEIGHTS, 30),
        "model.safetensors is damaged: its header is not what was written",
    ),
    "an absurd header": (
        lambda folder: flip_bit(folder / WEIGHTS, 6),
        "model.safetensors is damaged: it cannot be read: its header would have",
    ),
    "one file more": (
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "policy" / "more.safetensors"),
        "policy is damaged: more.safetensors is not a file of this checkpoint",
    ),
    "the manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"step": 6'),
        "step_6/manifest.json is damaged: ",
    ),
    "training.json": (
        lambda folder: flip_bit(folder / "training.json", 12),
        "training.json is damaged: its bytes are not what was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_can_be_seen_without_reading_tensors_is_refused_before_anything_starts(damage: str) -> None:
    run = Run()
    inflict, complaint = DAMAGES[damage]
    inflict(run.root / "step_6")
    error = run.refusal()
    assert complaint in str(error), error
    assert error.whole_step == 4
    assert run.journal.last_step() == 6


def test_only_a_checkpoint_that_was_read_whole_is_offered() -> None:
    run = Run()
    (run.root / "step_6" / WEIGHTS).unlink()
    tensor = flip_in_tensor(run.root / "step_4" / WEIGHTS, "second")
    assert run.refusal().whole_step == 2
    assert any(f"step_4/{WEIGHTS} is damaged: {tensor} is not what was written" in line for line in run.said)
    flip_in_tensor(run.root / "step_2" / WEIGHTS)
    assert run.refusal().whole_step is None


def test_from_reads_all_before_it_gives_anything_up() -> None:
    run = Run()
    flip_in_tensor(run.root / "step_4" / WEIGHTS)
    assert run.refusal(4).whole_step == 6
    assert run.journal.last_step() == 6
    assert (run.root / "step_6").exists()


def test_another_configuration_is_named() -> None:
    run = Run()
    path = run.root / "step_6" / "manifest.json"
    found = manifest.read(path.parent)
    assert found is not None
    other = config_to_json(make_config(seed=2)).decode()
    record = msgspec.structs.replace(run.checkpoints.read_record(6), config_json=other)
    (path.parent / "training.json").write_bytes(msgspec.json.encode(record))
    files = {**found.files, "training.json": manifest.describe(path.parent / "training.json")}
    changed = msgspec.structs.replace(found, files=files, configuration="another")
    path.write_bytes(msgspec.json.encode(changed))
    assert "was written with another grpo.seed" in str(run.refusal())


def test_what_a_trainer_finds_damaged_is_told_from_other_failures() -> None:
    run = Run()
    start = run.start()
    path = f"{start.resume_from}/{WEIGHTS}"
    for what, is_damage in [
        (f"rank 1 {path} is damaged: second is not what was written", True),
        (f"{path} is damaged: second is not what was written", True),
        (f"cannot read {path}: No space left on device", False),
        ("elsewhere/policy/model.safetensors is damaged: second is not what was written", False),
    ]:
        finish = FinishRun(outcome="failed", error=ServiceError("trainer-1", "building the trainer", what))
        found = run.resuming().damage_in(finish, start)
        assert (found is not None) == is_damage, what
        if found is not None:
            assert str(found) == f"{path} is damaged: second is not what was written"
    assert run.resuming().damage_in(FinishRun(outcome="finished"), start) is None


def test_a_run_that_starts_over_is_held_against_no_earlier_weights() -> None:
    run = Run(steps=range(0))
    run.journal.record_refit(refit(version=0))
    assert run.start() == StartingPoint(first_step=1, resume_from="")
    assert run.journal.refits() == []


def refit(version: int) -> RefitRecord:
    return RefitRecord(
        version=version,
        engines=("rollout-0",),
        num_bytes={},
        seconds={},
        predicted_s=0.0,
        bound_s=0.0,
        digest=5,
        quarantined={},
        verify="full",
    )


@pytest.mark.parametrize(
    ("digest", "verify", "is_refused"),
    [(5, "full", False), (6, "full", True), (6, "sampled", False), (0, "full", False)],
)
def test_weights_that_are_not_those_of_the_journal_are_refused(digest: int, verify: str, is_refused: bool) -> None:
    run = Run()
    run.journal.record_refit(refit(version=6))
    given = run.journal.refits()[-1], run.checkpoints, digest, verify
    if not is_refused:
        refuse_other_weights(*given)
        return
    with pytest.raises(DamagedCheckpoint, match=r"step_6 is damaged: its weights have the digest 0{15}6; those of"):
        refuse_other_weights(*given)
