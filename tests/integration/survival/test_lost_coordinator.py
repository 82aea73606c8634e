"""A coordinator that is lost: another one goes on, and takes up the services where they wait for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tandem.common import kept_inputs
from tandem.observe.run_folder.journal import read_journal
from tests.harness import leaks
from tests.harness.processes import killing_rollout
from tests.harness.processes.killing_rollout import kill_file
from tests.harness.runs import consoles
from tests.harness.runs.by_hand import assert_same_results, in_folder, last_weights, undisturbed_run
from tests.harness.runs.harms import PROMPT
from tests.harness.runs.harried import coordinator_of
from tests.harness.runs.held_runs import await_hold, go_on, hold
from tests.harness.runs.record_harness import TWO, assert_recorded
from tests.harness.runs.running import (
    HOLDS,
    SUMS,
    Command,
    all_gone,
    coordinator,
    joins,
    merged,
    process_of,
    steps_of,
    wait_until,
    write_config,
)

RUN: dict[str, Any] = merged(
    TWO,
    {
        "grpo": {"max_num_steps": 6, "val_period": 3},
        "checkpointing": {"save_period": 3, "metric_name": None, "keep_top_k": None},
        "cluster": {"launch": {"trainers": 1, "refit": True}, "max_replacements": 9},
    },
)
LAUNCHED: dict[str, Any] = {"cluster": {"launch": "all"}}
SILENT: dict[str, Any] = {"heartbeat_timeout_s": 5.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), merged(RUN, LAUNCHED))


@contextlib.contextmanager
def rollouts(address: str) -> Iterator[None]:
    """Start two rollouts by hand; they write to files of their own."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as started:
        patch.setenv("PYTHONPATH", str(Path.cwd()))
        for index in range(2):
            out = started.enter_context(Path(f"rollout-{index}.txt").open("wb"))
            process = consoles.fork_server().start(killing_rollout.__name__, joins(address), out)
            started.callback(process.wait, 20.0)
            started.callback(process.kill)
        yield


def assert_taken_up(times: int) -> None:
    """Wait until both rollouts have left at the end; they were the same processes all along."""

    def said() -> list[str]:
        return [path.read_text() for path in Path().glob("rollout-*.txt")]

    wait_until(lambda: all("leaves: the run finished" in text for text in said()), lambda: f"an end of {said()}")
    assert [text.count("joined") for text in said()] == [1, 1]
    assert [text.count("taken up by another coordinator") for text in said()] == [times, times]


def test_services_started_by_hand_are_taken_up_by_who_resumes_the_run(undisturbed: Path) -> None:
    """It is killed while engines generate, and while the trainer fetches what it trains on; the port is any."""
    before, config = leaks.segments(), write_config(merged(RUN, {"cluster": {"orphan_timeout_s": 200.0}}))
    with contextlib.ExitStack() as stack:

        def begin(*how: str, point: str = "", number: int = 0) -> Command:
            run = stack.enter_context(Command("coordinator", "up", config, *how))
            if point:
                kill_file(point, number).write_text(f"pid {run.process.pid} SIGKILL")
            return run

        runs = [begin(point="generate", number=2)]
        address = runs[0].wait_for(r"listens on (tcp://\S+)")[1]
        stack.enter_context(rollouts(address))
        assert runs[0].wait() == -signal.SIGKILL
        runs.append(begin("--resume", point="give", number=5))
        assert runs[1].wait() == -signal.SIGKILL
        runs.append(begin("--resume"))
        assert runs[2].wait() == 0, runs[2].output()
        assert_taken_up(2)
    for run in runs[1:]:
        assert f"coordinator listens on {address}" in run.output(), "where the first one did"
        lost = "coordinator is lost: the cause is unknown; another goes on with the run, and expects rollout-"
        assert lost in run.output()
    assert_same_results("run", undisturbed)
    assert_recorded("run", config)
    with read_journal(Path("run")) as journal:
        assert sum(text.startswith("coordinator is lost: ") for _, _, text in journal.events()) == 2
    assert not Path("run/keys/admitted.json").exists()
    assert leaks.segments_left(before) == set()


