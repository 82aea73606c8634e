"""Built-in environments of several turns: a calculator for the policy, and the sliding puzzle."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tandem.common.messages import Problem
from tandem.rollout.environments.answers import answer_in, reference
from tandem.rollout.environments.environment import Score, Turn
from tandem.samples.chat_templates import Messages
from tandem.samples.data_sets.sliding_puzzle import MOVES, Board, make_solved, render, slide

_CALL = re.compile(r"calc\((.*)\)")
_EXPRESSION = re.compile(r"[\d+\-*/(). ]{1,100}")
_NUMBER = re.compile(r"[+-]?\d{1,100}(\.\d{1,100})?")
"""Bounded, so that no response keeps the calculator busy."""
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ACTION = re.compile(r"<action>([^<]*)</action>", re.IGNORECASE)


class SlidingPuzzle:
    """A reward of one for solving the board, zero before; every other move is answered with the board.

    A move is ``up``, ``down``, ``left`` or ``right``, or the first letter. It stands in the last
    ``<action>...</action>``, or else is the whole response. A response that is no move, or one that no tile can make,
    leaves the board as it is.
    """

    runs_in = "threads"

    def __init__(self, *, cfg: dict[str, Any] | None = None, role: str = "user") -> None:
        """Take `cfg` as NeMo-RL has it; ``max_moves`` responses end a game. Messages with the board have this
        `role`."""
        settings = {"max_moves": None, "game_config": {}} | (cfg or {})
        unknown = sorted(set(settings) - {"max_moves", "game_config"})
        if unknown:
            raise ValueError(f"cfg has no {unknown[0]!r}, only max_moves and game_config")
        self._max_moves = settings["max_moves"]
        self._role = role

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        """Make the last move of the conversation, on the board that the earlier ones lead to."""
        size = int(problem.metadata["size"])
        board: Board = tuple(problem.metadata["board"])
        responses = [message["content"] for message in conversation if message["role"] == "assistant"]
        for response in responses:
            move = _move(response)
            board = (slide(board, size, move) if move else None) or board
        if board == make_solved(size):
            return Score(1.0, correct=True)
        if self._max_moves is not None and len(responses) >= self._max_moves:
            return Score(0.0, correct=False)
        return Turn([{"role": self._role, "content": render(board, size)}])


def _move(response: str) -> str | None:
    actions = _ACTION.findall(response)
    action = (actions[-1] if actions else response).strip().lower()
    return next((move for move in MOVES if action in (move, move[0])), None)


class Calculator:
    """An environment that answers calls of the calculator with the result; any other response is the final answer."""

    runs_in = "threads"

    def __init__(self, *, answer_after: str | None = None, role: str = "user") -> None:
        """Take the answer after the last occurrence of `answer_after`; results come from a user with this `role`."""
        self._answer_after = answer_after
        self._role = role

    def step(self, problem: Problem, conversation: Messages) -> Score | Turn:
        """Calculate, or compare the answer with the reference by value."""
        response = conversation[-1]["content"]
        call = _CALL.search(response)
        if call is not None:
            return Turn([{"role": self._role, "content": calculate(call[1])}])
        answer, expected = answer_in(response, self._answer_after), reference(problem)
        value = _number(answer)
        correct = answer == expected or (value is not None and value == _number(expected))
        return Score(float(correct), correct=correct, answer=(answer if value is None else str(value)) or None)


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, ``+ - * /`` and parentheses; ``error`` if it has none."""
    try:
        if not _EXPRESSION.fullmatch(expression):
            return "error"
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.10g}"
    except (SyntaxError, ValueError, ArithmeticError):
        return "error"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=lhs, op=op, right=rhs) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(lhs), _value(rhs))
        case _:
            raise ValueError("not arithmetic")


def _number(text: str) -> Fraction | None:
    return Fraction(text) if _NUMBER.fullmatch(text) else None
