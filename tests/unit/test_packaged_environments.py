"""Environments of the package verifiers, as the package plays them, over a real engine."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from agents_harness import assert_probable
from own_environments import WAIT_S
from rollout_harness import Rollout
from verifiers_packages import ENDLESS, JUDGE, LIES, SUMS, TOOLS, score_reply

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem, SampleScored
from tandem.config import Config, build_config
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets import load_problems
from tandem.samples.packaged_environments.programs import play_verifiers
from tests.harness.judge_endpoint import judge_endpoint
from tests.harness.runs.pages_harness import code_of

vf: Any = pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed")
Samples = dict[tuple[int, int], tuple[SampleScored, SampleBatch]]


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the packages into the working directory."""
    names = {"sums_v1": SUMS, "endless_v1": ENDLESS, "tools_v1": TOOLS, "digits_v1": JUDGE, "lies_v1": LIES}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TOOL_PID", str(tmp_path / "tool_pid"))
    for name, source in names.items():
        Path(f"{name}.py").write_text(source)
    yield
    for name in names:
        sys.modules.pop(name, None)


def configured(data: dict[str, Any] | None = None, **settings: Any) -> Config:
    return build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model"},
            "data": data or {},
            "env": {"theirs": {"verifiers": settings}},
        }
    )


def list_here(**settings: Any) -> list[Problem]:
    """List tasks in this process, which has imported the package."""
    packaged = configured(**settings).env["theirs"].packaged
    listed = play_verifiers.list_tasks(msgspec.to_builtins(packaged), 8)["train"]
    return [Problem(problem_id=task.pop("name"), **task) for task in listed]


@contextlib.contextmanager
def rollout_of(folder: Path, num_at_once: int = 16, on_error: str | None = None, **settings: Any) -> Iterator[Rollout]:
    entry = {"verifiers": settings, "timeout_s": WAIT_S, "max_concurrency": num_at_once, "on_error": on_error}
    rollout = Rollout(folder, None, data={"dataset_name": "verifiers"}, **entry)
    try:
        yield rollout
    finally:
        rollout.service.close()


def score_with_package(problem: Problem, reply: str) -> Any:
    """Return the trace of a conversation of one reply, with the rewards that verifiers' own task gives it."""
    module = importlib.import_module("sums_v1")
    task = module.Sum(module.Data.model_validate(problem.metadata["task"]))
    return score_reply(task, problem.question, reply)


def reply_of(rollout: Rollout, arrays: SampleBatch) -> str:
    """Return the text of the counted tokens, without the token that ends it."""
    token_ids = arrays.token_ids_T[arrays.loss_mask_T].tolist()
    return rollout.tokenizer.decode([token for token in token_ids if token != rollout.tokenizer.eos_id])


def test_its_tasks_are_the_problems_and_its_rewards_those_of_the_package(tmp_path: Path) -> None:
    """Rewards of the task, and of a judge at an endpoint that finds every answer right."""
    with judge_endpoint() as endpoint:
        endpoint.trouble.extend(["yes"] * 99)
        judge = {"id": "reference", "name": "judged", "base_url": endpoint.url, "api_key_var": "NO_KEY", "weight": 0.25}
        settings = {"id": "sums-v1", "args": {"num": 6, "task": {"judges": [judge]}}, "correct_from": 1.25}
        problems = list_here(**settings)
        with rollout_of(tmp_path, num_at_once=1, **settings) as rollout:  # the composition of batches is repeated, too
            groups = [rollout.group(number, [7, 8], problem) for number, problem in enumerate(problems)]
            samples = rollout.run(*groups)
            again = rollout.run(*groups)
            replies = {key: reply_of(rollout, arrays) for key, (_, arrays) in samples.items()}
            for _, arrays in samples.values():
                assert_probable(arrays, {0: rollout.model})
    assert len(samples) == 12
    for key, (scored, arrays) in samples.items():
        trace = score_with_package(problems[key[0]], replies[key])
        judged = 0.25 if replies[key].strip() else 0.0
        assert scored.reward == trace.reward + judged
        parts = {name: reward.value for name, reward in trace.rewards.items()}
        assert scored.components == {"length": trace.metrics["length"], "judged": judged, **parts}
        assert scored.correct == (scored.reward >= 1.25)
        assert scored.num_turns == 1
        assert again[key][0].reward == scored.reward
        for name in ("token_ids_T", "generation_logprobs_T"):
            assert getattr(again[key][1], name).tobytes() == getattr(arrays, name).tobytes()
    assert len({scored.reward for scored, _ in samples.values()}) > 1, "rewards differ"


