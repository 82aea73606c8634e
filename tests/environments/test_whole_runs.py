"""Whole runs on environments of other packages: killed in their midst, and judged by other models.

`tox -e families` installs OpenEnv, NeMo Gym and Harbor apart; `TANDEM_OPENENV`, `TANDEM_NEMO_GYM` and `TANDEM_HARBOR`
name their interpreters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import pytest
import torch
import yaml

from tandem.config.schema import NewModel
from tandem.samples.model_files import load_model_tokenizer, write_new_model
from tandem.samples.recorded_shards import read_step
from tandem.samples.sample_record import RecordedSample
from tests.harness.runs.agent_run_harness import OVER, branches_of, model_after
from tests.harness.runs.console_server import console_server as console_server
from tests.harness.runs.pages_harness import DOCS, code_of
from tests.harness.runs.running import (
    TINY,
    Command,
    coordinator,
    deterministic,
    merged,
    steps_of,
    wait_until,
    weights_of,
    write_config,
)
from tests.harness.trainers.reference import logprobs_of

pytestmark = [pytest.mark.usefixtures("console_server"), pytest.mark.timeout(1800)]
WAIT_S = 900.0
PYTHONS = {name: os.environ.get(f"TANDEM_{name.upper()}", "") for name in ("openenv", "nemo_gym", "harbor")}
NUM_TURNS = 2
HOLD = '''
import os
import time
from pathlib import Path

place = Path(__file__).parent


def hold():
    """Note a turn, and wait where the test says so."""
    with (place / "turns.txt").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    held = place / "held"
    while held.exists() and len((place / "turns.txt").read_text().split()) >= int(held.read_text()):
        time.sleep(0.05)
'''
"""What every environment here does in a turn: it notes its process, and waits in the turn whose number is in `held`."""
OPENENV = """
from holding import hold
from my_echo.models import MyEchoAction, MyEchoObservation
from my_echo.server.my_echo_environment import MyEchoEnvironment
from openenv.core.env_server.http_server import create_app


class Held(MyEchoEnvironment):
    def step(self, action, **kwargs):
        hold()
        return super().step(action)


app = create_app(Held, MyEchoAction, MyEchoObservation, env_name="held", max_concurrent_envs=1)
"""
VERIFIERS = '''
"""A taskset whose harness asks the policy twice, and has a tool server that all episodes share count even digits."""

from contextlib import AsyncExitStack

import openai
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from holding import hold

__all__ = ["Asker", "Evens"]


class Counter(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def count(self, text: str) -> int:
        """Count even digits."""
        hold()
        return sum(character in "02468" for character in text)


class Counting(vf.Task[vf.TaskData]):
    @vf.reward
    async def evens(self, trace: vf.Trace) -> float:
        return float(trace.info["evens"])


class Config(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Evens(vf.Taskset[Counting, Config]):
    def load(self):
        for number in range(4):
            yield Counting(vf.TaskData(prompt=f"{number}"))

    @classmethod
    def toolsets(cls, config):
        return [Counter(config.tools)]


class AskerConfig(vf.HarnessConfig):
    pass


class Asker(vf.Harness[AskerConfig]):
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        trace.info["evens"] = 0
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            _, places, clients = await connect_mcp({"mcpServers": servers}, stack)
            (tool,) = places
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = answer.choices[0].message.content or ""
                count = await call_mcp(clients, places, tool, {"text": text})
                trace.info["evens"] += int(count)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": count}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    Counter.run()
'''
NEMO_GYM = """
import sys

sys.path.append({folder!r})
from holding import hold
from resources_servers.example_multi_turn_gymnasium import app
from resources_servers.gymnasium import extract_text


class Held(app.ExampleMultiTurnEnv):
    async def step(self, action, metadata, session_id=None):
        hold()
        observation, _, is_over, is_cut, info = await super().step(action, metadata, session_id)
        reward = sum(character in "02468" for character in extract_text(action))
        return observation, float(reward), is_over, is_cut, info


if __name__ == "__main__":
    Held.run_webserver()
