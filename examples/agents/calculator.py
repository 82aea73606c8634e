"""An agent that works out products with a calculator, written with the `openai` client and nothing of Tandem's.

Tandem starts it once and writes a line of JSON for each episode (`persistent: true`). It asks the policy, computes what
that wants computed, asks again with the result, and posts a reward. An answer that is neither a number nor a call of
the calculator is asked for a second time: both count in training, each on a branch of its own.
"""

import asyncio
import json
import re
import sys
from contextlib import suppress

from openai import AsyncOpenAI, OpenAIError

CALL = re.compile(r"calc\((\d{1,6}) \* (\d{1,6})\)")
client = AsyncOpenAI(base_url="http://unknown", api_key="unknown")


async def play(order):
    """Play one episode."""
    policy = client.with_options(base_url=order["base_url"], api_key=order["api_key"])

    async def ask(messages):
        answer = await policy.chat.completions.create(model=order["model"], messages=messages)
        return answer.choices[0].message.content

    problem = order["problem"]
    question = [{"role": "user", "content": problem["metadata"]["expression"]}]
    said = await ask(question)
    if not CALL.search(said) and not said.strip().isdigit():
        said = await ask(question)
    if call := CALL.search(said):
        result = {"role": "user", "content": str(int(call[1]) * int(call[2]))}
        said = await ask([*question, {"role": "assistant", "content": said}, result])
    correct = said.strip() == problem["answer"]
    reward = {"reward": float(correct), "correct": correct, "components": {"called": float(bool(call))}}
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
