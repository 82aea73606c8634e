"""Reward functions of a program: how they are called, what they may return, and what becomes of a failure.

The program's end of the wire and the rollout's are both in this process; what is between them is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from environment_harness import WAIT_S, results

from tandem.common.curve import new_key_pair
from tandem.common.errors import ConfigError, RewardError
from tandem.common.keys import KeyPair
from tandem.common.messages import Listener, Problem, ResponseToScore
from tandem.config import Config, build_config
from tandem.coordinator.api.configuration import of_rewards
from tandem.coordinator.api.reward_server import ProgramRewardServer
from tandem.coordinator.api.rewards import check_columns, reward_functions
from tandem.rollout.environments import Score
from tandem.rollout.environments.outcomes import UnscoredResponse
from tandem.rollout.environments.program import RewardProgram
from tandem.rollout.environments.scorer import EnvironmentScorer
from tests.harness.members import MEMBER, open_hub

Start = Callable[..., EnvironmentScorer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return what starts a scorer whose functions these are; settings are those of the environment."""
    scorers: list[EnvironmentScorer] = []
    servers: list[ProgramRewardServer] = []

    def started(
        *rewards: Any, weights: Sequence[float] | None = None, own: KeyPair | None = None, **over: Any
    ) -> EnvironmentScorer:
        functions = reward_functions(list(rewards), weights)
        made = config_of(of_rewards(functions, 1.0), **over)
        servers.append(ProgramRewardServer(functions, made))
        at = servers[-1].at
        listener = Listener(address=f"tcp://127.0.0.1:{at.port}", public_key=at.public_key)
        scorers.append(EnvironmentScorer(made, RewardProgram(listener, own or at.callers)))
        scorers[-1].await_ready()
        return scorers[-1]

    yield started
    for each in (*scorers, *servers):
        each.close()


def config_of(settings: dict[str, Any], *, silence_s: float = 20.0, **environment: Any) -> Config:
    entry = settings["env"]["python_rewards"] | environment
    return build_config(
        {
            "grpo": {},
            "policy": {"model_name": "model"},
            "data": {"dataset_name": "jsonl", "train_data_path": "train.jsonl", "environment": "python_rewards"},
            "env": {"python_rewards": entry},
            "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": silence_s},
        }
    )


def problem(name: str = "p1", **metadata: Any) -> Problem:
    return Problem(problem_id=name, question="3 + 4", answer="7", metadata=metadata)


def failure_of(scorer: EnvironmentScorer, *responses: str) -> str:
    """Return the error that ends the run."""
    with pytest.raises(RewardError) as caught:
        results(scorer, *responses)
    return str(caught.value)


# --- what functions get, and what they may give ----------------------------------------------------------------------


def test_a_function_gets_the_arguments_that_it_names() -> None:
    given: list[dict[str, Any]] = []

    def of_some(response: str, output: str, level: int = 0) -> float:
        given.append({"response": response, "output": output, "level": level})
        return 0.5

    def of_all(**columns: Any) -> float:
        given.append(columns)
        return 1.0

    functions = reward_functions([of_some, of_all], None)
    asked = ResponseToScore(number=1, problem=problem(level=3), response="eight")
    for function in functions:
        function.call(**function.arguments([asked], ("input", "output")))
    assert given[0] == {"response": "eight", "output": "7", "level": 3}
    assert given[1] == {"prompt": "3 + 4", "response": "eight", "input": "3 + 4", "output": "7", "level": 3}


def test_scores_are_weighted_sums_of_what_functions_say(start: Start) -> None:
    def length(response: str) -> int:
        return len(response)

    def right(prompts: list[str], completions: list[str], output: list[str], **columns: Any) -> list[bool]:
        assert prompts == ["3 + 4"] * len(completions)
        assert columns == {"input": prompts}
        return [completion == answer for completion, answer in zip(completions, output, strict=True)]

    found = results(start(right, length, weights=[2.0, -0.1]), "7", "eight")
    assert found == [
        Score(2.0 - 0.1, correct=True, components={"right": 1.0, "length": 1.0}),
        Score(-0.5, correct=False, components={"right": 0.0, "length": 5.0}),
    ]


