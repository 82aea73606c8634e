"""Agents and resources servers of NeMo Gym 0.4.0, by its own servers, over a real engine.

`tox -e families` installs NeMo Gym apart, on Python 3.12; `TANDEM_NEMO_GYM` names the interpreter there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import yaml

from tandem.common.messages import Problem
from tandem.config.schema.environments import NemoGymConfig
from tandem.coordinator.cli import main
from tandem.samples.batch import SampleBatch
from tandem.samples.packaged_environments.programs import play_nemo_gym
from tests.harness.runs.running import TINY

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import rollout_harness  # type: ignore[import-not-found]
from agents_harness import assert_probable, sequences  # type: ignore[import-not-found]

PYTHON = os.environ.get("TANDEM_NEMO_GYM", "")
pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="NeMo Gym is not installed: tox -e families"),
    pytest.mark.timeout(900),
]
WAIT_S = 600.0
MCQA = {"config_paths": ["resources_servers/mcqa/configs/mcqa.yaml"]}
SETTINGS: dict[str, Any] = {"config": MCQA, "python": PYTHON}
_RESOURCES = "resources_servers"
_SWE = "swe_pivot_single_step_tool_use_with_argument_comparison"
LIAR = '''
"""A resources server whose rewards are what a row names: some are none."""

import os

from fastapi.responses import Response
from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyRequest, SimpleResourcesServer

REWARDS = {"nan": "NaN", "huge": "1e300", "text": '"much"', "none": "null"}


class Row(BaseVerifyRequest):
    kind: str


class Liar(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: Row):
        if body.kind == "prints":
            for _ in range(1600):
                os.write(1, b"x" * (1 << 16))
        if body.kind == "raises":
            raise RuntimeError("wrong " * 100_000)
        said = body.model_dump_json()[:-1] + ', "reward": ' + REWARDS.get(body.kind, "0.5")
        said += ', "said": "%s"}' % ("1" * (100 << 20) if body.kind == "long" else "")
        return Response(said, media_type="application/json")


if __name__ == "__main__":
    Liar.run_webserver()
'''
LIES = {
    "nan": "expected a JSON value",
    "huge": "the reward is 1e+300, not a number from -1e+12 to 1e+12",
    "text": "should be a valid number",
    "none": "should be a valid number",
    "raises": "wrong wrong",
    "long": "",
    "prints": "",
    "honest": "",
}
"""What is said of each lie; nothing where there is none."""
ENDLESS = """
import os

for _ in range(1024):
    os.write(1, b"x" * (1 << 16))
