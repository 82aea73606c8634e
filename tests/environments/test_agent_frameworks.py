"""Agents written with OpenAI's Agents SDK 0.24 and with Pydantic AI 2.68, unchanged, as players of episodes.

Both ask for `/v1/responses`. `tox -e families` installs them apart; `TANDEM_AGENTS` names the interpreter there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.rollout.environments import Score
from tests.harness.runs.pages_harness import ROOT, code_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from agents_harness import assert_probable  # type: ignore[import-not-found]
from rollout_harness import Rollout  # type: ignore[import-not-found]
from tools_harness import CALL, episode, spoken  # type: ignore[import-not-found]

PYTHON = os.environ.get("TANDEM_AGENTS", "")
pytestmark = pytest.mark.skipif(not Path(PYTHON).is_file(), reason="the frameworks are not installed: tox -e families")
WAIT_S = 300.0
AGENTS_SDK = """
import asyncio, json, sys
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def calc(a: int, b: int) -> int:
    "Work out a product."
    return a * b


agent = Agent(name="calculator", instructions="1: " if TOOLS else None, tools=[calc] if TOOLS else [], model="policy")


async def play(question):
    if not STREAMS:
        return (await Runner.run(agent, question)).final_output
    result = Runner.run_streamed(agent, question)
    async for event in result.stream_events():
        pass
    return result.final_output


answer = asyncio.run(play(json.load(sys.stdin)["problem"]["question"]))
print(json.dumps({"reward": float(answer == "36")}))
"""
PYDANTIC_AI = """
import asyncio, json, sys
from pydantic_ai import Agent

agent = Agent("openai-responses:policy", instructions="1: " if TOOLS else None)
if TOOLS:

    @agent.tool_plain
    def calc(a: int, b: int) -> int:
        "Work out a product."
        return a * b


async def play(question):
    async def read(context, events):
        async for event in events:
            pass

    return (await agent.run(question, event_stream_handler=read if STREAMS else None)).output


answer = asyncio.run(play(json.load(sys.stdin)["problem"]["question"]))
print(json.dumps({"reward": float(answer == "36")}))
"""
PROGRAMS = {"agents-sdk": AGENTS_SDK, "pydantic-ai": PYDANTIC_AI}
programs = pytest.mark.parametrize("name", PROGRAMS)
streams = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])


def write_program(name: str, *, is_streamed: bool, has_tools: bool) -> str:
    """Write a program to the working directory; return its path. One of them is that of the documentation."""
    source = f"STREAMS, TOOLS = {is_streamed}, {has_tools}\n{PROGRAMS[name]}"
    if name == "agents-sdk" and has_tools and not is_streamed:
        page = (ROOT / "docs" / "agents.md").read_text()
        (source,) = [code for code in code_of(page, "python") if "from agents import" in code]
    Path("play.py").write_text(source)
    return str(Path("play.py").absolute())


@programs
@streams
def test_an_agent_calls_a_tool_and_its_episode_is_one_branch_of_the_sampled_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_streamed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    program = write_program(name, is_streamed=is_streamed, has_tools=True)
    responses = [spoken(f"Let me see.\n{CALL}\n{CALL}"), spoken("36")]
    with episode(tmp_path, monkeypatch, *responses) as (made, played, policy):
        play = subprocess.run(
            [PYTHON, program],
            input=json.dumps({"problem": {"question": "12 * 3", "answer": "36"}}),
            env={**os.environ, "OPENAI_BASE_URL": str(made.base_url), "OPENAI_API_KEY": "x", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert play.returncode == 0, play.stderr
        assert json.loads(play.stdout.splitlines()[-1]) == {"reward": 1.0}
        first, second = policy.prompts
        assert second[: len(first) + len(responses[0])] == [*first, *responses[0]]
        shown = played.tokenizer.decode(second, skip_special_tokens=False)
        assert '"name": "calc"' in shown
        assert "<tool_response>\n36\n</tool_response>\n<tool_response>\n36\n</tool_response>" in shown
        scored, arrays = played.session.finish(Score(1.0, correct=True), version=0)
        (branch,) = scored.branches
        assert branch.num_made == sum(map(len, responses))
        assert arrays.token_ids_T.tolist() == [*second, *responses[1]]


@programs
@streams
def test_a_rollout_plays_episodes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_streamed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    program = write_program(name, is_streamed=is_streamed, has_tools=False)
    rollout: Any = Rollout(tmp_path, None, timeout_s=WAIT_S, command=[PYTHON, program], on_error="zero")
    try:
        samples = rollout.run(rollout.group(0, [7, 8]))
        assert len(samples) == 2
        for scored, arrays in samples.values():
            # The Agents SDK raises where a response is cut off, as it does with OpenAI's own.
            is_refused = name == "agents-sdk" and scored.finish_reason == "length"
            assert bool(scored.failure) == is_refused, scored.failure
            assert "max_output_tokens" in scored.failure or not is_refused
            assert scored.num_turns == 1
            assert arrays.loss_mask_T.sum() == scored.response_length > 0
            assert_probable(arrays, {0: rollout.model})
    finally:
        rollout.service.close()
