"""An agent that gives the policy a tool, written with the `openai` client and nothing of Tandem's.

Tandem starts it once and writes a line of JSON for each episode (`persistent: true`). The policy is asked, what it
calls is carried out, and it is asked again with the results, until it calls nothing: that is its answer.
"""

import asyncio
import json
import re
import sys
from contextlib import suppress

from openai import AsyncOpenAI, OpenAIError

MOST_TURNS = 3
PRODUCT = re.compile(r"(\d{1,6}) \* (\d{1,6})")
CALC = {
    "name": "calc",
    "description": "Work out a product such as 12 * 3.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}
client = AsyncOpenAI(base_url="http://unknown", api_key="unknown")


def carried_out(function):
    """Return what a call comes to; nothing, where it is not as the tool wants it."""
    product = PRODUCT.fullmatch(str(json.loads(function.arguments).get("x")))
    return str(int(product[1]) * int(product[2])) if product and function.name == CALC["name"] else ""


async def play(order):
    """Play one episode."""
    policy = client.with_options(base_url=order["base_url"], api_key=order["api_key"])
    problem = order["problem"]
    messages = [{"role": "user", "content": problem["metadata"]["expression"]}]
    tools = [{"type": "function", "function": CALC}]
    has_called = False
    for _ in range(MOST_TURNS):
        answer = await policy.chat.completions.create(model=order["model"], messages=messages, tools=tools)
        said = answer.choices[0].message
        if not said.tool_calls:
            break
        has_called = True
        messages.append(said)
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": carried_out(call.function)})
    correct = (said.content or "").strip() == problem["answer"]
    reward = {"reward": float(correct), "correct": correct, "components": {"called": float(has_called)}}
    await policy.post(f"{order['session_url']}/reward", body=reward, cast_to=object)


async def play_or_say_why_not(order):
    """Play one episode; where that cannot be done, say so, and the run need not wait."""
    try:
        await play(order)
    except OpenAIError as error:
        print(f"{order['problem']['problem_id']}: {error}", file=sys.stderr)
        with suppress(OpenAIError):  # it may be over, or have been given up
            await client.post(f"{order['session_url']}/error", body={"error": str(error)}, cast_to=object)


async def main():
    """Play all that there is to play, at once."""
    async with asyncio.TaskGroup() as playing:
        while line := await asyncio.to_thread(sys.stdin.readline):
            playing.create_task(play_or_say_why_not(json.loads(line)))


asyncio.run(main())