"""
JUDGED = '''
"""A taskset that a judge scores by its verdict."""

import verifiers.v1 as vf

__all__ = ["Judged", "Verdict"]


class Verdict(vf.Judge[float]):
    prompt = "judge {response} please"

    def parse(self, response):
        return float(["[[A!=B]]", "[[A=B]]"].index(response.text))

    async def score(self, task, trace):
        return (await self.evaluate(trace=trace, response=trace.last_reply)).parsed


class Judged(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield vf.Task[vf.TaskData](vf.TaskData(prompt=f"{number}"), self.config.task)
'''
VERDICTS: dict[str, str | int | None] = {
    **dict.fromkeys("0123", "[[A=B]]"),
    **dict.fromkeys("45", "[[A!=B]]"),
    **dict.fromkeys("67", "why?"),
    "8": None,
    "9": 400,
}
"""What a judge answers, by the last character of a response: a verdict, something else, nothing at all, a refusal."""
DYING_JUDGE = """
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

message = {"role": "assistant", "content": "[[A=B]]"}
usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
head = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "usage": usage}
text = json.dumps({**head, "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
left = int(sys.argv[1])


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        global left
        self.rfile.read(int(self.headers["Content-Length"]))
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


server = HTTPServer(("127.0.0.1", 0), Judge)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A judge that finds every response right, so many times as its argument says, and is killed when it is asked again."""
HARBOR = '''
"""Asks the policy twice, and writes its answers to a file of the sandbox."""

import asyncio
import json
import shlex
import urllib.request

from harbor.agents.base import BaseAgent
from holding import hold


class Writer(BaseAgent):
    def __init__(self, *args, api_base, **kwargs):
        super().__init__(*args, **kwargs)
        self.api_base = api_base

    @staticmethod
    def name():
        return "writer"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    def ask(self, messages):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        content = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.api_base}/chat/completions", body, content)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        for _ in range(2):
            text = await asyncio.to_thread(self.ask, messages)
            result = await environment.exec(f"printf %s {shlex.quote(text)} >> answer.txt; wc -c < answer.txt")
            assert result.return_code == 0, result
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result.stdout.strip()}]
            await asyncio.to_thread(hold)
'''
TASK = "[agent]\ntimeout_sec = 600.0\n[verifier]\ntimeout_sec = 600.0\n[environment]\nstorage_mb = 32\n"
VERIFIER = "#!/bin/bash\ncd /app; tr -cd 02468 < answer.txt | wc -c > /logs/verifier/reward.txt\n"


class Kind(NamedTuple):
    """A kind of environment: what is written, its entry of `env`, who is killed, and the reward of its answers."""

    entry: dict[str, Any]
    files: dict[str, str]
    victims: tuple[str, str]
    """Of each step, a word of the command line of the process to kill; without one it is the process in the turn."""
    expect: Callable[[list[str]], float]


def count_evens(answers: list[str]) -> float:
    """Return the reward of most kinds."""
    return float(sum(character in "02468" for answer in answers for character in answer))


def describe_gym_row(number: int) -> str:
    request = {"input": [{"role": "user", "content": f"{number}"}]}
    return json.dumps({"responses_create_params": request, "follow_ups": ["5"]}) + "\n"


def describe_gym() -> dict[str, Any]:
    """Return NeMo Gym's configuration: a server of ours below its own agent and model server."""
    rows = {"name": "rows", "type": "example", "jsonl_fpath": "rows.jsonl"}
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "held"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "max_steps": 5,
        "datasets": [rows],
    }
    server = {"entrypoint": "app.py", "domain": "other", "verified": False}
    return {
        "held": {"resources_servers": {"held": server}},
        "held_agent": {"responses_api_agents": {"gymnasium_agent": agent}},
    }


KINDS = {
    "openenv": Kind(
        {"package": "held_env:app", "observation": "message_length", "max_turns": NUM_TURNS},
        {"held_env.py": OPENENV},
        ("play_openenv.py", ""),
        lambda answers: sum(min(0.1 * len(answer), 1.0) for answer in answers),
    ),
    "verifiers": Kind(
        {"id": "evens-v1", "correct_from": 3.0},
        {"evens_v1.py": VERIFIERS},
        ("play_verifiers.py", ""),
        count_evens,
    ),
    "nemo_gym": Kind(
        {"config": describe_gym()},
        {"resources_servers/held/app.py": NEMO_GYM, "rows.jsonl": "".join(map(describe_gym_row, range(4)))},
        ("play_nemo_gym.py", ""),
        count_evens,
    ),
    "harbor": Kind(
        {"tasks": "tasks", "agent": "writing:Writer"},
        {
            "writing.py": HARBOR,
            **{
                f"tasks/t{number}/{name}": text
                for number in range(4)
                for name, text in {
                    "task.toml": TASK,
                    "instruction.md": f"{number}",
                    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
                    "tests/test.sh": VERIFIER,
                }.items()
            },
        },
        ("play_harbor.py", "enclose.py"),
        count_evens,
    ),
}


def skip_absent(name: str) -> str:
    """Skip a test whose package is not installed; return the interpreter that has it."""
    python = PYTHONS.get(name, sys.executable)
    if not Path(python).is_file() or not python:
        pytest.skip(f"{name} is not installed: tox -e families")
    if name == "verifiers" and importlib.util.find_spec("verifiers") is None:
        pytest.skip("the package verifiers is not installed")
    return python


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Make a folder with the environment of a kind, and its configuration; return the kind's name."""
    name: str = request.param
    python = skip_absent(name)
    if name == "openenv":
        command = [str(Path(python).with_name("openenv")), "init", "my_echo"]
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
    for path, text in {"holding.py": HOLD, **KINDS[name].files}.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text.replace("{folder!r}", repr(str(tmp_path))))
    return name