def test_an_engine_that_was_added_is_taken_up_too_and_nobody_waits_for_one_that_is_gone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    longer = merged(merged(RUN, LAUNCHED), {"grpo": {"max_num_steps": 40}, "checkpointing": {"save_period": 20}})
    undisturbed = undisturbed_run(tmp_path_factory.mktemp("longer"), longer)
    config = write_config(merged(longer, {"cluster": SILENT}))
    for score in (17, 97):
        hold(score)
    with Command("coordinator", "up", config, "--supervise") as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("rollout", *joins(address)) as added, Command("rollout", *joins(address)) as lost:
            for name in ("rollout-2", "rollout-3"):
                await_hold(run, f"{name} joins the run")
            process_of(run, "rollout").terminate()
            run.wait_for(r"rollout-[01] was told to leave")
            go_on()
            gone = await_hold(run, r"(rollout-[01]) leaves the run: it was told to")[1]
            coordinator_of(run).kill()
            lost.process.kill()
            go_on()
            run.wait_for("the coordinator was killed by SIGKILL; it is started again")
            assert run.wait() == 0, run.output()
            assert added.wait() == 0, added.output()
        assert "taken up by another coordinator" in added.output()
    assert Path(f"run/logs/{gone}.log").read_text().count(f"{gone} joined") == 1, "it has left for good"
    assert last_weights(Path("run")) == last_weights(undisturbed)


def test_a_launched_engine_that_does_not_come_back_is_replaced_and_nothing_outlives_the_supervisor() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}, "cluster": SILENT})
    with Command("coordinator", "up", config, "--supervise") as run:
        run.wait_for("step 2/1000")
        engine = process_of(run, "rollout")
        engine.suspend()
        coordinator_of(run).kill()
        run.wait_for(r"rollout-0 is lost: it has not come back .*; another is launched(.|\n)*step \d+/1000")
        everybody = run.children()
        assert engine not in everybody
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        assert all_gone([*everybody, engine], 20.0) == []


def test_a_coordinator_that_is_replaced_counts_with_all_others_that_are() -> None:
    config = write_config({"grpo": {"max_num_steps": 1000}, "cluster": {"max_replacements": 1}})
    with Command("coordinator", "up", config, "--supervise") as run:
        run.wait_for("step 2/1000")
        coordinator_of(run).kill()
        run.wait_for(r"is started again(.|\n)*step \d+/1000")
        process_of(run, "rollout").kill()
        assert run.wait() == 1
    assert re.search(r"error: rollout-0 failed .*; processes were replaced 1 times before", run.output())


def test_services_end_when_no_coordinator_comes() -> None:
    launched = {"launch": {"trainers": 1, "refit": True}, "orphan_timeout_s": 3.0}
    config = write_config({"cluster": launched | SILENT, "grpo": {"max_num_steps": 1000}})
    with Command("coordinator", "up", config) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("rollout", *joins(address)) as rollout:
            run.wait_for("step 1/1000")
            services = run.children()
            run.signal(signal.SIGKILL)
            assert rollout.wait() == 70
            assert "waiting for another one, up to 3 s" in rollout.output()
            assert "ending: the coordinator was silent for " in rollout.output()
            assert all_gone(services, 20.0) == []


SCORER = f"""{HOLDS}
from helper import share
from tandem.rollout.environments import Score

class Scorer:
    def score(self, problem, response):
        wait_while_held()
        return Score(reward=share(response), correct=share(response) > 0.5)
"""
HELPER = """
def share(response):
    return sum(character.isdigit() for character in response) / (len(response) + 1)
"""
EDITED: dict[str, Any] = merged(
    merged(RUN, LAUNCHED),
    {
        "grpo": {"max_num_steps": 8},
        "data": {"prompt_file": "prompt.txt"},
        "env": {"scorer": {"class": "scorer.Scorer", "timeout_s": 300.0}},
    },
)


def write_inputs(folder: Path) -> None:
    """Write the environment of the run."""
    (folder / "scorer.py").write_text(SCORER)
    (folder / "helper.py").write_text(HELPER)
    (folder / "prompt.txt").write_text(PROMPT)


