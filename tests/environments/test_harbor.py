"""Tasks of Harbor 0.25 in sandboxes, played by its own trials, agents and verifier, over a real engine.

`tox -e families` installs Harbor apart, on Python 3.12; `TANDEM_HARBOR` names the interpreter there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.config import build_config
from tandem.config.schema.environments import HarborConfig
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets import load_problems
from tandem.samples.packaged_environments.tasks import play_command
from tests.harness.runs.pages_harness import code_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import rollout_harness  # type: ignore[import-not-found]
from agents_harness import assert_probable  # type: ignore[import-not-found]

PYTHON = os.environ.get("TANDEM_HARBOR", "")
pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="Harbor is not installed: tox -e families"),
    pytest.mark.timeout(900),
]
WAIT_S = 600.0
TASK = """
schema_version = "1.4"
[agent]
timeout_sec = 600.0
[verifier]
timeout_sec = 600.0
[environment]
memory_mb = 512
storage_mb = 32
"""
DOCKERFILE = "FROM debian:12\nENV LIMIT=8\nWORKDIR /app\nCOPY start.txt ./answer.txt\n"
VERIFIER = """#!/bin/bash
cd /app
even=$(tr -cd 02468 < answer.txt | wc -c)
test "$even" -gt "$LIMIT" && even=$LIMIT
echo "{\\"reward\\": 0.$even, \\"length\\": $(wc -c < answer.txt)}" > /logs/verifier/reward.json
"""
AGENT = '''
"""Asks the policy twice, and writes its answers to a file of the sandbox."""

import asyncio
import json
import shlex
import urllib.request
from pathlib import Path

from harbor.agents.base import BaseAgent


class Writer(BaseAgent):
    def __init__(self, *args, api_base, line="wc -c < answer.txt", **kwargs):
        super().__init__(*args, **kwargs)
        self.api_base, self.line = api_base, line

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
            result = await environment.exec(f"printf %s {shlex.quote(text)} >> answer.txt; {self.line}")
            assert result.return_code == 0, result
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result.stdout.strip()}]
'''


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout_harness, "WAIT_S", WAIT_S)  # Harbor is imported for some seconds of a core
    Path("writing.py").write_text(AGENT)
    for number in range(3):
        write_task(f"tasks/t{number}", str(number))


def write_task(folder: str, instruction: str, **files: str) -> None:
    """Write a task in Harbor's form: its answer has even digits."""
    contents = {
        "task.toml": TASK,
        "instruction.md": instruction,
        "environment/Dockerfile": DOCKERFILE,
        "environment/start.txt": "2",
        "tests/test.sh": VERIFIER,
        "solution/solve.sh": "#!/bin/bash\nprintf 468 >> answer.txt\n",
    }
    for name, text in {**contents, **files}.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def expect(answers: str) -> tuple[float, float]:
    """Return the reward and the length that the verifier of `write_task` states."""
    return float(f"0.{min(8, len(re.findall('[02468]', '2' + answers)))}"), 1.0 + len(answers)


def settings_of(**changes: Any) -> dict[str, Any]:
    return {"tasks": "tasks", "python": PYTHON, "agent": "writing:Writer", **changes}


def list_problems(**changes: Any) -> list[Problem]:
    config = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model"},
            "data": {"num_validation": 1},
            "env": {"theirs": {"harbor": settings_of(**changes)}},
        }
    )
    sets = load_problems(config)
    return sorted([*sets.train, *sets.validation], key=lambda problem: problem.problem_id)


def problem_of(number: int) -> Problem:
    return Problem(problem_id="p", question=str(number), answer="", metadata={"task": f"tasks/t{number}"})


@contextlib.contextmanager
def rollout_of(place: Path, num_at_once: int = 16, on_error: str = "fail", **changes: Any) -> Iterator[Any]:
    entry = {"harbor": settings_of(**changes), "timeout_s": WAIT_S, "max_concurrency": num_at_once, "num_workers": 1}
    rollout = rollout_harness.Rollout(place, None, data={"dataset_name": "harbor"}, on_error=on_error, **entry)
    try:
        yield rollout
    finally:
        rollout.service.close()


def answers_of(tokenizer: Any, arrays: SampleBatch) -> str:
    """Return what the policy answered, all turns together."""
    tokens = arrays.token_ids_T[arrays.loss_mask_T].tolist()
    return str(tokenizer.decode([token for token in tokens if token != tokenizer.eos_id]))