os.write(1, b" RuntimeError: the end of a long line")
raise SystemExit(3)
"""
"""A server that prints a line of 64 MB, which has no end, and ends."""
FILES: dict[str, tuple[list[str], dict[str, Any], str, str]] = {
    "workplace": (
        ["workplace_assistant/configs/workplace_assistant.yaml"],
        {"workplace_assistant_simple_agent": {"responses_api_agents": {"simple_agent": {"max_steps": 6}}}},
        "workplace_assistant_simple_agent",
        "",
    ),
    "math": (
        ["math_with_judge/configs/math_with_judge.yaml"],
        {
            "math_with_judge": {
                _RESOURCES: {
                    "math_with_judge": {"judge_model_server": {"name": "policy_model"}, "should_use_judge": False}
                }
            }
        },
        "math_with_judge_simple_agent",
        "",
    ),
    "swe": (
        [f"single_step_tool_use_with_argument_comparison/configs/{_SWE}.yaml"],
        {
            "single_step_tool_use_with_argument_comparison_swe": {
                "responses_api_agents": {
                    "tool_simulation_agent": {
                        "entrypoint": "app.py",
                        "resources_server": {"type": _RESOURCES, "name": f"{_SWE}_resources_server"},
                        "model_server": {"type": "responses_api_models", "name": "policy_model"},
                    }
                }
            }
        },
        "single_step_tool_use_with_argument_comparison_swe",
        "",
    ),
    "rlhf": (
        ["genrm_compare/configs/genrm_compare.yaml"],
        {
            "num_gpu_nodes": 1,
            "genrm_model_name": "own/genrm",
            "policy_model_reasoning_off": {
                "responses_api_models": {
                    "openai_model": {
                        "entrypoint": "app.py",
                        "openai_base_url": "http://127.0.0.1:1/v1",
                        "openai_api_key": "none",
                        "openai_model": "policy",
                    }
                }
            },
            "genrm_model": {"responses_api_models": {"genrm_model": {"vllm_serve_kwargs": {"max_num_seqs": 16}}}},
            "genrm_compare_resources_server": {_RESOURCES: {"genrm_compare": {"num_rollouts_per_prompt": 8}}},
        },
        "genrm_simple_agent",
        "env.nemo_gym: genrm_model: NeMo Gym would serve it on GPUs (genrm_model), which the run has: ",
    ),
    "safety": (
        [
            "jailbreak_detection/configs/safety_judge_model.yaml",
            "jailbreak_detection/configs/jailbreak_detection_nemotron_combined_reward_tp8.yaml",
        ],
        {
            "safety_judge_model": {
                "responses_api_models": {"local_vllm_model": {"vllm_serve_kwargs": {"max_num_seqs": 16}}}
            }
        },
        "jailbreak_detection_simple_agent",
        "env.nemo_gym: safety_judge_model: function-after -> responses_api_models -> local_vllm_model -> entrypoint: ",
    ),
}
"""Of files of NeMo-RL's, by their keys and values: NeMo Gym's files, its settings, an agent, and what is refused."""


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout_harness, "WAIT_S", WAIT_S)  # three servers start, which takes half a minute of a core


def row_of(question: str) -> dict[str, Any]:
    """Return a row of mcqa: the last letter or digit of an answer is to be an a, or even; a tiny model writes these."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}], "temperature": 0.6},
        "options": [{"A": digit} for digit in "02468"] + [{"B": digit} for digit in "13579"],
        "expected_answer": "A",
        "template_metadata": {"output_regex": "([au0-9])"},
        "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    }


def expect_reward(answer: str) -> float:
    """Return the reward of an answer by the rule that the row states."""
    choices = re.findall("[au0-9]", answer)
    return float(bool(choices) and choices[-1] in "a02468")


def problem_of(question: str, **changes: Any) -> Problem:
    return Problem(problem_id="p", question=question, answer="", metadata={"row": {**row_of(question), **changes}})


def dialogue_of(question: str) -> Problem:
    """Return a problem of several turns: two follow-ups, and the last answer is to have a u."""
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "follow_ups": ["12", "34"],
        "expected_answer": "u",
        "agent_ref": {"type": "responses_api_agents", "name": "example_multi_turn_gymnasium_agent"},
    }
    return Problem(problem_id="d", question=question, answer="", metadata={"row": row})


@contextlib.contextmanager
def rollout_of(place: Path, num_at_once: int = 16, on_error: str = "fail", **settings: Any) -> Iterator[Any]:
    entry = {"nemo_gym": {**SETTINGS, **settings}, "timeout_s": WAIT_S, "max_concurrency": num_at_once}
    rollout = rollout_harness.Rollout(place, None, data={"dataset_name": "nemo_gym"}, on_error=on_error, **entry)
    try:
        yield rollout
    finally:
        rollout.service.close()


def describe_server(name: str, source: str) -> dict[str, Any]:
    """Write the program of a resources server; return NeMo Gym's settings of it and of its agent, `NAME_agent`."""
    Path(f"resources_servers/{name}").mkdir(parents=True)
    Path(f"resources_servers/{name}/app.py").write_text(source)
    agent = {"entrypoint": "app.py", "resources_server": {"type": _RESOURCES, "name": name}}
    agent["model_server"] = {"type": "responses_api_models", "name": "policy_model"}
    return {
        name: {_RESOURCES: {name: {"entrypoint": "app.py", "domain": "other", "verified": False}}},
        f"{name}_agent": {"responses_api_agents": {"simple_agent": agent}},
    }


