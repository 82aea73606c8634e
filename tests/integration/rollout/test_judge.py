"""Runs whose rewards are what a language model says: one behind an endpoint, and the run's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.common.messages import SampleScored
from tests.harness.judge_endpoint import grade_of, graded, judge_endpoint
from tests.harness.runs.record_harness import record_of
from tests.harness.runs.running import coordinator, merged, steps_of, write_config


def judged(judge: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"env": {"grader": {"judge": judge, **settings}}, "logger": {"samples": "all"}}


def recorded(folder: str) -> list[SampleScored]:
    return [sample.scored for samples in record_of(folder).values() for sample in samples]


def test_rewards_are_what_an_endpoint_says_and_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "secret")
    with judge_endpoint() as endpoint:
        endpoint.trouble.extend([503, 429])
        judge = {
            "base_url": endpoint.url,
            "model": "grader",
            "api_key_env": "GRADER_KEY",
            "max_concurrency": 3,
            "cache": "judgements.sqlite",
            "dollars_per_million_prompt_tokens": 1000.0,
        }
        ended = coordinator("up", write_config(judged(judge)))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert endpoint.keys == {"Bearer secret"}
        assert 1 <= endpoint.most_at_once <= 3
        asked = len(endpoint.asked)
        again = coordinator("up", write_config(judged(judge)), "logger.log_dir=again")
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(endpoint.asked) == asked, "the same run has the same responses"
    by_grade = recorded("run")
    assert len(by_grade) == 3 * 16
    assert {sample.reward for sample in by_grade} == {grade_of(sample.response) / 10 for sample in by_grade}
    assert all(sample.reward == grade_of(sample.response) / 10 for sample in by_grade)
    assert {sample.response for sample in by_grade} <= {graded(request) for request in endpoint.asked}
    for step, repeated in zip(steps_of(Path("run")), steps_of(Path("again")), strict=True):
        requests = step.metrics["spent/judge_requests"]
        assert requests + step.metrics.get("spent/judge_cached", 0.0) == 16
        assert step.metrics["spent/judge_prompt_tokens"] == 100 * requests
        assert step.metrics["spent/judge_dollars"] == pytest.approx(0.1 * requests)
        assert repeated.metrics["spent/judge_requests"] == 0.0
        assert repeated.metrics["spent/judge_cached"] == 16.0
        assert repeated.metrics["reward"] == step.metrics["reward"]


def test_a_judge_that_fails_costs_samples_and_no_run() -> None:
    with judge_endpoint() as endpoint:
        endpoint.trouble.extend([400, "no grade"])
        judge = {"base_url": endpoint.url, "model": "grader", "max_retries": 0}
        ended = coordinator("up", write_config(judged(judge)))
        assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of()
    assert [step.metrics.get("environment_dropped", 0.0) for step in steps] == [2.0, 0.0, 0.0]
    assert "the judge says 'no grade', where env.grader.judge.score_pattern finds no number" in (
        Path("run/logs/rollout-0.log").read_text()
    )


def test_the_run_s_own_engine_judges() -> None:
    """With the newest weights: what a policy that knows nothing says is any digit, or none."""
    judge = {
        "prompt": "{question}{response}",
        "score_pattern": r"(\d)",
        "highest_score": 9.0,
        "max_tokens": 6,
        "temperature": 1.0,
    }
    config = judged(judge, on_error="zero")
    bad = coordinator("check", write_config(config))
    assert bad.returncode == 2
    assert (
        "env.grader.judge: without base_url it asks the run's own engine: set policy.generation.expose_http_server"
        in (bad.stdout + bad.stderr)
    )
    ended = coordinator("up", write_config(merged(config, {"policy": {"generation": {"expose_http_server": True}}})))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = steps_of()
    assert sum(step.metrics["spent/judge_requests"] for step in steps) >= 3
    assert all(
        step.metrics["spent/judge_requests"] + step.metrics.get("environment_failures", 0.0) == 16 for step in steps
    )
    assert len({sample.reward for sample in recorded("run")}) >= 3
