"""The example rollouts that NeMo Gym 0.4.0 brings, replayed through our program: rewards and tool outputs, row by row.

The endpoint of an episode answers what the model of the rollout did. Servers, agents and tools are NeMo Gym's own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tandem.config.schema.environments import NemoGymConfig
from tandem.samples.packaged_environments.tasks import play_command

PYTHON = os.environ.get("TANDEM_NEMO_GYM", "")
pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="NeMo Gym is not installed: tox -e families"),
    pytest.mark.timeout(900),
]
WAIT_S = 600.0


class Server(NamedTuple):
    """A resources server whose rollouts are replayed."""

    name: str
    config: str = ""
    """Its file of settings where that has another name than the server."""
    needs: str = ""
    """A module that it imports besides those of the package."""
    suffix: str = ""
    """What the names of its files of rows and rollouts end with."""
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Of a rollout whose row the package does not bring: the fields that are not lost but elsewhere in it."""
    timed: tuple[int, ...] = ()
    """Rows that the server gives up on after some seconds, so that a busy machine gives them no reward."""

    @property
    def path(self) -> str:
        return f"resources_servers/{self.name}/configs/{self.config or self.name}.yaml"


def find_schema(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a structured output, whose properties are the longest object in the messages."""
    texts = [item["content"] for item in rollout["responses_create_params"]["input"]]
    properties: dict[str, Any] = {}
    length = 0
    for text in texts:
        for place in (place for place, character in enumerate(text) if character == "{"):
            with contextlib.suppress(json.JSONDecodeError):
                value, end = json.JSONDecoder().raw_decode(text, place)
                if end - place > length:
                    properties, length = value, end - place
    return {"schema_str": json.dumps({"type": "object", "properties": properties}), "schema_type": "json"}


def take_calls_as_truth(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return the truth of a task of the workplace: of a solved one what was done, of another that nothing is to do."""
    calls = [item for item in rollout["response"]["output"] if item["type"] == "function_call"]
    truth = [{"name": call["name"], "arguments": call["arguments"]} for call in calls if rollout["reward"]]
    return {"ground_truth": truth, "id": 0, "category": "", "environment_name": ""}


SERVERS = (
    Server("mcqa"),
    Server("mcqa", suffix="_with_template_metadata"),
    Server("reasoning_gym", needs="reasoning_gym"),
    Server("equivalence_rule", "lc"),
    # One comparison takes 4 s of a core, and math-verify gives up after 5 s of the clock.
    Server("math_with_judge", needs="math_verify", timed=(1,)),
    # Programs are run by Ray, with a limit of time for each test.
    Server("code_gen", timed=(1,)),
    Server("format_verification", "freeform_formatting"),
    Server("structured_outputs", "structured_outputs_json", needs="xmltodict", fill=find_schema),
    Server("gpqa_diamond"),
    Server("arc_agi"),
    Server("calendar"),
    Server("mrcr"),
    Server("graphwalks"),
    Server("bunsenbench_chemistry_mcq"),
    Server("nvarc", "inductive"),
    Server("structeval", "structeval_nonrenderable", needs="xmltodict"),
    Server("xlam_fc"),
    Server("single_step_tool_use_with_argument_comparison"),
    Server("circle_click"),
    Server("circle_count"),
    Server("example_tool_call_multireward"),
    Server("example_multi_turn_gymnasium"),
    Server("example_single_tool_call"),
    Server("example_multi_step"),
    Server("example_session_state_mgmt"),
    Server("workplace_assistant", fill=take_calls_as_truth),
)


class Rollout(NamedTuple):
    """A rollout of the package's, and the row that it was played from."""

    row: dict[str, Any]
    output: list[dict[str, Any]]
    is_incomplete: bool
    """Whether the last answer ran into a limit of its length."""
    reward: float
    judgements: dict[str, dict[str, Any]]
    """What a judge answered, by the last message that it was sent."""

    @property
    def answers(self) -> list[list[dict[str, Any]]]:
        """What the model said between the outputs of tools, or the messages of a user."""
        return [list(items) for is_asked, items in itertools.groupby(self.output, is_of_environment) if not is_asked]

    @property
    def tool_outputs(self) -> list[Any]:
        """The outputs of tools that the last answer was given."""
        outputs: list[Any] = []
        seen: list[Any] = []
        for item in self.output:
            if item["type"] == "function_call_output":
                outputs.append(read_output(item["output"]))
            elif not is_of_environment(item):
                seen = [*outputs]
        return seen

    @property
    def is_cut(self) -> bool:
        """Whether the last answer has to end as one that is cut. An agent would ask again after thoughts alone."""
        return self.is_incomplete or {item["type"] for item in self.answers[-1]} == {"reasoning"}


def is_of_environment(item: dict[str, Any]) -> bool:
    """Tell whether an item of a rollout is no part of an answer."""
    return item["type"] == "function_call_output" or item.get("role") == "user"


def find_package() -> Path:
    """Return the folder that holds the package, and the folders of its servers."""
    command = [PYTHON, "-c", "import nemo_gym; print(nemo_gym.PARENT_DIR)"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout.strip())


def has_module(name: str) -> bool:
    """Tell whether the interpreter of NeMo Gym has a module."""
    command = [PYTHON, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"]
    return subprocess.run(command, timeout=WAIT_S).returncode == 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_output(output: Any) -> Any:
    """Return what a tool gave, however its JSON is spaced."""
    with contextlib.suppress(TypeError, json.JSONDecodeError):
        return json.loads(output)
    return output


def question_of(row: dict[str, Any]) -> str:
    """Return what tells a row from another: the contents of its messages."""
    items = row["responses_create_params"]["input"]
    return json.dumps([items] if isinstance(items, str) else [item.get("content") for item in items], sort_keys=True)


def read_rollouts(package: Path, server: Server) -> list[Rollout]:
    """Return the rollouts of a server. Many have lost fields of their rows, which stand in another file."""
    folder = package / "resources_servers" / server.name / "data"
    rows = {question_of(row): row for row in read_lines(folder / f"example{server.suffix}.jsonl")}
    rollouts = []
    for line in read_lines(folder / f"example_rollouts{server.suffix}.jsonl"):
        more = {} if server.fill is None else server.fill(line)
        response, reward = line.pop("response"), float(line.pop("reward"))
        judgements = {
            each["responses_create_params"]["input"][-1]["content"]: each["response"]
            for each in line.pop("judge_evaluations", None) or ()
        }
        row = rows.get(question_of(line), {**line, **more})
        row.pop("agent_ref", None)  # some are of other files of settings
        is_incomplete = response.get("incomplete_details") is not None
        rollouts.append(Rollout(row, response["output"], is_incomplete, reward, judgements))
    return rollouts


class Episode:
    """An episode as the endpoint sees it."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.posted: dict[str, Any] = {}
        """The reward, or the error."""
        self.requests: list[dict[str, Any]] = []
        self._answers = iter(rollout.answers)

    @property
    def tool_outputs(self) -> list[Any]:
        """The outputs of tools that came with the last request, beyond those of the row."""
        first, last = (
            [read_output(message["content"]) for message in request["messages"] if message["role"] == "tool"]
            for request in (self.requests[0], self.requests[-1])
        )
        return last[len(first) :]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat as the model of the rollout did."""
        self.requests.append(request)
        items = next(self._answers)
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]]
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in items
            if item["type"] == "function_call"
        ]
        message = {
            "role": "assistant",
            "content": "".join(texts) or None,
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [3],
            "generation_log_probs": [-0.5],
            **({"reasoning_content": "\n".join(thoughts)} if thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        is_cut = self.rollout.is_cut and items == self.rollout.answers[-1]
        reason = "length" if is_cut else "tool_calls" if calls else "stop"
        return {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "finish_reason": reason, "message": message}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        }


@contextlib.contextmanager
def serve(episodes: Sequence[Episode]) -> Iterator[str]:
    """Serve the endpoints of episodes, and in each a judge that knows the judgements of all; yield where they are."""
    judgements: dict[str, dict[str, Any]] = {}
    for episode in episodes:
        judgements |= episode.rollout.judgements

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"])).decode()
            _, _, number, path = self.path.split("/", 3)
            episode = episodes[int(number)]
            reply: dict[str, Any] = {}
            if path == "v1/chat/completions":
                reply = episode.answer(json.loads(content))
            elif path == "judge/v1/responses":
                reply = judgements[json.loads(content)["input"][-1]["content"]]
            elif path == "reward":
                episode.posted |= json.loads(content)
            else:
                episode.posted[path] = content
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Keep the output of the tests readable."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/sessions"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def play(place: Path, paths: list[str], episodes: Sequence[Episode], judge: str = "") -> int:
    """Have the program play the rows of episodes; return its exit code.

    `judge` names a server whose judge is a model at an address instead of the policy.
    """
    output = place / "output.txt"
    with serve(episodes) as address:
        config: dict[str, Any] = {"config_paths": paths}
        if judge:
            model = {"entrypoint": "app.py", "openai_api_key": "none", "openai_model": "judge"}
            model["openai_base_url"] = f"{address}/0/judge/v1"
            config["judge_model"] = {"responses_api_models": {"openai_model": model}}
            config[judge] = {"resources_servers": {judge: {"judge_model_server": {"name": "judge_model"}}}}
        command = play_command(NemoGymConfig(config=config, python=PYTHON))
        orders = [
            {
                "session_url": f"{address}/{number}",
                "judge_base_url": f"{address}/{number}/judge/v1",
                "api_key": f"secret-{number}",
                "model": "policy",
                "problem": {"metadata": {"row": episode.rollout.row}},
            }
            for number, episode in enumerate(episodes)
        ]
        lines = "".join(json.dumps(order) + "\n" for order in orders)
        with output.open("a") as file:
            ended = subprocess.run(
                command, input=lines, stdout=file, stderr=file, text=True, cwd=place, timeout=WAIT_S, check=False
            )
    return ended.returncode


def replay(place: Path, paths: list[str], rollouts: list[Rollout], judge: str = "") -> list[Episode]:
    """Have the program play the rows of rollouts to their ends; return the episodes."""
    episodes = [Episode(rollout) for rollout in rollouts]
    assert play(place, paths, episodes, judge) == 0, (place / "output.txt").read_text()[-4000:]
    return episodes


def list_servers() -> list[psutil.Process]:
    """Return the resources servers that this process has started, through others."""
    servers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_server = any(word.endswith("serve_nemo_gym.py") for word in process.cmdline())
            if is_server and Path(process.cwd()).parent.name == "resources_servers":
                servers.append(process)
    return servers


@pytest.fixture(scope="session")
def package() -> Path:
    return find_package()


@pytest.mark.parametrize("server", SERVERS, ids=[server.name + server.suffix for server in SERVERS])
def test_rewards_of_example_rollouts_are_equal_row_by_row(server: Server, package: Path, tmp_path: Path) -> None:
    if server.needs and not has_module(server.needs):
        pytest.skip(f"{server.needs} is not installed beside NeMo Gym: tox -e families")
    rollouts = read_rollouts(package, server)
    episodes = replay(tmp_path, [server.path], rollouts)
    rewards = [episode.posted.get("reward", episode.posted) for episode in episodes]
    expected = [rollout.reward for rollout in rollouts]
    for number in server.timed:
        expected[number] = 0.0 if rewards[number] == 0.0 else expected[number]
    assert rewards == expected
    for episode, rollout in zip(episodes, rollouts, strict=True):
        assert episode.tool_outputs == rollout.tool_outputs


@pytest.mark.parametrize("judge", ["", "equivalence_llm_judge"], ids=["policy", "address"])
def test_a_judge_is_asked_what_it_was_and_rewards_are_equal(judge: str, package: Path, tmp_path: Path) -> None:
    """By NeMo Gym's own files the judge is the policy; NeMo-RL's files name another with `judge_model_server`."""
    server = Server("equivalence_llm_judge")
    rollouts = read_rollouts(package, server)
    assert [len(rollout.judgements) for rollout in rollouts] == [1] * 5
    episodes = replay(tmp_path, [server.path], rollouts, judge)
    assert [episode.posted.get("reward", episode.posted) for episode in episodes] == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_agents_of_several_servers_play_by_one_program(package: Path, tmp_path: Path) -> None:
    """A row names its agent, which has a resources server of its own; all ask the one model server."""
    servers = [Server(name) for name in ("mcqa", "example_multi_step", "example_session_state_mgmt")]
    by_server = [read_rollouts(package, server) for server in servers]
    for server, rollouts in zip(servers, by_server, strict=True):
        for rollout in rollouts:
            rollout.row["agent_ref"] = {"type": "responses_api_agents", "name": f"{server.name}_simple_agent"}
    mixed = [rollout for row in zip(*by_server, strict=True) for rollout in row]
    episodes = replay(tmp_path, [server.path for server in servers], mixed)
    assert [episode.posted.get("reward", episode.posted) for episode in episodes] == [each.reward for each in mixed]
    for episode in episodes:
        assert episode.tool_outputs == episode.rollout.tool_outputs


def test_a_server_of_tools_that_is_killed_amid_an_episode_has_it_played_anew(package: Path, tmp_path: Path) -> None:
    """The counter of an episode is lost with its server: what was played of it counts for nothing."""

    class Killing(Episode):
        def answer(self, request: dict[str, Any]) -> dict[str, Any]:
            answer = super().answer(request)
            if self.tool_outputs:
                for server in list_servers():
                    server.send_signal(signal.SIGKILL)
            return answer

    server = Server("example_session_state_mgmt")
    rollouts = read_rollouts(package, server)
    interrupted = [Killing(rollout) for rollout in rollouts]
    assert play(tmp_path, [server.path], interrupted) == -signal.SIGKILL
    assert not list_servers()
    assert all("error" not in episode.posted for episode in interrupted)
    over = [episode for episode in interrupted if episode.posted]
    again = replay(tmp_path, [server.path], [each.rollout for each in interrupted if not each.posted])
    assert again
    for episode in [*over, *again]:
        assert episode.posted["reward"] == episode.rollout.reward
        assert episode.tool_outputs == episode.rollout.tool_outputs
