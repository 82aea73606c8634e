"""A `verifiers` environment (0.4: a Task, a Harness) as an agent: products, worked out with a calculator.

Tandem starts it once and writes a line of JSON for each episode (`persistent: true`). The environment is played as
`verifiers` plays it, against the endpoint of the episode, and its reward is posted.
"""

import asyncio
import json
import re
import sys

import httpx
import openai
import verifiers.v1 as vf

__all__ = ["Calculator", "Products"]
CALL = re.compile(r"calc\((\d{1,6}) \* (\d{1,6})\)")
client = openai.AsyncOpenAI(base_url="http://unknown", api_key="unknown")
"""Connections that all episodes share: each by itself would take longer to begin than to play."""


class Data(vf.TaskData):
    """A product, and what it is."""

    answer: str


class Products(vf.Task[Data]):
    """Work out a product."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Check that the last reply is the answer."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def called(self, trace: vf.Trace) -> float:
        """Check that the calculator was called."""
        return float(trace.num_turns > 1)


class Calculator(vf.Harness[vf.HarnessConfig]):
    """Answers a call of the calculator with what it says, and lets the policy go on."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        """Play in this process: there is nothing to keep apart."""
        messages = [{"role": "user", "content": self.resolve_text_prompt(data)[1]}]
        policy = client.with_options(base_url=endpoint, api_key=secret)
        for _ in range(2):
            answer = await policy.chat.completions.create(model=ctx.model, messages=messages)
            said = answer.choices[0].message.content
            if not (call := CALL.search(said)):
                break
            result = {"role": "user", "content": str(int(call[1]) * int(call[2]))}
            messages += [{"role": "assistant", "content": said}, result]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def play(order, posting):
    """Play one episode."""
    problem = order["problem"]
    config = vf.AgentConfig(
        model=order["model"],
        client=vf.EvalClientConfig(base_url=order["base_url"], api_key_var="OPENAI_API_KEY"),
        harness=vf.HarnessConfig(id="verifiers_products"),
        runtime=vf.SubprocessConfig(),
    )
    data = Data(prompt=problem["metadata"]["expression"], answer=problem["answer"])
    trace = await vf.Agent(config).run(Products(data))
    if not trace.ok:
        await posting.post(f"{order['session_url']}/error", content=str(trace.errors[-1:]))
        return
    components = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    reward = {"reward": trace.reward, "components": {**components, **trace.metrics}}
    (await posting.post(f"{order['session_url']}/reward", json=reward)).raise_for_status()


async def main():
    """Play all that there is to play, at once."""
    async with httpx.AsyncClient(timeout=60) as posting, asyncio.TaskGroup() as playing:
        while line := await asyncio.to_thread(sys.stdin.readline):
            playing.create_task(play(json.loads(line), posting))


if __name__ == "__main__":
    asyncio.run(main())
