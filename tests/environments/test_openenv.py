"""Environments of OpenEnv 0.10 behind their own server: one that its own template makes, and one with tools.

`tox -e families` installs OpenEnv apart; `TANDEM_OPENENV` names the interpreter there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem, SamplesFinished
from tandem.config import build_config
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets import load_problems
from tandem.samples.packaged_environments.programs import containers, play_openenv
from tests.harness.interpreter_images import make_image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from agents_harness import assert_probable  # type: ignore[import-not-found]
from rollout_harness import Rollout  # type: ignore[import-not-found]

pytest.importorskip("websockets", reason="websockets is not installed")
PYTHON = os.environ.get("TANDEM_OPENENV", "")
pytestmark = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="OpenEnv is not installed: tox -e families")
WAIT_S = 300.0
ECHO: dict[str, Any] = {
    "package": "my_echo.server.app:app",
    "python": PYTHON,
    "observation": "message_length",
    "max_turns": 2,
}
IMAGE = f"localhost/tandem-test-echo-{os.getpid()}:1"
CONTAINED: dict[str, Any] = {"image": IMAGE, "observation": "message_length", "max_turns": 2}
GONE_S = 20.0
"""Longest time for Docker to notice that its client has ended, and to remove a container."""
TOOLS = '''
"""An environment with one tool, and a reward for each call."""

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Adder(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adder")

        @server.tool
        def add(x: int, y: int) -> int:
            """Add two numbers."""
            return x + y

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

    @property
    def state(self):
        return State()


app = create_app(Adder, CallToolAction, CallToolObservation, env_name="adder", max_concurrent_envs=2)
'''
LATE = '''
"""The environment of the template, whose steps take for ever in the episodes of one seed."""

import time

from my_echo.models import MyEchoAction, MyEchoObservation
from my_echo.server.my_echo_environment import MyEchoEnvironment
from openenv.core.env_server.http_server import create_app


class Late(MyEchoEnvironment):
    def reset(self, seed=None, **kwargs):
        self.is_late = seed == 1
        return super().reset(seed=seed, **kwargs)

    def step(self, action, **kwargs):
        if self.is_late:
            time.sleep(3600)
        return super().step(action)


app = create_app(Late, MyEchoAction, MyEchoObservation, env_name="late", max_concurrent_envs=2)
'''
LIAR = '''
"""The environment of the template, which is honest in the episodes of one seed alone."""

import os
from typing import Any

from my_echo.models import MyEchoAction, MyEchoObservation
from my_echo.server.my_echo_environment import MyEchoEnvironment
from openenv.core.env_server.http_server import create_app


class Said(MyEchoObservation):
    message_length: Any = 0


REWARDS = {"nan": float("nan"), "huge": 1e300, "digits": 10**400}


class Liar(MyEchoEnvironment):
    def reset(self, seed=None, **kwargs):
        self.kind = seed
        return super().reset(**kwargs)

    def step(self, action, **kwargs):
        observation = Said(**super().step(action).model_dump())
        if self.kind in REWARDS:
            observation.reward = REWARDS[self.kind]
        if self.kind in ("long", "longer"):
            observation.message_length = "1" * ((20 if self.kind == "long" else 100) << 20)
        if self.kind == "prints":
            for _ in range(1600):
                os.write(1, b"x" * (1 << 16))
        if self.kind == "raises":
            raise RuntimeError("wrong " * 100_000)
        if self.kind == "ends":
            os._exit(3)
        return observation


app = create_app(Liar, MyEchoAction, Said, env_name="liar", max_concurrent_envs=16)
'''
HANGING = {
    "hung_at_import": "import time\n\ntime.sleep(1e6)\n",
    "hung_in_answers": """
import asyncio


async def app(scope, receive, send):
    if scope["type"] == "http":
        await asyncio.sleep(1e6)
""",
}
"""Applications whose server never answers: one has never begun to listen, the other accepts connections."""
BELIEVED = {
    "nan": "",  # OpenEnv sends it as null, which is no reward
    "huge": "the reward is 2e+300, not a number from -1e+12 to 1e+12",
    "digits": "too large",
    "long": "the policy's endpoint answered 413",
    "longer": "the session ended during step",
    "raises": "step: wrong wrong",
    "ends": "is gone or hangs",
    "prints": "",
    "honest": "",
}
"""What is said of each lie; nothing where there is none."""
OWN_REWARDS = """
import json, sys
from my_echo.models import MyEchoAction
from my_echo.server.my_echo_environment import MyEchoEnvironment
rewards = []
for replies in json.load(sys.stdin):
    environment = MyEchoEnvironment()
    environment.reset()
    rewards.append(sum(environment.step(MyEchoAction(message=reply)).reward for reply in replies))