def list_programs(name: str) -> list[psutil.Process]:
    """Return the processes below this one that run one of the programs."""
    programs = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith(name) for word in process.cmdline()):
                programs.append(process)
    return programs


@contextlib.contextmanager
def endpoint(answer: Callable[[dict[str, Any]], str] | None = None) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the address of a server in the place of a rollout's, and what it is posted."""
    posted: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            place = self.path.rpartition("/")[2]
            text = "{}"
            if place == "completions":
                assert answer is not None
                message = {"role": "assistant", "content": answer(json.loads(body))}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                whole = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
                text = json.dumps({**whole, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
            posted.append((place, body if place == "error" else json.loads(body)))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/of-the-episode", posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def play(task: str, answer: Callable[[dict[str, Any]], str] | None = None, **changes: Any) -> tuple[str, Any]:
    """Play an episode by the program alone; return where it posts, and what."""
    command = play_command(msgspec.convert(settings_of(**changes), HarborConfig))
    with endpoint(answer) as (url, posted):
        order = {"session_url": url, "base_url": f"{url}/v1", "problem": {"metadata": {"task": task}}}
        subprocess.run(command, input=json.dumps(order) + "\n", text=True, timeout=WAIT_S, check=True)
    return posted[-1]


def test_tasks_of_a_folder_are_the_problems() -> None:
    problems = list_problems()
    assert [(each.problem_id, each.question) for each in problems] == [("t0", "0"), ("t1", "1"), ("t2", "2")]
    write_task("held/out", "5")
    apart = list_problems(tasks="tasks/t0", validation_tasks="held")
    assert [each.problem_id for each in apart] == ["t0", "validation-out"]


def test_episodes_have_the_verifiers_rewards_and_are_repeated(tmp_path: Path) -> None:
    with rollout_of(tmp_path, num_at_once=1) as rollout:
        groups = [rollout.group(number, [7, 8], problem_of(number)) for number in range(2)]
        samples, again = rollout.run(*groups), rollout.run(*groups)
        for key, (scored, arrays) in samples.items():
            assert_probable(arrays, {0: rollout.model})
            reward, length = expect(answers_of(rollout.tokenizer, arrays))
            assert (scored.reward, scored.num_turns) == (pytest.approx(reward), 2)
            assert scored.components["length"] == length
            assert again[key][0].reward == scored.reward
            for name in ("token_ids_T", "generation_logprobs_T"):
                assert getattr(again[key][1], name).tobytes() == getattr(arrays, name).tobytes()
    assert len({scored.reward for scored, _ in samples.values()}) > 1
    assert not list_programs("play_harbor.py")
    assert not list_programs("enclose.py")


LIES = {
    "echo nan > $reward": "Non-finite reward nan",
    "echo 1e300 > $reward": "the reward is 1e+300, not a number from -1e+12 to 1e+12",
    "echo much > $reward": "Failed to parse rewards",
    "true": "RewardFileNotFoundError",
    "head -c 104857600 /dev/zero > $reward": "Failed to parse rewards",
    "yes | head -c 104857600; echo 0.5 > $reward": "RewardFileEmptyError",  # its files are full of what it printed
    "yes | head -c 10485760; echo 0.5 > $reward": "",
    "echo 0.5 > $reward": "",
}
"""What is said of each verifier; nothing where it is honest."""


def test_a_lie_costs_its_episode_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rewards that are none, and 100 MB, in episodes that are played at once; a task may write 32 MB."""
    for number, line in enumerate(LIES):
        verifier = f"#!/bin/bash\nreward=/logs/verifier/reward.txt\n{line}\n"
        write_task(f"tasks/t{number}", "0", **{"tests/test.sh": verifier})
    with rollout_of(tmp_path, on_error="zero") as rollout:
        samples = rollout.run(*(rollout.group(number, [7], problem_of(number)) for number in range(len(LIES))))
    said = {line: samples[number, 0][0] for number, line in enumerate(LIES)}
    assert {line: (scored.reward, bool(scored.failure)) for line, scored in said.items()} == {
        line: (0.0 if reason else 0.5, bool(reason)) for line, reason in LIES.items()
    }, said
    assert all(LIES[line] in scored.failure and len(scored.failure) < 1000 for line, scored in said.items()), said
    output = capfd.readouterr()
    assert len(output.out + output.err) < 200_000


@pytest.mark.parametrize("name", ["enclose.py", "play_harbor.py"])
def test_what_is_killed_costs_nothing_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    with rollout_of(tmp_path, kwargs={"line": "sleep 2; wc -c < answer.txt"}) as rollout:

        def kill_one() -> None:
            deadline = time.monotonic() + WAIT_S
            while len(list_programs("enclose.py")) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            list_programs(name)[-1].send_signal(signal.SIGKILL)

        killing = threading.Thread(target=kill_one)
        killing.start()
        samples = rollout.run(*(rollout.group(number, [7, 8], problem_of(number)) for number in range(3)))
        killing.join()
        assert {scored.failure for scored, _ in samples.values()} == {""}
        for scored, arrays in samples.values():
            assert scored.reward == pytest.approx(expect(answers_of(rollout.tokenizer, arrays))[0])
    assert not list_programs("play_harbor.py")
    assert not list_programs("enclose.py")


def test_an_agents_commands_see_nothing_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret of the run")
    (tmp_path / "keys").write_text("secret of the run")
    probe = (
        f"env > seen; ls -a /root /home /tmp {tmp_path} >> seen 2>&1; cat {tmp_path}/keys >> seen 2>&1;"
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline >> seen 2>/dev/null;"
        "for port in $(seq 1024 64 65535); do (: < /dev/tcp/127.0.0.1/$port) 2>/dev/null && echo open >> seen; done;"
        "(: < /dev/tcp/192.0.2.1/80) 2>> seen;"
        "! grep -aE 'secre[t]|of-the-episod[e]|^open' seen && grep -ac unreachable seen"
    )
    place, body = play("tasks/t0", lambda request: "4" if len(request["messages"]) < 3 else "6", kwargs={"line": probe})
    assert (place, body["reward"]) == ("reward", 0.3), body


def test_a_variable_of_the_run_is_there_where_a_key_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "known")
    table = '[verifier.env]\nGRADER_KEY = "${GRADER_KEY}"\n'
    verifier = '#!/bin/bash\n[ "$GRADER_KEY" = known ] && echo 1 > /logs/verifier/reward.txt\n'
    write_task("tasks/t0", "0", **{"task.toml": TASK + table, "tests/test.sh": verifier})
    assert play("tasks/t0", agent="oracle", variables=["GRADER_KEY"])[1]["reward"] == 1.0
    place, text = play("tasks/t0", agent="oracle")
    assert (place, text) == ("error", "ValueError: Environment variable 'GRADER_KEY' not found in host environment")


@pytest.mark.parametrize(
    ("solution", "expected"), [("printf 468 >> answer.txt", (0.4, 4.0)), ("printf 1357 > answer.txt", (0.0, 4.0))]
)
def test_a_reward_is_that_of_harbors_own_trial(solution: str, expected: tuple[float, float]) -> None:
    """Harbor's command line runs its trial of the task's own solution; so does the program that plays."""
    write_task("tasks/t0", "0", **{"solution/solve.sh": f"#!/bin/bash\n{solution}\n"})
    programs = str(Path(play_command(msgspec.convert(settings_of(), HarborConfig))[1]).parent)
    settings = msgspec.to_builtins(msgspec.convert(settings_of(), HarborConfig))
    trial = {
        "task": {"path": "tasks/t0"},
        "trials_dir": "trials",
        "trial_name": "one",
        "agent": {"name": "oracle"},
        "environment": {"import_path": "harbor_sandbox:SandboxEnvironment", "kwargs": {"settings": settings}},
    }
    Path("trial.json").write_text(json.dumps(trial))
    subprocess.run(
        [str(Path(PYTHON).with_name("harbor")), "trial", "start", "--config", "trial.json"],
        env={**os.environ, "PYTHONPATH": programs, "HARBOR_TELEMETRY": "0"},
        check=True,
        timeout=WAIT_S,
    )
    own = json.loads(Path("trials/one/result.json").read_text())["verifier_result"]["rewards"]
    place, body = play("tasks/t0", agent="oracle")
    assert place == "reward"
    assert {"reward": body["reward"], **body["components"]} == own == {"reward": expected[0], "length": expected[1]}


def test_the_commands_of_the_page_make_a_task_that_its_solution_solves() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "packaged_environments.md").read_text()
    section = page[page.index("## Harbor") :]
    (installing,) = re.findall(r"pip install harbor==(\S+)", section)
    version = [PYTHON, "-c", "from importlib import metadata; print(metadata.version('harbor'))"]
    assert subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip() == installing
    shutil.rmtree("tasks")
    (script,) = code_of(section, "bash")
    subprocess.run(["bash", "-c", script], check=True)
    (text,) = code_of(section, "yaml")
    settings = yaml.safe_load(text)
    settings["env"]["terminal"]["harbor"]["python"] = PYTHON
    settings["data"] = {"num_validation": 0}
    settings["grpo"]["val_period"] = 0
    (problem,) = load_problems(build_config(settings)).train
    assert (problem.problem_id, problem.question) == (
        "double",
        "Write twice the number in /app/number.txt to /app/answer.txt.\n",
    )
    task = problem.metadata["task"]
    assert play(task, agent="oracle") == ("reward", {"reward": 1.0, "correct": True, "components": {}})
    assert play(task, agent="nop") == ("reward", {"reward": 0.0, "correct": False, "components": {}})


def test_steps_and_a_verifier_apart_are_harbors() -> None:
    """Two steps, whose rewards are averaged; and a verifier with a sandbox of its own, which has what it names."""
    steps = TASK + "".join(f'[[steps]]\nname = "{name}"\n' for name in ("first", "second"))
    write_task("tasks/t0", "0", **{"task.toml": steps})
    for name, digits in (("first", "46"), ("second", "8")):
        folder = Path("tasks/t0/steps", name)
        (folder / "solution").mkdir(parents=True)
        (folder / "instruction.md").write_text(name)
        (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\nprintf {digits} >> answer.txt\n")
    place, body = play("tasks/t0", agent="oracle")
    assert (place, body["reward"], body["components"]) == ("reward", pytest.approx(0.35), {"length": 3.5})
    apart = TASK.replace("[agent]", 'artifacts = ["/app/answer.txt"]\n[agent]')
    apart = apart.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    image = "FROM debian:12\nENV LIMIT=8\nCOPY test.sh /tests/\n"
    write_task("tasks/t1", "1", **{"task.toml": apart, "tests/Dockerfile": image})
    place, body = play("tasks/t1", agent="oracle")
    assert (place, body["reward"], body["components"]) == ("reward", 0.4, {"length": 4.0}), body


@pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus 2 needs tmux")
def test_terminus_2_plays_in_a_terminal_of_the_sandbox() -> None:
    """Harbor's own agent, unchanged, with the answers of a scripted policy."""
    screens: list[str] = []

    def answer(request: dict[str, Any]) -> str:
        assert "temperature" not in request
        screens.append(request["messages"][-1]["content"])
        keys = ["cat answer.txt; echo; printf 46 >> answer.txt\n", "cat answer.txt\n", ""][len(screens) - 1]
        commands = [{"keystrokes": keys, "duration": 2.0}] if keys else []
        done = len(screens) > 1
        return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})

    place, body = play("tasks/t0", answer, agent="terminus-2", kwargs={"max_turns": 5})
    assert (place, body["reward"], body["components"]) == ("reward", 0.3, {"length": 3.0})
    assert "0" in screens[0]
    assert "246" in screens[2]