def configure(name: str, packaged: dict[str, Any], on_error: str = "fail", **over: Any) -> Path:
    """Write the configuration of two steps of four episodes, one at a time."""
    packaged = {**packaged, "python": PYTHONS.get(name)}
    entry = {name: packaged, "timeout_s": WAIT_S, "max_concurrency": 1, "num_workers": 1, "on_error": on_error}
    settings: dict[str, Any] = {
        "grpo": {"num_generations_per_prompt": 2, "max_num_steps": 2},
        "policy": {"max_total_sequence_length": 64},
        "data": {"dataset_name": name, "environment": "theirs", "num_train": 3, "num_validation": 1},
        "env": {"theirs": entry},
    }
    if name == "openenv":  # whose problems are described in letters
        settings["policy"]["new_model"] = {"characters": string.digits + string.ascii_lowercase + '+-= _:{"}.'}
    return write_config(merged(merged(OVER, settings), over))


def read_answers(tokenizer: Any, sample: RecordedSample) -> list[str]:
    """Return what the policy answered in each turn of an episode."""
    arrays, answers = sample.arrays, []
    for start, end in zip(arrays.offsets()[:-1], arrays.offsets()[1:], strict=True):
        tokens, places = arrays.token_ids_T[start:end], np.flatnonzero(arrays.loss_mask_T[start:end])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            kept = [token for token in tokens[run].tolist() if token != tokenizer.eos_id]
            answers.append(str(tokenizer.decode(kept)))
    return answers


hung_up: set[str] = set()
"""Responses at which the judge has closed a connection."""


def find_verdict(response: str) -> str | int | None:
    """Return what the judge answers to a response."""
    return VERDICTS.get(response.strip()[-1:], "[[A!=B]]")


