"""Processes that are alive and cannot do their work, or lie about it: each is lost like one that died, and replaced."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.running import (
    HOLDS,
    Command,
    coordinator,
    merged,
    process_of,
    titled,
    write_config,
)

LIAR = (
    HOLDS
    + """
from tandem.common.errors import SamplesError
from tandem.samples.sample_store import SampleStore
from tandem.rollout.environments import Score

def lie():
    '''Return what the next process is to lie about; each lie is told by one process.'''
    for path in sorted(Path(os.environ["LIES"]).glob("[0-9]*")):
        try:
            return path.rename(path.with_name(f"told-{path.name}")).read_text()
        except FileNotFoundError:
            continue
    return ""

class Liar:
    '''Scores digits; the process in which it is lies to trainers about the samples that it has.'''

    runs_in = "threads"

    def __init__(self):
        self.lie = lie()
        honest = SampleStore._find_samples

        def found(store, request):
            arrays = honest(store, request)
            made, lie = arrays.loss_mask_T, self.lie
            if lie == "gone":
                raise SamplesError("it does not have them")
            if lie == "tokens":
                arrays.token_ids_T[made] = 10**6
            elif lie == "logprobs":
                arrays.generation_logprobs_T[made] = 1.0
            elif lie == "prompt":
                arrays.token_ids_T[0] ^= 1
            return arrays

        if self.lie:
            SampleStore._find_samples = found

    def score(self, problem, response):
        wait_while_held()
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
)
RUN: dict[str, Any] = {
    "grpo": {"max_num_steps": 16, "val_period": 0},
    "checkpointing": {"metric_name": "reward", "save_period": 2},
    "env": {"liar": {"class": "liar.Liar", "timeout_s": 300.0}},
    "cluster": {"rollouts": 2, "max_replacements": 9},
}
LIES = {
    "tokens": r"it sent what is not asked for: token_ids_T: .*",
    "logprobs": r"it sent what is not asked for: generation_logprobs_T: .*",
    "prompt": r"the prompt of a sample is not that of its group",
    "gone": r"it does not have them",
}


@pytest.fixture(autouse=True)
def lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("liar.py").write_text(LIAR)
    Path("lies").mkdir()
    monkeypatch.setenv("LIES", str(tmp_path / "lies"))
    return tmp_path / "lies"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in which all is well."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "liar.py").write_text(LIAR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIES", str(folder))
        return undisturbed_run(folder, RUN)


def test_a_rollout_that_lies_about_its_samples_is_shut_out_by_name_and_replaced(lies: Path, undisturbed: Path) -> None:
    """Each process that takes the place of one tells another lie, until there is none."""
    for number, lie in enumerate(LIES):
        (lies / str(number)).write_text(lie)
    ended = coordinator("up", write_config(RUN))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for why in LIES.values():
        lost = rf"rollout-[01] is lost: its samples could not be used 3 times in a row: {why}"
        assert len(re.findall(lost, ended.stdout)) == 1, ended.stdout
    assert ended.stdout.count("; another is launched in its place") == len(LIES)
    assert not [*lies.glob("[0-9]*")]
    assert_same_results("run", undisturbed)


def test_a_rollout_that_lies_where_none_is_replaced_is_named(lies: Path) -> None:
    (lies / "0").write_text("gone")
    ended = coordinator("up", write_config(merged(RUN, {"cluster": {"max_replacements": 0}})))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    why = "its samples could not be used 3 times in a row: it does not have them"
    assert re.fullmatch(rf"error: rollout-[01] failed while [a-z]+: {why}", line), line


@pytest.mark.parametrize("kind", ["rollout", "trainer"])
def test_a_process_that_has_no_descriptors_left_is_replaced_if_it_needs_one(kind: str, undisturbed: Path) -> None:
    """A trainer does, for its checkpoints. A rollout whose connections are all there may end the run without."""
    hold(at=17)
    with Command("coordinator", "up", write_config(RUN)) as run:
        await_hold(run, "step 1/16")
        Path("holds").rename("had")  # or scores would be counted on, in a file
        victim = process_of(run, kind)
        # A few less than it has, in case it closes some; with none at all libzmq can wait for nothing, and aborts.
        victim.rlimit(psutil.RLIMIT_NOFILE, (victim.num_fds() - 8, victim.rlimit(psutil.RLIMIT_NOFILE)[1]))
        go_on()
        assert run.wait() == 0, run.output()
        said = run.output()
    is_replaced = re.search(rf"{kind}-0 is lost: .*Too many open files", said)  # libzmq may abort, and says the same
    assert is_replaced or (kind == "rollout" and " is lost" not in said), said
    assert_same_results("run", undisturbed)