@pytest.mark.parametrize(
    ("files", "changes", "reason"),
    [
        (
            {"task.toml": TASK + '[verifier.env]\nKEY = "${SOME_API_KEY}"\n'},
            {},
            "tasks/t1: Environment variable 'SOME_API_KEY' not found in host environment; is it one of variables?",
        ),
        ({}, {"tasks": "nowhere"}, "env.theirs.harbor: tasks: there is no folder nowhere"),
        ({}, {"agent": "nobody"}, "Agent name nobody is not valid"),
        ({}, {"agent": "mini-swe-agent"}, "agent: mini-swe-agent runs in the sandbox"),
        ({}, {"root": "nowhere"}, "root: nowhere has no root file system"),
        ({"environment/Dockerfile": "FROM a\nRUN apt-get install x"}, {}, "tasks/t1: its Dockerfile has RUN apt-get"),
        ({"environment/docker-compose.yaml": ""}, {}, "tasks/t1: its environment has a docker-compose.yaml"),
        ({"task.toml": TASK + "gpus = 1"}, {}, "tasks/t1: Task requires 1 GPU(s)"),
        ({"task.toml": TASK + 'network_mode = "allowlist"'}, {}, "tasks/t1: network_mode='allowlist' is not supported"),
        ({"task.toml": TASK.replace("[agent]", '[agent]\nuser = "agent"')}, {}, "tasks/t1: it names the user agent"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_line(
    files: dict[str, str], changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden")
    write_task("tasks/t1", "1", **files)
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        list_problems(**changes)
    assert "\n" not in str(refused.value)