class Judge(BaseHTTPRequestHandler):
    """A judge behind OpenAI's API, by `VERDICTS`; whoever asks again after no answer is refused."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response = asked["messages"][-1]["content"].removeprefix("judge ").removesuffix(" please")
        verdict = find_verdict(response)
        if verdict is None and response not in hung_up:
            hung_up.add(response)
            self.close_connection = True
            return
        verdict = verdict or 400
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": verdict}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        completion = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        text = json.dumps({**completion, "usage": usage})
        self.send_response(200 if isinstance(verdict, str) else verdict)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def judging(port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve a judge on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", port), Judge) as server:
        hung_up.clear()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def find_victim(run: Command, word: str) -> psutil.Process:
    """Return the process below a run whose command line has a word, or else the one that notes the last turn."""
    if not word:
        return psutil.Process(int(Path("turns.txt").read_text().split()[-1]))
    found = []
    for process in run.children():
        try:
            found += [process] if any(part.endswith(word) for part in process.cmdline()) else []
        except psutil.Error:
            continue
    return found[-1]


def count_turns() -> int:
    """Return how many turns all episodes have had, those that were lost included."""
    return len(Path("turns.txt").read_text().split())


def test_a_run_ends_with_the_same_bits_though_its_environment_is_killed_in_each_step(kind: str) -> None:
    """Two steps of four episodes; a program that plays is killed in the first step, and what it has started later."""
    config = configure(kind, KINDS[kind].entry)
    whole = coordinator("up", config, "logger.log_dir=whole", timeout_s=WAIT_S)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    tokenizer = load_model_tokenizer(Path("whole/checkpoints/step_1/policy"))
    for step in (1, 2):
        samples = read_step(Path("whole/samples"), step)
        assert len(samples) == 4
        for sample in samples:
            assert (sample.scored.num_turns, sample.scored.failure) == (NUM_TURNS, "")
            assert sample.scored.reward == pytest.approx(KINDS[kind].expect(read_answers(tokenizer, sample)))
            if step == 1:
                continue  # the weights that it begins with are in no checkpoint
            for token_ids, mask, logprobs in branches_of(sample):
                with torch.no_grad():
                    expected = logprobs_of(model_after(1, "whole"), token_ids)
                torch.testing.assert_close(logprobs[mask], expected[mask], atol=2e-5, rtol=0)
    assert any(step.metrics["grad_norm"] > 0 for step in steps_of("whole"))
    per_step = 4 * NUM_TURNS
    assert count_turns() == 2 * per_step
    Path("turns.txt").write_text("")
    held = Path("held")
    with Command("coordinator", "up", config) as run:
        # The turn at which an episode is killed: the first of all, and once it was lost and all of the first step were
        # played, the first of the second step's second episode.
        for number, word in zip((1, 1 + per_step + NUM_TURNS + 1), KINDS[kind].victims, strict=True):
            held.write_text(str(number))
            wait_until(
                lambda number=number: Path("turns.txt").exists() and count_turns() >= number,  # type: ignore[misc]
                lambda number=number: f"turn {number} in:\n{run.output()}",  # type: ignore[misc]
                died=lambda: run.process.poll() is not None,
            )
            find_victim(run, word).send_signal(signal.SIGKILL)
        held.unlink()
        assert run.wait() == 0, run.output()
        assert "environment 'theirs'" not in run.output(), "the environment has not failed on anything"
    log = Path("run/logs/rollout-0.log").read_text()
    assert log.count("the program that plays episodes has ended (killed by SIGKILL), with 1 in play") == 2, log
    assert count_turns() == 2 * per_step + 2, "two turns were lost"
    assert weights_of("run/checkpoints/step_2") == weights_of("whole/checkpoints/step_2")
    for one, other in zip(steps_of("run"), steps_of("whole"), strict=True):
        assert deterministic(one.metrics) == deterministic(other.metrics)


def judged_by(name: str, url: str) -> dict[str, Any]:
    """Write an environment of a kind that has a judge at an address; return its entry of `env`."""
    if name == "verifiers":
        Path("judged_v1.py").write_text(JUDGED)
        judge = {"id": "judged-v1", "name": "verdict", "base_url": url, "model": "judge", "api_key_var": "NO_KEY"}
        return {"id": "judged-v1", "args": {"task": {"judges": [judge]}}}
    rows = [{"input": [{"role": "user", "content": str(number)}]} for number in range(4)]
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"responses_create_params": row, "expected_answer": "0"}) + "\n" for row in rows)
    )
    Path("prompt.txt").write_text("judge {generated_answer} please")
    server = "equivalence_llm_judge"
    model = {"entrypoint": "app.py", "base_url": url, "api_key": "none", "model": "judge"}
    model |= {"return_token_id_information": False, "uses_reasoning_parser": False}
    prompt = str(Path("prompt.txt").absolute())
    named = {"judge_model_server": {"name": "judge_model"}, "judge_prompt_template_fpath": prompt}
    data_sets = [{"name": "rows", "type": "example", "jsonl_fpath": "rows.jsonl"}]
    return {
        "config": {
            "config_paths": [f"resources_servers/{server}/configs/{server}.yaml"],
            server: {"resources_servers": {server: named}},
            f"{server}_simple_agent": {"responses_api_agents": {"simple_agent": {"datasets": data_sets}}},
            "judge_model": {"responses_api_models": {"vllm_model": model}},
        }
    }


@pytest.mark.parametrize("name", ["verifiers", "nemo_gym"])
def test_a_judge_that_fails_costs_its_episodes_and_no_run(name: str) -> None:
    """Rewards are its verdicts. What is none, NeMo Gym's own server takes for a no, and verifiers for a failure."""
    skip_absent(name)
    with judging() as judge:
        packaged = judged_by(name, f"http://127.0.0.1:{judge.server_port}/v1")
        over = {"grpo": {"num_generations_per_prompt": 8}, "policy": {"train_global_batch_size": 16}}
        run = coordinator("up", configure(name, packaged, on_error="drop", **over), timeout_s=WAIT_S)
        assert run.returncode == 0, run.stdout + run.stderr
    tokenizer = load_model_tokenizer(Path("run/checkpoints/step_1/policy"))
    values: dict[str | int | None, float | None] = {"[[A=B]]": 1.0, "[[A!=B]]": 0.0, None: None, 400: None}
    values["why?"] = 0.0 if name == "nemo_gym" else None
    verdicts = set()
    for step, journaled in zip((1, 2), steps_of("run"), strict=True):
        num_dropped = 0
        for sample in read_step(Path("run/samples"), step):
            (answer,) = read_answers(tokenizer, sample)
            verdict = find_verdict(answer)
            verdicts.add(verdict)
            num_dropped += values[verdict] is None
            assert sample.scored.dropped == (values[verdict] is None), (answer, sample.scored)
            assert sample.scored.reward == (values[verdict] or 0.0)
            assert bool(sample.scored.failure) == sample.scored.dropped
        assert journaled.metrics.get("environment_dropped", 0.0) == num_dropped
    assert verdicts == {*values}, "all kinds of answers are seen"