@pytest.fixture(scope="module")
def scored_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with that environment, which nothing has happened to."""
    folder = tmp_path_factory.mktemp("scored")
    write_inputs(folder)
    return undisturbed_run(folder, EDITED)


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_supervised_run_goes_on_with_the_files_that_it_began_with(
    change: str, scored_undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine and the coordinator are killed after configuration, data and environment were edited or deleted."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    config = write_config(EDITED)
    hold(at=33)
    with Command("coordinator", "up", config, "--supervise") as run:
        await_hold(run, "step 2/8")
        if change == "edited":
            config.write_text(config.read_text().replace("num_prompts_per_step: ", "num_prompts_per_step: 1"))
            Path("sums.jsonl").write_text('{"input": "another", "output": "1"}\n')
            Path("scorer.py").write_text("raise RuntimeError('half an edit')\n")
            Path("helper.py").write_text("def share(response):\n    return 1.0\n")
            Path("prompt.txt").write_text("9 9 {}")
        else:
            for name in (config.name, "sums.jsonl", "scorer.py", "helper.py", "prompt.txt"):
                Path(name).unlink()
        process_of(run, "rollout").kill()
        run.wait_for("rollout-[01] is lost")
        coordinator_of(run).kill()
        run.wait_for("the coordinator was killed by SIGKILL; it is started again")
        go_on()
        assert run.wait() == 0, run.output()
    assert_same_results("run", scored_undisturbed)


def add_prerequisite(settings: dict[str, Any], num_steps: int) -> Path:
    """Write a run of so many steps on texts, and one that begins with its model; return the latter's path."""
    config = write_config(settings)
    written = yaml.safe_load(config.read_text())
    Path("texts.jsonl").write_text(Path("sums.jsonl").read_text())
    data = {key: value for key, value in written["data"].items() if key not in ("prompt_file", "environment")}
    before: dict[str, Any] = {
        "sft": {"max_num_steps": num_steps, "max_num_epochs": 9, "val_period": 0},
        "logger": {"log_dir": "before"},
        "checkpointing": {"checkpoint_dir": "before/checkpoints", "save_period": 4, "metric_name": None},
        "data": {**data, "train_data_path": "texts.jsonl"},
    }
    names = ("new_model", "model_name", "max_total_sequence_length", "optimizer")
    before["policy"] = {name: written["policy"][name] for name in names}
    before["policy"] |= {"train_global_batch_size": 16, "train_micro_batch_size": 16}
    del written["policy"]["new_model"]
    written["policy"]["model_name"] = f"before/checkpoints/step_{num_steps}/policy"
    written["prerequisite"] = "before.yaml"
    Path("before.yaml").write_text(yaml.safe_dump(before))
    config.write_text(yaml.safe_dump(written))
    return config


def test_a_supervised_run_does_without_the_file_of_the_run_that_made_its_model() -> None:
    config = add_prerequisite(merged(RUN, LAUNCHED), 1)
    hold(at=33)
    with Command("coordinator", "up", config, "--supervise") as run:
        run.wait_for("prerequisite .*: making")
        await_hold(run, r"step 2/6")
        Path("before.yaml").write_text("sft: [")
        config.unlink()
        coordinator_of(run).kill()
        go_on()
        assert run.wait() == 0, run.output()
    assert [step.step for step in steps_of()] == [*range(1, 7)]


@pytest.fixture(scope="module")
def prepared_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a prerequisite, which nothing has happened to."""
    folder = tmp_path_factory.mktemp("prepared")
    with in_folder(folder):
        write_inputs(folder)
        done = coordinator("up", add_prerequisite(EDITED, 12))
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_supervised_run_goes_on_with_its_files_also_from_within_the_prerequisite(
    change: str, prepared_undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that both runs read is edited or deleted in the prerequisite's first steps, and the coordinator killed.

    So is the next one, as soon as the run itself has begun.
    """
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    config = add_prerequisite(EDITED, 12)
    hold()
    with Command("coordinator", "up", config, "--supervise") as run:
        run.wait_for("step 5/12")
        if change == "edited":
            config.write_text(config.read_text().replace("num_prompts_per_step: ", "num_prompts_per_step: 1"))
            Path("before.yaml").write_text(Path("before.yaml").read_text().replace("size: 16", "size: 8"))
            for name in ("sums.jsonl", "texts.jsonl"):
                Path(name).write_text('{"input": "another", "output": "1"}\n')
            Path("scorer.py").write_text("raise RuntimeError('half an edit')\n")
            Path("helper.py").write_text("def share(response):\n    return 1.0\n")
            Path("prompt.txt").write_text("9 9 {}")
        else:
            inputs = ("sums.jsonl", "texts.jsonl", "scorer.py", "helper.py", "prompt.txt")
            for name in (config.name, "before.yaml", *inputs):
                Path(name).unlink()
        coordinator_of(run).kill()
        run.wait_for("the coordinator was killed by SIGKILL; it is started again")
        wait_until(Path("run/inputs/inputs.json").exists, run.output, died=lambda: run.process.poll() is not None)
        coordinator_of(run).kill()
        go_on()
        assert run.wait() == 0, run.output()
    assert_same_results("before", prepared_undisturbed / "before")
    assert_same_results("run", prepared_undisturbed / "run")


