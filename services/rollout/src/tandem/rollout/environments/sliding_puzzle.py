"""Play the sliding puzzle, one move a response."""

from __future__ import annotations

import re
from typing import Any

from tandem.common.messages import Problem
from tandem.rollout.environments.environment import Score, Turn
from tandem.samples.chat_templates import Messages
from tandem.samples.data_sets.sliding_puzzle import MOVES, Board, make_solved, render, slide

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