def test_prompts_that_are_messages_are_given_as_trl_gives_them(start: Start) -> None:
    given: dict[str, Any] = {}

    def of_messages(prompts: Any, completions: Any) -> list[float]:
        given.update(prompts=prompts, completions=completions)
        return [1.0] * len(prompts)

    messages = [{"role": "user", "content": "3 + 4"}]
    results(start(of_messages), "7", of=problem(prompt=messages))
    assert given == {"prompts": [messages], "completions": [[{"role": "assistant", "content": "7"}]]}


def test_coroutines_run_at_once_and_always_on_one_event_loop(start: Start) -> None:
    loops: set[object] = set()
    meeting: list[asyncio.Event] = []

    async def judge(response: str) -> float:
        loops.add(asyncio.get_running_loop())
        if response == "waits":  # until another call, which must run beside it, is there
            meeting.append(asyncio.Event())
            await meeting[0].wait()
        elif response == "frees":
            while not meeting:
                await asyncio.sleep(0.001)
            meeting[0].set()
        return float(len(response))

    scorer = start(judge)
    assert [score.reward for score in results(scorer, "waits", "frees") if isinstance(score, Score)] == [5.0, 5.0]
    results(scorer, "alone")
    assert len(loops) == 1


def test_what_libraries_return_is_read_and_none_counts_as_nothing_said(start: Start) -> None:
    def vector(completions: list[str]) -> Any:
        return np.arange(len(completions), dtype=np.float32)

    def sometimes(response: str) -> Any:
        return None if response == "a" else np.float64(0.25)

    found = results(start(functools.partial(vector), sometimes), "a")
    assert found == [Score(0.0, correct=False, components={"vector": 0.0})]
    assert results(start(sometimes), "b") == [Score(0.25, correct=False, components={"sometimes": 0.25})]


def test_two_functions_of_one_name_are_told_apart() -> None:
    class Judge:
        def __call__(self, response: str) -> float:
            return 1.0

    functions = reward_functions([Judge(), Judge(), lambda response: 0.0], None)
    assert [function.name for function in functions] == ["Judge", "Judge_2", "reward"]


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ([], None, r"rewards: expected a function or a list of functions, got \[\]"),
        (["exact_match"], None, r"rewards\[0\]: 'exact_match' is not a function"),
        ([len], None, r"rewards\[0\] \(len\): its parameter 'obj' cannot be given by name"),
        ([lambda: 1.0], None, r"rewards\[0\] \(reward\): has no parameter \(prompt, response, or a column"),
        ([lambda prompt, completions: 1.0], None, r"takes either one response \(prompt, response\) or several"),
        (
            [lambda response: 1.0],
            [1.0, 2.0],
            r"reward_weights: expected a number for each of 1 rewards, got \[1.0, 2.0\]",
        ),
        ([lambda response: 1.0], [math.nan], r"reward_weights\[0\]: nan is not a finite number"),
    ],
)
def test_what_is_no_reward_function_is_said(rewards: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}|: {message}"):
        reward_functions(rewards, weights)


def test_a_parameter_that_no_column_fills_is_said_with_the_nearest_that_does() -> None:
    functions = reward_functions([lambda response, anwser: 1.0], None)
    with pytest.raises(ConfigError) as caught:
        check_columns(functions, ["question", "answer"])
    assert str(caught.value) == (
        "rewards[0] (reward): its parameter 'anwser' is none of question, answer, prompt, response; did you mean "
        "'answer'?"
    )
    check_columns(reward_functions([lambda response, other=1: 1.0, lambda **columns: 1.0], None), ["question"])


# --- what becomes of a failure ---------------------------------------------------------------------------------------


def raises(response: str) -> float:
    raise ValueError(f"cannot read {response!r}")


