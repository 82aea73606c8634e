"""One real loss of each kind of process and in each phase; many more are in `tests/integration/survival`."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import leaks
from tests.harness.processes.killing_rollout import kill_file, processes_at
from tests.harness.runs.by_hand import assert_same_results, refits_of, undisturbed_run
from tests.harness.runs.harried import LAUNCHED, RUN, coordinator_of, harried
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.record_harness import assert_recorded, record_of
from tests.harness.runs.running import (
    Command,
    all_gone,
    coordinator,
    merged,
    processes_of,
    steps_of,
    write_config,
)

LONG: dict[str, Any] = {"grpo": {"max_num_steps": 1000, "val_period": 500}, "checkpointing": {"save_period": 1000}}
SILENT: dict[str, Any] = {"heartbeat_timeout_s": 5.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nothing happens to."""
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), merged(RUN, LAUNCHED))


def test_a_refit_service_that_dies_or_hangs_is_replaced_and_nobody_else(undisturbed: Path) -> None:
    """The second loss of two: it is stopped, and is not heard any more when it would go on."""
    config = write_config(RUN)
    kill_file("verify", 2).write_text("refit 0 SIGKILL")
    kill_file("give", 5).write_text("refit 0 SIGSTOP")
    with harried(config) as cluster:
        cluster.run.wait_for("step 1/8")
        trainers = {process.pid for process in processes_at(cluster.address, "trainer")}
        assert len(trainers) == 2
        cluster.run.wait_for(r"refit-0 is lost: no heartbeat for \d+ s.*; another is launched in its place")
        assert {process.pid for process in processes_at(cluster.address, "trainer")} == trainers
        said = cluster.end()
    assert "refit-0 is lost: killed by SIGKILL" in said
    assert "trainers are started again" not in said
    assert_same_results("run", undisturbed)
    assert {refit.version for refit in refits_of()} == set(range(9))


def test_trainers_may_die_at_any_moment(undisturbed: Path) -> None:
    """While the model is that of the beginning, while they fetch, train, are read and digest: all comes out equal."""
    before, config = leaks.segments(), write_config(RUN)
    kill_file("generate", 2).write_text("trainer 0 SIGKILL")
    kill_file("give", 5).write_text("trainer 1 SIGKILL")
    kill_file("refit", 6).write_text("trainer 0 SIGKILL")
    kill_file("verify", 7).write_text("trainer 1 SIGKILL")
    with harried(config) as cluster:
        said = cluster.end()
    assert len(re.findall(r"trainer-\d is lost: killed by SIGKILL.*all trainers are started again", said)) == 4, said
    assert re.search(r"the run goes on at step 1 from the model that the run began with", said)
    assert len(re.findall(r"the run goes on at step 4 from the checkpoint \S+step_3$", said, re.MULTILINE)) == 2
    assert len(re.findall(r"groups of steps? .* had been generated, and are not generated again", said)) == 4
    assert_same_results("run", undisturbed)
    assert_recorded("run", config)
    for step, rows in record_of(undisturbed).items():
        ours = {(row.scored.group, row.scored.sample): row.arrays.token_ids_T.tolist() for row in record_of()[step]}
        assert ours == {(row.scored.group, row.scored.sample): row.arrays.token_ids_T.tolist() for row in rows}
    assert "tokens_per_s" not in steps_of()[3].metrics, "step 4 was trained again on what had been generated"
    assert leaks.segments_left(before) == set()


def test_launched_engines_outlive_coordinators_that_are_killed_or_hang(undisturbed: Path) -> None:
    """The first is killed, and an engine with it; the second is stopped. Who lives is the same process to the end."""
    before, config = leaks.segments(), write_config(merged(RUN, merged(LAUNCHED, {"cluster": SILENT})))
    for score in (33, 121):  # of eight steps and two validations; what is lost with an engine is scored again
        hold(score)
    with Command("coordinator", "up", config, "--supervise") as run:
        await_hold(run, "step 2/8")
        (refit,), (kept, killed) = processes_of(run, "refit"), processes_of(run, "rollout")
        trainers = {process.pid for process in processes_of(run, "trainer")}
        coordinator_of(run).kill()
        killed.kill()
        go_on()
        await_hold(run, r"the coordinator was killed by SIGKILL; it is started again(.|\n)*step 4/8")
        assert trainers.isdisjoint({process.pid for process in processes_of(run, "trainer")})
        stopped = coordinator_of(run)
        stopped.suspend()
        go_on()
        run.wait_for(r"the coordinator was killed: no sign of life for \d+ s; it is started again")
        run.wait_for(r"coordinator is lost: no sign of life for \d+ s; another goes on with the run, and expects")
        assert not stopped.is_running(), "it cannot come back"
        everybody = run.children()
        assert {refit.pid, kept.pid} <= {process.pid for process in everybody}
        assert run.wait() == 0, run.output()
        assert all_gone(everybody, 20.0) == []
    texts = [log.read_text() for log in Path("run/logs").glob("rollout-*.log")]
    counts = sorted((text.count("joined"), text.count("taken up by another coordinator")) for text in texts)
    assert counts == [(1, 2), (2, 1)]
    assert_same_results("run", undisturbed)
    assert_recorded("run", config)
    assert "coordinator 2 times" in coordinator("diagnose", "run").stdout
    assert leaks.segments_left(before) == set()


def test_ctrl_c_saves_and_the_run_goes_on_from_there() -> None:
    before = leaks.segments()
    config = write_config(LONG)
    with Command("coordinator", "up", config) as run:
        run.wait_for("step 3/1000")
        children = run.children()
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
        assert all_gone(children, 30.0) == []
    done = steps_of()[-1].step
    assert Path(f"run/checkpoints/step_{done}").exists()
    assert leaks.segments_left(before) == set()
    resumed = coordinator("up", config, "--resume", f"grpo.max_num_steps={done + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert steps_of()[-1].step == done + 1


def test_kill_9_of_the_coordinator_leaves_nothing() -> None:
    before = leaks.segments()
    with Command("coordinator", "up", write_config(LONG)) as run:
        run.wait_for("step 2/1000")
        children = run.children()
        assert len(children) > 4  # three services, what they were forked from, and what scores
        run.signal(signal.SIGKILL)
        run.wait()
        assert all_gone(children, 30.0) == []
    assert leaks.segments_left(before) == set()