def test_the_policy_may_be_a_judge_and_nothing_of_that_is_trained_on(tmp_path: Path) -> None:
    """What it answers as a judge, which draws nothing, is what Transformers' greedy search makes of its weights."""
    sampling = {"temperature": 0.0, "max_tokens": 8}
    judge = {"id": "digits-v1", "name": "judged", "model": "policy", "sampling": sampling, "weight": 0.25}
    settings = {"id": "sums-v1", "args": {"num": 3, "task": {"judges": [judge]}}}
    problems = list_here(**settings)
    with rollout_of(tmp_path, num_at_once=1, **settings) as rollout:
        groups = [rollout.group(number, [7, 8], problem) for number, problem in enumerate(problems)]
        samples, again = rollout.run(*groups), rollout.run(*groups)
        judged = {}
        for key, (scored, arrays) in samples.items():
            assert_probable(arrays, {0: rollout.model})
            trace = score_with_package(problems[key[0]], reply_of(rollout, arrays))
            chat = [{"role": "user", "content": f"0: {trace.last_reply}"}]
            prompt_ids = rollout.tokenizer.encode_chat(chat, add_generation_prompt=True)
            stop = {"eos_token_id": rollout.tokenizer.eos_id, "pad_token_id": rollout.tokenizer.eos_id}
            whole = rollout.model.generate(torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=8, **stop)
            answer = rollout.tokenizer.decode(whole[0, len(prompt_ids) :].tolist())
            judged[key] = sum(map(str.isdigit, answer)) / 8
            assert scored.components["judged"] == 0.25 * judged[key]
            assert scored.reward == pytest.approx(trace.reward + 0.25 * judged[key])
            assert (scored.failure, scored.num_turns, len(scored.branches)) == ("", 1, 1)
            assert again[key][0].reward == scored.reward
            for name in ("token_ids_T", "generation_logprobs_T"):
                assert getattr(again[key][1], name).tobytes() == getattr(arrays, name).tobytes()
    assert any(judged.values()), "a judge that says nothing shows nothing"


def test_tasks_to_validate_on_may_be_apart() -> None:
    with pytest.raises(ConfigError, match=r"env\.theirs\.verifiers\.python: cannot run 'no-such-python'"):
        load_problems(configured(id="sums-v1", python="no-such-python"))
    sets = load_problems(configured(id="sums-v1", args={"num": 3}, validation_args={"first": 10}))
    assert [problem.question for problem in sets.train] == ["0", "1", "2"]
    assert [problem.question for problem in sets.validation] == ["10", "11", "12"]


def test_a_conversation_of_several_turns_is_trained_on_as_it_was_sampled(tmp_path: Path) -> None:
    """A taskset without end, messages as prompts, and an environment of its own, with a limit of turns."""
    problems = list_here(id="endless-v1")
    assert [problem.question for problem in problems] == [str(number) for number in range(8)]
    with rollout_of(tmp_path, id="endless-v1", env={"num_turns": 3}) as rollout:
        samples = rollout.run(*(rollout.group(number, [7], problem) for number, problem in enumerate(problems[:3])))
        for scored, arrays in samples.values():
            assert (scored.num_turns, len(scored.branches), scored.reward) == (3, 1, 3.0)
            assert_probable(arrays, {0: rollout.model})