print(json.dumps(rewards))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the environments; the first is what OpenEnv's own template makes."""
    made = tmp_path_factory.mktemp("environments")
    command = [str(Path(PYTHON).with_name("openenv")), "init", "my_echo"]
    subprocess.run(command, cwd=made, check=True, capture_output=True, timeout=WAIT_S)
    (made / "adder.py").write_text(TOOLS)
    (made / "late.py").write_text(LATE)
    (made / "liar.py").write_text(LIAR)
    for name, source in HANGING.items():
        (made / f"{name}.py").write_text(source)
    return made


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def list_problems(**settings: Any) -> list[Problem]:
    config = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model"},
            "data": {"num_train": 3, "num_validation": 1},
            "env": {"theirs": {"openenv": settings}},
        }
    )
    sets = load_problems(config)
    return sorted([*sets.train, *sets.validation], key=lambda problem: problem.problem_id)


@contextlib.contextmanager
def rollout_of(place: Path, num_at_once: int = 16, on_error: str = "fail", **settings: Any) -> Iterator[Any]:
    entry = {"openenv": settings, "timeout_s": WAIT_S, "max_concurrency": num_at_once, "on_error": on_error}
    rollout = Rollout(place, None, data={"dataset_name": "openenv"}, **entry)
    try:
        yield rollout
    finally:
        rollout.service.close()


def find_server() -> psutil.Process:
    """Return the server that a program has started, once it is there."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "uvicorn" in process.cmdline():
                    return process
        time.sleep(0.05)
    raise AssertionError("no server")


def replies_of(rollout: Any, arrays: SampleBatch) -> list[str]:
    """Return the texts of an episode's responses, in order."""
    replies, reply = [], []
    for token, counts in zip(arrays.token_ids_T.tolist(), arrays.loss_mask_T.tolist(), strict=True):
        if counts and token != rollout.tokenizer.eos_id:
            reply.append(token)
        if not counts or token == rollout.tokenizer.eos_id:
            replies += [rollout.tokenizer.decode(reply)] if reply or counts else []
            reply = []
    return replies + ([rollout.tokenizer.decode(reply)] if reply else [])


