"""What responses are worth, with the real scorers, and what is said about an environment that misbehaves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reasoning_gym
from environment_harness import config, problem, said, worth
from own_environments import Hangs, Length

from tandem.common.errors import ConfigError, RewardError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.rollout.environments import Score, make_environment
from tandem.rollout.environments.scorer import EnvironmentScorer

WAIT_S = 120.0
RIGHT, WRONG = Score(1.0, True), Score(0.0, False)


def here(name: str, **settings: Any) -> Config:
    return config("mine", {"class": f"own_environments.{name}", **settings})


# --- the built-in environments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "response", "score"),
    [
        ({}, "-2", RIGHT),
        ({}, " -2.0 ", RIGHT),
        ({}, " = -2", Score(0.5, False)),  # half of it is the reference answer
        ({}, "", Score(0.0, False)),
        ({"answer_after": "="}, " = -2", RIGHT),
        ({"answer_after": "="}, "4 + 3 = 7 - 9 = -2", RIGHT),
        ({"answer_after": "="}, "-2", RIGHT),
        ({"partial_credit": False}, " = -2", WRONG),
    ],
)
def test_reasoning_gym_scores_with_the_tasks_scorer(kwargs: dict[str, Any], response: str, score: Score) -> None:
    environment = make_environment(config("reasoning_gym", {"kwargs": kwargs}, task="chain_sum"))
    assert worth(environment.score(problem("-2"), response)) == score


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "countdown", "rush_hour", "pool_matrix", "gcd"])
def test_reference_answers_of_tasks_are_right(task: str) -> None:
    environment = make_environment(config("reasoning_gym", task=task))
    dataset = reasoning_gym.create_dataset(task, size=5, seed=3)
    for entry in dataset:
        answer = entry["answer"] or ""
        given = Problem(problem_id="p", question=entry["question"], answer=answer, metadata=entry["metadata"])
        expected = dataset.score_answer(entry["answer"], entry)
        assert environment.score(given, answer).reward == expected
        assert environment.score(given, answer).correct == (expected >= 0.99)


def test_a_response_that_a_scorer_cannot_read_is_wrong() -> None:
    # prime_factorization's scorer turns the words of a response to integers without a guard.
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)[0]
    score = reasoning_gym.get_score_answer_fn("prime_factorization")
    with pytest.raises(ValueError, match="abc"):
        score("abc", entry)
    environment = make_environment(config("reasoning_gym", task="prime_factorization"))
    given = Problem(problem_id="p", question="", answer=entry["answer"], metadata=entry["metadata"])
    assert worth(environment.score(given, "abc")) == WRONG
    assert worth(environment.score(given, entry["answer"])) == RIGHT
    with pytest.raises(ValueError, match="two"):  # not the response's fault
        environment.score(Problem(problem_id="p", question="", answer="two", metadata={}), "abc")


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("7", "7", RIGHT),
        ("7", " = 7", RIGHT),
        ("-12", " = -12", RIGHT),
        ("7", "The answer is 8", WRONG),
        ("7", "", WRONG),
        ("7", "no idea", WRONG),
        ("0.5", "It is \\boxed{\\frac{1}{2}}.", RIGHT),
        ("\\frac{3}{4}", "thus 0.75", RIGHT),
        ("x^2 + 2x + 1", "so we get $(x+1)^2$", RIGHT),
        ("x^2 + 2x + 1", "x^2 + 2x + 1", RIGHT),
        ("[0, 1)", "the interval $[0,1)$", RIGHT),
        ("[0, 1)", "the interval $[0,1]$", WRONG),
        ("$\\sqrt{8}$", "$2\\sqrt{2}$", RIGHT),
    ],
)
def test_math_compares_values(answer: str, response: str, score: Score) -> None:
    assert worth(make_environment(config("math")).score(problem(answer), response)) == score


def test_math_works_in_a_thread_where_its_own_signals_would_not() -> None:
    environment = make_environment(config("math"))
    scores: list[Score] = []
    thread = threading.Thread(target=lambda: scores.append(environment.score(problem("1/3"), "\\frac{2}{6}")))
    thread.start()
    thread.join(WAIT_S)
    assert [*map(worth, scores)] == [RIGHT]


@pytest.mark.parametrize(
    ("kwargs", "response", "score"),
    [
        ({}, " Seven\n", RIGHT),
        ({}, "seven", WRONG),
        ({"ignore_case": True}, "sEVEN", RIGHT),
        ({}, "It is Seven", WRONG),
        ({"answer_after": "is"}, "This is it: it is Seven", RIGHT),
        ({}, "\ufeffSev\u200ben\u00a0", RIGHT),
    ],
)
def test_exact_match(kwargs: dict[str, Any], response: str, score: Score) -> None:
    environment = make_environment(config("exact_match", {"kwargs": kwargs}))
    assert worth(environment.score(problem("Seven "), response)) == score


@pytest.mark.parametrize("name", ["math", "exact_match"])
def test_a_problem_without_a_reference_answer_cannot_be_scored(name: str) -> None:
    with pytest.raises(RewardError, match=r"^problem 'p1' has no reference answer to compare with$"):
        make_environment(config(name)).score(problem(" "), "7")


# --- environments of one's own ---------------------------------------------------------------------------------------


def test_a_class_is_named_by_its_path_and_gets_its_arguments() -> None:
    environment = make_environment(here("Length", kwargs={"per_letter": 0.5}, cfg={"factor": 4}))
    assert isinstance(environment, Length)
    assert environment.score(problem(), "abc") == Score(6.0, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class": "no_such_module.Environment"}, "env.mine.class: cannot import 'no_such_module.Environment': "),
        ({"class": "own_environments.Nothing"}, "env.mine.class: cannot import '"),
        ({"class": "own_environments.Length", "kwargs": {"per_word": 1}}, "env.mine: TypeError: "),
        ({"class": "own_environments.Refuses"}, "env.mine: OSError: no licence"),
        (
            {"class": "own_environments.NoEnvironment"},
            "env.mine.class: own_environments.NoEnvironment has no method score(",
        ),
    ],
)
def test_a_class_that_cannot_be_made_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_environment(config("mine", settings))
    assert str(caught.value).startswith(message)


def test_unknown_arguments_of_a_built_in_environment_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^env.exact_match: TypeError: .*'answer_before'"):
        make_environment(config("exact_match", {"kwargs": {"answer_before": "="}}))


# --- the pool --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[[Config], EnvironmentScorer]]:
    Hangs.hangs.clear()
    Hangs.release.clear()
    scorers: list[EnvironmentScorer] = []

    def started(config: Config) -> EnvironmentScorer:
        scorers.append(EnvironmentScorer(config))
        scorers[-1].await_ready()
        return scorers[-1]

    yield started
    Hangs.release.set()
    for scorer in scorers:
        scorer.close()


def poll_until(scorer: EnvironmentScorer, count: int) -> dict[int, Score]:
    scores: dict[int, Score] = {}
    deadline = time.monotonic() + WAIT_S
    while len(scores) < count:
        assert time.monotonic() < deadline, f"{len(scores)} of {count} scores"
        for key, score in scorer.poll():
            assert key not in scores
            scores[key] = score
        time.sleep(0.001)
    assert scorer.poll() == []
    return scores


def poll_until_it_raises(scorer: EnvironmentScorer) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        scorer.poll()
        time.sleep(0.001)


def error_from(scorer: EnvironmentScorer) -> str:
    with pytest.raises(RewardError) as caught:
        poll_until_it_raises(scorer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_response_comes_back_once_with_its_own_score(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Length", num_workers=4))
    for key in range(200):
        scorer.submit(key, problem(), said("x" * key))
    assert poll_until(scorer, 200) == {key: Score(float(key), key > 2) for key in range(200)}


def test_components_come_with_the_score(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Returns", kwargs={"reward": "1", "components": {"right": 1, "short": 0.5}}))
    scorer.submit(0, problem(), said("x"))
    assert poll_until(scorer, 1)[0].components == {"right": 1.0, "short": 0.5}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_so_many_are_scored_at_once(start: Callable[[Config], EnvironmentScorer], num_workers: int) -> None:
    scorer = start(here("Counts", num_workers=num_workers))
    for key in range(9):
        scorer.submit(key, problem(), said(""))
    assert max(score.reward for score in poll_until(scorer, 9).values()) == num_workers


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Returns", {"reward": "nan"}, "the reward is nan, not a finite number"),
        ("Returns", {"reward": "-inf"}, "the reward is -inf, not a finite number"),
        ("Returns", {"reward": None}, "the reward is None, not a finite number"),
        ("Returns", {"reward": "1", "components": {"a": "much"}}, "the component 'a' is 'much', not a finite number"),
        ("Returns", {"score": 1.0}, "score() returned float, not a Score"),
        ("Raises", {}, "LookupError: no such letter"),
    ],
)
def test_what_is_no_reward_is_named(
    start: Callable[[Config], EnvironmentScorer], name: str, kwargs: dict[str, Any], message: str
) -> None:
    scorer = start(here(name, kwargs=kwargs))
    scorer.submit(0, problem(name="train.jsonl:12"), said("x"))
    where = r" \(.*/own_environments\.py:\d+, in score\)" if name == "Raises" else ""
    assert re.fullmatch(
        re.escape(f"environment 'mine', problem 'train.jsonl:12': {message}") + where, error_from(scorer)
    )


def test_a_problem_at_fault_is_named_once(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(config("exact_match"))
    scorer.submit(0, problem(""), said("x"))
    assert error_from(scorer) == "environment 'exact_match': problem 'p1' has no reference answer to compare with"


def test_a_reward_that_takes_too_long_is_named(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Hangs", timeout_s=3.0, num_workers=2))
    scorer.submit(0, problem(name="slow one"), said("hang"))
    scorer.submit(1, problem(name="quick one"), said("abc"))
    assert poll_until(scorer, 1) == {1: Score(3.0, True)}
    assert error_from(scorer) == (
        "environment 'mine' took longer than 3 s to score a response to problem 'slow one' (env.mine.timeout_s)"
    )


def test_waiting_for_a_turn_is_not_taking_long(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Counts", timeout_s=2.0))
    for key in range(45):  # 2.25 s in all
        scorer.submit(key, problem(), said(""))
    assert len(poll_until(scorer, 45)) == 45


def test_what_is_abandoned_does_not_come_back_under_a_new_name(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Hangs", num_workers=2))
    scorer.submit(0, problem(), said("hang"))
    scorer.submit(1, problem(), said("abandoned"))
    assert Hangs.hangs.wait(WAIT_S)
    time.sleep(0.1)  # the second is done
    scorer.forget([0, 1])
    scorer.submit(0, problem(), said("ab"))
    assert poll_until(scorer, 1) == {0: Score(2.0, True)}
    Hangs.release.set()
    scorer.submit(1, problem(), said("abc"))
    assert poll_until(scorer, 1) == {1: Score(3.0, True)}


def test_a_stale_result_does_not_lose_a_new_one(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Hangs"))
    scorer.submit(0, problem(), said("hang"))
    assert Hangs.hangs.wait(WAIT_S)
    scorer.forget([0, 1])
    scorer.submit(0, problem(), said("ab"))  # waits behind the first
    Hangs.release.set()
    assert poll_until(scorer, 1) == {0: Score(2.0, True)}


def test_a_hung_thread_is_noticed_even_in_what_was_abandoned(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Hangs", timeout_s=0.2))
    scorer.submit(0, problem(name="slow one"), said("hang"))
    assert Hangs.hangs.wait(WAIT_S)
    scorer.forget([0, 1])
    scorer.submit(0, problem(), said("ab"))
    assert "'slow one'" in error_from(scorer)


def test_closing_does_not_wait_for_what_hangs(start: Callable[[Config], EnvironmentScorer]) -> None:
    scorer = start(here("Hangs", num_workers=2))
    for key in range(50):
        scorer.submit(key, problem(), said("hang" if key == 0 else "x"))
    started = time.monotonic()
    scorer.close()
    assert time.monotonic() - started < 30, "it hangs for a minute"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("reward-"))


def test_several_rewards_of_one_response() -> None:
    environment: Any = make_environment(config("math_multi_reward", {"num_workers": 8}))
    problem = Problem(problem_id="p", question="6 * 7", answer="42", metadata={})

    def components(response: str) -> tuple[float, ...]:
        score = environment.score(problem, response)
        assert score.reward == sum(score.components.values())
        assert score.correct == bool(score.components["correctness"])
        return tuple(score.components[name] for name in ("correctness", "integer", "format"))

    assert components("<think>6 * 7\nis 42</think>\n<answer>42</answer>") == (1, 1, 1)
    assert components("<think>so</think>\n<answer>41</answer>\n") == (0, 1, 1)
    assert components("<think>so</think><answer>42</answer>") == (1, 1, 0), "the answer has a line of its own"
    assert components("<think>so</think>\n<answer>41</answer>\n<answer>42</answer>") == (1, 1, 0)
    assert components("42") == (1, 1, 0)
    assert components("<answer>4.2</answer>") == (0, 0, 0)