NUM_VERDICTS = 3
"""Of four episodes of the first step."""
KILLED = {"verifiers": (2, WAIT_S), "nemo_gym": (1, 240.0)}
"""Of each kind with a judge: the steps of the run, and the limit of an episode."""


@pytest.mark.parametrize("name", KILLED)
def test_a_judge_that_is_killed_for_good_costs_its_episodes_and_is_named(name: str) -> None:
    """Its last verdicts count. An episode of verifiers fails at once; NeMo Gym asks until its time is over."""
    skip_absent(name)
    num_steps, timeout_s = KILLED[name]
    program = [sys.executable, "-c", DYING_JUDGE, str(NUM_VERDICTS)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as judge:
        assert judge.stdout is not None
        url = f"http://127.0.0.1:{int(judge.stdout.readline())}/v1"
        try:
            config = configure(name, judged_by(name, url), "drop", grpo={"max_num_steps": num_steps})
            limits = [f"env.theirs.timeout_s={timeout_s}", "env.theirs.max_concurrency=4"]
            run = coordinator("up", config, *limits, timeout_s=WAIT_S)
            assert run.returncode == 0, run.stdout + run.stderr
            assert judge.wait(WAIT_S) == -signal.SIGKILL
        finally:
            judge.kill()
    samples = [sample for step in range(1, num_steps + 1) for sample in read_step(Path("run/samples"), step)]
    dropped = [sample.scored for sample in samples if sample.scored.dropped]
    assert len(samples) == 4 * num_steps
    assert len(dropped) == len(samples) - NUM_VERDICTS
    assert [sample.scored.reward for sample in samples if not sample.scored.dropped] == [1.0] * NUM_VERDICTS
    said = {scored.failure for scored in dropped}
    log = Path("run/logs/rollout-0.log").read_text()
    if name == "verifiers":
        assert all(f"(judge: {url})" in failure for failure in said), said
    else:
        assert f"no answer from judge_model at {url}: what asks it waits" in log, log


def describe_choice(number: int) -> str:
    """Return a row of NeMo Gym's `mcqa`: an answer that a tiny model can give."""
    request = {"input": [{"role": "user", "content": f"{number}"}]}
    options = [{"A": digit} for digit in "02468"] + [{"B": digit} for digit in "13579"]
    row = {"responses_create_params": request, "options": options, "expected_answer": "A"}
    return json.dumps({**row, "template_metadata": {"output_regex": "([0-9])"}}) + "\n"


CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
NEW_MODEL = {**TINY["policy"]["new_model"], "characters": CHARACTERS}


def list_small_settings() -> list[str]:
    """Return settings that make a run small, as they are typed: its model, its lengths, and its one step."""
    settings = {
        "policy.new_model": NEW_MODEL,
        **{f"policy.{key}": TINY["policy"][key] for key in ("model_name", "precision", "optimizer")},
        "policy.max_total_sequence_length": 512,
        "policy.generation.max_new_tokens": 6,
        "policy.generation.transformers_cfg": {"num_slots": 16},
        **{f"grpo.{key}": value for key, value in {"max_num_steps": 1, "val_period": 0, "seed": 7}.items()},
        **{f"logger.{key}": value for key, value in TINY["logger"].items()},
        **{f"cluster.{key}": value for key, value in TINY["cluster"].items()},
    }
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


@pytest.mark.parametrize("name", ["openenv", "nemo_gym"])
def test_what_the_page_says_is_checked_as_it_stands_and_runs(name: str) -> None:
    """Its configuration, with a tiny model and what is installed in the folders that it names; then a step of it."""
    python = Path(skip_absent(name))
    page = (DOCS / "packaged_environments.md").read_text()
    text, *more = [block for block in code_of(page, "yaml") if f"{name}:" in block]
    if name == "openenv":
        Path("echo").symlink_to(python.parents[1])
        (command,) = [line for line in page.splitlines() if line.startswith("echo/bin/openenv ")]
        subprocess.run(shlex.split(command), check=True, capture_output=True, timeout=WAIT_S)
    else:
        Path("gym").symlink_to(python.parents[1])
        Path("train.jsonl").write_text("".join(map(describe_choice, range(16))))
        Path("validation.jsonl").write_text(describe_choice(16))
    Path("page.yaml").write_text(text)
    settings = yaml.safe_load(text)
    write_new_model(Path(settings["policy"]["model_name"]), msgspec.convert(NEW_MODEL, NewModel))
    for number, block in enumerate(more):  # they change parts of the first
        Path(f"more-{number}.yaml").write_text(yaml.safe_dump(merged(settings, yaml.safe_load(block))))
    for path in ("page.yaml", *(f"more-{number}.yaml" for number in range(len(more)))):
        checked = coordinator("check", path, timeout_s=WAIT_S)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "OK" in checked.stdout, checked.stdout
    assert len(more) == (name == "nemo_gym")
    run = coordinator("up", "page.yaml", *list_small_settings(), timeout_s=WAIT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    samples = read_step(Path("run/samples"), 1)
    assert len(samples) == 64
    assert {sample.scored.failure for sample in samples} == {""}
    assert len({sample.scored.reward for sample in samples}) > 1
    assert {sample.scored.num_turns for sample in samples} == {2 if name == "openenv" else 1}
