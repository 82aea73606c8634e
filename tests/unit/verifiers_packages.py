"""Packages of verifiers' environments for tests, as somebody else would write them: files in the working directory."""

from __future__ import annotations

import asyncio
from typing import Any

SUMS = '''
"""A taskset with rewards, a metric, a judge that can be plugged, and tasks for validation."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> float:
        reply = trace.last_reply
        return sum(map(str.isdigit, reply)) / max(1, len(reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Config(vf.TasksetConfig):
    first: int = 0
    num: int = 20


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for number in range(self.config.first, self.config.first + self.config.num):
            yield Sum(Data(prompt=f"{number}", answer=str(number % 7)), self.config.task)
'''

ENDLESS = '''
"""A taskset without end, whose prompts are messages, with a conversation of several turns."""

import itertools

import verifiers.v1 as vf

__all__ = ["Endless", "Turns"]


class Data(vf.TaskData):
    start: int


class Counting(vf.Task[Data]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Endless(vf.Taskset[Counting, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield Counting(Data(start=number, prompt=[vf.UserMessage(content=f"{number}")]))


class TurnsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    num_turns: int = 3


class Turns(vf.Env[TurnsConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as conversation:
            segment = await conversation.turn()
            for number in range(self.config.num_turns - 1):
                if segment.terminated:
                    break
                segment = await conversation.turn(f"{number}")
'''

TOOLS = '''
"""A taskset with a tool server that all episodes share, which an episode calls in place of the policy."""

import os
from contextlib import AsyncExitStack
from pathlib import Path

import openai
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["Caller", "Tools"]


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, x: int, y: int) -> int:
        """Add two numbers."""
        Path(os.environ["TOOL_PID"]).write_text(str(os.getpid()))
        return x + y


class Adding(vf.Task[vf.TaskData]):
    @vf.reward
    async def total(self, trace: vf.Trace) -> float:
        return float(trace.info["total"])


class Config(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Tools(vf.Taskset[Adding, Config]):
    def load(self):
        for number in range(8):
            yield Adding(vf.TaskData(prompt=f"{number}"))

    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]


class CallerConfig(vf.HarnessConfig):
    pass


class Caller(vf.Harness[CallerConfig]):
    """Asks the policy once, and calls the tool: a policy of a few characters cannot."""

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, places, clients = await connect_mcp({"mcpServers": servers}, stack)
            (name,) = places
            trace.info["total"] = int(await call_mcp(clients, places, name, {"x": 20, "y": 3}))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    Adder.run()
'''

JUDGE = '''
"""A judge that values digits in its own answer to a reply."""

import verifiers.v1 as vf

__all__ = ["Digits"]


class Digits(vf.Judge[float]):
    prompt = "0: {response}"

    def parse(self, response):
        return sum(map(str.isdigit, response.text)) / 8

    async def score(self, task, trace):
        return (await self.evaluate(trace=trace, response=trace.last_reply)).parsed
'''

LIES = '''
"""A taskset whose rewards are what a task names: some are no numbers."""

import os

import verifiers.v1 as vf

__all__ = ["Lies"]

REWARDS = {"nan": float("nan"), "huge": 1e300, "text": "much", "honest": 0.5, "prints": 0.5}


class Data(vf.TaskData):
    kind: str


class Lie(vf.Task[Data]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        if self.data.kind == "prints":
            for _ in range(1600):
                os.write(2, b"x" * (1 << 16))
        if self.data.kind == "raises":
            raise RuntimeError("wrong " * 100_000)
        return REWARDS[self.data.kind]


class Lies(vf.Taskset[Lie, vf.TasksetConfig]):
    def load(self):
        for kind in ("nan", "huge", "text", "raises", "prints", "honest"):
            yield Lie(Data(prompt="0", kind=kind))
'''


def score_reply(task: Any, prompt: str, reply: str) -> Any:
    """Return the trace of a conversation of one reply, scored by the package alone. Raises its own error."""
    import verifiers.v1 as vf

    messages = [vf.UserMessage(content=prompt), vf.AssistantMessage(content=reply)]
    nodes = [
        vf.MessageNode(message=message, parent=index - 1 if index else None, sampled=bool(index))
        for index, message in enumerate(messages)
    ]
    agent = vf.AgentInfo(config=vf.AgentConfig())
    trace = vf.Trace(task=vf.TraceTask(type=type(task).__name__, data=task.data), nodes=nodes, agent=agent)
    asyncio.run(task.score(trace))
    return trace