def test_its_episodes_have_the_rewards_of_the_package_and_are_repeated(tmp_path: Path) -> None:
    problems = list_problems(**ECHO)
    assert [problem.metadata["reset"] for problem in problems] == [{"seed": seed} for seed in range(4)]
    with rollout_of(tmp_path, num_at_once=1, **ECHO) as rollout:
        groups = [rollout.group(number, [7, 8], problem) for number, problem in enumerate(problems[:2])]
        samples, again = rollout.run(*groups), rollout.run(*groups)
        replies = [replies_of(rollout, arrays) for _, arrays in samples.values()]
        for _, arrays in samples.values():
            assert_probable(arrays, {0: rollout.model})
    text = json.dumps(replies)
    ended = subprocess.run([PYTHON, "-c", OWN_REWARDS], input=text, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stderr
    assert [scored.reward for scored, _ in samples.values()] == pytest.approx(json.loads(ended.stdout))
    assert {scored.num_turns for scored, _ in samples.values()} == {2}
    for key, (scored, arrays) in samples.items():
        assert again[key][0].reward == scored.reward
        for name in ("token_ids_T", "generation_logprobs_T"):
            assert getattr(again[key][1], name).tobytes() == getattr(arrays, name).tobytes()


def test_a_server_that_is_killed_or_hangs_costs_nothing_and_takes_no_more_sessions_than_it_may(tmp_path: Path) -> None:
    """The template's server takes one session at a time; six episodes are played at once."""
    problem = Problem(problem_id="p", question="?", answer="", metadata={"reset": {}})
    with rollout_of(tmp_path, **ECHO, step_timeout_s=10) as rollout:
        for number, kind in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            harming = threading.Thread(target=lambda kind=kind: find_server().send_signal(kind))  # type: ignore[misc]
            harming.start()
            samples = rollout.run(*(rollout.group(6 * number + place, [7], problem) for place in range(6)))
            harming.join()
            assert {scored.failure for scored, _ in samples.values()} == {""}
            assert all(scored.num_turns == 2 for scored, _ in samples.values())
    assert not [child for child in psutil.Process().children(recursive=True) if "uvicorn" in child.cmdline()]


@pytest.fixture(scope="module")
def image(folder: Path) -> Iterator[str]:
    """Return the name of an image of the template's environment that Docker has."""
    version = ["docker", "version"]
    if shutil.which("docker") is None or subprocess.run(version, capture_output=True, timeout=WAIT_S).returncode:
        pytest.skip("Docker runs no containers here")
    words = ["-m", "uvicorn", "my_echo.server.app:app", "--host", "0.0.0.0", "--port", str(containers.PORT)]
    make_image(IMAGE, PYTHON, {"app/my_echo": folder / "my_echo"}, words)
    yield IMAGE
    subprocess.run(["docker", "rmi", IMAGE], capture_output=True, timeout=WAIT_S)


def list_containers() -> list[str]:
    """Return the ids of the containers of the image."""
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={IMAGE}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout.split()


def find_child(*words: str) -> psutil.Process | None:
    """Return the process below this one whose command has these words."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if all(any(word in part for part in process.cmdline()) for word in words):
                return process
    return None


@pytest.mark.usefixtures("image")
def test_episodes_in_a_container_have_the_rewards_of_the_package(tmp_path: Path) -> None:
    problems = list_problems(**CONTAINED)
    assert [problem.metadata["reset"] for problem in problems] == [{"seed": seed} for seed in range(4)]
    wait_until_none_runs()
    with rollout_of(tmp_path, num_at_once=1, **CONTAINED, variables={"SECRET_OF_THEIRS": "12345"}) as rollout:
        groups = [rollout.group(number, [7, 8], problem) for number, problem in enumerate(problems[:2])]
        samples = rollout.run(*groups)
        replies = [replies_of(rollout, arrays) for _, arrays in samples.values()]
        (container,) = list_containers()
        client = find_child("docker", "--publish")
        assert client is not None
        (address,) = [word for word in client.cmdline() if word.endswith(f":{containers.PORT}")]
        assert address.startswith("127.0.0.1:"), "only this machine reaches it"
        assert "12345" not in str(client.cmdline()), "what is secret stands in no list of processes"
        printed = subprocess.run(
            ["docker", "inspect", "--format", "{{json .Config.Env}}", container],
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        ).stdout
        assert "SECRET_OF_THEIRS=12345" in json.loads(printed)
        assert not any(entry.startswith("DOCKER_HOST=") for entry in json.loads(printed)), "it has no other variables"
    text = json.dumps(replies)
    ended = subprocess.run([PYTHON, "-c", OWN_REWARDS], input=text, capture_output=True, text=True, timeout=WAIT_S)
    assert [scored.reward for scored, _ in samples.values()] == pytest.approx(json.loads(ended.stdout))
    wait_until_none_runs()


def wait_until_none_runs() -> None:
    """Wait until no container of the image is there."""
    deadline = time.monotonic() + GONE_S
    while running := list_containers():
        assert time.monotonic() < deadline, f"still there: {running}"
        time.sleep(0.1)


@pytest.mark.usefixtures("image")
def test_a_container_that_is_killed_costs_nothing_and_none_outlives_what_started_it(tmp_path: Path) -> None:
    """Killed are the container, Docker's client, and the program that plays."""
    problem = Problem(problem_id="p", question="?", answer="", metadata={"reset": {}})

    def harm(kind: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            words = ("play_openenv.py", "play") if kind == "player" else ("docker", "--publish")
            if (running := list_containers()) and (process := find_child(*words)) is not None:
                if kind == "container":
                    subprocess.run(["docker", "kill", running[0]], capture_output=True, timeout=WAIT_S)
                else:
                    process.kill()
                return
            time.sleep(0.05)

    with rollout_of(tmp_path, **CONTAINED) as rollout:
        for number, kind in enumerate(("container", "client", "player")):
            harming = threading.Thread(target=harm, args=(kind,))
            harming.start()
            samples = rollout.run(*(rollout.group(6 * number + place, [7], problem) for place in range(6)))
            harming.join()
            assert {scored.failure for scored, _ in samples.values()} == {""}
            assert all(scored.num_turns == 2 for scored, _ in samples.values())
        assert len(list_containers()) == 1
    wait_until_none_runs()


@pytest.mark.usefixtures("image")
def test_an_image_that_is_not_to_be_had_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"env\.theirs\.openenv: image: cannot run 'localhost:9/none:1': ") as refused:
        list_problems(image="localhost:9/none:1")
    assert "\n" not in str(refused.value)


def test_without_docker_an_image_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"env\.theirs\.openenv: image: docker is not installed$"):
        list_problems(**CONTAINED)
    fake = tmp_path / "docker"
    fake.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match=r"docker runs no containers here: Cannot connect to the Docker daemon$"):
        list_problems(**CONTAINED)