def test_a_lie_costs_its_episode_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rewards that are none, and 100 MB of prints, in episodes that are played at once."""
    reasons = {
        "nan": "the reward",
        "huge": "the reward is 1e+300, not a number from -1e+12 to 1e+12",
        "text": "could not convert string to float: 'much'",
        "raises": "wrong wrong",
        "prints": "",
        "honest": "",
    }
    problems = list_here(id="lies-v1")
    with rollout_of(tmp_path, id="lies-v1", on_error="zero") as rollout:
        samples = rollout.run(*(rollout.group(number, [7], problem) for number, problem in enumerate(problems)))
    for (group, _), (scored, _) in samples.items():
        reason = reasons[problems[group].metadata["task"]["kind"]]
        assert reason in scored.failure
        assert bool(scored.failure) == bool(reason)
        assert scored.reward == (0.0 if reason else 0.5)
        assert len(scored.failure) < 1000
    output = capfd.readouterr()
    assert len(output.out + output.err) < 200_000


def test_a_tool_server_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    problems = list_here(id="tools-v1")
    with rollout_of(tmp_path, id="tools-v1") as rollout:
        first = rollout.run(rollout.group(0, [7], problems[0]))
        pid = int(Path("tool_pid").read_text())

        def kill() -> None:
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        second = rollout.run(*(rollout.group(number, [7], problems[number]) for number in range(1, 5)))
        killing.join()
        deadline = time.monotonic() + WAIT_S
        while int(Path("tool_pid").read_text()) == pid:
            assert time.monotonic() < deadline
            second |= rollout.run(rollout.group(5, [7], problems[5]))
        for scored, _ in (first | second).values():
            assert (scored.failure, scored.reward) == ("", 23.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such taskset": ({"id": "nothing-v1"}, "ModuleNotFoundError: taskset 'nothing-v1' not found"),
    "an unknown setting": ({"id": "sums-v1", "args": {"nmu": 3}}, "taskset.nmu: Extra inputs are not permitted"),
    "a shell": (
        {"id": "sums-v1", "env": {"agent": {"harness": {"id": "bash"}}}},
        "the harness 'bash' of agent executes what the policy writes on this machine",
    ),
    "a judge without an endpoint": (
        {"id": "sums-v1", "args": {"task": {"judges": [{"id": "reference"}]}}},
        "taskset.task.judges[0] is a judge without base_url",
    ),
    "several roles": (
        {"id": "sums-v1", "env": {"id": "user-sim"}},
        "the policy plays one role, but assistant, user of assistant, user have no client",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_played_is_refused_in_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    settings, reason = REFUSED[case]
    with pytest.raises(play_verifiers.SettingsRefused) as refused:
        list_here(**settings)
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("", "the package verifiers is not installed; pip install"),
        ("0.3.1", "verifiers 0.3.1 is installed, but 0.4 is what can be played here"),
    ],
)
def test_an_absent_package_and_another_release_are_one_line(
    version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter that finds no package, or one of another release."""
    Path("bare").mkdir()
    code = "import sys; sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    Path("python").write_text(
        f'#!/bin/sh\nPYTHONPATH={Path("bare").absolute()} exec {sys.executable} -S -c "{code}" "$@"\n'
    )
    Path("python").chmod(0o755)
    if version:
        Path(f"bare/verifiers-{version}.dist-info").mkdir()
        Path(f"bare/verifiers-{version}.dist-info/METADATA").write_text(f"Name: verifiers\nVersion: {version}\n")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_problems(configured(id="sums-v1", python=str(Path("python").absolute())))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env": {"theirs": {"url": "http://here:1"}}}, "env.theirs.url: env.theirs.verifiers is given too"),
        (
            {"data": {"dataset_name": "jsonl", "train_data_path": "rows.jsonl"}},
            "theirs plays the tasks of its package: data.dataset_name jsonl is not for it",
        ),
        ({"env": {"theirs": {"verifiers": {"ids": "x"}}}}, "env.theirs.verifiers.ids"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes: dict[str, Any], reason: str) -> None:
    entry = {"verifiers": {"id": "sums-v1"}}
    changed = {**entry, **changes.get("env", {}).get("theirs", {})}
    settings: dict[str, Any] = {"grpo": {}, "policy": {"model_name": "model"}, "data": changes.get("data", {})}
    with pytest.raises(ConfigError, match=re.escape(reason)):
        build_config({**settings, "env": {"theirs": changed}})


def test_the_example_of_the_page_is_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "packaged_environments.md").read_text()
    (source,) = [block for block in code_of(page, "python") if "vf.Taskset" in block]
    (settings,) = [yaml.safe_load(block) for block in code_of(page, "yaml") if "verifiers" in block]
    Path("sums_v1.py").write_text(source)
    config = build_config(settings)
    assert (config.data.dataset_name, config.data.environment) == ("verifiers", "sums")
    problems = play_verifiers.list_tasks(msgspec.to_builtins(config.env["sums"].packaged), 8)["train"]
    assert len(problems) == 200
    assert (problems[3]["question"], problems[3]["answer"]) == ("3 + 1 =", "4")
    (other,) = [yaml.safe_load(block) for block in code_of(page, "yaml") if "openenv" in block]
    assert build_config(other).data.dataset_name == "openenv"