def test_what_a_function_raises_ends_the_run_and_is_shown_once_to_the_program(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    said_of_it = failure_of(start(raises), "7", "8")
    assert said_of_it.startswith("environment 'python_rewards', problem 'p1': raises: ValueError: cannot read '")
    assert "test_python_rewards.py:" in said_of_it
    assert said_of_it.endswith(", in raises)")
    assert capfd.readouterr().err.count("reward function raises raised (shown once):\nTraceback") == 1


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_failure_costs_one_sample_where_the_configuration_says_so(start: Start, on_error: str) -> None:
    def picky(response: str) -> float:
        return 1.0 if response == "7" else raises(response)

    good, bad = results(start(picky, on_error=on_error), "7", "8")
    assert good == Score(1.0, correct=True, components={"picky": 1.0})
    assert isinstance(bad, UnscoredResponse)
    assert bad.dropped == (on_error == "drop")
    assert "cannot read '8'" in bad.failure


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda response: math.nan, "reward: what it returned is nan, not a finite number"),
        (lambda response: "1.0", "reward: what it returned is '1.0', not a finite number"),
        (lambda response: None, "every reward function returned None"),
        (lambda completions: [1.0, 2.0], "reward: returned 2 rewards for 1 completions"),
        (lambda completions: 1.0, "reward: returned float, not a list of rewards, one for each completion"),
        (lambda response, missing: 1.0, "reward: its parameter 'missing' is none of input, output, prompt, response"),
    ],
)
def test_what_is_no_reward_is_a_failure(start: Start, function: Any, message: str) -> None:
    assert failure_of(start(function), "7") == f"environment 'python_rewards', problem 'p1': {message}"


def test_a_function_that_hangs_costs_its_deadline_and_its_thread_is_replaced(start: Start) -> None:
    release = threading.Event()

    def hangs(response: str) -> float:
        if response == "hang":
            release.wait(WAIT_S)
        return 1.0

    try:
        bad, good = results(start(hangs, on_error="zero", timeout_s=3.0), "hang", "7")
    finally:
        release.set()
    assert isinstance(bad, UnscoredResponse)
    assert bad.timed_out
    assert bad.failure.startswith("environment 'python_rewards' took longer than 3 s in hangs to score a response")
    assert good == Score(1.0, correct=True, components={"hangs": 1.0})


def test_a_coroutine_that_blocks_all_others_is_left_behind(start: Start) -> None:
    release = threading.Event()

    async def blocks(response: str) -> float:
        if response == "block":
            release.wait(WAIT_S)
        return 1.0

    scorer = start(blocks, on_error="zero", timeout_s=3.0)
    try:
        (bad,) = results(scorer, "block")
        assert isinstance(bad, UnscoredResponse)
        assert bad.timed_out
        assert results(scorer, "7") == [Score(1.0, correct=True, components={"blocks": 1.0})]
    finally:
        release.set()


def test_a_program_that_falls_silent_ends_the_run() -> None:
    """As one does that is stopped, or whose code lets no other thread run."""
    functions = reward_functions([lambda response: 1.0], None)
    with contextlib.closing(open_hub()) as listens:
        scorer = EnvironmentScorer(
            config_of(of_rewards(functions, 1.0), silence_s=1.0), RewardProgram(listens.at, MEMBER)
        )
        with contextlib.closing(scorer):
            scorer.await_ready()
            said_of_it = failure_of(scorer, "7")
    assert "tandem.train(), which scores samples with its functions, has been silent for" in said_of_it


def test_what_nobody_expected_is_said_and_not_waited_for(start: Start) -> None:
    scorer = start(lambda response: 1.0)
    scorer.submit(0, problem(), [{"role": "assistant"}])  # without a content
    with pytest.raises(KeyError):
        poll_for_long(scorer)


def poll_for_long(scorer: EnvironmentScorer) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        scorer.poll()
        time.sleep(0.01)


def test_who_does_not_have_the_key_is_not_heard(start: Start) -> None:
    called: list[str] = []
    scorer = start(lambda response: called.append(response) or 1.0, own=new_key_pair(), silence_s=1.0)
    assert "has been silent" in failure_of(scorer, "7")
    assert called == []