def test_a_late_answer_is_a_failure_of_its_episode_alone(tmp_path: Path) -> None:
    problems = [Problem(problem_id="p", question="?", answer="", metadata={"reset": {"seed": seed}}) for seed in (1, 2)]
    with rollout_of(tmp_path, on_error="zero", **{**ECHO, "package": "late:app", "step_timeout_s": 10}) as rollout:
        samples = rollout.run(*(rollout.group(number, [7], problem) for number, problem in enumerate(problems)))
    (late, _), (other, _) = (samples[key] for key in sorted(samples))
    assert "step took longer than 10 s" in late.failure
    assert (other.failure, other.num_turns) == ("", 2)


def test_a_lie_costs_its_episode_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rewards that are none, texts of 20 and of 100 MB, and a server that ends, in episodes that are played at once."""
    problems = [
        Problem(problem_id=kind, question="?", answer="", metadata={"reset": {"seed": kind}}) for kind in BELIEVED
    ]
    with rollout_of(tmp_path, on_error="zero", **{**ECHO, "package": "liar:app"}) as rollout:
        samples = rollout.run(*(rollout.group(number, [7], problem) for number, problem in enumerate(problems)))
    said = {problems[group].problem_id: scored.failure for (group, _), (scored, _) in samples.items()}
    for kind, reason in BELIEVED.items():
        assert reason in said[kind] if reason else not said[kind], (kind, said[kind])
        assert len(said[kind]) < 1000
    output = capfd.readouterr()
    assert "more characters not shown" in output.out + output.err or len(output.out + output.err) < 200_000


def test_a_server_whose_port_is_taken_meanwhile_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], play_openenv.find_port()])
        monkeypatch.setattr(play_openenv, "find_port", lambda: next(ports))
        settings = {**ECHO, "url": None, "variables": {}}

        async def serve() -> bool:
            server = play_openenv.OpenEnvServer(settings)
            try:
                await server.start()
                return await server.is_healthy()
            finally:
                await server.close()

        assert asyncio.run(serve())
    assert next(ports, None) is None


def test_a_server_elsewhere_that_is_started_anew_costs_nothing(tmp_path: Path) -> None:
    """It is gone when the first episode begins, and once more in their midst."""
    port = play_openenv.find_port()
    words = [PYTHON, "-m", "uvicorn", "my_echo.server.app:app", "--port", str(port)]
    problem = Problem(problem_id="p", question="?", answer="", metadata={"reset": {}})
    settings = {"observation": "message_length", "max_turns": 2, "url": f"http://127.0.0.1:{port}"}
    servers: list[subprocess.Popen[bytes]] = []
    with rollout_of(tmp_path, **settings) as rollout:
        try:
            rollout.start(*(rollout.group(number, [7], problem) for number in range(6)))
            servers.append(subprocess.Popen(words))
            while len([1 for message, _ in rollout.context.sent if isinstance(message, SamplesFinished)]) < 1:
                rollout.service.work()
            servers[0].kill()
            servers.append(subprocess.Popen(words))
            samples = rollout.finish()
        finally:
            for server in servers:
                server.kill()
                server.wait()
    assert len(samples) == 6
    assert {(scored.failure, scored.num_turns) for scored, _ in samples.values()} == {("", 2)}


def test_an_observation_without_the_field_is_a_failure_of_its_episode(tmp_path: Path) -> None:
    problem = Problem(problem_id="p", question="?", answer="", metadata={"reset": {}})
    with rollout_of(tmp_path, on_error="zero", **{**ECHO, "observation": "nothing"}) as rollout:
        ((scored, _),) = rollout.run(rollout.group(0, [7], problem)).values()
    assert "an observation has no field 'nothing'" in scored.failure


def test_tools_are_the_environments() -> None:
    settings = {"package": "adder:app", "python": PYTHON, "url": None, "variables": {}, "action": None}

    async def call() -> tuple[Any, ...]:
        server = play_openenv.OpenEnvServer(settings)
        try:
            await server.start()
            form = play_openenv.choose_form(settings, await server.ask_schema())
            player = play_openenv.OpenEnvPlayer({**settings, "step_timeout_s": 60.0}, server, form)
            async with player._session() as session:
                await session.reset({})
                tools = await play_openenv.list_tools(session)
                function = {"name": "add", "arguments": json.dumps({"x": 20, "y": 3})}
                messages: list[dict[str, Any]] = []
                reply = {"tool_calls": [{"id": "1", "function": function}]}
                return form, tools, await player._answer(session, reply, messages), messages
        finally:
            await server.close()

    form, tools, outcome, messages = asyncio.run(call())
    assert form == play_openenv.TOOLS
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert tools[0]["function"]["parameters"]["required"] == ["x", "y"]
    assert messages == [{"role": "tool", "tool_call_id": "1", "content": "23"}]
    assert outcome == (0.0, False)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"package": "nothing:app", "python": PYTHON}, "the server of nothing:app ended: "),
        ({**ECHO, "action": "massage"}, "action: 'massage' is not json, tools or a field of an action (message)"),
        ({"url": "http://127.0.0.1:9"}, "no server answers at http://127.0.0.1:9"),
        ({"image": "a:1", "python": PYTHON}, "python: has no effect: the image brings its interpreter"),
        (
            {"package": "a:b", "url": "http://127.0.0.1:9"},
            "needs one of package and image, which are served",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        list_problems(**settings)
    assert "env.theirs.openenv" in str(refused.value)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", ["list", "play"])
@pytest.mark.parametrize("name", HANGING)
def test_a_server_that_hangs_at_its_start_is_refused_within_its_limit_and_ends(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(
        {"grpo": {}, "policy": {"model_name": "model"}, "env": {"e": {"openenv": {**ECHO, "package": f"{name}:app"}}}}
    ).env["e"]
    answer = tmp_path / "answer.json"
    words = [json.dumps(msgspec.to_builtins(config.packaged)), str(answer), "4"]
    monkeypatch.setattr(play_openenv, "_START_S", 20.0)
    monkeypatch.setattr(sys, "argv", ["play_openenv.py", command, *words])
    reason = f"the server of {name}:app does not answer after 20 s"
    began = time.monotonic()
    if command == "list":
        play_openenv.main()
        assert json.loads(answer.read_text()) == {"error": reason}
    else:
        with pytest.raises(play_openenv.OpenEnvRefused, match=re.escape(reason)):
            play_openenv.main()
    assert time.monotonic() - began < WAIT_S
    assert not [child for child in psutil.Process().children(recursive=True) if "uvicorn" in child.cmdline()]


def test_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that finds the package of another release first."""
    monkeypatch.chdir(tmp_path)
    Path("openenv-0.9.1.dist-info").mkdir()
    Path("openenv-0.9.1.dist-info/METADATA").write_text("Name: openenv\nVersion: 0.9.1\n")
    with pytest.raises(ConfigError, match=r"openenv 0\.9\.1 is installed, but 0\.10 is what can be played here"):
        list_problems(**ECHO)


class AnotherKind(BaseHTTPRequestHandler):
    """A server that is well, and of another kind."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "healthy"}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_server_of_another_kind_is_refused() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), AnotherKind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match="describes no actions at /schema: it is not of OpenEnv"):
            list_problems(url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_settings_reach_the_program_whole() -> None:
    settings = build_config(
        {"grpo": {}, "policy": {"model_name": "m"}, "env": {"e": {"openenv": {"url": "http://h:1"}}}}
    ).env["e"]
    assert msgspec.to_builtins(settings.packaged)["max_turns"] == 32
