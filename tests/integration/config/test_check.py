"""`coordinator check` says of a run what `coordinator up` would, before anything starts, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.common.keys import write_run_keys
from tandem.common.wire import EXIT_NOT_ADMITTED
from tandem.coordinator.cli import EXAMPLES, GROUPS
from tests.harness.members import RUN
from tests.harness.runs.by_hand import MEGATRON_TP2
from tests.harness.runs.running import GYM, Command, coordinator, joins, merged, steps_of, typed, write_config

SFT: dict[str, Any] = {
    "algorithm": "sft",
    "sft": {"max_num_steps": 2, "val_period": 0, "val_at_start": False, "seed": 1},
    "checkpointing": {"metric_name": "loss"},
}


def errors(*words: str | Path) -> list[str]:
    """Return what `check` finds wrong, having seen that `up` finds the same and that neither leaves anything."""
    before = sorted(Path.cwd().iterdir())
    ended = coordinator("check", *words)
    tried = coordinator("up", *words)
    found = [
        [line.removeprefix("error: ") for line in each.stderr.splitlines() if not line.startswith("note: ")]
        for each in (ended, tried)
    ]
    assert ended.stdout == ""
    assert "launched" not in tried.stdout
    assert found[0] == found[1]
    assert ended.returncode == tried.returncode != 0
    assert sorted(Path.cwd().iterdir()) == before
    return found[0]


def test_a_run_that_can_start_is_one_line() -> None:
    config = write_config()
    before = sorted(Path.cwd().iterdir())
    ended = coordinator("check", config)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "OK: grpo on model, 3 steps, 1 refit process, 1 trainer process, 1 rollout process\n"
    assert sorted(Path.cwd().iterdir()) == before
    resolved = coordinator("check", "--resolved", config).stdout.splitlines()
    assert resolved[0] == "algorithm: grpo"
    assert resolved[-1] == ended.stdout.strip()


@pytest.mark.parametrize("command", ["check", "up", "doctor", "plan"])
def test_a_configuration_for_clients_of_the_tinker_api_is_said_to_be_one(command: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "tinker.yaml"
    refused = coordinator(command, path, "cluster.trainers=1")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {path}: it has neither an algorithm nor data")
    assert line.endswith(f": coordinator tinker {path} cluster.trainers=1 serves them")
    # One that has data is a run whose user has forgotten something.
    Path("forgetful.yaml").write_text(path.read_text() + "data: {max_input_seq_length: 8}\n")
    assert "algorithm: required" in coordinator(command, Path("forgetful.yaml")).stderr


def test_problems_of_all_kinds_are_listed_together() -> None:
    Path("file").write_text("")
    over = {
        "env": {"mine": {"class": "judging.Judge"}},
        "logger": {"log_dir": "file/run"},
        "cluster": {"threads_per_process": 1_000_000},
        "policy": {"optimizer": {"name": "mine.Muon"}},
        "data": {"train_data_path": "nothing.jsonl"},
    }
    *found, count = errors(write_config(over))
    assert count == f"{len(found)} problems"
    assert [line.split(": ")[0] for line in found] == [
        "cluster.threads_per_process",
        "logger.log_dir",
        "checkpointing.checkpoint_dir",
        "data.train_data_path",
        "policy.optimizer.name",
        "env.mine.class",
    ]


HANGS = "import time\ntime.sleep(600)\n"
DIES = "import os, sys\nprint('out of licences', flush=True)\nos._exit(9)\n"
NO_JUDGE = "class Judge:\n    pass\n"
NEEDS = (
    "class Judge:\n    def __init__(self, base):\n        pass\n    def score(self, problem, response):\n        pass\n"
)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("raise RuntimeError('no such luck')", "env.mine.class: cannot import 'own.Judge': RuntimeError: no such luck"),
        ("class Judgee: pass", "env.mine.class: cannot import 'own.Judge': own has no 'Judge'; did you mean 'Judgee'?"),
        (NO_JUDGE, "env.mine.class: own.Judge has no method score(problem, response) and none step(problem, "),
        (
            "class Judge:\n    def score(self, response):\n        pass\n",
            "env.mine.class: own.Judge.score is called with (problem, response): too many positional arguments",
        ),
        (NEEDS, "env.mine: TypeError: missing a required argument: 'base'"),
        (
            DIES,
            "importing the classes that the configuration names ended the process (exit code 9); its last line: out",
        ),
        (HANGS, "importing the classes that the configuration names takes over 3 s (cluster.deadlines.join_s)"),
    ],
    ids=["raises", "misnamed", "no method", "other arguments", "arguments", "dies", "hangs"],
)
def test_code_of_ones_own_is_imported_elsewhere(module: str, expected: str) -> None:
    Path("own.py").write_text(module)
    over = {"env": {"mine": {"class": "own.Judge"}}, "cluster": {"deadlines": {"join_s": 3.0}}}
    (line,) = errors(write_config(over))
    assert line.startswith(expected)


def test_a_misspelt_module_is_named_with_the_nearest() -> None:
    Path("own_rewards.py").write_text("class Judge:\n    def score(self, problem, response):\n        pass\n")
    (line,) = errors(write_config({"env": {"mine": {"class": "own_reward.Judge"}}}))
    expected = (
        "env.mine.class: cannot import 'own_reward.Judge': No module named 'own_reward'; did you mean 'own_rewards'?"
    )
    assert line == expected


def test_services_started_by_hand_elsewhere_have_their_own_code_there() -> None:
    over = {"env": {"mine": {"class": "own.Judge"}}, "cluster": {"launch": "none"}}
    assert coordinator("check", write_config(over)).returncode == 0


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        (merged(GYM, {"data": {"task": "chain_sums"}}), "data.task: reasoning-gym has no task 'chain_sums'; did you"),
        ({"policy": {"tokenizer": {"name": "nowhere"}}}, "policy.tokenizer.name: 'nowhere' does not exist; "),
        (
            {"policy": {"tokenizer": {"chat_template": "{% for %}"}}},
            "policy.tokenizer.chat_template: the chat template of model refuses messages of user: ",
        ),
        (
            {"algorithm": "sft", "checkpointing": {"metric_name": "loss"}, "data": {"solution_template": "own:no"}},
            "data.solution_template: cannot import 'own:no': No module named 'own'",
        ),
        ({"policy": {"generation": {"backend": "vllm"}}}, "policy.generation.backend: vllm, but vLLM is not installed"),
        ({"policy": {"new_model": {"config": {"model_type": "qwen99"}}}}, "policy.new_model.config.model_type: tran"),
    ],
    ids=["task", "tokenizer", "chat template", "solution", "vllm", "model type"],
)
def test_what_a_run_needs_is_looked_for(over: dict[str, Any], expected: str) -> None:
    (line,) = errors(write_config(over))
    assert line.startswith(expected)


def test_a_prerequisite_is_looked_through_as_well() -> None:
    write_config({**SFT, "logger": {"log_dir": "sft_run"}, "data": {"train_data_path": "nothing.jsonl"}}, "sft.yaml")
    then = {
        "prerequisite": "sft.yaml",
        "policy": {"model_name": "sft_run/checkpoints/latest/policy", "new_model": None},
    }
    config = write_config(then)
    (line,) = errors(config)
    assert line == "data.train_data_path: 'nothing.jsonl' does not exist"
    write_config({**SFT, "logger": {"log_dir": "sft_run"}}, "sft.yaml")
    ended = coordinator("check", config)
    assert ended.stdout.endswith(f", after {Path.cwd()}/sft.yaml\n"), ended.stderr


@pytest.mark.parametrize("name", ["sft_run/modle", "sft_run/checkpoints/lastest/policy"])
def test_a_model_that_the_prerequisite_does_not_make_is_said_before_that_runs(name: str) -> None:
    write_config({**SFT, "logger": {"log_dir": "sft_run"}, "policy": {"model_name": "sft_run/model"}}, "sft.yaml")
    policy = {"model_name": name, "tokenizer": {"name": name}, "new_model": None}
    (line,) = errors(write_config({"prerequisite": "sft.yaml", "policy": policy}))
    expected = f"policy.model_name: {name!r} does not exist, and neither policy.new_model nor prerequisite makes it"
    assert line.startswith(expected)


def test_a_prerequisite_that_changed_is_kept_or_made_again() -> None:
    first = {**SFT, "logger": {"log_dir": "sft_run"}}
    write_config(first, "sft.yaml")
    then = {
        "prerequisite": "sft.yaml",
        "grpo": {"max_num_steps": 1},
        "policy": {"model_name": "sft_run/checkpoints/latest/policy", "new_model": None},
    }
    config = write_config(then)
    assert coordinator("up", config).returncode == 0
    write_config(merged(first, {"sft": {"seed": 2}, "policy": {"optimizer": {"kwargs": {"lr": 0.01}}}}), "sft.yaml")
    changed = "sft.seed, policy.optimizer.kwargs.lr"
    path = Path("sft.yaml").absolute()
    assert f"note: prerequisite {path} differs from its run in {changed}; " in coordinator("check", config).stderr
    kept = coordinator("up", config, "--resume", "grpo.max_num_steps=2")
    assert kept.returncode == 0, kept.stderr
    assert f"note: prerequisite {path} differs from that run in {changed}; --restart makes it again" in kept.stdout
    assert not Path("sft_run.1").exists()
    again = coordinator("up", config, "--restart")
    assert again.returncode == 0, again.stderr
    assert f"prerequisite {path}: made again, because it differs from the run in sft_run in {changed}" in again.stdout
    assert Path("sft_run.1").exists()
    assert len(steps_of("sft_run")) == 2


def test_a_prerequisite_that_changed_half_way_begins_anew_by_restart() -> None:
    first = {**SFT, "logger": {"log_dir": "sft_run"}}
    write_config(merged(first, {"sft": {"max_num_steps": 1}}), "sft.yaml")
    assert coordinator("up", "sft.yaml").returncode == 0
    write_config(merged(first, {"sft": {"seed": 2}}), "sft.yaml")  # two steps now, and another seed
    policy = {"model_name": "sft_run/checkpoints/latest/policy", "new_model": None}
    config = write_config({"prerequisite": "sft.yaml", "policy": policy, "grpo": {"max_num_steps": 1}})
    refused = coordinator("up", config)
    assert refused.returncode == 2
    assert "is at step 1 and differs in sft.seed: begin it anew with --restart" in refused.stderr
    ended = coordinator("up", config, "--restart")
    assert ended.returncode == 0, ended.stderr
    assert len(steps_of("sft_run")) == 2


def test_a_new_model_that_changed_is_kept_or_made_again() -> None:
    one = {"grpo": {"max_num_steps": 1}}
    assert coordinator("up", write_config(one)).returncode == 0
    new = {"policy": {"new_model": {"characters": "0123456789+-= x", "config": {"hidden_size": 64}}}}
    config = write_config(merged(one, new))
    said = "note: policy.new_model differs from model in config.hidden_size, characters; --restart makes it again\n"
    assert said in coordinator("check", config).stderr
    kept = coordinator("up", config, "logger.log_dir=other")
    assert kept.returncode == 0, kept.stderr
    assert said in kept.stdout
    assert json.loads(Path("model/config.json").read_text())["hidden_size"] == 32
    again = coordinator("up", config, "--restart")
    assert again.returncode == 0, again.stderr
    assert "model is made again, because policy.new_model differs from it in config.hidden_size, char" in again.stdout
    assert "model moved to model.1" in again.stdout
    assert json.loads(Path("model/config.json").read_text())["hidden_size"] == 64
    assert said not in coordinator("check", config).stderr


def test_a_folder_that_holds_a_run_is_said() -> None:
    config = write_config({"grpo": {"max_num_steps": 1}})
    assert coordinator("up", config).returncode == 0
    checked = coordinator("check", config)
    assert checked.returncode == 0
    assert checked.stderr == "note: run already holds a run: continue it with --resume, or begin again with --restart\n"
    for flag in ("--resume", "--restart"):
        assert flag in coordinator("up", config).stderr


@pytest.mark.parametrize("words", [[], ["up"], ["check"], ["frobnicate"]])
def test_too_few_words_are_answered_by_an_example(words: list[str]) -> None:
    ended = typed("coordinator", *words)
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: coordinator ")
    example = EXAMPLES[words[0] if words[:1] in (["up"], ["check"]) else ""]
    assert ended.stderr.endswith(f"\nexample: {example}\n")
    if words in (["up"], ["check"]):
        assert "the following arguments are required: CONFIG\n" in ended.stderr


def test_the_help_has_a_line_for_each_command_by_purpose_and_knows_near_misses() -> None:
    shown = typed("coordinator", "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert re.findall("^  ([a-z ]+):$", shown, re.MULTILINE) == [*GROUPS]
    assert sorted(re.findall("^    ([a-z]+)  +[a-z]", shown, re.MULTILINE)) == sorted({*EXAMPLES} - {""})
    refused = typed("coordinator", "upp").stderr
    assert "there is no command 'upp'; did you mean 'up'?\n  start a run: init, check, plan, up" in refused


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    interrupted = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'tandem.coordinator.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from tandem.coordinator.console import main\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_the_version_is_said() -> None:
    ended = typed("coordinator", "--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("tandem 0.")


def test_a_service_by_hand_says_whom_it_waits_for() -> None:
    write_run_keys(Path("run"), RUN)
    ended = typed("refit", *joins("tcp://127.0.0.1:9"), "--join-timeout", "1.5")
    assert ended.returncode == EXIT_NOT_ADMITTED
    assert ended.stdout == "refit: waiting for a coordinator at tcp://127.0.0.1:9, up to 1.5 s\n"


def test_environment_variables_of_megatron_reach_trainers_before_their_group_is_made() -> None:
    """Whether launched or by hand: one that makes gloo fail is seen to do so."""
    megatron = {"enabled": True, "env_vars": {"GLOO_SOCKET_IFNAME": "nowhere0", "A_NUMBER": 1}}
    policy = {"optimizer": None, "megatron_cfg": MEGATRON_TP2["policy"]["megatron_cfg"] | megatron}
    policy["megatron_cfg"]["tensor_model_parallel_size"] = 1
    config = write_config({**SFT, "policy": policy})
    launched = coordinator("up", config)
    assert launched.returncode == 1
    assert "nowhere0" in launched.stderr
    with Command("coordinator", "up", config, "--restart", "cluster.launch=none") as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        with Command("trainer", *joins(address)) as trainer:
            assert run.wait() == 1
            trainer.wait()
        assert "nowhere0" in run.output()


def test_a_folder_that_cannot_be_written() -> None:
    found = errors(write_config({"logger": {"log_dir": "/proc/run"}, "checkpointing": {"checkpoint_dir": "kept"}}))
    assert found == ["logger.log_dir: '/proc/run' cannot be written: '/proc': No such file or directory"]