def list_servers() -> list[psutil.Process]:
    """Return the servers of NeMo Gym that this process has started, through others."""
    servers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("serve_nemo_gym.py") for word in process.cmdline()):
                servers.append(process)
    return servers


def answer_of(rollout: Any, arrays: SampleBatch) -> str:
    tokens = arrays.token_ids_T[arrays.loss_mask_T].tolist()
    return str(rollout.tokenizer.decode([token for token in tokens if token != rollout.tokenizer.eos_id]))


def answers_of(rollout: Any, arrays: SampleBatch) -> list[str]:
    """Return the answers of an episode in their order, each of which counts once."""
    answers = []
    for branch in sequences(arrays):
        places = np.flatnonzero(branch.loss_mask_T)
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            answers.append(str(rollout.tokenizer.decode(branch.token_ids_T[run].tolist())))
    return answers


def test_episodes_have_the_rewards_of_its_server_and_are_repeated(tmp_path: Path) -> None:
    with rollout_of(tmp_path, num_at_once=1) as rollout:
        groups = [rollout.group(number, [7, 8, 9, 10], problem_of(str(number))) for number in range(2)]
        samples, again = rollout.run(*groups), rollout.run(*groups)
        for key, (scored, arrays) in samples.items():
            assert_probable(arrays, {0: rollout.model})
            assert scored.reward == expect_reward(answer_of(rollout, arrays)), scored
            assert scored.correct == (scored.reward == 1)
            assert scored.num_turns == 1
            assert again[key][0].reward == scored.reward
            for name in ("token_ids_T", "generation_logprobs_T"):
                assert getattr(again[key][1], name).tobytes() == getattr(arrays, name).tobytes()
    assert {scored.reward for scored, _ in samples.values()} == {0.0, 1.0}
    assert not list_servers()


def test_agents_of_two_servers_play_in_one_run_and_all_turns_are_trained_on(tmp_path: Path) -> None:
    path = "resources_servers/example_multi_turn_gymnasium/configs/example_multi_turn_gymnasium.yaml"
    config = {"config_paths": [*MCQA["config_paths"], path]}
    with rollout_of(tmp_path, num_at_once=1, config=config) as rollout:
        groups = [
            rollout.group(number, [7, 8, 9, 10], (problem_of if number % 2 else dialogue_of)(str(number)))
            for number in range(4)
        ]
        samples = rollout.run(*groups)
        assert len(samples) == 16
        for (group, _), (scored, arrays) in samples.items():
            assert_probable(arrays, {0: rollout.model})
            if group % 2:
                assert scored.reward == expect_reward(answer_of(rollout, arrays)), scored
                assert scored.num_turns == 1
                continue
            answers = answers_of(rollout, arrays)
            assert scored.num_turns == len(answers) == 3
            # NeMo Gym leaves an empty answer out of the next prompt, which then continues nothing.
            assert len(arrays.lengths_S) == 1 + answers[:2].count("")
            assert scored.reward == float("u" in answers[-1])
        dialogues = {scored.reward for (group, _), (scored, _) in samples.items() if group % 2 == 0}
        assert dialogues == {0.0, 1.0}
    assert not list_servers()


def test_a_server_that_is_killed_costs_nothing_and_none_is_left(tmp_path: Path) -> None:
    with rollout_of(tmp_path) as rollout:

        def kill_one() -> None:
            deadline = time.monotonic() + WAIT_S
            while len(servers := list_servers()) < 3 and time.monotonic() < deadline:
                time.sleep(0.1)
            servers[-1].send_signal(signal.SIGKILL)

        killing = threading.Thread(target=kill_one)
        killing.start()
        samples = rollout.run(*(rollout.group(number, [7], problem_of(str(number))) for number in range(6)))
        killing.join()
        assert {scored.failure for scored, _ in samples.values()} == {""}
        for scored, arrays in samples.values():
            assert scored.reward == expect_reward(answer_of(rollout, arrays))
    assert not list_servers()


