"""Parses and rewards as the own tests of verifiers 0.4.0 state them, through our program and by the package itself.

The cases are those of `tests/v1/test_scoring.py` and `tests/v1/test_judges.py` in its source distribution, which has no
tests of mathematics: those rows state what is right. The endpoint of an episode answers what the policy says in its
case, and a judge at an address what the judge does. Listing, playing and scoring are the program's and the package's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.common.messages import Problem
from tandem.config import build_config
from tandem.samples.data_sets import load_problems
from tandem.samples.packaged_environments.tasks import play_command
from tests.unit.verifiers_packages import score_reply

vf: Any = pytest.importorskip("verifiers.v1", reason="the package verifiers is not installed")
pytestmark = pytest.mark.timeout(900)
WAIT_S = 600.0
TASKSET = '''
"""A taskset whose rewards are what the package's parsers and scorers make of a reply."""

import json

import verifiers.v1 as vf

__all__ = ["Oracle"]


def choose(reply, answer):
    """Return 1 for an A, 0 for a B, and -1 for neither."""
    return float("BA".find(vf.parse_judge_choice(reply, choices=("A", "B")) or "?"))


SCORERS = {
    "choice": choose,
    "stdout": vf.compare_stdout_results,
    "outcomes": lambda reply, answer: vf.parse_pytest_outcomes(reply) == json.loads(answer),
    "box": lambda reply, answer: vf.extract_boxed_answer(reply) == answer,
    "strict box": lambda reply, answer: vf.extract_boxed_answer(reply, strict=True) == answer,
    "math": lambda reply, answer: vf.verify_boxed_math_answer(reply, answer, timeout_seconds=600),
}


class Row(vf.TaskData):
    kind: str
    answer: str


class Scored(vf.Task[Row]):
    @vf.reward
    async def lcs(self, trace: vf.Trace) -> float:
        scorer = SCORERS.get(self.data.kind)
        return 0.25 if scorer is None else float(scorer(trace.last_reply, self.data.answer))

    @vf.reward(weight=0.0)
    async def fmt(self, trace: vf.Trace) -> float:
        return 1.0


class Config(vf.TasksetConfig):
    rows: list[list[str]] = []


class Oracle(vf.Taskset[Scored, Config]):
    def load(self):
        for kind, answer in self.config.rows:
            yield Scored(Row(prompt="Capital of France?", kind=kind, answer=answer), self.config.task)
'''
PLUGGED = '''
"""Functions that settings name in the place of a task's own, or in addition."""


async def reply_length(trace) -> float:
    return float(len(trace.last_reply or ""))


async def exact_match(task, trace) -> float:
    return float(task.answer in (trace.last_reply or ""))


async def marker(trace) -> float:
    return 0.125
