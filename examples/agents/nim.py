"""Two players take stones from a pile in turn, one to three; the last stone wins. The policy plays both players.

Tandem starts this program once and writes a line of JSON for each episode (`persistent: true`). Each move is a chat of
its own, which says how many stones are left, and names the player that is asked as its model. To validate, the policy
plays first and second by turns against the first version of itself, which this program loads; and so it does in one
training episode of four, against an earlier checkpoint.
"""

import asyncio
import functools
import json
import random
import sys
from contextlib import suppress
from pathlib import Path

import torch
from openai import AsyncOpenAI, OpenAIError
from transformers import AutoModelForCausalLM, AutoTokenizer

PLAYERS = ("first", "second")
FIRST_VERSION, CHECKPOINTS, SAVE_PERIOD = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
client = AsyncOpenAI(base_url="http://unknown", api_key="unknown")
torch.set_num_threads(1)


class Version:
    """A frozen version of the policy, which draws moves as the policy does."""

    def __init__(self, folder):
        """Load it."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.shares = {}

    def move(self, pile, draws):
        """Draw the text of a move, of at most two tokens, as many as the policy may draw."""
        chat, token_ids = [{"role": "user", "content": str(pile)}], ()
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        while len(token_ids) < 2 and self.tokenizer.eos_token_id not in token_ids:
            if (pile, token_ids) not in self.shares:
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*prompt, *token_ids]])).logits[0, -1]
                self.shares[pile, token_ids] = logits.softmax(-1).tolist()
            shares = self.shares[pile, token_ids]
            token_ids += (draws.choices(range(len(shares)), shares)[0],)
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


version_of = functools.cache(Version)


def choose_opponent(order, draws):
    """Return the player that an earlier version is, and that version; None where the policy plays both.

    A checkpoint of a step is there for certain once the next one is due. So the choice depends on nothing but the seed
    and the step, and a resumed run chooses the same.
    """
    if order["purpose"] == "validate":
        return PLAYERS[order["seed"] % 2], version_of(FIRST_VERSION)
    if draws.random() < 0.75:
        return None, None
    steps = range(SAVE_PERIOD, order["step"] - SAVE_PERIOD, SAVE_PERIOD)
    folder = draws.choice([FIRST_VERSION, *(CHECKPOINTS / f"step_{step}" / "policy" for step in steps)])
    return draws.choice(PLAYERS), version_of(folder)


async def play(order):
    """Play one episode."""
    policy = client.with_options(base_url=order["base_url"], api_key=order["api_key"])
    draws = random.Random(order["seed"])
    other, opponent = choose_opponent(order, draws)
    pile, turn = int(order["problem"]["question"]), 0
    while True:
        player = PLAYERS[turn % 2]
        if player == other:
            move = opponent.move(pile, draws)
        else:
            chat = [{"role": "user", "content": str(pile)}]
            answer = await policy.chat.completions.create(model=order["roles"][player], messages=chat)
            move = answer.choices[0].message.content
        is_legal = move in ("1", "2", "3") and int(move) <= pile
        pile -= int(move) if is_legal else 0
        if not is_legal or pile == 0:
            winner = player if is_legal else PLAYERS[1 - turn % 2]
            break
        turn += 1
    rewards = {each: float(each == winner) for each in PLAYERS}
    mine = next(each for each in PLAYERS if each != other)
    body = {"rewards": rewards, "reward": rewards[mine], "correct": winner == mine}
    await policy.post(f"{order['session_url']}/reward", body=body, cast_to=object)


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
