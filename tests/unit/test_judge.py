"""The judge against a real endpoint: what it is asked, what its answers are worth, what happens when it fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tandem.common.errors import ConfigError
from tandem.common.messages import Problem
from tandem.config.schema import JudgeConfig as Settings
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.judge import JudgeEnvironment, JudgementError
from tests.harness.judge_endpoint import JudgeEndpoint, judge_endpoint

SUM = Problem(problem_id="1", question="2 + 3", answer="5", metadata={"level": "easy"})


@pytest.fixture
def endpoint() -> Iterator[JudgeEndpoint]:
    with judge_endpoint() as endpoint:
        yield endpoint


def judge(endpoint: JudgeEndpoint, **settings: Any) -> JudgeEnvironment:
    return JudgeEnvironment("mine", Settings(base_url=endpoint.url, model="grader", **settings), None)


def scores(judge: JudgeEnvironment, *responses: str) -> list[Any]:
    """Return what comes of responses that are judged at once."""

    async def ask() -> list[Any]:
        try:
            return await asyncio.gather(*(judge.score(SUM, each) for each in responses), return_exceptions=True)
        finally:  # a worker process does neither: it ends
            await judge._client.close()
            if judge._cache is not None:
                judge._cache._file.close()

    return asyncio.run(ask())


def test_a_grade_is_a_reward_and_what_it_cost_is_said(endpoint: JudgeEndpoint) -> None:
    prices = {"dollars_per_million_prompt_tokens": 2.0, "dollars_per_million_completion_tokens": 10.0}
    spent = {
        "judge_requests": 1.0,
        "judge_prompt_tokens": 100.0,
        "judge_completion_tokens": 20.0,
        "judge_dollars": pytest.approx(0.0004),
    }
    assert scores(judge(endpoint, **prices), "it is 5", "no idea", "42") == [
        Score(0.5, correct=False, spent=spent),
        Score(0.0, correct=False, spent=spent),
        Score(1.0, correct=True, spent=spent),
    ]


def test_what_it_is_asked_is_what_was_configured(endpoint: JudgeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "a secret")
    prompt = "{level}: {question} = {answer}?\nResponse to grade:\n{response}\n\nHow good"
    settings = {"system_prompt": "Be strict.", "prompt": prompt, "api_key_env": "THE_KEY", "extra_body": {"top_k": 1}}
    scores(judge(endpoint, **settings, temperature=0.5, max_tokens=7), "{level} 5")
    said = "easy: 2 + 3 = 5?\nResponse to grade:\n{level} 5\n\nHow good"
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": said}]
    expected = {"model": "grader", "messages": messages, "temperature": 0.5, "max_tokens": 7, "top_k": 1}
    assert endpoint.asked == [expected]
    assert endpoint.keys == {"Bearer a secret"}
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(ConfigError, match=re.escape("env.mine.judge.api_key_env: THE_KEY is not set")):
        judge(endpoint, api_key_env="THE_KEY")


@pytest.mark.parametrize(
    ("said", "reward"), [("score: 3. No, Score: 7.5", 0.75), ("**Score:** 12", 1.0), ("SCORE -4", 0.0)]
)
def test_the_last_score_counts_within_its_bounds(endpoint: JudgeEndpoint, said: str, reward: float) -> None:
    endpoint.trouble.append(said)
    assert scores(judge(endpoint), "5")[0].reward == reward


def test_an_answer_without_a_score_is_a_failure_that_quotes_it(endpoint: JudgeEndpoint) -> None:
    endpoint.trouble.append("I would rather not say.")
    [failure] = scores(judge(endpoint), "5")
    assert isinstance(failure, JudgementError)
    assert str(failure) == (
        "the judge says 'I would rather not say.', where env.mine.judge.score_pattern finds no number"
    )


def test_a_busy_slow_or_broken_endpoint_is_asked_again(endpoint: JudgeEndpoint) -> None:
    endpoint.trouble.extend([429, 500, 30.0])
    assert scores(judge(endpoint, timeout_s=3.0), "5")[0].reward == 0.5
    assert len(endpoint.asked) == 4
    endpoint.trouble.extend([503, 503])
    [failure] = scores(judge(endpoint, max_retries=1), "5")
    assert isinstance(failure, openai.InternalServerError)
    endpoint.trouble.append(404)  # what is wrong stays so
    assert isinstance(scores(judge(endpoint), "5")[0], openai.NotFoundError)
    assert len(endpoint.asked) == 7


def test_a_judgement_is_asked_for_once(endpoint: JudgeEndpoint, tmp_path: Path) -> None:
    """Whoever asks for what is on its way waits for it; another process, and another run, find it in the file."""
    cache = str(tmp_path / "judgements.sqlite")
    endpoint.trouble.append("no grade")  # which is not kept
    first = scores(judge(endpoint, cache=cache), "5", "5", "5")
    assert [type(each) for each in first] == [JudgementError] * 3
    second = scores(judge(endpoint, cache=cache), "5", "5", "42")
    assert [(each.reward, each.spent["judge_requests"]) for each in second] == [(0.5, 1.0), (0.5, 0.0), (1.0, 1.0)]
    assert second[1].spent == {"judge_requests": 0.0, "judge_cached": 1.0}
    third = scores(judge(endpoint, cache=cache), "5", "42")
    assert [each.spent["judge_requests"] for each in third] == [0.0, 0.0]
    assert scores(judge(endpoint, cache=cache, max_tokens=5), "5")[0].spent["judge_requests"] == 1.0
    assert len(endpoint.asked) == 4, "no grade, 5, 42, and 5 with fewer tokens"
    (tmp_path / "text").write_text("this is no database, however long one looks at it\n" * 100)
    with pytest.raises(ConfigError, match=r"env\.mine\.judge\.cache: cannot open .*: file is not a database"):
        judge(endpoint, cache=str(tmp_path / "text"))


def test_what_is_known_of_a_judgement_is_text() -> None:
    """The longest that it takes: every request, and every pause that an endpoint may ask for."""
    assert Settings(timeout_s=10.0, max_retries=2).longest_s == 150.0
    assert msgspec.json.decode(msgspec.json.encode(Settings()), type=Settings) == Settings()