def test_a_supervised_restart_that_is_killed_in_its_prerequisite_makes_both_anew() -> None:
    config = add_prerequisite(merged(RUN, LAUNCHED), 2)
    assert coordinator("up", config).returncode == 0
    with read_journal(Path("run")) as journal:
        earlier = journal.run_id
    before = yaml.safe_load(Path("before.yaml").read_text())
    Path("before.yaml").write_text(yaml.safe_dump(merged(before, {"sft": {"seed": 7}})))
    hold()
    with Command("coordinator", "up", config, "--supervise", "--restart") as run:
        run.wait_for("step 1/2")
        coordinator_of(run).kill()
        go_on()
        assert run.wait() == 0, run.output()
    with read_journal(Path("run.1")) as journal:
        assert journal.run_id == earlier, "set aside"
    with read_journal(Path("run")) as journal:
        assert journal.run_id != earlier
    assert [step.step for step in steps_of()] == [*range(1, 7)]


def test_code_that_was_edited_between_two_starts_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    config = write_config(merged(EDITED, {"grpo": {"max_num_steps": 1}}))
    assert coordinator("up", config).returncode == 0
    Path("helper.py").write_text(HELPER.replace("+ 1", "+ 2"))
    again = coordinator("up", config, "--resume", "grpo.max_num_steps=2")
    assert again.returncode == 0, again.stderr
    assert re.search(r"note: custom code has changed since the run was last started: .*helper.py:3", again.stdout)


@pytest.mark.parametrize("damage", ["emptied", "cut off", "overwritten", "deleted"])
def test_a_journal_that_is_damaged_live_is_rebuilt_and_the_run_goes_on_from_its_checkpoint(
    damage: str, scored_undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    hold(at=4 * 16 + 8 + 1)
    with Command("coordinator", "up", write_config(EDITED), "--supervise") as run:
        await_hold(run, "step 4/8")
        wait_until(lambda: Path("run/checkpoints/step_3/manifest.json").exists(), run.output)
        with read_journal(Path("run")) as journal:
            run_id = journal.run_id
        path = Path("run/journal.sqlite")
        size = path.stat().st_size
        if damage == "deleted":
            path.unlink()  # and its writer would not notice
            coordinator_of(run).kill()
        else:
            with path.open("r+b") as file:
                if damage == "overwritten":
                    file.write(b"\xff" * size)
                else:
                    file.truncate(0 if damage == "emptied" else size // 2)
        go_on()
        assert run.wait() == 0, run.output()
        said = run.output()
    kept = "" if damage == "deleted" else r"it is kept as journal\.sqlite\.damaged\.1, and "
    assert re.search(rf"journal\.sqlite.*: {kept}the run goes on from the checkpoint of step 3", said), said
    assert "already holds a run" not in said
    with read_journal(Path("run")) as journal:
        assert journal.run_id == run_id
        assert [step.step for step in journal.steps()] == [*range(1, 9)]
    assert_same_results("run", scored_undisturbed)
    assert coordinator("report", "run").returncode == 0


def test_a_supervised_run_refuses_data_that_was_too_large_to_be_kept_and_has_changed() -> None:
    """The data are a Parquet file with a hole of more than a gibibyte before its footer."""
    data = {"dataset_name": "jsonl", "train_data_path": "sums.parquet", "num_train": 64, "num_validation": 16}
    config = write_config(merged(RUN, {"cluster": {"launch": "all"}, "grpo": {"max_num_steps": 1000}, "data": data}))
    content = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(SUMS), content)
    table = content.getvalue().to_pybytes()
    start = len(table) - 8 - int.from_bytes(table[-8:-4], "little")
    path = Path("sums.parquet").absolute()
    with path.open("wb") as file:
        file.write(table[:start])
        file.seek(kept_inputs.MOST_BYTES, os.SEEK_CUR)
        file.write(table[start:])
    with Command("coordinator", "up", config, "--supervise") as run:
        run.wait_for("step 2/")
        path.touch()
        coordinator_of(run).kill()
        assert run.wait() == 2, run.output()
        refusal = f"error: {path} has changed since the run began, and is too large to be kept with it (beyond 1 GiB"
        assert refusal in run.output()
        assert "put it back, or continue with what it is by --resume" in run.output()
        assert "Traceback" not in run.output()
    again = coordinator("up", config, "--resume", "grpo.max_num_steps=4")
    assert again.returncode == 0, again.stderr
