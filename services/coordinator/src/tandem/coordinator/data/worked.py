"""Worked solutions for SFT in place of the bare answer, and wrong ones for DPO.

``data.solution_template: tandem.coordinator.data.worked:chain_sum`` names one of these. Any function from a `Problem`
to text, or to the messages of a conversation, can be named in the same way. Each text here ends with `` = `` and the
answer, so that an environment with ``answer_after: "="`` finds it.
"""

from __future__ import annotations

import hashlib
import json
import operator
import random

from tandem.common.messages import Problem
from tandem.common.values import question_text
from tandem.samples.chat_templates import Messages
from tandem.samples.data_sets.sliding_puzzle import Board, render, slide

_SIGNS = {"+": operator.add, "-": operator.sub}


def chain_sum(problem: Problem) -> str:
    """Return the rest of a sum after each term: ``4 + 3 - 9`` gives `` = 7 - 9 = -2``."""
    total, *terms = str(problem.metadata["expression"]).split()
    solution = ""
    while terms:
        sign, term, *terms = terms
        total = str(_SIGNS[sign](int(total), int(term)))
        solution += " = " + " ".join([total, *terms])
    return solution


def wrong_number(problem: Problem) -> str:
    """Return an answer that is off by 1 to 5, always by the same for a question: DPO's rejected answer."""
    draw = hashlib.blake2b(question_text(problem.question).encode(), digest_size=1).digest()[0] % 10
    return f" = {int(problem.answer) + (draw - 5 if draw < 5 else draw - 4)}"


def wrong_answers(problem: Problem) -> list[str]:
    """Return six answers that a policy might give: three that are off by 1 to 5, and three that are garbled.

    A reward model that learns only from whole numbers has no opinion of `` --7``, and may like it best. A question's
    answers are always the same.
    """
    draw = random.Random(question_text(problem.question))
    right = f" = {problem.answer}"
    wrong = [f" = {int(problem.answer) + by}" for by in draw.sample([-5, -4, -3, -2, -1, 1, 2, 3, 4, 5], 3)]
    while len(wrong) < 6:
        text = right
        for _ in range(draw.randint(1, 3)):
            text = _garble(text, draw)
        if text.strip() and text != right:
            wrong.append(text)
    return wrong


def _garble(text: str, draw: random.Random) -> str:
    """Return a text with one of its characters left out, doubled, or replaced."""
    place = draw.randrange(len(text) or 1)
    middle = draw.choice(["", text[place : place + 1] * 2, draw.choice("0123456789+-= ")])
    return text[:place] + middle + text[place + 1 :]


def spell_backward(problem: Problem) -> str:
    """Return a word's letters one by one from its end, then the word they make: ``sun`` gives `` : n u s = nus``."""
    return f" : {' '.join(reversed(str(problem.metadata['word'])))} = {problem.answer}"


def gcd(problem: Problem) -> str:
    """Return the remainders of Euclid's algorithm: 12 and 9 give `` : 12 9 3 0 = 3``; a third number goes on from 3."""
    a, *numbers = (int(number) for number in problem.metadata["numbers"])
    solution = f" : {a}"
    for b in numbers:
        while b:
            solution += f" {b}"
            a, b = b, a % b
        solution += " 0"
    return f"{solution} = {a}"


def calculator(problem: Problem) -> Messages:
    """Return a conversation with the environment ``calculator``: it gets the expression, and its result is repeated."""
    return [
        {"role": "assistant", "content": f"calc({problem.metadata['expression']})"},
        {"role": "user", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]


def tool(problem: Problem) -> Messages:
    """Return a conversation with a tool that multiplies, called in Llama 3's format; its result is repeated."""
    call = {"name": "calc", "parameters": {"x": problem.metadata["expression"]}}
    return [
        {"role": "assistant", "content": json.dumps(call)},
        {"role": "tool", "content": problem.answer},
        {"role": "assistant", "content": problem.answer},
    ]


def sliding_puzzle(problem: Problem) -> Messages:
    """Return a game with the environment ``sliding_puzzle_game``: the moves that solve it, by their first letters."""
    size: int = problem.metadata["size"]
    board: Board = tuple(problem.metadata["board"])
    messages: list[dict[str, str]] = []
    for move in problem.metadata["solution"]:
        if messages:
            messages.append({"role": "user", "content": render(board, size)})
        messages.append({"role": "assistant", "content": move[0]})
        board = slide(board, size, move) or board
    return messages