'''
RUBRIC = """
[[criteria]]
name = "mentions_paris"
text = "The response mentions Paris."
weight = 3.0

[[criteria]]
name = "is_polite"
text = "The response is polite."
"""
DEPTH = """
[[criteria]]
name = "depth"
text = "How thorough?"
choices = ["none", "partial", "good"]
"""
OUTCOMES = (
    "XFAIL tests/test_mod.py::test_xfail - known bug - still tracked\n"
    "XPASS tests/test_mod.py::test_xpass - always xfail - unexpectedly passed\n"
    "FAILED tests/test_mod.py::test_param[a - b] - assert left - right\n"
    "PASSED tests/test_mod.py::test_ok"
)
PARSED_OUTCOMES = {
    "tests/test_mod.py::test_xfail": "XFAIL",
    "tests/test_mod.py::test_xpass": "XPASS",
    "tests/test_mod.py::test_param[a - b]": "FAILED",
    "tests/test_mod.py::test_ok": "PASSED",
}


def describe_verdicts(**verdicts: str) -> str:
    """Return the answer of a judge by a rubric."""
    return json.dumps({"verdicts": [{"name": name, "reason": "r", "verdict": said} for name, said in verdicts.items()]})


class Case(NamedTuple):
    """A reply of the policy, what its judge says of it, and what the package's own test states of both."""

    reply: str
    reward: float | str
    """The reward, or a part of the reason why there is none."""
    kind: str = ""
    answer: str = ""
    verdict: str = ""
    """What the judge answers; it is not asked where this is empty."""
    components: dict[str, float] | None = None
    """Rewards by weight, and metrics, of those that the test states."""


class Group(NamedTuple):
    """Cases of one configuration: the settings of the task, in which a judge has no address yet."""

    cases: tuple[Case, ...]
    task: dict[str, Any] | None = None


GROUPS = {
    "parsers": Group(
        (
            Case("Draft: \\boxed{A}\nFinal Judgment: B", 0.0, "choice"),
            Case("Draft: \\boxed{A}\nFinal Judgment:\nReasoning mentions B", 1.0, "choice"),
            Case("Draft: \\boxed{B}\nFinal Judgment: This is a \\boxed{B}", 0.0, "choice"),
            Case("Final Judgment: A better choice is \\boxed{B}", 1.0, "choice"),
            Case("Final Judgment: \\boxed{A}\nFinal Judgment: B", 0.0, "choice"),
            Case("Draft: \\boxed{A}\nAnswer: B", 1.0, "choice"),
            Case("neither", -1.0, "choice"),
            Case("<think>Final Judgment: A", -1.0, "choice"),
            Case("hello   world\n", 1.0, "stdout", "hello world\n"),
            Case("1.0001 2.0\n", 1.0, "stdout", "1.0002 2.0009\n"),
            Case("1.0001 2.1\n", 0.0, "stdout", "1.0002 2.0009\n"),
            Case(OUTCOMES, 1.0, "outcomes", json.dumps(PARSED_OUTCOMES)),
            Case(OUTCOMES, 0.0, "outcomes", json.dumps({**PARSED_OUTCOMES, "tests/test_mod.py::test_ok": "FAILED"})),
            Case("so \\boxed{1} or \\boxed{\\frac{1}{2}}", 1.0, "box", "\\frac{1}{2}"),
            Case("no box", 1.0, "box", "no box"),
            Case("still no box", 1.0, "strict box", ""),
            Case("an open \\boxed{\\frac{1}{2", 1.0, "strict box", ""),
        ),
    ),
    "mathematics": Group(
        (
            Case("so \\boxed{\\frac{1}{2}}", 1.0, "math", "0.5"),
            Case("\\boxed{x^2 + 2x + 1}", 1.0, "math", "\\boxed{(x+1)^2}"),
            Case("\\boxed{3}, no: \\boxed{4}", 1.0, "math", "4"),
            Case("\\boxed{3}", 0.0, "math", "4"),
            Case("4", 0.0, "math", "4"),
            Case("<think>\\boxed{4}", 0.0, "math", "4"),
            Case("<think>\\boxed{3}</think>\\boxed{4}", 1.0, "math", "4"),
            Case("\\boxed{}", 0.0, "math", "4"),
        ),
    ),
    "functions of settings": Group(
        (
            Case(
                "cba",
                0.125 * 2 + 0.5 + 1,
                answer="cba",
                components={"lcs": 0.25, "exact_match": 0.5, "fmt": 1.0, "reply_length": 3.0},
            ),
        ),
        {
            "metrics": {"reply_length": {"fn": "plugged.py:reply_length"}},
            "rewards": {
                "exact_match": {"fn": "plugged.py:exact_match", "weight": 0.5},
                "lcs": {"fn": "plugged.py:marker", "weight": 2.0},
                "fmt": {"weight": 1.0},
            },
        },
    ),
    "reference judge": Group(
        (
            Case("It is Paris.", 1.25, answer="Paris", verdict="yes", components={"lcs": 0.25, "reference": 1.0}),
            Case("It is Rome.", 0.25, answer="Paris", verdict="Final answer: NO", components={"reference": 0.0}),
            Case("It is big.", "judge returned no yes/no verdict", answer="Paris", verdict="gibberish"),
            Case("", 0.25, answer="Paris", components={"reference": 0.0}),
        ),
        {"judges": [{"id": "reference"}]},
    ),
    "reference judge by letters": Group(
        (
            Case("It is Paris.", 1.25, answer="Paris", verdict="A"),
            Case("It is Rome.", 0.25, answer="Paris", verdict="Final verdict: B"),
            Case("It is big.", "judge returned no A/B verdict", answer="Paris", verdict="yes"),
        ),
        {"judges": [{"id": "reference", "choices": ["A", "B"]}]},
    ),
    "rubric": Group(
        (
            Case(
                "It is Paris.",
                0.25 + 0.75,
                verdict=describe_verdicts(mentions_paris="yes", is_polite="no"),
                components={"quality": 0.75, "quality/mentions_paris": 1.0, "quality/is_polite": 0.0},
            ),
            Case("It is Rome.", "expected the batch", verdict=describe_verdicts(typo="yes")),
            Case("It is big.", "judge returned no verdicts JSON object", verdict="yes"),
        ),
        {"judges": [{"id": "rubric", "path": "rubric.toml", "name": "quality"}]},
    ),
    "rubric of choices": Group(
        (
            Case("It is Paris.", 0.25 + 0.5, verdict=describe_verdicts(depth="partial"), components={"q/depth": 0.5}),
            Case("It is Rome.", "expected one of", verdict=describe_verdicts(depth="maybe")),
        ),
        {"judges": [{"id": "rubric", "path": "depth.toml", "name": "q"}]},
    ),
}


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the taskset and what its settings name into the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = {"oracle_v1.py": TASKSET, "plugged.py": PLUGGED, "rubric.toml": RUBRIC, "depth.toml": DEPTH}
    for name, text in files.items():
        Path(name).write_text(text)
    yield
    for module in ("oracle_v1", "plugged"):
        sys.modules.pop(module, None)


class Endpoint(ThreadingHTTPServer):
    """The endpoints of the episodes of cases, below their numbers, and a judge of all at `/judge`."""

    daemon_threads = True

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cases = cases
        self.posted: dict[int, dict[str, Any]] = {}
        """Of each case that was played, its reward or its error."""
        self.num_judged = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers a request to an `Endpoint`."""

    server: Endpoint

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        _, place, path = self.path.split("/", 2)
        body: dict[str, Any] = {}
        if place == "judge":
            shown = json.loads(content)["messages"][-1]["content"]
            (case,) = [case for case in self.server.cases if case.verdict and case.reply in shown]
            self.server.num_judged += 1
            body = complete(case.verdict)
        elif path == "reward":
            self.server.posted[int(place)] = json.loads(content)
        elif path == "error":
            self.server.posted[int(place)] = {"error": content}
        else:
            body = complete(self.server.cases[int(place)].reply)
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Keep the output of the tests readable."""


def complete(text: str) -> dict[str, Any]:
    """Return a chat completion of OpenAI's API."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@contextlib.contextmanager
def serve(cases: Sequence[Case]) -> Iterator[Endpoint]:
    with Endpoint(cases) as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever)
        thread.start()
        try:
            yield endpoint
        finally:
            endpoint.shutdown()
            thread.join()


def list_problems(args: dict[str, Any]) -> tuple[list[Problem], Any]:
    """Return the tasks of the taskset in their order, as a run has them, and the settings of what plays them."""
    apart = {"rows": [["", "held out"]]}
    config = build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model"},
            "env": {"theirs": {"verifiers": {"id": "oracle-v1", "args": args, "validation_args": apart}}},
        }
    )
    sets = load_problems(config)
    return sorted(sets.train, key=lambda problem: problem.metadata["task"]["idx"]), config.env["theirs"].packaged


def play(endpoint: Endpoint, problems: Sequence[Problem], settings: Any) -> None:
    """Have the program play all cases."""
    orders = [
        {
            "session_url": f"{endpoint.url}/{number}",
            "base_url": f"{endpoint.url}/{number}/v1",
            "judge_base_url": f"{endpoint.url}/judge/v1",
            "api_key": "none",
            "model": "policy",
            "problem": {"metadata": problem.metadata},
        }
        for number, problem in enumerate(problems)
    ]
    lines = "".join(json.dumps(order) + "\n" for order in orders)
    ended = subprocess.run(play_command(settings), input=lines, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def score_with_package(problem: Problem, reply: str, args: dict[str, Any]) -> Any:
    """Return the trace of a conversation of one reply, scored by the package alone. Raises its own error."""
    module = importlib.import_module("oracle_v1")
    config = module.Config.model_validate(args).task
    task = module.Scored(module.Row.model_validate(problem.metadata["task"]), config)
    return score_reply(task, problem.question, reply)


@pytest.mark.parametrize("name", GROUPS)
def test_rewards_are_those_that_its_own_tests_state_and_the_package_computes(name: str) -> None:
    cases, task = GROUPS[name].cases, GROUPS[name].task or {}
    with serve(cases) as endpoint:
        place = {"base_url": f"{endpoint.url}/judge/v1", "model": "judge", "api_key_var": "NO_KEY"}
        judges = [{**judge, **place} for judge in task.get("judges", ())]
        args = {"rows": [[case.kind, case.answer] for case in cases], "task": {**task, "judges": judges}}
        problems, settings = list_problems(args)
        assert len(problems) == len(cases)
        play(endpoint, problems, settings)
        assert endpoint.num_judged == sum(bool(case.verdict) for case in cases)
        for number, (case, problem) in enumerate(zip(cases, problems, strict=True)):
            posted = endpoint.posted[number]
            if isinstance(case.reward, str):
                assert case.reward in posted["error"]
                with pytest.raises(vf.TaskError) as refused:
                    score_with_package(problem, case.reply, args)
                assert str(refused.value) in posted["error"]
                continue
            trace = score_with_package(problem, case.reply, args)
            assert posted["reward"] == trace.reward == case.reward, (case, posted)
            parts = {key: reward.value for key, reward in trace.rewards.items()}
            assert posted["components"] == {**trace.metrics, **parts}
            assert (case.components or {}).items() <= posted["components"].items()