def test_a_lie_costs_its_episode_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rewards that are none, a result and prints of 100 MB, in episodes that are played at once."""
    config = describe_server("liar", LIAR)
    reference = {"type": "responses_api_agents", "name": "liar_agent"}
    problems = [problem_of("1", kind=kind, agent_ref=reference) for kind in LIES]
    with rollout_of(tmp_path, on_error="zero", config=config) as rollout:
        samples = rollout.run(*(rollout.group(number, [7], problem) for number, problem in enumerate(problems)))
    said = {problems[group].metadata["row"]["kind"]: scored for (group, _), (scored, _) in samples.items()}
    assert {kind: (scored.reward, bool(scored.failure)) for kind, scored in said.items()} == {
        kind: (0.0 if reason else 0.5, bool(reason)) for kind, reason in LIES.items()
    }, said
    assert all(LIES[kind] in scored.failure and len(scored.failure) < 1000 for kind, scored in said.items()), said
    output = capfd.readouterr()
    assert len(output.out + output.err) < 200_000
    assert not list_servers()


def test_a_line_without_end_is_not_held_whole_and_its_end_is_what_is_said() -> None:
    """The server prints it, and ends; the program that tries the servers says why, and needs no memory for it."""
    row = json.dumps({**row_of("1"), "agent_ref": {"type": "responses_api_agents", "name": "endless_agent"}})
    Path("rows.jsonl").write_text(row + "\n")
    config = describe_server("endless", ENDLESS)
    config["endless_agent"]["responses_api_agents"]["simple_agent"]["datasets"] = [
        {"name": "rows", "type": "example", "jsonl_fpath": "rows.jsonl"}
    ]
    settings = msgspec.to_builtins(NemoGymConfig(config=config, python=PYTHON))
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    code += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    program = [PYTHON, "-c", code, play_nemo_gym.__file__, "list", json.dumps(settings), "answer.json"]
    peaks_kb, reasons = [], []
    for source in (ENDLESS, ENDLESS.replace("1024", "1")):
        Path("resources_servers/endless/app.py").write_text(source)
        ended = subprocess.run([*program, "8"], capture_output=True, text=True, timeout=WAIT_S)
        assert ended.returncode == 0, ended.stderr
        peaks_kb.append(int(ended.stdout.split()[-1]))
        reasons.append(json.loads(Path("answer.json").read_text())["error"])
    for reason in reasons:
        assert reason.startswith("the server endless ended: xxx")
        assert reason.endswith(" RuntimeError: the end of a long line")
        assert len(reason) < 2100
    assert peaks_kb[0] - peaks_kb[1] < 32 << 10, "half of the line"
    assert not list_servers()


@pytest.mark.parametrize("name", FILES)
def test_files_of_nemo_rls_pass_or_are_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths, settings, agent, reason = FILES[name]
    row: dict[str, Any] = {"agent_ref": {"type": "responses_api_agents", "name": agent}}
    for question, side in enumerate(("train", "validation")):
        row["responses_create_params"] = {"input": str(question)}
        Path(f"{side}.jsonl").write_text(json.dumps(row) + "\n")
    config_paths = [
        "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
        *(f"{_RESOURCES}/{path}" for path in paths),
    ]
    form = {"dataset_name": "NemoGymDataset", "env_name": "nemo_gym", "processor": "nemo_gym_data_processor"}
    file = {
        **TINY,
        "data": {**{side: {"data_path": f"{side}.jsonl"} for side in ("train", "validation")}, "default": form},
        "env": {
            "should_use_nemo_gym": True,
            "nemo_gym": {"python": PYTHON, "config_paths": config_paths, **settings},
        },
    }
    Path("file.yaml").write_text(yaml.safe_dump(file))
    code = main(["check", "file.yaml"])
    said = capsys.readouterr()
    assert (code == 0) == (not reason), said
    assert reason in said.err
    assert not reason or len(said.err.strip().splitlines()) == 1
