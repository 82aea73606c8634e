"""What clients have done to their models is done again to the bit; a wrong record is refused in a line."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import msgspec

from tandem.observe.run_folder.journal import read_journal
from tandem.serving.tinker import call_files
from tandem.serving.tinker.call_files import Done, GradientDone, RecordEnd, SaveDone
from tests.harness.runs.running import coordinator
from tests.harness.tinker.server import served
from tests.harness.trainers.damage import flip_bit


def test_the_calls_of_one_trainer_are_done_again_to_the_bit() -> None:
    with served({"cluster": {"trainers": 1}}) as server:
        found = server.client("recorded")
        server.command.signal(signal.SIGINT)
        assert server.command.wait() == 0
    assert "the loss is" in found["error"]
    assert not any("twice" in path.name for path in Path("run_tinker").glob("*/*")), (
        "the replay needs no state of before"
    )
    done = coordinator("replay", "run")
    assert done.returncode == 0, done.stderr
    assert (
        f"{found['model']}: 10 gradients, 10 steps and 3 saved states: equal to the bit to those of run" in done.stdout
    )
    assert not Path("run-replay", "states").exists()
    refused = coordinator("replay", "run-replay")
    assert "run-replay is a replay itself, of run" in refused.stderr

    (path,) = Path("run", "calls").iterdir()
    calls = calls_of(path)
    _rewrites_are_found(path, calls)
    _wrong_files_are_refused(path, calls)


def calls_of(path: Path) -> list[Done | RecordEnd]:
    """Return the calls of a file."""
    _, calls = call_files.read(path, run_id())
    return [*calls]


def run_id() -> str:
    """Return the id of the run."""
    with read_journal(Path("run")) as journal:
        return journal.run_id


def write(path: Path, calls: list[Done | RecordEnd]) -> None:
    """Write a file of calls anew."""
    head, _ = call_files.read(path, run_id())
    path.write_bytes(b"".join(map(call_files.encode, (head, *calls))))


def _rewrites_are_found(path: Path, calls: list[Done | RecordEnd]) -> None:
    """Change the learning rate of a step, as if something else had been trained: everything after it differs."""
    steps = [place for place, each in enumerate(calls) if isinstance(each, call_files.StepDone)]
    changed = [*calls]
    step = calls[steps[2]]
    assert isinstance(step, call_files.StepDone)
    other = msgspec.structs.replace(step.step, learning_rate=step.step.learning_rate * (1 + 1e-6))
    changed[steps[2]] = msgspec.structs.replace(step, step=other)
    until = next(place for place, each in enumerate(calls) if isinstance(each, SaveDone))
    write(path, changed[: until + 1])
    done = coordinator("replay", "run")
    assert done.returncode == 1
    assert "though nothing was changed; the first that differs is call 7, a gradient" in done.stdout, done.stdout
    assert "7 of 12 are equal" in done.stdout, "the gradient that failed, too"
    done = coordinator("replay", "run", "cluster.threads_per_process=2")
    assert done.returncode == 0
    assert "as cluster.threads_per_process changed" in done.stdout


def _wrong_files_are_refused(path: Path, calls: list[Done | RecordEnd]) -> None:
    write(path, calls)
    states = [each for each in calls if isinstance(each, SaveDone)]
    first = next(place for place, each in enumerate(calls) if isinstance(each, SaveDone))
    forgotten = [
        msgspec.structs.replace(each, index=place) for place, each in enumerate(calls[:first] + calls[first + 1 :])
    ]
    write(path, forgotten)
    done = coordinator("replay", "run")
    assert done.returncode == 1
    assert f"which loads a state: {states[0].folder} is not there any more" in _line(done.stderr)
    gradient = next(place for place, each in enumerate(calls) if isinstance(each, GradientDone))
    short = msgspec.structs.replace(calls[gradient], token_ids=b"")
    write(path, [*calls[:gradient], short])
    assert f"is damaged: call {gradient}: there are 0 numbers for" in _line(coordinator("replay", "run").stderr)
    write(path, calls)
    flip_bit(path, 300)
    assert "is damaged: frame" in _line(coordinator("replay", "run").stderr)
    write(path, calls)
    for setting, why in (
        ("policy.model_name=other", "run's own model"),
        ("grpo.normalize_rewards=false", "changes nothing"),
    ):
        assert why in _line(coordinator("replay", "run", setting).stderr)
    for option in (["--from", "1"], ["--to", "1"], ["--resume"]):
        assert "calls are replayed as a whole" in _line(coordinator("replay", "run", *option).stderr)
    write_of_another = path.with_name("another.calls")
    write_of_another.write_bytes(call_files.encode(call_files.CallHead(run_id="another", model="a", began_at=0.0)))
    path.unlink()
    assert "is of the run another" in _line(coordinator("replay", "run").stderr)
    shutil.rmtree(path.parent)
    assert "has no record of calls" in _line(coordinator("replay", "run").stderr)


def _line(errors: str) -> str:
    """Return the one line of an error."""
    (line,) = errors.strip().splitlines()
    return line