def test_a_supervised_coordinator_that_fails_by_itself_is_followed_by_another(undisturbed: Path) -> None:
    hold(at=17)
    with Command("coordinator", "up", write_config(RUN), "--supervise") as run:
        await_hold(run, "step 1/16")
        (coordinator_,) = titled(run.children(), f"{sys.executable} -m tandem.coordinator.cli")
        coordinator_.rlimit(psutil.RLIMIT_NOFILE, (coordinator_.num_fds() - 8, 4096))
        go_on()
        assert run.wait() == 0, run.output()
        said = run.output()
    assert re.search(
        r"the coordinator (has failed with exit code 1|was killed by SIGABRT); it is started again", said
    ), said
    assert_same_results("run", undisturbed)


FULL = """
import errno
import os
from pathlib import Path
from tandem.trainer.files import checkpoints
from tandem.trainer.losses import Report

real = checkpoints.sync

def sync(paths):
    '''Sync for real, unless the disk is full just now, or has failed: once for each file that says so.'''
    for mark in sorted(Path(os.environ["LIES"]).glob("disk-*")):
        try:
            number = int(mark.read_text())
            mark.unlink()
        except FileNotFoundError:
            continue
        raise OSError(number, os.strerror(number))
    return real(paths)

checkpoints.sync = sync

class Own:
    def __init__(self, settings, counts, device):
        self.report = Report(("own",), counts.tokens, device)

    def __call__(self, batch, scores):
        self.report.add(batch.loss_mask_BT, scores.logprobs)
        return -(scores.logprobs * batch.columns["advantages"]).sum()
"""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_disk_that_has_no_room_for_one_checkpoint_is_waited_for(
    number: int, lies: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = merged(RUN, {"loss_fn": {"class": "full.Own"}, "grpo": {"max_num_steps": 8}, "cluster": {"rollouts": 1}})
    beside = tmp_path_factory.mktemp("beside")
    for folder in (Path(), beside):
        (folder / "full.py").write_text(FULL)
        (folder / "liar.py").write_text(LIAR)
    undisturbed = undisturbed_run(beside, own)
    hold(at=33)
    with Command("coordinator", "up", write_config(own), "--supervise") as run:
        await_hold(run, "step 2/8")
        (lies / "disk-1").write_text(str(number))
        go_on()
        assert run.wait() == 0, run.output()
        said = run.output()
    assert not (lies / "disk-1").exists()
    why = re.escape(os.strerror(number))
    assert re.search(rf"trainer-0 is lost: it failed while writing step \d+: .*{why}", said), said
    assert "Traceback" not in said
    assert_same_results("run", undisturbed)


FRAGILE = (
    HOLDS
    + """
import signal
from tandem.rollout.environments import Score

class Fragile:
    '''Scores digits; while there are files that say so, the system kills who makes it.'''

    def __init__(self):
        for path in Path(os.environ["LIES"]).glob("killed-*"):
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def score(self, problem, response):
        wait_while_held()
        share = sum(character.isdigit() for character in response) / (len(response) + 1)
        return Score(reward=share, correct=share > 0.5)
"""
)


def test_an_engine_whose_helpers_are_killed_again_and_again_is_replaced(lies: Path, undisturbed: Path) -> None:
    """The environment, whose failures end the run, is not blamed."""
    Path("fragile.py").write_text(FRAGILE)
    fragile = {"env": {"liar": {"class": "fragile.Fragile", "num_workers": 1, "timeout_s": 300.0}}}
    hold(at=17)
    with Command("coordinator", "up", write_config(merged(RUN, fragile))) as run:
        await_hold(run, "step 1/16")
        for number in range(3):
            (lies / f"killed-{number}").touch()
        titled(run.children(), "rollout: scores with liar")[0].kill()
        go_on()
        assert run.wait() == 0, run.output()
        said = run.output()
    lost = (
        r"rollout-[01] is lost: it failed while [a-z]+( step \d+)?: env\.liar: making the environment failed: .*SIGKILL"
    )
    assert len(re.findall(lost, said)) == 1, said
    assert not [*lies.iterdir()]
    assert_same_results("run", undisturbed)
